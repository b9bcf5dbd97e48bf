"""One form of the query over one log: what its last table holds, and how far off it is.

Forms that ship run in the engine; the published form and the paper's baselines are simulated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.bench import click_log
from dpstream.bench.click_log import DAY, START, ClickLog
from dpstream.bench.harness import Row
from dpstream.bench.sqlp_baselines import OneShot, incremental, repeated
from dpstream.bench.sqlp_published import Events, SqlpPublished
from dpstream.engines.local import Options
from dpstream.records import Reals
from dpstream.session import run
from dpstream.stages.aggregates import Count
from dpstream.stages.query import Query
from dpstream.stages.windows import Tumble

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

    def row(self, truth: npt.NDArray[Any]) -> Row:
        """The paper's four metrics, and the time."""
        return metrics(self.values, truth) | {"seconds": self.seconds}


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
        "unit": "user_id",
        "keys": ("url",),
        "aggregates": (Count("clicks"),),
        "epsilon": EPSILON,
        "delta": DELTA,
        "time": "ts",
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
    values = np.full(log.keys, np.nan)
    began = time.perf_counter()
    latencies, before = [], began
    for table, last in _marked(run(asked, source=source, options=Options())):
        if last or asked.strategy == "sqlp":  # whose tables hold what is new alone
            values[_ranks(table["url"])] = table["clicks"].to_numpy()
        now = time.perf_counter()
        latencies.append(now - before)
        before = now
    return Found(values=values, seconds=time.perf_counter() - began, latencies=latencies)


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
