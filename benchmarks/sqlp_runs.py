"""One form of the query over one log: what its last table holds, and how far off it is.

Forms that ship run in the engine; the published form and the paper's two baselines are simulated.
Baseline 1: every trigger asks the whole question again over all rows so far, each time under an
equal share of the budget by the optimal composition theorem. Baseline 2: every trigger asks it over
its own rows alone, and the answers are added up; users are bounded over the day, so their rows'
shifts add up and every trigger may use the whole budget.

The paper runs both through Plume without saying how it splits the budget. Here a query takes half
of epsilon for choosing keys (analytic Gaussian, users counted once per key) and half for sums
(sensitivity C, as the paper has it), and delta in thirds: noise, threshold, sums.
Papers: Zhang et al., "Differentially Private Stream Processing at Scale", 2023; Kairouz, Oh,
Viswanath, "The Composition Theorem for Differential Privacy", 2017.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from scipy.special import gammaln
from scipy.stats import norm

from benchmarks import click_log
from benchmarks.click_log import DAY, START, ClickLog
from benchmarks.harness import Row
from benchmarks.sqlp_published import Events, SqlpPublished
from dpstream.engines.query_run import EngineOptions
from dpstream.privacy.accounting.curves import gdp_mu
from dpstream.query.aggregates import Count
from dpstream.query.noise_plan import USUAL_INTERVAL
from dpstream.query.query import Query
from dpstream.query.windows import Tumble
from dpstream.records import Reals
from dpstream.session import run

EPSILON: Final = 6.0
DELTA: Final = 1e-9
ROWS: Final = 32
METRICS: Final = ("keys", "l_inf", "l_1", "l_2")
PUBLISHED: Final = "sqlp as published"
FOR_ALL: Final = "sqlp, bound for all triggers"
REPEATED: Final = "baseline 1: repeated"
INCREMENTAL: Final = "baseline 2: incremental"
SIMULATED: Final = (PUBLISHED, REPEATED, INCREMENTAL)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The last value of each key (NaN: never shown), and seconds: all of them, per trigger."""

    values: Reals
    seconds: float
    latencies: list[float] = field(default_factory=list)
    stddevs: Reals | None = None
    """What is told of each value; None: nothing."""

    def row(self, truth: npt.NDArray[Any]) -> Row:
        """The paper's four metrics, the median key's error, how often two deviations hold, time."""
        return metrics(self.values, truth) | self._of_shown(truth) | {"seconds": self.seconds}

    def _of_shown(self, truth: npt.NDArray[Any]) -> Row:
        shown = ~np.isnan(self.values)
        off = np.abs(self.values[shown] - truth[shown])
        told: Row = {"median": None, "coverage": None}
        if shown.any():
            told["median"] = float(np.median(off / np.maximum(truth[shown], 1)))
        if shown.any() and self.stddevs is not None:
            told["coverage"] = float(np.mean(off <= USUAL_INTERVAL * self.stddevs[shown]))
        return told


def metrics(values: Reals, truth: npt.NDArray[Any]) -> Row:
    """Over all keys of the truth; a key that is not shown counts as published with 0.

    >>> metrics(np.array([5.0, np.nan]), np.array([9, 3]))
    {'keys': 1, 'l_inf': 4.0, 'l_1': 7.0, 'l_2': 5.0}
    """
    errors = np.abs(np.nan_to_num(values) - truth)
    return {
        "keys": int((~np.isnan(values)).sum()),
        "l_inf": float(errors.max()),
        "l_1": float(errors.sum()),
        "l_2": float(np.sqrt((errors**2).sum())),
    }


def events(log: ClickLog, triggers: int) -> Events:
    """The log's rows as numbers: 10 bytes each."""
    users = np.empty(log.records, np.int32)
    keys, at = np.empty_like(users), np.empty(log.records, np.int16)
    done = 0
    for times, who, which in click_log.parts(log):
        rows = slice(done, done + len(times))
        users[rows], keys[rows], at[rows] = who, which, times * triggers // DAY
        done += len(times)
    return Events(users=users, keys=keys, triggers=at)


def truth_of(log: ClickLog) -> npt.NDArray[Any]:
    """Rows of each key, by rank."""
    found = np.zeros(log.keys, np.int64)
    for _, _, which in click_log.parts(log):
        found += np.bincount(which, minlength=log.keys)
    return found


def query(triggers: int, **options: Any) -> Query:
    """A day of clicks per URL; unless told, a user counts for `ROWS` URLs, once each."""
    day = timedelta(days=1)
    known: dict[str, Any] = {
        "name": "clicks",
        "privacy_unit_column": "user_id",
        "keys": ("url",),
        "aggregates": (Count("clicks"),),
        "epsilon": EPSILON,
        "delta": DELTA,
        "time_column": "ts",
        "window": Tumble("1 day"),
        "every": day / triggers,
        "start": START,
        "end": START + day,
        "max_groups_contributed": ROWS,
    }
    return Query(**known | options)


def engine(log: ClickLog, asked: Query) -> Found:
    """The query over the log's files, in the engine; no state directory."""
    source = str(click_log.files(log) / "*.parquet")
    values, stddevs = np.full(log.keys, np.nan), np.full(log.keys, np.nan)
    began = time.perf_counter()
    latencies, before = [], began
    for table, last in _marked(run(asked, source=source, options=EngineOptions())):
        if last or asked.strategy == "sqlp":  # whose tables hold what is new alone
            ranks = _ranks(table["url"])
            values[ranks] = table["clicks"].to_numpy()
            stddevs[ranks] = table["clicks_stddev"].to_numpy()
        now = time.perf_counter()
        latencies.append(now - before)
        before = now
    seconds = time.perf_counter() - began
    return Found(values=values, seconds=seconds, latencies=latencies, stddevs=stddevs)


