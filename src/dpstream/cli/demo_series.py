"""The tour's second part: a bundled series through two mechanisms, and a book that says no."""

from __future__ import annotations

from fractions import Fraction
from importlib.resources import as_file, files
from typing import Any

import numpy as np
from rich.console import Console

from dpstream.cli import chart, tables
from dpstream.cli.books import print_books
from dpstream.cli.mechanisms import about
from dpstream.errors import BudgetExceeded
from dpstream.mechanisms import find
from dpstream.mechanisms.release import release
from dpstream.mechanisms.series import Series
from dpstream.privacy.charges import Terms
from dpstream.privacy.ledger import Ledger

SERIES = "unemployment_lnu03000018.csv"
DATASET = "unemployment"
WINDOW = 12
EPSILON = 1

INTRO = """\
Monthly unemployment in the US (16 to 19 years, Black or African American), {first} to {last}.
Source: US Bureau of Labor Statistics, series LNU03000018. Public figures stand in for a secret.
The series counts thousands of persons, so here one protected event is one thousand persons in one
month. (A service that counts persons protects one person.) Each release below promises: a change
of one event a month, in any {window} successive months, stays hidden within epsilon = {epsilon}.
"""

HELD = """\
(A held value repeats an old step: the band knows its noise, not how far the stream has moved.)
"""


def publish() -> dict[str, Any]:
    """Two releases that share a book, and one that does not fit into it."""
    with as_file(files("dpstream") / "data" / SERIES) as path:
        rows = tables.read(path)
    ledger = Ledger()
    ledger.open(DATASET, Terms(unit="w_event", total=Fraction(2 * EPSILON), window=WINDOW))
    published = {name: _publish(name, rows, ledger) for name in ("uniform", "sample")}
    refusal = _refused(rows, ledger)
    return {"rows": rows, "published": published, "refused": refusal, "ledger": ledger.report()}


def as_json(found: dict[str, Any]) -> dict[str, Any]:
    """What scripts read."""
    rows, published = found["rows"], found["published"]
    return {
        "series": SERIES,
        "columns": rows.names,
        "steps": len(rows.block),
        "releases": [_figures(name, rows, series) for name, series in published.items()],
        "refused": found["refused"],
        "ledger": found["ledger"],
    }


def show(console: Console, found: dict[str, Any]) -> None:
    """Charts with their error bands, the shared book, and the refusal."""
    rows = found["rows"]
    first, last = rows.times[0][:7], rows.times[-1][:7]
    _say(console, INTRO.format(first=first, last=last, window=WINDOW, epsilon=EPSILON))
    for name, series in found["published"].items():
        _show_release(console, rows, series, _figures(name, rows, series))
    _say(console, "The ledger, a book of epsilon = 2 that both releases share:\n")
    print_books(console, found["ledger"])
    _say(console, f"A third release is refused: {found['refused'].partition(';')[0]}.\n")


def _publish(name: str, rows: tables.Rows, ledger: Ledger) -> Series:
    build: Any = find(name)
    mechanism = build(epsilon=EPSILON, window=WINDOW)
    return release(mechanism, rows.block, ledger=ledger, dataset=DATASET, query=name)


def _refused(rows: tables.Rows, ledger: Ledger) -> str:
    """What the ledger says to a release that does not fit."""
    try:
        _publish("uniform", rows, ledger)
    except BudgetExceeded as refusal:
        return str(refusal)
    raise AssertionError("the ledger accepted more than its book allows")


def _figures(name: str, rows: tables.Rows, series: Series) -> dict[str, Any]:
    error = np.abs(series.values - rows.block)
    return {
        "mechanism": name,
        "epsilon": EPSILON,
        "window": WINDOW,
        "mean_absolute_error": float(error.mean()),
        "mean_value": float(rows.block.mean()),
        "noise_stddev": float(series.stddev.mean()),
        "paid_steps": sum(series.paid),
        "within_two_stddev": float((error <= 2 * series.stddev).mean()),
    }


def _show_release(
    console: Console, rows: tables.Rows, series: Series, figures: dict[str, Any]
) -> None:
    shown = slice(-max(min(console.width - 8, 96), 24), None)
    times = (rows.times or [])[shown]
    name = figures["mechanism"]
    console.print(f"{name}: {about(name)['summary']}", style="bold")
    picture = chart.draw(
        series.values[shown, 0],
        2 * series.stddev[shown, 0],
        rows.block[shown, 0],
        first=times[0][:7],
        last=times[-1][:7],
    )
    console.print(picture, end="")
    _say(
        console,
        "▀▄ published   ░ ± 2 stddev of the noise   • truth (shown in this demo only)\n"
        f"mean absolute error {figures['mean_absolute_error']:.1f} of {figures['mean_value']:.0f}, "
        f"noise stddev {figures['noise_stddev']:.1f}, {figures['paid_steps']} of {len(series)} "
        f"steps paid, {figures['within_two_stddev']:.0%} of the truth within the band\n"
        + (HELD if any(series.held) else ""),
    )


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True)
