"""Compare with the last release, privately; publish with the step's budget where it pays.

`distance` and `BudgetWindow` serve every mechanism that holds; the rest is the common half of
budget distribution and budget absorption (Kellaris, Papadopoulos, Xiao, Papadias, "Differentially
Private Event Sequences over Infinite Streams", 2014, Figures 2 and 4): the two differ in how much a
step may spend, and in nothing else.

Guarantee: a step costs `test` for the comparison and, if anything is published, `budget`. The
groups' distances are disjoint in their columns, so one event moves one of them by at most one, and
the vector of all of them by one in L1; the same holds for the published counts. A step is thereby
charged once, with the maximum over groups. (Independent instances per group, as the paper has them,
overspend: their paid steps differ, and a trajectory through the groups meets all of them.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np

from dpstream.compiled import njit
from dpstream.mechanisms.base import HistogramMechanism, Spender, whole
from dpstream.privacy.amounts import laplace_stddev, on_grid, units
from dpstream.privacy.sensitivity import histogram_change
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals, Release


@storable("budget window")
@dataclass(frozen=True, kw_only=True)
class BudgetWindow:
    """Publication budgets of the last `width - 1` steps, newest last.

    It is a mechanism's own arithmetic and guarantees nothing; the ledger keeps its own books.

    >>> spent = BudgetWindow(width=3).pay(0, Fraction(1, 4))
    >>> spent.units_before(2) == units(Fraction(1, 4)), spent.units_before(3)
    (True, 0)
    """

    width: int
    entries: tuple[tuple[int, int, int], ...] = ()
    """(step, amount in grid units, all that was ever paid up to it)."""

    def units_before(self, step: int) -> int:
        """Spent in the steps that share a window of `width` with `step`, without it; grid units."""
        entries, first = self.entries, self._since(step - self.width + 1)
        if first == len(entries):
            return 0
        _, amount, total = entries[first]
        return entries[-1][2] - total + amount

    def pay(self, step: int, amount: Fraction) -> BudgetWindow:
        """The record after paying `amount` at `step`."""
        cost, total = units(amount), self.entries[-1][2] if self.entries else 0
        recent = self.entries[self._since(step - self.width + 2) :]  # matters at the next step
        return BudgetWindow(width=self.width, entries=(*recent, (step, cost, total + cost)))

    def steps(self, oldest: int) -> int:
        """How many payments were made from step `oldest` on."""
        return len(self.entries) - self._since(oldest)

    def first_step(self, oldest: int) -> int | None:
        """The first payment from step `oldest` on."""
        first = self._since(oldest)
        return self.entries[first][0] if first < len(self.entries) else None

    def _since(self, oldest: int) -> int:
        return bisect_left(self.entries, (oldest,))


@storable("column groups")
@dataclass(frozen=True, kw_only=True, eq=False)
class ColumnGroups:
    """Columns that change alike: a group number per column, and how much its releases have moved.

    Guarantee: post-processing; only released values are read.
    """

    group: Integers
    movement: Reals
    count: int

    def sums(self, distance: Integers) -> Integers:
        """Group totals of a per-column distance."""
        return np.bincount(self.group, weights=distance, minlength=self.count).astype(np.int64)

    def sizes(self) -> Integers:
        """Columns per group."""
        return np.bincount(self.group, minlength=self.count)

    def add_movement(self, old: Integers, new: Integers) -> ColumnGroups:
        """Remember how far releases moved (decayed mean square)."""
        movement = 0.9 * self.movement + 0.1 * np.square((new - old).astype(np.float64))
        return ColumnGroups(group=self.group, movement=movement, count=self.count)

    def regroup(self) -> ColumnGroups:
        """Columns sorted by movement, cut into groups of equal size."""
        rank = np.argsort(np.argsort(self.movement, kind="stable"), kind="stable")
        group = rank * self.count // len(rank)
        return ColumnGroups(group=group, movement=self.movement, count=self.count)


@njit(cache=True, nogil=True)
def distance(release: Integers, x: Integers) -> int:
    """How far counts are from the last release: L1, over all bins. One event moves it by one.

    >>> import numpy as np
    >>> distance(np.array([3, -1]), np.array([1, 4]))
    7
    """
    total = 0
    for j in range(len(x)):
        total += abs(release[j] - x[j])
    return total


@storable("published")
@dataclass(frozen=True, kw_only=True, eq=False)
class LastReleases:
    """The last release of every column, its error bar, and the columns' groups."""

    values: Integers
    stddev: Reals
    groups: ColumnGroups

    def release(self, step: int, *, paid: bool) -> Release:
        """What is published at `step`."""
        values = self.values.astype(np.float64)
        return Release(step=step, values=values, paid=paid, held=not paid, stddev=self.stddev)


