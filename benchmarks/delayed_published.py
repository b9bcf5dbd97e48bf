"""Mechanisms with a delay as published: groups, orders, PeGaSuS, all as their paper prints them.

All are from Li, Qin, Ren, Gong, Feng, Hong, Wang, "Delay-allowed Differentially Private Data Stream
Release", 2025. Each says what its paper claims and what is true, and is charged for what is true; a
ledger that holds the claim refuses those that spend more. Releases are not clamped to the public
range, because the paper does not clamp them.

What is wrong with groups of similar values: dev(G) = sum |c_i - mean| is taken to move by Delta
when one value does. It moves by 2 Delta (1 - 1/n): the value's own term by Delta (1 - 1/n), the
n - 1 others by Delta / n each. With rho ~ Lap(2 Delta / eps_g) and nu ~ Lap(4 Delta / eps_g) the
tests of groups of at most n values therefore cost up to 2 (1 - 1/n) eps_g, not eps_g.

What is lost in truth lies between. A deviation never falls when a value joins: the mean moves by
|x - mean| / (n + 1), which lowers the others' terms by no more than the new term adds. So the tests
that push rho up are mostly the last ones, the failing test moves along with them, and the two
costs hardly add up. They do a little where early tests move up and the last one does not: the row
`contin_group_printed` of the audit computes 1.07 eps_g exactly. Nothing larger was found.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple, get_args

import numpy as np

from dpstream.audit.controls.published_mechanisms import THETA
from dpstream.compiled import njit
from dpstream.errors import InvalidParameter
from dpstream.mechanisms.base import SeriesMechanism, Spender, check_choice, whole
from dpstream.mechanisms.parts.batches import LabelledBatch, publish_groups
from dpstream.mechanisms.parts.grouping import GRID, History, Smoother, deviations, smooth
from dpstream.privacy.amounts import on_grid
from dpstream.privacy.ledger.charges import Cells
from dpstream.privacy.sensitivity import deviation_change, range_change
from dpstream.records import Integers, Reals, Release

Noise = Literal["reduce", "pp"]
"""Laplace noise on the sum of a group, or on each of its values."""


class OpenBatch(NamedTuple):
    """The batch so far, how many came before it, and the bound that values are cut at."""

    rows: tuple[Integers, ...] = ()
    batches: int = 0
    tau: int | None = None


class DelayBatch(NamedTuple):
    """One batch: steps x bins, its cells, the sensitivity of a value and the budget for noise.

    `raw`: before truncation.
    """

    block: Integers
    raw: Integers
    cells: Cells
    change: Fraction
    epsilon: Fraction


@dataclass(frozen=True, kw_only=True)
class PublishedSeries(SeriesMechanism, identity=None):
    """A share of epsilon (eps_g) finds structure in the values, the rest (eps_p) is for noise."""

    structure_share: ClassVar[Fraction]

    @cached_property
    def for_structure(self) -> Fraction:
        """eps_g."""
        return on_grid(self.budget * self.structure_share)

    @cached_property
    def for_noise(self) -> Fraction:
        """eps_p."""
        return on_grid(self.budget - self.for_structure)

    @cached_property
    def change(self) -> Fraction:
        """Delta, in grid steps."""
        return range_change(*self.range)


@dataclass(frozen=True, kw_only=True)
class PublishedBatch(PublishedSeries, ABC, identity=None, keys="delay truncate_every candidates"):
    """Batches of `delay` steps: a strategy spends eps_g on their structure, the noise has the rest.

    With `truncate_every` = n, every n-th batch chooses a bound tau with half of eps_p: report noisy
    max over `candidates` evenly spaced bounds, scored by equation 3, with noise Lap(1 / eps_s).
    Until the next choice values are cut at tau and count as changing by tau - lo.

    What is true of that: the score moves by 1 / m only (m values in the batch), so the choice has m
    times too much noise, and is sound. Where a strategy goes on reading raw values (as groups do in
    the public code) while its noise is scaled to tau - lo, it is not: one value can then move a
    deviation by 2 (hi - lo), and eps_g is overspent by up to 2 (hi - lo) / (tau - lo).
    """

    delay: int
    truncate_every: int = 0
    candidates: int = 1_000

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "delay", whole(self.delay, "delay", at_least=2))
        if not self.truncate_every:
            return
        object.__setattr__(
            self, "truncate_every", whole(self.truncate_every, "truncate_every", at_least=1)
        )

    @cached_property
    def ends(self) -> tuple[int, int]:
        """The bounds lo and hi, in grid steps."""
        lo, hi, quantum = self.range
        return int(lo / quantum), int(hi / quantum)

    def start(self) -> OpenBatch:
        """An empty batch."""
        return OpenBatch()

    def step(
        self, state: OpenBatch, x: Integers, spend: Spender
    ) -> tuple[OpenBatch, list[Release]]:
        """Hold the value back until its batch is full."""
        state = state._replace(rows=(*state.rows, x))
        return (state, []) if len(state.rows) < self.delay else self._publish(state, spend)

    def finish(self, state: OpenBatch, spend: Spender) -> tuple[OpenBatch, list[Release]]:
        """The last batch may be shorter."""
        return self._publish(state, spend) if state.rows else (state, [])

    @abstractmethod
    def values(self, batch: DelayBatch, spend: Spender) -> Reals:
        """What is published of one batch, in grid steps."""

    def _publish(self, state: OpenBatch, spend: Spender) -> tuple[OpenBatch, list[Release]]:
        raw, (_, batches, tau) = np.array(state.rows), state
        cells = Cells(first=spend.step - len(raw) + 1, last=spend.step)
        epsilon = self.for_noise
        if self.truncate_every and batches % self.truncate_every == 0:
            half = on_grid(epsilon / 2)
            tau, epsilon = self._choose(raw, half, cells, spend), on_grid(epsilon - half)
        lo, hi = self.ends
        top = hi if tau is None else tau
        batch = DelayBatch(np.minimum(raw, top), raw, cells, Fraction(top - lo), epsilon)
        values = self.values(batch, spend) * float(self.range[2])
        releases = [
            Release(step=cells.first + i, values=row, paid=True) for i, row in enumerate(values)
        ]
        return OpenBatch(batches=batches + 1, tau=tau), releases

    def _choose(self, raw: Integers, epsilon: Fraction, cells: Cells, spend: Spender) -> int:
        """tau, in grid steps; equation 3 on a grid so fine that rounding does not matter."""
        if raw.shape[1] != 1:
            raise InvalidParameter("truncation as published is for one bin; run bins one by one")
        lo, hi = self.ends
        taus = lo - np.unique(-np.arange(1, self.candidates + 1) * (hi - lo) // self.candidates)
        excess = np.maximum(raw[:, 0][None] - taus[:, None], 0).mean(axis=1)
        scores = (math.sqrt(2) * (hi - taus) / float(self.for_noise) - excess) / (hi - lo)
        grid = 1 << 20
        noisy = spend.laplace(
            np.rint(scores * grid).astype(np.int64),
            sensitivity=Fraction(grid),
            epsilon=epsilon,
            purpose="truncate",
            cells=cells,
        )
        return int(taus[np.argmax(noisy)])


def group_means(batch: DelayBatch, labels: Integers, spend: Spender, noise: Noise) -> Reals:
    """Every value replaced by the noisy mean of its group; `labels`: steps x bins."""
    labelled = LabelledBatch(
        block=batch.block, labels=labels, epsilon=batch.epsilon, cells=batch.cells
    )
    values, _ = publish_groups(
        labelled, spend, sensitivity=batch.change, publish=noise, smoother="mean"
    )
    return values


@dataclass(frozen=True, kw_only=True)
class ContinGroupPublished(PublishedBatch, identity="control/contin_group", keys="theta noise"):
    """Algorithm 6: successive values of a batch, grouped; the mean of each group with noise.

    Claim: event-level epsilon-DP, eps_g = epsilon / 5 for the tests.
    True: at most eps_p + 2 (1 - 1/delay) eps_g, just below 1.2 epsilon, which is what it is
        charged; at least eps_p + 1.07 eps_g (see above), with batches of 100.
    """

    theta: float = THETA
    noise: Noise = "reduce"
    structure_share: ClassVar[Fraction] = Fraction(1, 5)

    def values(self, batch: DelayBatch, spend: Spender) -> Reals:
        """Test, group, publish."""
        raw, size = batch.raw, batch.raw.size
        true_cost = on_grid(2 * self.for_structure * Fraction(self.delay - 1, self.delay))
        paid = spend.pay(
            raw, sensitivity=self.change, epsilon=true_cost, purpose="group", cells=batch.cells
        )
        rho, nu = (
            spend.laplace(
                np.zeros(size, np.int64),
                sensitivity=batch.change,
                epsilon=on_grid(self.for_structure / part),
                purpose=purpose,
                interval=paid,
            ).reshape(raw.shape)
            for part, purpose in ((2, "threshold"), (4, "test"))
        )
        labels = _successive(raw, rho, nu, self.theta / float(self.range[2]))
        return group_means(batch, labels, spend, self.noise)


@dataclass(frozen=True, kw_only=True)
class DiscontinGroupPublished(
    PublishedBatch, identity="control/discontin_group", keys="theta noise"
):
    """Algorithm 2: a value may join any group of its batch, the first whose test it passes.

    Claim: event-level epsilon-DP, with rho ~ Lap(2 (2w - 1) Delta / eps_g) for every group and
        nu ~ Lap(4 (2w - 1) Delta / eps_g) for every test.
    True: sound, with about four times the noise that is needed. The i-th value has at most i - 1
        tests of its own and is read by one test of every later value: w - 1 tests in all, each
        moved by 2 Delta at most. nu alone then costs (w - 1) / (2 (2w - 1)) eps_g, less than
        eps_g / 4, and rho protects nothing. It is charged what it claims.
    """

    theta: float = THETA
    noise: Noise = "reduce"
    structure_share: ClassVar[Fraction] = Fraction(1, 5)

    def values(self, batch: DelayBatch, spend: Spender) -> Reals:
        """Test, group, publish."""
        raw, (steps, bins) = batch.raw, batch.raw.shape
        paid = spend.pay(
            raw,
            sensitivity=self.change,
            epsilon=self.for_structure,
            purpose="group",
            cells=batch.cells,
        )
        tests = (steps * (steps - 1) // 2, bins)
        rho, nu = (
            spend.laplace(
                np.zeros(shape, np.int64),
                sensitivity=batch.change,
                epsilon=on_grid(self.for_structure / (part * (2 * self.delay - 1))),
                purpose=purpose,
                interval=paid,
            )
            for shape, part, purpose in (((steps, bins), 2, "threshold"), (tests, 4, "test"))
        )
        labels = _anywhere(raw, rho, nu, self.theta / float(self.range[2]))
        return group_means(batch, labels, spend, self.noise)


@njit(cache=True, nogil=True)
def _times_n(
    block: Integers, labels: Integers, label: int, row: int, column: int
) -> tuple[int, int]:
    """Size n and n dev of a group with the value at `row`, in whole numbers."""
    n, total = 1, block[row, column]
    for i in range(row):
        if labels[i, column] == label:
            n += 1
            total += block[i, column]
    dev = abs(n * block[row, column] - total)
    for i in range(row):
        if labels[i, column] == label:
            dev += abs(n * block[i, column] - total)
    return n, dev


@njit(cache=True, nogil=True)
def _successive(block: Integers, rho: Integers, nu: Integers, theta: float) -> Integers:
    """Number of each value's group; a value that fails is a group of its own."""
    labels = np.empty_like(block)
    for column in range(block.shape[1]):
        label, opened = 0, 0
        for row in range(len(block)):
            n, dev = _times_n(block, labels[:row], label, row, column)
            if dev + n * (nu[row, column] - rho[opened, column]) < n * theta:
                labels[row, column] = label
            else:
                labels[row, column] = label + 1
                label, opened = label + 2, row + 1
    return labels


