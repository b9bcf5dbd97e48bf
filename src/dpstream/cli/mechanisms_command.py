"""`dpstream mechanisms`: what can be chosen, and what each one promises."""

from __future__ import annotations

import inspect
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
    sections = {section.lower(): _section(text, section) for section in _SECTIONS}
    summary = text.partition("\n")[0]
    return {"name": name, "summary": summary, **sections, "parameters": describe_parameters(cls)}


def parameter_line(parameters: list[dict[str, Any]]) -> str:
    """Names, with the default of those that have one."""
    shown = (p["name"] if p["required"] else f"{p['name']}={p['default']}" for p in parameters)
    return ", ".join(shown)


def complete_mechanism(incomplete: str) -> list[str]:
    """Names for shell completion."""
    return [name for name in sorted(REGISTRY) if name.startswith(incomplete)]


def _section(text: str, name: str) -> str:
    """What follows `Name:` up to the next section or blank line, as one line."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(f"{name}:"):
            lines = [line.partition(":")[2].strip()]
        elif lines and not line.startswith(" "):
            break
        elif lines:
            lines.append(line.strip())
    return " ".join(lines)
