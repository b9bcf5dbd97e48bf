"""Counters that measure the nodes of a binary tree: plain, averaged bottom-up, or smooth."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import ClassVar, TypeVar

import numpy as np

from dpstream.counting.binary_tree import Honaker, Tree
from dpstream.mechanisms.counters.factorised_counter import Coder, CounterMechanism, refuse_overflow
from dpstream.privacy.sensitivity import root_above
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals

Levels = TypeVar("Levels", Integers, Reals)

_NODE_LIMIT = 1 << 55  # sums of all live nodes then stay clear of the ends of int64


@storable("node code")
@dataclass(frozen=True, kw_only=True)
class NodeCode:
    """Exact sums and noisy estimates of the live nodes, levels x bins."""

    sums: Integers
    estimates: Reals


@dataclass(frozen=True, kw_only=True)
class NodeCoder(Coder):
    """Trees: one new node a step, measured as it is; entries of C are 0 and 1."""

    tree: Tree

    def begin(self, bins: int) -> NodeCode:
        """No node is live."""
        shape = (self.tree.width, bins)
        return NodeCode(sums=np.zeros(shape, np.int64), estimates=np.zeros(shape))

    def encode(self, state: NodeCode, step: int, x: Integers) -> tuple[NodeCode, Integers]:
        """The node that ends at `step` holds it and all live nodes below."""
        level = self.tree.level(step)
        node = refuse_overflow(x + state.sums[:level].sum(axis=0), _NODE_LIMIT)
        return replace(state, sums=_close_node(state.sums, level, node)), node

    def decode(self, state: NodeCode, step: int, noisy: Integers) -> tuple[NodeCode, Reals]:
        """The live nodes add up."""
        estimates = _close_node(state.estimates, self.tree.level(step), noisy)
        return replace(state, estimates=estimates), estimates.sum(axis=0)

    def norm(self) -> Fraction:
        """The root of the number of nodes that hold the first step."""
        return root_above(Fraction(self.tree.nodes_of_a_step))


def _close_node(levels: Levels, level: int, node: Integers | Reals) -> Levels:
    """The node of `level` takes the place of all live ones below."""
    changed = levels.copy()
    changed[:level] = 0
    changed[level] = node
    return changed


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

    tree_type: ClassVar[type[Tree]] = Tree

    @cached_property
    def tree(self) -> Tree:
        """Which nodes make up a running sum."""
        return self.tree_type(steps=self.steps)

    def row_norm(self, step: int) -> float:
        """The root of the summed variances of the nodes."""
        return self.tree.row_norm(step)

    def coder(self, bits: int) -> NodeCoder:
        """Nodes need no finer grid."""
        return NodeCoder(tree=self.tree)


@dataclass(frozen=True, kw_only=True)
class SubtreeCoder(NodeCoder):
    """Every node that ends at a step is measured, from the leaf up."""

    def encode(self, state: NodeCode, step: int, x: Integers) -> tuple[NodeCode, Integers]:
        """Nodes x bins: each holds the one before and its finished left sibling."""
        top = self.tree.level(step)
        state, _ = super().encode(before := state, step, x)
        nodes = x + np.concatenate(
            [np.zeros_like(before.sums[:1]), before.sums[:top].cumsum(axis=0)]
        )
        return state, nodes

    def decode(self, state: NodeCode, step: int, noisy: Integers) -> tuple[NodeCode, Reals]:
        """Average each node with the sum of its two children."""
        estimate = noisy[0].astype(np.float64)
        for level in range(1, self.tree.level(step) + 1):
            own = self.tree.variance(level)
            children = state.estimates[level - 1] + estimate
            estimate = own * noisy[level] + (1 - own) * children
        return super().decode(state, step, estimate)


@dataclass(frozen=True, kw_only=True)
class HonakerCounter(TreeCounter, identity="honaker"):
    """Running sums from a binary tree in which every node is averaged with its subtree.

    Guarantee: event-level rho-zCDP: one event moves one node per level by `sensitivity`,
        floor(log2 T) + 1 of them, T = `steps`.
    Unit: one event, which moves one bin of one step by at most `sensitivity`.
    Delay: none.
    Paper: Honaker, "Efficient Use of Differentially Private Binary Trees", 2015.

    >>> from dpstream import release
    >>> counter = HonakerCounter(rho=1, steps=128)
    >>> series = release(counter, [[10], [12], [11]], secret=bytes(32))
    >>> series.values.shape, round(counter.stddev(127), 3)
    ((3, 1), 4.147)
    """

    tree_type: ClassVar[type[Tree]] = Honaker

    def coder(self, bits: int) -> SubtreeCoder:
        """Every node is measured."""
        return SubtreeCoder(tree=self.tree)


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
class SmoothBinaryCounter(TreeCounter, identity="smooth_binary"):
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
