"""`dpstream sources`: where rows come from and releases go, and what to install for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.table import Table

from dpstream.cli.output import people, print_json
from dpstream.connectors.registry import PATHS, SINKS, SOURCES, Connector


def sources(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List sources and sinks, what is installed, and which extra to install."""
    found = {
        "sources": _rows({**PATHS["source"], **SOURCES}),
        "sinks": _rows({**PATHS["sink"], **SINKS}),
    }
    if as_json:
        print_json(found)
        return
    console = people()
    for heading, rows in found.items():
        table = Table(box=None, show_header=False, pad_edge=False)
        for row in rows:
            there = "" if row["package"] is None else f"{row['package']} is installed"
            if not row["installed"]:
                there = f"pip install 'dpstream[{row['extra']}]'"
            table.add_row(row["name"], row["example"], row["about"], there)
        console.print(heading, style="bold")
        console.print(table)
        console.print()


def _rows(known: Mapping[str, Connector]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "example": one.example,
            "about": one.about,
            "package": one.package,
            "installed": one.installed,
            "extra": one.extra,
        }
        for name, one in known.items()
    ]
