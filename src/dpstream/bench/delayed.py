"""Mechanisms with a delay on four series: absolute error beside the published forms, and speed.

Noise is fixed by name, so a run gives the same errors again; times differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from dpstream.bench import delayed_figures
from dpstream.bench.delayed_figures import Plan, cells, measured, row
from dpstream.bench.delayed_methods import SOUND, method, truncated
from dpstream.bench.delayed_plot import draw
from dpstream.bench.delayed_streams import Series, series
from dpstream.bench.delayed_targets import summaries, table_three, targets
from dpstream.bench.delayed_trials import Errors, seconds_per_step
from dpstream.bench.harness import Findings, Progress, Row

_DELAY: Final = 100
_WARM: Final = 1_000
_TRUNCATED: Final = "contin_group pp, truncated"


def measure(*, quick: bool, progress: Progress) -> Findings:
    """Every cell of every figure, then the speed of every mechanism."""
    plan = delayed_figures.QUICK if quick else delayed_figures.FULL
    found = series(steps=plan.steps)
    todo = list(cells(plan, found))
    # A long series counts for as much as its steps do.
    weights = np.cumsum([0, *(len(cell.series.values) for cell in todo)])
    names = (*SOUND, _TRUNCATED)
    total = int(weights[-1]) + len(names) * plan.timed
    rows: list[Row] = []
    known: dict[str, Errors] = {}  # several figures have the same cell
    for done, cell in zip(weights, todo, strict=False):
        progress(int(done), total, cell.title())
        if cell.title() not in known:
            known[cell.title()] = measured(cell, plan)
        rows.append(row(cell, known[cell.title()]))
    speeds = []
    for number, name in enumerate(names):
        progress(int(weights[-1]) + number * plan.timed, total, f"steps/s of {name}")
        speeds.append(speed(name, plan.timed))
    progress(total, total, "done")
    return Findings(
        rows=[*rows, *table_three(rows), *speeds],
        targets=targets(rows, speeds, timed=plan.timed),
        notes=[*_notes(plan, found), *summaries(rows)],
        draw=lambda figure: draw(figure, rows),
    )


def speed(name: str, steps: int) -> Row:
    """Steps per second of one bin on one core: input digest, ledger, exact noise, release."""
    rng = np.random.default_rng(1)
    values = np.clip(500 + np.cumsum(rng.integers(-9, 10, _WARM + steps)), 0, 1_000)
    walk = Series(name="random walk", source="generated", values=values, lo=0, hi=1_000, bucket=100)
    at: dict[str, Any] = {"epsilon": 1.0, "delay": _DELAY}
    if name == _TRUNCATED:
        one = truncated("contin_group pp", walk, **at)
    else:
        one = method(name, walk, **at)
    seconds = seconds_per_step(one.mechanism, values.astype(np.float64), warm=_WARM)
    return {
        "figure": "speed",
        "series": f"{walk.name}, {steps:,} steps",
        "epsilon": 1.0,
        "delay": _DELAY,
        "mechanism": name,
        "seconds": seconds * steps,
        "steps_per_second": 1 / seconds,
    }


def _notes(plan: Plan, found: Sequence[Series]) -> list[str]:
    notes = []
    if plan.steps is not None:
        notes.append(f"a short run: {plan.steps} steps, {plan.runs} runs each; judge by a full one")
    if made := [one.name for one in found if one.source == "generated"]:
        notes.append(f"generated, because DPSTREAM_DATA does not have them: {', '.join(made)}")
    notes.append(
        "ranges are the paper's, read off the data; a release needs one that is public, and all "
        "errors grow with it"
    )
    notes.append(
        "foodmart holds item numbers, not amounts: no mechanism that averages can be useful on it"
    )
    return notes
