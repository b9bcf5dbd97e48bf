"""Common to mechanisms that hold values back: the delay, the shares of epsilon, batches of steps.

A batch is `delay` successive steps. They are published together with the last of them, the first
one `delay` - 1 steps late. What is left at the end of the stream is a shorter batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar, get_args

import numpy as np
import numpy.typing as npt

from dpstream.errors import InvalidParameter
from dpstream.mechanisms.base import SeriesMechanism, Spender, whole
from dpstream.mechanisms.parts.flat_prior import posterior_median
from dpstream.mechanisms.parts.group_release import Payment, Publish, Smoother
from dpstream.mechanisms.parts.history import History
from dpstream.privacy.amounts import Amount, on_grid, positive
from dpstream.privacy.charges import Cells
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals, Release

LONGEST = 1 << 20
"""Steps that may be held back: a state of that size is still written in a second."""


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

    def settled(self, values: Reals, scale: npt.ArrayLike) -> Reals:
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


@dataclass(frozen=True, kw_only=True)
class DelayedMechanism(SharedMechanism, identity=None, keys="delay"):
    """Each value is published at most `delay` steps after it came."""

    delay: int
    least_delay: ClassVar[int] = 1
    why_least: ClassVar[str] = "a batch has at least one step"

    def __post_init__(self) -> None:
        super().__post_init__()
        why = f"{type(self).__name__}: {self.why_least}"
        object.__setattr__(self, "delay", checked_delay(self.delay, self.least_delay, why))


@storable("held values")
@dataclass(frozen=True, kw_only=True, eq=False)
class Held:
    """The exact values of the open batch, the groups they are in, and what the groups need."""

    values: History
    labels: History
    count: int
    groups: Any = None


@dataclass(frozen=True, kw_only=True)
class BatchMechanism(DelayedMechanism, ABC, identity=None, keys="publish smoother"):
    """Values of a batch are labelled as they come or at its end, then published by label.

    `publish`: noise on the sum of each group ("reduce"), or on each value ("pp"), which the
    `smoother` then brings together: the group's "mean" or "median", or the noisy value pulled
    towards the mean ("james_stein").
    """

    publish: Publish = "reduce"
    smoother: Smoother = "mean"
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

    def start(self) -> Held | None:
        """The number of bins is not known yet."""
        return None

    def step(self, state: Held | None, x: Integers, spend: Spender) -> tuple[Any, list[Release]]:
        """Take a value in; at the end of a batch publish it."""
        held = self.take(state or self.opened(len(x), self.no_groups(len(x))), x, spend)
        return self.close(held, spend) if held.count == self.delay else (held, [])

    def finish(self, state: Held | None, spend: Spender) -> tuple[Any, list[Release]]:
        """The last batch, however short, in the same way."""
        if state is None or state.count == 0:
            return state, []
        return self.close(state, spend)

    def opened(self, bins: int, groups: Any = None) -> Held:
        """An empty batch."""
        values = History.of(bins=bins, longest=self.delay, dtype=np.int64)
        labels = History.of(bins=bins, longest=self.delay, dtype=np.int64)
        return Held(values=values, labels=labels, count=0, groups=groups)

    def close(self, held: Held, spend: Spender) -> tuple[Held, list[Release]]:
        """Label what is not labelled yet, publish, and open the next batch."""
        block, labels = self.contents(held)
        cells = Cells(first=spend.step - held.count + 1, last=spend.step)
        labels = self.labelled(block, labels, cells, spend)
        groups = self.carried(held, labels)
        payment = Payment(epsilon=self.for_values, cells=cells)
        values = self.answer(block, labels, groups, payment, spend)
        return self.opened(block.shape[1], groups), releases(cells.first, values)

    def contents(self, held: Held) -> tuple[Integers, Integers]:
        """Values and labels of the open batch, steps x bins."""
        newest = slice(held.values.end - held.count, held.values.end)
        labels = slice(held.labels.end - held.count, held.labels.end)
        return held.values.block[:, newest].T, held.labels.block[:, labels].T

    def no_groups(self, bins: int) -> Any:
        """What the groups of the first batch need."""
        return None

    def carried(self, held: Held, labels: Integers) -> Any:
        """What the groups of the next batch need."""
        return self.no_groups(labels.shape[1])

    def take(self, held: Held, x: Integers, spend: Spender) -> Held:
        """One value more, with its label (0: not labelled yet)."""
        return Held(
            values=held.values.append(x),
            labels=held.labels.append(np.zeros_like(x)),
            count=held.count + 1,
            groups=held.groups,
        )

    def labelled(self, block: Integers, labels: Integers, cells: Cells, spend: Spender) -> Integers:
        """The labels, public from here on."""
        return labels

    @abstractmethod
    def answer(
        self,
        block: Integers,
        labels: Integers,
        groups: Any,
        payment: Payment,
        spend: Spender,
    ) -> Reals:
        """What is published for every value of a labelled batch (see `group_release`)."""


def releases(first: int, values: Reals, stddev: Reals | None = None) -> list[Release]:
    """One release per row, from step `first` on."""
    spread = [None] * len(values) if stddev is None else list(stddev)
    return [
        Release(step=first + i, values=row, paid=True, stddev=spread[i])
        for i, row in enumerate(values)
    ]


def checked_delay(delay: Any, least: int, why: str) -> int:
    """A delay that can be; another is refused with the reason."""
    steps = whole(delay, "delay", at_least=0)
    if not least <= steps <= LONGEST:
        reason = why if steps < least else f"all values held back are kept, at most {LONGEST}"
        raise InvalidParameter(f"delay={steps} is not possible: {reason}")
    return steps


def check_choice(value: str, name: str, known: Iterable[str]) -> None:
    """Refuse an unknown word."""
    if value not in known:
        raise InvalidParameter(f"{name} must be one of {', '.join(known)}; got {value!r}")
