"""Run a w-event mechanism over a stream several times, and score what it releases.

Every run has a book of its own that promises exactly the epsilon and window asked for, whatever the
mechanism says of itself: a mechanism that would spend more is refused, and scored as refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from hashlib import blake2b
from typing import Any, Final

import numpy as np

from dpstream.errors import BudgetExceeded, InvalidParameter
from dpstream.evaluate import error_metrics as metrics
from dpstream.mechanisms import REGISTRY, find
from dpstream.mechanisms.base import HistogramMechanism
from dpstream.mechanisms.runner import Runner
from dpstream.privacy.amounts import Amount, positive
from dpstream.privacy.ledger.charges import Terms
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.records import Integers, Reals

ZEROS: Final = "zeros"
"""What needs no data and no budget: the answer 0, always."""

Build = Callable[..., Any]
"""Called with epsilon= and window=: a mechanism."""

_DATASET: Final = "stream"
_NO_LIMIT: Final = 10**9
_CHUNK: Final = 1 << 22  # counts fed at once: a wide stream is never held in memory twice


@dataclass(frozen=True, kw_only=True, eq=False)
class Score:
    """One run: errors by step, the share of steps paid for, the budget used, the time taken."""

    relative: Reals
    clamped: Reals  # relative errors of max(o, 0)
    absolute: Reals
    range_error: float | None = None
    paid: float = 0.0
    spent: float = 0.0  # in the worst window, as a share of epsilon
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Trials:
    """All runs of one mechanism on one stream, and what the ledger said to those it refused."""

    mechanism: str
    scores: list[Score] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def mean(self, figure: str) -> tuple[float, float]:
        """Mean over the runs and its standard error; NaN if any run was refused."""
        if self.refusals:
            return metrics.mean_and_error([])
        kept = (getattr(score, figure) for score in self.scores)
        return metrics.mean_and_error([float(np.mean(one)) for one in kept if one is not None])

    def by_step(self) -> Reals:
        """Absolute error at each step, mean over the runs."""
        mean: Reals = np.mean([score.absolute for score in self.scores], axis=0)
        return mean


def w_event_mechanisms() -> list[str]:
    """Every registered mechanism over counts, in the order of the registry."""
    return [name for name in REGISTRY if issubclass(find(name), HistogramMechanism)]


def trials(
    mechanism: str,
    block: Integers,
    *,
    epsilon: Amount,
    window: int,
    runs: int,
    fixed: str | None = None,
    build: Build | None = None,
    bounded: bool = True,
) -> Trials:
    """Run `mechanism` with its default parameters `runs` times.

    `fixed` names the noise: the same name gives the same figures again. It is for public data.
    `build` makes a mechanism that is not registered, or has other parameters; `bounded=False`
    gives it a book that refuses nothing, and only counts.

    >>> block = np.full((4, 2), 50)
    >>> one = trials("sample", block, epsilon=1, window=2, runs=3, fixed="an example")
    >>> [score.paid for score in one.scores], one.refusals
    ([0.5, 0.5, 0.5], [])
    """
    found, asked = Trials(mechanism=mechanism), positive(epsilon, "epsilon")
    chosen: Build = build or find(mechanism)
    for run in range(runs):
        try:
            made = chosen(epsilon=asked, window=window)
            score = _run(made, mechanism, block, fixed_noise(fixed, run), bounded=bounded)
        except BudgetExceeded as refusal:
            found.refusals.append(str(refusal))
        else:
            found.scores.append(score)
    return found


def zeros(block: Integers) -> Trials:
    """The baseline without data, scored like a run."""
    nothing = np.zeros((1, 1), dtype=np.int64)
    relative = metrics.relative_errors(nothing, block)
    absolute = metrics.absolute_errors(nothing, block)
    counts = metrics.range_error(np.zeros_like(block), block) if block.shape[1] == 1 else None
    score = Score(relative=relative, clamped=relative, absolute=absolute, range_error=counts)
    return Trials(mechanism=ZEROS, scores=[score])


def _run(
    mechanism: Any,
    name: str,
    block: Integers,
    noise: dict[str, Any],
    *,
    bounded: bool,
) -> Score:
    ledger, epsilon = Ledger(), Fraction(mechanism.epsilon)
    total = epsilon if bounded else epsilon * _NO_LIMIT
    ledger.open(_DATASET, Terms(unit="w_event", total=total, window=mechanism.window))
    runner = Runner(mechanism, ledger=ledger, dataset=_DATASET, name=name, **noise)
    seconds, paid, parts, kept = 0.0, 0, [], []
    for chunk in _chunks(block):
        began = time.perf_counter()
        releases = [release for batch in runner.feed(chunk) for release in batch]
        seconds += time.perf_counter() - began
        if len(releases) != len(chunk):
            raise InvalidParameter(f"{name} must release every step at once; it has a delay")
        values = np.array([release.values for release in releases])
        paid += sum(release.paid for release in releases)
        parts.append(
            (
                metrics.relative_errors(values, chunk),
                metrics.relative_errors(np.maximum(values, 0), chunk),
                metrics.absolute_errors(values, chunk),
            )
        )
        if block.shape[1] == 1:
            kept.append(values)
    relative, clamped, absolute = (np.concatenate(part) for part in zip(*parts, strict=True))
    (book,) = ledger.report()
    return Score(
        relative=relative,
        clamped=clamped,
        absolute=absolute,
        range_error=metrics.range_error(np.concatenate(kept), block) if kept else None,
        paid=paid / len(block),
        spent=float(Fraction(book["spent"]) / epsilon),
        seconds=seconds,
    )


def _chunks(block: Integers) -> Iterable[Integers]:
    size = max(16, min(1024, _CHUNK // block.shape[1]))
    return (block[first : first + size] for first in range(0, len(block), size))


def fixed_noise(fixed: str | None, run: int) -> dict[str, Any]:
    """A secret and a run id made from a public name; without one, both are drawn afresh."""
    if fixed is None:
        return {}
    digest = blake2b(f"{fixed}, run {run}".encode(), digest_size=48).digest()
    return {"secret": digest[:32], "run_id": digest[32:]}
