"""w-event mechanisms on generated streams of every shape: bursts, on/off, steps, ramps, seasons.

Every run has a stream of its own, the same for all mechanisms, and noise that is fixed by name. A
cell is judged by its mean relative error over the runs; beside it stands how many counts lie within
two of the published deviations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from benchmarks.harness import Findings, Progress, Row, target
from benchmarks.streams import SHAPES, shape
from dpstream.evaluate.trials import trials, w_event_mechanisms

OURS: Final = "pacer"
WORST: Final = 1.5
COVERED: Final = (0.90, 0.99)

_FIGURES: Final = {
    "mre": "relative",
    "mae": "absolute",
    "covered": "covered",
    "held": "held_covered",
    "paid": "paid",
}
_DARK = 4.0  # times the best, from which on a cell has the darkest colour


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    epsilons: Sequence[float]
    window: int
    steps: int
    runs: int


FULL: Final = Plan(epsilons=(0.1, 0.5, 0.9), window=120, steps=1_200, runs=20)
QUICK: Final = Plan(epsilons=(0.5,), window=40, steps=200, runs=1)


def measure(*, quick: bool, progress: Progress) -> Findings:
    """Every mechanism on every shape at every epsilon."""
    plan = QUICK if quick else FULL
    cells = [(name, epsilon) for name in SHAPES for epsilon in plan.epsilons]
    rows: list[Row] = []
    for done, (name, epsilon) in enumerate(cells):
        progress(done, len(cells), f"{name}, epsilon {epsilon}")
        rows += judge([cell(name, epsilon, each, plan) for each in w_event_mechanisms()])
    progress(len(cells), len(cells), "done")
    return Findings(
        rows=rows,
        targets=targets(rows),
        notes=["a short run: judge by a full one"] if quick else [],
        draw=lambda figure: draw(figure, rows),
    )


def cell(name: str, epsilon: float, mechanism: str, plan: Plan) -> Row:
    """The runs of one mechanism: mean figures, and the range of the relative error."""
    scores = []
    for run in range(plan.runs):
        what = f"{name}, epsilon {epsilon}, run {run}"
        block = shape(name, steps=plan.steps, run=run)
        found = trials(mechanism, block, epsilon=epsilon, window=plan.window, runs=1, fixed=what)
        if found.refusals:
            return {"shape": name, "epsilon": epsilon, "mechanism": mechanism, "refused": True}
        scores += found.scores
    row: Row = {"shape": name, "epsilon": epsilon, "window": plan.window, "mechanism": mechanism}
    for column, figure in _FIGURES.items():
        known = [
            float(np.mean(each)) for score in scores if (each := getattr(score, figure)) is not None
        ]
        row[column] = float(np.mean(known)) if known else None
    errors = [float(np.mean(score.relative)) for score in scores]
    return row | {"mre_least": min(errors), "mre_most": max(errors), "runs": plan.runs}


def judge(rows: Sequence[Row]) -> list[Row]:
    """Each row with its error over that of the best *other* mechanism.

    >>> judge([{"mechanism": "a", "mre": 3.0}, {"mechanism": "b", "mre": 2.0}])[0]["times_best"]
    1.5
    """
    judged = []
    for row in rows:
        others = [each for each in rows if each is not row and each.get("mre") is not None]
        best = min(others, key=lambda each: float(each["mre"]))
        over = row["mre"] / best["mre"] if row.get("mre") is not None else math.nan
        judged.append(row | {"times_best": over, "best_other": best["mechanism"]})
    return judged


def targets(rows: Sequence[Row]) -> list[Row]:
    """The default is near the best everywhere, and its deviation is honest."""
    ours = [row for row in rows if row["mechanism"] == OURS]
    worst = max(ours, key=lambda row: float(row["times_best"]))
    where = f"{worst['shape']}, epsilon {worst['epsilon']}"
    refused = [row for row in rows if row.get("refused")]
    covered = [row["covered"] for row in ours]
    outside = [not COVERED[0] <= share <= 1 for share in covered]
    return [
        target(
            f"{OURS}: worst error over the best other ({where})", worst["times_best"], "<=", WORST
        ),
        target(
            f"{OURS}: cells of {len(ours)} with less than 90% within two deviations",
            float(sum(outside)), "==", 0,
        ),
        target("runs that the ledger refused", float(len(refused)), "==", 0),
    ]  # fmt: skip


def draw(figure: Any, rows: Sequence[Row]) -> None:
    """A heat map per epsilon: the error over that of the best other mechanism."""
    epsilons = sorted({row["epsilon"] for row in rows})
    names = list(dict.fromkeys(row["mechanism"] for row in rows))
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure.set_size_inches(5.2 * len(epsilons) + 1.5, 6.5)
    panels = figure.subplots(1, len(epsilons), sharey=True, squeeze=False)[0]
    for panel, epsilon in zip(panels, epsilons, strict=True):
        grid = np.full((len(shapes), len(names)), np.nan)
        for row in rows:
            if row["epsilon"] == epsilon:
                at = shapes.index(row["shape"]), names.index(row["mechanism"])
                grid[at] = row["times_best"]
        panel.imshow(
            np.log(grid),
            cmap="RdYlBu_r",
            vmin=-math.log(_DARK),
            vmax=math.log(_DARK),
            aspect="auto",
        )
        for (i, j), value in np.ndenumerate(grid):
            text = "–" if math.isnan(value) else f"{value:.2f}" if value < 10 else f"{value:.0f}"
            panel.text(j, i, text, ha="center", va="center", fontsize=6)
        panel.set_xticks(range(len(names)), names, fontsize=7, rotation=50, ha="right")
        panel.set_yticks(range(len(shapes)), shapes, fontsize=8)
        panel.set_title(f"epsilon = {epsilon}", fontsize=9)
    figure.suptitle("Relative error over that of the best other mechanism")
