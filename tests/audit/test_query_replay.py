"""One unit more or less: what a query computes before noise moves as the plan says."""

from dataclasses import replace
from functools import cache

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpstream.audit.controls.broken_engine import TotalsLikeParts
from dpstream.counting.noise_process import KeyedNoise, advance_noise
from dpstream.group_by.bounding import FIRST, KEPT, UnitBucket
from dpstream.group_by.flow import Flow
from dpstream.query.aggregates import Avg, Count, CountUnits, Measure, Sum, Variance
from dpstream.query.noise_plan import plan_query
from dpstream.query.query import Query
from dpstream.query.second_moments import Correlation, Covariance
from dpstream.query.windows import Cumulate, Hop, Tumble
from dpstream.rows.row_reader import RowReader
from tests.support.long import part_of, some_examples
from tests.support.query_replay import record_query, replay_query, replay_units

HOUR = 3600
VALUES = (
    Count("n"),
    Sum("s", column="x", contribution_bounds_per_row=(-3, 5), quantum=1),
    Avg("m", column="x", contribution_bounds_per_row=(0, 4)),
)
CASES = {
    "tumbling windows, one row per group": {
        "window": Tumble("6 hours"),
        "every": "2 hours",
        "max_groups_contributed": 3,
    },
    "one window, values, several rows per group": {
        "every": "3 hours",
        "aggregates": VALUES,
        "max_groups_contributed": 2,
        "max_rows_per_group": 3,
        "max_rows_contributed": 5,
    },
    "late rows by an arrival column": {
        "window": Tumble("4 hours"),
        "every": "1 hour",
        "arrival_column": "seen",
        "allowed_lateness": "3 hours",
        "aggregates": VALUES,
        "max_groups_contributed": 2,
        "max_rows_per_group": 2,
    },
    "periods shorter than windows": {
        "window": Tumble("12 hours"),
        "every": "4 hours",
        "privacy_unit_period": "3 hours",
        "aggregates": (CountUnits("users"), Count("n")),
        "max_groups_contributed": 1,
        "max_rows_per_group": 2,
    },
    "periods longer than windows, published on close": {
        "window": Tumble("5 hours"),
        "privacy_unit_period": "12 hours",
        "arrival_column": "seen",
        "allowed_lateness": "1 hour",
        "max_groups_contributed": 2,
    },
    "public keys": {
        "window": Tumble("8 hours"),
        "every": "4 hours",
        "public_groups": ["a", "c", "nobody"],
        "aggregates": VALUES,
        "max_groups_contributed": 2,
        "max_rows_per_group": 2,
    },
    "hopping windows, late rows": {
        "window": Hop("6 hours", slide="2 hours"),
        "every": "3 hours",
        "arrival_column": "seen",
        "allowed_lateness": "1 hour",
        "aggregates": VALUES,
        "max_groups_contributed": 3,
        "max_rows_per_group": 2,
        "max_rows_contributed": 5,
    },
    "cumulating windows, periods": {
        "window": Cumulate("12 hours", step="3 hours"),
        "privacy_unit_period": "8 hours",
        "aggregates": (Variance("v", column="x", contribution_bounds_per_row=(-3, 5)),),
        "max_groups_contributed": 4,
        "max_rows_per_group": 1,
    },
    "pairs of values, periods": {
        "window": Tumble("12 hours"),
        "every": "3 hours",
        "privacy_unit_period": "8 hours",
        "aggregates": (
            Covariance("c", columns=("x", "x"), contribution_bounds_per_row=((-3, 5), (0, 4))),
            Correlation("r", columns=("x", "x"), contribution_bounds_per_row=((-3, 5), (1, 4))),
        ),
        "max_groups_contributed": 2,
        "max_rows_per_group": 2,
        "max_rows_contributed": 3,
    },
    "weighted keys, once": {
        "time_column": None,
        "start": None,
        "end": None,
        "aggregates": (),
        "weighted_keys": True,
        "max_groups_contributed": 4,
        "max_rows_per_group": 2,
    },
    "weighted keys, overlapping windows": {
        "window": Hop("6 hours", slide="2 hours"),
        "every": "3 hours",
        "arrival_column": "seen",
        "allowed_lateness": "1 hour",
        "aggregates": (),
        "weighted_keys": True,
        "max_groups_contributed": 4,
        "max_rows_per_group": 2,
        "max_rows_contributed": 7,
    },
    "rounds, several rows per group": {
        "strategy": "sqlp",
        "window": Tumble("12 hours"),
        "every": "2 hours",
        "aggregates": (Count("n"), CountUnits("users")),
        "max_groups_contributed": 2,
        "max_rows_per_group": 3,
        "max_rows_contributed": 5,
    },
    "rounds, hopping windows, values": {
        "strategy": "sqlp",
        "window": Hop("8 hours", slide="4 hours"),
        "every": "2 hours",
        "aggregates": VALUES,
        "arrival_column": "seen",
        "max_groups_contributed": 3,
    },
    "totals of sums that only grow": {
        "window": Tumble("6 hours"),
        "every": "3 hours",
        "aggregates": (
            Count("n"),
            Sum("shared", column="x", contribution_bounds_per_row=(0, 5), quantum=1),
            Sum("own", column="x", contribution_bounds_per_row=(1, 4), quantum=1),
        ),
        "max_groups_contributed": 2,
        "max_rows_per_group": 2,
    },
    "sets of keys that are found": {
        "keys": ("key", "x"),
        "grouping_sets": (("key", "x"), ("key",), ()),
        "every": "6 hours",
        "aggregates": (Count("n"), CountUnits("users")),
        "max_groups_contributed": 2,
        "max_rows_per_group": 2,
    },
    "all sets of public keys": {
        "keys": ("key", "x"),
        "grouping_sets": (("key", "x"), ("x",), ("key",), ()),
        "grouping_set_weights": (3, 1, 2, 1),
        "public_groups": [(key, x) for key in "ac" for x in (1.0, 5.0, 6.0)],
        "every": "6 hours",
        "aggregates": VALUES,
        "max_groups_contributed": 2,
        "max_rows_per_group": 2,
    },
    "dropped rows made up for": {
        "window": Tumble("6 hours"),
        "every": "2 hours",
        "privacy_unit_period": "12 hours",
        "debias": "global",
        "max_dropped_rows": 6,
        "max_groups_contributed": 2,
        "max_rows_per_group": 2,
    },
}


