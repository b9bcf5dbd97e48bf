"""What a mechanism is: parameters in a frozen dataclass, state passed in and out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.privacy.amounts import Amount, exact, positive
from dpstream.privacy.ledger.charges import Cells, Cover, Interval, Paid, Terms
from dpstream.privacy.sensitivity import histogram_change, range_change
from dpstream.privacy.state.identity import Identified
from dpstream.records import Integers, Reals, Release

_LARGEST = 1 << 53  # beyond it float64, in which releases leave, has no exact integers


def as_block(data: Any) -> Reals:
    """Anything array-like as steps x bins; a flat sequence is one bin.

    >>> as_block([3, 1, 4]).shape, as_block([[3, 1], [4, 1]]).shape
    ((3, 1), (2, 2))
    """
    if isinstance(data, Sequence) and data and isinstance(data[0], Sequence | np.ndarray):
        widths = [len(row) if hasattr(row, "__len__") else 0 for row in data]
        row = next((i for i, width in enumerate(widths) if width != widths[0]), None)
        if row is not None:
            raise InvalidInput(
                f"rows must all have {widths[0]} bins; row {row} has {widths[row]}; "
                "write 0 for a bin without events"
            )
    try:
        array = np.asarray(data)
    except ValueError as problem:
        raise InvalidInput(f"the data must be a rectangular array of numbers; {problem}") from None
    if array.dtype.kind not in "biuf":
        raise InvalidInput(
            f"the data must be numbers; got dtype {array.dtype}; "
            "did you forget to leave out a text or time column?"
        )
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2 or array.shape[1] == 0:
        raise InvalidInput(f"the data must be steps x bins; got shape {array.shape}")
    return array.astype(np.float64)


def check_counts(block: Reals) -> Integers:
    """Whole, non-negative numbers as int64; the first offender is named."""
    refuse_nan(block)
    bad = (block < 0) | (block != np.rint(block)) | (block >= _LARGEST)
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        value = block[row, column]
        problem = "negative" if value < 0 else "too large" if value >= _LARGEST else "not whole"
        raise InvalidInput(
            f"a histogram needs whole counts from 0 to 2^53; row {row}, bin {column} is "
            f"{problem}: {value:g}; for other numbers use an event-level mechanism with lo and hi"
        )
    return block.astype(np.int64)


def clamp_to_grid(block: Reals, lo: Fraction, hi: Fraction, quantum: Fraction) -> Integers:
    """Numbers clamped to a public range, as whole multiples of `quantum`."""
    refuse_nan(block)
    grid = np.rint(np.clip(block, float(lo), float(hi)) / float(quantum))
    return np.clip(grid.astype(np.int64), int(lo / quantum), int(hi / quantum))


def refuse_nan(block: Reals) -> None:
    """NaN and infinite values have no place on a grid."""
    bad = ~np.isfinite(block)
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        raise InvalidInput(
            f"row {row}, bin {column} is {block[row, column]}; every step needs a finite number; "
            "fill missing steps before releasing (with a public constant)"
        )


class Spender(Protocol):
    """`privacy.spend.Spend` as a mechanism sees it; the auditor has a recording twin."""

    step: int

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
        """`value` plus discrete Laplace noise."""

    def gaussian(
        self,
        value: npt.ArrayLike,
        *,
        sensitivity: Fraction,
        rho: Fraction,
        purpose: str,
        cells: Cells | None = None,
        cover: Cover | None = None,
    ) -> Integers:
        """`value` plus discrete Gaussian noise."""

    def cover(self, amount: Fraction, *, last: int, purpose: str = "cover") -> Cover:
        """One charge for all Gaussian noise up to step `last`."""

    def choose(
        self,
        scores: npt.ArrayLike,
        *,
        sensitivity: Fraction,
        epsilon: Fraction,
        purpose: str,
        cells: Cells | None = None,
        interval: Paid | None = None,
    ) -> int:
        """An index, better scores more likely."""

    def respond(
        self,
        bucket: npt.ArrayLike,
        *,
        buckets: int,
        epsilon: Fraction,
        purpose: str,
        cells: Cells | None = None,
    ) -> Integers:
        """Randomised bucket numbers."""

    def pay(
        self,
        value: npt.ArrayLike,
        *,
        sensitivity: Fraction,
        epsilon: Fraction,
        purpose: str,
        cells: Cells | None = None,
    ) -> Paid:
        """A charge for values that later draws read; draws nothing."""

    def open_interval(self, epsilon: Fraction, *, purpose: str = "interval") -> Interval:
        """Start a test that stays open."""

    def close_interval(self, interval: Interval) -> None:
        """End it."""


@runtime_checkable
class Mechanism(Protocol):
    """One algorithm. `step` takes integers on the mechanism's grid and may release any steps."""

    @property
    def epsilon(self) -> Amount | None:
        """The budget that it was given; None: in other terms, such as rho."""

    constant_charges: ClassVar[bool]
    """True if every step makes the same charges, so that a batch of them is one ledger entry."""

    def terms(self) -> Terms:
        """The promise it keeps on its own: what a book of one release must allow."""

    def check(self, block: Reals) -> Integers:
        """Rows of raw numbers to rows on the grid; what cannot be used is refused."""

    def start(self) -> Any:
        """The state before the first step."""

    def step(self, state: Any, x: Integers, spend: Spender) -> tuple[Any, list[Release]]:
        """Take the next step's values; return the new state and what may be published now."""

    def finish(self, state: Any, spend: Spender) -> tuple[Any, list[Release]]:
        """The stream has ended: release what a delay still holds back."""


