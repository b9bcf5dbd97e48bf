"""Orders as published: CompOrder's comparisons and BucOrder's buckets, both with too much noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple, get_args

import numpy as np

from dpstream.audit.controls.published_series import Batch, PublishedBatch, group_means
from dpstream.compiled import njit
from dpstream.errors import InvalidParameter
from dpstream.mechanisms.base import SeriesMechanism, Spender, whole
from dpstream.privacy.amounts import on_grid
from dpstream.privacy.sensitivity import range_change
from dpstream.records import Integers, Reals, Release

Flags = Literal["text", "printed"]
Bounds = Literal["code", "text", "ends"]


class Past(NamedTuple):
    """The last values, exact and as published (newest last, bins in columns), and rho."""

    exact: Integers
    published: Reals
    rho: Integers


@dataclass(frozen=True, kw_only=True)
class CompOrderPublished(SeriesMechanism, identity="control/comp_order", keys="delay flags bounds"):
    """Algorithms 3 and 4: noisy comparisons with the last `delay` values bound the next one.

    Where the noisy value is above the least of those that should be greater, or below the greatest
    of those that should be less, it is replaced by the middle of the two. No comparison with a
    later value is used, so nothing waits for the delay.

    `flags`: the text says that 0 means "greater than the next one"; "printed" follows Algorithm 4,
    which has them the other way round. `bounds`: what they are while there is nothing to take them
    from, which the paper leaves open. "code", as its public code: the lower one starts at lo, the
    upper one nowhere, and only bounds that cross are replaced by their middle; this comes nearest
    to the paper's figures. "text": neither starts anywhere, and both are needed for a middle.
    "ends": they start at lo and hi, the kindest reading.

    Claim: event-level epsilon-DP, eps_g = epsilon / 4 for comparisons with noise
        Lap(8 w Delta / eps_g) against one rho ~ Lap(4 Delta / eps_g) for the whole stream.
    True: sound, by another argument than the printed one: rho is shared by all comparisons and
        protects nothing, but a value takes part in 2w comparisons, each moved by Delta at most,
        whose own noise costs eps_g / 4 together. It is charged what it claims.
    """

    delay: int
    flags: Flags = "text"
    bounds: Bounds = "code"
    steady: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "delay", whole(self.delay, "delay", at_least=1))
        for name, kind in (("flags", Flags), ("bounds", Bounds)):
            if getattr(self, name) not in get_args(kind):
                known = ", ".join(get_args(kind))
                raise InvalidParameter(
                    f"{name} must be one of {known}; got {getattr(self, name)!r}"
                )

    @cached_property
    def for_structure(self) -> Fraction:
        """eps_g."""
        return on_grid(self.budget / 4)

    @cached_property
    def for_noise(self) -> Fraction:
        """eps_p."""
        return on_grid(self.budget - self.for_structure)

    @cached_property
    def for_rho(self) -> Fraction:
        """The scale 4 Delta / eps_g."""
        return on_grid(self.for_structure / 4)

    @cached_property
    def for_comparison(self) -> Fraction:
        """The scale 8 w Delta / eps_g."""
        return on_grid(self.for_structure / (8 * self.delay))

    @cached_property
    def change(self) -> Fraction:
        """Delta, in grid steps."""
        return range_change(*self.range)

    @cached_property
    def first_bounds(self) -> tuple[float, float]:
        """What the bounds are before any value counts, in grid steps."""
        lo, hi, quantum = (float(part) for part in self.range)
        low = -math.inf if self.bounds == "text" else lo / quantum
        return low, hi / quantum if self.bounds == "ends" else math.inf

    def start(self) -> Past | None:
        """The number of bins is not known yet."""
        return None

    def step(self, state: Past | None, x: Integers, spend: Spender) -> tuple[Past, list[Release]]:
        """Compare, perturb, align."""
        change, bins = self.change, len(x)
        paid = spend.pay(x, sensitivity=change, epsilon=self.for_structure, purpose="order")
        if state is None:
            zeros = np.zeros(bins, np.int64)
            rho = spend.laplace(
                zeros, sensitivity=change, epsilon=self.for_rho, purpose="rho", interval=paid
            )
            state = Past(np.zeros((0, bins), np.int64), np.zeros((0, bins)), rho)
        noisy = spend.laplace(x, sensitivity=change, epsilon=self.for_noise, purpose="publish")
        values = noisy.astype(np.float64)
        if len(state.exact):
            compared = spend.laplace(
                state.exact - x,
                sensitivity=change,
                epsilon=self.for_comparison,
                purpose="compare",
                interval=paid,
            )
            greater = (compared > state.rho) == (self.flags == "text")
            low, high = self.first_bounds
            values = _aligned(values, state.published, greater, low, high, self.bounds == "code")
        keep = max(0, len(state.exact) + 1 - self.delay)
        past = Past(
            np.vstack([state.exact[keep:], x]),
            np.vstack([state.published[keep:], values]),
            state.rho,
        )
        release = Release(step=spend.step, values=values * float(self.range[2]), paid=True)
        return past, [release]


@njit(cache=True, nogil=True)
def _aligned(
    noisy: Reals, published: Reals, greater: Integers, lowest: float, highest: float, crossing: bool
) -> Reals:
    """The noisy values, or the middle of their bounds where these say otherwise; bin by bin."""
    out = noisy.copy()
    for column in range(len(noisy)):
        low, high = lowest, highest
        for row in range(len(published)):
            if greater[row, column]:
                high = min(high, published[row, column])
            else:
                low = max(low, published[row, column])
        wrong = low > high if crossing else noisy[column] < low or noisy[column] > high
        if wrong and low > -math.inf and high < math.inf:
            out[column] = (low + high) / 2
    return out


@dataclass(frozen=True, kw_only=True)
class BucOrderPublished(PublishedBatch, identity="control/buc_order", keys="width"):
    """Algorithm 5: a randomised bucket for every value, the noisy mean of what has its label.

    The mean is then moved into its bucket. The text says so for the lower edge; the paper's figures
    are only reached with both, as in its public code, so both is what is done here.

    Claim: event-level epsilon-DP, eps_g = epsilon / 4 for the labels.
    True: sound: given the labels, each value is in one sum. But a value from anywhere in the range
        is summed under its label, so the noise is Lap(Delta / eps_p), as wide as the whole range,
        where a value clipped to its labelled bucket would need that of the bucket's width only.
    """

    width: int
    structure_share: ClassVar[Fraction] = Fraction(1, 4)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "width", whole(self.width, "width", at_least=1))

    @cached_property
    def buckets(self) -> int:
        """How many there are; the last may reach beyond hi."""
        return math.ceil(self.change / self.width)

    def values(self, batch: Batch, spend: Spender) -> Reals:
        """Label, sum, clamp to the bucket."""
        lo, _ = self.ends
        bucket = np.minimum((batch.block - lo) // self.width, self.buckets - 1)
        labels = spend.respond(
            bucket,
            buckets=self.buckets,
            epsilon=self.for_structure,
            purpose="label",
            cells=batch.cells,
        )
        means = group_means(batch, labels, spend, "reduce")
        low = lo + labels * self.width
        return np.clip(means, low, low + self.width)
