"""What tree-like counters share: a running sum cut into nodes, one live node per level.

Each step t has a binary word; its live bits are the nodes whose sums add up to the prefix sum.
Words grow with t, so moving from s to t keeps the nodes above the highest differing bit p, closes
one node at p (which may absorb the nodes of s below p) and opens the nodes of t below p afresh.
A single step opens exactly one node, hence one normal per key and step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dpstream.counting.factorisation import check_advance, check_whole
from dpstream.counting.linear_recurrences import push_node
from dpstream.records import Reals


class Node(NamedTuple):
    """The sum over steps first..last, and its weight in a prefix sum."""

    first: int
    last: int
    weight: float


class Stack(ABC):
    """Noise process of a tree-like counter; subclasses say which bits live and how they mix."""

    steps: int

    @property
    @abstractmethod
    def width(self) -> int:
        """Number of levels."""

    @abstractmethod
    def word(self, step: int) -> int:
        """Binary word of `step` (0 <= step <= T), strictly increasing."""

    @abstractmethod
    def nodes(self, step: int) -> list[Node]:
        """Nodes and weights that make up the prefix sum of `step`."""

    def live(self, word: int) -> list[int]:
        """Levels of the live nodes, from the highest down."""
        return [level for level in range(self.width - 1, -1, -1) if word >> level & 1]

    def level(self, step: int) -> int:
        """The level of the node that ends at `step`."""
        return (self.word(step - 1) ^ self.word(step)).bit_length() - 1

    def variance(self, level: int) -> float:
        """Variance of a live node at `level`."""
        return 1.0

    def carry(self, low: int, high: int) -> float:
        """Weight with which a closing node at `high` absorbs a finished one at `low`."""
        return 0.0

    def row_norm(self, step: int) -> float:
        """Root of the summed variances of the live nodes."""
        check_whole("step", step, 1, self.steps)
        return math.sqrt(sum(self.variance(level) for level in self.live(self.word(step))))

    def advance(self, state: Reals, step: int, z: Reals) -> Reals:
        """Close the one node that ends at `step`."""
        check_whole("step", step, 1, self.steps)
        check_advance(state, self.width, z)
        before, after = self.word(step - 1), self.word(step)
        level = (before ^ after).bit_length() - 1
        carry, spread = self._absorb(before, level)
        noise = np.empty(len(z))
        push_node(state, level, carry[:level], spread, z, noise)
        return noise

    def readout(self, step: int) -> Reals:
        """Live levels add up; the others hold zeros."""
        check_whole("step", step, 0, self.steps)
        return np.ones(self.width)

    def jump(self, start: int, stop: int) -> tuple[Reals, Reals]:
        """Keep shared nodes, close one, open the rest afresh: at most `width` normals."""
        check_whole("stop", stop, 0, self.steps)
        check_whole("start", start, 0, stop)
        before, after = self.word(start), self.word(stop)
        transition = np.zeros((self.width, self.width))
        top = (before ^ after).bit_length() - 1
        rows = []
        for level in self.live(after):
            fresh = np.zeros(self.width)
            if level > top:
                transition[level, level] = 1.0
                continue
            if level == top:
                transition[:, level], fresh[level] = self._absorb(before, level)
            else:
                fresh[level] = math.sqrt(self.variance(level))
            rows.append(fresh)
        return transition, np.array(rows).reshape(len(rows), self.width)

    def covariance(self, step: int) -> Reals:
        """Live nodes cover disjoint steps, so they are independent."""
        check_whole("step", step, 0, self.steps)
        diagonal = np.zeros(self.width)
        for level in self.live(self.word(step)):
            diagonal[level] = self.variance(level)
        return np.diag(diagonal)

    def _absorb(self, before: int, level: int) -> tuple[Reals, float]:
        """Weights on the finished nodes below `level`, and the spread of the fresh part."""
        carry = np.zeros(self.width)
        left = self.variance(level)
        for low in self.live(before):
            if low < level:
                carry[low] = self.carry(low, level)
                left -= carry[low] ** 2 * self.variance(low)
        return carry, math.sqrt(left)

    def dense(self) -> tuple[Reals, Reals]:
        """(B, C) with one row of C per distinct node of any prefix sum."""
        rows = [self.nodes(step) for step in range(1, self.steps + 1)]
        spans = sorted({node[:2] for row in rows for node in row}, key=lambda span: span[::-1])
        place = {span: index for index, span in enumerate(spans)}
        decoder = np.zeros((self.steps, len(spans)))
        for index, row in enumerate(rows):
            for node in row:
                decoder[index, place[node[:2]]] = node.weight
        encoder = np.zeros((len(spans), self.steps))
        for (first, last), index in place.items():
            encoder[index, first - 1 : last] = 1.0
        return decoder, encoder


# The noise of a binary tree read bottom-up: every node is averaged with what its children say.


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
