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
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from importlib.resources import as_file, files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.bar import Bar
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from typer import Option

from dpstream.cli.ledger_command import books_with_dates, print_books
from dpstream.cli.mechanisms_command import about
from dpstream.cli.output import AsJson, people, print_json
from dpstream.cli.series_files import SeriesRows, read_series
from dpstream.connectors.encode import csv
from dpstream.data.clicks import clicks
from dpstream.errors import BudgetExceeded, DpstreamError
from dpstream.mechanisms import find
from dpstream.mechanisms.release import Series, release
from dpstream.optional import optional
from dpstream.privacy.ledger.charges import Terms
from dpstream.privacy.ledger.ledger import Ledger

WELCOME = """\
dpstream publishes statistics from live streams under differential privacy, for as long as they run.

1. A live stream. Made-up users click on made-up pages, about {rate} clicks a second; the files land
in a directory, and an engine in a process of its own publishes visitors per page every second. For
all rows of a user together the promise is epsilon = 2, delta = 1e-9. Which pages exist is private
too: a page stays hidden until enough users are behind it. Half-way the engine is killed.

Starting it takes a moment (the first time on a machine, code is compiled and kept).
"""
TRUTH = """\
The truth is there in this demo only: a publisher never shows it. The noise stays
within its band about 19 times in 20. A user counts for at most 4 pages, which no band knows of:
large figures are a little low. The clicks of the last moment are still on their way.
"""
INTRO = """\
2. A series: one row a step, no users, a promise for any {window} successive steps.

Monthly unemployment in the US (16 to 19 years, Black or African American), {first} to {last}.
Source: US Bureau of Labor Statistics, series LNU03000018. Public figures stand in for a secret.
The series counts thousands of persons, so here one protected event is one thousand persons in one
month. (A service that counts persons protects one person.) Each release below promises: a change
of one event a month, in any {window} successive months, stays hidden within epsilon = {epsilon}.
"""
HELD = (
    "(A held value repeats an old step: its bar knows its noise, not how far the stream moved.)\n"
)
NEXT = """\
Next:
  dpstream init && dpstream run pipeline.toml   your own pipeline, from an example that runs
  dpstream serve pipeline.toml                  its releases on a live page (dpstream demo --serve)
  dpstream sql "SELECT ..." --source t=log.csv  one query over your own rows
  dpstream release your.csv --window 12 --epsilon 1 --state state --ledger book
                                                your own series, and be able to repeat it
  dpstream mechanisms                           what else there is, and what it promises
  dpstream audit                                attack it yourself
"""
_STATES = {
    "running": ("the engine runs, process {pid}", "green"),
    "killed": ("kill -9 {pid}: the engine is gone; the clicks keep coming", "bold red"),
    "running again": ("the same command again: the engine goes on, process {pid}", "green"),
    "over": ("the last release is out", "green"),
}
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
_LINE_EVERY = 4  # releases between two lines in a pipe
_STEPS = 12  # of a series that are shown
_SERIES = "unemployment_lnu03000018.csv"
_EPSILON, _WINDOW = 1, 12


@dataclass(frozen=True, kw_only=True)
class Tour:
    """Triggers, one a second, before the kill and after it; how long the engine is away."""

    kill_after: int = 8
    gone_for: float = 2.0
    then: int = 8
    rows_per_second: int = 400


