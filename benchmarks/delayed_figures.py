"""Which cells each figure of the delay paper has, and how a cell becomes a row.

The numbers are those of "Delay-allowed Differentially Private Data Stream Release" (2025): Figures
2 to 10 and Table III.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from benchmarks import delayed_trials as methods
from benchmarks.delayed_trials import (
    AS_PUBLISHED,
    EVENT_ADAPUB,
    MIDPOINT,
    PUBLISHED,
    SOUND,
    Errors,
    Series,
    midpoint,
    trials,
)
from benchmarks.harness import Row

EVERYTHING: Final = "2, 3"
TRUNCATION, DELAYS, BUCKETS, THRESHOLDS, TABLE = "4", "5", "6", "7 to 10", "table III"
CORRECTIONS: Final = "which correction"
"""No figure of the paper: its algorithms with sound noise, and what ours do beyond that."""
THETAS: Final = (1, 5, 9, 13, 17)
_TRUNCATED: Final = ("naive", "contin_group pp", "discontin_group pp", "comp_order", "buc_order")
_JUDGED: Final = ("discontin_group", "comp_order", "buc_order")
_TUNED: Final = ("unemployment", "outpatients")
_CUT: Final = 3_000


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
    buckets: Sequence[int]  # of Figure 6, in multiples of the smallest
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
    for one in found:
        yield from _everything(plan, one)
        yield from _truncation(one)
    for one in found:
        if one.name in _TUNED:
            yield from _delays(plan, one)
            yield from _buckets(plan, one)
            yield from _thresholds(plan, one)
            yield from _others(one)
            if plan is FULL:
                yield from _corrections(one)


def _everything(plan: Plan, series: Series) -> Iterator[Cell]:
    for delay, epsilon in itertools.product(plan.delays, plan.epsilons):
        for name in (*SOUND, *PUBLISHED, MIDPOINT):
            yield Cell(
                figure=EVERYTHING, series=series, epsilon=epsilon, delay=delay, mechanism=name
            )


def _truncation(series: Series) -> Iterator[Cell]:
    """Noise on each value, as in the paper; it has no form of its own for the other two.

    A bound is chosen for one series, so every run is a release of its own: long ones are cut.
    """
    if len(series.values) > _CUT:
        name = f"{series.name}, {_CUT:,} steps"
        series = replace(series, name=name, values=series.values[:_CUT])
    published = [name + AS_PUBLISHED for name in _TRUNCATED if name not in ("naive", "comp_order")]
    for name, truncate in itertools.product((*_TRUNCATED, *published), (False, True)):
        yield Cell(
            figure=TRUNCATION, series=series, epsilon=0.5, delay=100, mechanism=name,
            truncate=truncate,
        )  # fmt: skip


def _delays(plan: Plan, series: Series) -> Iterator[Cell]:
    for delay, name in itertools.product(plan.many_delays, _JUDGED):
        for full in (name, name + AS_PUBLISHED):
            yield Cell(figure=DELAYS, series=series, epsilon=0.5, delay=delay, mechanism=full)


def _buckets(plan: Plan, series: Series) -> Iterator[Cell]:
    smallest = series.bucket // (1 if series.name == "outpatients" else 10)
    for epsilon, times in itertools.product(plan.few_epsilons, plan.buckets):
        for full, key in (("buc_order", "bucket"), ("buc_order" + AS_PUBLISHED, "width")):
            yield Cell(
                figure=BUCKETS, series=series, epsilon=epsilon, delay=100, mechanism=full,
                options={key: smallest * times},
            )  # fmt: skip


def _thresholds(plan: Plan, series: Series) -> Iterator[Cell]:
    names = ("contin_group", "contin_group pp", "discontin_group", "discontin_group pp")
    for theta, name in itertools.product(plan.thetas, names):
        for full, key in ((name, "threshold"), (name + AS_PUBLISHED, "theta")):
            yield Cell(
                figure=THRESHOLDS, series=series, epsilon=0.4, delay=100, mechanism=full,
                options={key: theta},
            )  # fmt: skip


def _others(series: Series) -> Iterator[Cell]:
    for epsilon in (0.1, 0.5, 1.0):
        yield Cell(figure=TABLE, series=series, epsilon=epsilon, delay=10, mechanism=EVENT_ADAPUB)


def _corrections(series: Series) -> Iterator[Cell]:
    """As printed; with sound noise; and drawn into the range; and as it comes, tests where useful.

    At epsilon 10 tests tell something.
    """
    width = series.bucket
    algorithm: dict[str, dict[str, Any]] = {
        "contin_group": {"threshold": 3},
        "discontin_group": {"threshold": 3},
        "comp_order": {},
        "buc_order": {"bucket": width},
    }
    for epsilon, (name, given) in itertools.product((0.5, 10.0), algorithm.items()):
        forms = [(name + AS_PUBLISHED, {}), (name, given | {"shrink": False}), (name, given)]
        for full, options in [*forms, *([(name, {})] if given else [])]:
            yield Cell(
                figure=CORRECTIONS, series=series, epsilon=epsilon, delay=100, mechanism=full,
                options=options,
            )  # fmt: skip


def measured(cell: Cell, plan: Plan) -> Errors:
    """The errors of a cell."""
    series = cell.series
    runs = max(plan.runs, -(-plan.values // len(series.values)))
    if cell.mechanism == MIDPOINT:
        return midpoint(series)
    at: dict[str, Any] = {"epsilon": cell.epsilon, "delay": cell.delay}
    if cell.truncate:
        one = methods.truncated_method(cell.mechanism, series, **at)
    else:
        one = methods.method(cell.mechanism, series, **at, **cell.options)
    return trials(
        one.mechanism,
        series,
        runs=plan.runs if one.apart else runs,
        fixed=cell.title(),
        limited=one.limited,
        apart=one.apart,
    )


def cell_row(cell: Cell, errors: Errors) -> Row:
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
