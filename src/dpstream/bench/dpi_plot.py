"""The plot of the DPI bench: errors over epsilon and time, budget left, a long run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpstream.bench.harness import Row


def draw(figure: Any, rows: Sequence[Row]) -> None:
    """Four panels on an empty figure."""
    figure.set_size_inches(18, 4)
    left, drifting, middle, right = figure.subplots(1, 4)
    _errors(left, [row for row in rows if row["part"] == "error" and row["stream"] == "zipf"])
    moving = [row for row in rows if row["part"] == "time" and row["stream"] == "moving bump"]
    _over_slots(drifting, moving, "kl")
    drifting.set(yscale="log", ylabel="KL divergence", title="moving bump, epsilon 2")
    _over_slots(middle, [row for row in rows if row["part"] == "budget"], "left")
    middle.set(xscale="log", ylabel="epsilon left", title="budget left of 1")
    long = [row for row in rows if row["part"] == "long"]
    _over_slots(right, long, "kl")
    right.plot(
        [row["slots"] for row in long], [row["uniform_kl"] for row in long], "--", label="uniform"
    )
    right.set(yscale="log", ylabel="KL divergence", title="a large domain over time")
    right.legend(fontsize=7)


def _over_slots(axes: Any, rows: Sequence[Row], column: str) -> None:
    for form, line in _lines(rows).items():
        slots = [row["slots"] for row in line]
        axes.plot(slots, [row[column] for row in line], marker=".", label=form)
    axes.set_xlabel("slots")
    axes.legend(fontsize=7)


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
