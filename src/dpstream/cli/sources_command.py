"""`dpstream sources`: where rows come from and releases go, and what to install for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from dpstream.cli.output import AsJson, people, print_json, print_whole
from dpstream.connectors.registry import SINKS, SOURCES

_FACTS = ("example", "about", "promise", "upsert", "package", "installed", "extra")


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
        table = Table(box=None, show_header=False, pad_edge=False)
        for row in rows:
            about = f"{row['about']}; upserts" if row["upsert"] else row["about"]
            table.add_row(row["name"], row["example"], about, row["promise"], _package_words(row))
        print_whole(console, table)  # addresses are copied whole
        console.print()


def _package_words(row: Mapping[str, Any]) -> str:
    if not row["installed"]:
        return f"pip install 'dpstream[{row['extra']}]'"
    return "" if row["package"] is None else f"{row['package']} is installed"
