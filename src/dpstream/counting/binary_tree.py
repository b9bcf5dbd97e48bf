"""Running sums from the nodes of a binary tree.

Each step t has a binary word; its live bits are the nodes whose sums add up to the running sum.
Words grow with t, so a step closes exactly one node, at the highest bit that changes. The closing
node may absorb the finished nodes below it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dpstream.compiled import compiled
from dpstream.counting.noise_process import check_advance, check_whole
from dpstream.records import Reals


@dataclass(frozen=True, kw_only=True)
class Tree:
    """The binary digits of t; only nodes that running sums read are measured.

    The node closed at step t covers the last 2^k steps, 2^k the largest power of two dividing t.
    Step 1 lies in one node per level, so leaving out the right children (which no running sum
    reads) does not change the worst case: floor(log2 T) + 1 levels.

    Guarantee: an impulse has L2 sensitivity at most sqrt(floor(log2 T) + 1), attained at step 1;
    noise at step t is sigma sqrt(number of ones in t).
    Paper: Dwork, Naor, Pitassi, Rothblum, "Differential Privacy under Continual Observation", 2010;
    Chan, Shi, Song, "Private and Continual Release of Statistics", 2011.

    >>> tree = Tree(steps=128)
    >>> tree.nodes_of_a_step, tree.live(6), round(tree.row_norm(127) ** 2, 9)
    (8, [2, 1], 7.0)
    """

    steps: int

    def __post_init__(self) -> None:
        check_whole("steps", self.steps, 1, 2**40)

    @property
    def width(self) -> int:
        """Number of levels."""
        return int(self.steps).bit_length()

    @property
    def nodes_of_a_step(self) -> int:
        """How many measured nodes hold one step, at most; step 1 is in as many."""
        return self.width

    def word(self, step: int) -> int:
        """Binary word of `step` (0 <= step <= T), strictly increasing: here the step itself."""
        return int(step)

    def live(self, word: int) -> list[int]:
        """Levels of the live nodes, from the highest down."""
        return [level for level in range(self.width - 1, -1, -1) if word >> level & 1]

    def level(self, step: int) -> int:
        """The level of the node that ends at `step`."""
        return (self.word(step - 1) ^ self.word(step)).bit_length() - 1

    def variance(self, level: int) -> float:
        """Variance of a live node at `level`, for sigma = 1."""
        return 1.0

    def row_norm(self, step: int) -> float:
        """Root of the summed variances of the live nodes."""
        check_whole("step", step, 1, self.steps)
        return math.sqrt(sum(self.variance(level) for level in self.live(self.word(step))))


@dataclass(frozen=True, kw_only=True)
class Honaker(Tree):
    """All nodes of the tree, combined with inverse-variance weights as soon as they close.

    A node of k levels has estimate v_k y + (1 - v_k) (left + right), v_k = 1 / (2 (1 - 2^-k)) being
    both its variance and the weight of its own measurement y. Given the finished nodes, the next
    estimate is an affine function of them plus one independent normal, so the published noise
    needs one normal per step although the tree has two nodes per step.

    Guarantee: an impulse has L2 sensitivity at most sqrt(floor(log2 T) + 1), attained at step 1.
    Noise at step t: sigma^2 times the sum of v_k over the set bits of t.
    Paper: Honaker, "Efficient Use of Differentially Private Binary Trees", 2015.

    >>> honaker = Honaker(steps=128)
    >>> round(honaker.row_norm(127), 4), round(honaker.column_norm(), 4)
    (2.0735, 2.8284)
    """

    def variance(self, level: int) -> float:
        """v_k of the best estimate from a complete subtree of k = `level` + 1 levels."""
        return 1 / (2 * (1 - 2.0 ** -(level + 1)))

    def carry(self, low: int, high: int) -> float:
        """Weight with which a closing node at `high` absorbs a finished one at `low`.

        Each level between passes on 1 - v of what it receives.
        """
        return math.prod(1 - self.variance(level) for level in range(low + 1, high + 1))

    def column_norm(self) -> float:
        """Every step lies in at most one node per level, step 1 in exactly one of each."""
        return math.sqrt(self.width)

    def error(self) -> Reals:
        """All row norms: sums of node variances over the set bits of t."""
        t = np.arange(1, self.steps + 1)
        total = np.zeros(self.steps)
        for level in range(self.width):
            total += self.variance(level) * (t >> level & 1)
        return np.sqrt(total)

    def advance(self, state: Reals, step: int, z: Reals) -> Reals:
        """Close the one node that ends at `step`."""
        check_whole("step", step, 1, self.steps)
        check_advance(state, self.width, z)
        level = self.level(step)
        carry, spread = self._absorb(step - 1, level)
        noise = np.empty(len(z))
        _close_node(state, level, carry[:level], spread, z, noise)
        return noise

    @property
    def readout(self) -> Reals:
        """Live levels add up; the others hold zeros."""
        return np.ones(self.width)

    def late_root(self, step: int) -> Reals:
        """One normal for each live node."""
        check_whole("step", step, 1, self.steps)
        levels = self.live(step)
        root = np.zeros((len(levels), self.width))
        for row, level in enumerate(levels):
            root[row, level] = math.sqrt(self.variance(level))
        return root

    def _absorb(self, before: int, level: int) -> tuple[Reals, float]:
        """Weights on the finished nodes below `level`, and the spread of the fresh part."""
        carry = np.zeros(self.width)
        left = self.variance(level)
        for low in self.live(before):
            if low < level:
                carry[low] = self.carry(low, level)
                left -= carry[low] ** 2 * self.variance(low)
        return carry, math.sqrt(left)


@compiled
def _close_node(
    state: Reals, level: int, carry: Reals, scale: float, z: Reals, noise: Reals
) -> None:
    """The node at `level` absorbs the lower levels: state[k, level] = scale z[k] + carry.

    noise[k] is the sum of the live levels, added from the highest down.
    """
    for k in range(state.shape[0]):
        value = scale * z[k]
        for j in range(level):
            value += carry[j] * state[k, j]
            state[k, j] = 0.0
        state[k, level] = value
        total = 0.0
        for j in range(state.shape[1] - 1, level - 1, -1):
            total += state[k, j]
        noise[k] = total