def _marked(tables: Iterable[pa.Table]) -> Iterator[tuple[pa.Table, bool]]:
    """Each table, and whether it is the last."""
    before = None
    for table in tables:
        if before is not None:
            yield before, False
        before = table
    if before is not None:
        yield before, True


def _ranks(urls: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """The number at the end of each URL."""
    ranks: npt.NDArray[np.int64] = pc.cast(pc.utf8_slice_codeunits(urls, -6), pa.int64()).to_numpy()
    return ranks


def simulated(form: str, given: Events, *, keys: int, triggers: int, rows: int = ROWS) -> Found:
    """A form that does not ship; its noise is fixed by what it is given."""
    rng = np.random.default_rng([len(given.users), keys, triggers, rows])
    one = OneShot(epsilon=EPSILON, delta=DELTA, rows=rows)
    forms: dict[str, Callable[[], Reals]] = {
        PUBLISHED: lambda: SqlpPublished(
            triggers=triggers, rows=rows, epsilon=EPSILON, delta=DELTA
        ).publish(given, keys=keys, rng=rng),
        FOR_ALL: lambda: SqlpPublished(
            triggers=triggers, rows=rows, epsilon=EPSILON, delta=DELTA, for_all_triggers=True
        ).publish(given, keys=keys, rng=rng),
        REPEATED: lambda: repeated(given, keys=keys, triggers=triggers, one=one, rng=rng),
        INCREMENTAL: lambda: incremental(given, keys=keys, triggers=triggers, one=one, rng=rng),
    }
    began = time.perf_counter()
    values = forms[form]()
    return Found(values=values, seconds=time.perf_counter() - began)


@dataclass(frozen=True, kw_only=True)
class OneShot:
    """Noise and threshold of one (epsilon, delta) query for users with at most `rows` rows."""

    epsilon: float
    delta: float
    rows: int

    @property
    def units_sigma(self) -> float:
        """A user counts once in each of up to C keys: L2 sensitivity sqrt(C)."""
        mu = gdp_mu(epsilon=self.epsilon / 2, delta=self.delta / 3)
        return math.sqrt(self.rows) / mu

    @property
    def threshold(self) -> float:
        """Noisy users that no key of one user alone passes."""
        quantile = float(norm.isf(self.delta / 3 / self.rows))
        return 1 + quantile * self.units_sigma

    @property
    def sum_sigma(self) -> float:
        """All C rows may be of one key."""
        return self.rows / gdp_mu(epsilon=self.epsilon / 2, delta=self.delta / 3)

    def answer(self, units: Reals, sums: Reals, rng: np.random.Generator) -> Reals:
        """Noisy sums of the keys that pass; NaN for the others."""
        noisy = units + self.units_sigma * rng.standard_normal(len(units))
        values = sums + self.sum_sigma * rng.standard_normal(len(sums))
        return np.where((units > 0) & (noisy >= self.threshold), values, np.nan)


def share(*, epsilon: float, delta: float, times: int) -> tuple[float, float]:
    """The largest (epsilon, delta) that a query may have if `times` of them keep the promise.

    Half of delta is for the queries' own deltas.

    >>> each, _ = share(epsilon=6, delta=1e-9, times=1)
    >>> round(each, 3)
    6.0
    """
    own = -math.expm1(math.log1p(-delta / 2) / times)
    low, high = 0.0, epsilon
    for _ in range(60):
        middle = (low + high) / 2
        if composed_delta(middle, times, epsilon) <= delta / 2:
            low = middle
        else:
            high = middle
    return low, own


def composed_delta(each: float, times: int, epsilon: float) -> float:
    """The delta of `times` pure queries of `each` (Kairouz, Oh and Viswanath, Theorem 3.3).

    >>> round(composed_delta(1.0, 1, 0.5), 4) == round((math.e - math.e**0.5) / (1 + math.e), 4)
    True
    """
    lower = np.arange(times + 1)
    losses = (times - 2 * lower) * each
    chances = gammaln(times + 1) - gammaln(lower + 1) - gammaln(times - lower + 1)
    chances += (times - lower) * each - times * np.logaddexp(0, each)
    over = losses > epsilon
    return float((np.exp(chances[over]) * -np.expm1(epsilon - losses[over])).sum())


def repeated(
    events: Events, *, keys: int, triggers: int, one: OneShot, rng: np.random.Generator
) -> Reals:
    """Baseline 1: the last of `triggers` queries over all rows so far."""
    epsilon, delta = share(epsilon=one.epsilon, delta=one.delta, times=triggers)
    kept, before = events.bounded(one.rows)
    units = np.bincount(events.keys[kept & (before < 0)], minlength=keys).astype(np.float64)
    sums = np.bincount(events.keys[kept], minlength=keys).astype(np.float64)
    return OneShot(epsilon=epsilon, delta=delta, rows=one.rows).answer(units, sums, rng)


def incremental(
    events: Events, *, keys: int, triggers: int, one: OneShot, rng: np.random.Generator
) -> Reals:
    """Baseline 2: the sum of every trigger's own answer; what did not pass there is lost."""
    kept, before = events.bounded(one.rows)
    begins = events.begins(triggers)
    total = np.full(keys, np.nan)
    for trigger in range(triggers):
        rows = slice(begins[trigger], begins[trigger + 1])
        of, first = events.keys[rows][kept[rows]], before[rows][kept[rows]] < trigger
        present = np.unique(of)
        units = np.bincount(of[first], minlength=keys)[present].astype(np.float64)
        sums = np.bincount(of, minlength=keys)[present].astype(np.float64)
        found = one.answer(units, sums, rng)
        out = ~np.isnan(found)
        total[present[out]] = np.nan_to_num(total[present[out]]) + found[out]
    return total
