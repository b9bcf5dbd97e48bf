"""`dpstream sources`: where rows come from and releases go, and what to install for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from dpstream.cli.output import AsJson, people, print_json
from dpstream.connectors.registry import SINKS, SOURCES

_FACTS = ("example", "about", "package", "installed", "extra")
_ANY = 10_000  # columns, to see how many are wanted


def sources(as_json: AsJson = False) -> None:
    """List sources and sinks, what is installed, and which extra to install."""
    connectors = {
        kind: [
            {"name": name} | {fact: getattr(connector, fact) for fact in _FACTS}
            for name, connector in known.items()
        ]
        for kind, known in (("sources", SOURCES), ("sinks", SINKS))
    }
    if as_json:
        print_json(connectors)
        return
    console = people()
    for heading, rows in connectors.items():
        console.print(heading, style="bold")
        _show(console, [_cells(row) for row in rows])
        console.print()


def _cells(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    there = "" if row["package"] is None else f"{row['package']} is installed"
    if not row["installed"]:
        there = f"pip install 'dpstream[{row['extra']}]'"
    return row["name"], row["example"], row["about"], there


def _show(console: Console, rows: Sequence[tuple[str, str, str, str]]) -> None:
    """A table; where it is too wide, one thing below the other: addresses are copied whole."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for cells in rows:
        table.add_row(*cells)
    wide = console.options.update(width=_ANY)
    if console.measure(table, options=wide).maximum <= console.width:
        console.print(table)
        return
    indent = max(len(name) for name, *_ in rows) + 1
    for name, *words in rows:
        for first, word in zip((name, "", ""), filter(None, words), strict=False):
            console.print(f"{first:{indent}}{word}", soft_wrap=True)