@cache
def plan_of(name, **more):
    facts = {
        "privacy_unit_column": "user",
        "keys": ("key",),
        "epsilon": 20,
        "delta": 0.5,  # thresholds of a few units: small data show and hide keys
        "time_column": "ts",
        "time_unit": "s",
        "start": "1970-01-01",
        "end": "1970-01-02",
        "pre_threshold": 1,
    }
    return plan_query(Query(**facts | CASES[name] | more))


rows = st.lists(
    st.tuples(
        st.integers(0, 5),  # user
        st.sampled_from("abcd"),
        st.integers(-1, 24),  # hour of the event; some are outside
        st.sampled_from([0, 0, 0, 1, 2, 5]),  # hours until it is seen
        st.none() | st.integers(-4, 6),
        st.integers(1, 3),  # copies
    ),
    min_size=1,
    max_size=40,
)


def scenario_table(drawn):
    """Rows as drawn, in no order, copies side by side."""
    drawn = [row[:5] for row in drawn for _ in range(row[5])]
    user, key, hour, delay, value = zip(*drawn, strict=True)
    times = np.array(hour) * HOUR + np.arange(len(hour)) % 7
    return pa.table(
        {
            "user": [f"u{n}" for n in user],
            "key": pa.array(key),
            "ts": times,
            "seen": times + np.array(delay) * HOUR,
            "x": pa.array(value, pa.float64()),
        }
    )


def one_unit(table, plan, user):
    """The rows of a user, within the period of its first row where there are periods."""
    mine = np.array([name == user for name in table["user"].to_pylist()])
    if plan.query.periods is not None:
        periods = plan.query.periods.before(table["ts"].to_numpy() * 1_000_000)
        mine &= periods == periods[np.argmax(mine)]
    return mine


def violations(plan, table, *, users=6, **options):
    names = sorted(set(table["user"].to_pylist()))[:users]
    units = [one_unit(table, plan, user) for user in names]
    replays = replay_units(plan, table, units, **options)
    return [violation for replay in replays for violation in replay.violations]


@pytest.mark.parametrize("name", CASES)
@given(drawn=rows, buckets=st.sampled_from([1, 3]), chunk=st.sampled_from([1 << 18, 7]))
@some_examples(12, of=3)
def test_a_unit_moves_its_own_groups_alone_and_no_further_than_planned(name, drawn, buckets, chunk):
    """Others' rows, windows, steps, tables, draws and answers are the same without it."""
    plan, table = plan_of(name), scenario_table(drawn)

    assert violations(plan, table, users=2, buckets=buckets, chunk=chunk) == []


