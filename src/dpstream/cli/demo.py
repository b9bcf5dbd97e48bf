"""`dpstream demo`: a guided tour. A live query that survives a kill, a series, the ledger."""

from __future__ import annotations

from contextlib import closing, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console

from dpstream.cli import demo_screen, demo_series
from dpstream.cli.books import dated, print_books
from dpstream.cli.demo_live import QUICK, Found, Tour, play
from dpstream.cli.demo_served import ServedEngine, refuse_without_server
from dpstream.cli.output import people, print_json
from dpstream.errors import DpstreamError
from dpstream.privacy.ledger import Ledger

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

SERIES = "2. A series: one row a step, no users, a promise for any {window} successive steps.\n"

NEXT = """\
Next:
  dpstream init && dpstream run pipeline.toml   your own pipeline, from an example that runs
  dpstream sql "SELECT ..." --source t=log.csv  one query over your own rows
  dpstream release your.csv --window 12 --epsilon 1 --state state --ledger book
                                                your own series, and be able to repeat it
  dpstream mechanisms                           what else there is, and what it promises
  dpstream audit                                attack it yourself
"""


def demo(
    quick: Annotated[bool, typer.Option("--quick", help="A tour of a few seconds.")] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Open a live page of the releases in the browser.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Take a tour: a live private query that survives a kill, a series, and the ledger."""
    if serve:
        refuse_without_server()
    tour = QUICK if quick else Tour()
    console = people()
    if not as_json:
        _say(console, WELCOME.format(rate=tour.rows_per_second))
        if serve:
            _say(console, "The page stays until you press Enter.\n")
    with TemporaryDirectory(prefix="dpstream-demo-") as folder:
        quiet: Any = nullcontext(lambda scene: None)
        with quiet if as_json else demo_screen.watching(console) as show:
            engine = ServedEngine(Path(folder)) if serve else None
            live = play(tour, Path(folder), show, engine=engine)
        with closing(Ledger(live.ledger)) as ledger:
            books = dated(ledger)
    series = demo_series.publish()
    if as_json:
        print_json(demo_series.as_json(series) | {"live": _live_json(live), "live_ledger": books})
    else:
        _show_live(console, live, books)
        _say(console, SERIES.format(window=demo_series.WINDOW))
        demo_series.show(console, series)
        _say(console, NEXT)
    if not live.identical:
        raise DpstreamError("releases differ after the restart: please report it")


def _show_live(console: Console, live: Found, books: list[dict[str, Any]]) -> None:
    console.print()
    console.print(demo_screen.summary(live))
    _say(console, "\n" + TRUTH)
    if live.late:
        _say(console, f"{live.late:,} clicks came too late for the last release: a slow machine.\n")
    _say(console, f"What ran, twice:\n\n$ {live.command}\n\n{live.query}")
    first, last = live.repeated[0], live.repeated[-1]
    _say(
        console,
        f"The kill came after release {live.killed_after}. Started again, the engine computed "
        f"releases {first} to {last} once more from its state: "
        + ("the same bytes, every one. " if live.identical else "and they DIFFER. ")
        + "Other noise over the same clicks could be averaged away, and would have to be paid "
        "again.\n",
    )
    _say(console, "The ledger: charged once, before the first noise; the restart cost nothing.\n")
    print_books(console, books)


def _live_json(live: Found) -> dict[str, Any]:
    names = ["page", "visitors", "visitors_stddev"]
    return {
        "query": live.query,
        "rows": live.rows,
        "users": live.users,
        "killed_after": live.killed_after,
        "exit_code": live.exit_code,
        "repeated": live.repeated,
        "identical": live.identical,
        "late": live.late,
        "last_release": live.last.select(names).to_pylist(),
        "truth": live.truth,
    }


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True)
