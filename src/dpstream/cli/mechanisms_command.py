"""`dpstream mechanisms`: what can be chosen, and what each one promises."""

from __future__ import annotations

import inspect
import re
from typing import Annotated, Any

from rich.table import Table
from typer import Argument

from dpstream.cli.command_options import describe_parameters
from dpstream.cli.output import AsJson, people, print_json
from dpstream.mechanisms import REGISTRY, find

_SECTIONS = ("Guarantee", "Unit", "Delay", "Paper")


def mechanisms(
    names: Annotated[list[str] | None, Argument(metavar="NAME", help="Only these.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the mechanisms with their guarantee, protected unit and delay."""
    entries = [about(name) for name in names or sorted(REGISTRY)]
    if as_json:
        print_json(entries)
        return
    console = people()
    for entry in entries:
        table = Table(box=None, show_header=False, pad_edge=False)
        for key in ("summary", "guarantee", "unit", "delay", "parameters"):
            value = entry[key]
            table.add_row(key, value if isinstance(value, str) else parameter_line(value))
        console.print(entry["name"], style="bold")
        console.print(table)
        console.print()


def about(name: str) -> dict[str, Any]:
    """A mechanism's docstring and parameters as data."""
    cls = find(name)
    text = inspect.getdoc(cls) or ""
    sections = {}
    for section in _SECTIONS:  # from `Name:` to the next line that is not indented
        written = re.search(rf"^{section}:(.*(?:\n .*)*)", text, re.MULTILINE)
        sections[section.lower()] = " ".join(written[1].split()) if written else ""
    summary = text.partition("\n")[0]
    return {"name": name, "summary": summary, **sections, "parameters": describe_parameters(cls)}


def parameter_line(parameters: list[dict[str, Any]]) -> str:
    """Names, with the default of those that have one."""
    shown = (p["name"] if p["required"] else f"{p['name']}={p['default']}" for p in parameters)
    return ", ".join(shown)


def complete_mechanism(incomplete: str) -> list[str]:
    """Names for shell completion."""
    return [name for name in sorted(REGISTRY) if name.startswith(incomplete)]
