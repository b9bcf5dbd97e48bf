"""Independent instances for groups of columns, each with the whole of epsilon.

What is wrong: one event per step changes one column, so one step of one instance is within its
claim; but the instances pay at different steps, and a unit that is in another group at each step
meets the payments of all of them. FAST is published so, with a schedule per column (Fan, Xiong,
2014), and so are the column groups of budget distribution and budget absorption (Kellaris,
Papadopoulos, Xiao, Papadias, 2014, section 4.5). The ledger, which takes the worst bin of every
step, sees it.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from dpstream.mechanisms.base import HistogramMechanism, Spender
from dpstream.mechanisms.w_event.fast import FastW
from dpstream.privacy.charges import Cells
from dpstream.privacy.tokens import Interval, Paid
from dpstream.records import Integers, Release


class SomeColumns:
    """The door to noise for the columns `first` to `last` - 1: charges name their bins."""

    def __init__(self, spend: Spender, first: int, last: int) -> None:
        self._spend, self.step, self._columns = spend, spend.step, (first, last)

    def laplace(
        self,
        value: npt.ArrayLike,
        *,
        sensitivity: Fraction,
        epsilon: Fraction,
        purpose: str,
        cells: Cells | None = None,
        interval: Interval | Paid | None = None,
    ) -> Integers:
        """Noise of its own, charged to these columns alone."""
        return self._spend.laplace(
            value,
            sensitivity=sensitivity,
            epsilon=epsilon,
            purpose=f"{purpose} from {self._columns[0]}",
            cells=Cells(first=self.step, last=self.step, bins=(self._columns,)),
            interval=interval,
        )


@dataclass(frozen=True, kw_only=True)
class ColumnsApart(HistogramMechanism, identity="control/columns_apart", keys="scheme groups"):
    """An instance of `scheme` for each of `groups` groups of neighbouring columns (0: each column).

    >>> ColumnsApart(epsilon=1, window=20).scheme.__name__
    'FastW'
    """

    scheme: type[HistogramMechanism] = FastW
    groups: int = 0

    @cached_property
    def instance(self) -> Any:
        """The scheme, with the whole of epsilon."""
        return self.scheme(epsilon=self.epsilon, window=self.window)

    def start(self) -> tuple[Any, ...]:
        """The number of columns is not known yet."""
        return ()

    def step(
        self, state: tuple[Any, ...], x: Integers, spend: Spender
    ) -> tuple[tuple[Any, ...], list[Release]]:
        """One step of every instance."""
        count = min(self.groups or len(x), len(x))
        edges = [len(x) * i // count for i in range(count + 1)]
        states, parts = [], []
        for i, (first, last) in enumerate(pairwise(edges)):
            before = state[i] if state else self.instance.start()
            after, (release,) = self.instance.step(
                before, x[first:last], SomeColumns(spend, first, last)
            )
            states.append(after)
            parts.append(release)
        values = np.concatenate([part.values for part in parts])
        paid = any(part.paid for part in parts)
        return tuple(states), [Release(step=spend.step, values=values, paid=paid, held=not paid)]
