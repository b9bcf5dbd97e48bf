"""Questions about users: errors, coverage and speed of activity, sessions, funnels and retention.

A made-up log of two weeks, and the first two weeks of the orders of a real shop (DPSTREAM_DATA),
whose items are four pages by how often they are ordered. The exact figures are counted row by row,
by other code than what publishes. Speed stands beside a plain count by day and page over the same
made-up rows.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from benchmarks.harness import Findings, Progress, Row, target
from benchmarks.streams import VARIABLE
from dpstream.audit.query_samplers import run_plan
from dpstream.query.noise_plan import plan_query
from dpstream.query.query import Query
from dpstream.sql_compiler import sql

DAYS: Final = 14
LAGS: Final = 7
WITHIN: Final = 6 * 3600
GAP: Final = 1800
PAGES: Final = ("home", "product", "cart", "thanks")
STEPS: Final = ("home", "cart", "thanks")
_DAY: Final = 86_400
_Z: Final = 1.959963984540054
_MEMORY: Final = 1 << 28  # bytes of rows that wait for their step, so that each is read once
_LOWEST, _SLOWEST = 0.94, 2.0
_CLAUSE: Final = (
    "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 1, delta = 1e-9, privacy_unit_column = "
    "user, time_unit = 's', start = '1970-01-01', end = '1970-01-15', report_bias = FALSE, "
)
_DAILY: Final = f"{_CLAUSE} privacy_unit_period = INTERVAL '1' DAY, "
_WINDOW: Final = "TUMBLE(log, DESCRIPTOR(ts), INTERVAL '1' DAY)"
_LISTED: Final = ", ".join(f"page = '{page}' AS {page}" for page in STEPS)
_FUNNEL: Final = f"FUNNEL({_WINDOW}, steps => ({_LISTED}), within => INTERVAL '6' HOUR)"
QUERIES: Final = {
    "plain": f"""{_DAILY} max_groups_contributed = 4, max_rows_per_group = 12,
        public_groups = {PAGES!r}) window_start, page, COUNT(*) AS n
        FROM {_WINDOW} GROUP BY window_start, page""",
    "activity": f"""{_DAILY} max_groups_contributed = 1,
        public_groups = GENERATE_ARRAY(1, 10)) window_start, rows_, COUNT(*) AS n
        FROM (SELECT user, window_start, LEAST(COUNT(*), 10) AS rows_
              FROM {_WINDOW} GROUP BY user, window_start)
        GROUP BY window_start, rows_""",
    "sessions": f"""{_DAILY} max_groups_contributed = 1, max_rows_per_group = 24)
        window_start, COUNT(*) AS n
        FROM TUMBLE((SELECT user, session_start, COUNT(*) AS rows_
                     FROM SESSION(log, DESCRIPTOR(ts), INTERVAL '30' MINUTE)
                     GROUP BY user, session_start),
                    DESCRIPTOR(session_start), INTERVAL '1' DAY)
        GROUP BY window_start""",
    "funnel": f"""{_DAILY} max_groups_contributed = 3) window_start, step, COUNT(*) AS n
        FROM {_FUNNEL} GROUP BY window_start, step EMIT EVERY INTERVAL '6' HOUR""",
    "strict funnel": f"""{_DAILY} max_groups_contributed = 3) window_start, step, COUNT(*) AS n
        FROM {_FUNNEL.removesuffix(")")}, strict => TRUE) GROUP BY window_start, step""",
    "retention": f"""{_CLAUSE} privacy_unit_period = 'forever') window_start, lag, COUNT(*) AS n
        FROM RETENTION(log, DESCRIPTOR(ts), first => page = 'product', again => TRUE,
                       period => INTERVAL '1' DAY, lags => {LAGS})
        GROUP BY window_start, lag""",
}
"""What is asked, by name."""
Cell = tuple[int, ...]
"""(day, and what else names a row)."""


def log(users: int) -> pa.Table:
    """Ten rows of each user on average, in visits of a few pages; most come back once or twice."""
    rng = np.random.default_rng(28)
    visits = 3 * users
    who = rng.integers(0, users, visits)
    begin = rng.integers(0, DAYS * _DAY - 7200, visits)
    rows = np.minimum(rng.geometric(0.3, visits), 12)
    places = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)
    times = np.repeat(begin, rows) + places * rng.integers(5, 900, len(places))
    pages = rng.choice(len(PAGES), len(times), p=[0.5, 0.3, 0.15, 0.05])
    order = np.argsort(times, kind="stable")
    columns = {"user": np.repeat(who, rows), "page": np.array(PAGES)[pages], "ts": times}
    table = pa.table({name: column[order] for name, column in columns.items()})
    return table.filter(pa.array(times[order] < DAYS * _DAY))


def orders() -> pa.Table | None:
    """The real log, as far as it is there: one row per item of an order."""
    path = Path(os.environ.get(VARIABLE, "/nowhere")) / "events_online_retail_2010_2011.csv"
    if not path.is_file():
        return None
    read = pa_csv.read_csv(path)
    read = read.filter(pa.array(read["minute"].to_numpy() * 60 < DAYS * _DAY))
    codes = read["stock_code"].combine_chunks().dictionary_encode().indices.to_numpy()
    often = np.bincount(codes)
    below = np.empty(len(often))
    below[np.argsort(-often)] = np.cumsum(np.sort(often)[::-1]) / len(codes)
    page = np.searchsorted([0.5, 0.8, 0.95], below[codes], side="left")
    columns = {"user": read["customer"], "page": np.array(PAGES)[page]}
    return pa.table(columns | {"ts": read["minute"].to_numpy() * 60}).sort_by("ts")


def reached(times: list[int], pages: list[str], *, strict: bool) -> int:
    """How many steps one user's rows of a day reach: every way there is."""
    ways, best = set[tuple[int, int]](), 0  # (when it began, steps)
    for at, page in zip(times, pages, strict=True):
        new = {
            (begin, steps + 1)
            for begin, steps in ways
            if steps < len(STEPS) and page == STEPS[steps] and at - begin <= WITHIN
        }
        new |= {(at, 1)} if page == STEPS[0] else set()
        ways = new if strict else ways | new
        best = max([best, *(steps for _, steps in new)])
    return best


