"""`dpstream demo`: a guided tour. A live query that survives a kill, a series, the ledger."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
import webbrowser
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from fractions import Fraction
from importlib.resources import as_file, files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.compute import field
from pyarrow.csv import read_csv
from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from typer import Option

from dpstream.cli.init_command import FEED, LIVE_EXAMPLE
from dpstream.cli.ledger_command import books_with_dates, print_books
from dpstream.cli.mechanisms_command import about
from dpstream.cli.output import AsJson, people, print_json
from dpstream.cli.series_files import read_series
from dpstream.errors import BudgetExceeded, DpstreamError
from dpstream.mechanisms import find
from dpstream.mechanisms.release import Series, release
from dpstream.optional import optional
from dpstream.privacy.ledger.charges import Terms
from dpstream.privacy.ledger.ledger import Ledger

WELCOME = """\
dpstream publishes statistics from live streams under differential privacy, for as long as they run.

1. A live stream, as `dpstream init --live` writes it. Made-up users click on made-up pages, 200
clicks a second; the files land in a directory, and an engine in a process of its own publishes
visitors per page every second. For all rows of a user within a day the promise is epsilon = 2,
delta = 1e-9. Which pages exist is private too: a page stays hidden until enough users are behind
it. Half-way the engine is killed.
The first time on a machine, code is compiled and kept: that takes a moment.
"""
TRUTH = """\
The truth is there in this demo only: a publisher never shows it. The noise stays within its band
about 19 times in 20; a user counts for 4 pages at most, and the last clicks are still on their way.
"""
SAME = """\
The kill came after release {killed_after}. Started again, the engine computed the releases up to it
once more from its state: {found}.
Other noise over the same clicks could be averaged away, and would have to be paid again.

The ledger: charged once; the restart cost nothing.
"""
INTRO = """\
2. A series: one row a step, no users, a promise for any 12 successive steps.

Monthly unemployment in the US (16 to 19 years, Black or African American), {first} to {last}, in
thousands; US Bureau of Labor Statistics, series LNU03000018. One protected event is one thousand
persons in one month: a release hides one a month, in any 12 successive months, within epsilon = 1.
"""
FIGURES = """\
{mechanism}: {summary}
  mean absolute error {mean_absolute_error:.1f}, noise stddev {noise_stddev:.1f}, \
{paid_steps} of {steps} steps paid (the others repeat an old one)
"""
NEXT = """\
Next:
  dpstream init && dpstream run pipeline.toml   your own pipeline, from an example that runs
  dpstream serve pipeline.toml                  its releases on a live page (dpstream demo --serve)
"""


class Tour(NamedTuple):
    """Triggers, one a second, before the kill and after it; how long the engine is away."""

    kill_after: int = 8
    gone_for: int = 2
    then: int = 8


QUICK = Tour(kill_after=2, gone_for=0, then=3)


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
    console = people()
    console.soft_wrap, console.quiet = True, as_json
    console.print(WELCOME + "The page stays until you press Enter.\n" * serve)
    with TemporaryDirectory(prefix="dpstream-demo-") as name:
        live = play(QUICK if quick else Tour(), Path(name), console.print, serve)
        with closing(Ledger(Path(name) / "clicks.ledger")) as ledger:
            books = books_with_dates(ledger)
    console.print("", _pages(live["last_release"], live["truth"]), "", TRUTH, sep="\n")
    console.print(f"What ran, twice:\n\n$ {live['command']}\n\n{live['query']}")
    found = "the same bytes, every one" if live["identical"] else "and they DIFFER"
    console.print(SAME.format(found=found, **live))
    print_books(console, books)
    series = _publish_series(console)
    console.print(NEXT)
    if as_json:
        print_json(series | {"live": live, "live_ledger": books})
    if not live["identical"]:
        raise DpstreamError("releases differ after the restart: please report it")


def play(tour: Tour, folder: Path, tell: Callable[..., None], serve: bool) -> dict[str, Any]:
    """Run the query over a live stream, kill it half-way, start it again, compare the bytes."""
    seconds = _try_out(folder / "compile")
    if seconds > 6:  # it has compiled something
        seconds = _try_out(folder / "start")
    start = int(time.time() + seconds * (2 if serve else 1)) + 1  # a server starts, then its worker
    text, told, feed = write_pipeline(folder, start), 0, None
    engine = Engine(folder, serve=serve)

    def tell_until(number: int) -> None:
        """Tell of every release up to one."""
        nonlocal told
        while told < number:
            engine.check()
            index, rows = engine.newest()
            if index > told:
                told, first = index, (f"{row['page']} {_value(row)}" for row in rows[:3])
                tell(f"release {index}   {', '.join(first)}")
            time.sleep(0.1)

    try:
        engine.open()
        tell(f"the engine runs, process {engine.pid}", style="green")
        time.sleep(max(0, start - time.time()))
        feed = _spawn(["feed.py"], folder)
        tell_until(tour.kill_after)
        code = engine.kill(pid := engine.pid)
        before = engine.releases("out")
        tell(f"kill -9 {pid}: the engine is gone; the clicks keep coming", style="bold red")
        time.sleep(tour.gone_for)
        engine.start()
        tell(f"the same command again: the engine goes on, process {engine.pid}", style="green")
        tell_until(int(time.time() + 1.5 * seconds - start) + tour.then)  # it catches up first
        tell("the last release is out", style="green")
        if serve and sys.stdin.isatty():  # the page stays until Enter
            sys.stdin.readline()
    finally:
        for process in filter(None, (engine.process, feed)):
            process.terminate()
            process.wait()
    again, now = engine.releases("again"), engine.releases("out")
    return {
        "command": engine.command,
        "query": tomllib.loads(text)["query"][0]["sql"],
        "killed_after": max(before),
        "truth": _truth(folder / "incoming", start + engine.newest()[0]),
        "exit_code": code,
        "repeated": sorted(before.keys() & again.keys()),
        "identical": now | before == now == now | again,
        "last_release": engine.newest()[1],
    }


def write_pipeline(folder: Path, start: float) -> str:
    """What `dpstream init --live` writes, for windows from `start` and a release every second."""
    (folder / "incoming").mkdir(parents=True)
    (folder / "feed.py").write_text(FEED)
    begin = f"time_unit = 's', start = TIMESTAMP '{datetime.fromtimestamp(start, UTC):%F %T}')"
    text = LIVE_EXAMPLE.replace("time_unit = 's')", begin).replace("'5' SECOND", "'1' SECOND")
    (folder / "pipeline.toml").write_text(text)
    return text


def _try_out(folder: Path) -> float:
    """Seconds until the same pipeline has one release; code is compiled, once per installation."""
    write_pipeline(folder, began := time.time())
    _spawn(["feed.py", "1"], folder).wait()
    if _spawn(["-m", "dpstream", "run", "pipeline.toml", "--once"], folder).wait():
        _fail(folder, "the demo's engine does not start")
    return time.time() - began


def _truth(folder: Path, until: int) -> dict[str, int]:
    """Different users per page: what a real stream's publisher never shows."""
    clicks = pa.concat_tables([read_csv(path) for path in folder.glob("*.csv")])
    users = clicks.filter(field("at") < until).group_by("page")
    pages = users.aggregate([("user", "count_distinct")]).to_pylist()
    pages = sorted(pages, key=lambda each: -each["user_count_distinct"])
    return {each["page"]: each["user_count_distinct"] for each in pages}


