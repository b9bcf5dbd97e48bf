"""The only way to noise: write the ledger, then draw.

Values are integers on the mechanism's grid; `sensitivity` is in grid steps. One call is one charge
and one independent draw per coordinate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from dpstream.errors import InvalidInput, InvalidParameter, StateError
from dpstream.privacy import noise
from dpstream.privacy.accounting.calibration import round_up
from dpstream.privacy.accounting.curves import pure_mu_above, pure_rho_above
from dpstream.privacy.amounts import on_grid, show
from dpstream.privacy.ledger.balance import DigestAt
from dpstream.privacy.ledger.charges import Cells, Charge, Cover, Interval, Kind, Paid
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.state.journal import this_process
from dpstream.records import Integers, Reals, Words

NORMAL_PRECISION, NORMAL_LARGEST, NORMAL_LOST = noise.PRECISION, noise.LARGEST, noise.LOST
"""How close `Spend.normals` are to ideal ones, their largest size, and how likely that fails."""

_NOTHING: tuple[int, Fraction | None] = (-1, None)
_LIMIT = 1 << 62  # noisy values stay clear of the ends of int64
_INT64 = np.dtype(np.int64)

Plan = tuple[Fraction, int, int]
"""What Laplace noise is charged, and its scale as a ratio of whole numbers, not reduced."""


class Spend:
    """Charges one run's budget to one book and draws its noise, step by step."""

    def __init__(
        self, *, run: bytes, key: bytes, ledger: Ledger, dataset: str, query: str = ""
    ) -> None:
        terms = ledger.terms(dataset)
        if terms is None:
            raise InvalidParameter(f"dataset {dataset!r} has no book in this ledger")
        self.step = -1
        self._query, self._run, self._run_name, self._key = query, run, run.hex(), key
        self._ledger, self._dataset, self._measure = ledger, dataset, terms.measure
        self._prepaid: dict[str, tuple[int, Fraction]] = {}
        self._paying: dict[str, tuple[Fraction, Fraction, Paid]] = {}  # as asked, as charged
        self._digest_at: DigestAt = lambda step: ""
        self._ahead, self._verified = -1, False
        self._process = this_process.id
        self._streams: dict[str, noise.Stream] = {}
        self._asked: dict[str, tuple[int, str]] = {}
        self._plans: dict[str, tuple[Fraction, Fraction, Plan]] = {}

    def begin(
        self, step: int, digest_at: DigestAt, *, ahead: int = -1, verified: bool = False
    ) -> None:
        """Move to `step`; up to `ahead`, charges that come every step are written in one go.

        `verified`: a durable log has shown that this step's input is not another one than before.
        """
        if this_process.id != self._process:
            raise StateError("this run was started before a fork; start or load it in each process")
        self.step, self._digest_at, self._ahead = step, digest_at, ahead
        self._verified = verified

    def new_batch(self) -> None:
        """Other input may follow: what was paid ahead must be looked up in the ledger again."""
        self._prepaid.clear()

    def adopt(self, token: Interval | Cover) -> Interval | Cover:
        """Pay again, in full, for what a copied state holds of another run, and go on with it."""
        if isinstance(token, Cover):
            cells = Cells(first=token.first, last=token.last)
            self._charge(token.amount, token.purpose, cells, kind="cover")
        else:
            self._refuse_intervals()
            cells = Cells(first=token.start, last=max(token.start, self.step))
            self._charge(token.amount, token.purpose, cells, kind="open")
        return replace(token, run=self._run_name)

    def cover(self, amount: Fraction, *, last: int, purpose: str = "cover") -> Cover:
        """Charge `amount` of the book's measure once to every step from now to `last`."""
        amount = positive_amount(amount, self._measure)
        if self._measure == "epsilon":
            raise InvalidParameter(
                "a cover is for Gaussian noise, this book counts epsilon; open a book with "
                "measure='rho' or measure='mu_squared'"
            )
        cells = Cells(first=self.step, last=last)
        self._charge(amount, purpose, cells, kind="cover")
        return Cover(purpose=purpose, first=self.step, last=last, amount=amount, run=self._run_name)

    def pay(
        self,
        value: npt.ArrayLike,
        *,
        sensitivity: Fraction,
        epsilon: Fraction,
        purpose: str,
        cells: Cells | None = None,
    ) -> Paid:
        """Charge `epsilon` for all that draws under the answer read of `value`; draw nothing."""
        known = self._paying.get(purpose)
        if known is None or known[0] is not epsilon:
            token = Paid(purpose=purpose, run=self._run_name)
            known = self._paying[purpose] = (epsilon, positive_amount(epsilon, "epsilon"), token)
        self._charge_or_check(known[1], purpose, cells)
        return known[2]

    def open_interval(self, epsilon: Fraction, *, purpose: str = "interval") -> Interval:
        """Charge `epsilon` once to every window that overlaps the steps until it is closed."""
        self._refuse_intervals()
        amount = self._pure(positive_amount(epsilon, "epsilon"))
        self._charge(amount, purpose, None, kind="open")
        return Interval(purpose=purpose, start=self.step, amount=amount, run=self._run_name)

    def close_interval(self, interval: Interval) -> None:
        """End an interval with the current step."""
        self._check_open(interval, Fraction(0))
        cells = Cells(first=interval.start, last=self.step)
        self._charge(Fraction(0), interval.purpose, cells, kind="close")

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
        self._charge_or_check(epsilon, purpose, cells, interval)
        flat = exact if exact.ndim == 1 else exact.ravel()
        noisy = noise.add_laplace(flat, self._draws("L:" + purpose, flat.size), over, under)
        if noisy is None:
            raise _too_large()
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
            self._charge(rho, purpose, cells)
        else:
            self._check_cover(cover, rho)
            self._tie(purpose)
        variance = Fraction(sensitivity) ** 2 / (2 * rho)
        drawn = noise.discrete_gaussian(self._draws("G:" + purpose, exact.size), variance)
        if not noise.within(drawn, _LIMIT):
            raise _too_large()
        total: Integers = exact + drawn.reshape(exact.shape)
        return total

    def normals(
        self,
        size: int | Words,
        *,
        each: int = 1,
        purpose: str,
        cover: Cover,
        part: int = 0,
        distinct: bool = False,
    ) -> Reals:
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
        self._charge_or_check(epsilon, purpose, cells, interval)
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
        self._charge_or_check(epsilon, purpose, cells)
        draws = self._draws("R:" + purpose, exact.size)
        return noise.respond(draws, exact.ravel(), buckets=buckets, epsilon=epsilon).reshape(
            exact.shape
        )

    def _charge_or_check(
        self,
        epsilon: Fraction,
        purpose: str,
        cells: Cells | None,
        token: Interval | Paid | None = None,
    ) -> None:
        """Charge a pure-DP draw in the book's measure; with a token, check that it pays for it."""
        if token is None:
            self._charge(self._pure(epsilon), purpose, cells)
        else:
            self._check_open(token, epsilon)
            self._tie(purpose)

    def _pure(self, epsilon: Fraction) -> Fraction:
        if self._measure == "mu_squared":
            return round_up(pure_mu_above(epsilon) ** 2)
        return epsilon if self._measure == "epsilon" else pure_rho_above(epsilon)

    def _refuse_intervals(self) -> None:
        if self._measure == "mu_squared":
            raise InvalidParameter(
                "an interval pays for pure noise over many steps, and must be in a book of epsilon "
                "or rho; this one counts mu_squared; open a book of its own with measure='epsilon'"
            )

    def _require(self, measure: str, reason: str) -> None:
        if self._measure != measure:
            raise InvalidParameter(
                f"this book counts {self._measure}; {reason}; open a book with measure={measure!r}"
            )

    def _check_cover(self, cover: Cover, amount: Fraction) -> None:
        """The charge is there, holds at this step, and is as large as the noise asks."""
        end = self._end_of(cover.run, cover.purpose, cover.first)
        if end is None or not cover.first <= self.step <= end or amount > cover.amount:
            raise InvalidParameter(
                f"{cover} does not pay for {self._measure}={show(amount)} at step {self.step}"
            )

    def _check_open(self, token: Interval | Paid, epsilon: Fraction) -> None:
        """This run paid for it, for as much at least, and it is not over."""
        if isinstance(token, Paid):
            if token.run != self._run_name:
                raise InvalidParameter(f"{token} was paid for by another run")
            return
        end = self._end_of(token.run, token.purpose, token.start)
        if end is not None and end < self.step:
            raise InvalidParameter(f"{token} was never opened by this run, or is over")
        if epsilon and self._pure(epsilon) > token.amount:
            raise InvalidParameter(f"{token} does not pay for epsilon={show(epsilon)}")

    def _end_of(self, run: str, purpose: str, first: int) -> int | None:
        """The last step that this run's interval or cover pays for; None: open; -1: not there."""
        if run != self._run_name:
            return -1
        return self._ledger.interval_end(self._dataset, run, self._query, purpose, first)

    def _tie(self, purpose: str) -> None:
        """A draw that is paid for already: write its input's digest down where no log does."""
        if not self._verified and self._ledger.path is not None:
            self._charge(Fraction(0), purpose, None)

    def _charge(
        self, amount: Fraction, purpose: str, cells: Cells | None, kind: Kind = "cells"
    ) -> None:
        step, ahead = self.step, False
        if cells is None:
            if kind == "cells":
                prepaid_to, prepaid = self._prepaid.get(purpose, _NOTHING)
                if step <= prepaid_to and (amount is prepaid or amount == prepaid):
                    return
                ahead = self._ahead > step
            cells = Cells(first=step, last=step)
        charge = Charge(
            run=self._run_name,
            query=self._query,
            purpose=purpose,
            step=step,
            amount=amount,
            cells=cells,
            repeat=self._ahead - step + 1 if ahead else 1,
            digest=self._digest_at(self._ahead if ahead else step),
            kind=kind,
        )
        self._ledger.charge(self._dataset, charge, self._digest_at, verified=self._verified)
        if ahead:
            self._prepaid[purpose] = (self._ahead, amount)

    def _plan(self, purpose: str, sensitivity: Fraction, epsilon: Fraction) -> Plan:
        """What is charged and the scale it buys; the same question again is not worked out anew."""
        known = self._plans.get(purpose)
        if known is None or known[0] is not sensitivity or known[1] is not epsilon:
            charged = positive_amount(epsilon, "epsilon")
            over = sensitivity.numerator * charged.denominator
            plan = (charged, over, sensitivity.denominator * charged.numerator)
            known = self._plans[purpose] = (sensitivity, epsilon, plan)
        return known[2]

    def _draws(self, purpose: str, size: int) -> noise.Draws:
        """Draws of this step; one purpose is one question, and one kind of noise is charged for."""
        name = purpose[2:]
        step, kind = self._asked.get(name, (-1, ""))
        if step == self.step and kind != purpose[:2]:
            raise InvalidParameter(
                f"{name!r} was already asked at step {step} for another kind of noise; "
                "give each question its own purpose"
            )
        self._asked[name] = (self.step, purpose[:2])
        return self._stream(purpose, "vector").at(self.step, size)

    def _stream(self, purpose: str, mode: noise.Mode) -> noise.Stream:
        stream = self._streams.get(purpose)
        if stream is None:
            address = noise.Address(run=self._run, query=self._query, purpose=purpose)
            stream = self._streams[purpose] = noise.Stream(self._key, address, mode)
        return stream


def positive_amount(amount: Fraction, name: str) -> Fraction:
    """On the grid, rounded down, and above zero."""
    rounded = on_grid(amount if type(amount) is Fraction else Fraction(amount))
    if rounded.numerator <= 0:
        raise InvalidParameter(f"{name} must be greater than 0; got {amount}")
    return rounded


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


def _too_large() -> InvalidInput:
    return InvalidInput("the noise left the 62-bit grid; use a coarser quantum")