def truths(table: pa.Table) -> dict[str, Counter[Cell]]:
    """The exact figures of every query, row by row; rows of one time in the order of steps."""
    pages_of = table["page"].to_numpy()
    places = np.sum([(at + 1) * (pages_of == page) for at, page in enumerate(STEPS)], axis=0)
    order = np.lexsort((places, table["ts"].to_numpy(), table["user"].to_numpy()))
    sorted_rows = table.take(pa.array(order))
    days: dict[tuple[int, int], tuple[list[int], list[str]]] = {}
    for row in sorted_rows.to_pylist():
        times, pages = days.setdefault((row["user"], row["ts"] // _DAY), ([], []))
        times.append(row["ts"])
        pages.append(row["page"])
    found: dict[str, Counter[Cell]] = {name: Counter() for name in QUERIES}
    cohorts: dict[int, int] = {}
    for (user, day), (times, pages) in sorted(days.items()):
        for page in pages:
            found["plain"][day, PAGES.index(page)] += 1
        found["activity"][day, min(len(times), 10)] += 1
        found["sessions"][day,] += 1 + int((np.diff(times) > GAP).sum())
        for name in ("funnel", "strict funnel"):
            steps = reached(times, pages, strict=name == "strict funnel")
            found[name].update((day, step + 1) for step in range(steps))
        if user not in cohorts and "product" in pages:
            cohorts[user] = day
        lag = day - cohorts.get(user, DAYS + day)
        if 0 <= lag <= LAGS:
            found["retention"][day, lag] += 1
    return found


def cells_of(name: str, table: pa.Table) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """The rows of a release, by what names them."""
    key = {"plain": "page", "activity": "rows_", "sessions": None, "retention": "lag"}
    column = key.get(name, "step")
    for row in table.to_pylist():
        day = int(row["window_start"].timestamp()) // _DAY
        value = None if column is None else row[column]
        rest = () if value is None else (PAGES.index(value) if name == "plain" else int(value),)
        yield (day, *rest), row


def measured(name: str, table: pa.Table, exact: Counter[Cell], runs: int, first: int = 0) -> Row:
    """Errors of the last release of each window, over so many runs with other noise.

    `first`: the number of the first run, which is that of its noise.
    """
    query = sql(QUERIES[name])
    assert isinstance(query, Query)
    plan, errors, shares, seconds = plan_query(query), [], [], []
    for number in range(first, first + runs + 1):  # the first one compiles
        began = time.perf_counter()
        made = [p for _, p in run_plan(plan, table, run=number.to_bytes(16, "big"), memory=_MEMORY)]
        seconds.append(time.perf_counter() - began)
        for publication in made:
            if publication.due.release < publication.due.releases:
                continue
            for cell, row in cells_of(name, publication.table):
                errors.append(((row["n"] - exact[cell]), row["n_stddev"]))
                whole = (cell[0], cell[-1] - 1)
                if name == "retention":
                    whole = (cell[0] - cell[-1], 0)
                if row.get("n_share") is not None and exact[whole]:
                    share = exact[cell] / exact[whole]
                    shares.append(row["n_share_low"] <= share <= row["n_share_high"])
    missed, bars = np.array(errors, np.float64).T
    return {
        "query": name,
        "cells": len(missed) // (runs + 1),
        "error": float(np.sqrt((missed**2).mean())),
        "said": float(np.sqrt((bars**2).mean())),
        "covered": float((np.abs(missed) <= _Z * bars + 0.5).mean()),
        "shares_covered": float(np.mean(shares)) if shares else None,
        "rows_per_second": len(table) / min(seconds),
    }


def measure(*, quick: bool, progress: Progress) -> Findings:
    """A row for each question and log."""
    logs = {"made up": log(1_000 if quick else 100_000)}
    real = None if quick else orders()
    if real is not None:
        logs["orders"] = real
    runs, rows = 1 if quick else 9, list[Row]()
    for place, (word, table) in enumerate(logs.items()):
        exact, plain = truths(table), 0.0
        for name in QUERIES:
            row = measured(name, table, exact[name], runs, first=1_000 * place)
            plain = plain or row["rows_per_second"]
            rows.append({"log": word} | row | {"times_plain": plain / row["rows_per_second"]})
            progress(len(rows), len(logs) * len(QUERIES), f"{word}: {name}")
    bounded = [row for row in rows if row["log"] == "made up" or row["query"] != "plain"]
    cells = np.array([row["cells"] for row in bounded])
    covered = float((cells * [row["covered"] for row in bounded]).sum() / cells.sum())
    of_shares = [row["shares_covered"] for row in rows if row["shares_covered"] is not None]
    slowest = max(row["times_plain"] for row in rows if row["log"] == "made up")
    targets = [
        target("share of counts within 95% bars", covered, ">=", _LOWEST),
        target("share of shares within their intervals", float(np.mean(of_shares)), ">=", _LOWEST),
        target("time beside the plain group-by, at most", slowest, "<=", _SLOWEST),
    ]
    sizes = ", ".join(f"{word}: {len(table):,} rows" for word, table in logs.items())
    notes = [
        "error, said: root mean squares over cells and runs, of the last release of each window",
        f"{sizes}, of {DAYS} days; plain: COUNT(*) by day and page, 12 rows of a user",
        "orders have more rows than that, so their plain counts are not among the bars",
    ]
    return Findings(rows=rows, targets=targets, notes=notes)
