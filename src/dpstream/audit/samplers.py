"""Run a mechanism many times over one stream, each time with fresh noise.

A sampler is called with data, a number of runs and a secret, and answers with all that was
published: runs x outputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dpstream.audit.dealer import Dealer
from dpstream.audit.replay import Call, Recorder, drive
from dpstream.errors import InvalidParameter
from dpstream.mechanisms.base import Mechanism
from dpstream.records import Integers, Reals, Release


class Sampler(Protocol):
    """Anything that publishes."""

    def __call__(self, data: Any, runs: int, secret: bytes) -> Reals:
        """What `runs` independent runs over `data` publish: runs x outputs, NaN for nothing."""


@dataclass(frozen=True, kw_only=True)
class OneByOne:
    """Each run by itself: for mechanisms in which bins or steps steer one another.

    Published with the values: which steps paid.
    """

    mechanism: Mechanism
    copies: int = 1
    """How many times the same data are released; more than once only in a control."""

    def __call__(self, data: Integers, runs: int, secret: bytes) -> Reals:
        """As many runs, dealt from one secret."""
        dealer = Dealer(secret)
        return np.array(
            [
                np.concatenate([outputs(self._run(data, dealer)) for _ in range(self.copies)])
                for _ in range(runs)
            ]
        )

    def _run(self, data: Integers, dealer: Dealer) -> list[Release]:
        mechanism = self.mechanism
        state, releases = mechanism.start(), []
        for step, row in enumerate(data):
            dealer.begin(step)
            state, new = mechanism.step(state, row, dealer)
            releases += new
        _, last = mechanism.finish(state, dealer)
        return releases + last


@dataclass(frozen=True, kw_only=True)
class SideBySide:
    """All runs at once, each in bins of its own: for mechanisms that treat every bin alike.

    Why these are as good as separate runs: such a mechanism applies one function to every bin
    (groups, orders, buckets and sums are those of a column) and draws one independent number per
    coordinate, so that what it publishes of a run's bins is a function of those bins and of draws
    that no other bin uses. `tests/audit/test_samplers.py` checks it for each mechanism that is
    sampled like this: without noise, no bin moves another one's answers, whatever it holds.
    """

    mechanism: Mechanism

    def __call__(self, data: Integers, runs: int, secret: bytes) -> Reals:
        """One run over `runs` copies of the bins."""
        steps, bins = data.shape
        wide = np.tile(data, (1, runs))
        releases = OneByOne(mechanism=self.mechanism)._run(wide, Dealer(secret))
        values = np.array([r.values for r in sorted(releases, key=lambda r: r.step)])
        return values.reshape(steps, runs, bins).transpose(1, 0, 2).reshape(runs, steps * bins)


@dataclass(frozen=True, kw_only=True)
class ChoicesApart:
    """All runs at once, for mechanisms that choose and never look back at what they chose.

    Their questions (scores, sensitivity, epsilon) then depend on the data alone, which two runs
    with different noise check each time, so that the draws of all steps are independent. They are
    drawn here from the declared weights exp(epsilon score / (2 sensitivity)); that the door to
    noise draws with these weights is a row of its own ("choice") and a law.
    """

    mechanism: Mechanism

    def __call__(self, data: Integers, runs: int, secret: bytes) -> Reals:
        """Runs x what was chosen at each step that paid."""
        rng = np.random.default_rng(np.frombuffer(secret, np.uint64))
        weights = self._weights(data, secret)
        columns = [rng.choice(len(logs), size=runs, p=np.exp(logs)) for logs in weights]
        return np.stack(columns, axis=1).astype(np.float64)

    def loss(self, one: Integers, two: Integers) -> float:
        """The largest log ratio of any path's probabilities, exactly, in either order."""
        steps = list(zip(*(self._weights(data, bytes(32)) for data in (one, two)), strict=True))
        there = sum(float((p - q).max()) for p, q in steps)
        return max(there, sum(float((q - p).max()) for p, q in steps))

    def _weights(self, data: Integers, secret: bytes) -> list[Reals]:
        """Of each step that pays: the log of every candidate's probability."""
        calls, same = (self._questions(data, secret[:31] + end) for end in (b"a", b"b"))
        if [c.question() for c in calls] != [c.question() for c in same] or any(
            (one.value != two.value).any() for one, two in zip(calls, same, strict=True)
        ):
            raise InvalidParameter("this mechanism looks back at its choices; run it one by one")
        found = []
        for call in calls:
            exponents = float(call.amount / (2 * call.sensitivity)) * call.value
            found.append(exponents - np.logaddexp.reduce(exponents))
        return found

    def _questions(self, data: Integers, secret: bytes) -> list[Call]:
        recorder = Recorder(Dealer(secret))  # type: ignore[arg-type]
        drive(self.mechanism, data, recorder)
        return [call for call in recorder.calls if call.kind == "choose"]


def outputs(releases: Iterable[Release]) -> Reals:
    """All that a list of releases shows, as one row."""
    ordered = sorted(releases, key=lambda release: release.step)
    values = [release.values for release in ordered]
    return np.concatenate([*values, np.array([float(release.paid) for release in ordered])])
