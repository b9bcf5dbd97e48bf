"""Encoders and decoders in integers, one per family of schemes."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

import numpy as np

from dpstream.errors import InvalidInput
from dpstream.mechanisms.parts.counting.stack import Stack
from dpstream.privacy.sensitivity import root_above
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals

Levels = TypeVar("Levels", Integers, Reals)

_NODE_LIMIT = 1 << 55  # sums of all live nodes then stay clear of the ends of int64


def refuse_overflow(values: Integers, limit: int) -> Integers:
    """Running sums must stay within the integers that noise can be added to."""
    if values.size and int(np.abs(values).max()) >= limit:
        raise InvalidInput(
            "the running sum left the integers that this counter can hold; use a coarser quantum"
        )
    return values


@storable("node code")
@dataclass(frozen=True, kw_only=True)
class NodeCode:
    """Exact sums and noisy estimates of the live nodes, levels x bins."""

    sums: Integers
    estimates: Reals


@dataclass(frozen=True, kw_only=True)
class NodeCoder:
    """Tree-like schemes: one new node a step, measured as it is; entries of C are 0 and 1."""

    stack: Stack
    squared_norm: int
    bits: int = 0

    def begin(self, bins: int) -> NodeCode:
        """No node is live."""
        shape = (self.stack.width, bins)
        return NodeCode(sums=np.zeros(shape, np.int64), estimates=np.zeros(shape))

    def encode(self, state: NodeCode, step: int, x: Integers) -> tuple[NodeCode, Integers]:
        """The node that ends at `step` holds it and all live nodes below."""
        level = self.stack.level(step)
        node = refuse_overflow(x + state.sums[:level].sum(axis=0), _NODE_LIMIT)
        return NodeCode(sums=_closed(state.sums, level, node), estimates=state.estimates), node

    def decode(self, state: NodeCode, step: int, noisy: Integers) -> tuple[NodeCode, Reals]:
        """The live nodes add up."""
        estimates = _closed(state.estimates, self.stack.level(step), noisy)
        return NodeCode(sums=state.sums, estimates=estimates), estimates.sum(axis=0)

    def norm(self) -> Fraction:
        """The root of the number of nodes that hold the first step."""
        return root_above(Fraction(self.squared_norm))

    def slack(self) -> Fraction:
        """Nodes are integers already."""
        return Fraction(0)


def _closed(levels: Levels, level: int, node: Integers | Reals) -> Levels:
    """The node of `level` takes the place of all live ones below."""
    changed = levels.copy()
    changed[:level] = 0
    changed[level] = node
    return changed
