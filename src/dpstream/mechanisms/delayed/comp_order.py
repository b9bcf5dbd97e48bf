"""Compare every value with its neighbours, and let the answers correct the noisy values."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from dpstream.mechanisms.base import Spender
from dpstream.mechanisms.parts.block_filter import Beliefs
from dpstream.mechanisms.parts.delayed import DelayedMechanism
from dpstream.mechanisms.parts.history import History
from dpstream.mechanisms.parts.ordering import align, answered, differences, log_chances
from dpstream.privacy.sensitivity import comparison_change
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals, Release


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
class CompOrder(DelayedMechanism, identity="comp_order"):
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

    steady: ClassVar[bool] = True

    @cached_property
    def sensitivity(self) -> Fraction:
        """L1 change of all differences under one changed value."""
        return comparison_change(self.change, delay=self.delay)

    @cached_property
    def scales(self) -> tuple[float, float]:
        """Of the noise in a value and in a comparison, as shares of the range."""
        of_values = float(1 / self.for_values)
        return of_values, float(self.sensitivity / self.change / self.for_groups)

    @cached_property
    def chances(self) -> Reals:
        """Logs of the chances of answers."""
        return log_chances(self.scales[1])

    def start(self) -> ComparedState | None:
        """The number of bins is not known yet."""
        return None

    def step(
        self, state: ComparedState | None, x: Integers, spend: Spender
    ) -> tuple[Any, list[Release]]:
        """Perturb and compare the newest value; publish the one that has waited long enough."""
        state = state or self._empty(len(x))
        noisy = spend.laplace(
            x, sensitivity=self.change, epsilon=self.for_values, purpose="publish"
        )
        paid = spend.pay(x, sensitivity=self.change, epsilon=self.for_groups, purpose="compare")
        count = min(state.paid, self.delay) if state.run == paid.run else 0
        answers = np.zeros(len(x) * self.delay, np.int8)
        if count:
            apart = np.empty(len(x) * count, np.int64)
            differences(x, state.exact.block, state.exact.end, apart)
            told = spend.laplace(
                apart,
                sensitivity=self.sensitivity,
                epsilon=self.for_groups,
                purpose="comparison",
                interval=paid,
            )
            answered(told, len(x), answers)
        lowest, change, _, _, _ = self._numbers
        share: Reals = (noisy.astype(np.float64) - lowest) / change
        beliefs = state.beliefs
        if self.shrink:  # the paper's form has no use for it
            beliefs = beliefs.learn(share, first=spend.step, steps=1, scale=self.scales[0])
        state = ComparedState(
            exact=state.exact.append(x),
            noisy=state.noisy.append(share),
            beliefs=beliefs,
            answers=state.answers.append(answers),
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

    @cached_property
    def _numbers(self) -> tuple[float, float, float, float, float]:
        """Lowest value and change in grid steps, lowest value and grid step in units, eps_p."""
        lo, _, quantum = self.range
        share = float(self.for_values)
        return float(lo / quantum), float(self.change), float(lo), float(quantum), share

    def _empty(self, bins: int) -> ComparedState:
        longest = self.delay + 1
        return ComparedState(
            exact=History.of(bins=bins, longest=self.delay, dtype=np.int64),
            noisy=History.of(bins=bins, longest=longest, dtype=np.float64),
            beliefs=Beliefs.none(bins, self.delay),
            answers=History.of(bins=bins * self.delay, longest=longest, dtype=np.int8),
            published=History.of(bins=bins, longest=self.delay, dtype=np.float64),
        )

    def _publish(
        self, state: ComparedState, newest: int, *, keep: int
    ) -> tuple[ComparedState, list[Release]]:
        """Values with more than `keep` that wait, the oldest first."""
        if state.waiting <= keep:
            return state, []
        _, change, lo, quantum, epsilon = self._numbers
        oldest, ready = newest - state.waiting + 1, state.waiting - keep
        if self.shrink:
            values, spread = state.beliefs.look_back(oldest, newest, epsilon, deviations=ready)
        else:
            values = state.noisy.block[:, state.noisy.end - state.waiting : state.noisy.end].T
            values = spread = np.ascontiguousarray(values)
        out, published = [], state.published
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
            released = lo + placed * change * quantum
            out.append(Release(step=oldest + row, values=released, paid=True))
        state = ComparedState(
            exact=state.exact,
            noisy=state.noisy,
            beliefs=state.beliefs,
            answers=state.answers,
            published=published,
            waiting=keep,
            run=state.run,
            paid=state.paid,
        )
        return state, out
