"""Mechanisms with a delay on four series: absolute error beside the published forms, and speed.

Noise is fixed by name, so a run gives the same errors again; times differ.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from benchmarks import delayed_figures
from benchmarks.delayed_figures import (
    BUCKETS,
    DELAYS,
    EVERYTHING,
    TABLE,
    THRESHOLDS,
    TRUNCATION,
    Plan,
    cell_row,
    cells,
    measured,
)
from benchmarks.delayed_trials import (
    AS_PUBLISHED,
    MIDPOINT,
    SOUND,
    Errors,
    Series,
    method,
    seconds_per_step,
    series,
    truncated_method,
)
from benchmarks.harness import Findings, Progress, Row, target

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
        rows.append(cell_row(cell, known[cell.title()]))
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
        one = truncated_method("contin_group pp", walk, **at)
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


JUDGED_EPSILONS: Final = (0.1, 0.5, 1.0)
THIRTY: Final = ("foodmart", 0.1, 10)
"""Where the paper has its factor of almost 30."""

# Sound -> the printed forms of it; the best of them counts, cell by cell.
_FORMS: Final = {
    "discontin_group": ("discontin_group",),
    "discontin_group pp": ("discontin_group pp",),
    "comp_order": ("comp_order", "comp_order, both ends"),
    "buc_order": ("buc_order",),
}
_REPRODUCED = 25.0
SECONDS = 60


def targets(rows: Sequence[Row], speeds: Sequence[Row], *, timed: int) -> list[Row]:
    """Every judged figure; what was not measured says why."""
    cells = [row for row in rows if row["figure"] == EVERYTHING]
    refused = sum(row["refused"] or 0 for row in rows)
    slowest = max((row["seconds"] for row in speeds), default=None)
    return [
        *(_against_printed(cells, name) for name in _FORMS),
        *_thirty(cells),
        target("releases that the ledger refused", refused, "==", 0),
        target(
            "100,000 steps through the slowest mechanism, w 100: seconds of one core",
            slowest if timed >= 100_000 else None, "<=", SECONDS, reason="timed in full runs only",
        ),
    ]  # fmt: skip


def _against_printed(cells: Sequence[Row], name: str) -> Row:
    """The worst ratio of all cells, with its standard error and where it is."""
    found = ratios(cells, name, "mae")
    title = f"{name}: MAE over that of the printed form, worst of {len(found)} cells"
    if not found:
        return target(title, None, "<=", 1, reason="not measured")
    worst = max(found, key=lambda row: _number(row["ratio"]))
    return target(title, _number(worst["ratio"]), "<=", 1) | {
        "se": worst["se"],
        "cell": f"{worst['series']}, epsilon {worst['epsilon']}, w {worst['delay']}",
        "clamped": max(_number(row["ratio"]) for row in ratios(cells, name, "clamped")),
    }


def ratios(cells: Sequence[Row], name: str, figure: str) -> list[Row]:
    """Sound over the best printed form in every judged cell.

    The runs of the two are independent; the standard error is that of a quotient of means.
    """
    errors = {_key(row): row for row in cells}
    out = []
    for row in cells:
        if row["mechanism"] != name or row["epsilon"] not in JUDGED_EPSILONS:
            continue
        forms = [errors[*_key(row)[:3], form + AS_PUBLISHED] for form in _FORMS[name]]
        best = min(forms, key=lambda one: _number(one[figure]))
        ratio = row[figure] / best[figure]
        relative = math.hypot(row["mae_se"] / row["mae"], best["mae_se"] / best["mae"])
        out.append({**row, "ratio": ratio, "se": ratio * relative})
    return out


def _thirty(cells: Sequence[Row]) -> list[Row]:
    """The paper's factor, and what both of its sides are worth against the midpoint."""
    at = {row["mechanism"]: _number(row["mae"]) for row in cells if _key(row)[:3] == THIRTY}
    where = f"{THIRTY[0]}, epsilon {THIRTY[1]}, w {THIRTY[2]}"
    why = "not measured"
    names = ("pegasus as published", "buc_order as published", "buc_order", MIDPOINT)
    pegasus, printed, sound, middle = (at.get(name, math.nan) for name in names)

    def over(above: float, below: float) -> float | None:
        return above / below if at else None

    return [
        target(
            f"{where}: MAE of pegasus over buc_order, both as published (the paper: almost 30)",
            over(pegasus, printed), ">=", _REPRODUCED, reason=why,
        ),
        target(
            f"{where}: MAE of pegasus as published over buc_order (sound)",
            over(pegasus, sound), ">=", 30, reason=why,
        ),
        target(f"{where}: MAE of buc_order over the midpoint's", over(sound, middle), "<=", 1,
               reason=why),
        target(f"{where}: MAE of buc_order as published over the midpoint's, which needs no data",
               over(printed, middle), ">=", 1, reason=why),
        target(f"{where}: MAE of pegasus as published over the midpoint's, which needs no data",
               over(pegasus, middle), ">=", 1, reason=why),
    ]  # fmt: skip


def table_three(rows: Sequence[Row]) -> list[Row]:
    """MAE over that of `naive`, at w = 10: the paper's Table III."""
    wanted = [
        row
        for row in rows
        if row["series"] in ("unemployment", "outpatients")
        and row["delay"] == 10
        and row["figure"] in (EVERYTHING, TABLE)
        and row["epsilon"] in JUDGED_EPSILONS
    ]
    naive = {_key(row)[:3]: row["mae"] for row in wanted if row["mechanism"] == "naive"}
    return [
        {**{key: row[key] for key in ("series", "epsilon", "delay", "mechanism", "note")}}
        | {"figure": TABLE, "over_naive": row["mae"] / naive[_key(row)[:3]]}
        for row in wanted
        if _key(row)[:3] in naive
    ]


