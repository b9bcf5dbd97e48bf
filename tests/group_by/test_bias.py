"""What the bounds drop is counted exactly, within its own bounds, and told with every release."""

import json
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest

from dpstream.audit.controls.broken_engine import UncappedDroppedRows, UncappedElsewhere
from dpstream.audit.query_samplers import run_plan
from dpstream.connectors.testing import ListSink
from dpstream.counting.noise_scale import streamed_norm
from dpstream.errors import InvalidParameter
from dpstream.group_by import bounding
from dpstream.group_by.flow import Flow
from dpstream.query.aggregates import Count, CountUnits, Sum, Variance
from dpstream.query.noise_plan import plan_query
from dpstream.query.windows import Hop, Tumble
from dpstream.rows.row_batch import among
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


WINDOWS = {
    "one": Tumble("1 day"),
    "several": Tumble("6 hours"),
    "hop": Hop("12 hours", slide="4 hours"),
}


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


@pytest.mark.parametrize(("groups", "each"), [(2, 3), (1, 3), (1, 1)])
def test_rows_of_groups_that_a_unit_is_not_in_are_told_from_the_others(groups, each):
    """Of rows that are dropped, those beyond a unit's rows in its groups are not elsewhere."""
    query = query_of(
        aggregates=SUMS, every="6 hours", max_groups_contributed=groups, max_rows_per_group=each,
        max_dropped_rows=100, debias="groups",
    )  # fmt: skip
    rows = busy(size=2000, users=300)
    kept = {}

    class Recorder(Flow):
        def bound(self, window, period, rows):
            keep_mask = super().bound(window, period, rows)
            at = zip(rows.units.tolist(), rows.groups.tolist(), keep_mask, strict=True)
            for unit, group, keep in at:
                inside = kept.setdefault((tuple(unit), tuple(group)), [0, 0])
                inside[bool(keep)] += 1
            return keep_mask

    (totals,) = exact_totals(query, rows, flow=Recorder)
    elsewhere = sum(lost for lost, held in kept.values() if not held)
    lost = sum(lost for lost, _ in kept.values())

    assert [total.kind for total in query.totals][-1] == "elsewhere"
    assert totals[0] == lost
    assert totals[-1] == elsewhere
    assert 100 < elsewhere < lost - 100


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_one_unit_moves_what_is_elsewhere_by_no_more_than_its_noise_is_for(windows):
    """A unit in many more groups than count, of which the first to come are full."""
    query = replace(
        THREE_ROWS, window=WINDOWS[windows], every=None, max_groups_contributed=2,
        max_rows_per_group=2, max_rows_contributed=None, debias="groups",
    )  # fmt: skip
    others = busy(size=300, users=100)
    without = exact_totals(query, others)
    change = float(plan_query(query).sensitivities[-1])
    times = [2 * HOUR + n for n in range(60)]
    unit = pa.table(
        {
            "user": ["me"] * 60, "key": [f"k{n}" for n in range(60)],
            "ts": times, "seen": times, "x": [10] * 60,
        }
    )  # fmt: skip
    moved = exact_totals(query, pa.concat_tables([others, unit])) - without

    assert change == query.most_dropped == 4
    assert 0 < np.linalg.norm(moved[:, -1]) <= change
    both = [pa.concat_tables([others, unit]), others]
    broken = [exact_totals(query, rows, flow=UncappedElsewhere)[:, -1] for rows in both]
    assert np.linalg.norm(broken[0] - broken[1]) > change


class _GroupsOfAnybody(Flow):
    """Takes a dropped row for one of a group that its unit is in, if any unit is in it."""

    def count_totals(self, window, period, rows, keep_mask):
        totals = super().count_totals(window, period, rows, keep_mask)
        inside = among(rows.groups, rows.groups[keep_mask > 0])
        totals[-1] = np.count_nonzero(~inside & (keep_mask == 0))
        return totals


@pytest.mark.parametrize("cells", [None, 1], ids=["estimated", "as if all were one unit"])
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("most", [(3, 2, 5), (1, 1, 1)], ids=["several groups", "one row"])
@pytest.mark.parametrize("aggregates", [(Count("n"),), SUMS], ids=["rows alike", "values"])
def test_what_a_unit_adds_to_totals_depends_on_its_own_rows_alone(
    monkeypatch, aggregates, most, windows, cells
):
    """The totals with a unit are those without it and those of it alone: whether others are there
    changes nothing of what it adds, nor it of theirs."""
    if cells is not None:
        monkeypatch.setattr(bounding, "estimate_cells", lambda rows: np.zeros(cells, np.uint8))
    groups, each, whole = most
    query = query_of(
        aggregates=aggregates, every=None, window=WINDOWS[windows], max_groups_contributed=groups,
        max_rows_per_group=each, max_rows_contributed=whole, max_dropped_rows=4, debias="groups",
        remember_keys=False,
    )  # fmt: skip
    rows = busy(size=600, users=50)
    users = np.array(rows["user"].to_pylist())
    together = exact_totals(query, rows)
    seen = 0
    for user in ("u3", "u7", "u11", "u20"):
        without, alone = (exact_totals(query, rows.filter(users != user)),
                          exact_totals(query, rows.filter(users == user)))  # fmt: skip
        assert (together - without == alone).all()
        seen += alone[:, -1].sum()
    assert seen > 0
    parts = [
        exact_totals(query, part, flow=_GroupsOfAnybody)
        for part in (rows, rows.filter(users != "u3"), rows.filter(users == "u3"))
    ]
    assert (parts[0] - parts[1] != parts[2]).any()


def test_keys_that_owe_nothing_to_chance_are_made_up_for_in_full():
    """A key is divided by the share of rows in groups that count, as its units say; counts stay
    whole numbers."""
    rows = busy(size=20_000, users=2_000)
    facts = {"epsilon": 16, "every": None, "max_groups_contributed": 2, "aggregates": (Count("n"),)}
    runs = {
        debias: next(iter(run_of(query_of(debias=debias, **facts, window=Tumble("1 day")), rows)))
        for debias in (None, "groups")
    }
    said = about(runs["groups"])["bias"]
    truth = Counter(set(zip(rows["user"].to_pylist(), rows["key"].to_pylist(), strict=True)))
    by_key = Counter(key for _, key in truth)
    off = {
        debias: sum(abs(row["n"] - by_key[row["key"]]) for row in table.to_pylist())
        for debias, table in runs.items()
    }

    assert said["debiased"] == ["n"]
    assert said["share"] < said["groups"]["share"] < 1
    assert runs["groups"].schema.field("n").type == pa.int64()
    assert off["groups"] < 0.7 * off[None]


def heavy_unit(rows, hours):
    """A unit with so many rows of the largest value, in one group, over some hours."""
    times = np.resize(hours, rows) * HOUR + 7
    return pa.table(
        {"user": ["me"] * rows, "key": ["k1"] * rows, "ts": times, "seen": times, "x": [10] * rows}
    )


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


@pytest.mark.parametrize("debias", [None, "groups"])
def test_totals_and_measures_together_cost_what_is_charged(debias):
    """Each column's noise has its part of mu^2, 2% are theirs; no more is spent than charged."""
    plan = plan_query(replace(THREE_ROWS, aggregates=(*SUMS, CountUnits("u")), debias=debias))
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
    dropped, kept, *_, last = plan.shares[sizes:]
    if debias == "groups":  # which shares what the rows dropped have
        assert last == dropped
        dropped += last
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
