"""What the w-event bench is judged by, and what else its rows say when taken together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from dpstream.bench.harness import Row, target
from dpstream.bench.streams import ROME
from dpstream.bench.trials import NOT_JUDGED, ZEROS

OURS: Final = ("pacer",)
"""Mechanisms that no paper has: they are not among the published schemes."""

SHOWN: Final = (0.5, 120)
"""The epsilon and window at which ranks are taken and plots are drawn."""

SHARE_WITHIN, WITHIN, WORST = 0.9, 1.2, 1.5
TOP, TOP_STREAMS, ALL_STREAMS = 3, 7, 9
SECONDS = 30


def targets(rows: Sequence[Row], wide: Sequence[Row], also: Sequence[Row] = ()) -> list[Row]:
    """Every judged figure; what was not measured says why.

    `wide`: the judged rows of the Rome shape; `also`: others that the ledger must not have refused.
    """
    cells = cells_of(rows)
    return [*_pacer(cells), _ledger([*cells, *wide, *also]), _spas(cells), *_absorption(wide)]


def cells_of(rows: Sequence[Row]) -> list[Row]:
    """The rows that a mechanism has on one of the nine streams."""
    return [row for row in rows if "delta_mre" in row and row["mechanism"] not in NOT_JUDGED]


def summaries(rows: Sequence[Row]) -> list[str]:
    """What the rows say together and no target asks, in sentences."""
    cells, found = cells_of(rows), []
    if (count := _top_streams(cells, "clamped")) is not None:
        found.append(
            f"with every scheme clamped at 0, spas is in the top {TOP} on {count} of "
            f"{ALL_STREAMS} streams"
        )
    pacer = {_cell(row): row for row in cells if row["mechanism"] == "pacer"}
    if pacer:
        baseline = {_cell(row): row["mre"] for row in rows if row.get("mechanism") == ZEROS}
        above = sum(not row["mre"] <= baseline[key] for key, row in pacer.items())
        clamped, absolute = (_within(cells, pacer, key) for key in ("clamped", "mae"))
        found.append(
            f"pacer is within {WITHIN} of the best in {clamped:.0%} of cells when every mechanism "
            f"is clamped at 0, and in {absolute:.0%} by MAE; its MRE is above that of zeros, "
            f"which need no data, in {above / len(pacer):.0%}"
        )
    return found


def _pacer(cells: Sequence[Row]) -> list[Row]:
    deltas = [_number(row["delta_mre"]) for row in cells if row["mechanism"] == "pacer"]
    why = "pacer is not registered"
    within = sum(delta <= WITHIN for delta in deltas) / len(deltas) if deltas else None
    name = f"pacer: share of {len(deltas)} cells with delta_MRE <= {WITHIN}"
    return [
        target(name, within, ">=", SHARE_WITHIN, reason=why),
        target("pacer: worst delta_MRE", max(deltas, default=None), "<=", WORST, reason=why),
    ]


def _ledger(measured: Sequence[Row]) -> Row:
    refused = sum(row["refused"] or 0 for row in measured)
    return target("runs that the ledger refused", refused, "==", 0)


def _spas(cells: Sequence[Row]) -> Row:
    schemes = len(published(cells))
    epsilon, window = SHOWN
    name = f"spas: streams in the top {TOP} of {schemes} published schemes"
    why = "spas is not registered, or not all nine streams are there"
    value = _top_streams(cells, "mre")
    return target(f"{name}, epsilon {epsilon}, w {window}", value, ">=", TOP_STREAMS, reason=why)


def _absorption(wide: Sequence[Row]) -> list[Row]:
    ours = next((row for row in wide if row["mechanism"] == "budget_absorption"), None)
    others = [_number(row["mae"]) for row in wide if row is not ours]
    why, ratio, seconds = "budget_absorption is not registered", None, None
    if ours and others:
        ratio = _number(ours["mae"]) / min(others)
        if ours["stream"].endswith(f"{ROME[0]:,} x {ROME[1]:,}"):
            seconds = _number(ours["seconds"])
    return [
        target(
            "rome shape, swing of the order of w / epsilon: MAE of budget absorption over the "
            "best of BD, Uniform, Sample",
            ratio, "<=", 1, reason=why,
        ),
        target(
            f"{ROME[0]:,} x {ROME[1]:,} through budget absorption: seconds",
            seconds, "<=", SECONDS, reason="measured in full runs only",
        ),
    ]  # fmt: skip


def published(cells: Sequence[Row]) -> list[str]:
    """The schemes of the papers that were measured."""
    return [name for name in dict.fromkeys(row["mechanism"] for row in cells) if name not in OURS]


def _top_streams(cells: Sequence[Row], figure: str) -> int | None:
    """On how many of the nine streams spas is in the top three of the published schemes."""
    at = [row for row in cells if (row["epsilon"], row["window"]) == SHOWN]
    streams = list(dict.fromkeys(row["stream"] for row in at))
    if len(streams) < ALL_STREAMS or "spas" not in published(at):
        return None
    count = 0
    for stream in streams:
        here = [row for row in at if row["stream"] == stream and row["mechanism"] not in OURS]
        order = sorted(here, key=lambda row: _number(row[figure]))
        count += "spas" in [row["mechanism"] for row in order[:TOP]]
    return count


def _within(cells: Sequence[Row], ours: dict[Any, Row], figure: str) -> float:
    """In which share of the cells ours is within the factor of the best, by another figure."""
    best: dict[Any, float] = {}
    for row in cells:
        best[_cell(row)] = min(best.get(_cell(row), math.inf), _number(row[figure]))
    near = sum(_number(row[figure]) <= WITHIN * best[key] for key, row in ours.items())
    return near / len(ours)


def _cell(row: Row) -> tuple[str, float, int]:
    return row["stream"], row["epsilon"], row["window"]


def _number(value: float) -> float:
    """A figure that was not measured (a refused mechanism's) is worse than any other."""
    return math.inf if math.isnan(value) else value
