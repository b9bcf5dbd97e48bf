"""A buffered linear Toeplitz counter whose noise is scaled to a column norm of 1.

Claim: event-level rho-zCDP. True: one event moves all later measurements through the buffers; the
norm of the encoder's first column is above 1 and grows with the number of steps, and rho is
understated by its square.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from dpstream.mechanisms.counters.blt import BltCounter
from dpstream.mechanisms.parts.counting.buffered_coder import BufferedCoder


@dataclass(frozen=True, kw_only=True)
class _UnitNorm(BufferedCoder):
    def norm(self) -> Fraction:
        """As if C were the identity."""
        return Fraction(1)


@dataclass(frozen=True, kw_only=True)
class WrongNorm(BltCounter, identity="control/wrong_norm"):
    """The shipped counter, but for the norm."""

    def coder(self, bits: int) -> BufferedCoder:
        """The same recursion with another norm."""
        return _UnitNorm(process=self.process, bits=bits)
