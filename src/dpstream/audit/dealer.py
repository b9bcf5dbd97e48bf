"""A spender for many runs: draws noise by the hundred thousand and deals it out.

A run of an audited mechanism asks for a few numbers at a time, and a book and a keyed stream for
each run cost a hundred times the draw. The dealer asks the real `Spend` for many numbers of the
same scale at once, under a fresh secret, and gives each of them away once. Every coordinate of
every run is then an independent draw of the law that `Spend` would have used: the law of a run is
the same, and only the addresses differ (the laws in `tests/laws` are about those). It keeps no
budget: what a mechanism overspends is for the tester to find.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from dpstream.errors import InvalidParameter
from dpstream.privacy.charges import Terms
from dpstream.privacy.ledger import Ledger
from dpstream.privacy.spend import Spend
from dpstream.privacy.state import Secret
from dpstream.privacy.tokens import Cover, Interval, Paid
from dpstream.records import Integers, Reals

_FIRST, _MOST = 1 << 12, 1 << 18
_BOOK = Fraction(10**15)


def real_spend(secret: bytes, measure: str = "epsilon") -> Spend:
    """The real thing on a book without a bound."""
    book = Ledger()
    book.open("audit", Terms(unit="user", total=_BOOK, measure=measure))  # type: ignore[arg-type]
    run = bytes(16)
    key = Secret(secret).key("runner noise", run)
    return Spend(run=run, key=key, ledger=book, dataset="audit")


class Dealer:
    """A Spender for any number of runs."""

    def __init__(self, secret: bytes) -> None:
        self.step = -1
        self._spends = {m: real_spend(secret, m) for m in ("epsilon", "rho")}
        self._pools: dict[Any, tuple[Integers, int]] = {}
        self._asked = 0

    def begin(self, step: int, digest_at: Any = None) -> None:
        """Move to `step` of some run; nothing is logged."""
        self.step = step

    def laplace(
        self, value: npt.ArrayLike, *, sensitivity: Fraction, epsilon: Fraction, **_: Any
    ) -> Integers:
        """`value` plus noise from the pool of this scale."""
        exact = np.asarray(value)
        noise = self._deal(
            ("laplace", *_key(sensitivity), *_key(epsilon)),
            exact.size,
            lambda size, spend: spend.laplace(
                np.zeros(size, np.int64),
                sensitivity=sensitivity,
                epsilon=epsilon,
                purpose="deal",
            ),
        )
        return exact + noise.reshape(exact.shape)

    def gaussian(
        self, value: npt.ArrayLike, *, sensitivity: Fraction, rho: Fraction, **_: Any
    ) -> Integers:
        """`value` plus noise from the pool of this variance."""
        exact = np.asarray(value)
        noise = self._deal(
            ("gaussian", *_key(sensitivity), *_key(rho)),
            exact.size,
            lambda size, spend: spend.gaussian(
                np.zeros(size, np.int64), sensitivity=sensitivity, rho=rho, purpose="deal"
            ),
            "rho",
        )
        return exact + noise.reshape(exact.shape)

    def respond(
        self, bucket: npt.ArrayLike, *, buckets: int, epsilon: Fraction, **_: Any
    ) -> Integers:
        """A response to 0, moved round by the bucket: all other buckets are equally likely."""
        exact = np.asarray(bucket)
        moved = self._deal(
            ("respond", buckets, *_key(epsilon)),
            exact.size,
            lambda size, spend: spend.respond(
                np.zeros(size, np.int64), buckets=buckets, epsilon=epsilon, purpose="deal"
            ),
        )
        return (exact + moved.reshape(exact.shape)) % buckets

    def choose(
        self, scores: npt.ArrayLike, *, sensitivity: Fraction, epsilon: Fraction, **_: Any
    ) -> int:
        """The real draw: its law depends on the scores."""
        spend = self._spends["epsilon"]
        spend.begin(self._next(), lambda _: "")
        return spend.choose(scores, sensitivity=sensitivity, epsilon=epsilon, purpose="choose")

    def normals(self, *_: Any, **__: Any) -> Reals:
        """Refused: keyed noise is at addresses, so it is audited through whole queries."""
        raise InvalidParameter("mechanisms over keys are audited as queries (see query_replay)")

    def cover(self, amount: Fraction, *, last: int, purpose: str = "cover") -> Cover:
        """Not charged."""
        return Cover(purpose=purpose, first=self.step, last=last, amount=amount)

    def pay(self, value: npt.ArrayLike, *, purpose: str, **_: Any) -> Paid:
        """Not charged."""
        return Paid(purpose=purpose)

    def open_interval(self, epsilon: Fraction, *, purpose: str = "interval") -> Interval:
        """Not charged."""
        return Interval(purpose=purpose, start=self.step, amount=epsilon)

    def close_interval(self, interval: Interval) -> None:
        """Not charged."""

    def _next(self) -> int:
        self._asked += 1
        return self._asked

    def _deal(
        self, kind: Any, size: int, draw: Callable[[int, Spend], Integers], measure: str = "epsilon"
    ) -> Integers:
        pool, used = self._pools.get(kind, (np.zeros(0, np.int64), 0))
        if used + size > len(pool):
            more = max(size, min(_MOST, max(_FIRST, 2 * len(pool))))
            spend = self._spends[measure]
            spend.begin(self._next(), lambda _: "")
            pool, used = draw(more, spend), 0  # what is left of the old pool is not used
        self._pools[kind] = (pool, used + size)
        return pool[used : used + size]


def _key(amount: Fraction) -> tuple[int, int]:
    """Two integers: to hash a Fraction takes longer than to deal."""
    return amount.numerator, amount.denominator
