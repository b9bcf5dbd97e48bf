"""Run an event-level mechanism over a series many times, and score what it releases.

The runs are bins of one release: the same series in every bin, noise of its own for each. A
mechanism that looks at its bins together is run once for each instead (`apart`). Every release has
a book that holds exactly the epsilon asked for; a mechanism that would spend more is refused.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Final

import numpy as np

from dpstream.bench.delayed_streams import Series
from dpstream.bench.metrics import mean_and_error
from dpstream.bench.trials import fixed_noise
from dpstream.errors import BudgetExceeded, InvalidInput
from dpstream.mechanisms.base import Mechanism
from dpstream.mechanisms.runner import Runner
from dpstream.privacy.ledger import Ledger
from dpstream.records import Integers, Reals, Release

_NO_LIMIT: Final = 1_000
_DATASET: Final = "series"


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Mean absolute error of every run: as released, and moved into the public range."""

    plain: list[float] = field(default_factory=list)
    clamped: list[float] = field(default_factory=list)
    seconds: float = 0.0
    refusal: str = ""

    def mae(self) -> tuple[float, float]:
        """Mean over the runs and its standard error."""
        return mean_and_error(self.plain)

    def mae_clamped(self) -> float:
        """The same, for a user who clamps to the range, which costs nothing."""
        return mean_and_error(self.clamped)[0]


def trials(
    mechanism: Mechanism,
    series: Series,
    *,
    runs: int,
    fixed: str,
    limited: bool = True,
    apart: bool = False,
) -> Errors:
    """Score `runs` runs; `fixed` names their noise. Without a limit, an overspend is let through.

    >>> from dpstream.mechanisms import Naive
    >>> ten = Series(name="s", source="", values=np.full(50, 5), lo=0, hi=10, bucket=5)
    >>> found = trials(Naive(epsilon=1, lo=0, hi=10), ten, runs=4, fixed="an example")
    >>> len(found.plain), found.mae()[0] > found.mae_clamped()
    (4, True)
    """
    plain, clamped, began = [], [], time.perf_counter()
    column, width = series.values[:, None], 1 if apart else runs
    for run in range(runs if apart else 1):
        try:
            values = released(
                mechanism, np.repeat(column, width, axis=1), f"{fixed}, {run}", limited=limited
            )
        except BudgetExceeded as refusal:
            return Errors(refusal=str(refusal))
        plain += np.abs(values - column).mean(axis=0).tolist()
        inside = np.clip(values, series.lo, series.hi)
        clamped += np.abs(inside - column).mean(axis=0).tolist()
    return Errors(plain=plain, clamped=clamped, seconds=time.perf_counter() - began)


def midpoint(series: Series) -> Errors:
    """The middle of the public range, scored like a run."""
    error = float(np.abs(series.values - series.midpoint).mean())
    return Errors(plain=[error], clamped=[error])


def released(mechanism: Mechanism, block: Integers, fixed: str, *, limited: bool = True) -> Reals:
    """All values released, steps x bins, in the order of their steps."""
    # The epsilon that was asked for, whatever the mechanism promises.
    total = Fraction(mechanism.budget) * (1 if limited else _NO_LIMIT)  # type: ignore[attr-defined]
    ledger = Ledger()
    ledger.open(_DATASET, replace(mechanism.terms(), total=total))
    runner = Runner(mechanism, ledger=ledger, dataset=_DATASET, **fixed_noise(fixed, 0))
    values = np.full(block.shape, np.nan)
    _fill(values, (release for batch in runner.feed(block) for release in batch))
    _fill(values, runner.finish())
    if np.isnan(values).any():
        missing = int(np.isnan(values).any(axis=1).argmax())
        raise InvalidInput(f"{type(mechanism).__name__} has never released step {missing}")
    return values


def seconds_per_step(mechanism: Mechanism, values: Reals, *, warm: int) -> float:
    """Processor time of one step of one bin, all included; the first `warm` steps are not timed."""
    runner: Any = Runner(mechanism)
    for _ in runner.feed(values[:warm, None]):
        pass
    began = time.process_time()  # a busy machine does not make it longer
    for _ in runner.feed(values[warm:, None]):
        pass
    runner.finish()
    return (time.process_time() - began) / (len(values) - warm)


def _fill(values: Reals, releases: Iterable[Release]) -> None:
    for release in releases:
        values[release.step] = release.values
