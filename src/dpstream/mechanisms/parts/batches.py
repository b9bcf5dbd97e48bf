"""Common to mechanisms that tell values apart before they publish them, and to batches of steps.

A batch is `delay` successive steps. They are published together with the last of them, the first
one `delay` - 1 steps late. What is left at the end of the stream is a shorter batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt

from dpstream.compiled import vectorize
from dpstream.errors import InvalidParameter
from dpstream.mechanisms.base import SeriesMechanism, Spender, check_choice, whole
from dpstream.mechanisms.parts.grouping import History, Smoother
from dpstream.privacy.amounts import Amount, on_grid, positive
from dpstream.privacy.ledger.charges import Cells, Paid
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals, Release


def posterior_median(
    z: npt.ArrayLike, scale: npt.ArrayLike, lo: npt.ArrayLike, hi: npt.ArrayLike
) -> Reals:
    """The median of m in [lo, hi] given z = m + Laplace(scale), element by element.

    If m is anywhere in [lo, hi] alike, its density given z is cut out of a Laplace density around
    z. The median is near z where the noise is small against the range, near the middle of the range
    where it is large, and never outside: no number has a smaller expected absolute error.

    Guarantee: post-processing; it reads a noisy number and public bounds.

    >>> posterior_median([5.0, 12.0, 5e9], [0.1, 0.1, 1e9], 0.0, 10.0).round(2).tolist()
    [5.0, 9.93, 5.0]
    """
    median: Reals = _median(*(np.asarray(given, np.float64) for given in (z, scale, lo, hi)))
    return median


@vectorize(cache=True)
def _median(z: float, scale: float, lo: float, hi: float) -> float:
    inside = min(max(z, lo), hi)  # beyond an edge the density no longer depends on z
    below, above = -math.expm1((lo - inside) / scale), -math.expm1((inside - hi) / scale)
    half = 0.5 * (below + above)
    if half <= below:
        median = inside + scale * math.log1p(half - below)
    else:
        median = inside - scale * math.log1p(below - half)
    return min(max(median, lo), hi)


Publish = Literal["reduce", "pp"]


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelledBatch:
    """Values and their public labels, both steps x bins, and `epsilon` to publish each with.

    `groups`: what the mechanism knows of the groups. `keep`: 0 for values that are not read
    (another question has had their budget); they get their group's number. Every group must keep
    one. `paid` has paid for all of it already.
    """

    block: Integers
    labels: Integers
    epsilon: Fraction
    cells: Cells
    groups: Any = None
    keep: Integers | None = None
    paid: Paid | None = None


def publish_groups(
    batch: LabelledBatch,
    spend: Spender,
    *,
    sensitivity: Fraction,
    publish: Publish,
    smoother: Smoother,
) -> tuple[Reals, Reals]:
    """A number for every value (steps x bins), and the scale of the noise in it.

    Guarantee: epsilon for every value that changes by at most `sensitivity`, given the labels,
    which are public: a value enters the sum of one group, or is published alone, and nothing else
    reads it. What the smoother makes of the noisy numbers is post-processing.
    """
    shape = batch.block.shape
    labels = batch.labels + (batch.labels.max(initial=0) + 1) * np.arange(shape[1])
    _, group = np.unique(labels.ravel(), return_inverse=True)
    read = np.ones(group.shape, bool) if batch.keep is None else batch.keep.ravel() != 0
    size = np.bincount(group[read], minlength=int(group.max()) + 1)
    measured = batch.block.ravel()[read]
    if publish == "reduce":
        sums = np.zeros(len(size), np.int64)
        np.add.at(sums, group[read], measured)
        measured = sums
    noisy = spend.laplace(
        measured,
        sensitivity=sensitivity,
        epsilon=batch.epsilon,
        purpose="publish",
        cells=None if batch.paid else batch.cells,
        interval=batch.paid,
    ).astype(np.float64)
    scale = float(sensitivity / batch.epsilon)
    if publish == "reduce":
        values, scales = (noisy / size)[group], scale / size
    else:
        values, scales = _centres(noisy, group[read], size, smoother)[group], scale / np.sqrt(size)
        if smoother == "james_stein":
            values[read] += (noisy - values[read]) / size[group[read]]
    return values.reshape(shape), scales[group].reshape(shape)


def _centres(noisy: Reals, group: Integers, size: Integers, smoother: Smoother) -> Reals:
    """The mean or median of each group."""
    if smoother != "median":
        mean: Reals = np.bincount(group, weights=noisy, minlength=len(size)) / size
        return mean
    ordered = noisy[np.lexsort((noisy, group))]
    first = np.concatenate(([0], np.cumsum(size)[:-1]))
    median: Reals = (ordered[first + (size - 1) // 2] + ordered[first + size // 2]) / 2
    return median


_SHARP = 8
"""Epsilon from which a value alone has noise of less than an eighth of the range."""

LONGEST = 1 << 20
"""Steps that may be held back: a state of that size is still written in a second."""


@dataclass(frozen=True, kw_only=True)
class DelayedMechanism(SeriesMechanism, identity=None, keys="delay"):
    """Each value is published at most `delay` steps after it came."""

    delay: int
    least_delay: ClassVar[int] = 1
    why_least: ClassVar[str] = "a batch has at least one step"

    def __post_init__(self) -> None:
        super().__post_init__()
        steps = whole(self.delay, "delay", at_least=0)
        if not self.least_delay <= steps <= LONGEST:
            reason = f"all values held back are kept, at most {LONGEST}"
            if steps < self.least_delay:
                reason = f"{type(self).__name__}: {self.why_least}"
            raise InvalidParameter(f"delay={steps} is not possible: {reason}")
        object.__setattr__(self, "delay", steps)


@dataclass(frozen=True, kw_only=True)
class SharedMechanism(SeriesMechanism, identity=None, keys="group_share shrink"):
    """Epsilon in two parts: `group_share` of it tells values apart, the rest publishes them.

    `shrink`: publish the median of what the noise leaves possible in [`lo`, `hi`] instead of the
    noisy number; free of charge, and never outside the range.
    """

    group_share: Amount = Fraction(1, 5)
    shrink: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        share = positive(self.group_share, "group_share")
        if share >= 1:
            raise InvalidParameter(
                f"group_share must be below 1, so that something is left to publish with; got "
                f"{self.group_share}"
            )
        object.__setattr__(self, "group_share", share)

    @cached_property
    def for_groups(self) -> Fraction:
        """eps_g, for what tells values apart."""
        return on_grid(self.budget * Fraction(self.group_share))

    @cached_property
    def for_values(self) -> Fraction:
        """eps_p, for publishing."""
        return self.budget - self.for_groups

    def shrink_and_scale(self, values: Reals, scale: npt.ArrayLike) -> Reals:
        """What is published for noisy numbers in grid steps, with noise of that scale."""
        lo, hi, quantum = self._bounds
        if self.shrink:
            values = posterior_median(values, scale, lo, hi)
        return values * quantum

    @cached_property
    def value_scale(self) -> float:
        """Of the noise in a value published with all of eps_p, in grid steps."""
        return float(self.change / self.for_values)

    @cached_property
    def _bounds(self) -> tuple[float, float, float]:
        """Of the range in grid steps, and a grid step."""
        lo, hi, quantum = (float(part) for part in self.range)
        return lo / quantum, hi / quantum, quantum


@storable("held values")
@dataclass(frozen=True, kw_only=True, eq=False)
class OpenBatch:
    """The exact values of the open batch, the groups they are in, and what the groups need."""

    values: History
    labels: History
    count: int
    groups: Any = None

    def append(self, x: Integers, label: Integers, groups: Any) -> OpenBatch:
        """With one step's values more."""
        values, labels = self.values.append(x), self.labels.append(label)
        return OpenBatch(values=values, labels=labels, count=self.count + 1, groups=groups)

    def contents(self) -> tuple[Integers, Integers]:
        """Values and labels, steps x bins."""
        return self.values.last(self.count).T, self.labels.last(self.count).T