@runtime_checkable
class Delayed(Protocol):
    """A mechanism that publishes a step up to `delay` steps after it came."""

    @property
    def delay(self) -> int:
        """In steps."""


Remembers = Literal["releases", "answers", "thresholds", "data"]
"""What a mechanism's state between two steps is a function of, beside public parameters.

`releases`: what was published. `answers`: noisy answers that were paid for, each in full, and of
which a release may show less. `thresholds`: also noise that the proof keeps secret. `data`: exact
values too.
"""


class MechanismBase(Identified, identity=None):
    """What most mechanisms have in common: charges that may vary, and no delay."""

    constant_charges: ClassVar[bool] = False
    remembers: ClassVar[Remembers] = "data"
    publishes_stddev: ClassVar[bool] = True
    """False: its errors depend on the data, so that nothing can be said about them."""

    def start(self) -> Any:
        """Nothing yet: the first step tells the number of bins."""
        return None

    def finish(self, state: Any, spend: Spender) -> tuple[Any, list[Release]]:
        """Nothing is held back."""
        return state, []


@dataclass(frozen=True, kw_only=True)
class HistogramMechanism(MechanismBase, identity=None, keys="epsilon window"):
    """Common to mechanisms over counts per step: w-event privacy, one event moves one count by 1.

    `epsilon` is spent within any `window` successive steps.
    """

    epsilon: Amount
    window: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", positive(self.epsilon, "epsilon"))
        object.__setattr__(self, "window", whole(self.window, "window", at_least=1))

    @cached_property
    def budget(self) -> Fraction:
        """epsilon, exactly."""
        return Fraction(self.epsilon)

    def terms(self) -> Terms:
        """w-event epsilon-DP."""
        return Terms(unit="w_event", total=self.budget, window=self.window)

    def check(self, block: Reals) -> Integers:
        """Counts are whole and not negative."""
        return check_counts(block)

    def perturb(self, x: Integers, epsilon: Fraction, spend: Spender) -> Integers:
        """A step's counts with the noise that `epsilon` pays for."""
        return spend.laplace(x, sensitivity=histogram_change(), epsilon=epsilon, purpose="publish")


@dataclass(frozen=True, kw_only=True)
class SeriesMechanism(MechanismBase, identity=None, keys="epsilon lo hi quantum"):
    """Common to mechanisms over numbers in a public range: event level, one value may change.

    Values outside [`lo`, `hi`] are clamped, then rounded to multiples of `quantum`.
    """

    epsilon: Amount
    lo: Amount
    hi: Amount
    quantum: Amount = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", positive(self.epsilon, "epsilon"))
        object.__setattr__(self, "quantum", positive(self.quantum, "quantum"))
        for name in ("lo", "hi"):
            object.__setattr__(self, name, exact(getattr(self, name), name))
        range_change(*self.range)

    @cached_property
    def budget(self) -> Fraction:
        """epsilon, exactly."""
        return Fraction(self.epsilon)

    @cached_property
    def range(self) -> tuple[Fraction, Fraction, Fraction]:
        """lo, hi and quantum, exactly."""
        return Fraction(self.lo), Fraction(self.hi), Fraction(self.quantum)

    @cached_property
    def grid_range(self) -> tuple[int, int]:
        """Lo and hi in grid steps."""
        lo, hi, quantum = self.range
        return int(lo / quantum), int(hi / quantum)

    @cached_property
    def change(self) -> Fraction:
        """Grid steps by which one value can move."""
        return range_change(*self.range)

    def terms(self) -> Terms:
        """Event-level epsilon-DP."""
        change = f"one value within [{self.lo}, {self.hi}]"
        return Terms(unit="event", total=self.budget, change=change)

    def check(self, block: Reals) -> Integers:
        """Clamp to the public range and round to the grid."""
        return clamp_to_grid(block, *self.range)


def release_or_hold(step: int, values: Integers | Reals, *, paid: bool, stddev: float) -> Release:
    """What was published with this step's budget (`paid`), or an earlier release once more."""
    return Release(
        step=step,
        values=values.astype(np.float64),
        paid=paid,
        held=not paid,
        stddev=np.full(values.shape, stddev),
    )


def whole(value: Any, name: str, *, at_least: int) -> int:
    """A whole-number parameter."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = at_least - 1
    if isinstance(value, bool) or number != value or number < at_least:
        raise InvalidParameter(
            f"{name} must be a whole number of at least {at_least}; got {value!r}"
        )
    return number


def check_choice(value: str, name: str, known: Iterable[str]) -> None:
    """Refuse an unknown word."""
    if value not in known:
        raise InvalidParameter(f"{name} must be one of {', '.join(known)}; got {value!r}")
