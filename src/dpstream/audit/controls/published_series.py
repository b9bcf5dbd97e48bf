"""What the published mechanisms with a delay have in common: batches, budgets, truncation.

All are from Li, Qin, Ren, Gong, Feng, Hong, Wang, "Delay-allowed Differentially Private Data Stream
Release", 2025. Each says what its paper claims and what is true, and is charged for what is true; a
book that holds the claim refuses those that spend more. Releases are not clamped to the
public range, because the paper does not clamp them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from dpstream.errors import InvalidParameter
from dpstream.mechanisms.base import SeriesMechanism, Spender, whole
from dpstream.mechanisms.parts.group_release import Payment, publish_groups
from dpstream.privacy.amounts import on_grid
from dpstream.privacy.charges import Cells
from dpstream.privacy.sensitivity import range_change
from dpstream.records import Integers, Reals, Release

Noise = Literal["reduce", "pp"]
"""Laplace noise on the sum of a group, or on each of its values."""


class Held(NamedTuple):
    """The batch so far, how many came before it, and the bound that values are cut at."""

    rows: tuple[Integers, ...] = ()
    batches: int = 0
    tau: int | None = None


class Batch(NamedTuple):
    """One batch: steps x bins, its cells, the sensitivity of a value and the budget for noise.

    `raw`: before truncation.
    """

    block: Integers
    raw: Integers
    cells: Cells
    change: Fraction
    epsilon: Fraction


@dataclass(frozen=True, kw_only=True)
class PublishedBatch(SeriesMechanism, ABC, identity=None, keys="delay truncate_every candidates"):
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
    structure_share: ClassVar[Fraction]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "delay", whole(self.delay, "delay", at_least=2))
        if not self.truncate_every:
            return
        object.__setattr__(
            self, "truncate_every", whole(self.truncate_every, "truncate_every", at_least=1)
        )

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

    @cached_property
    def ends(self) -> tuple[int, int]:
        """The bounds lo and hi, in grid steps."""
        lo, hi, quantum = self.range
        return int(lo / quantum), int(hi / quantum)

    def start(self) -> Held:
        """An empty batch."""
        return Held()

    def step(self, state: Held, x: Integers, spend: Spender) -> tuple[Held, list[Release]]:
        """Hold the value back until its batch is full."""
        state = state._replace(rows=(*state.rows, x))
        return (state, []) if len(state.rows) < self.delay else self._publish(state, spend)

    def finish(self, state: Held, spend: Spender) -> tuple[Held, list[Release]]:
        """The last batch may be shorter."""
        return self._publish(state, spend) if state.rows else (state, [])

    @abstractmethod
    def values(self, batch: Batch, spend: Spender) -> Reals:
        """What is published of one batch, in grid steps."""

    def _publish(self, state: Held, spend: Spender) -> tuple[Held, list[Release]]:
        raw, (_, batches, tau) = np.array(state.rows), state
        cells = Cells(first=spend.step - len(raw) + 1, last=spend.step)
        epsilon = self.for_noise
        if self.truncate_every and batches % self.truncate_every == 0:
            half = on_grid(epsilon / 2)
            tau, epsilon = self._choose(raw, half, cells, spend), on_grid(epsilon - half)
        lo, hi = self.ends
        top = hi if tau is None else tau
        batch = Batch(np.minimum(raw, top), raw, cells, Fraction(top - lo), epsilon)
        values = self.values(batch, spend) * float(self.range[2])
        releases = [
            Release(step=cells.first + i, values=row, paid=True) for i, row in enumerate(values)
        ]
        return Held(batches=batches + 1, tau=tau), releases

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


def group_means(batch: Batch, labels: Integers, spend: Spender, noise: Noise) -> Reals:
    """Every value replaced by the noisy mean of its group; `labels`: steps x bins."""
    values, _ = publish_groups(
        batch.block,
        labels,
        spend,
        publish=noise,
        smoother="mean",
        sensitivity=batch.change,
        payment=Payment(epsilon=batch.epsilon, cells=batch.cells),
    )
    return values
