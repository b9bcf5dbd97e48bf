"""The binary tree counter."""

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
class Tree(Stack):
    """Prefix sums from the binary digits of t; only nodes that prefixes use are measured.

    The node closed at step t covers the last 2^k steps, 2^k the largest power of two dividing t.
    Step 1 lies in one node per level, so leaving out the right children (which no prefix sum
    reads) does not change the worst case: floor(log2 T) + 1 levels.

    Guarantee: an impulse has L2 sensitivity at most sqrt(floor(log2 T) + 1), attained at step 1;
    noise at step t is sigma sqrt(number of ones in t).
    Paper: Dwork, Naor, Pitassi, Rothblum, "Differential Privacy under Continual Observation", 2010;
    Chan, Shi, Song, "Private and Continual Release of Statistics", 2011.

    >>> tree = Tree(steps=128)
    >>> tree.column_norm() ** 2, tree.row_norm(127) ** 2
    (8.000000000000002, 7.000000000000001)
    >>> tree.nodes(6)
    [Node(first=1, last=4, weight=1.0), Node(first=5, last=6, weight=1.0)]
    """

    steps: int

    def __post_init__(self) -> None:
        check_whole("steps", self.steps, 1, 2**40)

    @property
    def width(self) -> int:
        """floor(log2 T) + 1 levels."""
        return int(self.steps).bit_length()

    def word(self, step: int) -> int:
        """The step itself."""
        return int(step)

    def column_norm(self) -> float:
        """Step 1 is in every level's first node."""
        return math.sqrt(self.width)

    def error(self) -> Reals:
        """sqrt(popcount(t))."""
        return np.sqrt(np.bitwise_count(np.arange(1, self.steps + 1)).astype(np.float64))

    def nodes(self, step: int) -> list[Node]:
        """One node per set bit of t."""
        check_whole("step", step, 1, self.steps)
        found, done = [], 0
        for level in self.live(step):
            found.append(Node(done + 1, done + 2**level, 1.0))
            done += 2**level
        return found

    def encode(self, changes: Reals) -> Reals:
        """Sum of the node closed at each step."""
        prefix = np.concatenate([[0.0], np.cumsum(changes)])
        t = np.arange(1, self.steps + 1)
        return np.asarray(prefix[t] - prefix[t - (t & -t)], dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class TreeCounter(CounterMechanism, identity="tree"):
    """Running sums from a binary tree of noisy partial sums.

    Guarantee: event-level rho-zCDP: one event moves at most one node per level by `sensitivity`,
        floor(log2 T) + 1 of them, T = `steps`.
    Unit: one event, which moves one bin of one step by at most `sensitivity`.
    Delay: none.
    Paper: Chan, Shi, Song, "Private and Continual Release of Statistics", 2011.

    >>> from dpstream import release
    >>> series = release(TreeCounter(rho=1, steps=128), [[10], [12], [11]], secret=bytes(32))
    >>> series.values.shape, float(series.stddev[2, 0])
    ((3, 1), 2.828427...)
    """

    @cached_property
    def process(self) -> Tree:
        """The scheme's matrices."""
        return Tree(steps=self.steps)

    def coder(self, bits: int) -> NodeCoder:
        """Nodes are integers; they need no finer grid."""
        return NodeCoder(stack=self.process, squared_norm=self.process.width)
