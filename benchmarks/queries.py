"""SQL end to end: every query from the command and from Python, release by release the same.

Both begin a run of their own, with one secret and, for this comparison, one run id: else their
noises would differ, as they must. What is compared are the files of their sinks, byte for byte.

Three queries are listings of Zhang et al., "Differentially Private Stream Processing at Scale",
2023: clicks per URL and day, records per key of made-up data, and posts per forum. Their web log
and their forum are not public; an Apache log and a day of tweets stand in, under the same names.
Ten others are what people ask of such logs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from benchmarks.harness import Findings, Progress, Row, target
from benchmarks.streams import VARIABLE
from dpstream.engines.query_run import EngineOptions
from dpstream.errors import InvalidParameter, StateError
from dpstream.privacy.state import Secret
from dpstream.records import Integers
from dpstream.session import run
from dpstream.sql_compiler import sql

RUN: Final = bytes(16)
_ROWS: Final = 60_000  # of a made-up log
_COMMAND: Final = f"""
import sys
from dpstream.cli import main, sql_command
from dpstream.engines.embedded.embedded_engine import Options
begin = sql_command.run
sql_command.run = lambda *a, **k: begin(*a, **k | {{"options": Options(run_id=bytes({len(RUN)}))}})
main(sys.argv[1:])
"""

Command = Callable[[list[str]], None]
"""Runs `dpstream` with these arguments, under the run id of this bench."""


def measure(*, quick: bool, progress: Progress) -> Findings:
    """One row per query; quick: the listings alone."""
    asked = LISTINGS if quick else (*LISTINGS, *REALISTIC)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        Secret.create(folder / "secret", value=bytes(range(32)))
        for number, one in enumerate(asked):
            progress(number, len(asked), one.name)
            source, real = log_file(one.log, folder, rows=_ROWS)
            rows.append(
                {"query": one.name, "log": one.log, "real": real} | both(one, source, folder)
            )
    same = sum(row["identical"] for row in rows)
    made = sorted({row["log"] for row in rows if not row["real"]})
    notes = ["noise is keyed: a run id is fixed here so that two runs can be compared"]
    if made:
        notes.append(f"made-up rows for {', '.join(made)}")
    return Findings(
        rows=rows,
        targets=[
            target("queries with identical releases", float(same), "==", float(len(asked))),
            target("queries that published nothing", float(_empty(rows)), "==", 0.0),
        ],
        notes=notes,
    )


def both(asked: Asked, source: Path, folder: Path, command: Command | None = None) -> Row:
    """Run a query both ways and compare what the sinks have."""
    place = folder / asked.name
    ways: dict[str, Callable[[], Any]] = {
        "command": lambda: (command or in_a_process)(
            [
                *("sql", asked.sql, "--name", asked.name, "--source", f"{asked.table}={source}"),
                *("--state", str(place / "state 1"), "--secret", str(folder / "secret")),
                *("--sink", f"csv:{place / 'command'}"),
            ]
        ),
        "python": lambda: run(
            sql(asked.sql, name=asked.name),
            source=str(source),
            sink=f"csv:{place / 'python'}",
            state=place / "state 2",
            secret=folder / "secret",
            options=EngineOptions(run_id=RUN),
        ).finish(),
    }
    seconds, found = {}, {}
    for name, go in ways.items():
        began = time.perf_counter()
        go()
        seconds[name] = time.perf_counter() - began
        found[name] = {path.name: path.read_bytes() for path in (place / name).glob("*.csv")}
    rows = [pa_csv.read_csv(place / "python" / name).num_rows for name in found["python"]]
    return {
        "releases": len(rows),
        "rows_published": sum(rows),
        "identical": found["command"] == found["python"] and bool(found["python"]),
        "seconds_command": seconds["command"],
        "seconds_python": seconds["python"],
    }


def in_a_process(arguments: list[str]) -> None:
    """The command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _COMMAND, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise StateError(f"dpstream {arguments[0]} left with {done.returncode}: {done.stderr}")


