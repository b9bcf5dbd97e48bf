"""Running sums for many keys, in floats."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from dpstream.errors import InvalidParameter
from dpstream.mechanisms.base import Spender, whole
from dpstream.mechanisms.parts.counting.budget import CountingParameters
from dpstream.mechanisms.parts.counting.buffered import BufferedLinearToeplitz
from dpstream.mechanisms.parts.counting.float_error import calibrate
from dpstream.mechanisms.parts.counting.keyed import KeyedNoise, move, nobody
from dpstream.privacy.charges import Terms
from dpstream.privacy.events import FloatError
from dpstream.privacy.tokens import Cover
from dpstream.records import Integers, Reals, Words


@dataclass(frozen=True, kw_only=True)
class KeyedCounting(CountingParameters, identity="keyed_counter", keys="steps buffers"):
    """Parameters of running sums per key, in GDP; they need `epsilon` and `delta`."""

    steps: int
    buffers: int = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", whole(self.steps, "steps", at_least=1))
        if self.epsilon is None or self.delta is None:
            raise InvalidParameter(
                f"a counter with keys needs epsilon and delta; got epsilon={self.epsilon}, "
                f"delta={self.delta}"
            )
        super().__post_init__()
        _ = self.calibrated  # refuses streams that are too long for floats

    @cached_property
    def process(self) -> BufferedLinearToeplitz:
        """The scheme's matrices."""
        return BufferedLinearToeplitz(steps=self.steps, buffers=self.buffers)

    @cached_property
    def calibrated(self) -> tuple[Fraction, Fraction, FloatError]:
        """mu^2, sigma in grid steps, and what floats add to the promise."""
        assert self.epsilon is not None
        assert self.delta is not None
        return calibrate(
            self.process,
            change=self.change,
            epsilon=Fraction(self.epsilon),
            delta=Fraction(self.delta),
        )

    def terms(self) -> Terms:
        """Event-level GDP."""
        mu_squared, change = self.calibrated[0], self.change_in_words()
        return Terms(unit="event", total=mu_squared, measure="mu_squared", change=change)

    def stddev(self, step: int) -> float:
        """Standard deviation of the noise in step `step` (from 1), rounding included."""
        sigma, quantum = float(self.calibrated[1]), float(Fraction(self.quantum))
        return quantum * float(np.hypot(sigma * self.process.row_norm(step), 12**-0.5))

    def start(self) -> KeyedNoise:
        """Nobody has joined."""
        return nobody(self.process)

    def step(
        self, noise: KeyedNoise, joining: Words, step: int, spend: Spender, cover: Cover
    ) -> tuple[KeyedNoise, Integers]:
        """Move everybody to `step` (from 1) and let `joining` in; noise in grid steps, per key.

        The arrays of `noise` are used up: they become those of the answer.
        """

        def draw(ids: Words, purpose: str, each: int) -> Reals:
            known = purpose == "step"  # whoever joins may be named twice, and is checked
            return spend.normals(ids, each=each, purpose=purpose, cover=cover, distinct=known)

        return move(self.process, noise, joining, step, float(self.calibrated[1]), draw)
