"""The smooth binary counter: only words with a fixed number of ones are used."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dpstream.mechanisms.parts.counting.coders import NodeCoder
from dpstream.mechanisms.parts.counting.mechanism import CounterMechanism
from dpstream.mechanisms.parts.counting.stack import Node, Stack
from dpstream.mechanisms.parts.counting.strategy import check_whole
from dpstream.records import Reals


@dataclass(frozen=True, kw_only=True)
class SmoothBinary(Stack):
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
    >>> smooth.height, smooth.ones, smooth.nodes(6)
    (10, 4, [Node(first=1, last=5, weight=1.0), Node(first=6, last=6, weight=1.0)])
    """

    steps: int

    def __post_init__(self) -> None:
        check_whole("steps", self.steps, 1, 2**40)

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
    def height(self) -> int:
        """Bits of a word."""
        return self._shape[0]

    @property
    def ones(self) -> int:
        """Ones in every word."""
        return self._shape[1]

    @property
    def width(self) -> int:
        """One level per bit."""
        return self.height

    def word(self, step: int) -> int:
        """The step-th word (from 0) in increasing order: digits of the combinatorial system."""
        word, left, rank = 0, self.ones, int(step)
        for bit in range(self.height - 1, -1, -1):
            smaller = math.comb(bit, left)
            if left and rank >= smaller:
                word |= 1 << bit
                rank -= smaller
                left -= 1
        return word

    def live(self, word: int) -> list[int]:
        """Ones that are not trailing."""
        return super().live(word & (word + 1))

    def column_norm(self) -> float:
        """Zeros of a word; all of step 1's nodes are read by some later prefix sum."""
        return math.sqrt(self.height - self.ones)

    def error(self) -> Reals:
        """sqrt(number of ones that are not trailing), all steps at once."""
        rank = np.arange(1, self.steps + 1)
        left = np.full(self.steps, self.ones)
        live = np.zeros(self.steps)
        for bit in range(self.height - 1, -1, -1):
            sizes = np.array([math.comb(bit, k) for k in range(self.ones + 1)])[left]
            taken = (left > 0) & (rank >= sizes)
            live += taken & (sizes > 0)
            rank = np.where(taken, rank - sizes, rank)
            left = left - taken
        return np.sqrt(live)

    def nodes(self, step: int) -> list[Node]:
        """One node per live bit; its size is a digit of the combinatorial number system."""
        check_whole("step", step, 1, self.steps)
        word, found, done = self.word(step), [], 0
        for level in self.live(word):
            size = math.comb(level, (word & (2 ** (level + 1) - 1)).bit_count())
            found.append(Node(done + 1, done + size, 1.0))
            done += size
        return found

    def encode(self, changes: Reals) -> Reals:
        """Sum of the node opened at each step: the last one of its prefix sum."""
        prefix = np.concatenate([[0.0], np.cumsum(changes)])
        first = np.array([self.nodes(step)[-1].first for step in range(1, self.steps + 1)])
        return np.asarray(prefix[1:] - prefix[first - 1], dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class SmoothBinaryCounter(CounterMechanism, identity="smooth_binary"):
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

    @cached_property
    def process(self) -> SmoothBinary:
        """The scheme's matrices."""
        return SmoothBinary(steps=self.steps)

    def coder(self, bits: int) -> NodeCoder:
        """Nodes are integers; they need no finer grid."""
        zeros = self.process.height - self.process.ones
        return NodeCoder(stack=self.process, squared_norm=zeros)
