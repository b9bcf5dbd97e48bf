"""Bounds that are chosen for each period: what a unit moves, and what they are chosen by."""

import json
import math
from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest

import dpstream as dps
from dpstream.audit.controls.broken_engine import RisingBounds
from dpstream.audit.query_samplers import run_plan
from dpstream.errors import InvalidParameter, LedgerError, NoiseReuse
from dpstream.group_by.chosen_bounds import (
    PERIODS,
    ChosenBounds,
    JudgedColumn,
    PublishedPeriod,
    best_bounds,
    last_window_of,
    period_of,
)
from dpstream.group_by.flow import Flow
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.query.aggregates import Avg, Count, CountUnits, Sum, Variance
from dpstream.query.noise_plan import plan_query
from dpstream.query.period_bounds import CLAMPS, Candidates, PeriodBounds
from dpstream.query.query import Query
from dpstream.query.windows import Cumulate, Hop, Tumble
from tests.laws.queries import HOUR, query_of
from tests.support import query_replay
from tests.support.fixed import SECRET
from tests.support.query_replay import compare, record_query
from tests.support.runs import (
    CHOOSING,
    break_off,
    options,
    published,
    query,
    start,
    table,
    whole,
    write,
)


def asked(**facts):
    """Four periods of six hours with three windows each, late rows, several rows per group."""
    usual = {
        "window": Tumble("2 hours"),
        "every": "1 hour",
        "arrival_column": "seen",
        "allowed_lateness": "1 hour",
        "privacy_unit_period": "6 hours",
        "max_groups_contributed": "auto",
        "max_rows_per_group": 2,
        "epsilon": 8,
        "delta": 0.1,
        "aggregates": (
            Count("n"),
            CountUnits("users"),
            Sum("s", column="x", contribution_bounds_per_row=(-3, 5), quantum=1),
        ),
    }
    return query_of(**usual | facts)


ALL_CHOSEN = {
    "max_rows_per_group": "auto",
    "aggregates": (
        Count("n"),
        CountUnits("users"),
        Sum("s", column="x", contribution_bounds_per_row=(0, "auto")),
        Avg("mean", column="x", contribution_bounds_per_row="auto"),
        Sum("fixed", column="x", contribution_bounds_per_row=(-3, 5), quantum=1),
    ),
}
"""Groups, rows in a group, and two clamps."""


def heavy(seed=3, size=8000, users=500):
    """Users with few rows and users with hundreds, in many groups; rows early and late."""
    rng = np.random.default_rng(seed)
    times = rng.integers(0, 24 * HOUR, size)
    return pa.table(
        {
            "user": [f"u{n}" for n in np.minimum(rng.zipf(1.25, size), users)],
            "key": [f"k{n}" for n in rng.integers(0, 30, size)],
            "ts": times,
            "seen": np.maximum(times + rng.integers(-7 * HOUR, 2 * HOUR, size), 0),
            "x": rng.integers(-5, 9, size),
        }
    )


def lost(plan, bounds, recording, unit):
    """The part of mu^2 that one unit of a period may take, by what was kept of it and its noise.

    Of each column sum ||d_g||_1^2 over sigma^2, by the bound that each group's window had.
    """
    groups = Counter((w, g) for u, _, w, g, *_ in recording.kept.elements() if u == unit)
    parts = defaultdict(Fraction)
    for (window, _), rows in groups.items():
        of_window = plan.of_bounds(bounds(window))
        for number, measure in enumerate(of_window.query.measures):
            most = 1 if measure.kind == "units" else rows * measure.largest
            parts[number] += Fraction(most) ** 2 / of_window.sensitivities[number] ** 2
    return max(parts.values(), default=Fraction(0))


class Rising(RisingBounds, query_replay._RecordingFlow):
    """The control, recorded: its bounds are by window."""


