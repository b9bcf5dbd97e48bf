"""Contribution bounds, against a slow reference."""

from collections import Counter
from itertools import groupby

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from dpstream.group_by.bounding import FIRST, KEPT, StepRows, UnitBucket
from dpstream.group_by.hash_tables import SLICE, split
from dpstream.query.query import Bounds
from dpstream.rows.row_batch import Rows, in_order
from dpstream.rows.row_ids import multiset_digest

UNITS, GROUPS = 6, 5
WORDS = np.random.default_rng(0)
UNIT_IDS = WORDS.integers(0, 2**64, (64_000, 4, 2), np.uint64)  # a user in another period is new
GROUP_IDS = WORDS.integers(0, 2**64, (64_000, 2), np.uint64)

row = st.tuples(
    st.integers(0, 2),  # step
    st.integers(0, 2),  # window
    st.integers(0, 1),  # period
    st.integers(0, UNITS - 1),
    st.integers(0, GROUPS - 1),
    st.integers(0, 9),  # what it adds; its hash follows from all of this
)
limits = st.tuples(st.integers(1, 8), st.integers(1, 4), st.integers(1, 3))


def order_of(one):
    """A hash of the row's content: rows that are alike have the same."""
    return hash((17, *one[1:])) % 2**64


def slow(rows, bounds):
    """Kept rows, each with whether it is the first of its unit in its group."""
    used, groups, pairs = Counter(), Counter(), Counter()
    kept = Counter()
    for one in sorted(rows, key=lambda r: (r[0], r[1], r[2], order_of(r))):
        window, period, unit, group = one[1:5]
        who, pair = (period, unit), (period, unit, window, group)
        new = pairs[pair] == 0
        if used[who] >= bounds.rows or pairs[pair] >= bounds.rows_per_group:
            continue
        if new and groups[who] >= bounds.groups:
            continue
        used[who] += 1
        pairs[pair] += 1
        groups[who] += new
        kept[(*one, new)] += 1
    return kept


def fast(rows, bounds, *, by_value=True, buckets=1):
    """The same by the engine's buckets: steps in order, in each step windows and periods."""
    units = [UnitBucket(bounds=bounds) for _ in range(buckets)]
    kept = Counter()
    rows = sorted(rows, key=lambda r: r[:3])  # stable: within a run as they come
    for (_, window, period), run in groupby(rows, key=lambda r: r[:3]):
        found = list(run)
        ids = UNIT_IDS[[r[3] for r in found], period]
        groups = GROUP_IDS[[r[4] for r in found]]
        hashes = np.array([[order_of(r), 0] for r in found], np.uint64)
        keep_mask = np.zeros(len(found), np.uint8)
        order, ends = np.empty(len(found), np.int64), np.empty(buckets, np.int64)
        split(ids, np.ones(len(found), np.uint8), buckets, order, ends)
        for bucket, places in zip(units, np.split(order, ends[:-1]), strict=True):
            batch = (ids, groups, hashes)
            bucket.keep(window, period, batch, places, keep_mask, by_value=by_value)
        for one, verdict in zip(found, keep_mask.tolist(), strict=True):
            if verdict:
                assert verdict & KEPT
                kept[(*one, bool(verdict & FIRST))] += 1
    return kept


def counted(kept):
    """What counts of rows where values do not: per step, window, unit and group."""
    found = Counter()
    for (*place, _, first), count in kept.items():
        found[tuple(place)] += count
        found[(*place, "first")] += count * first
    return +found


@given(st.lists(row, max_size=60), limits, st.sampled_from([1, 3]))
@examples(max_examples=250)
def test_kept_rows_are_those_of_the_definition(rows, limit, buckets):
    """For any bounds, over several steps, windows and periods, whatever the number of buckets."""
    bounds = Bounds(rows=limit[0], groups=limit[1], rows_per_group=limit[2])
    kept = slow(rows, bounds)

    assert fast(rows, bounds, buckets=buckets) == kept
    by_count = fast(rows, bounds, by_value=False, buckets=buckets)
    assert counted(by_count) == counted(kept)


@given(st.lists(row, max_size=50), limits, st.randoms(use_true_random=False))
@examples(max_examples=150)
def test_the_order_of_rows_does_not_matter(rows, limit, random):
    """The same rows are kept of a shuffled step, and the same numbers where values do not count."""
    bounds = Bounds(rows=limit[0], groups=limit[1], rows_per_group=limit[2])
    shuffled = list(rows)
    random.shuffle(shuffled)

    assert fast(shuffled, bounds) == fast(rows, bounds)
    one, two = (fast(some, bounds, by_value=False) for some in (rows, shuffled))
    assert counted(one) == counted(two)


