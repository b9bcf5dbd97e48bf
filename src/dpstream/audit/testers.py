"""How much privacy was lost, at least: lower bounds on epsilon that hold with a stated confidence.

If a mechanism is (epsilon, delta)-DP then P[E] <= e^epsilon Q[E] + delta for every event E and both
orders of the neighbours. Runs of the two worlds are split: the first half teaches a score and
chooses one event {score >= threshold}; the second half, which no choice has seen, counts it. The
exact binomial bounds of Clopper and Pearson, each at half of the error, then give

    epsilon >= log((lowest P[E] - delta) / highest Q[E]),    delta >= lowest P[E] - e^epsilon Q[E].

Several pairs of neighbours tested at once share the error (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from scipy.stats import beta

from dpstream.audit.scores import LEARNERS, Learner, Score
from dpstream.records import Reals

_THRESHOLDS = 256

Counts: TypeAlias = Reals | int


@dataclass(frozen=True, kw_only=True)
class Event:
    """{score >= threshold}, counted in `runs` runs of each world.

    `order`: "one over two" if world one should see it more often, else "two over one".
    """

    score: str
    order: str
    threshold: float
    hits: int
    other_hits: int
    runs: int


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What one event shows."""

    epsilon: float
    delta: float
    """At the claimed epsilon: the hockey-stick divergence, from below."""
    event: Event


def at_least(hits: Counts, runs: int, error: float) -> Reals:
    """A probability that is passed with this error only, by Clopper and Pearson."""
    count = np.asarray(hits, dtype=np.float64)
    found: Reals = np.where(count > 0, beta.ppf(error, np.maximum(count, 1), runs - count + 1), 0.0)
    return found


def at_most(hits: Counts, runs: int, error: float) -> Reals:
    """As `at_least`, from above.

    >>> round(float(at_most(0, 1000, 0.001)), 5)  # 1 - 0.001^(1/1000)
    0.00688
    """
    count = np.asarray(hits, dtype=np.float64)
    below = beta.ppf(1 - error, count + 1, np.maximum(runs - count, 1))
    found: Reals = np.where(count < runs, below, 1.0)
    return found


def epsilon_bounds(hits: Counts, other: Counts, runs: int, *, delta: float, error: float) -> Reals:
    """Lower bounds on epsilon from counts of events; 0 where they show nothing."""
    low = at_least(hits, runs, error / 2) - delta
    high = at_most(other, runs, error / 2)
    found: Reals = np.log(np.maximum(low, 1e-300) / high).clip(0)
    return found


def lower_bound(
    one: Reals,
    two: Reals,
    *,
    epsilon: float,
    delta: float,
    error: float,
    learners: Mapping[str, Learner] = LEARNERS,
) -> Bound:
    """The bound that runs of both worlds support, `error` the chance that it is false."""
    runs = min(len(one), len(two))
    learn, half = runs // 4, runs // 2
    best: tuple[float, str, str, float, Score] | None = None
    for name, learner in learners.items():
        score = learner(one[:learn], two[:learn])
        if score is None:
            continue
        first, second = score(one[learn:half]), score(two[learn:half])
        for order, p, q in (
            ("one over two", first, second),
            ("two over one", -second, -first),
        ):
            promise, threshold = _threshold(p, q, runs - half, delta=delta, error=error)
            if best is None or promise > best[0]:
                best = promise, name, order, threshold, score
    assert best is not None
    _, name, order, threshold, score = best
    worlds = score(one[half:runs]), score(two[half:runs])
    if order == "two over one":
        worlds = -worlds[1], -worlds[0]
    hits, other = (int((world >= threshold).sum()) for world in worlds)
    event = Event(
        score=name,
        order=order,
        threshold=threshold,
        hits=hits,
        other_hits=other,
        runs=runs - half,
    )
    return bound_of(event, epsilon=epsilon, delta=delta, error=error)


def bound_of(event: Event, *, epsilon: float, delta: float, error: float) -> Bound:
    """What an event's counts show; anybody can compute it again from a report."""
    counts = (event.hits, event.other_hits, event.runs)
    found = float(epsilon_bounds(*counts, delta=delta, error=error))
    low = float(at_least(event.hits, event.runs, error / 2))
    high = float(at_most(event.other_hits, event.runs, error / 2))
    stick = max(0.0, low - math.exp(min(epsilon, 700.0)) * high)
    return Bound(epsilon=found, delta=stick, event=event)


def _threshold(p: Reals, q: Reals, runs: int, *, delta: float, error: float) -> tuple[float, float]:
    """The threshold that promises most if the test's runs are like these, and what it promises."""
    both = np.sort(np.concatenate([p, q]))
    thresholds = np.unique(np.quantile(both, np.linspace(0, 1, _THRESHOLDS), method="nearest"))
    hits, other = (_expected(world, thresholds, runs) for world in (p, q))
    promises = epsilon_bounds(hits, other, runs, delta=delta, error=error)
    at = int(np.argmax(promises))
    return float(promises[at]), float(thresholds[at])


def _expected(world: Reals, thresholds: Reals, runs: int) -> Reals:
    """How many of `runs` runs should pass each threshold."""
    passing = len(world) - np.searchsorted(np.sort(world), thresholds)
    return np.asarray(passing * (runs / len(world)), dtype=np.float64)
