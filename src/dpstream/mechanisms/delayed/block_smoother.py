"""Publish sums of whole blocks, and smooth them over the delay: a mechanism of our own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from dpstream.mechanisms.base import Spender
from dpstream.mechanisms.parts.batches import DelayedMechanism, releases
from dpstream.mechanisms.parts.block_filter import Beliefs, block_lengths, expected_errors
from dpstream.privacy.ledger.charges import Cells
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Release

_WORTH = 0.98  # a shorter block must promise at least this share of a longer one's error


@storable("block smoother state")
@dataclass(frozen=True, kw_only=True, eq=False)
class BlockState:
    """The exact sum of the open block, its length so far and in the end; what is believed."""

    total: Integers
    steps: int
    length: int
    published: int  # the first step that is not published yet
    beliefs: Beliefs


@dataclass(frozen=True, kw_only=True)
class BlockSmoother(DelayedMechanism, identity="block_smoother"):
    """Noisy sums of blocks of steps, whose length is learnt from them, smoothed over the delay.

    All of epsilon goes into the sums: the mean of b values has b times less noise than one value.
    How long the next block is, and what the blocks say about each value, is worked out from the
    noisy sums so far: a bank of models, each a wandering level with some white noise, weighed by
    how well it predicted; values are published when the next block would come too late for them,
    with all blocks seen until then. When to use it: whenever a delay is allowed, as the default.

    Guarantee: event-level epsilon-DP: a value enters one sum, with noise Delta / epsilon; how long
        blocks are, and how they are smoothed, is decided from earlier noisy sums alone.
    Unit: one value, replaced by any other in [`lo`, `hi`].
    Delay: less than `delay` steps.
    Paper: none for the whole; the smoother is that of Rauch, Tung, Striebel, "Maximum Likelihood
        Estimates of Linear Dynamic Systems", 1965.

    >>> from dpstream import release
    >>> smooth = BlockSmoother(epsilon=1, delay=50, lo=0, hi=100)
    >>> series = release(smooth, [30] * 200, secret=bytes([2] * 32), run_id=bytes(16))
    >>> len(series), bool(abs(series.values[150:] - 30).max() < 5)
    (200, True)
    """

    why_least: ClassVar[str] = "a block has at least one step"

    def step(
        self, state: BlockState | None, x: Integers, spend: Spender
    ) -> tuple[Any, list[Release]]:
        """Add to the open block; publish its sum at its end, and the values that cannot wait."""
        if state is None:
            beliefs = Beliefs.none(len(x), self.delay)
            state = BlockState(
                total=np.zeros_like(x),
                steps=0,
                length=self.next_length(beliefs),
                published=spend.step,
                beliefs=beliefs,
            )
        state = replace(state, total=state.total + x, steps=state.steps + 1)
        if state.steps < state.length:
            return state, []
        state = self._close(state, spend)
        return self._publish(state, min(spend.step, spend.step + state.length - self.delay))

    def finish(self, state: BlockState | None, spend: Spender) -> tuple[Any, list[Release]]:
        """The open block, however short, and all values that wait."""
        if state is None:
            return state, []
        if state.steps:
            state = self._close(state, spend)
        return self._publish(state, spend.step)

    def next_length(self, beliefs: Beliefs) -> int:
        """Of the least error to be expected; where several are nearly equal, the longest."""
        errors = expected_errors(self.delay, float(self.budget)) @ beliefs.weight.mean(axis=0)
        best, chosen = errors[0], 0
        for i, error in enumerate(errors):
            if error < _WORTH * best:
                best, chosen = error, i
        return int(block_lengths(self.delay)[chosen])

    def _close(self, state: BlockState, spend: Spender) -> BlockState:
        """Publish the block's sum to the beliefs."""
        cells = Cells(first=spend.step - state.steps + 1, last=spend.step)
        noisy = spend.laplace(
            state.total,
            sensitivity=self.change,
            epsilon=self.budget,
            purpose="block",
            cells=cells,
        )
        mean = (noisy / state.steps - self.grid_range[0]) / float(self.change)
        scale = 1.0 / (float(self.budget) * state.steps)
        beliefs = state.beliefs.learn(mean, first=cells.first, steps=state.steps, scale=scale)
        total, length = np.zeros_like(state.total), self.next_length(beliefs)
        return replace(state, total=total, steps=0, length=length, beliefs=beliefs)

    def _publish(self, state: BlockState, last: int) -> tuple[BlockState, list[Release]]:
        """All values up to step `last` that are not published yet."""
        if last < state.published:
            return state, []
        shares, spread = state.beliefs.look_back(state.published, last, float(self.budget))
        spread = np.sqrt(spread**2 + state.beliefs.doubt())
        lo, hi, _ = (float(part) for part in self.range)
        out = releases(state.published, lo + shares * (hi - lo), spread * (hi - lo))
        return replace(state, published=last + 1), out
