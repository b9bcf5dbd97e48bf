"""What remembered keys bring: seven days of one law, and two real logs by windows that repeat.

Each day is a log of its own with the laws of `click_log.py`: the same frequent keys, other users
and rows. Every day has 100 triggers, and each user's day is protected. Higgs by hour and retail by
week are in `benchmarks/logs.py`. The truth is what the query would publish without noise, bounds
and thresholds; a key that is not shown counts as published with 0.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from benchmarks import click_log, sqlp_runs
from benchmarks.click_log import DAY, START, ClickLog, records_of
from benchmarks.harness import Findings, Progress, Row, target
from benchmarks.logs import HIGGS, RETAIL
from benchmarks.streams import VARIABLE
from dpstream.query.aggregates import Count
from dpstream.query.query import Query
from dpstream.query.windows import Tumble, duration
from dpstream.session import run

DAYS: Final = 7
TRIGGERS: Final = 100
LAW: Final = "one law"
_USERS: Final = {False: (1_000_000, 100_000), True: (100_000, 10_000)}
"""Users of a day, and keys: full and quick."""

Truth = Mapping[int, Mapping[Any, int]]
"""Rows of each key, by window."""


@dataclass(kw_only=True)
class _Window:
    """What was shown of a window."""

    keys: list[int] = field(default_factory=list)
    """By trigger."""
    absent: int = 0
    """Keys in the last table that no row has."""
    error: float = 0.0


def measure(*, quick: bool, progress: Progress) -> Findings:
    """Each log with remembered keys and without, a row for each window."""
    rows: list[Row] = []
    notes = ["the truth is exact: not private, for this comparison only"]
    with tempfile.TemporaryDirectory() as folder:
        users, keys = _USERS[quick]
        truth = write_days(Path(folder), users=users, keys=keys)
        source = str(Path(folder) / "*.parquet")
        for form in (False, True):
            progress(int(form), 6, f"{LAW}, {_name(form)}")
            rows += _rows(LAW, days_query(remember_keys=form), source, truth)
    named = os.environ.get(VARIABLE)
    for number, (name, query) in enumerate(_real().items()):
        file = (HIGGS if query.name == HIGGS.query.name else RETAIL).file
        path = Path(named) / file if named else None
        if path is None or not path.exists():
            notes.append(f"{file} is not there: set {VARIABLE} to the folder that has it")
            continue
        table = pa_csv.read_csv(path)
        for form in (False, True):
            progress(2 + 2 * number + form, 6, f"{name}, {_name(form)}")
            asked = replace(query, remember_keys=form)
            rows += _rows(name, asked, table, _truth_of(asked, table))
    return Findings(rows=rows, targets=targets(rows), notes=notes)


def targets(rows: Sequence[Row]) -> list[Row]:
    """Keys shown over all later triggers, errors at ends of windows: over those without memory."""
    found = []
    for log in dict.fromkeys(row["log"] for row in rows):
        later = {
            form: [row for row in rows if (row["log"], row["form"]) == (log, form)][1:]
            for form in (_name(False), _name(True))
        }
        without, with_memory = later.values()
        keys = _share([row["keys"] for row in with_memory], [row["keys"] for row in without])
        if log == LAW:
            errors = [a["l_2"] / b["l_2"] for a, b in zip(with_memory, without, strict=True)]
            found.append(target("keys shown, days 2 to 7, over those without", keys, ">=", 2.5))
            found.append(target("l_2 at the end of the worst day", max(errors), "<=", 0.85))
            found.append(target("l_2 at the end of the last day", errors[-1], "<=", 0.85))
        else:
            found.append(target(f"{log}: keys shown over those without", keys, ">=", 1.0))
            whole = _share([row["l_2"] for row in with_memory], [row["l_2"] for row in without])
            found.append(target(f"{log}: l_2 over those without", whole, "<=", 1.0))
    return found


def _share(one: Sequence[float], two: Sequence[float]) -> float:
    return sum(one) / sum(two) if sum(two) else math.nan


def _name(remembers: bool) -> str:
    return "remembered" if remembers else "not remembered"


def days_query(**options: Any) -> Query:
    """Seven days of 100 triggers, each user's day protected."""
    day = timedelta(days=1)
    given: dict[str, Any] = {
        "privacy_unit_period": "1 day",
        "end": START + DAYS * day,
        "time_unit": "us",
    }
    given |= {"keys": ("key",), "privacy_unit_column": "user"}
    return sqlp_runs.query(TRIGGERS, **given, **options)


def _real() -> dict[str, Query]:
    """Windows that repeat over the real logs: each user's hour, each customer's week."""
    count = (Count("clicks"),)
    hours: dict[str, Any] = {
        "window": Tumble("1 hour"),
        "privacy_unit_period": duration("1 hour", "period"),
    }
    weeks: dict[str, Any] = {"window": Tumble("7 days"), "every": duration("1 day", "every")}
    return {
        "higgs by hour": replace(
            HIGGS.query, aggregates=count, every=duration("3 minutes", "every"), **hours
        ),
        "retail by week": replace(RETAIL.query, aggregates=count, **weeks),
    }


def write_days(folder: Path, *, users: int, keys: int) -> Truth:
    """A file for each part of each day; rows of each key, by day."""
    start, truth = int(START.timestamp()) * 1_000_000, dict[int, dict[Any, int]]()
    for day in range(DAYS):
        log = ClickLog(records=records_of(users, first=0), keys=keys, seed=day + 1, first=0)
        found = np.zeros(keys, np.int64)
        for part, (times, who, which) in enumerate(click_log.parts(log)):
            found += np.bincount(which, minlength=keys)
            table = pa.table({"ts": times + start + day * DAY, "user": who, "key": which})
            pq.write_table(table, folder / f"{day}-{part:02d}.parquet")
        truth[day] = {key: int(found[key]) for key in np.flatnonzero(found).tolist()}
    return truth


def _truth_of(query: Query, table: pa.Table) -> Truth:
    """Rows of each key, by window."""
    assert query.start is not None
    assert query.time_unit_micros is not None
    times = pc.cast(table[query.time_column], pa.int64()).to_numpy() * query.time_unit_micros
    windows = query.schedule.window_of(times + int(query.time_origin))
    pairs = Counter(zip(windows.tolist(), table[query.keys[0]].to_pylist(), strict=True))
    truth: dict[int, dict[Any, int]] = {}
    for (window, key), count in pairs.items():
        truth.setdefault(window, {})[key] = count
    return truth


def _rows(log: str, query: Query, source: Any, truth: Truth) -> Iterator[Row]:
    windows: dict[int, _Window] = {}
    for table in run(query, source=source):
        about = json.loads(table.schema.metadata[b"dpstream"])
        number = int(about["window"])
        window = windows.setdefault(number, _Window())
        window.keys.append(len(table))
        if about["release_index"] < about["releases"]:
            continue
        exact = truth.get(number, {})
        shown = dict(
            zip(table[query.keys[0]].to_pylist(), table["clicks"].to_pylist(), strict=True)
        )
        window.absent = sum(key not in exact for key in shown)
        squares = sum((shown.get(key, 0) - count) ** 2 for key, count in exact.items())
        squares += sum(value**2 for key, value in shown.items() if key not in exact)
        window.error = math.sqrt(squares)
    for number, window in sorted(windows.items()):
        yield {
            "log": log,
            "form": _name(bool(query.remember_keys)),
            "window": number + 1,
            "keys": float(np.mean(window.keys)),
            "keys_at_the_end": window.keys[-1],
            "keys_without_rows": window.absent,
            "l_2": window.error,
        }
