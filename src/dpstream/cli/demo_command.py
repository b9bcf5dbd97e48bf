"""`dpstream demo`: a guided tour. A live query that survives a kill, a series, the ledger."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
import webbrowser
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from importlib.resources import as_file, files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from typer import Option

from dpstream.cli.ledger_command import books_with_dates, print_books
from dpstream.cli.mechanisms_command import about
from dpstream.cli.output import AsJson, people, print_json
from dpstream.cli.series_files import read_series
from dpstream.connectors.encode import csv
from dpstream.data.clicks import clicks
from dpstream.errors import BudgetExceeded, DpstreamError
from dpstream.mechanisms import find
from dpstream.mechanisms.release import Series, release
from dpstream.optional import optional
from dpstream.privacy.ledger.charges import Terms
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.records import Reals

WELCOME = """\
dpstream publishes statistics from live streams under differential privacy, for as long as they run.

1. A live stream. Made-up users click on made-up pages, about {rate} clicks a second; the files land
in a directory, and an engine in a process of its own publishes visitors per page every second. For
all rows of a user together the promise is epsilon = 2, delta = 1e-9. Which pages exist is private
too: a page stays hidden until enough users are behind it. Half-way the engine is killed.

Starting it takes a moment (the first time on a machine, code is compiled and kept).
"""
TRUTH = """\
The truth is there in this demo only: a publisher never shows it. The noise stays within its band
about 19 times in 20. A user counts for at most 4 pages, which no band knows of: large figures are
a little low. The clicks of the last moment are still on their way.
"""
SAME = """\
The kill came after release {killed_after}. Started again, the engine computed the releases up to it
once more from its state: {found}.
Other noise over the same clicks could be averaged away, and would have to be paid again.

The ledger: charged once, before the first noise; the restart cost nothing.
"""
INTRO = """\
2. A series: one row a step, no users, a promise for any 12 successive steps.

Monthly unemployment in the US (16 to 19 years, Black or African American), {first} to {last}, in
thousands; US Bureau of Labor Statistics, series LNU03000018. One protected event is one thousand
persons in one month: each release hides one event a month, in any 12 successive months, within
epsilon = 1.
"""
FIGURES = """\
{mechanism}: {summary}
  mean absolute error {mean_absolute_error:.1f} of {mean_value:.0f}, \
noise stddev {noise_stddev:.1f}, {paid_steps} of {steps} steps paid, \
{within_two_stddev:.0%} of the truth within the band"""
HELD = "  (a held value repeats an old step: its ± knows its noise, not how far the stream moved)\n"
NEXT = """\
Next:
  dpstream init && dpstream run pipeline.toml   your own pipeline, from an example that runs
  dpstream serve pipeline.toml                  its releases on a live page (dpstream demo --serve)
  dpstream sql "SELECT ..." --source t=log.csv  one query over your own rows
  dpstream release t.csv --window 12 --epsilon 1   your own series
  dpstream audit                                attack it yourself
"""
QUERY = """\
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 2, delta = 1e-9, privacy_unit_column = user, max_groups_contributed = 4,
                time_column = at, time_unit = 'ms', start = '{start}', end = '{end}')
       page, COUNT(*) AS visitors
