"""A plan as a drawing: what stays exact stands above the line, what is noisy below it."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

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
