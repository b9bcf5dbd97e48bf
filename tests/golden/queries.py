"""Queries over one small log: every aggregate, window, strategy, option, and file sink.

Windows are published 8 or 24 times, or once: the parameters of counters for these numbers are in
the shipped table, others differ between processors.
"""

import csv
import json
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import dpstream as dps
from tests.golden.corpus import files_text, lines

ROWS, USERS = 1400, 260
START = datetime(2024, 5, 1, tzinfo=UTC)


@cache
def log():
    """A day of clicks in no order; users of all sizes, late rows, values beyond bounds, NULLs."""
    numbers = _numbers()
    columns = {name: [] for name in ("user", "page", "lang", "ts", "seen", "seconds", "price")}
    for _ in range(ROWS):
        at = next(numbers) % 86_400
        user = min(next(numbers) % USERS, next(numbers) % USERS)
        columns["user"].append(f"user {user}")
        columns["page"].append(f"/{min(next(numbers) % 9, next(numbers) % 9)}")
        columns["lang"].append([None, "en", "it", "en"][next(numbers) % 4])
        columns["ts"].append(START + timedelta(seconds=at))
        columns["seen"].append(START + timedelta(seconds=at + next(numbers) % 10_800))
        columns["seconds"].append(None if next(numbers) % 12 == 0 else next(numbers) % 80 - 5)
        columns["price"].append(next(numbers) % 100 / 4)
    columns["code"] = [None if page == "/4" else int(page[1:]) for page in columns["page"]]
    columns["day"] = [moment.date() for moment in columns["seen"]]
    times = pa.timestamp("us", tz="UTC")
    types = {"ts": times, "seen": times, "seconds": pa.int64()}
    return pa.table({name: pa.array(of, types.get(name)) for name, of in columns.items()})


def _numbers():
    """Knuth's linear congruential generator: the same numbers in every version of everything."""
    state = 1
    while True:
        state = (6364136223846793005 * state + 1442695040888963407) % 2**64
        yield state >> 33


def write_parquet(place):
    pq.write_table(log(), place / "log.parquet", row_group_size=300)
    return place / "log.parquet"


