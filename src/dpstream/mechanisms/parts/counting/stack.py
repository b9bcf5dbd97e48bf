"""What tree-like counters share: a running sum cut into nodes, one live node per level.

Each step t has a binary word; its live bits are the nodes whose sums add up to the prefix sum.
Words grow with t, so moving from s to t keeps the nodes above the highest differing bit p, closes
one node at p (which may absorb the nodes of s below p) and opens the nodes of t below p afresh.
A single step opens exactly one node, hence one normal per key and step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from dpstream.mechanisms.parts.counting.kernels import push_node
from dpstream.mechanisms.parts.counting.strategy import check_advance, check_whole
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
