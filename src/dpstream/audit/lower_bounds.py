"""How much privacy was lost, at least: lower bounds on epsilon that hold with a stated confidence.

If a mechanism is (epsilon, delta)-DP then P[E] <= e^epsilon Q[E] + delta for every event E and both
orders of the neighbours. Runs of the two worlds are split: the first half teaches a score and
chooses one event {score >= threshold}; the second half, which no choice has seen, counts it. The
exact binomial bounds of Clopper and Pearson, each at half of the error, then give

    epsilon >= log((lowest P[E] - delta) / highest Q[E]),    delta >= lowest P[E] - e^epsilon Q[E].

Several pairs of neighbours tested at once share the error (Bonferroni).

A score is one number per run, large where the first world is likelier. An attacker learns it on
runs that no test uses afterwards; a poor score finds a weaker bound, never a false one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from scipy.stats import beta

from dpstream.records import Integers, Reals

Score: TypeAlias = Callable[[Reals], Reals]
"""Runs x outputs to one number per run. What was not published is NaN."""
Learner: TypeAlias = Callable[[Reals, Reals], Score | None]
"""From runs of both worlds to a score; None where it does not apply."""

_FEW = 64  # an output with no more different values is taken value by value
_PARTS = 24
_ROWS = 4096  # more different answers than these are not told apart as wholes
_RIDGE = 1e-9


def linear(one: Reals, two: Reals) -> Score:
    """The best direction if both worlds are Gaussian with one covariance (Fisher, 1936).

    Also the attack on noise that two outputs share: the direction in which it cancels has hardly
    any variance, and so all the weight.
    """
    both = np.concatenate([one, two])
    hidden = np.isnan(both).any(axis=0)
    shown = [column[~np.isnan(column)] for column in both.T]  # of each output: what was published
    middle = np.array([np.median(column) if column.size else 0.0 for column in shown])

    def shaped(rows: Reals) -> Reals:
        unseen = np.isnan(rows)
        filled = np.where(unseen, middle, rows) - middle
        return np.concatenate([filled, unseen[:, hidden].astype(np.float64)], axis=1)

    first, second = shaped(one), shaped(two)
    spread = (np.cov(first, rowvar=False) + np.cov(second, rowvar=False)) / 2
    spread = np.atleast_2d(spread)
    ridge = _RIDGE * max(float(np.trace(spread)), 1e-9)
    gap = first.mean(axis=0) - second.mean(axis=0)
    weights = np.linalg.solve(spread + ridge * np.eye(len(spread)), gap)
    return lambda rows: np.asarray(shaped(rows) @ weights)


def output_by_output(one: Reals, two: Reals) -> Score:
    """Sum over outputs of the log ratio of how often each value, or range of values, is seen.

    The likelihood ratio itself if outputs are independent.
    """
    tables = [_table(one[:, k], two[:, k]) for k in range(one.shape[1])]

    def score(rows: Reals) -> Reals:
        total = np.zeros(len(rows))
        for k, (edges, logs) in enumerate(tables):
            total += logs[_place(rows[:, k], edges)]
        return total

    return score


def as_a_whole(one: Reals, two: Reals) -> Score | None:
    """Log ratio of how often each complete answer is seen, if there are few different ones."""
    rows = np.concatenate([one, two])
    rows = np.where(np.isnan(rows), np.inf, rows)
    kinds, number = np.unique(rows, axis=0, return_inverse=True)
    if len(kinds) > _ROWS:
        return None
    number = number.reshape(-1)
    counts = [
        np.bincount(n, minlength=len(kinds)) for n in (number[: len(one)], number[len(one) :])
    ]
    logs = np.log((counts[0] + 0.5) / len(one)) - np.log((counts[1] + 0.5) / len(two))
    known = {row.tobytes(): float(log) for row, log in zip(kinds, logs, strict=True)}

    def score(asked: Reals) -> Reals:
        filled = np.where(np.isnan(asked), np.inf, asked)
        return np.array([known.get(row.tobytes(), 0.0) for row in filled])

    return score


def shifts(one: Reals, two: Reals) -> Score:
    """Log ratio if every output is a number that a unit moves, under Laplace noise of any scale.

    It learns three numbers of an output, where `output_by_output` learns two dozen: better where
    many outputs say a little each. One that always repeats another, as a table does that is shown
    again after a restart, counts once.
    """
    both = np.concatenate([one, two])
    _, once = np.unique(np.where(np.isnan(both), np.inf, both), axis=1, return_index=True)
    known = []
    for k in np.sort(once):
        first, second = (world[:, k][~np.isnan(world[:, k])] for world in (one, two))
        if len(first) and len(second):
            ends = float(np.median(first)), float(np.median(second))
            spread = np.abs(first - ends[0]).mean() + np.abs(second - ends[1]).mean()
            known.append((k, *ends, max(float(spread) / 2, _RIDGE)))

    def score(rows: Reals) -> Reals:
        total = np.zeros(len(rows))
        for k, here, there, scale in known:
            nearer = np.abs(rows[:, k] - there) - np.abs(rows[:, k] - here)
            total += np.nan_to_num(nearer / scale, nan=0.0)
        return total

    return score


LEARNERS: dict[str, Learner] = {
    "linear": linear,
    "output by output": output_by_output,
    "as a whole": as_a_whole,
}
MANY_OUTPUTS = LEARNERS | {"shifts": shifts}
"""Also for what publishes many numbers that a unit moves: the releases of a whole book."""


def _table(one: Reals, two: Reals) -> tuple[Reals, Reals]:
    """Edges of an output's ranges, and the log ratio of each; the last is for what is hidden."""
    both = np.concatenate([one, two])
    shown = both[~np.isnan(both)]
    values = np.unique(shown)
    if len(values) <= _FEW:
        edges = values[:-1] + np.diff(values) / 2
    else:
        edges = np.unique(np.quantile(shown, np.linspace(0, 1, _PARTS + 1)[1:-1]))
    counts = [
        np.bincount(_place(world, edges), minlength=len(edges) + 2) + 0.5 for world in (one, two)
    ]
    return edges, np.log(counts[0] / len(one)) - np.log(counts[1] / len(two))