@pytest.mark.parametrize(
    ("flow", "window", "sound", "facts"),
    [
        (query_replay._RecordingFlow, Tumble("2 hours"), True, {}),
        (query_replay._RecordingFlow, Cumulate("6 hours", step="2 hours"), True, {}),
        (query_replay._RecordingFlow, Tumble("2 hours"), True, ALL_CHOSEN),
        (Rising, Tumble("2 hours"), False, {}),
    ],
)
def test_no_unit_loses_more_than_the_charge(monkeypatch, flow, window, sound, facts):
    """Over all windows of its period, whatever bound that has; with one that rises it does."""
    plan = plan_query(asked(window=window, **facts))
    monkeypatch.setattr(query_replay, "_RecordingFlow", flow)
    seen = record_query(plan, heavy())

    def bound(window):
        if not sound:
            groups = RisingBounds.BOUNDS[window % len(RisingBounds.BOUNDS)]
            return replace(plan.query.first_bounds, groups=groups)
        return seen.bounds[period_of(plan.query, window)][0]

    worst = max(lost(plan, bound, seen, unit) for unit in seen.units())

    assert (worst <= 1) is sound
    assert worst > 0.9  # the heaviest units fill their bounds
    assert len({bounds for bounds, _ in seen.bounds.values()}) > 1 or not sound


@pytest.mark.parametrize("facts", [{}, ALL_CHOSEN])
def test_a_unit_moves_its_period_alone(facts):
    """Each of some units is taken away: nothing else moves, its columns by what its bound says, and
    one bin of each of its period's histograms by one."""
    plan, rows = plan_query(asked(**facts)), heavy(size=1500)
    whole_run = record_query(plan, rows)
    users = rows["user"].to_pylist()
    periods = np.array(rows["ts"]) // (6 * HOUR)
    for user, period in (("u1", 0), ("u1", 3), ("u2", 2), ("u9", 1)):
        gone = [u == user and p == period for u, p in zip(users, periods, strict=True)]
        less = record_query(plan, rows.filter(pa.array([not g for g in gone])), frozen=whole_run)
        chosen = plan.of_bounds(whole_run.bounds[period][0])

        assert compare(chosen, whole_run, less).violations == []
        last = last_window_of(plan.query, period)
        for window in whole_run.histograms:
            moved = np.subtract(whole_run.histograms[window], less.histograms[window])
            first = 0
            for each in plan.query.candidates:
                of_each = moved[first : first + len(each.bins)]
                first += len(each.bins)
                assert np.abs(of_each).sum() == (window == last)
                assert of_each.sum() == (window == last)
            assert first == len(moved)


