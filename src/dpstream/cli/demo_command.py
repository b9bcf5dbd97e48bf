"""`dpstream demo`: a guided tour. A live query that survives a kill, a series, the ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from fractions import Fraction
from importlib.resources import as_file, files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import typer
from rich.bar import Bar
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dpstream.cli.demo_live import QUICK, Engine, Scene, Tour, play
from dpstream.cli.ledger_command import books_with_dates, print_books
from dpstream.cli.mechanisms_command import about
from dpstream.cli.output import AsJson, people, print_json
from dpstream.cli.series_files import SeriesRows, read_series
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
_LINE_EVERY = 4  # releases between two lines in a pipe
_BAR = 28  # characters
_STEPS = 12  # of a series that are shown
_SERIES = "unemployment_lnu03000018.csv"
_EPSILON, _WINDOW = 1, 12


def demo(
    quick: Annotated[bool, typer.Option("--quick", help="A tour of a few seconds.")] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Open a live page of the releases in the browser.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Take a tour: a live private query that survives a kill, a series, and the ledger."""
    for module in ("starlette", "uvicorn") if serve else ():
        optional(module, extra="serve", who="demo --serve shows a live page, which")
    tour = QUICK if quick else Tour()
    console = people()
    console.soft_wrap = True
    if not as_json:
        console.print(WELCOME.format(rate=tour.rows_per_second))
        if serve:
            console.print("The page stays until you press Enter.\n")
    with TemporaryDirectory(prefix="dpstream-demo-") as name:
        folder = Path(name)
        engine = Engine(folder, serve=serve)
        with nullcontext(lambda scene: None) if as_json else scenes_on(console) as show:
            live = play(tour, folder, show, engine=engine)
        with closing(Ledger(folder / "book")) as ledger:
            books = books_with_dates(ledger)
    rows, series, refusal, shared = _publish_series()
    figures = [_figures(name, rows, one) for name, one in series.items()]
    if as_json:
        facts = {"series": _SERIES, "columns": rows.names, "steps": len(rows.block)}
        facts |= {"releases": figures, "refused": refusal, "ledger": shared}
        print_json(facts | {"live": live, "live_ledger": books})
    else:
        _show_live(console, live, engine.command)
        print_books(console, books)
        times = [time[:7] for time in rows.times or []]
        console.print(
            INTRO.format(window=_WINDOW, epsilon=_EPSILON, first=times[0], last=times[-1])
        )
        for facts, one in zip(figures, series.values(), strict=True):
            _show_series(console, facts, rows, one)
        console.print("The ledger, a book of epsilon = 2 that both releases share:\n")
        print_books(console, shared)
        console.print(f"A third release is refused: {refusal.partition(';')[0]}.\n")
        console.print(NEXT)
    if not live["identical"]:
        raise DpstreamError("releases differ after the restart: please report it")


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
    table.add_column("", width=_BAR)
    table.add_column("truth (demo only)", justify="right", style="dim")
    return table


def _value(row: dict[str, Any]) -> str:
    return f"{row['visitors']:,.0f} ± {2 * row['visitors_stddev']:,.0f}"


def _show_live(console: Console, live: dict[str, Any], command: str) -> None:
    console.print()
    console.print(_pages(live["last_release"], live["truth"]))
    console.print("\n" + TRUTH)
    if live["late"]:
        console.print(
            f"{live['late']:,} clicks came too late for the last release: a slow machine.\n"
        )
    console.print(f"What ran, twice:\n\n$ {command}\n\n{live['query']}")
    first, last = live["repeated"][0], live["repeated"][-1]
    console.print(
        f"The kill came after release {live['killed_after']}. Started again, the engine computed "
        f"releases {first} to {last} once more from its state: "
        + ("the same bytes, every one. " if live["identical"] else "and they DIFFER. ")
        + "Other noise over the same clicks could be averaged away, and would have to be paid "
        "again.\n"
    )
    console.print("The ledger: charged once, before the first noise; the restart cost nothing.\n")


def _publish_series() -> tuple[SeriesRows, dict[str, Series], str, list[dict[str, Any]]]:
    """Two releases of a bundled series that share a book, and one that does not fit into it."""
    with as_file(files("dpstream") / "data" / _SERIES) as path:
        rows = read_series(path)
    ledger, dataset = Ledger(), "unemployment"
    ledger.open(dataset, Terms(unit="w_event", total=Fraction(2 * _EPSILON), window=_WINDOW))

    def publish(name: str) -> Series:
        mechanism: Any = find(name)
        mechanism = mechanism(epsilon=_EPSILON, window=_WINDOW)
        return release(mechanism, rows.block, ledger=ledger, dataset=dataset, name=name)

    series = {name: publish(name) for name in ("uniform", "sample")}
    try:
        publish("uniform")
    except BudgetExceeded as refusal:
        return rows, series, str(refusal), ledger.report()
    raise AssertionError("the ledger accepted more than its book allows")


def _figures(name: str, rows: SeriesRows, series: Series) -> dict[str, Any]:
    error = np.abs(series.values - rows.block)
    return {
        "mechanism": name,
        "epsilon": _EPSILON,
        "window": _WINDOW,
        "mean_absolute_error": float(error.mean()),
        "mean_value": float(rows.block.mean()),
        "noise_stddev": float(series.stddev.mean()),
        "paid_steps": sum(series.paid),
        "within_two_stddev": float((error <= 2 * series.stddev).mean()),
    }


def _show_series(
    console: Console, figures: dict[str, Any], rows: SeriesRows, series: Series
) -> None:
    """The last steps with their error bars, beside the truth."""
    name, shown = figures["mechanism"], slice(-_STEPS, None)
    console.print(f"{name}: {about(name)['summary']}", style="bold")
    table = _table_beside_truth("month")
    values, spread = series.values[shown, 0], 2 * series.stddev[shown, 0]
    low, high = (values - spread).min(), (values + spread).max()
    steps = zip((rows.times or [])[shown], values, spread, rows.block[shown, 0], strict=True)
    for time, value, width, truth in steps:
        bar = Bar(high - low, value - width - low, value + width - low, color="cyan")
        table.add_row(time[:7], f"{value:,.0f} ± {width:,.0f}", bar, f"{truth:,.0f}")
    console.print(table)
    console.print(
        f"mean absolute error {figures['mean_absolute_error']:.1f} of {figures['mean_value']:.0f}, "
        f"noise stddev {figures['noise_stddev']:.1f}, {figures['paid_steps']} of {len(series)} "
        f"steps paid, {figures['within_two_stddev']:.0%} of the truth within the band\n"
        + (HELD if any(series.held) else "")
    )