@dataclass(frozen=True, kw_only=True)
class BatchMechanism(
    DelayedMechanism, SharedMechanism, ABC, identity=None, keys="publish smoother"
):
    """Values of a batch are labelled as they come or at its end, then published by label.

    `publish`: noise on the sum of each group ("reduce"), or on each value ("pp"), which the
    `smoother` then brings together: the group's "mean" or "median", or the noisy value pulled
    towards the mean ("james_stein").
    """

    publish: Publish = "reduce"
    smoother: Smoother = "mean"
    publishes_stddev: ClassVar[bool] = False
    labels_read_range: ClassVar[bool] = False
    """Do labels mean something by themselves, and not only which values go together?"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.publish, "publish", get_args(Publish))
        check_choice(self.smoother, "smoother", get_args(Smoother))
        if self.publish == "reduce" and self.smoother != "mean":
            raise InvalidParameter(
                f"smoother={self.smoother!r} needs publish='pp': a noisy sum has a mean only"
            )

    def step(
        self, state: OpenBatch | None, x: Integers, spend: Spender
    ) -> tuple[Any, list[Release]]:
        """Take a value in; at the end of a batch publish it."""
        batch = self.take(state or self.open_batch(len(x), self.no_groups(len(x))), x, spend)
        return self.close(batch, spend) if batch.count == self.delay else (batch, [])

    def finish(self, state: OpenBatch | None, spend: Spender) -> tuple[Any, list[Release]]:
        """The last batch, however short, in the same way."""
        if state is None or state.count == 0:
            return state, []
        return self.close(state, spend)

    def open_batch(self, bins: int, groups: Any = None) -> OpenBatch:
        """An empty batch."""
        values = History.of(bins=bins, longest=self.delay, dtype=np.int64)
        labels = History.of(bins=bins, longest=self.delay, dtype=np.int64)
        return OpenBatch(values=values, labels=labels, count=0, groups=groups)

    def close(self, batch: OpenBatch, spend: Spender) -> tuple[OpenBatch, list[Release]]:
        """Label what is not labelled yet, publish, and open the next batch."""
        block, labels = batch.contents()
        cells = Cells(first=spend.step - batch.count + 1, last=spend.step)
        labels = self.label(block, labels, cells, spend)
        groups = self.next_groups(batch.groups, labels)
        labelled = LabelledBatch(
            block=block, labels=labels, epsilon=self.for_values, cells=cells, groups=groups
        )
        values = self.answer(labelled, spend)
        return self.open_batch(block.shape[1], groups), releases(cells.first, values)

    def no_groups(self, bins: int) -> Any:
        """What the groups of the first batch need."""
        return None

    def next_groups(self, groups: Any, labels: Integers) -> Any:
        """What the groups of the next batch need, after those of this one."""
        return self.no_groups(labels.shape[1])

    def take(self, batch: OpenBatch, x: Integers, spend: Spender) -> OpenBatch:
        """One value more, with its label (0: not labelled yet)."""
        return batch.append(x, np.zeros_like(x), batch.groups)

    def label(self, block: Integers, labels: Integers, cells: Cells, spend: Spender) -> Integers:
        """The labels, public from here on."""
        return labels

    @abstractmethod
    def answer(self, batch: LabelledBatch, spend: Spender) -> Reals:
        """What is published for every value of a labelled batch; see `publish_groups`."""


@dataclass(frozen=True, kw_only=True)
class GroupedMechanism(BatchMechanism, identity=None, keys="threshold"):
    """With a `threshold`, tests; without, a batch is one group, or none if epsilon is large.

    A group of n values with deviation dev = sum |c - mean|, published by its mean, costs an
    absolute error of about dev and one noise; n values published alone cost n noises. But a test of
    dev has tens of times the noise of a value (its share of epsilon is smaller, its sensitivity
    larger), so where it could tell groups apart, the values alone would already be good, and where
    they are not, it tells nothing: no threshold makes tests worth their share.
    """

    threshold: Amount | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None:
            object.__setattr__(self, "threshold", positive(self.threshold, "threshold"))

    @property
    def tests(self) -> bool:
        """Are tests made?"""
        return self.threshold is not None

    @cached_property
    def theta(self) -> Fraction:
        """The threshold of a deviation, in grid steps."""
        return Fraction(self.threshold or 0) / self.range[2]

    @cached_property
    def for_values(self) -> Fraction:
        """eps_p: all of epsilon where no tests are made."""
        return self.budget - self.for_groups if self.tests else self.budget

    @property
    def together(self) -> int:
        """How many values usually share one noise, as far as that is public."""
        one_sum = not self.tests and self.publish == "reduce" and self.budget < _SHARP
        return self.delay if one_sum else 1

    def take(self, batch: OpenBatch, x: Integers, spend: Spender) -> OpenBatch:
        """One value more, in the group that its tests say."""
        if self.tests:
            return batch.append(x, *self.join(batch, x, spend))
        label = np.full_like(x, batch.count if self.budget >= _SHARP else 0)
        return batch.append(x, label, batch.groups)

    @abstractmethod
    def join(self, batch: OpenBatch, x: Integers, spend: Spender) -> tuple[Integers, Any]:
        """A label for every bin's value, and what the groups need from now on."""

    def answer(self, batch: LabelledBatch, spend: Spender) -> Reals:
        """Each group's mean with the noise of one sum, or its smoothed noisy values."""
        values, scale = publish_groups(
            batch, spend, sensitivity=self.change, publish=self.publish, smoother=self.smoother
        )
        return self.shrink_and_scale(values, scale)


def releases(first: int, values: Reals, stddev: Reals | None = None) -> list[Release]:
    """One release per row, from step `first` on."""
    spread = [None] * len(values) if stddev is None else list(stddev)
    return [
        Release(step=first + i, values=row, paid=True, stddev=spread[i])
        for i, row in enumerate(values)
    ]
