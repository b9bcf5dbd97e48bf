import math
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest

from benchmarks import sqlp, sqlp_runs
from benchmarks.click_log import ClickLog, parts, records_of, zipf_mandelbrot
from benchmarks.harness import run as run_bench
from benchmarks.sqlp import QUICK
from benchmarks.sqlp_published import Events, SqlpPublished
from dpstream.connectors.testing import ListSink
from dpstream.query.noise_plan import plan_query
from dpstream.query.query import Query
from dpstream.session import run

TRIGGERS, ROWS = 12, 3


def clicks(users=1500, seed=4):
    """Users with 1 to 6 rows over keys of all sizes, some of them twice, in time order."""
    rng = np.random.default_rng(seed)
    who = np.repeat(np.arange(users), rng.integers(1, 7, users))
    rng.shuffle(who)
    keys = np.minimum(rng.zipf(1.3, len(who)), 40) - 1
    at = np.sort(rng.integers(0, TRIGGERS * 3600, len(who)))
    return Events(users=who, keys=keys, triggers=(at // 3600).astype(np.int16)), at


@dataclass(frozen=True, kw_only=True)
class WithPlan(SqlpPublished):
    """The simulation with the engine's noise and thresholds."""

    selection_sigma: float = 1.0
    sum_sigma: float = 1.0
    levels_of_plan: tuple[int, ...] = ()

    @property
    def thresholds(self):
        return np.array(self.levels_of_plan) - 0.5 - self.pre_threshold


@pytest.mark.bench
def test_the_simulation_does_what_the_engine_does():
    """With the engine's noise and thresholds it publishes as many keys, and the same sums.

    Means over runs differ by less than 5.5 standard errors: a false-alarm rate of 10^-7. With a
    round that never begins anew they differ by far more.
    """
    events, at = clicks()
    query = Query(
        privacy_unit_column="user", keys=["key"], epsilon=8, delta=1e-3,
        time_column="at", time_unit="s", start="1970-01-01", end="1970-01-01T12:00:00",
        every="1 hour", strategy="sqlp",
        max_groups_contributed=ROWS, max_rows_per_group=ROWS, max_rows_contributed=ROWS,
    )  # fmt: skip
    table = pa.table({"user": events.users, "key": events.keys, "at": at})
    plan = plan_query(query).window(TRIGGERS)
    forms = {"pre_threshold": plan.pre_threshold, "levels_of_plan": tuple(plan.thresholds)}
    model = WithPlan(
        triggers=TRIGGERS, rows=ROWS, selection_sigma=plan.sigmas[0], sum_sigma=plan.sigmas[1],
        **forms,
    )  # fmt: skip

    def by_engine():
        sink, last = ListSink(), {}
        run(query, source=table, sink=sink).finish()
        for _, found in sorted(sink.tables.items()):
            last |= dict(zip(found["key"].to_pylist(), found["count"].to_pylist(), strict=True))
        return len(last), sum(last.values())

    def by_model(number):
        values = model.publish(events, keys=40, rng=np.random.default_rng(number))
        return (~np.isnan(values)).sum(), np.nansum(values)

    ours = np.array([by_engine() for _ in range(40)], float)
    theirs = np.array([by_model(number) for number in range(400)], float)
    for column in range(2):
        one, two = ours[:, column], theirs[:, column]
        error = math.hypot(one.std() / math.sqrt(len(one)), two.std() / math.sqrt(len(two)))
        assert abs(one.mean() - two.mean()) < 5.5 * error + 1e-9
        assert error < 0.2 * one.std()


def test_published_noise_is_the_papers():
    """Known scales at 100 and 1,000 triggers, and the quantile of one trigger alone."""
    few, many = SqlpPublished(triggers=100), SqlpPublished(triggers=1000)
    assert few.sum_sigma == pytest.approx(177.170, abs=1e-3)
    assert many.sum_sigma == pytest.approx(211.758, abs=1e-3)
    proper = SqlpPublished(triggers=100, for_all_triggers=True)
    assert (proper.thresholds > 1.05 * few.thresholds).all()


def test_bounding_by_hand():
    """The first rows of each user are kept; a row knows its user's earlier one of the same key."""
    events = Events(
        users=np.array([0, 1, 0, 0, 1, 0]),
        keys=np.array([5, 5, 5, 6, 5, 5]),
        triggers=np.array([0, 0, 1, 1, 2, 3], np.int16),
    )
    kept, before = events.bounded(3)
    assert kept.tolist() == [True, True, True, True, True, False]
    assert before.tolist() == [-1, -1, 0, -1, 0, -1]


def test_hopeless_keys_do_not_matter(monkeypatch):
    """Leaving out keys that cannot pass changes nothing but the time it takes: 5.5 errors apart."""
    events, _ = clicks()
    model = SqlpPublished(triggers=TRIGGERS, rows=ROWS, epsilon=40.0)
    assert 0 < model._hopeless(40) < np.bincount(events.keys).max()

    def keys():
        runs = [model.publish(events, keys=40, rng=np.random.default_rng(n)) for n in range(200)]
        return np.array([(~np.isnan(values)).sum() for values in runs], float)

    some = keys()
    monkeypatch.setattr(SqlpPublished, "_hopeless", lambda *_: 0)
    every = keys()
    error = math.hypot(some.std(), every.std()) / math.sqrt(200)
    assert abs(some.mean() - every.mean()) < 5.5 * error + 1e-9


def test_composition_of_pure_queries():
    """Kairouz, Oh and Viswanath against the sum over all outcomes of three queries."""
    each, epsilon = 0.4, 0.7
    high, low = math.exp(each) / (1 + math.exp(each)), 1 / (1 + math.exp(each))
    total = 0.0
    for outcome in np.ndindex(2, 2, 2):
        one = math.prod(high if bit else low for bit in outcome)
        other = math.prod(low if bit else high for bit in outcome)
        total += max(one - math.exp(epsilon) * other, 0.0)
    assert sqlp_runs.composed_delta(each, 3, epsilon) == pytest.approx(total)
    each, own = sqlp_runs.share(epsilon=6, delta=1e-9, times=100)
    assert sqlp_runs.composed_delta(each, 100, 6) <= 5e-10
    assert sqlp_runs.composed_delta(each * 1.01, 100, 6) > 5e-10
    assert 100 * own == pytest.approx(5e-10, rel=1e-3)


def test_baselines_find_large_keys_only():
    """Both publish what stands out, and nothing else; the incremental one loses what is spread."""
    rng = np.random.default_rng(2)
    users = np.arange(40_000)
    events = Events(
        users=users,
        keys=np.where(users % 2, 0, 1 + rng.integers(0, 2000, len(users))),
        triggers=np.sort(rng.integers(0, 4, len(users))).astype(np.int16),
    )
    one = sqlp_runs.OneShot(epsilon=6, delta=1e-9, rows=2)
    for form in (sqlp_runs.repeated, sqlp_runs.incremental):
        values = form(events, keys=2001, triggers=4, one=one, rng=rng)
        assert np.flatnonzero(~np.isnan(values)).tolist() == [0]
        assert values[0] == pytest.approx(20_000, abs=20 * 4 * one.sum_sigma)


def test_data_are_the_papers():
    """Counted from 0 the laws give the paper's totals, counted from 1 they do not."""
    assert abs(records_of(10_000_000, first=0) - 59_052_062) < 60_000
    assert abs(records_of(10_000_000) - 59_052_062) > 2_000_000
    law = zipf_mandelbrot(10_000, 26.0, 6.738, first=0)
    assert law[10:].sum() == pytest.approx(0.15, abs=1e-3)
    log = ClickLog(records=20_000, keys=1000, first=0)
    users = np.concatenate([who for _, who, _ in parts(log)])
    assert len(users) / (users.max() + 1) == pytest.approx(5.905, rel=0.05)


def test_metrics_count_what_is_not_shown():
    """A hidden key is an error of its whole size."""
    found = sqlp_runs.metrics(np.array([np.nan, 3.0, np.nan]), np.array([4, 0, 0]))
    assert found == {"keys": 1, "l_inf": 4.0, "l_1": 7.0, "l_2": 5.0}


@pytest.mark.bench
def test_a_short_run_measures_everything(monkeypatch, tmp_path):
    """Rows of every part, and every target judged or left open with a reason."""
    monkeypatch.setenv("DPSTREAM_BENCH_CACHE", str(tmp_path))
    monkeypatch.delenv("DPSTREAM_DATA", raising=False)
    small = {"users": 3000, "keys": 500, "batch_users": 1000, "triggers": (10,), "batches": (5,)}
    small["posters"] = 2_000
    monkeypatch.setattr("benchmarks.sqlp.QUICK", type(QUICK)(**vars(QUICK) | small))
    result = run_bench("sqlp", quick=True, out=tmp_path)
    assert {row["part"] for row in result["rows"]} == {
        "table 1", "table 2", "figure 9", "figure 10",
    }  # fmt: skip
    assert len(result["targets"]) == 6 + 2 * 16
    assert all(one["reached"] is None and one["reason"] for one in result["targets"])


def test_targets_compare_with_the_better_rival():
    """A ratio to the weaker of the published and the shipped form would flatter."""
    row = {"part": "table 1", "triggers": 100}
    forms = {sqlp_runs.PUBLISHED: 100.0, sqlp.SHIPPED: 120.0, sqlp.LATCHED: 180.0}
    rows = [
        row | {"form": form} | dict.fromkeys(sqlp_runs.METRICS, value)
        for form, value in forms.items()
    ]
    found = {one["name"]: one for one in sqlp.targets(rows, quick=True)}
    assert found["latched, 100 triggers: keys over sqlp's"]["value"] == pytest.approx(1.5)
    assert found["latched, 100 triggers: l_1 over sqlp's"]["value"] == pytest.approx(1.8)
