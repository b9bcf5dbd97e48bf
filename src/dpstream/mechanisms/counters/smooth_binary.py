"""The smooth binary counter: only words with a fixed number of ones are used."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from dpstream.counting.binary_tree import Tree
from dpstream.mechanisms.counters.factorised_counter import TreeMechanism


@dataclass(frozen=True, kw_only=True)
class SmoothBinary(Tree):
    """Step t uses the t-th word of `height` bits with `ones` ones.

    In a binary tree a step is counted by one node per zero of its word and its prefix sum reads
    one node per one. With words of equal weight both numbers are the same at every step. The paper
    balances zeros and ones; here height and ones minimise (height - ones) * ones subject to
    binomial(height, ones) >= T + 1. The nodes of the trailing ones of a word cover no step, are
    always 0 and get no noise, so that one node is opened per step.

    Guarantee: an impulse has L2 sensitivity at most sqrt(height - ones), attained at step 1; noise
    at step t is at most sigma sqrt(ones).
    Paper: Andersson, Pagh, "A Smooth Binary Mechanism for Efficient Private Continual Observation",
    2023.

    >>> smooth = SmoothBinary(steps=128)
    >>> smooth.width, smooth.ones, bin(smooth.word(6)), smooth.live(smooth.word(6))
    (10, 4, '0b101011', [5, 3])
    """

    @cached_property
    def _shape(self) -> tuple[int, int]:
        choices = []
        for ones in range(1, int(self.steps).bit_length() + 2):
            height = ones
            while math.comb(height, ones) < self.steps + 1 and height <= 128:
                height += 1
            if height <= 62:  # words must fit 64-bit integers
                choices.append(((height - ones) * ones, height, ones))
        return min(choices)[1:]

    @property
    def width(self) -> int:
        """The height of the tree: the bits of a word."""
        return self._shape[0]

    @property
    def ones(self) -> int:
        """Ones in every word."""
        return self._shape[1]

    @property
    def nodes_of_a_step(self) -> int:
        """Zeros of a word; all of step 1's nodes are read by some later running sum."""
        return self.width - self.ones

    def word(self, step: int) -> int:
        """The step-th word (from 0) in increasing order: digits of the combinatorial system."""
        word, left, rank = 0, self.ones, int(step)
        for bit in range(self.width - 1, -1, -1):
            smaller = math.comb(bit, left)
            if left and rank >= smaller:
                word |= 1 << bit
                rank -= smaller
                left -= 1
        return word

    def live(self, word: int) -> list[int]:
        """Ones that are not trailing."""
        return super().live(word & (word + 1))


@dataclass(frozen=True, kw_only=True)
class SmoothBinaryCounter(TreeMechanism, identity="smooth_binary"):
    """Running sums from a binary tree whose every step costs and reads equally many nodes.

    Guarantee: event-level rho-zCDP: one event moves at most height - ones nodes by `sensitivity`.
    Unit: one event, which moves one bin of one step by at most `sensitivity`.
    Delay: none.
    Paper: Andersson, Pagh, "A Smooth Binary Mechanism for Efficient Private Continual Observation",
        2023.

    >>> from dpstream import release
    >>> counter = SmoothBinaryCounter(rho=1, steps=128)
    >>> series = release(counter, [[10], [12], [11]], secret=bytes(32))
    >>> series.values.shape, round(counter.stddev(14), 3)
    ((3, 1), 3.464)
    """

    tree_type: ClassVar[type[Tree]] = SmoothBinary