@given(st.lists(row, max_size=60), limits)
@examples(max_examples=100)
def test_no_unit_affects_another(rows, limit):
    """What is kept of each unit is what would be kept of it alone."""
    bounds = Bounds(rows=limit[0], groups=limit[1], rows_per_group=limit[2])
    alone = Counter()
    for unit in range(UNITS):
        alone += fast([r for r in rows if r[3] == unit], bounds)
    assert fast(rows, bounds) == alone


@pytest.mark.parametrize("per_group", [1, 2])
@pytest.mark.parametrize("by_value", [False, True])
def test_large_steps(per_group, by_value):
    """More rows than one slice, tables that grow in the middle of a step, busy and rare units."""
    rng = np.random.default_rng(per_group)
    size = SLICE + 5000
    units = np.minimum(rng.zipf(1.3, size) - 1, 60_000)
    groups = np.minimum(rng.zipf(1.2, size) - 1, 60_000)
    rows = [
        (int(i >= size // 5), 0, 0, int(u), int(g), int(i) % 1000)
        for i, (u, g) in enumerate(zip(units, groups, strict=True))
    ]
    bounds = Bounds(rows=9, groups=6, rows_per_group=per_group)
    kept = slow(rows, bounds)

    assert counted(fast(rows, bounds, by_value=by_value, buckets=2)) == counted(kept)
    if by_value:
        assert fast(rows, bounds, by_value=True) == kept


def test_counters_say_what_was_kept():
    """Rows and groups of each unit, over all steps and windows."""
    bucket = UnitBucket(bounds=Bounds(rows=4, groups=2, rows_per_group=2))
    for step in range(3):
        ids, groups = UNIT_IDS[[0, 0, 1], 0], GROUP_IDS[[0, 0, 1]]
        batch = (ids, groups, np.zeros((3, 2), np.uint64))
        bucket.keep(step, 0, batch, np.arange(3), np.zeros(3, np.uint8), by_value=True)
    table = bucket.periods[0]
    assert table.numbers[: table.used].tolist() == [[4, 2], [2, 2]]


def test_a_unit_with_one_row_in_all_takes_no_place_of_its_group():
    """Its counter says all that is asked for: the table of units in groups stays empty."""
    bucket = UnitBucket(bounds=Bounds(rows=1, groups=1, rows_per_group=1))
    units, groups = UNIT_IDS[:100, 0], GROUP_IDS[:100]
    for step in range(2):
        keep_mask = np.zeros(100, np.uint8)
        batch, places = (units, groups, GROUP_IDS[:100]), np.arange(100)
        bucket.keep(0, 0, batch, places, keep_mask, by_value=False)
        assert (keep_mask == (KEPT | FIRST if step == 0 else 0)).all()

    assert bucket.periods[0].used == 100
    assert not bucket.windows


def batch_of(rows, places):
    """Rows as the engine has them, by window and period; the value of each is its place."""
    found = [rows[at] for at in places]
    return in_order(
        Rows(
            units=UNIT_IDS[[r[3] for r in found], [r[2] for r in found]],
            groups=GROUP_IDS[[r[4] for r in found]],
            digests=np.array([[order_of(r), 1] for r in found], np.uint64),
            windows=np.array([r[1] for r in found]),
            periods=np.array([r[2] for r in found]),
            steps=np.zeros(len(found), np.int64),
            values=np.array(places)[:, None],
            keys=pa.table({"page": [str(r[4]) for r in found]}),
        )
    )


@given(st.lists(row, min_size=1, max_size=80), limits, st.integers(1, 20))
@examples(max_examples=250)
def test_a_flood_of_rows_is_thinned_out_and_the_same_rows_are_kept(rows, limit, flood):
    """Memory goes with units and groups; the digest of the step is that of all rows."""
    rows = [(0, *one[1:]) for one in rows]
    bounds = Bounds(rows=limit[0], groups=limit[1], rows_per_group=limit[2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpstream.group_by.bounding.FLOOD", flood)
        held = StepRows(bounds.rows_per_group)
        for start in range(0, len(rows), 5):
            batch = batch_of(rows, range(start, min(start + 5, len(rows))))
            held.add([(batch, first, end) for *_, first, end in batch.runs])
            pairs = len({one[1:5] for one in rows})
            most = max(flood, 2 * pairs * bounds.rows_per_group)
            assert sum(end - first for _, first, end in held) <= most
    left = [rows[at] for part, first, end in held for at in part.values[first:end, 0].tolist()]

    assert slow(left, bounds) == slow(rows, bounds)
    assert held.digest() == multiset_digest(batch_of(rows, range(len(rows))).digests)
    for part, first, end in held:
        assert {rows[at][1:3] for at in part.values[first:end, 0].tolist()} == {
            (int(part.windows[first]), int(part.periods[first]))
        }
