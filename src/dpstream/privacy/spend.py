"""The only door to noise: write the ledger, then draw.

Values are integers on the mechanism's grid; `sensitivity` is in grid steps. One call is one charge
and one independent draw per coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.privacy import noise
from dpstream.privacy.amounts import on_grid
from dpstream.privacy.charges import Cells, Charge
from dpstream.privacy.ledger import DigestAt, Ledger
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers

_LIMIT = 1 << 62  # noisy values stay clear of the ends of int64


@storable("interval")
@dataclass(frozen=True, kw_only=True)
class Interval:
    """A test that stays open over several steps, charged once to every window it overlaps."""

    purpose: str
    start: int


class Spend:
    """Charges one run's budget and draws its noise, step by step."""

    def __init__(
        self, *, run: bytes, key: bytes, ledger: Ledger, dataset: str, query: str = ""
    ) -> None:
        terms = ledger.terms(dataset)
        if terms is None:
            raise InvalidParameter(f"dataset {dataset!r} has no book in this ledger")
        self.step = -1
        self._run, self._key, self._query = run, key, query
        self._ledger, self._dataset, self._measure = ledger, dataset, terms.measure
        self._streams: dict[str, noise.Stream] = {}
        self._prepaid: dict[str, tuple[int, Fraction]] = {}
        self._digest_at: DigestAt = lambda step: ""
        self._ahead = -1

    def begin(self, step: int, digest_at: DigestAt, *, ahead: int = -1) -> None:
        """Move to `step`; up to `ahead`, charges that come every step are written in one go."""
        self.step, self._digest_at, self._ahead = step, digest_at, ahead

    def laplace(
        self,
        value: npt.ArrayLike,
        *,
        sensitivity: Fraction,
        epsilon: Fraction,
        purpose: str,
        cells: Cells | None = None,
        interval: Interval | None = None,
    ) -> Integers:
        """`value` plus discrete Laplace noise of scale sensitivity / epsilon."""
        exact, (epsilon, scale) = _integers(value), _laplace(sensitivity, epsilon)
        if interval is None:
            self._charge(epsilon, purpose, cells)
        return _added(exact, noise.discrete_laplace(self._draws("L:" + purpose, exact.size), scale))

    def gaussian(
        self,
        value: npt.ArrayLike,
        *,
        sensitivity: Fraction,
        rho: Fraction,
        purpose: str,
        cells: Cells | None = None,
    ) -> Integers:
        """`value` plus discrete Gaussian noise of variance sensitivity^2 / (2 rho)."""
        exact, rho = _integers(value), _positive(rho, "rho")
        if self._measure != "rho":
            raise InvalidParameter(
                f"this book counts {self._measure}; Gaussian noise has no pure epsilon; "
                "open a book with measure='rho'"
            )
        self._charge_as(rho, purpose, cells)
        variance = Fraction(sensitivity) ** 2 / (2 * rho)
        return _added(
            exact, noise.discrete_gaussian(self._draws("G:" + purpose, exact.size), variance)
        )

    def choose(
        self,
        scores: npt.ArrayLike,
        *,
        sensitivity: Fraction,
        epsilon: Fraction,
        purpose: str,
        cells: Cells | None = None,
    ) -> int:
        """Index j with probability proportional to exp(epsilon * scores[j] / (2 sensitivity))."""
        exact, epsilon = _integers(scores), _positive(epsilon, "epsilon")
        self._charge(epsilon, purpose, cells)
        best, slope = int(exact.max()), epsilon / (2 * Fraction(sensitivity))
        rates = [(best - int(score)) * slope for score in exact]
        return noise.choose(self._draws("C:" + purpose, 1), rates)

    def respond(
        self,
        bucket: npt.ArrayLike,
        *,
        buckets: int,
        epsilon: Fraction,
        purpose: str,
        cells: Cells | None = None,
    ) -> Integers:
        """Generalised randomised response: each bucket number kept with odds e^epsilon to 1."""
        exact, epsilon = _integers(bucket), _positive(epsilon, "epsilon")
        if exact.size and not (exact.min() >= 0 and exact.max() < buckets):
            raise InvalidInput(f"bucket numbers must be in [0, {buckets})")
        self._charge(epsilon, purpose, cells)
        draws = self._draws("R:" + purpose, exact.size)
        return noise.respond(draws, exact.ravel(), buckets=buckets, epsilon=epsilon).reshape(
            exact.shape
        )

    def open_interval(self, epsilon: Fraction, *, purpose: str = "interval") -> Interval:
        """Charge `epsilon` once to every window that overlaps the steps until it is closed."""
        self._charge_as(_positive(epsilon, "epsilon"), purpose, None, kind="open")
        return Interval(purpose=purpose, start=self.step)

    def close_interval(self, interval: Interval) -> None:
        """End an interval with the current step."""
        cells = Cells(first=interval.start, last=self.step)
        self._charge_as(Fraction(0), interval.purpose, cells, kind="close")

    def _charge(self, epsilon: Fraction, purpose: str, cells: Cells | None) -> None:
        """A pure-DP charge; in a zCDP book epsilon-DP costs epsilon^2 / 2."""
        amount = epsilon if self._measure == "epsilon" else epsilon**2 / 2
        self._charge_as(amount, purpose, cells)

    def _charge_as(
        self, amount: Fraction, purpose: str, cells: Cells | None, kind: str = "cells"
    ) -> None:
        prepaid_to, prepaid = self._prepaid.get(purpose, (-1, None))
        ahead = kind == "cells" and cells is None and self._ahead > self.step
        if (
            cells is None
            and kind == "cells"
            and self.step <= prepaid_to
            and (amount is prepaid or amount == prepaid)
        ):
            return
        charge = Charge(
            run=self._run.hex(),
            query=self._query,
            purpose=purpose,
            step=self.step,
            amount=amount,
            cells=cells or Cells(first=self.step, last=self.step),
            repeat=self._ahead - self.step + 1 if ahead else 1,
            digest=self._digest_at(self._ahead if ahead else self.step),
            kind=kind,  # type: ignore[arg-type]
        )
        self._ledger.charge(self._dataset, charge, self._digest_at)
        if ahead:
            self._prepaid[purpose] = (self._ahead, amount)

    def _draws(self, purpose: str, size: int) -> noise.Draws:
        stream = self._streams.get(purpose)
        if stream is None:
            address = noise.Address(run=self._run, query=self._query, purpose=purpose)
            stream = self._streams[purpose] = noise.Stream(self._key, address)
        return stream.at(self.step, size)