def summaries(rows: Sequence[Row]) -> list[str]:
    """What no target asks, in sentences."""
    cells = [row for row in rows if row["figure"] == EVERYTHING]
    middle = {_key(row)[:3]: row["mae"] for row in cells if row["mechanism"] == MIDPOINT}
    found = []
    for name in dict.fromkeys(row["mechanism"] for row in cells if row["mechanism"] != MIDPOINT):
        own = [row for row in cells if row["mechanism"] == name]
        worse = sum(not row["mae"] < middle[_key(row)[:3]] for row in own)
        found.append(f"{name}: no better than the midpoint in {worse} of {len(own)} cells")
    return found


def _key(row: Row) -> tuple[str, float, int, str]:
    return row["series"], row["epsilon"], row["delay"], row["mechanism"]


def _number(value: float) -> float:
    """A figure that was not measured is worse than any other."""
    return math.inf if math.isnan(value) else value


_COLOURS = (
    "#8a8f98", "#0b6e99", "#5ab4d6", "#d1495b", "#8f6bb3", "#c9aee5", "#3a7d44", "#c77d1e",
    "#111111",
)  # fmt: skip
_COLOUR = dict(zip(SOUND, _COLOURS, strict=True))


def draw(figure: Any, rows: Sequence[Row]) -> None:
    """Figures 2 and 3 above (a row each), truncation and parameters below."""
    cells = [row for row in rows if row["figure"] == EVERYTHING]
    names = list(dict.fromkeys(row["series"] for row in cells))
    delays = sorted({row["delay"] for row in cells})
    if not cells:
        return
    figure.set_size_inches(4.4 * len(names), 4.0 * (len(delays) + 2))
    parts = figure.subfigures(len(delays) + 2, 1)
    for part, delay in zip(parts, delays, strict=False):
        panels = part.subplots(1, len(names), squeeze=False)[0]
        for panel, name in zip(panels, names, strict=True):
            here = [row for row in cells if (row["series"], row["delay"]) == (name, delay)]
            _over(panel, here, "epsilon")
            panel.set_title(f"{name}, w = {delay}", fontsize=9)
        panels[0].set_ylabel("MAE / range")
    handles, labels = parts[0].axes[0].get_legend_handles_labels()
    parts[0].legend(handles, labels, loc="outside upper center", ncols=6, fontsize=7, frameon=False)
    _truncation(parts[-2], [row for row in rows if row["figure"] == TRUNCATION], names)
    _parameters(parts[-1], rows)


def _over(panel: Any, rows: Sequence[Row], key: str) -> None:
    """One line per mechanism: solid if sound, dashed as published; bars are standard errors."""
    for name in dict.fromkeys(row["mechanism"] for row in rows):
        own = sorted((row for row in rows if row["mechanism"] == name), key=lambda row: row[key])
        width = [row["mae"] / row["share"] if row["share"] else 1 for row in own]
        panel.errorbar(
            [row[key] for row in own],
            [row["share"] for row in own],
            yerr=[(row["mae_se"] or 0) / w if row["runs"] > 1 else 0
                  for row, w in zip(own, width, strict=True)],
            linestyle=":" if name == MIDPOINT else "--" if AS_PUBLISHED in name else "-",
            color=_COLOUR.get(re.split(r",| as ", name)[0], "#444444"),
            linewidth=1.2, capsize=2, label=name,
        )  # fmt: skip
    _tidy(panel, key)


def _truncation(part: Any, rows: Sequence[Row], names: Sequence[str]) -> None:
    """Pairs of bars: without and with a truncated range."""
    panels = part.subplots(1, len(names), squeeze=False)[0]
    for panel, name in zip(panels, names, strict=True):
        here = [row for row in rows if row["series"].startswith(name)]
        kinds = list(dict.fromkeys(row["mechanism"] for row in here))
        for shift, truncated in ((-0.2, False), (0.2, True)):
            share = {
                row["mechanism"]: row["share"]
                for row in here
                if row["option"].endswith("truncated") == truncated
            }
            places = [place + shift for place, kind in enumerate(kinds) if kind in share]
            heights = [share[kind] for kind in kinds if kind in share]
            label = "truncated" if truncated else "whole range"
            panel.bar(places, heights, 0.4, label=label, color=_COLOURS[1 if truncated else 3])
        panel.set_xticks(range(len(kinds)), kinds, fontsize=6, rotation=40, ha="right")
        panel.set_title(f"truncation on {name} (Figure 4)", fontsize=9)
        _tidy(panel, "")
    panels[0].legend(fontsize=7, frameon=False)


def _parameters(part: Any, rows: Sequence[Row]) -> None:
    """Figures 5 to 10 on unemployment."""
    panels = part.subplots(1, 3, squeeze=False)[0]
    shown = ((DELAYS, "delay"), (BUCKETS, "bucket width"), (THRESHOLDS, "threshold"))
    for panel, (figure, what) in zip(panels, shown, strict=True):
        here = [
            {
                **row,
                "parameter": row["delay"] if figure == DELAYS else int(row["option"].split()[-1]),
            }
            for row in rows
            if row["figure"] == figure and row["series"] == "unemployment"
        ]
        first = min((row["epsilon"] for row in here), default=0)
        _over(panel, [row for row in here if row["epsilon"] == first], "parameter")
        panel.set_xlabel(what)
        panel.set_title(f"unemployment (Figure {figure}), epsilon {first}", fontsize=9)
        panel.legend(fontsize=6, frameon=False)


def _tidy(panel: Any, key: str) -> None:
    panel.set_yscale("log")
    panel.set_xlabel(key)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
