"""`dpstream bench`: measure, print a table, write JSON and plots."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dpstream.cli.output import note, people, print_json
from dpstream.errors import InvalidParameter


def complete_bench(incomplete: str) -> list[str]:
    """Names for shell completion."""
    return [name for name in ("all", *_benches().BENCHES) if name.startswith(incomplete)]


def bench(
    name: Annotated[
        str, typer.Argument(autocompletion=complete_bench, help="A bench, or all of them.")
    ] = "all",
    quick: Annotated[bool, typer.Option("--quick", help="A short run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for JSON and plots.")] = Path("bench-results"),
) -> None:
    """Measure dpstream, against its peers where they are installed."""
    benches = _benches()
    if name != "all" and name not in benches.BENCHES:
        known = "; ".join(f"{key}: {line}" for key, line in benches.BENCHES.items())
        raise InvalidParameter(f"there is no bench {name!r}; choose all, or one of: {known}")
    wanted = list(benches.BENCHES) if name == "all" else [name]
    found: list[dict[str, Any]] = []
    for each in wanted:
        note(f"bench {each}: {benches.BENCHES[each]}")
        found.append(benches.run(each, quick=quick, out=out))
        if not as_json:
            print_result(people(), found[-1])
    if as_json:
        print_json({"benches": found} if name == "all" else found[0])


def print_result(console: Console, result: dict[str, Any]) -> None:
    """The rows and the targets of one bench."""
    rows = result.get("rows", [])
    if rows:
        table = Table(title=str(result.get("bench", "")), pad_edge=False)
        titles = list(dict.fromkeys(key for row in rows for key in row))
        for title in titles:
            numeric = any(_is_number(row.get(title)) for row in rows)
            table.add_column(title, justify="right" if numeric else "left")
        for row in rows:
            table.add_row(*(_shown(row.get(title)) for title in titles))
        console.print(table)
    for target in result.get("targets", []):
        verdict = "reached" if target["reached"] else "NOT reached"
        console.print(
            f"{target['name']}: {_shown(target['value'])} {target['op']} "
            f"{_shown(target['bound'])}: {verdict}",
        )


def _benches() -> ModuleType:
    return import_module("dpstream.bench")  # needed by this command alone


def _shown(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
