"""Run a w-event mechanism over a stream several times, and score what it releases.

Every run has a book of its own with exactly the epsilon and window asked for, whatever the
mechanism says of itself: a mechanism that would spend more is refused, and scored as refused.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dpstream.errors import BudgetExceeded, InvalidParameter
from dpstream.mechanisms import REGISTRY, find
from dpstream.mechanisms.base import HistogramMechanism
from dpstream.mechanisms.runner import Runner
from dpstream.privacy.amounts import Amount, positive
from dpstream.privacy.ledger.charges import Terms
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.records import Integers, Reals

Numbers = npt.NDArray[Any]

_QUERIES = 1_000
_QUERY_SEED = 1


def absolute_errors(released: Numbers, truth: Numbers) -> Reals:
    """Mean absolute error over the bins, by step; its mean over the steps is the MAE.

    >>> absolute_errors(np.array([[3, 0], [5, 5]]), np.array([[1, 0], [4, 8]])).tolist()
    [1.0, 2.0]
    """
    errors: Reals = np.abs(released - truth).mean(axis=1, dtype=np.float64)
    return errors


def relative_errors(released: Numbers, truth: Numbers) -> Reals:
    """Mean of |o - x| / max(x, 1) over the bins, by step; its mean over the steps is the MRE.

    >>> relative_errors(np.array([[3, 1], [5, 5]]), np.array([[1, 0], [4, 10]])).tolist()
    [1.5, 0.375]
    """
    errors: Reals = (np.abs(released - truth) / np.maximum(truth, 1)).mean(axis=1)
    return errors


def range_error(released: Numbers, truth: Numbers) -> float:
    """Mean relative error of range queries: how many steps have a value in [a, b)?

    1,000 ranges with a < b up to the largest true value, the same for every mechanism; an answer
    of 0 counts as 1 in the denominator.

    >>> range_error(np.array([[0], [0], [-9], [99]]), np.zeros((4, 1)))
    0.5
    """
    domain = int(truth.max()) + 1
    # which ranges are asked for is chance, the same for all; no noise comes from it
    ends = np.random.default_rng(_QUERY_SEED).integers(0, domain, (_QUERIES, 2))
    low, high = ends.min(axis=1), ends.max(axis=1) + 1
    right, given = (_counts(values, low, high) for values in (truth, released))
    return float((np.abs(given - right) / np.maximum(right, 1)).mean())


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error; NaN where there are too few values.

    >>> mean_and_error([1.0, 3.0])
    (2.0, 1.0)
    """
    if not values:
        return math.nan, math.nan
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return float(np.mean(values)), spread / math.sqrt(len(values))


def _counts(values: Numbers, low: Numbers, high: Numbers) -> Numbers:
    """How many values lie in each [low, high)."""
    ordered = np.sort(values.ravel())
    return np.searchsorted(ordered, high) - np.searchsorted(ordered, low)


ZEROS: Final = "zeros"
"""What needs no data and no budget: the answer 0, always."""

Build = Callable[..., Any]
"""Called with epsilon= and window=: a mechanism."""

_DATASET: Final = "stream"
_NO_LIMIT: Final = 10**9
_CHUNK: Final = 1 << 22  # counts fed at once: a wide stream is never held in memory twice


@dataclass(frozen=True, kw_only=True)
class Character:
    """How a stream moves, in units of the noise of publishing every step (w / epsilon).

    `step`: mean change of a count from one step to the next; `window`: within w steps; `level`:
    mean count. `count`: of how many publications per window noise and movement between them add up
    to least. `printed`: Figure 6 of "SPAS: Continuous Release of Data Streams under w-Event
    Differential Privacy", 2025, its sum of changes within a window over the variance of that noise.
    """

    step: float
    window: float
    level: float
    count: int
    printed: float
    width: int

    @classmethod
    def of(cls, block: Integers, *, epsilon: Amount, window: int) -> Character:
        """Of counts, steps x bins: it reads exact values, so it is for data that are no secret.

        >>> ramp = Character.of(np.arange(60)[:, None] * 50, epsilon=1, window=10)
        >>> ramp.step, ramp.window, ramp.count, ramp.words().partition(":")[0]
        (5.0, 50.0, 10, 'restless')
        >>> Character.of(np.full((60, 1), 50), epsilon=1, window=10).count
        1
        """
        noise = window / float(positive(epsilon, "epsilon"))
        data = block.astype(np.float64)
        span = min(window, max(len(data) - 1, 1))
        step, far = (
            float(np.abs(data[lag:] - data[:-lag]).mean() / noise) if len(data) > lag else 0.0
            for lag in (1, span)
        )
        return cls(
            step=step,
            window=far,
            level=float(data.mean() / noise),
            count=_best_publications(step, far, span, window),
            printed=step * (span - 1) / (2 * noise),
            width=window,
        )

    def words(self) -> str:
        """What that says about which mechanisms rank first."""
        if self.level * self.width < 1:
            return (
                "hidden: its counts are below the noise of one publication per window, so that "
                "answers near 0 are as good as any"
            )
        if 2 * self.count > self.width:
            return (
                "restless: a count moves so much from step to step that holding it costs more "
                "than noise, and uniform and its kind rank first"
            )
        if self.count == 1:
            return (
                "still: a count hardly moves further in a window than in a step, or not by more "
                "than noise, so that one publication per window is enough, and sample and its kind "
                "rank first"
            )
        return (
            f"between: about {self.count} publications per window of {self.width} would do, and "
            "whoever finds their number and place ranks first"
        )