@pytest.mark.parametrize("name", CASES)
def test_the_worst_unit_uses_up_the_sensitivity(name):
    """The plan's numbers are reached: smaller ones would not do."""
    plan = plan_of(name)
    others = [(f"u{n}", key, 4 * HOUR, 1.0) for n in range(1, 4) for key in "abc"]
    hour = 5 if "hopping" in name else 3  # where it lies in two windows
    several = [("u0", key, hour * HOUR + n, 5.0) for key in "ac" for n in range(6)]
    one_window = [("u0", key, n, 5.0) for key in "abcd" for n in range(12)]  # most are dropped
    data = [several + others, one_window + others]
    if name == "rounds, several rows per group":  # each of its rows in a round of its own
        rounds = [("u0", key, hour * HOUR, 5.0) for key in "ac" for hour in (1, 3, 5)]
        others = [(f"v{h}.{n}", k, h * HOUR, 1.0) for n in range(60) for k in "ac" for h in (1, 3)]
        data.append(rounds + others)
    if "sets of" in name:  # all of its rows in one group of fewer keys
        one_key = [("u0", "a", n, 5.0 + n % 2) for n in range(12)]
        data.append(one_key + others)
    used = []
    for drawn in data:
        user, key, times, value = zip(*drawn, strict=True)
        table = pa.table({"user": user, "key": key, "ts": times, "seen": times, "x": value})
        replay = replay_query(plan, table, one_unit(table, plan, "u0"))
        assert replay.violations == []
        used.append(replay.used)

    assert np.max(used, axis=0).min() > 0.999


@pytest.mark.parametrize("pair", [(-0.0, 0.0), (float("nan"), -float("nan"))])
def test_equal_keys_are_published_as_one_value(pair):
    """-0.0 and 0.0 are one group: which of them is shown must not be one unit's row."""
    plan = plan_of("tumbling windows, one row per group", pre_threshold=0)
    table = pa.table(
        {
            "user": [f"u{n}" for n in range(40)],
            "key": [pair[0], *[pair[1]] * 39],
            "ts": [HOUR] * 40,
            "seen": [HOUR] * 40,
        }
    )
    for user in ("u0", "u1"):
        assert replay_query(plan, table, one_unit(table, plan, user)).violations == []


def busy(seed=0, size=300):
    """Enough units to show keys, in no order."""
    rng = np.random.default_rng(seed)
    times = rng.integers(0, 24 * HOUR, size)
    return pa.table(
        {
            "user": [f"u{n}" for n in rng.integers(0, 25, size)],
            "key": rng.choice(list("abcd"), size),
            "ts": times,
            "seen": times + rng.choice([0, 1, 2], size) * HOUR,
            "x": rng.integers(-4, 7, size).astype(float),
        }
    )


@pytest.mark.parametrize("name", CASES)
def test_busy_data_show_keys_and_keep_the_promise(name):
    """Keys appear, so draws and answers of shown groups are compared too."""
    plan, table = plan_of(name), busy()
    recording = record_query(plan, table, secret=bytes(32), run=bytes(16))

    assert any(len(groups) > 1 for groups in recording.published.values())
    assert violations(plan, table, users=part_of(4, of=2), buckets=2, chunk=64) == []


def test_a_recording_is_the_engine(tmp_path):
    """Every (window, release) of the schedule has a table, and draws are made once."""
    plan = plan_of("late rows by an arrival column")
    recording = record_query(plan, busy(), secret=bytes(32), run=bytes(16))
    schedule = plan.query.schedule
    expected = [(step, *due) for step in range(schedule.steps) for due in schedule.due(step)]

    assert [table[:4] for table in recording.tables] == expected
    assert set(recording.draws.values()) == {1}


