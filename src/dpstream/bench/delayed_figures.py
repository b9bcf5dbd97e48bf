"""Which cells each figure of the delay paper has, and how a cell becomes a row.

The numbers are those of "Delay-allowed Differentially Private Data Stream Release" (2025): Figures
2 to 10 and Table III.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dpstream.bench import delayed_methods as methods
from dpstream.bench.delayed_methods import AS_PUBLISHED, EVENT_ADAPUB, MIDPOINT, PUBLISHED, SOUND
from dpstream.bench.delayed_streams import Series
from dpstream.bench.delayed_trials import Errors, midpoint, trials
from dpstream.bench.harness import Row

EVERYTHING: Final = "2, 3"
TRUNCATION, DELAYS, BUCKETS, THRESHOLDS, TABLE = "4", "5", "6", "7 to 10", "table III"
THETAS: Final = (1, 5, 9, 13, 17)
_TRUNCATED: Final = ("naive", "contin_group pp", "discontin_group pp", "comp_order", "buc_order")
_TUNED: Final = ("unemployment", "outpatients")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    epsilons: Sequence[float]
    delays: Sequence[int]
    runs: int
    values: int  # of all runs of a cell together, at least: short series have more runs
    steps: int | None
    few_epsilons: Sequence[float]  # of Figure 6
    many_delays: Sequence[int]  # of Figure 5
    thetas: Sequence[int]
    buckets: Sequence[int]  # of Figure 6, as multiples of a tenth of the paper's width
    timed: int  # steps


FULL: Final = Plan(
    epsilons=(0.1, 0.3, 0.5, 0.7, 1.0), delays=(10, 100), runs=20, values=25_000, steps=None,
    few_epsilons=(0.4, 0.6, 0.8), many_delays=(10, 30, 50, 70, 90), thetas=THETAS,
    buckets=(1, 2, 4, 6, 8, 10), timed=100_000,
)  # fmt: skip
QUICK: Final = Plan(
    epsilons=(0.1, 0.5, 1.0), delays=(10, 100), runs=3, values=0, steps=300, few_epsilons=(0.4,),
    many_delays=(10, 90), thetas=(1, 17), buckets=(1, 10), timed=2_000,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One mechanism on one series; `truncate`: with a truncated range."""

    figure: str
    series: Series
    epsilon: float
    delay: int
    mechanism: str
    options: dict[str, Any] = field(default_factory=dict)
    truncate: bool = False

    @property
    def option(self) -> str:
        """The options for people."""
        words = [f"{name} {value}" for name, value in self.options.items()]
        return ", ".join([*words, *(["truncated"] if self.truncate else [])])

    def title(self) -> str:
        """What names its noise."""
        what = f"{self.mechanism} {self.option}".strip()
        return f"{what} on {self.series.name}, epsilon {self.epsilon}, w {self.delay}"


def cells(plan: Plan, found: Sequence[Series]) -> Iterator[Cell]:
    """All of them."""
    tuned = [one for one in found if one.name in _TUNED]
    for one in found:
        for delay in plan.delays:
            for epsilon in plan.epsilons:
                at = {"series": one, "epsilon": epsilon, "delay": delay}
                for name in (*SOUND, *PUBLISHED, MIDPOINT):
                    yield Cell(figure=EVERYTHING, mechanism=name, **at)
        for name in _TRUNCATED:
            for full in (name, name + AS_PUBLISHED):
                if full in ("naive as published", "comp_order as published"):
                    continue  # the paper has no form of its own, or none that is defined
                at = {"series": one, "epsilon": 0.5, "delay": 100, "figure": TRUNCATION}
                yield Cell(mechanism=full, **at)
                yield Cell(mechanism=full, truncate=True, **at)
    for one in tuned:
        for delay in plan.many_delays:
            for name in ("discontin_group", "comp_order", "buc_order"):
                for full in (name, name + AS_PUBLISHED):
                    at = {"series": one, "epsilon": 0.5, "delay": delay, "figure": DELAYS}
                    yield Cell(mechanism=full, **at)
        for epsilon in plan.few_epsilons:
            for tenth in plan.buckets:
                width = one.bucket * tenth // 10 * (10 if one.name == "outpatients" else 1)
                at = {"series": one, "epsilon": epsilon, "delay": 100, "figure": BUCKETS}
                yield Cell(mechanism="buc_order", options={"bucket": width}, **at)
                yield Cell(mechanism="buc_order" + AS_PUBLISHED, options={"width": width}, **at)
        for theta in plan.thetas:
            for name in ("contin_group", "discontin_group"):
                for full in (name, f"{name} pp"):
                    at = {"series": one, "epsilon": 0.4, "delay": 100, "figure": THRESHOLDS}
                    yield Cell(mechanism=full, options={"threshold": theta}, **at)
                    yield Cell(mechanism=full + AS_PUBLISHED, options={"theta": theta}, **at)
        for epsilon in (0.1, 0.5, 1.0):
            at = {"series": one, "epsilon": epsilon, "delay": 10, "figure": TABLE}
            yield Cell(mechanism=EVENT_ADAPUB, **at)


def measured(cell: Cell, plan: Plan) -> Row:
    """The row of a cell."""
    series = cell.series
    runs = max(plan.runs, -(-plan.values // len(series.values)))
    if cell.mechanism == MIDPOINT:
        errors = midpoint(series)
    else:
        at = {"epsilon": cell.epsilon, "delay": cell.delay}
        if cell.truncate:
            one = methods.truncated(cell.mechanism, series, **at)
        else:
            one = methods.method(cell.mechanism, series, **at, **cell.options)
        runs = plan.runs if one.apart else runs
        errors = trials(
            one.mechanism, series, runs=runs, fixed=cell.title(),
            limited=one.limited, apart=one.apart,
        )  # fmt: skip
    return row(cell, errors)


def row(cell: Cell, errors: Errors) -> Row:
    """Figures of a cell, as errors and as shares of the range."""
    mae, error = errors.mae()
    width = cell.series.hi - cell.series.lo
    source = "" if cell.series.source == "DPSTREAM_DATA" else cell.series.source
    return {
        "figure": cell.figure,
        "series": cell.series.name,
        "epsilon": cell.epsilon,
        "delay": cell.delay,
        "mechanism": cell.mechanism,
        "option": cell.option,
        "mae": mae,
        "mae_se": error,
        "share": mae / width,
        "clamped": errors.mae_clamped() / width,
        "runs": len(errors.plain),
        "seconds": errors.seconds,
        "refused": 1 if errors.refusal else None,
        "note": errors.refusal or source,
    }
