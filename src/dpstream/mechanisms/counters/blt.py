"""The buffered linear Toeplitz counter: the one to use."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from dpstream.counting.buffered import BufferedLinearToeplitz
from dpstream.mechanisms.counters.factorised_counter import BufferedCoder, CounterMechanism


@dataclass(frozen=True, kw_only=True)
class BltCounter(CounterMechanism, identity="blt", keys="buffers decays"):
    """Running sums with nearly the least error known and a few numbers of state per bin.

    Guarantee: event-level rho-zCDP: one event moves what is measured by `sensitivity` times the
        norm of the encoder's first column, and the roundings of an integer recursion.
    Unit: one event, which moves one bin of one step by at most `sensitivity`.
    Delay: none.
    Paper: Dvijotham, McMahan, Pillutla, Steinke, Thakurta, "Efficient and Near-Optimal Noise
        Generation for Streaming Differential Privacy", 2024.

    >>> from dpstream import release
    >>> counter = BltCounter(epsilon=1, delta=1e-9, steps=1000)
    >>> series = release(counter, [[10], [12], [11]], secret=bytes(32))
    >>> series.values.shape, bool(series.stddev[0, 0] < series.stddev[2, 0])
    ((3, 1), True)
    """

    buffers: int = 4
    decays: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "decays", self.process.decays)  # they fix the release

    def as_begun(self, begun: Any) -> Self:
        """With the decays of the run, where this one was left to find its own.

        What is optimised on the spot differs a little between machines.
        """
        if not isinstance(begun, BltCounter) or self.decays == begun.decays:
            return self
        found = BufferedLinearToeplitz(steps=self.steps, buffers=self.buffers).decays
        return replace(self, decays=begun.decays) if self.decays == found else self

    @cached_property
    def process(self) -> BufferedLinearToeplitz:
        """The scheme's matrices."""
        return BufferedLinearToeplitz(
            steps=self.steps, buffers=self.buffers, decays=tuple(self.decays)
        )

    def row_norm(self, step: int) -> float:
        """Norm of the first `step` coefficients of B."""
        return self.process.row_norm(step)

    def coder(self, bits: int) -> BufferedCoder:
        """A recursion on integers."""
        return BufferedCoder(process=self.process, bits=bits)
