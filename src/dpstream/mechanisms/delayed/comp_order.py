"""Compare every value with its neighbours, and let the answers correct the noisy values.

A value x in [0, 1] is known to be about z, with a Laplace density of some scale, and is compared
with others that are known to be about y_1, y_2, ...: the answer to "is x > y?" is right more often
the further they are apart. The range is cut into `CELLS` cells; within a cell the answers do not
tell values apart, the density around z does. Published is the median of what is possible, which is
post-processing: it reads noisy values, noisy answers and public scales.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from dpstream.compiled import njit
from dpstream.mechanisms.base import Spender
from dpstream.mechanisms.parts.batches import DelayedMechanism, SharedMechanism
from dpstream.mechanisms.parts.block_filter import Beliefs
from dpstream.mechanisms.parts.grouping import History
from dpstream.privacy.sensitivity import comparison_change
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals, Release

CELLS = 48

_SQRT2 = math.sqrt(2.0)


def log_chances(scale: float) -> Reals:
    """[a, b]: log of the chance that a value in cell a, with noise, beats one in cell b."""
    cell = np.arange(CELLS) / CELLS
    d = cell[:, None] - cell[None, :]
    tail = np.log(0.5) - np.abs(d) / scale  # of the wrong answer
    chances: Reals = np.where(d >= 0, np.log1p(-np.exp(tail)), tail)
    return chances


@njit(cache=True, nogil=True, error_model="numpy")
def cell_median(z: float, scale: float, above: Integers, below: Integers, chances: Reals) -> float:
    """The median of x: `above[b]` values of cell b were said to be smaller, `below[b]` larger."""
    weight, mass, at = np.zeros(CELLS), np.empty(CELLS), min(max(z, 0.0), 1.0)
    for b in range(CELLS):
        if above[b] == 0 and below[b] == 0:
            continue
        for a in range(CELLS):
            weight[a] += above[b] * chances[a, b] + below[b] * chances[b, a]
    top = -math.inf
    for a in range(CELLS):
        top = max(top, weight[a])
    total, low_density = 0.0, _density(0.0, at, scale)
    for a in range(CELLS):
        high_density = _density((a + 1) / CELLS, at, scale)
        weight[a] = math.exp(weight[a] - top)
        mass[a] = weight[a] * _between(a / CELLS, (a + 1) / CELLS, at, low_density, high_density)
        low_density = high_density
        total += mass[a]
    if total <= 0.0:
        return at
    left, a = 0.5 * total, 0
    while a < CELLS - 1 and left > mass[a]:
        left -= mass[a]
        a += 1
    first, low, high = a / CELLS, a / CELLS, (a + 1) / CELLS
    low_density = _density(first, at, scale)
    for _ in range(40):
        middle = 0.5 * (low + high)
        between = _between(first, middle, at, low_density, _density(middle, at, scale))
        if weight[a] * between < left:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


@njit(cache=True, nogil=True, error_model="numpy")
def _density(x: float, z: float, scale: float) -> float:
    """exp(-|x - z| / scale)."""
    return math.exp((x - z if x <= z else z - x) / scale)


@njit(cache=True, nogil=True)
def _between(low: float, high: float, z: float, low_density: float, high_density: float) -> float:
    """Of exp(-|x - z| / scale) / scale between two numbers, from its `_density` at both."""
    if high <= z:
        return high_density - low_density
    if low >= z:
        return low_density - high_density
    return 2.0 - low_density - high_density


@njit(cache=True, nogil=True)
def align(
    row: int,
    values: Reals,
    spread: Reals,
    published: Reals,
    published_end: int,
    answers: Integers,
    first: int,
    chances: Reals,
    weighed: bool,
    out: Reals,
) -> None:
    """Where to put the value `row` of each bin, in shares of the range.

    `values` (steps x bins): what is known of it and of those after it; `spread`: the deviation.
    `published` (bins x columns, up to `published_end`): those before it. `answers`: its own are
    column `first`, then those of the values after it; rows are bins x "k + 1 steps before".
    """
    bins = len(out)
    asked = answers.shape[0] // bins
    above, below = np.empty(CELLS, np.int64), np.empty(CELLS, np.int64)
    for j in range(bins):
        for cell in range(CELLS):
            above[cell] = below[cell] = 0
        largest_below, smallest_above = -math.inf, math.inf
        for k in range(min(published_end, asked)):
            y, answer = published[j, published_end - 1 - k], answers[j * asked + k, first]
            if answer == 0:
                continue
            cell = min(max(int(y * CELLS), 0), CELLS - 1)
            if answer > 0:
                above[cell] += 1
                largest_below = max(largest_below, y)
            else:
                below[cell] += 1
                smallest_above = min(smallest_above, y)
        for k in range(len(values) - 1 - row):
            y, answer = values[row + 1 + k, j], answers[j * asked + k, first + 1 + k]
            if answer == 0:
                continue
            cell = min(max(int(y * CELLS), 0), CELLS - 1)
            if answer < 0:
                above[cell] += 1
            else:
                below[cell] += 1
        value = values[row, j]
        if weighed:
            out[j] = cell_median(value, max(spread[row, j] / _SQRT2, 1e-9), above, below, chances)
        elif largest_below <= value <= smallest_above:
            out[j] = value
        elif largest_below == -math.inf:
            out[j] = smallest_above
        elif smallest_above == math.inf:
            out[j] = largest_below
        else:
            out[j] = 0.5 * (largest_below + smallest_above)


@storable("compared values")
@dataclass(frozen=True, kw_only=True, eq=False)
class ComparedState:
    """The newest values, exact and noisy, the answers about each, what was published."""

    exact: History
    noisy: History  # as shares of the range, like what was published
    beliefs: Beliefs  # what the noisy values say together
    answers: History  # 1: larger than the one k steps before, -1: smaller, 0: not asked
    published: History
    waiting: int = 0
    run: str = ""
    paid: int = 0  # of the newest values, how many `run` has paid for


@dataclass(frozen=True, kw_only=True)
class CompOrder(DelayedMechanism, SharedMechanism, identity="comp_order"):
    """Noise on every value, and noisy comparisons with the `delay` values before and after it.

    The window slides: every step publishes the value of `delay` steps ago. With `shrink`, a value
    is put where the noisy values up to now (smoothed as in `BlockSmoother`, with blocks of one
    step) and the answers about it leave it as likely above as below; without, as in the paper,
    halfway between the neighbours said to be smaller and larger if the noisy value
    is not between them. When to use it: hardly ever; a comparison has so little of epsilon that
    the noisy value itself says more.

    Guarantee: event-level epsilon-DP: a value is in 2 `delay` differences, each of which it moves
        by Delta, with noise 2 `delay` Delta / eps_g, and is published once with eps_p.
    Unit: one value, replaced by any other in [`lo`, `hi`].
    Delay: `delay` steps.
    Paper: Li, Qin, Ren, Gong, Feng, Hong, Wang, "Delay-allowed Differentially Private Data Stream
        Release", 2025; no threshold noise, and a quarter of its comparison noise.

    >>> from dpstream import release
    >>> series = release(CompOrder(epsilon=1, delay=2, lo=0, hi=9), [4] * 5, secret=bytes(32))
    >>> series.values.shape
    (5, 1)
    """

    constant_charges: ClassVar[bool] = True
    publishes_stddev: ClassVar[bool] = False

    @cached_property
    def sensitivity(self) -> Fraction:
        """L1 change of all differences under one changed value."""
        return comparison_change(self.change, delay=self.delay)

    @cached_property
    def chances(self) -> Reals:
        """Logs of the chances of answers, whose noise is taken as a share of the range."""
        return log_chances(float(self.sensitivity / self.change / self.for_groups))

    def step(
        self, state: ComparedState | None, x: Integers, spend: Spender
    ) -> tuple[Any, list[Release]]:
        """Perturb and compare the newest value; publish the one that has waited long enough."""
        if state is None:
            bins, longest = len(x), self.delay + 1
            state = ComparedState(
                exact=History.of(bins=bins, longest=self.delay, dtype=np.int64),
                noisy=History.of(bins=bins, longest=longest, dtype=np.float64),
                beliefs=Beliefs.none(bins, self.delay),
                answers=History.of(bins=bins * self.delay, longest=longest, dtype=np.int8),
                published=History.of(bins=bins, longest=self.delay, dtype=np.float64),
            )
        noisy = spend.laplace(
            x, sensitivity=self.change, epsilon=self.for_values, purpose="publish"
        )
        paid = spend.pay(x, sensitivity=self.change, epsilon=self.for_groups, purpose="compare")
        count = min(state.paid, self.delay) if state.run == paid.run else 0
        answers = np.zeros((len(x), self.delay), np.int8)
        if count:
            before = state.exact.last(count)[:, ::-1]
            noisy_gaps = spend.laplace(
                (x[:, None] - before).ravel(),
                sensitivity=self.sensitivity,
                epsilon=self.for_groups,
                purpose="comparison",
                interval=paid,
            )
            answers[:, :count] = np.where(noisy_gaps.reshape(len(x), count) > 0, 1, -1)
        share = (noisy.astype(np.float64) - self.grid_range[0]) / float(self.change)
        beliefs = state.beliefs
        if self.shrink:  # the paper's form has no use for it
            beliefs = beliefs.learn(
                share, first=spend.step, steps=1, scale=float(1 / self.for_values)
            )
        state = ComparedState(
            exact=state.exact.append(x),
            noisy=state.noisy.append(share),
            beliefs=beliefs,
            answers=state.answers.append(answers.ravel()),
            published=state.published,
            waiting=state.waiting + 1,
            run=paid.run,
            paid=count + 1,
        )
        return self._publish(state, spend.step, keep=self.delay)

    def finish(self, state: ComparedState | None, spend: Spender) -> tuple[Any, list[Release]]:
        """All that wait."""
        if state is None:
            return state, []
        return self._publish(state, spend.step, keep=0)

    def _publish(
        self, state: ComparedState, newest: int, *, keep: int
    ) -> tuple[ComparedState, list[Release]]:
        """Values with more than `keep` that wait, the oldest first."""
        if state.waiting <= keep:
            return state, []
        oldest, ready = newest - state.waiting + 1, state.waiting - keep
        if self.shrink:
            values, spread = state.beliefs.look_back(
                oldest, newest, float(self.for_values), deviations=ready
            )
        else:
            values = spread = np.ascontiguousarray(state.noisy.last(state.waiting).T)
        out, published, (lo, _, quantum) = [], state.published, map(float, self.range)
        for row in range(ready):
            placed = np.empty(values.shape[1])
            align(
                row,
                values,
                spread,
                published.block,
                published.end,
                state.answers.block,
                state.answers.end - state.waiting + row,
                self.chances,
                self.shrink,
                placed,
            )
            published = published.append(placed)
            released = lo + placed * float(self.change) * quantum
            out.append(Release(step=oldest + row, values=released, paid=True))
        return replace(state, published=published, waiting=keep), out
