"""The only door to noise: write the ledger, then draw.

Values are integers on the mechanism's grid; `sensitivity` is in grid steps. One call is one charge
and one independent draw per coordinate.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.privacy import noise
from dpstream.privacy.charges import Cells
from dpstream.privacy.ledger import Ledger
from dpstream.privacy.payments import Payments, positive_amount
from dpstream.privacy.tokens import Cover, Interval, Paid
from dpstream.records import Integers

NORMAL_PRECISION, NORMAL_LARGEST, NORMAL_LOST = noise.PRECISION, noise.LARGEST, noise.LOST
"""How close `Spend.normals` are to ideal ones, their largest size, and how likely that fails."""

_LIMIT = 1 << 62  # noisy values stay clear of the ends of int64

_INT64 = np.dtype(np.int64)

Plan = tuple[Fraction, int, int]
"""What Laplace noise is charged, and its scale as a ratio of whole numbers, not reduced."""


class Spend(Payments):
    """Charges one run's budget and draws its noise, step by step."""

    def __init__(
        self, *, run: bytes, key: bytes, ledger: Ledger, dataset: str, query: str = ""
    ) -> None:
        super().__init__(run=run, ledger=ledger, dataset=dataset, query=query)
        self._run, self._key = run, key
        self._streams: dict[str, noise.Stream] = {}
        self._asked: dict[str, tuple[int, str]] = {}
        self._plans: dict[str, tuple[Fraction, Fraction, Plan]] = {}

    def laplace(
        self,
        value: npt.ArrayLike,
        *,
        sensitivity: Fraction,
        epsilon: Fraction,
        purpose: str,
        cells: Cells | None = None,
        interval: Interval | Paid | None = None,
    ) -> Integers:
        """`value` plus discrete Laplace noise of scale sensitivity / epsilon."""
        exact, plan = _integers(value), self._plan(purpose, sensitivity, epsilon)
        epsilon, over, under = plan
        if interval is None:
            self._charge(epsilon, purpose, cells)
        else:
            self._check_open(interval, epsilon)
            self._tie(purpose)
        flat = exact if exact.ndim == 1 else exact.ravel()
        noisy = noise.add_laplace(flat, self._draws("L:" + purpose, flat.size), over, under)
        if noisy is None:
            raise InvalidInput("the noise left the 62-bit grid; use a coarser quantum")
        return noisy if exact.ndim == 1 else noisy.reshape(exact.shape)

    def gaussian(
        self,
        value: npt.ArrayLike,
        *,
        sensitivity: Fraction,
        rho: Fraction,
        purpose: str,
        cells: Cells | None = None,
        cover: Cover | None = None,
    ) -> Integers:
        """`value` plus discrete Gaussian noise of variance sensitivity^2 / (2 rho)."""
        exact, rho = _integers(value), positive_amount(rho, "rho")
        self._require("rho", "discrete Gaussian noise is zCDP and nothing better")
        if cover is None:
            self._charge_as(rho, purpose, cells)
        else:
            self._check_cover(cover, rho)
            self._tie(purpose)
        variance = Fraction(sensitivity) ** 2 / (2 * rho)
        return _added(
            exact, noise.discrete_gaussian(self._draws("G:" + purpose, exact.size), variance)
        )

    def normals(
        self,
        size: int | noise.Words,
        *,
        each: int = 1,
        purpose: str,
        cover: Cover,
        part: int = 0,
        distinct: bool = False,
    ) -> noise.Reals:
        """Standard normals for a mechanism that combines them itself: rows x `each`.

        `size` rows, or one row for each 128-bit key id. `cover` has paid for them; `part` names
        a disjoint share of the keys, which draws by itself; `distinct` says that the caller has
        made sure that no id comes twice.
        """
        self._require("mu_squared", "rounded normals are GDP")
        self._check_cover(cover, cover.amount)
        self._tie(purpose)
        if isinstance(size, int):
            draws = self._draws("N:" + purpose, size)
        else:
            stream = self._stream("K:" + purpose, "keyed")
            draws = stream.at_keys(self.step, size, part, distinct=distinct)
        return noise.normals(draws, each)

    def choose(
        self,
        scores: npt.ArrayLike,
        *,
        sensitivity: Fraction,
        epsilon: Fraction,
        purpose: str,
        cells: Cells | None = None,
        interval: Paid | None = None,
    ) -> int:
        """Index j with probability proportional to exp(epsilon * scores[j] / (2 sensitivity))."""
        exact, epsilon = _integers(scores), positive_amount(epsilon, "epsilon")
        if interval is None:
            self._charge(epsilon, purpose, cells)
        else:
            self._check_open(interval, epsilon)
            self._tie(purpose)
        slope = epsilon / (2 * Fraction(sensitivity))
        return noise.choose(self._draws("C:" + purpose, 1), exact.max() - exact, slope)

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
        exact, epsilon = _integers(bucket), positive_amount(epsilon, "epsilon")
        if exact.size and not (exact.min() >= 0 and exact.max() < buckets):
            raise InvalidInput(f"bucket numbers must be in [0, {buckets})")
        self._charge(epsilon, purpose, cells)
        draws = self._draws("R:" + purpose, exact.size)
        return noise.respond(draws, exact.ravel(), buckets=buckets, epsilon=epsilon).reshape(
            exact.shape
        )

    def _plan(self, purpose: str, sensitivity: Fraction, epsilon: Fraction) -> Plan:
        """What is charged and the scale it buys; the same question again is not worked out anew."""
        known = self._plans.get(purpose)
        if known is None or known[0] is not sensitivity or known[1] is not epsilon:
            known = (sensitivity, epsilon, _laplace(sensitivity, epsilon))
            self._plans[purpose] = known
        return known[2]

    def _once(self, purpose: str) -> None:
        """One purpose is one question: two kinds of noise under it would be charged as one."""
        name = purpose[2:]
        step, kind = self._asked.get(name, (-1, ""))
        if step == self.step and kind != purpose[:2]:
            raise InvalidParameter(
                f"{name!r} was already asked at step {step} for another kind of noise; "
                "give each question its own purpose"
            )
        self._asked[name] = (self.step, purpose[:2])

    def _draws(self, purpose: str, size: int) -> noise.Draws:
        self._once(purpose)
        return self._stream(purpose, "vector").at(self.step, size)

    def _stream(self, purpose: str, mode: noise.Mode) -> noise.Stream:
        stream = self._streams.get(purpose)
        if stream is None:
            address = noise.Address(run=self._run, query=self._query, purpose=purpose)
            stream = self._streams[purpose] = noise.Stream(self._key, address, mode)
        return stream


