"""SQL end to end: every query from the command, from Python and on Spark, the same releases.

All begin a run of their own, with one secret and, for this comparison, one run id: else their
noises would differ, as they must. What is compared are the files of their sinks, byte for byte.
Time series are refused on Spark, and run the other two ways.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from benchmarks.asked_queries import ALL, QUICK, TABLES, Asked
from benchmarks.harness import Findings, Progress, Row, target
from benchmarks.streams import VARIABLE
from dpstream.engines.query_run import EngineOptions
from dpstream.engines.spark import SparkEngine, local_session
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
from dpstream.engines.query_run import EngineOptions as Options
begin = sql_command.run
sql_command.run = lambda *a, **k: begin(*a, **k | {{"options": Options(run_id=bytes({len(RUN)}))}})
main(sys.argv[1:])
"""

Command = Callable[[list[str]], None]
"""Runs `dpstream` with these arguments, under the run id of this bench."""


def measure(*, quick: bool, progress: Progress) -> Findings:
    """One row per query; quick: the listings and a join, without Spark."""
    asked = QUICK if quick else ALL
    rows: list[Row] = []
    notes = ["noise is keyed: a run id is fixed here so that runs can be compared"]
    with tempfile.TemporaryDirectory() as place, ExitStack() as undo:
        folder, engine = Path(place), None
        if not quick and find_spec("pyspark") is not None:
            session = local_session("local[2]")
            undo.callback(session.stop)
            engine = SparkEngine(session, buckets=2)
        elif not quick:
            notes.append("pyspark is not installed: nothing was run on Spark")
        Secret.create(folder / "secret", value=bytes(range(32)))
        for number, one in enumerate(asked):
            progress(number, len(asked), one.name)
            source, real = log_file(one.log, folder, rows=_ROWS)
            found = all_ways(one, source, folder, engine=engine)
            rows.append({"query": one.name, "log": one.log, "real": real} | found)
    same = sum(row["identical"] for row in rows)
    made = sorted({row["log"] for row in rows if not row["real"]})
    if made:
        notes.append(f"made-up rows for {', '.join(made)}")
    if engine is not None:
        notes.append(f"on Spark: {sum(row['seconds_spark'] is not None for row in rows)} queries")
    return Findings(
        rows=rows,
        targets=[
            target("queries with identical releases", float(same), "==", float(len(asked))),
            target("queries that published nothing", float(_empty(rows)), "==", 0.0),
        ],
        notes=notes,
    )


def all_ways(
    asked: Asked,
    source: Path,
    folder: Path,
    *,
    command: Command | None = None,
    engine: SparkEngine | None = None,
) -> Row:
    """Run a query in every way and compare what the sinks have."""
    place = folder / asked.name
    files = {name: table_file(name, folder) for name in (*asked.public, *asked.registry)}
    sources = dict.fromkeys((asked.table, *asked.more), str(source))

    def by_command() -> None:
        tables = [("public", name) for name in asked.public]
        tables += [("registry", name) for name in asked.registry]
        named = [("source", f"{name}={path}") for name, path in sources.items()]
        named += [(kind, f"{name}={files[name]}") for kind, name in tables]
        (command or in_a_process)(
            [
                *("sql", asked.sql, "--name", asked.name),
                *(word for option, value in named for word in (f"--{option}", value)),
                *("--state", str(place / "state command"), "--secret", str(folder / "secret")),
                *("--sink", f"csv:{place / 'command'}"),
            ]
        )

    def by_python(way: str, engine: SparkEngine | None = None) -> None:
        run(
            sql(asked.sql, name=asked.name),
            source=sources if asked.more else str(source),
            sink=f"csv:{place / way}",
            state=place / f"state {way}",
            secret=folder / "secret",
            options=EngineOptions(run_id=RUN),
            public={name: files[name] for name in asked.public},
            registry={name: files[name] for name in asked.registry},
            engine=engine,
        ).finish()

    ways: dict[str, Callable[[], Any]] = {
        "command": by_command,
        "python": partial(by_python, "python"),
    }
    if engine is not None and asked.spark:
        ways["spark"] = partial(by_python, "spark", engine)
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
        "identical": all(each == found["python"] for each in found.values())
        and bool(found["python"]),
        "seconds_command": seconds["command"],
        "seconds_python": seconds["python"],
        "seconds_spark": seconds.get("spark"),
    }


def table_file(name: str, folder: Path) -> Path:
    """Where a table of `TABLES` is; it is written to `folder`."""
    path = folder / f"table-{name}.csv"
    if not path.exists():
        pa_csv.write_csv(pa.table(TABLES[name]), path)
    return path


def in_a_process(arguments: list[str]) -> None:
    """The command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _COMMAND, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise StateError(f"dpstream {arguments[0]} left with {done.returncode}: {done.stderr}")


def _empty(rows: list[Row]) -> int:
    return sum(not row["rows_published"] for row in rows)


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
