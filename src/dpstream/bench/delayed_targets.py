"""What the delay bench is judged by, and what its rows say when taken together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from dpstream.bench.delayed_figures import EVERYTHING, TABLE
from dpstream.bench.delayed_methods import AS_PUBLISHED, MIDPOINT
from dpstream.bench.harness import Row, target

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
