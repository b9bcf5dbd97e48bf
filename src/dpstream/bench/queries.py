"""SQL end to end: every query from the command and from Python, release by release the same.

Both begin a run of their own, with one secret and, for this comparison, one run id: else their
noises would differ, as they must. What is compared are the files of their sinks, byte for byte.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pyarrow.csv as pa_csv

from dpstream.bench.harness import Findings, Progress, Row, target
from dpstream.bench.query_list import LISTINGS, REALISTIC, Asked
from dpstream.bench.query_logs import log_file
from dpstream.engines.local import Options
from dpstream.errors import StateError
from dpstream.privacy.state import Secret
from dpstream.session import run
from dpstream.sql import sql

RUN: Final = bytes(16)
_ROWS: Final = 60_000  # of a made-up log
_COMMAND: Final = f"""
import sys
from dpstream.cli import main, sql_command
from dpstream.engines.local import Options
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
            checkpoint_location=place / "state 2",
            secret=folder / "secret",
            options=Options(run_id=RUN),
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
