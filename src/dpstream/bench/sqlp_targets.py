"""What the paper reports, and what is asked of its reproduction and of `latched`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dpstream.bench.harness import Row, target
from dpstream.bench.sqlp_runs import METRICS, PUBLISHED

LATCHED: Final = "latched"
DEBIASED: Final = "latched, C = 16, debiased"
TUNED: Final = "latched, C = 16, debiased, last_budget = 0.4"
SHIPPED: Final = "sqlp"
_PRINTED: Final = "paper"

PAPER: Final[dict[int, Row]] = {
    100: {"form": _PRINTED, "keys": 28_338, "l_inf": 1_391, "l_1": 17_741_225, "l_2": 50_039},
    1000: {"form": _PRINTED, "keys": 22_280, "l_inf": 1_563, "l_1": 19_395_721, "l_2": 58_237},
}
_CLOSE: Final = {100: 0.1, 1000: 0.2}
_AHEAD: Final = {"keys": (">=", 1.8), "l_inf": ("<=", 0.5), "l_1": ("<=", 0.6), "l_2": ("<=", 0.45)}
_MOONSHOT: Final = {
    "keys": (">=", 2.5),
    "l_inf": ("<=", 0.15),
    "l_1": ("<=", 0.5),
    "l_2": ("<=", 0.3),
}


def targets(rows: Sequence[Row], *, quick: bool) -> list[Row]:
    """The reproduction, then `latched` over the better of published and shipped `sqlp`."""
    table = {(row["triggers"], row["form"]): row for row in rows if row["part"] == "table 1"}
    found = []
    for triggers, close in _CLOSE.items():
        ours = table.get((triggers, PUBLISHED))
        for metric in ("keys", "l_1", "l_2"):
            name = f"published form, {triggers} triggers: {metric} off the paper's"
            off = None if quick or ours is None else _off(ours, PAPER[triggers], metric)
            reason = "the paper's size needs a full run"
            found.append(target(name, off, "<=", close, reason=reason))
    for triggers in _CLOSE:
        found += _ahead(table, triggers)
    return found


def _off(ours: Row, paper: Row, metric: str) -> float:
    return abs(float(ours[metric]) / float(paper[metric]) - 1)


def _ahead(table: dict[tuple[int, str], Row], triggers: int) -> list[Row]:
    """`latched` with the paper's C and with one of its own, and what more is hoped for."""
    rivals = [table[at] for form in (PUBLISHED, SHIPPED) if (at := (triggers, form)) in table]
    found = []
    for label, form, bounds in (
        (LATCHED, LATCHED, _AHEAD),
        (TUNED, TUNED, _AHEAD),
        ("moonshot", TUNED, _MOONSHOT),
    ):
        ours = table.get((triggers, form))
        for metric in METRICS:
            best = max if metric == "keys" else min
            rival = best((float(row[metric]) for row in rivals), default=None)
            ratio = None if ours is None or not rival else float(ours[metric]) / rival
            op, bound = bounds[metric]
            name = f"{label}, {triggers} triggers: {metric} over sqlp's"
            found.append(target(name, ratio, op, bound, reason="not measured in this run"))
    return found