def write_csv(place):
    """With lines that cannot be used between the others."""
    rows = log().to_pylist()
    with (place / "log.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(rows[0])
        for number, row in enumerate(rows):
            writer.writerow("" if value is None else value for value in row.values())
            if number % 200 == 50:
                writer.writerow(["", "/1", "en", "no time", "", "x", "y", "1.5", "?"])
    return place / "log.csv"


def write_jsonl(place):
    with (place / "log.jsonl").open("w", encoding="utf-8") as file:
        for row in log().to_pylist():
            file.write(json.dumps(row, default=str) + "\n")
    return place / "log.jsonl"


def to_directory(uri):
    """A sink of files in a directory, and what reads it back."""
    return lambda place: uri.format(place / "out"), lambda place: files_text(place / "out")


def _sqlite_text(place):
    with sqlite3.connect(place / "out.sqlite") as base:
        names = base.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
        return "".join(base_text(base, name) for (name,) in names.fetchall())


def _duckdb_text(place):
    import duckdb

    with duckdb.connect(str(place / "out.duckdb")) as base:
        names = base.execute("SELECT table_name FROM duckdb_tables() ORDER BY 1").fetchall()
        tables = [base.sql(f'SELECT * FROM "{name}"').to_arrow_table() for (name,) in names]
    texts = zip(names, map(in_utc, tables), strict=True)
    return "".join(
        lines([name, table.column_names]) + sorted_lines(table.to_pylist()) for name, table in texts
    )


def in_utc(table):
    """Instants without the time zone of this machine."""
    for number, field in enumerate(table.schema):
        if pa.types.is_timestamp(field.type) and field.type.tz:
            instants = pa.timestamp(field.type.unit, tz="UTC")
            table = table.set_column(number, field.name, table[number].cast(instants))
    return table


def base_text(base, name):
    """A table of a database: its name, its columns, and its rows."""
    found = base.execute(f'SELECT * FROM "{name}"')
    columns = [column[0] for column in found.description]
    return lines([name, columns]) + sorted_lines(found.fetchall())


def sorted_lines(rows):
    """Rows that have no order, in the order of their texts."""
    return "".join(sorted(lines([row]) for row in rows))


PARQUET, CSV, JSONL = (to_directory(uri) for uri in ("{}/", "csv:{}/", "jsonl:{}/"))
SQLITE = (lambda place: place / "out.sqlite", _sqlite_text)
DUCKDB = (lambda place: place / "out.duckdb", _duckdb_text)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Queries that run together over one source into one sink."""

    ask: Callable[[], list[Any]]
    source: Callable[[Path], Path] = write_parquet
    sink: tuple[Callable[[Path], Any], Callable[[Path], str]] = PARQUET


RANGE = "start = '2024-05-01', end = '2024-05-02'"
EIGHT_HOURS = "TUMBLE(log, DESCRIPTOR(ts), INTERVAL '8' HOUR)"
HOURLY = "EMIT EVERY INTERVAL '1' HOUR"


def text(
    select="COUNT(*) AS n", options="", *, keys="page", table=EIGHT_HOURS, emit=HOURLY, after="",
    groups=4, epsilon=12, window="window_start", span=RANGE, delta="1e-3",
):  # fmt: skip
    """SQL that differs from COUNT(*) by page in three windows of eight hours as it says."""
    by = ", ".join(part for part in (keys, window) if part)
    return f"""
        SELECT WITH DIFFERENTIAL_PRIVACY
               OPTIONS (epsilon = {epsilon}, {f"delta = {delta}, " if delta else ""}
                        privacy_unit_column = user, max_groups_contributed = {groups}
                        {"," if options else ""} {options} {"," if span else ""} {span})
               {by}{"," if by and select else ""} {select}
        FROM {table} {f"GROUP BY {by}" if by else ""} {after} {emit}"""


def series(unit, mechanism, options="", *, keys="page", groups="('/0', '/1', '/2')", epsilon=1):
    """SQL of a series of hours through a mechanism."""
    by = ", ".join(part for part in (keys, "window_start") if part)
    public = f", public_groups = {groups}" if keys else ""
    return f"""
        SELECT WITH DIFFERENTIAL_PRIVACY
               OPTIONS (epsilon = {epsilon}, privacy_unit = '{unit}', mechanism = '{mechanism}',
                        privacy_unit_column = user {public}, {options}{"," if options else ""}
                        {RANGE})
               {by}, COUNT(*) AS n
        FROM TUMBLE(log, DESCRIPTOR(ts), INTERVAL '1' HOUR) GROUP BY {by}"""


def asked(*parts, **named):
    """A case of one query in SQL."""
    case = {name: named.pop(name) for name in ("source", "sink") if name in named}
    return Case(ask=lambda: [dps.sql(text(*parts, **named))], **case)


def asked_series(*parts, **named):
    """A case of one series in SQL."""
    return Case(ask=lambda: [dps.sql(series(*parts, **named))])


def asked_in_python(**changes):
    """A case of one `dps.Query`, for what SQL has no word for."""
    common = {
        "privacy_unit_column": "user", "keys": ["page"], "epsilon": 12, "delta": 1e-3,
        "time_column": "ts", "start": "2024-05-01", "end": "2024-05-02",
        "max_groups_contributed": 4,
    }  # fmt: skip
    return Case(ask=lambda: [dps.Query(**common | changes)])


def several():
    """Two queries and a book that has room for both; see `opened`."""
    return [
        dps.sql(text(epsilon=8), name="pages"),
        dps.sql(text("COUNT(*) AS n", keys="lang", epsilon=6), name="languages"),
    ]


EXPRESSIONS = """
    SELECT WITH DIFFERENTIAL_PRIVACY
           OPTIONS (epsilon = 12, delta = 1e-3, privacy_unit_column = user,
                    max_groups_contributed = 4, start = '2024-05-01', end = '2024-05-02')
           CASE WHEN half > 6 THEN 'dear' ELSE 'cheap' END AS kind, UPPER(lang) AS language,
           window_end, COUNT(*) AS n, SQRT(COUNT(*)) AS root
    FROM TUMBLE((SELECT user, lang, ts, price / 2 AS half FROM log WHERE page <> '/3'),
                DESCRIPTOR(ts), INTERVAL '8' HOUR)
    GROUP BY kind, language, window_end
    HAVING n > 5 ORDER BY n DESC LIMIT 4
    EMIT EVERY INTERVAL '1' HOUR"""
OF_UNITS = {
    "figures": (
        (
            "(SELECT user, window_start, COUNT(*) AS clicks, FIRST(page) AS page, "
            f"SUM(price) AS spent FROM {EIGHT_HOURS} GROUP BY user, window_start "
            "HAVING AVG(seconds) > 9)"
        ),
        "page, clicks",
        "COUNT(*) AS n, AVG(spent, contribution_bounds_per_row => (0, 90)) AS spent",
    ),
    "sessions": (
        (
            "TUMBLE((SELECT user, session_start, COUNT(DISTINCT page) AS pages, "
            "LAST(lang) AS lang, "
            "TIMESTAMP_DIFF(session_end, session_start, MINUTE) AS minutes FROM SESSION(log, "
            "DESCRIPTOR(ts), INTERVAL '90' MINUTE) GROUP BY user, session_start), "
            "DESCRIPTOR(session_start), INTERVAL '8' HOUR)"
        ),
        "pages",
        "COUNT(*) AS n, MEDIAN(minutes, contribution_bounds_per_row => (0, 480)) AS minutes",
    ),
    "first rows": (
        (
            f"(SELECT user, window_start, page, seconds FROM {EIGHT_HOURS} QUALIFY "
            "ROW_NUMBER() OVER (PARTITION BY user, window_start ORDER BY seconds DESC, ts) <= 2)"
        ),
        "page",
        "COUNT(*) AS n",
    ),
}
"""FROM, keys and aggregates of queries that group the rows of each unit."""
FUNNEL = (
    f"FUNNEL({EIGHT_HOURS}, steps => (page = '/0' AS zero, page <> '/0', seconds > 30 AS long), "
    "within => INTERVAL '4' HOUR"
)
RETENTION = (
    "RETENTION(log, DESCRIPTOR(ts), first => page = '/0', again => seconds > 9, "
    "period => INTERVAL '4' HOUR, lags => 3"
)
LATE = "arrival_column = seen, allowed_lateness = INTERVAL '1' HOUR"
BOUNDS = "contribution_bounds_per_row => (0, 60)"


def several_sets(by, options):
    """A case of several sets of keys."""
    statement = f"""
    SELECT WITH DIFFERENTIAL_PRIVACY
           OPTIONS (epsilon = 30, delta = 1e-3, privacy_unit_column = user,
                    max_groups_contributed = 4, {options}, {RANGE})
           page, lang, GROUPING(lang) AS of_page, COUNT(*) AS n, COUNT(DISTINCT user) AS users,
           AVG(seconds, {BOUNDS}) AS mean
    FROM {EIGHT_HOURS} GROUP BY window_start, {by} {HOURLY}"""
    return Case(ask=lambda: [dps.sql(statement)])


_TIMES = [START + timedelta(hours=h) for h in (1, 2, 3, 5, 8, 13, 21, 24)]
SINK_QUERY = text(
    "COUNT(*) AS n, AVG(price, contribution_bounds_per_row => (0, 9)) AS p", keys="page, lang"
)
"""What is sent to every server, under the name `sent`."""
CASES = {
    # aggregates
    "count": asked(),
    "count units": asked("COUNT(DISTINCT user) AS users", "max_rows_per_group = 3"),
    "count rows": asked("COUNT(*) AS n, COUNT(seconds) AS m", "max_rows_per_group = 3"),
    "count if": asked("COUNTIF(seconds > 30) AS long, COUNT(*) AS n"),
    "sum": asked(f"SUM(seconds, {BOUNDS}) AS s"),
    "sum of reals": asked("SUM(price, contribution_bounds_per_row => (-2.5, 20.5)) AS s"),
    "avg": asked(f"AVG(seconds, {BOUNDS}) AS mean", "max_rows_per_group = 2"),
    "variance": asked(f"VARIANCE(seconds, {BOUNDS}) AS v"),
    "stddev": asked(f"STDDEV(seconds, {BOUNDS}) AS d"),
    "avg of some": asked(
        f"AVG(IF(price > 5, seconds, NULL), {BOUNDS}) AS mean, "
        f"SUM(seconds, {BOUNDS}) / COUNT(*) AS ratio",
        "confidence = 0.9",
    ),
    "pairs of columns": asked(
        "COVAR_POP(price, seconds, contribution_bounds_per_row => ((0, 20), (0, 60))) AS c, "
        "CORR(price, seconds, contribution_bounds_per_row => ((0, 20), (0, 60))) AS r, "
        "REGR_SLOPE(price, seconds, contribution_bounds_per_row => ((0, 20), (0, 60))) AS s",
        "confidence = 0.9",
        epsilon=24,
    ),
    "per group": asked(
        "COUNT(*, contribution_bounds_per_group => (1, 3)) AS n, "
        "SUM(seconds, contribution_bounds_per_group => (-20, 90)) AS s"
    ),
    "per group, once": asked(
        "COUNT(*) AS n, COUNT(seconds, contribution_bounds_per_group => (0, 3)) AS m, "
        "AVG(price, contribution_bounds_per_group => (0, 20)) AS p",
        "max_rows_per_group = 2",
        emit="",
    ),
    "distinct": asked("COUNT(DISTINCT lang) AS l, COUNT(*) AS n", "max_values_per_group = 2"),
    "distinct numbers": asked(
        "COUNT(DISTINCT seconds) AS d",
        "max_values_per_group = 3, public_groups = ('/0', '/1')",
        source=write_csv,
    ),
    "keys alone": asked(""),
    "weighted keys": asked("", "weighted_keys = TRUE", groups=6),
    "weighted keys, once": asked("", "weighted_keys = TRUE", groups=6, table="log", window="",
                                 emit="", span=""),
    "quantiles": asked(
        f"PERCENTILE_CONT(seconds, 0.9, {BOUNDS}) AS p90, APPROX_QUANTILES(seconds, 4, {BOUNDS}, "
        "leaves => 64) AS quartiles, COUNT(*) AS n",
        "confidence = 0.9",
        groups=3,
    ),
    "quantile by choice": asked(
        f"MEDIAN(seconds, {BOUNDS}) AS half, COUNT(*) AS n", groups=3, emit="", epsilon=24
    ),
    "without delta": asked(
        f"PERCENTILE_CONT(seconds, 0.9, {BOUNDS}) AS p90, AVG(price, contribution_bounds_per_row "
        "=> (0, 20)) AS mean",
        "public_groups = ('/0', '/1'), max_rows_per_group = 2, report_bias = FALSE",
        emit="",
        delta=None,
    ),
    "histogram": asked(
        "HISTOGRAM(price, [0, 2.5, 10, 25]) AS prices", sink=JSONL, groups=2, epsilon=24
    ),
    "weights": asked(
        f"COUNT(*) AS n, SUM(seconds, {BOUNDS}) AS s", "weights = (n = 3, selection = 1/2)"
    ),
    # windows and triggers
    "hop": asked(table="HOP(log, DESCRIPTOR(ts), INTERVAL '4' HOUR, INTERVAL '8' HOUR)"),
    "cumulate": asked(
        table="CUMULATE(log, DESCRIPTOR(ts), INTERVAL '8' HOUR, INTERVAL '1' DAY)",
        window="window_end",
    ),
    "once": asked(table="log", window="", emit="", span=""),
    "on window close": asked(emit="EMIT ON WINDOW CLOSE"),
    "one window": asked(options="time_column = ts", table="log", window=""),
    "chosen bounds": asked(
        options="privacy_unit_period = INTERVAL '4' HOUR, arrival_column = seen, "
        "allowed_lateness = INTERVAL '1' HOUR",
        table="TUMBLE(log, DESCRIPTOR(ts), INTERVAL '2' HOUR)",
        groups="AUTO",
        emit="",
        epsilon=24,
    ),
    "chosen rows and clamps": asked(
        "COUNT(*) AS n, SUM(seconds, contribution_bounds_per_row => (0, AUTO)) AS time, "
        "AVG(price, contribution_bounds_per_row => AUTO) AS price",
        options="privacy_unit_period = INTERVAL '4' HOUR, max_rows_per_group = AUTO",
        table="TUMBLE(log, DESCRIPTOR(ts), INTERVAL '2' HOUR)",
        groups="AUTO",
        emit="",
        epsilon=24,
    ),
    "correlated noise": asked(
        options="privacy_unit_period = INTERVAL '8' HOUR, correlated_noise = TRUE, "
        "public_groups = ('/0', '/1', '/2', '/3')",
        table="TUMBLE(log, DESCRIPTOR(ts), INTERVAL '8' HOUR)",
        emit="",
    ),
    "noise that groups share by themselves": asked(
        f"COUNT(*) AS n, COUNT(DISTINCT user) AS users, SUM(seconds, {BOUNDS}) AS s",
        "privacy_unit_period = INTERVAL '8' HOUR, max_rows_per_group = 2, "
        "public_groups = ('/0', '/1', '/2', '/3')",
        table="TUMBLE(log, DESCRIPTOR(ts), INTERVAL '8' HOUR)",
    ),
    "late rows": asked(
        options="arrival_column = seen, allowed_lateness = INTERVAL '2' HOUR",
        table="TUMBLE(log, DESCRIPTOR(ts), INTERVAL '6' HOUR)",
    ),
    "listed triggers": asked_in_python(triggers=_TIMES),
    "time zone": asked(
        options="time_zone = 'Europe/Rome', strategy = 'sqlp'",
        table="TUMBLE(log, DESCRIPTOR(ts), INTERVAL '1' DAY)",
        span="start = '2024-04-30', end = '2024-05-03'",
    ),
    # who is protected, and by how much
    "period": asked(options="privacy_unit_period = INTERVAL '8' HOUR", groups=2),
    "bounds": asked(options="max_rows_per_group = 4, max_rows_contributed = 5", groups=3),
    "strategy sqlp": asked(options="strategy = 'sqlp'", epsilon=30),
    "sqlp of rows": asked(
        f"COUNT(*) AS n, SUM(seconds, {BOUNDS}) AS s",
        "strategy = 'sqlp', max_rows_per_group = 3",
        epsilon=30,
    ),
    "nothing given": asked_in_python(
        every="1 hour", window=dps.Tumble("8 hours"), max_groups_contributed="auto",
        aggregates=[
            dps.Count("n"), dps.Sum("s", column="price", contribution_bounds_per_row=(0, 25)),
        ],
    ),
    "shares": asked_in_python(
        every="1 hour", window=dps.Tumble("8 hours"),
        selection_share="1/4", last_share=None, last_budget=None,
    ),
    # groups
    "public groups": asked(options="public_groups = ('/0', '/1', 'nobody')"),
    "two keys": asked(keys="page, lang"),
    "public pairs": asked(
        keys="page, lang", options="public_groups = (('/0', 'en'), ('/1', 'it'))"
    ),
    "rollup": several_sets("ROLLUP (page, lang)", "max_rows_per_group = 2"),
    "cube": several_sets(
        "CUBE (page, lang)",
        "grouping_set_weights = (3, 2, 1, 1), "
        "public_groups = (('/0', 'en'), ('/0', 'it'), ('/1', 'en'), ('/1', 'it'))",
    ),
    "no keys": asked(keys=""),
    "no keys, no windows": asked(keys="", table="log", window="", emit="", span=""),
    "pre-threshold": asked(options="min_privacy_units_per_group = 8"),
    "types of keys": asked(keys="code, day"),
    "types of columns": asked(
        f"SUM(seconds, {BOUNDS}) AS s",
        "column_types = (code = INT64, day = DATE, seconds = INT64)",
        keys="code, day",
        source=write_csv,
    ),
    # what is published
    "debias": asked(f"COUNT(*) AS n, SUM(seconds, {BOUNDS}) AS s", "debias = 'global'", groups=1),
    "debias of rows": asked(options="debias = 'global', max_dropped_rows = 9", groups=1),
    "confidence": asked(options="confidence = 0.9"),
    "bias of values": asked(
        f"COUNT(*) AS n, SUM(seconds, {BOUNDS}) AS s", "confidence = 0.9", groups=2
    ),
    "bias not reported": asked(options="report_bias = FALSE"),
    "changes": asked(options="min_change = 1.5, nonnegative = TRUE"),
    "expressions": Case(ask=lambda: [dps.sql(EXPRESSIONS)]),
    "arithmetic": asked("100 * COUNTIF(seconds > 30) / COUNT(*) AS percent, 2 * COUNT(*) AS twice"),
    # rows of each unit
    **{
        f"per unit, {name}": asked(select, LATE, keys=keys, table=table, emit="", epsilon=30)
        for name, (table, keys, select) in OF_UNITS.items()
    },
    "funnel": asked(options=LATE, keys="step, step_name", table=f"{FUNNEL})", epsilon=30),
    "funnel by private keys": asked(
        options=LATE, keys="lang, step", table=f"{FUNNEL}, by => (lang))", groups=6, epsilon=30
    ),
    "strict funnel": asked(
        options=LATE, keys="step", table=f"{FUNNEL}, strict => TRUE)", emit="", delta=""
    ),
    "retention": asked(options=LATE, keys="lag", table=f"{RETENTION})", emit="", delta=""),
    "retention by private keys": asked(
        options=LATE, keys="lang, lag", table=f"{RETENTION}, by => lang)", emit="", epsilon=30
    ),
    # sources and sinks
    "csv to csv": asked(
        f"AVG(seconds, {BOUNDS}) AS mean", keys="page, lang", source=write_csv, sink=CSV
    ),
    "jsonl to jsonl": asked(
        f"AVG(seconds, {BOUNDS}) AS mean", keys="page, lang", source=write_jsonl, sink=JSONL
    ),
    "sqlite": asked("COUNT(*) AS n, AVG(price, contribution_bounds_per_row => (0, 9)) AS p",
                    sink=SQLITE),
    "duckdb": asked("COUNT(*) AS n, AVG(price, contribution_bounds_per_row => (0, 9)) AS p",
                    sink=DUCKDB),
    "several": Case(ask=several),
    # series
    "series uniform": asked_series("w_event", "uniform", "w = 4"),
    "series sample": asked_series("w_event", "sample", "w = 4"),
    "series budget_absorption": asked_series("w_event", "budget_absorption", "w = 4"),
    "series spas": asked_series("w_event", "spas", "w = 4, mechanism_options = (warm_up = 5)"),
    "series pacer": asked_series("w_event", "pacer", "w = 4"),
    "series pegasus_w": asked_series("w_event", "pegasus_w", "w = 4"),
    "series naive": asked_series("event", "naive", "mechanism_options = (lo = 0, hi = 50)"),
    "series block_smoother": asked_series(
        "event", "block_smoother", "mechanism_options = (lo = 0, hi = 50, delay = 4)", keys=""
    ),
    "series blt": asked_series("event", "blt", "delta = 1e-6"),
    "series tree": asked_series("event", "tree", "delta = 1e-6"),
    "series unbounded_counter": asked_series("event", "unbounded_counter", "delta = 1e-6"),
}  # fmt: skip
