"""The noise of a binary tree read bottom-up: every node is averaged with what its children say."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dpstream.mechanisms.parts.counting.stack import Node, Stack
from dpstream.mechanisms.parts.counting.strategy import check_whole
from dpstream.records import Reals


def node_variance(levels: int) -> float:
    """Variance of the best estimate from a complete subtree of `levels` levels, sigma = 1."""
    return 1 / (2 * (1 - 2.0**-levels))


@dataclass(frozen=True, kw_only=True)
class Honaker(Stack):
    """All nodes of the tree, combined with inverse-variance weights as soon as they close.

    A node of k levels has estimate v_k y + (1 - v_k) (left + right), v_k = 1 / (2 (1 - 2^-k)) being
    both its variance and the weight of its own measurement y. Given the finished nodes, the next
    estimate is an affine function of them plus one independent normal, so the published noise
    needs one normal per step although the tree has two nodes per step.

    Guarantee: an impulse has L2 sensitivity at most sqrt(floor(log2 T) + 1), attained at step 1,
    when all nodes are counted as published; `released_norm` is the smaller exact value when only
    the prefix sums are. Noise at step t: sigma^2 times the sum of v_k over the set bits of t.
    Paper: Honaker, "Efficient Use of Differentially Private Binary Trees", 2015.

    >>> honaker = Honaker(steps=128)
    >>> round(honaker.row_norm(127), 4), round(honaker.column_norm(), 4)
    (2.0735, 2.8284)
    >>> round(honaker.released_norm(), 4)
    2.621
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

    def variance(self, level: int) -> float:
        """A node at height `level` has level + 1 levels below and with itself."""
        return node_variance(level + 1)

    def carry(self, low: int, high: int) -> float:
        """Each level between passes on 1 - v of what it receives."""
        return math.prod(1 - self.variance(level) for level in range(low + 1, high + 1))

    def column_norm(self) -> float:
        """Every step lies in at most one node per level, step 1 in exactly one of each."""
        return math.sqrt(self.width)

    def released_norm(self) -> float:
        """Sensitivity of an impulse when prefix sums, and no node, are ever published.

        The prefix sums equal B' (C' x + z) with B' the square factor that `advance` applies and
        C' = B'^-1 A; the result is the largest column norm of C'. Each published node that holds
        the impulse adds ((1 - what it absorbed of it) / spread)^2; what it absorbed depends only on
        the run of ones that follows its zero in the word of the impulse.
        """
        best = [0.0] * (self.width + 1)  # best[p + 1]: largest total from a zero at bit p on
        for high in range(self.width):
            _, spread = self._absorb(2**high - 1, high)
            options = [1 / spread**2]
            for run in range(high):
                low = high - 1 - run
                share = (1 - self.carry(low, high)) / spread
                options.append(share**2 + best[low + 1])
            best[high + 1] = max(options)
        return math.sqrt(best[self.width])

    def error(self) -> Reals:
        """Sums of node variances over the set bits of t."""
        t = np.arange(1, self.steps + 1)
        total = np.zeros(self.steps)
        for level in range(self.width):
            total += self.variance(level) * (t >> level & 1)
        return np.sqrt(total)

    def nodes(self, step: int) -> list[Node]:
        """All nodes of the subtrees that make up t, with their weights (up to 2 t of them)."""
        check_whole("step", step, 1, self.steps)
        found: list[Node] = []
        done = 0
        for top in self.live(step):
            for level in range(top, -1, -1):
                weight = self.variance(level) * self.carry(level, top)
                firsts = range(done + 1, done + 2**top + 1, 2**level)
                found += [Node(first, first + 2**level - 1, weight) for first in firsts]
            done += 2**top
        return found

    def encode(self, changes: Reals) -> Reals:
        """Sums of all complete nodes, level by level."""
        prefix = np.concatenate([[0.0], np.cumsum(changes)])
        return np.concatenate(
            [np.diff(prefix[:: 2**level]) for level in range(self.width)], dtype=np.float64
        )
