"""The binary tree read bottom-up: every node is averaged with what its children say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dpstream.counting.binary_tree import Honaker, Tree
from dpstream.mechanisms.counters.factorised_counter import NodeCode, NodeCoder, TreeMechanism
from dpstream.records import Integers, Reals


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
class HonakerCounter(TreeMechanism, identity="honaker"):
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
