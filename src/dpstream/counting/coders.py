"""Counting schemes in integers: the encoder C x and the decoder B y, one class per family.

What is measured, C x, is an integer vector on a public grid of 2^-`bits`. It gets discrete Gaussian
noise, and the decoder turns the noisy vector into running sums.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from dpstream.counting import buffered
from dpstream.counting.binary_tree import Tree
from dpstream.counting.buffered import BufferedLinearToeplitz
from dpstream.errors import InvalidInput
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


class Coder(ABC):
    """Encoder and decoder of one scheme. Steps count from 1; states are values."""

    bits: int = 0
    """C x is measured in units of 2^-bits; 0 where it consists of integers already."""

    @abstractmethod
    def begin(self, bins: int) -> Any:
        """The state before step 1."""

    @abstractmethod
    def encode(self, state: Any, step: int, x: Integers) -> tuple[Any, Integers]:
        """The values measured at `step`: rows of C x, times 2^bits."""

    @abstractmethod
    def decode(self, state: Any, step: int, noisy: Integers) -> tuple[Any, Reals]:
        """The running sums in grid steps of the input, from noisy values alone."""

    @abstractmethod
    def norm(self) -> Fraction:
        """Not below the norm of any column of C."""

    def slack(self) -> Fraction:
        """What rounding C x to integers can add to the norm of its change, in grid steps."""
        return Fraction(0)


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
        return NodeCode(sums=_close_node(state.sums, level, node), estimates=state.estimates), node

    def decode(self, state: NodeCode, step: int, noisy: Integers) -> tuple[NodeCode, Reals]:
        """The live nodes add up."""
        estimates = _close_node(state.estimates, self.tree.level(step), noisy)
        return NodeCode(sums=state.sums, estimates=estimates), estimates.sum(axis=0)

    def norm(self) -> Fraction:
        """The root of the number of nodes that hold the first step."""
        return root_above(Fraction(self.tree.nodes_of_a_step))


def _close_node(levels: Levels, level: int, node: Integers | Reals) -> Levels:
    """The node of `level` takes the place of all live ones below."""
    changed = levels.copy()
    changed[:level] = 0
    changed[level] = node
    return changed


@storable("history code")
@dataclass(frozen=True, kw_only=True)
class HistoryCode:
    """Inputs and decoded increments, both steps x bins, and the decoded running sums."""

    inputs: Integers
    increments: Reals
    sums: Reals


@dataclass(frozen=True, kw_only=True, eq=False)
class HistoryCoder(Coder):
    """Toeplitz C with coefficients rounded down to multiples of 2^-`bits`, the first of them 1.

    All past values are kept.
    """

    coefficients: Reals
    bits: int

    @cached_property
    def _rounded(self) -> Integers:
        return np.floor(self.coefficients * 2.0**self.bits).astype(np.int64)

    def begin(self, bins: int) -> HistoryCode:
        """Room for every step, so that the state does not grow."""
        shape = (len(self.coefficients), bins)
        return HistoryCode(
            inputs=np.zeros(shape, np.int64), increments=np.zeros(shape), sums=np.zeros(bins)
        )

    def encode(self, state: HistoryCode, step: int, x: Integers) -> tuple[HistoryCode, Integers]:
        """The newest input has coefficient 1."""
        inputs = state.inputs.copy()
        inputs[step - 1] = x
        limit = 1 << (61 - self.bits)  # no coefficient is above 2^bits, so nothing can overflow
        refuse_overflow(np.minimum(np.abs(inputs[:step]).astype(float).sum(axis=0), 2.0**62), limit)
        values = self._rounded[:step][::-1] @ inputs[:step]
        return HistoryCode(inputs=inputs, increments=state.increments, sums=state.sums), values

    def decode(self, state: HistoryCode, step: int, noisy: Integers) -> tuple[HistoryCode, Reals]:
        """Solve for the newest increment, by the very coefficients that encoded; add it up."""
        increments = state.increments.copy()
        known = self._rounded[1:step][::-1].astype(np.float64) @ increments[: step - 1]
        increments[step - 1] = (noisy - known) / float(self._rounded[0])
        sums = state.sums + increments[step - 1]
        return HistoryCode(inputs=state.inputs, increments=increments, sums=sums), sums

    def norm(self) -> Fraction:
        """Of the rounded coefficients, exactly."""
        square = sum(int(c) ** 2 for c in self._rounded)
        return root_above(Fraction(square, 4**self.bits))


_FINE = 64
_FACTOR = 53  # factors and weights are multiples of 2^-53
_LIMIT = 1 << 61


@storable("buffer code")
@dataclass(frozen=True, kw_only=True)
class BufferCode:
    """`encoder[j][bin]` in units of 2^-64; `decoder` as the noise process keeps it."""

    encoder: list[list[int]]
    decoder: Reals


@dataclass(frozen=True, kw_only=True)
class BufferedCoder(Coder):
    """The buffered linear Toeplitz encoder, with a few integers of state per bin.

    C x = x_t + sum_j v_j u_j(t - 1), u_j(t) = g_j u_j(t - 1) + x_t. The u_j are kept in units of
    2^-64, and rounded down once a step. Two streams that differ by one event see roundings that
    differ by less than one unit each, so their u_j differ from the linear answer by less than
    2^-64 / (1 - g_j), and what is measured, rounded down once more, by less than one grid step and
    a bit: `slack` adds that up over all steps.
    """

    process: BufferedLinearToeplitz
    bits: int

    @cached_property
    def _factors(self) -> list[tuple[int, int]]:
        """Decay and weight of each buffer, in units of 2^-53."""
        decays = np.array(self.process.decays)
        pairs = zip(decays[0::2], buffered.encoder_weights(decays), strict=True)
        return [(int(decay * 2**_FACTOR), int(weight * 2**_FACTOR)) for decay, weight in pairs]

    def begin(self, bins: int) -> BufferCode:
        """Empty buffers."""
        return BufferCode(
            encoder=[[0] * bins for _ in self._factors],
            decoder=np.zeros((bins, self.process.width)),
        )

    def encode(self, state: BufferCode, step: int, x: Integers) -> tuple[BufferCode, Integers]:
        """X and the weighted buffers; then the buffers decay and take x in."""
        new = [int(value) for value in x]
        total = [value << (_FINE + _FACTOR) for value in new]
        buffers = []
        for (decay, weight), buffer in zip(self._factors, state.encoder, strict=True):
            total = [sum_ + weight * u for sum_, u in zip(total, buffer, strict=True)]
            buffers.append(
                [
                    (value << _FINE) + u + (-decay * u >> _FACTOR)
                    for value, u in zip(new, buffer, strict=True)
                ]
            )
        drop = _FINE + _FACTOR - self.bits
        values = np.array([min(max(sum_ >> drop, -_LIMIT), _LIMIT) for sum_ in total], np.int64)
        return BufferCode(encoder=buffers, decoder=state.decoder), refuse_overflow(values, _LIMIT)

    def decode(self, state: BufferCode, step: int, noisy: Integers) -> tuple[BufferCode, Reals]:
        """B is linear: what makes noise of normals makes running sums of measurements."""
        decoder = state.decoder.copy()
        sums = self.process.advance(decoder, step, noisy.astype(np.float64))
        return BufferCode(encoder=state.encoder, decoder=decoder), sums / 2**self.bits

    def norm(self) -> Fraction:
        """The closed form, with fifty times its float error added."""
        return Fraction(self.process.column_norm()) * (1 + Fraction(1, 10**12))

    def slack(self) -> Fraction:
        """Per step less than 1 and what the buffers' roundings add; over all steps its norm."""
        lost = sum(Fraction(weight, decay) for decay, weight in self._factors)
        each = 1 + lost * Fraction(2) ** (self.bits - _FINE)
        return (math.isqrt(self.process.steps) + 1) * each