FROM clicks
GROUP BY page
EMIT EVERY INTERVAL '1' SECOND
"""
PIPELINE = """\
source = {{path = "clicks/", live = true}}
budget = {{dataset = "clicks", epsilon = 2.5, delta = 1e-8, ledger = "book"}}
state = {{path = "state/"}}
sink = {{to = {sinks}}}
query = [{{name = "pages", file = "pages.sql"}}]
"""
_FILES_PER_SECOND = 2
_LOOK_EVERY = 0.1  # seconds between two looks into the sink
_COMPILED = 4.0  # a start that takes longer has compiled something, or the machine is busy
_TIMEOUT = 120  # seconds that the engine may take beyond its schedule
_SERIES = "unemployment_lnu03000018.csv"
_STEPS = 12  # of the series that are shown


@dataclass(frozen=True, kw_only=True)
class Tour:
    """Triggers, one a second, before the kill and after it; how long the engine is away."""

    kill_after: int = 8
    gone_for: float = 2.0
    then: int = 8
    rows_per_second: int = 400


QUICK = Tour(kill_after=2, gone_for=0.0, then=3, rows_per_second=1000)


def demo(
    quick: Annotated[bool, Option("--quick", help="A tour of a few seconds.")] = False,
    serve: Annotated[
        bool, Option("--serve", help="Open a live page of the releases in the browser.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Take a tour: a live private query that survives a kill, a series, and the ledger."""
    for module in ("starlette", "uvicorn") if serve else ():
        optional(module, extra="serve", who="demo --serve shows a live page, which")
    tour = QUICK if quick else Tour()
    console = people()
    console.soft_wrap, console.quiet = True, as_json
    console.print(WELCOME.format(rate=tour.rows_per_second))
    if serve:
        console.print("The page stays until you press Enter.\n")
    with TemporaryDirectory(prefix="dpstream-demo-") as name:
        live = play(tour, Path(name), console.print, serve=serve)
        with closing(Ledger(Path(name) / "book")) as ledger:
            books = books_with_dates(ledger)
    console.print("", _pages(live["last_release"], live["truth"]), "", TRUTH, sep="\n")
    console.print(f"What ran, twice:\n\n$ {live['command']}\n\n{live['query']}")
    found = "the same bytes, every one" if live["identical"] else "and they DIFFER"
    console.print(SAME.format(killed_after=live["killed_after"], found=found))
    print_books(console, books)
    series = _publish_series(console)
    console.print(NEXT)
    if as_json:
        print_json(series | {"live": live, "live_ledger": books})
    if not live["identical"]:
        raise DpstreamError("releases differ after the restart: please report it")


def play(
    tour: Tour, folder: Path, tell: Callable[..., None], *, serve: bool = False
) -> dict[str, Any]:
    """Run the query over a live stream, kill it half-way, start it again, compare the bytes."""
    seconds = _warm_up(folder / "compile")
    if seconds > _COMPILED:
        seconds = _warm_up(folder / "start")
    seconds *= 2 if serve else 1  # a server starts, then its worker
    triggers = tour.kill_after + math.ceil(tour.gone_for + 1.5 * seconds) + tour.then
    start = math.ceil(time.time() + seconds)
    first, last = (f"{datetime.fromtimestamp(at, UTC):%F %T}" for at in (start, start + triggers))
    (folder / "pages.sql").write_text(query := QUERY.format(start=first, end=last))
    feed = Feed(folder / "clicks", start, triggers, rows_per_second=tour.rows_per_second)
    engine = Engine(folder, serve=serve, triggers=triggers, patience=seconds + triggers + _TIMEOUT)
    told = 0

    def feed_until(done: Callable[[], bool]) -> None:
        """Let clicks come, and tell of every release."""
        nonlocal told
        while not done():
            feed.write_due()
            index, rows = engine.newest()
            if index > told:
                pages = ", ".join(f"{row['page']} {_value(row)}" for row in rows[:3])
                tell(f"release {index} of {triggers}   {feed.rows:,} clicks so far   {pages}")
            told = max(index, told)
            time.sleep(_LOOK_EVERY)

    try:
        tell(f"the engine runs, process {engine.pid}", style="green")
        feed_until(lambda: engine.is_over() or told >= tour.kill_after)
        code = engine.kill(pid := engine.pid)
        before, back = engine.releases("out"), time.monotonic() + tour.gone_for
        tell(f"kill -9 {pid}: the engine is gone; the clicks keep coming", style="bold red")
        feed_until(lambda: time.monotonic() > back)
        engine.start()
        tell(f"the same command again: the engine goes on, process {engine.pid}", style="green")
        feed_until(engine.is_over)
        tell("the last release is out", style="green")
        if serve and sys.stdin.isatty():  # the page stays until Enter
            sys.stdin.readline()
    finally:
        engine.end()
    again, now = engine.releases("again"), engine.releases("out")
    repeated = sorted(before.keys() & again.keys())
    return {
        "command": engine.command,
        "query": query,
        "rows": feed.rows,
        "killed_after": len(before),
        "exit_code": code,
        "repeated": repeated,
        "identical": now | before == now == now | again,
        "last_release": engine.newest()[1],
        "truth": feed.truth(),
    }


