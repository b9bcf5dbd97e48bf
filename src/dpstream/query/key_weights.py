"""Weights of a unit's keys, where keys alone are published: few keys count more each.

The squares of a unit's weights sum to at most 1, so noise is that for one key, however many a unit
may have. Where everything is published once, each of a unit's d keys counts 1/sqrt(d). Otherwise
a weight is fixed when its key is counted, and the j-th key counts 1/sqrt(j H), H = 1 + 1/2 + ... +
1/G, whatever comes after it. Proof: `docs/soundness/latched.md`, section 4.

Paper (for the weights where all is published once): Gopi, Gulhane, Kulkarni, Shen, Shokouhi,
Yekhanin, "Differentially Private Set Union", 2020.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from dpstream.privacy.sensitivity import weights_change
from dpstream.query.aggregates import Measure
from dpstream.records import Integers

_LEAST = 16  # grid steps of the smallest weight
_STEPS = 256  # of a weight of 1, at least
_PARTS = 1 << 20  # of H


@dataclass(frozen=True, kw_only=True)
class KeyWeights:
    """The weights of the keys of units that may have `groups` of them, in whole steps.

    `once`: all keys of a unit are known when they are counted.

    >>> KeyWeights(groups=4, once=True).of_number.tolist()
    [256, 181, 147, 128]
    >>> KeyWeights(groups=4, once=False).of_number.tolist()
    [177, 125, 102, 88]
    """

    groups: int
    once: bool

    @cached_property
    def _harmonic(self) -> int:
        """H, rounded up, in parts; 1 where all keys are known."""
        if self.once:
            return _PARTS
        return math.ceil(math.fsum(1 / j for j in range(1, self.groups + 1)) * _PARTS) + 1

    @cached_property
    def steps(self) -> int:
        """Grid steps of a weight of 1."""
        return max(_STEPS, _LEAST * math.isqrt(self.groups * self._harmonic // _PARTS + 1))

    @cached_property
    def of_number(self) -> Integers:
        """Of the j-th key of a unit, or of each of its j keys where all are known; rounded down."""
        square = self.steps**2 * _PARTS
        of_all = (math.isqrt(square // (j * self._harmonic)) for j in range(1, self.groups + 1))
        return np.fromiter(of_all, np.int64, self.groups)

    @property
    def change(self) -> Fraction:
        """L2 change of all groups when a unit comes or goes, in grid steps."""
        numbers = np.arange(1, self.groups + 1)
        squares = self.of_number**2 * (numbers if self.once else 1)
        most = squares.max() if self.once else squares.sum()
        return weights_change(squares=int(most))

    @property
    def in_words(self) -> str:
        """What a key of a unit counts."""
        if self.once:
            return f"a unit with d keys counts 1/sqrt(d) in each, of {self.groups} at most"
        least, most = (int(each) / self.steps for each in (self.of_number[-1], self.of_number[0]))
        return (
            f"a unit counts {most:.2g} in its first key, and less in each further one, "
            f"{least:.2g} in number {self.groups}"
        )

    @property
    def measure(self) -> Measure:
        """The column that finds keys."""
        quantum = Fraction(1, self.steps)
        return Measure(kind="weight", hi=int(self.of_number[0]) * quantum, quantum=quantum)