def publish_all(
    x: Integers, spend: Spender, budget: Fraction, groups: ColumnGroups
) -> LastReleases:
    """Publish every column: the first step, with nothing to hold, or all columns as one group."""
    noisy = spend.laplace(x, sensitivity=histogram_change(), epsilon=budget, purpose="publish")
    stddev = np.full(len(x), laplace_stddev(histogram_change(), budget))
    return LastReleases(values=noisy, stddev=stddev, groups=groups)


def compare(last: LastReleases, x: Integers, spend: Spender, test: Fraction) -> Integers:
    """Noisy L1 distance of the counts from the last release, per group of columns."""
    if last.groups.count == 1:
        distances = np.array([distance(last.values, x)])
    else:
        distances = last.groups.sums(np.abs(last.values - x))
    return spend.laplace(
        distances, sensitivity=histogram_change(), epsilon=test, purpose="dissimilarity"
    )


def publish_groups(
    last: LastReleases, x: Integers, distances: Integers, spend: Spender, budget: Fraction
) -> tuple[LastReleases, bool]:
    """Publish the groups whose mean distance exceeds the error 1 / budget of publishing them."""
    over, under = budget.numerator, budget.denominator
    if last.groups.count == 1:
        if int(distances[0]) * over <= len(x) * under:
            return last, False
        return publish_all(x, spend, budget, last.groups), True
    sizes = last.groups.sizes()
    worth = np.array(
        [int(d) * over > int(n) * under for d, n in zip(distances, sizes, strict=True)]
    )
    chosen = worth[last.groups.group]
    if not chosen.any():
        return last, False
    noisy = spend.laplace(
        x[chosen], sensitivity=histogram_change(), epsilon=budget, purpose="publish"
    )
    values, stddev = last.values.copy(), last.stddev.copy()
    values[chosen] = noisy
    stddev[chosen] = laplace_stddev(histogram_change(), budget)
    groups = last.groups.add_movement(last.values, values)
    return LastReleases(values=values, stddev=stddev, groups=groups), True


Share = TypeVar("Share")


@dataclass(frozen=True, kw_only=True)
class PublishOrHold(HistogramMechanism, ABC, Generic[Share], identity=None, keys="groups"):
    """The parameters of both mechanisms, and what a comparison costs."""

    groups: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "groups", whole(self.groups, "groups", at_least=1))

    @abstractmethod
    def publication_share(self, test: Fraction) -> Share:
        """What is left for publications where every step's comparison costs `test`."""

    def split(self, columns: int) -> tuple[Fraction, Share]:
        """What a comparison costs, and what that leaves for publications.

        Comparisons take half of epsilon per window; with many columns (d >= 2 w) epsilon / d per
        step is enough, because the distance adds up over all of them while its noise does not
        (section 4.5 of the paper).
        """
        known = self._splits.get(columns)
        if known is None:
            test = on_grid(self.budget / max(columns, 2 * self.window))
            known = self._splits[columns] = (test, self.publication_share(test))
        return known

    @cached_property
    def _splits(self) -> dict[int, tuple[Fraction, Share]]:
        return {}

    def first_groups(self, columns: int) -> ColumnGroups:
        """Before anything is released: groups of neighbouring columns, equally large."""
        count = min(self.groups, columns)
        group = np.arange(columns) * count // columns
        return ColumnGroups(group=group, movement=np.zeros(columns), count=count)

    def regroup(self, last: LastReleases, step: int) -> LastReleases:
        """Form the groups anew at the start of every window."""
        if self.groups == 1 or step % self.window:
            return last
        return replace(last, groups=last.groups.regroup())
