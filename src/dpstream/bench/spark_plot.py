"""Records per second of both, one pair of bars per case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpstream.bench.harness import Row

_LOOKS = {
    "dpstream": ("#0b6e99", "dpstream"),
    "dpstream, its own reader": ("#7fb6cc", "dpstream, its own reader"),
    "spark": ("#c98a1b", "plain group-by (no privacy)"),
}
_WIDTH = 0.27


def draw(figure: Any, rows: Sequence[Row]) -> None:
    """Bars side by side."""
    panel = figure.subplots()
    cases: dict[tuple[int, int, int], dict[str, float]] = {}
    for row in rows:
        if "records_per_second" in row:
            case = (row["executors"], row["keys"], row["batches"])
            cases.setdefault(case, {})[row["library"]] = row["records_per_second"]
    for number, (library, (colour, label)) in enumerate(_LOOKS.items()):
        places = [place + _WIDTH * number for place in range(len(cases))]
        heights = [speeds.get(library, 0.0) for speeds in cases.values()]
        panel.bar(places, heights, width=0.9 * _WIDTH, color=colour, label=label)
    names = [
        f"{executors} executor{'s' * (executors > 1)}\n{keys:,} keys\n{batches} micro-batches"
        for executors, keys, batches in cases
    ]
    panel.set(ylabel="records per second", xticks=[n + _WIDTH for n in range(len(cases))])
    panel.set_xticklabels(names)
    panel.grid(alpha=0.25, axis="y")
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
