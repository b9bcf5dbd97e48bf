"""What the bounds drop is counted exactly, within its own bounds, and told with every release."""

import json
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest

from dpstream.audit.controls.broken_engine import UncappedDroppedRows
from dpstream.audit.query_samplers import run_plan
from dpstream.connectors.testing import ListSink
from dpstream.counting.noise_scale import streamed_norm
from dpstream.errors import InvalidParameter
from dpstream.group_by import bounding
from dpstream.group_by.flow import Flow
from dpstream.query.aggregates import Count, CountUnits, Sum, Variance
from dpstream.query.noise_plan import plan_query
from dpstream.query.windows import Hop, Tumble
from tests.laws.queries import HOUR, busy, query_of, run_of
from tests.support.fixed import RUN, SECRET

SUMS = (Count("n"), Sum("s", column="x", contribution_bounds_per_row=(0, 10), quantum=1))
THREE_ROWS = query_of(
    aggregates=SUMS,
    every="6 hours",
    max_groups_contributed=50,
    max_rows_per_group=50,
    max_rows_contributed=3,
    max_dropped_rows=4,
)


def exact_totals(query, table, *, flow=Flow):
    """The totals of each window at its last release, without noise: dropped, kept, beyond, ..."""
    seen = {}

    class Recorder(flow):
        def noisy_totals(self, due, spend):
            seen[due.window] = self.totals(due.window).bucket.table.numbers[0].copy()
            return super().noisy_totals(due, spend)

    for _ in run_plan(plan_query(query), table, secret=SECRET, run=RUN, flow=Recorder):
        pass
    return np.array([seen[window] for window in sorted(seen)])


def about(table):
    """The metadata of a release."""
    return json.loads(table.schema.metadata[b"dpstream"])


def test_totals_are_what_the_bounds_drop_and_keep():
    """Three rows of a unit are kept, four more count, and a unit with still more is counted."""
    rows = busy(size=2000, users=300)
    user = rows["user"].to_pylist()
    number = {name: int(name[1:]) % 11 for name in user}  # every row of a user adds the same
    table = rows.set_column(rows.column_names.index("x"), "x", pa.array([number[u] for u in user]))
    (totals,) = exact_totals(THREE_ROWS, table)
    kept = {name: min(count, 3) for name, count in Counter(user).items()}
    lost = {name: count - kept[name] for name, count in Counter(user).items()}

    counted = {name: min(count, 4) for name, count in lost.items()}
    beyond = sum(count > 4 for count in lost.values())
    assert totals[:3].tolist() == [sum(counted.values()), sum(kept.values()), beyond]
    assert totals[3] == sum(min(number[name], 10) * count for name, count in counted.items())
    assert totals[4] == sum(min(number[name], 10) * count for name, count in kept.items())
    assert beyond > 50


def test_units_in_groups_count_once_where_units_are_asked_for():
    """Further rows of a unit in a group are nothing to COUNT(DISTINCT unit): none is dropped."""
    query = query_of(
        aggregates=(CountUnits("u"),), every="6 hours", max_groups_contributed=2, max_dropped_rows=3
    )
    rows = busy(size=2000, users=300)
    pairs = set(zip(rows["user"].to_pylist(), rows["key"].to_pylist(), strict=True))
    groups = Counter(user for user, _ in pairs)
    (totals,) = exact_totals(query, rows)

    kept = sum(min(count, 2) for count in groups.values())
    dropped = sum(min(max(count - 2, 0), 3) for count in groups.values())
    assert totals.tolist() == [dropped, kept, sum(count > 5 for count in groups.values())]
    assert len(pairs) < len(rows) / 1.5


def test_a_step_may_drop_rows_of_more_units_than_a_table_has_room_for():
    """600 users in each of two groups, one of which counts: the table of dropped rows is made anew
    while the step is counted."""
    users = [f"u{number}" for number in range(600)]
    table = pa.concat_tables(
        pa.table(
            {"user": users, "key": [key] * 600, "ts": [0] * 600, "seen": [0] * 600, "x": [1] * 600}
        )
        for key in ("k1", "k2")
    )
    query = query_of(
        aggregates=(CountUnits("u"),), every="6 hours", max_groups_contributed=1, max_dropped_rows=3
    )

    assert exact_totals(query, table)[0].tolist()[:2] == [600, 600]


def heavy_unit(rows, hours):
    """A unit with so many rows of the largest value, in one group, over some hours."""
    times = np.resize(hours, rows) * HOUR + 7
    return pa.table(
        {"user": ["me"] * rows, "key": ["k1"] * rows, "ts": times, "seen": times, "x": [10] * rows}
    )


WINDOWS = {
    "one": Tumble("1 day"),
    "several": Tumble("6 hours"),
    "hop": Hop("12 hours", slide="4 hours"),
}


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("hours", [[1], [1, 7, 13, 19]], ids=["at once", "over the day"])
def test_one_unit_moves_totals_by_no_more_than_their_noise_is_for(windows, hours):
    """A unit that offers R + R_d rows in one window, and more; tight where all lie in one."""
    query = replace(THREE_ROWS, window=windows, every=None)
    others = busy(size=300, users=100)
    without = exact_totals(query, others)
    plan = plan_query(query)
    change = np.array([float(c) for c in plan.sensitivities[-len(query.totals) :]])
    for rows in (3 + 4, 3 + 4 + 1, 60):
        both = pa.concat_tables([others, heavy_unit(rows, hours)])
        moved = np.linalg.norm(exact_totals(query, both) - without, axis=0)
        assert (moved <= change).all(), rows
        tight = [4, 3, float(rows > 7), 40, 30]
        if windows is WINDOWS["one"]:
            assert moved.tolist() == tight
    broken = np.linalg.norm(
        exact_totals(query, both, flow=UncappedDroppedRows)
        - exact_totals(query, others, flow=UncappedDroppedRows),
        axis=0,
    )
    assert broken[0] > change[0]


