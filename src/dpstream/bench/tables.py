"""Results as tables for the terminal, and the one way to write a figure for people."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dpstream.bench.harness import BENCHES, Result, Row

MARKS = {True: ("reached", "green"), False: ("missed", "red"), None: ("not measured", "yellow")}


def table(result: Result) -> RenderableType:
    """The rows, the targets and the notes of a result, for `rich` to print."""
    name = result["bench"]
    about = BENCHES.get(name, "")
    rows = Table(title=f"bench {name}: {about}" if about else f"bench {name}", title_justify="left")
    keys = columns(result["rows"])
    for key in keys:
        rows.add_column(heading(key), justify="right" if _numeric(result["rows"], key) else "left")
    for row in result["rows"]:
        rows.add_row(*(Text(cell(row.get(key))) for key in keys))

    targets = Table(title="targets", title_justify="left")
    for title in ("target", "measured", "bound", "verdict"):
        targets.add_column(title, justify="right" if title in ("measured", "bound") else "left")
    for one in result["targets"]:
        word, colour = MARKS[one["reached"]]
        verdict = f"{word}: {one['reason']}" if one.get("reason") else word
        bound = f"{one['op']} {cell(one['bound'])}"
        targets.add_row(Text(one["name"]), cell(one["value"]), bound, Text(verdict, style=colour))
    return Group(rows, targets, *(Text(f"note: {note}") for note in result.get("notes", ())))


def columns(rows: list[Row]) -> list[str]:
    """The keys of all rows, in the order met; those that are empty everywhere are left out."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return [key for key in keys if any(row.get(key) not in (None, "") for row in rows)]


def heading(key: str) -> str:
    """A key as people read it.

    >>> heading("samples_per_second")
    'samples/s'
    """
    return re.sub(r" per second$", "/s", key.replace("_", " "))


def cell(value: Any) -> str:
    """A value as people read it.

    >>> cell(1234567), cell(0.001234567), cell(123.456), cell(None), cell(True)
    ('1,234,567', '0.00123', '123', '–', 'yes')
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def _numeric(rows: list[Row], key: str) -> bool:
    return all(isinstance(row.get(key), int | float | None) for row in rows)
