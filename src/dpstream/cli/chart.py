"""A small chart for the terminal: a published line, its error band, and a truth to compare."""

from __future__ import annotations

from rich.text import Text

from dpstream.records import Reals

BAND, TRUTH, UPPER, LOWER, EMPTY = "░", "•", "▀", "▄", " "
_STYLES = {BAND: "blue", TRUTH: "yellow", UPPER: "bold cyan", LOWER: "bold cyan"}
_LABEL_EVERY = 3


def draw(
    published: Reals,
    spread: Reals,
    truth: Reals,
    *,
    height: int = 12,
    first: str = "",
    last: str = "",
) -> Text:
    """One column a step; the band is `published` plus and minus `spread`."""
    low = float(min((published - spread).min(), truth.min()))
    high = float(max((published + spread).max(), truth.max()))
    size = (high - low) / height or 1.0
    cells = grid(published, spread, truth, low=low, size=size, height=height)
    labels = [f"{high - (row + 0.5) * size:,.0f}" for row in range(height)]
    margin = max(map(len, labels))
    text = Text()
    for row, line in enumerate(cells):
        label = labels[row] if row % _LABEL_EVERY == 0 else ""
        text.append(f"{label:>{margin}} │", style="dim")
        for cell in line:
            text.append(cell, style=_STYLES.get(cell, ""))
        text.append("\n")
    gap = max(len(published) - len(first) - len(last), 1)
    text.append(f"{'':>{margin}} └{'─' * len(published)}\n", style="dim")
    text.append(f"{'':>{margin}}  {first}{' ' * gap}{last}\n", style="dim")
    return text


def grid(
    published: Reals, spread: Reals, truth: Reals, *, low: float, size: float, height: int
) -> list[list[str]]:
    """Characters, top row first; the published line hides the truth, the truth the band.

    >>> import numpy as np
    >>> one = np.array([1.0, 3.0])
    >>> grid(one, np.array([0.0, 1.0]), one[::-1], low=0.0, size=1.0, height=4)
    [['•', '▄'], [' ', '░'], ['▄', '•'], [' ', ' ']]
    """
    cells = [[EMPTY] * len(published) for _ in range(height)]

    def row_of(value: float) -> int:
        return min(max(height - 1 - int((value - low) // size), 0), height - 1)

    for x, (value, width, real) in enumerate(zip(published, spread, truth, strict=True)):
        if width > 0:
            for row in range(row_of(value + width), row_of(value - width) + 1):
                cells[row][x] = BAND
        cells[row_of(real)][x] = TRUTH
        row = row_of(value)
        upper = (value - low) / size - (height - 1 - row) >= 0.5
        cells[row][x] = UPPER if upper else LOWER
    return cells
