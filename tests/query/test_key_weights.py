"""Weights of keys: their squares, what units count in their groups, and which keys they find."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dpstream as dps
from dpstream.audit.query_samplers import run_plan
from dpstream.errors import InvalidParameter
from dpstream.group_by.bounding import FIRST
from dpstream.group_by.flow import Flow
from dpstream.privacy.state import Secret
from dpstream.query.key_weights import KeyWeights
from dpstream.query.noise_plan import plan_query
from dpstream.rows.row_batch import rows_by_window
from dpstream.rows.row_reader import RowReader

SECRET, RUN = bytes(32), bytes(16)


def query(**facts):
    """Keys alone."""
    common = {"privacy_unit_column": "user", "keys": ["key"], "epsilon": 1, "delta": 1e-9}
    return dps.Query(**common | {"aggregates": [], "weighted_keys": True} | facts)


@given(st.integers(1, 3000), st.booleans())
def test_squares_of_weights_sum_to_1_at_most(groups, once):
    """However many keys a unit has; rounding takes little, and a weight never comes to nothing."""
    weights = KeyWeights(groups=groups, once=once)
    squares = weights.of_number.astype(object) ** 2
    sums = squares * np.arange(1, groups + 1) if once else np.cumsum(squares)
    assert max(sums) <= weights.change**2 <= weights.steps**2
    assert weights.change**2 >= 0.9 * weights.steps**2
    assert (np.diff(weights.of_number) <= 0).all()
    assert weights.of_number[-1] >= 12
    assert weights.measure.largest == weights.of_number[0]


def counted(asked, table):
    """By user and step: what each key counts of it, as rows come."""
    plan, secret = plan_query(asked), Secret(SECRET)
    reader = RowReader(plan.query, secret, RUN)
    reader.learn({field.name: field.type for field in table.schema})
    flow, found = Flow(plan, reader, buckets=3, threads=1), []
    rows, _ = reader.read(table, "a test")
    column = plan.query.value_columns[plan.query.key_weights.measure]
    for step in range(plan.query.schedule.steps):
        slices = [(rows, a, b) for at, _, _, a, b in rows.runs if at == step]
        for window, period, part in rows_by_window(slices):
            mask = flow.bound(window, period, part)
            values = flow.contributions(window, part, mask).values[:, column]
            first = mask & FIRST > 0
            found += zip(
                map(bytes, part.units[first]), [step] * first.sum(), values[first], strict=True
            )
    return found


@given(st.data())
def test_what_a_unit_counts_is_fixed_when_it_is_counted(data):
    """Of any rows: the n-th key to come counts the n-th weight, and never another."""
    rows = data.draw(
        st.lists(
            st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(0, 7)),
            min_size=1,
            max_size=40,
        )
    )
    user, key, hour = (list(column) for column in zip(*rows, strict=True))
    table = pa.table({"user": user, "key": key, "ts": [h * 3600 for h in hour]})
    about = {"time_column": "ts", "time_unit": "s", "start": "1970-01-01"}
    asked = query(**about, end="1970-01-01T08:00", every="2 hours", max_groups_contributed=4)
    weights = asked.key_weights
    assert not weights.once
    by_user = {}
    for unit, step, value in counted(asked, table):
        by_user.setdefault(unit, []).append((step, -value))
    for seen in by_user.values():
        values = [-value for _, value in sorted(seen)]
        assert values == weights.of_number[: len(values)].tolist()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), min_size=1, max_size=40))
def test_published_once_all_keys_of_a_unit_count_alike(rows):
    """1/sqrt(d) in each of d keys, of at most as many as it may have."""
    user, key = (list(column) for column in zip(*rows, strict=True))
    asked = query(max_groups_contributed=4)
    assert asked.key_weights.once
    by_user = {}
    for unit, _, value in counted(asked, pa.table({"user": user, "key": key})):
        by_user.setdefault(unit, []).append(value)
    sizes = sorted(min(len({k for u, k in rows if u == one}), 4) for one in set(user))
    assert sorted(map(len, by_user.values())) == sizes
    for values in by_user.values():
        assert set(values) == {asked.key_weights.of_number[len(values) - 1]}


def few_and_many():
    """10,000 users with 1 to 40 keys of 3,000, most of them with few."""
    rng = np.random.default_rng(1)
    many = np.clip(np.rint(rng.lognormal(1.2, 1.0, 10_000)), 1, 40).astype(int)
    odds = 1 / np.arange(1, 3001) ** 1.1
    return pa.table(
        {
            "user": np.repeat(np.arange(10_000), many),
            "key": rng.choice(3000, many.sum(), p=odds / odds.sum()),
        }
    )


def shown(asked, table):
    """How many keys are found."""
    releases = [published.table for _, published in run_plan(plan_query(asked), table)]
    return len(releases[-1])


def test_weights_find_more_keys():
    """Once: 10% more than without weights at the best bound of both (32% at this seed), and a bound
    that is too large does no harm. Again and again: at a large bound a sixth more."""
    table = few_and_many()
    plain = max(shown(query(weighted_keys=False, max_groups_contributed=g), table) for g in (4, 8))
    large = {"max_groups_contributed": 32}
    assert shown(query(**large), table) > 1.1 * plain > 10
    hours = pa.array(np.arange(len(table)) % 8 * 3600)
    often = {"time_column": "ts", "time_unit": "s", "start": "1970-01-01", "every": "2 hours"}
    often |= {"end": "1970-01-01T08:00"} | large
    table = table.append_column("ts", hours)
    without = shown(query(weighted_keys=False, **often), table)
    assert shown(query(**often), table) > 1.15 * without > 10


def test_a_key_needs_the_pre_threshold_in_units():
    """Nobody counts more than 1, so a sum above n takes more than n units."""
    plan = plan_query(query(max_groups_contributed=9, pre_threshold=7))
    window = plan.window(1)
    assert window.pre_threshold == 7 * 256
    plain = plan_query(query(max_groups_contributed=1, pre_threshold=0, weighted_keys=False))
    alone = plan_query(query(max_groups_contributed=1, pre_threshold=0)).window(1)
    assert alone.thresholds / 256 == pytest.approx(plain.window(1).thresholds, abs=1)


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({"aggregates": [dps.Count("n")]}, "it has aggregates, such as 'n'"),
        ({"strategy": "sqlp"}, "the strategy 'sqlp' counts units"),
        ({"keys": ["a", "b"], "grouping_sets": [["a", "b"], ["a"]]}, "several sets of keys"),
        ({"public_groups": ["x"]}, "all keys are public"),
        (
            {
                "max_groups_contributed": "auto",
                "time_column": "ts",
                "window": dps.Tumble("1 day"),
                "privacy_unit_period": "1 day",
                "start": "2024-05-01",
            },
            "chosen for each period; give a number",
        ),
    ],
)
def test_weights_are_for_keys_alone(facts, word):
    """Elsewhere they would change what is counted."""
    with pytest.raises(InvalidParameter, match=word):
        query(**{"max_groups_contributed": 3} | facts)
