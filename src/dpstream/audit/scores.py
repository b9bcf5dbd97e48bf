"""Scores that an attacker learns: one number per run, large where the first world is likelier.

Each is learned on runs that no test uses afterwards. A score may be as poor as it likes; a poor one
finds a weaker bound, never a false one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

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
    middle = np.array([np.median(c) if c.size else 0.0 for c in _shown(both)])

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


def _shown(rows: Reals) -> list[Reals]:
    """Of each output, the values that were published."""
    return [column[~np.isnan(column)] for column in rows.T]


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