class Engine:
    """The query in a process of its own; with `serve`, in a server's worker, which it restarts."""

    def __init__(self, folder: Path, *, serve: bool) -> None:
        self._folder, self._serve = folder, serve
        self._text = (folder / "pipeline.toml").read_text()
        self.process: Any = None
        self._deadline = time.monotonic() + 300
        self.command = f"dpstream {'serve' if serve else 'run'} pipeline.toml"

    def open(self) -> None:
        """Start it for the first time; of a server the page is shown."""
        self._publish_to("out/")
        if self._serve:
            words = [*self._words, "--port=0", "--operator-port=0"]
            self.process = _spawn(words, self._folder, stdout=subprocess.PIPE)
            told = self.process.stdout.readline()
            address = json.loads(told or _fail(self._folder, "the demo's server does not start"))
            webbrowser.open(f"{address['public']}/")
        else:
            self.start()

    @property
    def _words(self) -> list[str]:
        return ["-m", *self.command.split(), "--json"]

    @property
    def pid(self) -> int:
        """The process that runs the query; a server's worker is its only child."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text() if self._serve else ""
        return int(children.split()[0]) if children else pid

    def kill(self, pid: int) -> int:
        """Kill it with signal 9; what is published once more goes to a second sink, too."""
        self._publish_to("out/", "again/")
        os.kill(pid, signal.SIGKILL)
        return -signal.SIGKILL if self._serve else self.process.wait()

    def start(self) -> None:
        """Run the command; a server has started its second worker itself."""
        if not self._serve:
            self.process = _spawn(self._words, self._folder)

    def check(self) -> None:
        """Raise if no further release will come."""
        code = self.process.poll()
        if code is not None or time.monotonic() > self._deadline:
            _fail(self._folder, f"the engine has come to no end (exit code {code})")

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
        text = f"{self._text}\n[sink]\nto = {list(sinks)}\n"
        (self._folder / "pipeline.toml").write_text(text)


def _spawn(
    words: list[str], folder: Path, *, stdout: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """`python ...` in a process of its own, whose notes are in the folder's `stderr`."""
    command, nothing = [sys.executable, *words], subprocess.DEVNULL
    with (folder / "stderr").open("ab") as notes:
        return subprocess.Popen(command, cwd=folder, stdin=nothing, stdout=stdout, stderr=notes)


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
    with as_file(files("dpstream") / "data" / "unemployment_lnu03000018.csv") as path:
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
    for step in range(-12, 0):
        bars = ((one.values[step, 0], 2 * one.stddev[step, 0]) for one in both.values())
        values = [f"{value:,.0f} ± {width:,.0f}" for value, width in bars]
        table.add_row(months[step], *values, f"{truth[step, 0]:,.0f}")
    console.print(table, "")
    figures = [
        {
            "mechanism": name,
            "steps": len(one),
            "mean_absolute_error": float(abs(one.values - truth).mean()),
            "noise_stddev": float(one.stddev.mean()),
            "paid_steps": sum(one.paid),
        }
        for name, one in both.items()
    ]
    for figure in figures:
        console.print(FIGURES.format(summary=about(str(figure["mechanism"]))["summary"], **figure))
    refusal = ""
    try:
        publish("uniform")
    except BudgetExceeded as problem:
        refusal = str(problem)
    console.print("The ledger, a book of epsilon = 2 that both releases share:\n")
    print_books(console, ledger.report())
    console.print(f"A third release is refused: {refusal.partition(';')[0]}.\n")
    return {"releases": figures, "refused": refusal, "ledger": ledger.report()}