def _place(column: Reals, edges: Reals) -> Integers:
    places = np.searchsorted(edges, column)
    return np.where(np.isnan(column), len(edges) + 1, places)


Counts: TypeAlias = Reals | int
_THRESHOLDS = 256


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


def clopper_pearson_lower(hits: Counts, runs: int, error: float) -> Reals:
    """The lower Clopper-Pearson bound on a probability; it is false with this error at most."""
    count = np.asarray(hits, dtype=np.float64)
    lower: Reals = np.where(count > 0, beta.ppf(error, np.maximum(count, 1), runs - count + 1), 0.0)
    return lower


def clopper_pearson_upper(hits: Counts, runs: int, error: float) -> Reals:
    """The upper Clopper-Pearson bound on a probability.

    >>> round(float(clopper_pearson_upper(0, 1000, 0.001)), 5)  # 1 - 0.001^(1/1000)
    0.00688
    """
    count = np.asarray(hits, dtype=np.float64)
    below = beta.ppf(1 - error, count + 1, np.maximum(runs - count, 1))
    upper: Reals = np.where(count < runs, below, 1.0)
    return upper


def epsilon_bounds(hits: Counts, other: Counts, runs: int, *, delta: float, error: float) -> Reals:
    """Lower bounds on epsilon from counts of events; 0 where they show nothing."""
    low = clopper_pearson_lower(hits, runs, error / 2) - delta
    high = clopper_pearson_upper(other, runs, error / 2)
    bounds: Reals = np.log(np.maximum(low, 1e-300) / high).clip(0)
    return bounds


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
        for order, p, q in (("one over two", first, second), ("two over one", -second, -first)):
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
        score=name, order=order, threshold=threshold, hits=hits, other_hits=other, runs=runs - half
    )
    return bound_from_event(event, epsilon=epsilon, delta=delta, error=error)


def bound_from_event(event: Event, *, epsilon: float, delta: float, error: float) -> Bound:
    """What an event's counts show; anybody can compute it again from a report."""
    counts = (event.hits, event.other_hits, event.runs)
    at_least = float(epsilon_bounds(*counts, delta=delta, error=error))
    low = float(clopper_pearson_lower(event.hits, event.runs, error / 2))
    high = float(clopper_pearson_upper(event.other_hits, event.runs, error / 2))
    stick = max(0.0, low - math.exp(min(epsilon, 700.0)) * high)
    return Bound(epsilon=at_least, delta=stick, event=event)


def _threshold(p: Reals, q: Reals, runs: int, *, delta: float, error: float) -> tuple[float, float]:
    """The threshold that promises most if the test's runs are like these, and what it promises."""
    both = np.sort(np.concatenate([p, q]))
    thresholds = np.unique(np.quantile(both, np.linspace(0, 1, _THRESHOLDS), method="nearest"))
    passing = (len(world) - np.searchsorted(np.sort(world), thresholds) for world in (p, q))
    hits, other = (
        np.asarray(count * (runs / len(world)), dtype=np.float64)
        for count, world in zip(passing, (p, q), strict=True)
    )
    promises = epsilon_bounds(hits, other, runs, delta=delta, error=error)
    at = int(np.argmax(promises))
    return float(promises[at]), float(thresholds[at])