def _best_publications(step: float, far: float, span: int, window: int) -> int:
    """Noise c / w, and movement over w / c steps as a power of their number, from both ends."""
    if not step or not far:
        return 1
    power = min(max(math.log(far / step) / math.log(span), 0.0), 1.0) if span > 1 else 1.0
    counts = np.arange(1, window + 1)
    held = window / counts
    errors = counts / window + step * held**power * (1 - 1 / held)
    return int(counts[int(np.argmin(errors))])


@dataclass(frozen=True, kw_only=True, eq=False)
class Score:
    """One run: errors by step, the share of steps paid for, the budget used, the time taken.

    `covered`: the share of counts within two of the published deviations, if there are any;
    `held_covered`: the same of steps that were held.
    """

    relative: Reals
    clamped: Reals  # relative errors of max(o, 0)
    absolute: Reals
    covered: float | None = None
    held_covered: float | None = None
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
            return mean_and_error([])
        figures = (getattr(score, figure) for score in self.scores)
        return mean_and_error([float(np.mean(each)) for each in figures if each is not None])

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
    results, total = Trials(mechanism=mechanism), positive(epsilon, "epsilon")
    construct: Build = build or find(mechanism)
    for run in range(runs):
        try:
            built = construct(epsilon=total, window=window)
            score = _run(built, mechanism, block, fixed_noise(fixed, run), bounded=bounded)
            results.scores.append(score)
        except BudgetExceeded as refusal:
            results.refusals.append(str(refusal))
    return results


def zeros(block: Integers) -> Trials:
    """The baseline without data, scored like a run."""
    nothing = np.zeros((1, 1), dtype=np.int64)
    relative = relative_errors(nothing, block)
    absolute = absolute_errors(nothing, block)
    counts = range_error(np.zeros_like(block), block) if block.shape[1] == 1 else None
    score = Score(relative=relative, clamped=relative, absolute=absolute, range_error=counts)
    return Trials(mechanism=ZEROS, scores=[score])


def _run(
    mechanism: Any, name: str, block: Integers, noise: dict[str, Any], *, bounded: bool
) -> Score:
    ledger, epsilon = Ledger(), Fraction(mechanism.epsilon)
    total = epsilon if bounded else epsilon * _NO_LIMIT
    ledger.open(_DATASET, Terms(unit="w_event", total=total, window=mechanism.window))
    runner = Runner(mechanism, ledger=ledger, dataset=_DATASET, name=name, **noise)
    seconds, paid, errors, released = 0.0, 0, [], []
    covered: dict[bool, list[float]] = {False: [], True: []}
    size = max(16, min(1024, _CHUNK // block.shape[1]))
    for first in range(0, len(block), size):
        chunk = block[first : first + size]
        began = time.perf_counter()
        releases = [release for batch in runner.feed(chunk) for release in batch]
        seconds += time.perf_counter() - began
        if len(releases) != len(chunk):
            raise InvalidParameter(f"{name} must release every step at once; it has a delay")
        values = np.array([release.values for release in releases])
        paid += sum(release.paid for release in releases)
        errors.append(
            (
                relative_errors(values, chunk),
                relative_errors(np.maximum(values, 0), chunk),
                absolute_errors(values, chunk),
            )
        )
        for each, truth in zip(releases, chunk, strict=True):
            if each.stddev is not None:
                within = np.abs(each.values - truth) <= 2.0 * each.stddev
                covered[each.held].append(float(within.mean()))
        if block.shape[1] == 1:
            released.append(values)
    relative, clamped, absolute = (np.concatenate(each) for each in zip(*errors, strict=True))
    (book,) = ledger.report()
    return Score(
        relative=relative,
        clamped=clamped,
        absolute=absolute,
        covered=_mean(covered[False] + covered[True]),
        held_covered=_mean(covered[True]),
        range_error=range_error(np.concatenate(released), block) if released else None,
        paid=paid / len(block),
        spent=float(Fraction(book["spent"]) / epsilon),
        seconds=seconds,
    )


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def fixed_noise(fixed: str | None, run: int) -> dict[str, Any]:
    """A secret and a run id made from a public name; without one, both are drawn afresh."""
    if fixed is None:
        return {}
    digest = blake2b(f"{fixed}, run {run}".encode(), digest_size=48).digest()
    return {"secret": digest[:32], "run_id": digest[32:]}
