"""What the w-event bench is judged by, and what else its rows say when taken together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from dpstream.bench.harness import Row, target
from dpstream.bench.streams import ROME
from dpstream.bench.trials import ZEROS

OURS: Final = ("pacer",)
"""Mechanisms that no paper has: they are not among the published schemes."""

SHOWN: Final = (0.5, 120)
"""The epsilon and window at which ranks are taken and plots are drawn."""

SHARE_WITHIN, WITHIN, WORST = 0.9, 1.2, 1.5
TOP, TOP_STREAMS, ALL_STREAMS = 3, 7, 9
SECONDS = 30


def targets(rows: Sequence[Row]) -> list[Row]:
    """Every judged figure; what was not measured says why."""
    cells, wide = cells_of(rows), [row for row in rows if row.get("regime")]
    return [*_pacer(cells), _ledger(cells + wide), _spas(cells), *_absorption(wide)]


def cells_of(rows: Sequence[Row]) -> list[Row]:
    """The rows that a mechanism has on one of the nine streams."""
    return [row for row in rows if "delta_mre" in row and row["mechanism"] != ZEROS]


def summaries(rows: Sequence[Row]) -> list[Row]:
    """Figures that are no target, one row each."""
    cells = cells_of(rows)
    found = [
        _summary(
            "spas",
            f"streams in the top {TOP} when every scheme is clamped at 0",
            _top_streams(cells, "mre_clamped"),
        )
    ]
    pacer = {_cell(row): row for row in cells if row["mechanism"] == "pacer"}
    if pacer:
        baseline = {_cell(row): row for row in rows if row.get("mechanism") == ZEROS}
        worse = [key for key, row in pacer.items() if not row["mre"] <= baseline[key]["mre"]]
        found.append(
            _share("pacer", "share of cells whose MRE is above that of zeros", worse, pacer)
        )
        clamped = _within(cells, pacer, lambda row: row["mre_clamped"])
        what = f"share of cells within {WITHIN} of the best when every scheme is clamped at 0"
        found.append(_share("pacer", what, clamped, pacer))
        absolute = _within(cells, pacer, lambda row: row["mae"])
        found.append(_share("pacer", f"share of cells within {WITHIN} in MAE", absolute, pacer))
    return [row for row in found if row["value"] is not None]


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
    refused = sum(row["refused"] for row in measured)
    return target("runs that the ledger refused", refused, "==", 0)


def _spas(cells: Sequence[Row]) -> Row:
    schemes = len(published(cells))
    epsilon, window = SHOWN
    name = f"spas: streams in the top {TOP} of {schemes} published schemes"
    why = "spas is not registered, or not all nine streams are there"
    value = _top_streams(cells, "mre")
    return target(f"{name}, epsilon {epsilon}, w {window}", value, ">=", TOP_STREAMS, reason=why)


def _absorption(wide: Sequence[Row]) -> list[Row]:
    judged = [row for row in wide if row["regime"] == wide[0]["regime"]]
    ours = next((row for row in judged if row["mechanism"] == "budget_absorption"), None)
    others = [_number(row["mae"]) for row in judged if row is not ours]
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


def _within(
    cells: Sequence[Row], ours: dict[Any, Row], figure: Callable[[Row], float]
) -> list[Any]:
    """The cells where ours is within the factor of the best, by another figure."""
    best: dict[Any, float] = {}
    for row in cells:
        best[_cell(row)] = min(best.get(_cell(row), float("inf")), _number(figure(row)))
    return [key for key, row in ours.items() if _number(figure(row)) <= WITHIN * best[key]]


def _cell(row: Row) -> tuple[str, float, int]:
    return row["stream"], row["epsilon"], row["window"]


def _number(value: float) -> float:
    """A figure that was not measured (a refused mechanism's) is worse than any other."""
    return value if value == value else float("inf")


def _share(mechanism: str, what: str, part: Sequence[Any], whole: dict[Any, Row]) -> Row:
    return _summary(mechanism, what, len(part) / len(whole))


def _summary(mechanism: str, what: str, value: float | None) -> Row:
    return {"stream": "all", "mechanism": mechanism, "summary": what, "value": value}