@lru_cache(maxsize=1024)
def _laplace(sensitivity: Fraction, epsilon: Fraction) -> tuple[Fraction, Fraction]:
    """What is charged, and the scale that it buys."""
    charged = _positive(epsilon, "epsilon")
    return charged, Fraction(sensitivity) / charged


@lru_cache(maxsize=1024)
def laplace_stddev(sensitivity: Fraction, epsilon: Fraction) -> float:
    """Standard deviation of discrete Laplace noise, in grid steps.

    >>> round(laplace_stddev(Fraction(1), Fraction(1, 100)), 2)
    141.42
    """
    rate = float(on_grid(epsilon) / sensitivity)
    return math.sqrt(0.5) / math.sinh(rate / 2)


def noise_versions() -> Sequence[int]:
    """The versions of the samplers that releases depend on."""
    return (noise.NOISE_VERSION,)


def _integers(value: npt.ArrayLike) -> Integers:
    array = np.asarray(value)
    if array.dtype.kind not in "iu" or (
        array.size and not (array.min() > -_LIMIT and array.max() < _LIMIT)
    ):
        raise InvalidInput(
            f"noise is added to integers below 2^62 on the mechanism's grid; got {array.dtype}"
        )
    return array.astype(np.int64, copy=False)


def _positive(amount: Fraction, name: str) -> Fraction:
    rounded = on_grid(Fraction(amount))
    if rounded <= 0:
        raise InvalidParameter(f"{name} must be greater than 0; got {amount}")
    return rounded


def _added(exact: Integers, drawn: Integers) -> Integers:
    if drawn.size and not (drawn.min() > -_LIMIT and drawn.max() < _LIMIT):
        raise InvalidInput("the noise left the 62-bit grid; use a coarser quantum")
    total: Integers = exact + drawn.reshape(exact.shape)
    return total