QUICK = Tour(kill_after=2, gone_for=0.0, then=3, rows_per_second=1000)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What there is to see at one moment; `rows` are those of the newest release."""

    triggers: int
    state: str
    index: int
    rows: list[dict[str, Any]]
    clicks: int
    truth: dict[str, int]
    pid: int


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
        folder = Path(name)
        with scenes_on(console) as show:
            live = play(tour, folder, show, serve=serve)
        with closing(Ledger(folder / "book")) as ledger:
            books = books_with_dates(ledger)
    _show_live(console, live)
    print_books(console, books)
    series = _publish_series(console)
    console.print(NEXT)
    if as_json:
        print_json(series | {"live": live, "live_ledger": books})
    if not live["identical"]:
        raise DpstreamError("releases differ after the restart: please report it")


def play(
    tour: Tour, folder: Path, show: Callable[[Scene], None], *, serve: bool = False
) -> dict[str, Any]:
    """Run the query over a live stream, kill it half-way, start it again, compare the bytes."""
    seconds = _warm_up(folder / "compile")
    if seconds > _COMPILED:
        seconds = _warm_up(folder / "start")
    seconds *= 2 if serve else 1  # a server starts, then its worker
    triggers = tour.kill_after + math.ceil(tour.gone_for + 1.5 * seconds) + tour.then
    start = math.ceil(time.time() + seconds)
    end = start + triggers
    first, last = (datetime.fromtimestamp(at, tz=UTC).replace(tzinfo=None) for at in (start, end))
    query = QUERY.format(start=first, end=last)
    (folder / "pages.sql").write_text(query)
    engine = Engine(folder, serve=serve)
    feed = Feed(folder / "clicks", start, triggers, rows_per_second=tour.rows_per_second)

    def show_while(state: str) -> int:
        feed.write_due()
        index, rows = engine.newest()
        show(Scene(triggers=triggers, state=state, index=index, rows=rows, clicks=feed.rows,
                   truth=feed.truth(), pid=engine.pid))  # fmt: skip
        time.sleep(_LOOK_EVERY)
        return index

    try:
        engine.start()
        while show_while("running") < tour.kill_after:
            engine.is_over(triggers, end)
        code = engine.kill()
        before = engine.releases("out")
        for _ in range(1 + math.ceil(tour.gone_for / _LOOK_EVERY)):
            show_while("killed")
        engine.start()
        while not engine.is_over(triggers, end):
            show_while("running again")
        show_while("over")
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
        "identical": all(again[index] == before[index] for index in repeated)
        and all(now[index] == before[index] for index in before),
        "last_release": engine.newest()[1],
        "truth": feed.truth(),
    }


class Feed:
    """Moves files of made-up clicks into a directory from `start` on, and knows the truth."""

    def __init__(self, folder: Path, start: int, seconds: int, *, rows_per_second: int) -> None:
        self._folder, self._begin = folder, start
        self._each = rows_per_second // _FILES_PER_SECOND
        files = seconds * _FILES_PER_SECOND - 1  # one more would meet the last trigger
        users = max(files * self._each // 2, 1)
        self._table = clicks(files * self._each, users=users).select(["user", "page"])
        self.rows = 0
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

    def __init__(self, folder: Path, *, serve: bool) -> None:
        self._folder, self._serve = folder, serve
        self._child: subprocess.Popen[bytes] | None = None
        self._worker = 0
        self.command = f"dpstream {'serve' if serve else 'run'} demo.toml"
        self._publish_to("out/")

    def _publish_to(self, *sinks: str) -> None:
        (self._folder / "demo.toml").write_text(PIPELINE.format(sinks=list(sinks)))

    @property
    def pid(self) -> int:
        """The process that runs the query; a server's worker is its only child."""
        if self._child is not None and self._child.poll() is None:
            self._worker = pid = self._child.pid
            if self._serve:
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                self._worker = int(children[0]) if children else self._worker
        return self._worker

    def start(self) -> None:
        """Run the command; a server has started its second worker itself."""
        words = [*self.command.split()[1:], "--json"]
        if not self._serve:
            self._child = _spawn(words, self._folder)
        elif self._child is None:
            self._child = _spawn([*words, "--port=0", "--operator-port=0"], self._folder)
            webbrowser.open(self._address())

    def kill(self) -> int:
        """Kill it with signal 9; what is published once more goes to a second sink, too."""
        assert self._child is not None
        self._publish_to("out/", "again/")
        os.kill(self.pid, signal.SIGKILL)
        return -signal.SIGKILL if self._serve else self._child.wait()

    def is_over(self, triggers: int, end: float) -> bool:
        """Whether the last release is out; raises if it will not come."""
        assert self._child is not None
        code = self._child.poll()
        if code is None and time.time() > end + _TIMEOUT:
            raise DpstreamError(f"the engine is still busy {_TIMEOUT} s after its last trigger")
        if code:
            raise DpstreamError(f"the engine ended with {code}: {_last_words(self._folder)}")
        return self.newest()[0] >= triggers if self._serve else code == 0

    def end(self) -> None:
        """Leave no process behind."""
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()
            self._child.wait()

    def newest(self) -> tuple[int, list[dict[str, Any]]]:
        """The number of the latest release, and its rows."""
        paths = self._paths("out")
        if not paths:
            return 0, []
        names = ["page", "visitors", "visitors_stddev"]
        return max(paths), pq.read_table(paths[max(paths)], columns=names).to_pylist()

    def releases(self, sink: str) -> dict[int, bytes]:
        """The bytes of each release, by its number."""
        return {index: path.read_bytes() for index, path in self._paths(sink).items()}

    def _paths(self, sink: str) -> dict[int, Path]:
        """The files of a sink, by the number of the trigger in their names."""
        paths = (self._folder / sink).glob("*.parquet")
        return {int(path.stem.rpartition("-t")[2]): path for path in paths}

    def _address(self) -> str:
        """Where the page is, once the server says so."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self._child and self._child.poll() is None:
            line = (self._folder / "stdout").read_text()
            if line.endswith("\n"):
                return f"{json.loads(line)['public']}/"
            time.sleep(0.1)
        raise DpstreamError(f"the demo's server does not start: {_last_words(self._folder)}")


def _warm_up(folder: Path) -> float:
    """Compile what the query needs, once per installation; how long a start takes."""
    folder.mkdir()
    (folder / "clicks.csv").write_bytes(csv(clicks(2_000, 500)))
    text = QUERY.replace("'ms'", "'s'").replace("SECOND", "DAY")
    text = text.format(start="2024-05-01", end="2024-05-02")
    began = time.perf_counter()
    words = ["sql", text, "--source=clicks=clicks.csv", "--sink=out/", "--state=state"]
    if _spawn(words, folder).wait():
        raise DpstreamError(f"the demo's engine does not start: {_last_words(folder)}")
    return time.perf_counter() - began


def _spawn(words: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """`dpstream ...` in a process of its own, which writes to files of the folder."""
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        command = [sys.executable, "-m", "dpstream", *words]
        return subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )


def _last_words(folder: Path) -> str:
    return (folder / "stderr").read_text()[-2000:]


@contextmanager
def scenes_on(console: Console) -> Iterator[Callable[[Scene], None]]:
    """A callback that shows a scene: in place in a terminal, as a few lines elsewhere."""
    if console.is_terminal:
        with Live(console=console, refresh_per_second=8) as live:
            yield lambda scene: live.update(picture(scene))
        return
    told: set[tuple[str, int]] = set()

    def print_line(scene: Scene) -> None:
        key = (scene.state, scene.index // _LINE_EVERY)
        if key not in told:
            told.add(key)
            rows = sorted(scene.rows, key=lambda row: -row["visitors"])
            pages = ", ".join(f"{row['page']} {_value(row)}" for row in rows[:3])
            console.print(_headline(scene) + Text(f"   {pages}" if pages else ""))

    yield print_line


def picture(scene: Scene) -> Group:
    """The newest release beside the truth, and what the engine does."""
    return Group(_headline(scene), Text(), _pages(scene.rows, scene.truth))


def _headline(scene: Scene) -> Text:
    words, style = _STATES[scene.state]
    head = f"release {scene.index} of {scene.triggers}   {scene.clicks:,} clicks so far   "
    return Text(head) + Text(words.format(pid=scene.pid), style=style)


def _pages(rows: list[dict[str, Any]], truth: dict[str, int]) -> Table:
    """A release of the live query; a page that it does not hold is hidden."""
    table = _table_beside_truth("page")
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


def _table_beside_truth(label: str) -> Table:
    table = Table(label, box=None, pad_edge=False)
    table.add_column("published (± 2 stddev)", justify="right")
    table.add_column("", width=28)
    table.add_column("truth (demo only)", justify="right", style="dim")
    return table


def _value(row: dict[str, Any]) -> str:
    return f"{row['visitors']:,.0f} ± {2 * row['visitors_stddev']:,.0f}"


def _show_live(console: Console, live: dict[str, Any]) -> None:
    console.print()
    console.print(_pages(live["last_release"], live["truth"]))
    console.print("\n" + TRUTH)
    console.print(f"What ran, twice:\n\n$ {live['command']}\n\n{live['query']}")
    first, last = live["repeated"][0], live["repeated"][-1]
    console.print(
        f"The kill came after release {live['killed_after']}. Started again, the engine computed "
        f"releases {first} to {last} once more from its state: "
        + ("the same bytes, every one. " if live["identical"] else "and they DIFFER. ")
        + "Other noise over the same clicks could be averaged away, and would have to be paid "
        "again.\n"
    )
    console.print("The ledger: charged once, before the first noise; the restart cost nothing.\n")


def _publish_series(console: Console) -> dict[str, Any]:
    """Two releases of a bundled series that share a book, and one that does not fit into it."""
    with as_file(files("dpstream") / "data" / _SERIES) as path:
        rows = read_series(path)
    first, *_, last = (month[:7] for month in rows.times or [])
    console.print(INTRO.format(window=_WINDOW, epsilon=_EPSILON, first=first, last=last))
    ledger, dataset = Ledger(), "unemployment"
    ledger.open(dataset, Terms(unit="w_event", total=Fraction(2 * _EPSILON), window=_WINDOW))

    def publish(name: str) -> Series:
        mechanism: Any = find(name)
        mechanism = mechanism(epsilon=_EPSILON, window=_WINDOW)
        return release(mechanism, rows.block, ledger=ledger, dataset=dataset, name=name)

    figures = [_show_series(console, name, rows, publish(name)) for name in ("uniform", "sample")]
    try:
        publish("uniform")
    except BudgetExceeded as problem:
        refusal = str(problem)
    else:
        raise AssertionError("the ledger accepted more than its book allows")
    console.print("The ledger, a book of epsilon = 2 that both releases share:\n")
    print_books(console, ledger.report())
    console.print(f"A third release is refused: {refusal.partition(';')[0]}.\n")
    facts = {"series": _SERIES, "columns": rows.names, "steps": len(rows.block)}
    return facts | {"releases": figures, "refused": refusal, "ledger": ledger.report()}


def _show_series(console: Console, name: str, rows: SeriesRows, series: Series) -> dict[str, Any]:
    """The last steps with their error bars, beside the truth; returns figures of all steps."""
    console.print(f"{name}: {about(name)['summary']}", style="bold")
    table = _table_beside_truth("month")
    shown = slice(-_STEPS, None)
    values, spread = series.values[shown, 0], 2 * series.stddev[shown, 0]
    low, high = (values - spread).min(), (values + spread).max()
    steps = zip((rows.times or [])[shown], values, spread, rows.block[shown, 0], strict=True)
    for month, value, width, truth in steps:
        bar = Bar(high - low, value - width - low, value + width - low, color="cyan")
        table.add_row(month[:7], f"{value:,.0f} ± {width:,.0f}", bar, f"{truth:,.0f}")
    console.print(table)
    error = np.abs(series.values - rows.block)
    figures = {
        "mechanism": name,
        "epsilon": _EPSILON,
        "window": _WINDOW,
        "mean_absolute_error": float(error.mean()),
        "mean_value": float(rows.block.mean()),
        "noise_stddev": float(series.stddev.mean()),
        "paid_steps": sum(series.paid),
        "within_two_stddev": float((error <= 2 * series.stddev).mean()),
    }
    console.print(
        f"mean absolute error {figures['mean_absolute_error']:.1f} of {figures['mean_value']:.0f}, "
        f"noise stddev {figures['noise_stddev']:.1f}, {figures['paid_steps']} of {len(series)} "
        f"steps paid, {figures['within_two_stddev']:.0%} of the truth within the band\n"
        + (HELD if any(series.held) else "")
    )
    return figures
