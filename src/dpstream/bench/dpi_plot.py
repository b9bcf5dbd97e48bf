"""The plot of the DPI bench: errors over epsilon, budget that is left, errors over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpstream.bench.harness import Row


def draw(figure: Any, rows: Sequence[Row]) -> None:
    """Three panels on an empty figure."""
    figure.set_size_inches(14, 4)
    left, middle, right = figure.subplots(1, 3)
    _errors(left, [row for row in rows if row["part"] == "error" and row["stream"] == "zipf"])
    for form, line in _lines([row for row in rows if row["part"] == "budget"]).items():
        middle.plot(
            [row["slots"] for row in line], [row["left"] for row in line], marker="o", label=form
        )
    middle.set(xscale="log", xlabel="slots", ylabel="epsilon left", title="budget left of 1")
    middle.legend(fontsize=7)
    long = [row for row in rows if row["part"] == "long"]
    slots = [row["slots"] for row in long]
    right.plot(slots, [row["kl"] for row in long], marker="o", label="Algorithm 3")
    right.plot(slots, [row["uniform_kl"] for row in long], "--", label="uniform")
    right.set(yscale="log", xlabel="slots", ylabel="KL divergence", title="10,000 bins over time")
    right.legend(fontsize=7)


def _errors(axes: Any, rows: Sequence[Row]) -> None:
    for form, line in _lines(rows).items():
        style = "--" if "refused" not in line[0] else "-"
        axes.plot([r["epsilon"] for r in line], [r["kl"] for r in line], style, label=form)
    axes.set(
        xscale="log", yscale="log", xlabel="epsilon", ylabel="KL divergence", title="zipf, 100 bins"
    )
    axes.legend(fontsize=7)


def _lines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["form"], []).append(row)
    return found