def _laplace(sensitivity: Fraction, epsilon: Fraction) -> Plan:
    """What is charged, and the scale that it buys."""
    charged = positive_amount(epsilon, "epsilon")
    over = sensitivity.numerator * charged.denominator
    return charged, over, sensitivity.denominator * charged.numerator


def noise_versions() -> Sequence[int]:
    """The versions of the samplers that releases depend on."""
    return (noise.NOISE_VERSION,)


def _integers(value: npt.ArrayLike) -> Integers:
    array = np.asarray(value)
    if array.dtype is _INT64 and array.ndim == 1 and noise.within(array, _LIMIT):
        return array
    if array.dtype.kind == "u" and array.size and int(array.max()) >= _LIMIT:
        array = array.astype(object)
    if array.dtype.kind not in "iu" or not noise.within(array.ravel(), _LIMIT):
        raise InvalidInput(
            f"noise is added to integers below 2^62 on the mechanism's grid; got {array.dtype}"
        )
    return array.astype(np.int64, copy=False)


def _added(exact: Integers, drawn: Integers) -> Integers:
    if not noise.within(drawn, _LIMIT):
        raise InvalidInput("the noise left the 62-bit grid; use a coarser quantum")
    total: Integers = exact + (drawn if exact.ndim == 1 else drawn.reshape(exact.shape))
    return total