def test_totals_and_measures_together_cost_what_is_charged():
    """Each column's noise has its part of mu^2, 2% are theirs; no more is spent than charged."""
    plan = plan_query(replace(THREE_ROWS, aggregates=(*SUMS, CountUnits("u"))))
    sizes = len(plan.query.measures)
    window, totals = plan.window(4), plan.totals(4)
    norm = streamed_norm(window.process)
    spent = [
        (norm * change / Fraction(sigma)) ** 2
        for change, sigma in zip(plan.sensitivities, window.sigmas + totals.sigmas, strict=True)
    ]
    whole = plan.calibrated.mu_squared

    assert all(part <= share for part, share in zip(spent, plan.shares, strict=True))
    assert 0.999 * whole < sum(spent) <= sum(plan.shares) <= whole
    assert float(sum(plan.shares[sizes:]) / whole) == pytest.approx(0.02)
    dropped, kept = plan.shares[sizes : sizes + 2]
    assert float(dropped / kept) == pytest.approx(9 * 4 / 3)  # s R_d : (1 - s) R at s = 9/10


def test_a_query_without_the_report_is_as_it_was():
    """Nothing is charged, nothing is shown, and its facts have no new key."""
    asked = replace(THREE_ROWS, report_bias=False, max_dropped_rows=None, confidence=0.9)
    (table,) = list(run_of(replace(asked, every=None), busy()))

    assert asked.totals == ()
    assert "report_bias" not in asked.facts()
    assert "report_bias" in THREE_ROWS.facts()
    assert not {"kept_share", "n_high_all"} & set(table.column_names)
    assert "kept_share" not in about(table)


def test_where_nothing_can_be_dropped_nothing_is_charged():
    """Distinct users of two public groups, two of which are allowed: byte by byte the same."""
    facts = {"aggregates": (CountUnits("u"),), "public_groups": ["k1", "k2"]}
    asked = query_of(**facts)
    tables = [
        list(run_of(query, busy())) for query in (asked, query_of(**facts, report_bias=False))
    ]

    assert asked.totals == ()
    assert tables[0] == tables[1]
    assert tables[0][0].schema.metadata == tables[1][0].schema.metadata
    assert query_of(**facts | {"aggregates": (Count("n"),)}).totals
    assert query_of(**facts, window=Tumble("1 hour")).totals


def test_every_release_says_what_was_dropped():
    """The share in a column, its interval in the metadata, and how large a count may be."""
    rows = busy(size=20_000, users=2_000)
    asked = replace(
        THREE_ROWS, epsilon=16, confidence=0.95, max_rows_contributed=4, max_dropped_rows=20,
        aggregates=(*SUMS, Variance("v", column="x", contribution_bounds_per_row=(0, 10))),
    )  # fmt: skip
    *_, last = run_of(asked, rows)
    facts = about(last)
    counts = Counter(rows["user"].to_pylist()).values()
    truth = sum(min(count, 4) for count in counts) / len(rows)
    by_key = Counter(rows["key"].to_pylist())

    assert set(last["kept_share"].to_pylist()) == {facts["kept_share"]} == {facts["bias"]["share"]}
    assert facts["bias"]["low"] < truth < facts["bias"]["high"]
    assert facts["bias"]["low"] > 0.9 * truth
    assert set(facts["bias"]["values"]) == {"s"}
    assert "v_high_all" not in last.column_names
    assert "v_high" in last.column_names
    shown = last.to_pylist()
    assert all(row["n_high"] < row["n_high_all"] for row in shown)
    assert all(by_key[row["key"]] <= row["n_high_all"] for row in shown)
    assert not all(by_key[row["key"]] <= row["n_high"] for row in shown)


def test_a_flood_counts_as_any_other_rows(monkeypatch):
    """Rows that a step lets go of early would not have counted."""
    table = pa.concat_tables([busy(), heavy_unit(500, [2]).select(busy().column_names)])
    whole, thinned = ListSink(), ListSink()
    list(run_of(THREE_ROWS, table, sink=whole))
    monkeypatch.setattr(bounding, "FLOOD", 64)
    list(run_of(THREE_ROWS, table, sink=thinned))

    assert whole.tables == thinned.tables


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"debias": "global", "report_bias": False}, "debias needs report_bias"),
        ({"max_dropped_rows": 3, "report_bias": False}, "max_dropped_rows needs report_bias"),
        ({"max_dropped_rows": 0}, "max_dropped_rows"),
        ({"keys": ("kept_share",)}, "two columns named"),
    ],
)
def test_what_has_no_meaning_is_refused(facts, message):
    """Before anything is charged."""
    with pytest.raises(InvalidParameter, match=message):
        query_of(**facts)