def _empty(rows: list[Row]) -> int:
    return sum(not row["rows_published"] for row in rows)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A query, the table that it reads, and the file that the table is."""

    name: str
    table: str
    log: str
    sql: str


_WEB: Final = "start = '2025-05-17', end = '2025-05-21', time_unit = 's'"
_TWEETS: Final = (
    "start = '2012-07-04', end = '2012-07-05', time_unit = 's', time_origin = '2012-07-04'"
)
_SHOP: Final = (
    "start = '2010-12-01', end = '2011-06-29', time_unit = 'min', time_origin = '2010-12-01'"
)
_CLAUSE: Final = "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS"

LISTINGS: Final = (
    Asked(
        name="listing_1",
        table="web_logs",
        log="apache_weblog_2015",
        sql=f"""{_CLAUSE} (epsilon = 6, delta = 1e-9, privacy_unit_column = client,
            max_groups_contributed = 8)
            path AS URL, TO_DATE(TIMESTAMP_SECONDS(unix_ts)) AS date, COUNT(*) AS count
            FROM web_logs GROUP BY URL, TO_DATE(TIMESTAMP_SECONDS(unix_ts))""",
    ),
    Asked(
        name="listing_2",
        table="SyntheticDataset",
        log="synthetic",
        sql=f"""{_CLAUSE} (epsilon = 6, delta = 1e-9, privacy_unit_column = user,
            max_groups_contributed = 32, {_TWEETS}, time_column = sec)
            key, COUNT(*) FROM SyntheticDataset GROUP BY key EMIT EVERY INTERVAL '15' MINUTE""",
    ),
    Asked(
        name="listing_3",
        table="RedditData",
        log="higgs_twitter_20120704",
        sql=f"""{_CLAUSE} (epsilon = 6, delta = 1e-9, privacy_unit_column = user,
            max_groups_contributed = 17, {_TWEETS}, time_column = sec)
            target AS subreddit, COUNT(*) FROM RedditData GROUP BY subreddit
            EMIT EVERY INTERVAL '15' MINUTE""",
    ),
)

REALISTIC: Final = (
    Asked(
        name="most_talked_about",
        table="tweets",
        log="higgs_twitter_20120704",
        sql=f"""{_CLAUSE} (epsilon = 4, delta = 1e-9, privacy_unit_column = user,
            max_groups_contributed = 4, {_TWEETS}, time_column = sec)
            target, COUNT(DISTINCT user) AS people FROM tweets WHERE target <> user
            GROUP BY target ORDER BY people DESC LIMIT 20 EMIT EVERY INTERVAL '1' HOUR""",
    ),
    Asked(
        name="kinds_so_far",
        table="tweets",
        log="higgs_twitter_20120704",
        sql=f"""{_CLAUSE} (epsilon = 2, delta = 1e-9, privacy_unit_column = user,
            max_groups_contributed = 12, public_groups = ('RT', 'MT', 'RE'), {_TWEETS})
            kind, window_end, COUNT(*) AS events
            FROM CUMULATE(tweets, DESCRIPTOR(sec), INTERVAL '6' HOUR, INTERVAL '1' DAY)
            GROUP BY kind, window_end""",
    ),
    Asked(
        name="people_per_quarter",
        table="tweets",
        log="higgs_twitter_20120704",
        sql=f"""{_CLAUSE} (epsilon = 1, privacy_unit = 'w_event', w = 8, mechanism = 'spas',
            privacy_unit_column = user, public_groups = ('RT', 'MT', 'RE'), {_TWEETS})
            kind, window_start, COUNT(*) AS people
            FROM TUMBLE(tweets, DESCRIPTOR(sec), INTERVAL '15' MINUTE)
            GROUP BY kind, window_start""",
    ),
    Asked(
        name="sold_per_week",
        table="orders",
        log="online_retail_2010_2011",
        sql=f"""{_CLAUSE} (epsilon = 6, delta = 1e-9, privacy_unit_column = customer,
            privacy_unit_period = INTERVAL '7' DAY, max_groups_contributed = 16, {_SHOP})
            stock_code, window_start, COUNT(*) AS customers,
            SUM(quantity, contribution_bounds_per_row => (-20, 20)) AS sold
            FROM TUMBLE(orders, DESCRIPTOR(minute), INTERVAL '7' DAY)
            GROUP BY stock_code, window_start HAVING sold > 0 ORDER BY sold DESC""",
    ),
    Asked(
        name="share_of_returns",
        table="orders",
        log="online_retail_2010_2011",
        sql=f"""{_CLAUSE} (epsilon = 1, delta = 1e-9, privacy_unit_column = customer,
            privacy_unit_period = INTERVAL '7' DAY, max_groups_contributed = 1,
            max_rows_per_group = 20, {_SHOP})
            window_start, 100 * COUNTIF(quantity < 0) / COUNT(*) AS percent, COUNT(*) AS lines
            FROM TUMBLE(orders, DESCRIPTOR(minute), INTERVAL '7' DAY) GROUP BY window_start""",
    ),
    Asked(
        name="hours_of_the_day",
        table="orders",
        log="online_retail_2010_2011",
        sql=f"""{_CLAUSE} (epsilon = 2, delta = 1e-9, privacy_unit_column = customer,
            max_groups_contributed = 4, {_SHOP}, time_column = minute)
            DIV(MOD(minute, 1440), 60) AS hour,
            CASE WHEN quantity >= 50 THEN 'bulk' ELSE 'retail' END AS kind,
            COUNT(*) AS customers, AVG(quantity, contribution_bounds_per_row => (0, 100)) AS items
            FROM orders WHERE quantity > 0 GROUP BY hour, kind ORDER BY hour""",
    ),
    Asked(
        name="ratings_by_genre",
        table="ratings",
        log="movielens_100k_2016",
        sql=f"""{_CLAUSE} (epsilon = 4, delta = 1e-7, privacy_unit_column = user,
            max_groups_contributed = 6, max_rows_per_group = 10, confidence = 0.95)
            main_genre, COUNT(*) AS ratings,
            AVG(rating, contribution_bounds_per_row => (0.5, 5)) AS mean,
            STDDEV(rating, contribution_bounds_per_row => (0.5, 5)) AS spread
            FROM ratings GROUP BY main_genre ORDER BY mean DESC""",
    ),
    Asked(
        name="raters_by_year",
        table="ratings",
        log="movielens_100k_2016",
        sql=f"""WITH dated AS (
                SELECT user, rating, EXTRACT(YEAR FROM TIMESTAMP_SECONDS(unix_ts)) AS year
                FROM ratings WHERE rating >= 4)
            {_CLAUSE} (epsilon = 4, delta = 1e-7, privacy_unit_column = user,
            max_groups_contributed = 3)
            year, COUNT(DISTINCT user) AS raters FROM dated GROUP BY year ORDER BY year""",
    ),
    Asked(
        name="sections_of_the_site",
        table="visits",
        log="apache_weblog_2015",
        sql=f"""WITH pages AS (
                SELECT client, unix_ts, LOWER(SPLIT(path, '/')[OFFSET(1)]) AS section FROM visits
                WHERE method = 'GET' AND status < 400 AND NOT ENDS_WITH(path, '.png'))
            {_CLAUSE} (epsilon = 6, delta = 1e-7, privacy_unit_column = client,
            privacy_unit_period = INTERVAL '1' DAY, max_groups_contributed = 8, {_WEB})
            section, window_start, window_end, COUNT(*) AS visitors
            FROM HOP(pages, DESCRIPTOR(unix_ts), INTERVAL '12' HOUR, INTERVAL '1' DAY)
            GROUP BY section, window_start""",
    ),
    Asked(
        name="visitors_per_hour",
        table="visits",
        log="apache_weblog_2015",
        sql=f"""{_CLAUSE} (epsilon = 1, privacy_unit = 'w_event', w = 24, mechanism = 'pacer',
            privacy_unit_column = client, {_WEB})
            window_start, COUNT(*) AS visitors
            FROM TUMBLE(visits, DESCRIPTOR(unix_ts), INTERVAL '1' HOUR)
            WHERE status = 200 GROUP BY window_start""",
    ),
)


Columns = dict[str, object]
_DAY: Final = 86_400


def log_file(name: str, folder: Path, *, rows: int) -> tuple[Path, bool]:
    """Where a log is, and whether it is a real one; a made-up one is written to `folder`."""
    named = os.environ.get(VARIABLE)
    real = Path(named or "", f"events_{name}.csv")
    if named and real.exists():
        return real, True
    path = folder / f"{name}-{rows}.csv"
    if not path.exists():
        if name not in _MADE:
            raise InvalidParameter(f"a log must be one of {', '.join(_MADE)}; got {name!r}")
        pa_csv.write_csv(pa.table(_MADE[name](rows, np.random.default_rng(rows))), path)
    return path, False


def _skewed(rng: np.random.Generator, size: int, count: int, *, q: float, s: float) -> Integers:
    """Numbers below `count`, the smaller the likelier: Zipf-Mandelbrot(q, s)."""
    weights = (np.arange(1, count + 1) + q) ** -s
    return rng.choice(count, size, p=weights / weights.sum())


def _tweets(rows: int, rng: np.random.Generator) -> Columns:
    return {
        "sec": np.sort(rng.integers(0, _DAY, rows)),
        "user": rng.integers(0, rows // 2, rows),
        "target": _skewed(rng, rows, 2_000, q=3, s=1.4),
        "kind": rng.choice(["RT", "MT", "RE"], rows, p=[0.6, 0.3, 0.1]),
    }


def _orders(rows: int, rng: np.random.Generator) -> Columns:
    quantity = rng.integers(1, 80, rows) * rng.choice([1, -1], rows, p=[0.97, 0.03])
    return {
        "minute": np.sort(rng.integers(0, 207 * 1_440, rows)),
        "customer": rng.integers(10_000, 10_000 + rows // 20, rows),
        "stock_code": np.char.add("S", _skewed(rng, rows, 300, q=5, s=1.2).astype(str)),
        "quantity": quantity,
    }


def _ratings(rows: int, rng: np.random.Generator) -> Columns:
    return {
        "unix_ts": np.sort(rng.integers(789_652_009, 1_476_640_644, rows)),
        "user": rng.integers(1, max(rows // 20, 2), rows),
        "movie": _skewed(rng, rows, 900, q=10, s=1.1),
        "rating": rng.integers(1, 11, rows) / 2,
        "main_genre": rng.choice(["Drama", "Comedy", "Action", "Horror"], rows),
    }


def _visits(rows: int, rng: np.random.Generator) -> Columns:
    paths = np.array(["/", "/blog/a", "/blog/b", "/images/x.png", "/projects/y", "/About"])
    return {
        "unix_ts": np.sort(rng.integers(1_747_476_300, 1_747_476_300 + 3 * _DAY, rows)),
        "client": rng.integers(1, max(rows // 5, 2), rows),
        "method": rng.choice(["GET", "POST"], rows, p=[0.98, 0.02]),
        "path": paths[rng.integers(0, len(paths), rows)],
        "status": rng.choice([200, 304, 404], rows, p=[0.9, 0.05, 0.05]),
    }


def _synthetic(rows: int, rng: np.random.Generator) -> Columns:
    """As the paper makes it: both laws are Zipf-Mandelbrot; rows lie anywhere in the day."""
    each = 1 + _skewed(rng, rows // 4, 1_000, q=26, s=6.738)
    users = np.repeat(np.arange(len(each)), each)
    size = len(users)
    return {
        "sec": rng.integers(0, _DAY, size),
        "user": users,
        "key": _skewed(rng, size, max(rows // 100, 10), q=1_000, s=1.4),
    }


_MADE: Final[dict[str, Callable[[int, np.random.Generator], Columns]]] = {
    "higgs_twitter_20120704": _tweets,
    "online_retail_2010_2011": _orders,
    "movielens_100k_2016": _ratings,
    "apache_weblog_2015": _visits,
    "synthetic": _synthetic,
}
