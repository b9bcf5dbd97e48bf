"""PeGaSuS as the delay paper runs it: its tests have half the noise they need."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np

from dpstream.audit.controls.groups_published import THETA
from dpstream.mechanisms.base import SeriesMechanism, Spender
from dpstream.mechanisms.parts.grouping import GRID, deviations
from dpstream.mechanisms.parts.history import History
from dpstream.mechanisms.parts.smoothing import Smoother, check_smoother, smooth
from dpstream.privacy.amounts import on_grid
from dpstream.privacy.sensitivity import deviation_change, range_change
from dpstream.records import Integers, Release

_LONGEST = 1_024  # steps of one group; with tests this noisy none comes near it


class Groups(NamedTuple):
    """The open group of every bin: exact and noisy values, length, threshold noise."""

    exact: History
    noisy: History
    length: Integers
    rho: Integers


@dataclass(frozen=True, kw_only=True)
class PegasusPublished(SeriesMechanism, identity="control/pegasus", keys="theta smoother"):
    """Algorithm 1: noise on every value, then the mean of what its group has so far.

    Claim: event-level epsilon-DP, eps_g = epsilon / 5 for the tests, whose noise is
        rho ~ Lap(2 Delta / eps_g) and nu ~ Lap(4 Delta / eps_g).
    True: at most eps_p + 2 eps_g = 1.2 epsilon, because a deviation moves by 2 Delta (1 - 1/n), and
        n has no limit here; that is what it is charged. At least eps_p + 1.07 eps_g (see
        `groups_published`).
    """

    theta: float = THETA
    smoother: Smoother = "average"
    steady: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_smoother(self.smoother)

    @cached_property
    def for_structure(self) -> Fraction:
        """eps_g."""
        return on_grid(self.budget / 5)

    @cached_property
    def for_noise(self) -> Fraction:
        """eps_p."""
        return on_grid(self.budget - self.for_structure)

    @cached_property
    def change(self) -> Fraction:
        """Delta, in grid steps."""
        return range_change(*self.range)

    @cached_property
    def true_cost(self) -> Fraction:
        """What the tests cost a value."""
        return 2 * self.for_structure

    @cached_property
    def moved(self) -> Fraction:
        """By how much a value moves a deviation, on its grid."""
        return deviation_change(self.change, grid=GRID)

    def start(self) -> Groups | None:
        """The number of bins is not known yet."""
        return None

    def step(
        self, state: Groups | None, x: Integers, spend: Spender
    ) -> tuple[Groups, list[Release]]:
        """Perturb, test, smooth."""
        groups = state or _none(len(x))
        perturbed = spend.laplace(
            x, sensitivity=self.change, epsilon=self.for_noise, purpose="publish"
        )
        paid = spend.pay(x, sensitivity=self.change, epsilon=self.true_cost, purpose="group")
        dev = np.zeros(len(x), np.int64)
        dev[groups.length > 0] = deviations(
            groups.exact.block, groups.exact.end, groups.length, x, (1 << 62) // _LONGEST**2
        )
        # A threshold is drawn for every bin; only those that start a group take it. Scales
        # 2 Delta / eps_g and 4 Delta / eps_g are those of a true sensitivity of 2 Delta at eps_g.
        fresh, noisy = (
            spend.laplace(
                value, sensitivity=self.moved, epsilon=amount, purpose=purpose, interval=paid
            )
            for value, amount, purpose in (
                (np.zeros_like(dev), self.true_cost / 2, "threshold"),
                (dev, self.true_cost / 4, "test"),
            )
        )
        rho = np.where(groups.length == 0, fresh, groups.rho)
        joins = noisy - rho < self.theta / float(self.range[2]) * GRID
        length = np.where(joins, (groups.length + 1) % _LONGEST, 0)
        history = groups.noisy.append(perturbed)
        values = smooth(history, np.maximum(length, 1), self.smoother) * float(self.range[2])
        state = Groups(groups.exact.append(x), history, length, rho)
        return state, [Release(step=spend.step, values=values, paid=True)]


def _none(bins: int) -> Groups:
    exact, noisy = (
        History.of(bins=bins, longest=_LONGEST, dtype=kind) for kind in (np.int64, np.float64)
    )
    zeros = np.zeros(bins, np.int64)
    return Groups(exact, noisy, zeros, zeros)
