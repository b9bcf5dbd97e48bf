"""Run a mechanism many times over one stream, each time with fresh noise.

A sampler is called with data, a number of runs and a secret. It returns all that was published:
runs x outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dpstream.audit.replay import Call, Recorder, drive, spend_on
from dpstream.errors import InvalidParameter
from dpstream.mechanisms.base import Mechanism
from dpstream.mechanisms.pan_private import cover_counts
from dpstream.privacy.ledger.charges import Cover, Interval, Paid, Terms
from dpstream.privacy.spend import Spend
from dpstream.records import Integers, Reals

_FIRST, _MOST = 1 << 12, 1 << 18  # how many numbers a pool has, at first and at most
_NO_LIMIT = Fraction(10**15)


def unlimited_spend(secret: bytes, measure: str = "epsilon") -> Spend:
    """The real `Spend`, on a ledger that never refuses."""
    terms = Terms(unit="user", total=_NO_LIMIT, measure=measure)  # type: ignore[arg-type]
    return spend_on(terms, secret=secret)


class PooledSpend:
    """A Spender for any number of runs: it draws noise in pools and gives each number away once.

    A run of an audited mechanism asks for a few numbers at a time, and a ledger and a keyed stream
    for each run cost a hundred times the draw. This one asks the real `Spend` for many numbers of
    the same scale at once, under a fresh secret. Every coordinate of every run is then an
    independent draw of the law that `Spend` would have used: the law of a run is the same, and only
    the addresses differ (the laws in `tests/laws` are about those). It keeps no budget: what a
    mechanism overspends is for the lower bound to find.
    """

    def __init__(self, secret: bytes) -> None:
        self.step = -1
        self._spends = {m: unlimited_spend(secret, m) for m in ("epsilon", "rho")}
        self._pools: dict[Any, tuple[Integers, int]] = {}
        self._asked = 0

    def begin(self, step: int, digest_at: Any = None) -> None:
        """Move to `step` of some run; nothing is logged."""
        self.step = step

    def laplace(
        self, value: npt.ArrayLike, *, sensitivity: Fraction, epsilon: Fraction, **_: Any
    ) -> Integers:
        """`value` plus noise from the pool of this scale."""
        return self._add("laplace", value, sensitivity=sensitivity, epsilon=epsilon)

    def gaussian(
        self, value: npt.ArrayLike, *, sensitivity: Fraction, rho: Fraction, **_: Any
    ) -> Integers:
        """`value` plus noise from the pool of this variance."""
        return self._add("gaussian", value, sensitivity=sensitivity, rho=rho)

    def respond(
        self, bucket: npt.ArrayLike, *, buckets: int, epsilon: Fraction, **_: Any
    ) -> Integers:
        """A response to 0, moved round by the bucket: all other buckets are equally likely."""
        return self._add("respond", bucket, buckets=buckets, epsilon=epsilon) % buckets

    def choose(
        self, scores: npt.ArrayLike, *, sensitivity: Fraction, epsilon: Fraction, **_: Any
    ) -> int:
        """The real draw: its law depends on the scores."""
        spend = self._next_spend("epsilon")
        return spend.choose(scores, sensitivity=sensitivity, epsilon=epsilon, purpose="choose")

    def normals(self, *_: Any, **__: Any) -> Reals:
        """Refused: keyed noise is at addresses, so it is audited through whole queries."""
        raise InvalidParameter("mechanisms over keys are audited as queries: see QueryRuns")

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

    def _next_spend(self, measure: str) -> Spend:
        """The real one, at a step that nothing was drawn at before."""
        self._asked += 1
        spend = self._spends[measure]
        spend.begin(self._asked, lambda _: "")
        return spend

    def _add(self, kind: str, value: npt.ArrayLike, **law: Any) -> Integers:
        """`value` plus numbers from the pool of this law, which is filled when it runs out."""
        exact = np.asarray(value)
        # Two integers for an amount: to hash a Fraction takes longer than to take a number.
        amounts = ((amount.numerator, amount.denominator) for amount in law.values())
        key = (kind, *amounts)
        pool, used = self._pools.get(key, (np.zeros(0, np.int64), 0))
        if used + exact.size > len(pool):
            more = max(exact.size, min(_MOST, max(_FIRST, 2 * len(pool))))
            draw = getattr(self._next_spend("rho" if "rho" in law else "epsilon"), kind)
            # What is left of the old pool is not used.
            pool, used = draw(np.zeros(more, np.int64), purpose="deal", **law), 0
        self._pools[key] = (pool, used + exact.size)
        noisy: Integers = exact + pool[used : used + exact.size].reshape(exact.shape)
        return noisy


class Sampler(Protocol):
    """Anything that publishes."""

    def __call__(self, data: Any, runs: int, secret: bytes) -> Reals:
        """What `runs` independent runs over `data` publish: runs x outputs, NaN for nothing."""


@dataclass(frozen=True, kw_only=True)
class SequentialRuns:
    """Each run by itself: for mechanisms in which bins or steps steer one another.

    Published with the values: which steps paid.
    """

    mechanism: Mechanism

    def __call__(self, data: Integers, runs: int, secret: bytes) -> Reals:
        """As many runs, with noise from one secret."""
        spend, rows = PooledSpend(secret), []
        for _ in range(runs):
            releases = sorted(drive(self.mechanism, data, spend), key=lambda release: release.step)
            paid = np.array([float(release.paid) for release in releases])
            rows.append(np.concatenate([*(release.values for release in releases), paid]))
        return np.array(rows)


@dataclass(frozen=True, kw_only=True)
class RunsAsBins:
    """All runs at once, each in bins of its own: for mechanisms that treat every bin alike.

    Why these are as good as separate runs: such a mechanism applies one function to every bin
    (groups, orders, buckets and sums are those of a column) and draws one independent number per
    coordinate, so that what it publishes of a run's bins is a function of those bins and of draws
    that no other bin uses. `tests/audit/test_mechanism_samplers.py` checks it for each mechanism
    that is sampled like this: without noise, no bin moves another one's answers, whatever it holds.
    """

    mechanism: Mechanism

    def __call__(self, data: Integers, runs: int, secret: bytes) -> Reals:
        """One run over `runs` copies of the bins."""
        steps, bins = data.shape
        wide = np.tile(data, (1, runs))
        releases = drive(self.mechanism, wide, PooledSpend(secret))
        values = np.array([r.values for r in sorted(releases, key=lambda r: r.step)])
        return values.reshape(steps, runs, bins).transpose(1, 0, 2).reshape(runs, steps * bins)


@dataclass(frozen=True, kw_only=True)
class RunsWithLooks:
    """A mechanism that counts under noise, and looks at the counts of running steps.

    The data have two rows a step, the events before and after the moment of a look; with `twice`
    three, the last of them after a second look, of which the first was announced. Returned with
    the values: what was seen, and which steps paid. `apart`: as `RunsAsBins`.
    """

    mechanism: Mechanism
    intrusion: Fraction | None
    steps: tuple[int, ...]
    twice: bool = False
    cover: Callable[..., Integers] = cover_counts
    apart: bool = False

    def __call__(self, data: Integers, runs: int, secret: bytes) -> Reals:
        """One run over `runs` copies of the bins, or as many runs."""
        spend, bins = PooledSpend(secret), data.shape[1]
        if not self.apart:
            return np.array([self._run(data, spend) for _ in range(runs)])
        wide = self._run(np.tile(data, (1, runs)), spend)
        parts = len(data) // self._parts + len(self.steps) * (self._parts - 1)
        kept = wide[: bins * runs * parts].reshape(parts, runs, bins)
        return kept.transpose(1, 0, 2).reshape(runs, -1)

    @property
    def _parts(self) -> int:
        return 3 if self.twice else 2

    def _run(self, data: Integers, spend: PooledSpend) -> Reals:
        state, values, paid = self.mechanism.start(), [], []
        seen: list[Integers] = []
        for step, events in enumerate(data.reshape(-1, self._parts, data.shape[1])):
            spend.begin(step)
            counts = cover_counts(spend, np.zeros(data.shape[1], np.int64), self.intrusion, None)
            counts += events[0]
            for number, later in enumerate(events[1:]):
                if step in self.steps:
                    if number:
                        counts = self.cover(spend, counts, self.intrusion, None)
                    seen.append(counts.copy())
                counts += later
            state, releases = self.mechanism.step(state, counts, spend)
            values += [release.values for release in releases]
            paid += [float(release.paid) for release in releases]
        return np.concatenate([*values, *seen, paid])


def worst_choices_loss(mechanism: Mechanism, one: Integers, two: Integers) -> float:
    """The largest log ratio of any path's probabilities, exactly, in either order.

    For mechanisms that choose and never look back at what they chose. Their questions (scores,
    sensitivity, epsilon) then depend on the data alone, which two runs with different noise check
    each time, so that the draws of all steps are independent. The weights are those declared,
    exp(epsilon score / (2 sensitivity)); that `Spend` draws with them is a row of its own
    ("choice") and a law.
    """
    steps = list(zip(*(_log_probabilities(mechanism, data) for data in (one, two)), strict=True))
    there = sum(float((p - q).max()) for p, q in steps)
    return max(there, sum(float((q - p).max()) for p, q in steps))


def _log_probabilities(mechanism: Mechanism, data: Integers) -> list[Reals]:
    """Of each step that pays: the log of every candidate's probability."""
    calls, same = (_choices(mechanism, data, bytes(31) + end) for end in (b"a", b"b"))
    if [c.question() for c in calls] != [c.question() for c in same] or any(
        (one.value != two.value).any() for one, two in zip(calls, same, strict=True)
    ):
        raise InvalidParameter("this mechanism looks back at its choices; run it one by one")
    exponents = [float(c.amount / (2 * c.sensitivity)) * c.value for c in calls]
    return [logs - np.logaddexp.reduce(logs) for logs in exponents]


def _choices(mechanism: Mechanism, data: Integers, secret: bytes) -> list[Call]:
    recorder = Recorder(PooledSpend(secret))  # type: ignore[arg-type]
    drive(mechanism, data, recorder)
    return [call for call in recorder.calls if call.kind == "choose"]
