"""Keys appear and stay; sums that have hardly moved may be left out."""

import numpy as np
import pyarrow as pa
import pytest

from dpstream.connectors.registry import open_source
from dpstream.engines.embedded.embedded_engine import LocalRun
from dpstream.engines.query_run import EngineOptions
from dpstream.errors import StateError
from dpstream.group_by.bounding import FIRST, KEPT
from dpstream.group_by.groups import GroupBucket
from dpstream.group_by.perturb import NoisySums, thin_out
from dpstream.query.aggregates import Count, Measure, Sum
from dpstream.query.query import Query

HOUR = 3600


def releases(table, **facts):
    common = {
        "privacy_unit_column": "user",
        "keys": ("key",),
        "time_column": "ts",
        "time_unit": "s",
        "start": "1970-01-01",
        "end": "1970-01-02",
        "every": "2 hours",
        "epsilon": 2,
        "delta": 1e-3,
        "max_groups_contributed": 1,
    }
    options = EngineOptions(buckets=2, threads=1, run_id=bytes(16))
    source = open_source(table)
    query = Query(**common | facts)
    run = LocalRun(query=query, source=source, options=options, secret=bytes(32))
    return query, list(run)


def crowd(keys=40, each=60, until=24 * HOUR):
    rng = np.random.default_rng(2)
    size = keys * each
    return pa.table(
        {
            "user": np.arange(size).astype(str),
            "key": [f"k{n % keys}" for n in range(size)],
            "ts": rng.integers(0, until, size),
        }
    )


def test_a_key_that_was_shown_stays():
    """In its place, oldest appearance first; nothing else tells when a key had new rows."""
    _, found = releases(crowd(each=20))
    before = []
    for table in found:
        keys = table["key"].to_pylist()
        assert keys[: len(before)] == before
        assert len(set(keys)) == len(keys)
        before = keys
    assert 0 < len(found[4]) < len(found[-1])


def test_thinning_leaves_out_what_has_hardly_moved():
    """Against what was last published, not against the last table; a new group is always shown."""
    bucket, ids = GroupBucket([Measure(kind="units")]), np.zeros((3, 2), np.uint64)

    def kept(*sums):
        count = len(sums)
        noisy = NoisySums(
            ids=ids[:count],
            since=np.ones(count, np.int64),
            sums=np.array(sums, np.int64)[:, None],
            groups=np.arange(count),
        )
        return thin_out(bucket, noisy, np.array([3.0])).groups.tolist()

    assert kept(10, 20) == [0, 1]
    assert kept(12, 23) == [1]  # 20 to 23
    assert kept(13, 21) == [0]  # 10 to 13, in two small steps
    assert kept(13, 21, 0) == [2]
    assert kept(10, 20, 3) == [0, 1, 2]


def test_a_thinned_window_ends_with_a_complete_table():
    """In between, groups are left out; the last table has all of them."""
    _, found = releases(crowd(until=12 * HOUR), min_change=3)
    sizes = [len(table) for table in found]
    assert sizes[-1] == 40
    assert min(sizes[7:-1]) < 20


def test_public_keys_are_all_published_at_every_trigger():
    """With rows or without, in any window."""
    listed = ["k0", "k1", "nobody", None]
    query, found = releases(crowd(), public_groups=listed)
    assert len(found) == query.schedule.steps == 12
    for table in found:
        assert set(table["key"].to_pylist()) == set(listed)


def test_a_group_without_keys_is_published_from_the_beginning():
    """The total has no key, and no threshold."""
    _, found = releases(crowd(), keys=())
    assert [len(table) for table in found] == [1] * 12
    assert "key" not in found[0].column_names


def group_rows(count, values):
    ids = np.tile(np.array([[7, 9]], np.uint64), (count, 1))
    keep_mask = np.full(count, KEPT | FIRST, np.uint8)
    return ids, keep_mask, np.array(values, np.int64)[:, None], pa.table({"key": ["a"] * count})


def test_sums_that_leave_the_integers_are_refused():
    """They must not wrap around."""
    bucket = GroupBucket([Measure(kind="units"), Measure(kind="value", column="x")])
    bucket.add(*group_rows(1, [2**61]), np.arange(1), pre_threshold=0)
    with pytest.raises(StateError, match="quantum"):
        bucket.add(*group_rows(1, [1]), np.arange(1), pre_threshold=0)


def test_a_group_becomes_active_at_the_unit_past_the_pre_threshold():
    """Once, and with the key columns of a row of its own."""
    bucket = GroupBucket([Measure(kind="units"), Measure(kind="rows")])
    batch = group_rows(5, [0] * 5)
    batch[1][2] = KEPT  # a second row of a unit
    bucket.add(*batch, np.arange(3), pre_threshold=2)
    assert len(bucket.active) == 0
    bucket.add(*batch, np.array([3]), pre_threshold=2)
    bucket.add(*batch, np.array([4]), pre_threshold=2)
    assert len(bucket.active) == 1
    assert bucket.sums(np.array([0])).tolist() == [[4, 5]]
    assert bucket.key_columns(np.array([0])).to_pydict() == {"key": ["a"]}


def test_values_and_counts_are_added_to_their_own_columns():
    """Sums published with little noise are about those of the rows; 6 deviations, 1e-8."""
    table = crowd(keys=3, each=900).append_column("x", pa.array(np.tile([1.0, 2.0, 3.0], 900)))
    aggregates = (
        Count("count"),
        Sum("s", column="x", contribution_bounds_per_row=(0, 5), quantum=1),
    )
    _, found = releases(table, epsilon=20, aggregates=aggregates)
    last = {row["key"]: row for row in found[-1].to_pylist()}
    for key, value in (("k0", 900), ("k1", 1800), ("k2", 2700)):
        row = last[key]
        assert abs(row["count"] - 900) < 6 * row["count_stddev"] < 20
        assert abs(row["s"] - value) < 6 * row["s_stddev"] < 60