@njit(cache=True, nogil=True)
def _anywhere(block: Integers, rho: Integers, nu: Integers, theta: float) -> Integers:
    """Number of each value's group: the first whose test it passes, or a new one."""
    labels = np.empty_like(block)
    for column in range(block.shape[1]):
        groups = test = 0
        for row in range(len(block)):
            joined = groups
            for label in range(groups):
                n, dev = _times_n(block, labels, label, row, column)
                noisy = dev + n * (nu[test, column] - rho[label, column])
                test += 1
                if noisy < n * theta:
                    joined = label
                    break
            labels[row, column] = joined
            groups = max(groups, joined + 1)
    return labels


Flags = Literal["text", "printed"]
StartingBounds = Literal["code", "text", "ends"]


class Past(NamedTuple):
    """The last values, exact and as published (newest last, bins in columns), and rho."""

    exact: Integers
    published: Reals
    rho: Integers


@dataclass(frozen=True, kw_only=True)
class CompOrderPublished(PublishedSeries, identity="control/comp_order", keys="delay flags bounds"):
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
    bounds: StartingBounds = "code"
    structure_share: ClassVar[Fraction] = Fraction(1, 4)
    constant_charges: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "delay", whole(self.delay, "delay", at_least=1))
        for name, kind in (("flags", Flags), ("bounds", StartingBounds)):
            if getattr(self, name) not in get_args(kind):
                known = ", ".join(get_args(kind))
                raise InvalidParameter(
                    f"{name} must be one of {known}; got {getattr(self, name)!r}"
                )

    @cached_property
    def for_rho(self) -> Fraction:
        """The scale 4 Delta / eps_g."""
        return on_grid(self.for_structure / 4)

    @cached_property
    def for_comparison(self) -> Fraction:
        """The scale 8 w Delta / eps_g."""
        return on_grid(self.for_structure / (8 * self.delay))

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

    def values(self, batch: DelayBatch, spend: Spender) -> Reals:
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


