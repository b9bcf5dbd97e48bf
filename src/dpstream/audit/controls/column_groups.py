"""What instances for groups of columns lose: `ColumnsApart` over budget distribution.

Claim: w-event epsilon-DP, because the groups' columns are disjoint (Kellaris et al., 2014). True:
an event may lie in another column each step. Groups publish at different steps, and a trajectory
that is always in the group which publishes meets more publications than any one group makes in a
window: at w = 12 it loses 1.48 epsilon with 2 groups, 3.5 epsilon with 12.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dpstream.audit.controls.columns_apart import ColumnsApart
from dpstream.audit.replay import Recorder, drive, replay
from dpstream.mechanisms.w_event.budget_distribution import BudgetDistribution
from dpstream.records import Integers

_FAR = 10**6


def trajectory_loss(window: int, groups: int) -> float:
    """Log ratio of one outcome's probabilities, for events that follow the publications.

    Each column publishes in turn, after two windows in which all budgets come back. The outcome is
    one that noise can give, and the events move every draw in the direction of the noise, so that
    the costs of all draws add up.
    """
    mechanism = ColumnsApart(epsilon=1, window=window, scheme=BudgetDistribution)
    start = 2 * window
    stream = np.zeros((start + window, groups), np.int64)
    events = stream.copy()
    for step in range(start, start + window):
        events[step, step % groups] += 1
    recorder = Recorder(_Outcome(start, groups))  # type: ignore[arg-type]
    drive(mechanism, stream, recorder)
    return float(replay(mechanism, events, recorder.calls).loss)


class _Outcome:
    """Answers that noise could give: each column's comparison says yes in its turn, else no."""

    def __init__(self, start: int, groups: int) -> None:
        self._start, self._groups, self._step = start, groups, -1

    def begin(self, step: int, digest: Any) -> None:
        self._step = step

    def laplace(self, value: npt.ArrayLike, *, purpose: str, **_: Any) -> Integers:
        exact, (kind, _from, column) = np.asarray(value), purpose.rpartition(" from ")
        if kind != "dissimilarity":
            return exact
        turn = self._step >= self._start and self._step % self._groups == int(column)
        return exact + (_FAR if turn else -_FAR)
