"""The explanation of a query: facts by topic, and its plan as a drawing.

In a drawing what stays exact stands above the line, and what is noisy below it.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_LINE = "above: exact, never leaves; below: noisy, may be published"
_WIDTH, _HEIGHT, _GAP = 460, 18, 26  # pixels: a box, a line of text in it, the way to the next


@dataclass(frozen=True)
class Stage:
    """One part of a plan; `noisy`: it sees what is protected already."""

    stage: str
    does: str
    noisy: bool = False


def as_text(stages: Sequence[Stage]) -> list[str]:
    """From top to bottom, for a terminal.

    >>> plan = [Stage("count", "rows"), Stage("perturb", "add noise", noisy=True)]
    >>> print(*as_text(plan), sep="\\n")
      count    rows
      ───┼──── above: exact, never leaves; below: noisy, may be published
      perturb  add noise
         ▼
    """
    wide = max(len(each.stage) for each in stages) + 2
    lines: list[str] = []
    for number, each in enumerate(stages):
        if number:
            crossing = each.noisy and not stages[number - 1].noisy
            lines.append(f"  ───┼{'─' * (wide - 5)} {_LINE}" if crossing else "     │")
        lines.append(f"  {each.stage:<{wide}}{each.does}")
    return [*lines, "     ▼"]


def as_mermaid(stages: Sequence[Stage]) -> str:
    """A flow chart in Mermaid's words."""
    lines = ["flowchart TD"]
    for side, title in ((False, "exact"), (True, "noisy")):
        lines.append(f"  subgraph {title}")
        for number, each in enumerate(stages):
            if each.noisy == side:
                text = each.does.replace('"', "#quot;")
                lines.append(f'    s{number}["{each.stage}: {text}"]')
        lines.append("  end")
    lines += [f"  s{number} --> s{number + 1}" for number in range(len(stages) - 1)]
    return "\n".join(lines)


def as_svg(stages: Sequence[Stage]) -> str:
    """Boxes and arrows, for a notebook; the noisy ones are filled."""
    parts, y = [], 4
    for number, each in enumerate(stages):
        rows = textwrap.wrap(f"{each.stage}: {each.does}", 62) or [each.stage]
        height = _HEIGHT * len(rows) + 10
        if number:
            parts.append(
                f'<path d="M {_WIDTH // 2} {y - _GAP} V {y - 5} m -4 -5 l 4 5 l 4 -5" '
                'fill="none" stroke="#555"/>'
            )
        fill = "#dbe9f6" if each.noisy else "#ffffff"
        parts.append(
            f'<rect x="2" y="{y}" width="{_WIDTH - 4}" height="{height}" rx="5" fill="{fill}" '
            'stroke="#555"/>'
        )
        for line, text in enumerate(rows):
            parts.append(
                f'<text x="10" y="{y + _HEIGHT * (line + 1)}">'
                f"{html.escape(text, quote=False)}</text>"
            )
        y += height + _GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y - _GAP + 6}" '
        f'font-family="monospace" font-size="12" fill="#222">{"".join(parts)}</svg>'
    )


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Facts by topic; `text` draws them, `to_json` hands them on, a notebook shows both."""

    stages: list[Stage]
    unit: str
    bounds: dict[str, int]
    schedule: dict[str, Any]
    budget: dict[str, Any]
    measures: list[dict[str, Any]]
    columns: list[dict[str, Any]]
    keys: dict[str, Any]
    memory: dict[str, Any]
    schema: list[dict[str, str]]
    """Name and type of every column of every release, and what fixes a type that may differ."""
    not_protected: list[str]

    def to_json(self) -> dict[str, Any]:
        """Plain values, for scripts; `drawing` is a Mermaid flow chart."""
        return asdict(self) | {"drawing": as_mermaid(self.stages)}

    def text(self) -> str:
        """For people."""
        lines = ["PLAN", *as_text(self.stages)]
        lines += ["", "WHAT IS PROTECTED", f"  {self.unit}"]
        pure = self.budget.get("delta") == 0
        norm = "L1" if pure else "L2"
        lines += ["", f"SENSITIVITY (the most that one unit changes, over all its groups; {norm})"]
        lines += [f"  {each['measure']}: {each['derivation']}" for each in self.measures]
        lines += ["", "NOISE (standard deviation of what is published)"]
        lines += [f"  {each['column']}: {noise_in_words(each)}" for each in self.columns]
        lines += ["", "SCHEMA (the columns of every release, fixed before the first one)"]
        lines += [f"  {each['name']}: {each['type']}{each['note']}" for each in self.schema]
        lines += ["", "KEYS", f"  {self.keys['words']}"]
        lines += ["", "BUDGET", f"  {self.budget['words']}"]
        shares = [each for each in self.measures if each["share"]]
        lines += [
            f"  {each['measure']}: {each['share']} of {'epsilon' if pure else 'mu^2'}"
            for each in shares
        ]
        lines += ["", "MEMORY", f"  {self.memory['words']}"]
        lines += ["", "WHAT IS NOT PROTECTED", *(f"  - {each}" for each in self.not_protected)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        """The drawn plan, and the rest as text."""
        rest = self.text().partition("\n\n")[2]
        return f"{as_svg(self.stages)}<pre>{html.escape(rest, quote=False)}</pre>"


def noise_in_words(column: Mapping[str, Any]) -> str:
    """The noise of one of the published columns."""
    if column["first"] is None:
        return str(column["note"])
    ends = f"{column['first']:.4g} at the first release of a window, {column['last']:.4g} at the"
    most = column.get("most", 0.0)
    between = f", {most:.4g} at most" if most > 1.01 * max(column["first"], column["last"]) else ""
    return f"{ends} last{between}{column['note']}"