_LONGEST = 1_024  # steps of one group; with tests this noisy none comes near it


class OpenGroups(NamedTuple):
    """The open group of every bin: exact and noisy values, length, threshold noise."""

    exact: History
    noisy: History
    length: Integers
    rho: Integers


@dataclass(frozen=True, kw_only=True)
class PegasusPublished(PublishedSeries, identity="control/pegasus", keys="theta smoother"):
    """Algorithm 1: noise on every value, then the mean of what its group has so far.

    Claim: event-level epsilon-DP, eps_g = epsilon / 5 for the tests, whose noise is
        rho ~ Lap(2 Delta / eps_g) and nu ~ Lap(4 Delta / eps_g).
    True: at most eps_p + 2 eps_g = 1.2 epsilon, because a deviation moves by 2 Delta (1 - 1/n), and
        n has no limit here; that is what it is charged. At least eps_p + 1.07 eps_g (see
        the module's text).
    """

    theta: float = THETA
    smoother: Smoother = "mean"
    structure_share: ClassVar[Fraction] = Fraction(1, 5)
    constant_charges: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.smoother, "smoother", get_args(Smoother))

    @cached_property
    def true_cost(self) -> Fraction:
        """What the tests cost a value."""
        return 2 * self.for_structure

    @cached_property
    def moved(self) -> Fraction:
        """By how much a value moves a deviation, on its grid."""
        return deviation_change(self.change, grid=GRID)

    def start(self) -> OpenGroups | None:
        """The number of bins is not known yet."""
        return None

    def step(
        self, state: OpenGroups | None, x: Integers, spend: Spender
    ) -> tuple[OpenGroups, list[Release]]:
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
        state = OpenGroups(groups.exact.append(x), history, length, rho)
        return state, [Release(step=spend.step, values=values, paid=True)]


def _none(bins: int) -> OpenGroups:
    exact, noisy = (
        History.of(bins=bins, longest=_LONGEST, dtype=kind) for kind in (np.int64, np.float64)
    )
    zeros = np.zeros(bins, np.int64)
    return OpenGroups(exact, noisy, zeros, zeros)
