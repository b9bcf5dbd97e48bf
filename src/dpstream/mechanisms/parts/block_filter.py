"""Follow a series through noisy means of blocks, and look back over the delay.

Guarantee: post-processing; it reads noisy sums and public numbers.

Forward, every model updates a Gaussian belief about the level by the exact Laplace noise
(`laplace_filter`), and is weighed by how well it predicted. Backward, over the blocks that are not
yet published, each model's beliefs are smoothed (Rauch, Tung, Striebel, "Maximum Likelihood
Estimates of Linear Dynamic Systems", 1965). Between the middles of blocks levels are interpolated;
to a block's values its own mean is added as far as white noise may have moved it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from dpstream.mechanisms.parts.block_kernels import forward, look_back
from dpstream.mechanisms.parts.block_models import kept_of_all, models
from dpstream.privacy.state.serial import storable
from dpstream.records import Reals

_NO_BLOCK_BEFORE = np.zeros(0)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Room:
    """The blocks of `Beliefs` and room for more: as in `History`, rows are written once.

    Beliefs see rows up to some end. The first to learn from them owns the next row, and whoever
    comes later (or finds the room full) takes a copy.
    """

    middle: Reals
    length: Reals
    seen: Reals
    before: Reals
    after: Reals
    written: list[int]  # rows that are taken, shared by all who see them

    @classmethod
    def of(cls, beliefs: Beliefs) -> Self:
        """A copy, with room for as many blocks again."""
        slots = len(beliefs.middle)
        rows = {}
        for name in ("middle", "length", "seen", "before", "after"):
            kept = getattr(beliefs, name)
            rows[name] = np.empty((2 * slots, *kept.shape[1:]))
            rows[name][:slots] = kept
        return cls(**rows, written=[slots])


@storable("block beliefs")
@dataclass(frozen=True, kw_only=True, eq=False)
class Beliefs:
    """What is believed after the newest block, and of each block kept, oldest first.

    Arrays have room for `delay` + 2 blocks, of which the last `count` are in use.
    """

    weight: Reals  # bins x models
    count: int
    middle: Reals  # of each block, in steps from the start of the stream
    length: Reals
    seen: Reals  # blocks x bins: noisy means
    before: Reals  # blocks x bins x models x (mean, variance): predicted
    after: Reals  # the same, with the block seen

    @classmethod
    def none(cls, bins: int, delay: int) -> Beliefs:
        """Before the first block."""
        _, _, prior = models()
        slots, shape = delay + 2, (delay + 2, bins, len(prior), 2)
        return cls(
            weight=np.tile(prior, (bins, 1)),
            count=0,
            middle=np.zeros(slots),
            length=np.ones(slots),
            seen=np.zeros((slots, bins)),
            before=np.zeros(shape),
            after=np.zeros(shape),
        )

    @cached_property
    def _room(self) -> tuple[_Room, int]:
        """Where the blocks are, and their end there; those that `learn` made share theirs."""
        return _Room.of(self), len(self.middle)

    def learn(self, mean: Reals, *, first: int, steps: int, scale: float) -> Beliefs:
        """With one block more: noisy means of `steps` steps from `first` on."""
        _, white, prior = models()
        (room, end), slots = self._room, len(self.middle)
        if room.written[0] != end or end == len(room.middle):
            room, end = _Room.of(self), slots
        middle = first + (steps - 1) / 2
        room.written[0] = end + 1
        room.middle[end], room.length[end], room.seen[end] = middle, steps, mean
        phi = _NO_BLOCK_BEFORE
        if self.count:
            phi = kept_of_all(middle - float(room.middle[end - 1]))
        weight = np.empty_like(self.weight)
        forward(
            end,
            room.seen,
            scale,
            float(steps),
            phi,
            self.weight,
            prior,
            white,
            weight,
            room.before,
            room.after,
        )
        rows = slice(end + 1 - slots, end + 1)
        learnt = Beliefs(
            weight=weight,
            count=min(self.count + 1, slots),
            middle=room.middle[rows],
            length=room.length[rows],
            seen=room.seen[rows],
            before=room.before[rows],
            after=room.after[rows],
        )
        learnt.__dict__["_room"] = room, end + 1
        return learnt

    def look_back(
        self, first: int, last: int, epsilon: float, *, deviations: int | None = None
    ) -> tuple[Reals, Reals]:
        """Values of steps `first` to `last`, in [0, 1], and their deviation: steps x bins.

        `deviations` of them are told, of the first steps; by default all.
        """
        drift, white, _ = models()
        steps, bins = last + 1 - first, self.seen.shape[1]
        out = np.empty((steps, bins))
        deviation = np.empty((steps if deviations is None else deviations, bins))
        look_back(
            self.count,
            self.middle,
            self.length,
            self.seen,
            self.before,
            self.after,
            self.weight,
            drift,
            white,
            epsilon,
            first,
            out,
            deviation,
        )
        return out, deviation