@pytest.mark.parametrize("lateness", ["0 seconds", "1 hour"])
def test_the_histogram_is_that_of_all_groups(lateness):
    """Of each unit all groups that it has rows in count, kept or not, and late rows, too."""
    query, rows = asked(allowed_lateness=lateness), heavy()
    seen = record_query(plan_query(query), rows)
    reached = defaultdict(set)
    for user, key, at, came in zip(
        *(rows[n].to_pylist() for n in rows.column_names[:4]), strict=True
    ):
        window = at // (2 * HOUR)
        if query.schedule.last_step(window) * HOUR + HOUR > came:
            reached[user, at // (6 * HOUR)].add((key, window))
    for window, histogram in seen.histograms.items():
        period = period_of(query, window)
        counts = [len(groups) for (_, at), groups in reached.items() if at == period]
        bins = np.searchsorted(query.choices, counts)
        assert histogram == tuple(np.bincount(bins, minlength=len(query.choices) + 1))
    assert len(seen.histograms) == 4


def test_histograms_of_rows_and_values_are_of_one_group_and_one_row_each():
    """Of each unit one group's rows are counted, late ones too, and one value; the groups and rows
    are those of the data, whichever they are."""
    plan, rows = plan_query(asked(**ALL_CHOSEN)), heavy(size=3000)
    query, seen = plan.query, record_query(plan, rows)
    sizes, values = defaultdict(Counter), defaultdict(set)
    for user, key, at, came, x in zip(*(column.to_pylist() for column in rows), strict=True):
        window = at // (2 * HOUR)
        if query.schedule.last_step(window) * HOUR + HOUR > came:
            sizes[user, at // (6 * HOUR)][key, window] += 1
            values[user, at // (6 * HOUR)].add(x)
    edges = [len(each.bins) for each in query.candidates]
    of_rows = query.candidates[1]
    for window, histogram in seen.histograms.items():
        period = period_of(query, window)
        units = [unit for unit in sizes if unit[1] == period]
        parts = np.split(np.array(histogram), np.cumsum(edges)[:-1])
        rows_of = [sizes[unit].values() for unit in units]
        counts = [{int(np.searchsorted(of_rows.edges, n)) for n in some} for some in rows_of]
        high = [{int(np.searchsorted(CLAMPS, max(x, 0))) for x in values[unit]} for unit in units]
        both = [{int(np.searchsorted(CLAMPS, abs(x))) for x in values[unit]} for unit in units]
        for part, known in zip(parts[1:], (counts, high, both), strict=True):
            assert part.sum() == len(units)
            for number, units_there in enumerate(part.tolist()):
                sure = sum(bins == {number} for bins in known)
                assert sure <= units_there <= sum(number in bins for bins in known)
    assert sum(max(sizes[unit].values()) > 4 for unit in sizes) > 3


def test_rows_of_one_group_are_counted_over_all_steps():
    """Users with one group of a known size each, in rows of both hours of a window."""
    sizes = np.repeat([1, 2, 3, 5, 9, 40], [30, 25, 20, 15, 10, 5])
    who = np.repeat(np.arange(len(sizes)), sizes)
    ts = np.arange(len(who)) * 977 % (2 * HOUR)
    rows = pa.table(
        {"user": [f"u{n}" for n in who], "key": ["k"] * len(who), "ts": ts, "seen": ts, "x": ts}
    )
    plan = plan_query(asked(**ALL_CHOSEN))
    groups, of_rows = plan.query.candidates[:2]
    first = record_query(plan, rows).histograms[2]  # of the first period, by its last window

    expected = np.bincount(np.searchsorted(of_rows.edges, sizes), minlength=len(of_rows.bins))
    assert first[len(groups.bins) :][: len(of_rows.bins)] == tuple(expected)


def test_chosen_clamps_are_what_sums_are_made_of():
    """Made anew from rows, the exact sums are those of the clamps of each period."""
    facts = {
        "public_groups": ["k0", "k1", "k2"],
        "max_groups_contributed": 1,
        "max_rows_per_group": 4,
        "epsilon": 24,
        "aggregates": (Count("n"), *ALL_CHOSEN["aggregates"][2:4]),
        "allowed_lateness": "0 seconds",
        "arrival_column": None,
        "every": None,
    }
    rng, users = np.random.default_rng(7), 900  # each has four rows in one group of each period
    unit = np.repeat(np.arange(4 * users), 4)
    period = unit // users
    big = np.where(rng.random(len(unit)) < 0.5, 1, 7) * rng.integers(-9, 10, len(unit))
    big = np.where(period == 0, big, 40 * big)
    ts = period * 6 * HOUR + unit % 3 * 2 * HOUR + rng.integers(0, 2 * HOUR, len(unit))
    rows = pa.table(
        {
            "user": [f"u{n}" for n in unit % users],
            "key": [f"k{n}" for n in unit % 9 // 3],
            "ts": ts,
            "seen": ts,
            "x": big,
        }
    )
    query = asked(**facts)
    plan, clamps = plan_query(query), {}
    for _, publication in run_plan(plan, rows):
        table = publication.table
        told = json.loads(table.schema.metadata[b"dpstream"])["bounds"]
        (lo, hi), (_, far) = (told["contribution_bounds_per_row"][name] for name in ("s", "mean"))
        assert lo == 0.0
        clamps[publication.due.window // 3] = hi
        inside = np.array(rows["ts"]) // (2 * HOUR) == publication.due.window
        keys, x = np.array(rows["key"])[inside], big[inside]
        for key, s, of_s, n, of_n, mean in zip(
            *(
                table[name].to_pylist()
                for name in ("key", "s", "s_stddev", "n", "n_stddev", "mean")
            ),
            strict=True,
        ):
            mine = x[keys == key]
            assert abs(n - len(mine)) <= 6.5 * of_n + 1
            assert abs(s - np.clip(mine, 0, hi).sum()) <= 6.5 * of_s + hi / 1000 * len(mine)
            if len(mine) > 20:
                assert abs(mean - np.clip(mine, -far, far).mean()) < far / 4
    assert clamps[0] == 10.0
    assert clamps[1] >= 10.0
    assert clamps[3] >= 500.0


def run_with(flow, rows, asked_for):
    plan = plan_query(asked_for)
    list(run_plan(plan, rows, flow=flow))
    return plan


def test_histograms_have_the_noise_that_is_paid():
    """Two-sided: the standard deviation of the plan passes, a fifth more or less fails.

    1,152 bins; chi-squared at a false-alarm rate of 1e-7.
    """
    noises = []

    class Watched(Flow):
        def noisy_histogram(self, due, spend):
            noisy = super().noisy_histogram(due, spend)
            if noisy:
                noises.extend(
                    np.subtract(noisy, self.histogram(due.window).bucket.table.numbers[0])
                )
            return noisy

    for run in range(3):
        plan = plan_query(
            asked(window=Tumble("1 hour"), privacy_unit_period="1 hour", max_rows_per_group=1)
        )
        list(run_plan(plan, heavy(size=300), flow=Watched, secret=bytes([run]) * 32))
    stddev = math.sqrt(np.mean(np.square(noises)))
    expected = float(plan.histogram.stddevs[0, 0])

    assert len(noises) == 3 * 24 * (len(plan.query.choices) + 1)
    within = 5.4 / math.sqrt(2 * len(noises))
    assert abs(stddev / expected - 1) < within < 0.2
    assert math.isclose(plan.histogram.sigmas[0] ** -2, float(plan._split[-1]), rel_tol=1e-6)
    assert float(sum(plan._split)) <= float(plan.total) * (1 + 1e-12)
    assert math.isclose(float(plan._split[-1] / plan.total), 0.02, rel_tol=1e-6)


def test_bounds_are_read_off_what_was_published():
    """Made anew of noisy histograms and last tables alone, they are the same."""
    told, tables = {}, []

    class Watched(Flow):
        def noisy_histogram(self, due, spend):
            noisy = super().noisy_histogram(due, spend)
            if noisy:
                tables.append(("histogram", due.window, noisy))
            return noisy

        def _choose(self, due, noisy, spend):
            if due.release == due.releases:
                sums = np.concatenate([part.sums for part in noisy])
                tables.append(
                    ("table", due.window, sums[np.random.default_rng(0).permutation(len(sums))])
                )
            super()._choose(due, noisy, spend)

        def begin_windows(self, step):
            digests = super().begin_windows(step)
            if digests:
                tables.append(("begin", list(digests), None))
            told.update(self.chosen.of_periods)
            return digests

    plan = run_with(Watched, heavy(), asked())
    again, known = ChosenBounds.of(plan.query), {}
    for kind, window, what in tables:
        if kind == "begin":
            again.begin(plan, window)
            known |= again.of_periods
            copy = ChosenBounds.of(plan.query)
            copy.restore(again.save())
            assert copy == again
            again = copy
        elif kind == "table":
            again.take_in_table(plan, window, what)
        else:
            again.take_in_histogram(plan.query, period_of(plan.query, window), what)

    assert known == told
    assert len({groups for groups, _ in told.values()}) > 1


def test_another_query_changes_nothing(tmp_path):
    """Two queries over one source and book: each publishes what it publishes alone."""
    rows = table(2000)
    one = replace(CHOOSING, epsilon=6, delta=1e-3)
    other = query(name="other", epsilon=6, privacy_unit_period="2 hours", window=Tumble("2 hours"))
    book = {"epsilon": 16, "delta": 1e-2}

    def tables(*queries):
        path = tmp_path / "-".join(each.name for each in queries)
        with closing(Ledger(path)) as ledger:
            ledger.admit("stream", CHOOSING.promise(**book), "a test")
            settings = {
                "source": rows,
                "secret": SECRET,
                "ledger": ledger,
                "state": f"{path}.state",
            }
            runs = dps.run_all(list(queries), **settings, options=options())
            return {
                name: [(t.schema.metadata, t.to_pydict()) for t in some]
                for name, some in runs.collect().items()
            }

    both = tables(one, other)
    assert both == tables(one) | tables(other)
    assert b"bounds" in both["clicks"][-1][0][b"dpstream"]


def test_a_state_with_other_bounds_is_refused(tmp_path, monkeypatch):
    """What a period's windows begin with is in the digest that was logged before they drew."""
    query_of_period = query(max_groups_contributed="auto", window=Tumble("2 hours"))
    rows = table(4000)
    write(tmp_path, rows)
    break_off(tmp_path, 9, query_of_period, every=4)
    real = ChosenBounds._choose
    monkeypatch.setattr(
        ChosenBounds, "_choose", lambda self, plan, releases: PeriodBounds(groups=3)
    )
    with pytest.raises(NoiseReuse):
        start(tmp_path, query_of_period, every=40).finish()
    monkeypatch.setattr(ChosenBounds, "_choose", real)
    start(tmp_path, query_of_period, every=4).finish()

    assert published(tmp_path) == whole(tmp_path / "whole", query_of_period, rows=rows)


EDGES = (1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256)


def period(sizes, rng, stddev, shown=400, squares=None):
    bins = np.bincount(np.searchsorted(EDGES, sizes), minlength=len(EDGES) + 1)
    noisy = np.rint(bins + rng.normal(0, stddev, len(bins))).astype(int)
    squares = float(len(sizes)) ** 2 / 20 if squares is None else squares
    return PublishedPeriod(histograms=(tuple(noisy.tolist()),), shown=shown, squares=squares)


def best_bound(edges, known, *, current, noise, stddev):
    """The choice where groups alone are chosen, by the count of units."""
    return best_bounds(
        (Candidates(kind="groups", edges=edges, first=8),),
        known,
        current=PeriodBounds(groups=current),
        columns=[JudgedColumn(kind="units", clamp=None, usual_rows=1.0)],
        noise=lambda bounds: [noise(bounds.groups)],
        stddev=stddev,
    ).groups


def exact_error(sizes, groups, noise, shown, squares):
    share = 1 - np.minimum(sizes, groups).sum() / sizes.sum()
    return math.hypot(share * math.sqrt(squares), noise(groups) * math.sqrt(shown))


@pytest.mark.parametrize("users", [1_000, 10_000, 100_000])
@pytest.mark.parametrize("shape", [1.1, 1.5, 2.5])
def test_the_choice_is_near_the_best_fixed_bound(users, shape):
    """Power laws, 14 periods: at most 1.15 times the least error of all bounds."""
    rng, noise = (
        np.random.default_rng(users + int(10 * shape)),
        lambda groups: 12 * math.sqrt(groups),
    )
    draw = lambda: np.floor(rng.pareto(shape, users) + 1).astype(int)  # noqa: E731
    known = [period(draw(), rng, stddev=20.0) for _ in range(PERIODS)]
    chosen = 8
    chosen = best_bound(EDGES, known, current=chosen, noise=noise, stddev=20.0)
    sizes, facts = draw(), (noise, 400, float(users) ** 2 / 20)
    errors = {groups: exact_error(sizes, groups, *facts) for groups in EDGES}

    assert errors[chosen] <= 1.15 * min(errors.values())


def test_the_choice_follows_users_who_change_their_habits():
    """Users with few groups, then with many: two periods later the bound is near the best again."""
    rng, chosen = np.random.default_rng(5), 8
    noise = lambda groups: 12 * math.sqrt(groups)  # noqa: E731
    known = []
    for day in range(3 * PERIODS):
        sizes = np.floor(rng.pareto(2.5 if day < PERIODS else 1.1, 20_000) + 1).astype(int)
        best_fixed = min(exact_error(sizes, g, noise, 400, 2e7) for g in EDGES)
        error = exact_error(sizes, chosen, noise, 400, 2e7)
        assert error <= 1.15 * best_fixed or day < 8 or PERIODS <= day < PERIODS + 2, day
        known = [*known, period(sizes, rng, 20.0)][-PERIODS:]
        chosen = best_bound(EDGES, known, current=chosen, noise=noise, stddev=20.0)


def test_a_bound_stays_where_nothing_is_known():
    """Noise alone, or a gain below a tenth, moves nothing."""
    rng = np.random.default_rng(1)
    facts = {"current": 8, "noise": lambda groups: math.sqrt(groups), "stddev": 30.0}
    nobody = [period(np.zeros(0, int), rng, 30.0, shown=0, squares=0.0) for _ in range(3)]

    assert best_bound(EDGES, [], **facts) == 8
    assert best_bound(EDGES, nobody, **facts) == 8
    for seed in range(50):
        rng = np.random.default_rng(seed)
        few = [period(np.ones(20, int), rng, 30.0, shown=3, squares=300.0)]
        assert best_bound(EDGES, few, **facts) in (1, 8)  # never up


def test_what_is_refused():
    """With words that say what to do."""
    for wrong, word in (
        ({"privacy_unit_period": "forever", "max_rows_per_group": "auto"}, "a unit for ever has"),
        ({"window": None, "max_rows_per_group": "auto"}, "needs windows"),
        ({"privacy_unit_period": "forever", "strategy": "sqlp"}, "sqlp"),
        ({"strategy": "sqlp"}, "sqlp"),
        ({"max_rows_contributed": 5}, "max_rows_contributed"),
        ({"grouping_sets": [["key"], []], "aggregates": (Count("n"),)}, "grouping_sets"),
        ({"max_rows_per_group": "auto", "aggregates": (CountUnits("n"),)}, "aggregate of rows"),
        ({**ALL_CHOSEN, "privacy_unit_period": "forever", "max_groups_contributed": 3}, "give a"),
        ({**ALL_CHOSEN, "strategy": "sqlp", "max_groups_contributed": 3}, "sqlp"),
    ):
        with pytest.raises(InvalidParameter, match=word):
            asked(**wrong)
    for kind, facts, word in (
        (Sum, {"contribution_bounds_per_row": ("auto", 5)}, "must be a finite number"),
        (Sum, {"contribution_bounds_per_row": (1, "auto")}, "write 'auto'"),
        (Avg, {"contribution_bounds_per_row": (0, "auto")}, "write 'auto'"),
        (Variance, {"contribution_bounds_per_row": "auto"}, "give two numbers"),
        (Sum, {"contribution_bounds_per_group": "auto"}, "give two numbers"),
        (Sum, {"contribution_bounds_per_row": "auto", "quantum": 1}, "leave quantum out"),
    ):
        with pytest.raises(InvalidParameter, match=word):
            kind("s", column="x", **facts)
    for mixed in (
        {"window": Hop("6 hours", slide="2 hours")},
        {"window": Tumble("12 hours")},
        {"window": Tumble("4 hours")},
        {"window": Cumulate("12 hours", step="2 hours")},
        {"start": "1970-01-01T01:00"},
    ):
        with pytest.raises(InvalidParameter, match="lie within a period"):
            plan_query(asked(**mixed))
    plan_query(asked(window=Cumulate("6 hours", step="2 hours")))
    plan = plan_query(asked())
    ledger = Ledger()
    ledger.admit("book", plan_query(asked(privacy_unit_period="24 hours")).terms(), "another")
    with pytest.raises(LedgerError, match="bounds that are chosen"):
        plan.terms(ledger.terms("book"))


def test_a_query_with_one_group_has_nothing_to_choose():
    """Without keys and with one window in a period there is one group."""
    alone = asked(keys=(), window=Tumble("6 hours"))

    assert alone.choices == ()
    assert asked(keys=()).choices == (1, 2, 3)
    assert asked(public_groups=["a", "b"]).choices == (1, 2, 3, 4, 6)
    assert "choose_groups" not in query_of().facts()
    assert isinstance(asked().with_bounds(PeriodBounds(groups=4)), Query)