class Feed:
    """Moves files of made-up clicks into a directory from `start` on, and knows the truth."""

    def __init__(self, folder: Path, start: int, seconds: int, *, rows_per_second: int) -> None:
        self._folder, self._begin, self.rows = folder, start, 0
        self._each = rows_per_second // _FILES_PER_SECOND
        files = seconds * _FILES_PER_SECOND - 1  # one more would meet the last trigger
        rows = files * self._each
        self._table = clicks(rows, users=rows // 2).select(["user", "page"])
        folder.mkdir()

    def write_due(self) -> None:
        """Write the files that are due by now."""
        while self.rows < len(self._table):
            number = self.rows // self._each
            due = self._begin + (number + 0.25) / _FILES_PER_SECOND
            if due > time.time():
                return
            part = self._table.slice(self.rows, self._each)
            stamps = pa.array([int(due * 1000)] * len(part), pa.int64())
            hidden = self._folder / f".{number:05d}.csv"
            hidden.write_bytes(csv(part.append_column("at", stamps)))
            hidden.rename(self._folder / f"{number:05d}.csv")  # complete before it is seen
            self.rows += len(part)

    def truth(self) -> dict[str, int]:
        """Different users per page so far: what a real stream's publisher never shows."""
        pages = self._table[: self.rows].group_by("page").aggregate([("user", "count_distinct")])
        pages = pages.sort_by([("user_count_distinct", "descending")])
        return dict(zip(*(column.to_pylist() for column in pages.columns), strict=True))


class Engine:
    """The query in a process of its own: the command that people type.

    With `serve` that is a server with a page: its worker runs the query, and when the worker dies
    the server starts it again by itself.
    """

    def __init__(self, folder: Path, *, serve: bool, triggers: int, patience: float) -> None:
        self._folder, self._serve, self._triggers = folder, serve, triggers
        self._deadline = time.monotonic() + patience
        self.command = f"dpstream {'serve' if serve else 'run'} demo.toml"
        self._publish_to("out/")
        if serve:
            words = ["serve", "demo.toml", "--json", "--port=0", "--operator-port=0"]
            self._child = _spawn(words, folder, stdout=subprocess.PIPE)
            told = self._child.stdout and self._child.stdout.readline()
            address = json.loads(told or _fail(folder, "the demo's server does not start"))
            webbrowser.open(f"{address['public']}/")
        else:
            self.start()

    @property
    def pid(self) -> int:
        """The process that runs the query; a server's worker is its only child."""
        pid = self._child.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text() if self._serve else ""
        return int(children.split()[0]) if children else pid

    def kill(self, pid: int) -> int:
        """Kill it with signal 9; what is published once more goes to a second sink, too."""
        self._publish_to("out/", "again/")
        with suppress(ProcessLookupError):  # a busy machine: it has come to its end before
            os.kill(pid, signal.SIGKILL)
        return -signal.SIGKILL if self._serve else self._child.wait()

    def start(self) -> None:
        """Run the command; a server has started its second worker itself."""
        if not self._serve:
            self._child = _spawn(["run", "demo.toml", "--json"], self._folder)

    def is_over(self) -> bool:
        """Whether the last release is out; raises if it will not come."""
        code = self._child.poll()
        if code is None and time.monotonic() > self._deadline:
            _fail(self._folder, f"the engine is still busy {_TIMEOUT} s after its last trigger")
        if code:
            _fail(self._folder, f"the engine ended with {code}")
        return self.newest()[0] >= self._triggers if self._serve else code == 0

    def end(self) -> None:
        """Leave no process behind."""
        if self._child.poll() is None:
            self._child.terminate()
        self._child.wait()

    def newest(self) -> tuple[int, list[dict[str, Any]]]:
        """The number of the latest release, and its rows, the largest first."""
        releases = self.releases("out")
        if not releases:
            return 0, []
        names = ["page", "visitors", "visitors_stddev"]
        rows = pq.read_table(pa.BufferReader(releases[max(releases)]), columns=names)
        return max(releases), rows.sort_by([("visitors", "descending")]).to_pylist()

    def releases(self, sink: str) -> dict[int, bytes]:
        """The bytes of each release, by the number of its trigger, which ends the file's name."""
        paths = (self._folder / sink).glob("*.parquet")
        return {int(path.stem.rpartition("-t")[2]): path.read_bytes() for path in paths}

    def _publish_to(self, *sinks: str) -> None:
        (self._folder / "demo.toml").write_text(PIPELINE.format(sinks=list(sinks)))


def _warm_up(folder: Path) -> float:
    """Compile what the query needs, once per installation; how long a start takes."""
    folder.mkdir()
    (folder / "clicks.csv").write_bytes(csv(clicks(2_000, 500)))
    text = QUERY.replace("'ms'", "'s'").replace("SECOND", "DAY")
    text = text.format(start="2024-05-01", end="2024-05-02")
    began = time.perf_counter()
    words = ["sql", text, "--source=clicks=clicks.csv", "--sink=out/", "--state=state"]
    if _spawn(words, folder).wait():
        _fail(folder, "the demo's engine does not start")
    return time.perf_counter() - began


def _spawn(
    words: list[str], folder: Path, *, stdout: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """`dpstream ...` in a process of its own, whose notes are in the folder's `stderr`."""
    command = [sys.executable, "-m", "dpstream", *words]
    with (folder / "stderr").open("wb") as notes:
        return subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=stdout, stderr=notes
        )


def _fail(folder: Path, what: str) -> NoReturn:
    raise DpstreamError(f"{what}: {(folder / 'stderr').read_text()[-2000:]}")


def _pages(rows: list[dict[str, Any]], truth: dict[str, int]) -> Table:
    """A release of the live query beside the truth; a page that it does not hold is hidden."""
    table = Table("page", box=None, pad_edge=False)
    table.add_column("published (± 2 stddev)", justify="right")
    table.add_column("", width=28)
    table.add_column("truth (demo only)", justify="right", style="dim")
    published = {row["page"]: row for row in rows}
    most = max([1.0, *(row["visitors"] for row in rows)])
    for page, users in truth.items():
        row = published.get(page)
        if row is None:
            table.add_row(page, "hidden: too few users", "", f"{users:,}", style="dim")
        else:
            bar = Bar(most, 0, row["visitors"], color="cyan")
            table.add_row(page, _value(row), bar, f"{users:,}")
    return table


def _value(row: dict[str, Any]) -> str:
    return f"{row['visitors']:,.0f} ± {2 * row['visitors_stddev']:,.0f}"


def _publish_series(console: Console) -> dict[str, Any]:
    """Two releases of a bundled series that share a book, and one that does not fit into it."""
    with as_file(files("dpstream") / "data" / _SERIES) as path:
        rows = read_series(path)
    truth, months = rows.block, [month[:7] for month in rows.times or []]
    console.print(INTRO.format(first=months[0], last=months[-1]))
    ledger, dataset = Ledger(), "unemployment"
    ledger.open(dataset, Terms(unit="w_event", total=Fraction(2), window=12))

    def publish(name: str) -> Series:
        mechanism: Any = find(name)
        mechanism = mechanism(epsilon=1, window=12)
        return release(mechanism, truth, ledger=ledger, dataset=dataset, name=name)

    both = {name: publish(name) for name in ("uniform", "sample")}
    table = Table("month", *both, "truth (demo only)", box=None, pad_edge=False)
    for step in range(-_STEPS, 0):
        bars = ((one.values[step, 0], 2 * one.stddev[step, 0]) for one in both.values())
        values = [f"{value:,.0f} ± {width:,.0f}" for value, width in bars]
        table.add_row(months[step], *values, f"{truth[step, 0]:,.0f}")
    console.print(table, "")
    figures = [_figures(name, truth, series) for name, series in both.items()]
    for figure, series in zip(figures, both.values(), strict=True):
        summary = about(figure["mechanism"])["summary"]
        console.print(FIGURES.format(summary=summary, **figure), HELD * any(series.held), sep="\n")
    try:
        publish("uniform")
    except BudgetExceeded as problem:
        refusal = str(problem)
    else:
        raise AssertionError("the ledger accepted more than its book allows")
    console.print("The ledger, a book of epsilon = 2 that both releases share:\n")
    print_books(console, ledger.report())
    console.print(f"A third release is refused: {refusal.partition(';')[0]}.\n")
    facts = {"series": _SERIES, "columns": rows.names, "steps": len(truth)}
    return facts | {"releases": figures, "refused": refusal, "ledger": ledger.report()}


def _figures(name: str, truth: Reals, series: Series) -> dict[str, Any]:
    """How far a release is from the truth, in all steps."""
    error = np.abs(series.values - truth)
    return {
        "mechanism": name,
        "epsilon": 1,
        "window": 12,
        "steps": len(series),
        "mean_absolute_error": float(error.mean()),
        "mean_value": float(truth.mean()),
        "noise_stddev": float(series.stddev.mean()),
        "paid_steps": sum(series.paid),
        "within_two_stddev": float((error <= 2 * series.stddev).mean()),
    }
