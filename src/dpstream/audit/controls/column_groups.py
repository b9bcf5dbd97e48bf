"""Groups of columns, each with a budget of its own, as Kellaris et al. (2014) have them.

Claim: w-event epsilon-DP, because the groups' columns are disjoint. True: an event may lie in
another column each step. Groups publish at different steps, and a trajectory that is always in the
group which publishes meets more publications than any one group makes in a window: at w = 12 it
loses 1.48 epsilon with 2 groups, 3.5 epsilon with 12.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from dpstream.audit.replay import Recorder, drive, replay
from dpstream.mechanisms.base import HistogramMechanism, Spender
from dpstream.mechanisms.w_event.budget_distribution import BudgetDistribution
from dpstream.records import Integers, Release

_FAR = 10**6


@dataclass(frozen=True, kw_only=True)
class SeparateGroups(HistogramMechanism):
    """One BudgetDistribution for each column, side by side."""

    def start(self) -> list[Any]:
        """The number of columns is not known yet."""
        return []

    def step(
        self, state: list[Any], x: Integers, spend: Spender
    ) -> tuple[list[Any], list[Release]]:
        """Every column by itself."""
        one = BudgetDistribution(epsilon=self.epsilon, window=self.window)
        states, values, paid = [], [], False
        for column, old in enumerate(state or [one.start() for _ in x]):
            new, releases = one.step(old, x[column : column + 1], _Named(spend, f"{column}"))
            states.append(new)
            values.append(releases[0].values)
            paid |= releases[0].paid
        release = Release(step=spend.step, values=np.concatenate(values), paid=paid)
        return states, [release]


def trajectory_loss(window: int, groups: int) -> float:
    """Log ratio of one outcome's probabilities, for events that follow the publications.

    Each column publishes in turn, from step `window` on; before that all budgets come back.
    """
    mechanism = SeparateGroups(epsilon=1, window=window)
    start = 2 * window
    stream = np.zeros((start + window, groups), np.int64)
    events = stream.copy()
    for step in range(start, start + window):
        events[step, step % groups] += 1
    recorder = Recorder(_Outcome(start, groups))  # type: ignore[arg-type]
    drive(mechanism, stream, recorder)
    return float(replay(mechanism, events, recorder.calls).loss)


class _Named:
    """A spender whose purposes carry the name of a column."""

    def __init__(self, spend: Spender, name: str) -> None:
        self._spend, self._name, self.step = spend, name, spend.step

    def __getattr__(self, kind: str) -> Any:
        def ask(value: npt.ArrayLike, *, purpose: str, **facts: Any) -> Any:
            return getattr(self._spend, kind)(value, purpose=f"{self._name} {purpose}", **facts)

        return ask


class _Outcome:
    """Answers that noise could give: each column's comparison says yes in its turn, else no."""

    def __init__(self, start: int, groups: int) -> None:
        self._start, self._groups, self._step = start, groups, -1

    def begin(self, step: int, digest: Any) -> None:
        self._step = step

    def laplace(
        self, value: npt.ArrayLike, *, purpose: str, epsilon: Fraction, **_: Any
    ) -> Integers:
        exact, (column, kind) = np.asarray(value), purpose.split(maxsplit=1)
        if kind != "dissimilarity":
            return exact
        turn = self._step >= self._start and self._step % self._groups == int(column)
        return exact + (_FAR if turn else -_FAR)