class TestControls:
    """Each breaks one fact; the comparison must see it."""

    NAME = "late rows by an arrival column"
    TOTALS = "totals of sums that only grow"
    CUT = scenario_table([(user, key, 0, 0, 5, 30 - 29 * user) for user in (0, 1) for key in "ac"])
    """A unit of which most rows are dropped, and another."""

    def found(self, name=NAME, facts=(), **options):
        table = busy().sort_by("ts")
        return " ".join(violations(plan_of(name, **dict(facts)), table, users=6, **options))

    def test_rows_kept_by_their_place_in_the_file(self, monkeypatch):
        """An order that counts rows lets one unit change which rows of others are kept."""
        keep = UnitBucket.keep

        def by_place(self, window, period, batch, places, keep_mask, **how):
            order = np.zeros((len(batch[2]), 2), np.uint64)
            order[:, 0] = np.arange(len(order)).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            keep(self, window, period, (*batch[:2], order), places, keep_mask, **how)

        monkeypatch.setattr(UnitBucket, "keep", by_place)
        assert "kept rows of other units" in self.found()

    def test_steps_by_the_largest_time_seen(self, monkeypatch):
        """A watermark taken from the data moves others' rows to later steps."""
        read = RowReader._columns

        def watermark(self, table, reasons, arrived, once):
            columns = read(self, table, reasons, arrived, once)
            return columns | {"steps": np.maximum.accumulate(columns["steps"])}

        monkeypatch.setattr(RowReader, "_columns", watermark)
        assert "window or step of other units" in self.found()

    def test_units_counted_again_in_each_set(self, monkeypatch):
        """A unit's first row by all keys is not its first in a group of fewer keys."""
        monkeypatch.setattr(
            "dpstream.group_by.flow.mark_first",
            lambda bucket, window, rows, places, marks: marks.__setitem__(places, KEPT | FIRST),
        )
        assert "'units' moves" in self.found("sets of keys that are found")

    def test_totals_with_the_noise_of_parts(self):
        """It is too little: all rows of a unit may be in one total."""
        plan = plan_of("all sets of public keys")
        like_parts = TotalsLikeParts(plan.query)
        rows = [("u0", "a", n, 5.0 + n % 2) for n in range(12)]
        user, key, times, value = zip(*rows, strict=True)
        table = pa.table({"user": user, "key": key, "ts": times, "seen": times, "x": value})

        assert "its sensitivity is" in " ".join(violations(like_parts, table))

    def test_one_row_too_many(self, monkeypatch):
        """Rows beyond the bounds move the sums further than the plan says."""
        monkeypatch.setattr(
            "dpstream.group_by.flow.UnitBucket",
            lambda bounds: UnitBucket(
                bounds=type(bounds)(
                    rows=bounds.rows + 2, groups=bounds.groups + 1, rows_per_group=3
                )
            ),
        )
        assert "its sensitivity is" in self.found()

    @pytest.mark.parametrize(
        ("counted", "beyond", "moved"), [(True, 0, "'dropped' moves"), (False, 1, "'beyond' moves")]
    )
    def test_totals_without_a_limit(self, monkeypatch, counted, beyond, moved):
        """All dropped rows of a unit, or a unit that counts again and again as cut."""

        def count(rows, counts, most, mask):
            mask[:] = counted
            return beyond * len(rows)

        monkeypatch.setattr("dpstream.group_by.bias._count_dropped", count)
        assert moved in " ".join(violations(plan_of(self.TOTALS), self.CUT))

    @pytest.mark.parametrize("kept", [0, 1])
    def test_values_of_totals_about_another_middle(self, monkeypatch, kept):
        """Noise of a total of values is for values between the clamps."""
        query = plan_of(self.TOTALS).query
        further = [(column, middle + 5) for column, middle in query.summed_values]
        monkeypatch.setattr(Query, "summed_values", further)
        plan = plan_query(replace(query))
        total = plan.query.totals[3 + kept].name
        assert f"{total!r} moves" in " ".join(violations(plan, self.CUT))

    def test_sums_that_are_not_about_the_middle(self, monkeypatch):
        """A SUM that shares has noise for half its range."""
        shared = Measure.on_grid

        def about_0(self, values):
            return shared(self, values) + int(self.middle / self.quantum)

        monkeypatch.setattr(Measure, "on_grid", about_0)
        assert "'NULL=0|0|5|2|1|x' moves" in " ".join(violations(plan_of(self.TOTALS), self.CUT))

    def test_empty_tables_left_out(self, monkeypatch):
        """A table that appears only with rows reveals that there was a row."""
        step = Flow.step

        def only_full(self, number, pieces, spend):
            return [made for made in step(self, number, pieces, spend) if len(made.table)]

        monkeypatch.setattr(Flow, "step", only_full)
        plan, table = plan_of("tumbling windows, one row per group"), busy(size=60)
        assert "tables differ" in " ".join(violations(plan, table, users=25))

    def test_bounds_shared_by_all_units(self, monkeypatch):
        """A unit that fills a bucket's common bound takes it from the others."""
        keep = UnitBucket.keep

        def shared(self, window, period, batch, places, keep_mask, **how):
            keep(self, window, period, batch, places, keep_mask, **how)
            keep_mask[np.cumsum(keep_mask > 0) > 8] = 0

        monkeypatch.setattr(UnitBucket, "keep", shared)
        found = self.found()
        assert "kept rows of other units" in found
        assert "sums of another group" in found

    def test_noise_that_depends_on_the_number_of_groups(self, monkeypatch):
        """Draws that depend on how many groups there are differ for groups of others."""
        monkeypatch.setattr("dpstream.group_by.perturb.advance_noise", _pairwise)
        # of windows that remember all keys each begins with the same groups
        facts = {"remember_keys": False}
        found = self.found("tumbling windows, one row per group", facts)
        assert "draw of another group" in found


def _pairwise(process, noise, joining, step, sigma, draw, **how):
    """Noise for pairs of groups; an odd one out has none."""
    pairs, rest = joining[: len(joining) // 2 * 2], joining[len(joining) // 2 * 2 :]
    moved, path = advance_noise(process, noise, pairs, step, sigma, draw, **how)
    ids = np.concatenate([moved.ids, rest])
    state = np.concatenate([moved.state, np.zeros((len(rest), process.width))])
    moved = KeyedNoise(ids=ids, state=state, step=step)
    return moved, np.concatenate([path, np.zeros(len(rest), np.int64)])
