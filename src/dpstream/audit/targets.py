"""What is audited: a claim, a way to run it, and neighbours to run it on."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeAlias

from dpstream.audit.lower_bounds import LEARNERS, Bound, Learner, lower_bound
from dpstream.audit.mechanism_samplers import Sampler
from dpstream.audit.neighbours import Pair

CONFIDENCE = 0.999
FINALISTS = 2
"""Pairs that are tested, of those that were tried out: they share the error."""
_SCOUT = 16  # trying a pair out takes this part of the runs of a test
_LOOSE = 0.05

Row: TypeAlias = dict[str, Any]
Watch: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A claim that runs can refute.

    `runs`: of each world, in a quick audit and in a full one. A quick audit tests the first pair
    alone. `simple`: the attack should come near the claim.
    """

    name: str
    about: str
    sample: Sampler
    pairs: tuple[Pair, ...]
    epsilon: float
    delta: float = 0.0
    control: bool = False
    simple: bool = False
    runs: tuple[int, int] = (2_000, 10_000)
    learners: Mapping[str, Learner] = field(default_factory=lambda: LEARNERS)

    def audit(self, *, quick: bool, seed: int, watch: Watch) -> Row:
        """Try every pair out, test the best ones on fresh runs, keep the strongest bound."""
        began, runs, error = time.perf_counter(), self.runs[0 if quick else 1], 1 - CONFIDENCE
        tried = self.pairs[:1] if quick else self.pairs
        few = min(runs, max(400, runs // _SCOUT))
        total, promises = len(tried) + FINALISTS, []
        for number, pair in enumerate(tried):
            if len(tried) == 1:
                promises.append((0.0, 0))
                break
            found = self._bound(pair, few, f"{seed} scout {number}", _LOOSE)
            promises.append((found.epsilon, -number))
            watch(number + 1, total)
        best = sorted(promises, reverse=True)[:FINALISTS]
        bounds = []
        for done, (_, number) in enumerate(best, start=1):
            pair = self.pairs[-number]
            share = error / len(best)
            bounds.append((self._bound(pair, runs, f"{seed} test {-number}", share), pair))
            watch(len(tried) + done, total)
        bound, pair = max(bounds, key=lambda found: found[0].epsilon)
        return _row(
            self,
            bound.epsilon,
            method="events",
            confidence=CONFIDENCE,
            delta_lower_bound=bound.delta,
            runs=runs,
            seed=seed,
            tests=len(bounds),
            witness={"pair": pair.facts(), "event": asdict(bound.event)},
            seconds=round(time.perf_counter() - began, 2),
        )

    def _bound(self, pair: Pair, runs: int, part: str, error: float) -> Bound:
        one, two = (
            self.sample(data, runs, secret_of(f"{self.name} {part} {world}"))
            for world, data in (("one", pair.one), ("two", pair.two))
        )
        claim: dict[str, float] = {"epsilon": self.epsilon, "delta": self.delta}
        return lower_bound(one, two, error=error, learners=self.learners, **claim)


@dataclass(frozen=True, kw_only=True)
class Exact:
    """A claim that arithmetic refutes: the log ratio of two probabilities of one outcome."""

    name: str
    about: str
    loss: Callable[[], float]
    epsilon: float
    witness: str
    delta: float = 0.0
    control: bool = True
    simple: bool = False

    def audit(self, *, quick: bool, seed: int, watch: Watch) -> Row:
        """Compute it; nothing is random."""
        began = time.perf_counter()
        loss = self.loss()
        watch(1, 1)
        return _row(
            self,
            loss,
            method="exact",
            confidence=1.0,
            runs=0,
            seed=seed,
            witness={"outcome": self.witness},
            seconds=round(time.perf_counter() - began, 2),
        )


Audited: TypeAlias = Target | Exact
Maker: TypeAlias = Callable[[str], Target]
"""From the name of a row to what is audited in it."""
Catalogue: TypeAlias = dict[str, Callable[[], Audited]]
"""By name; a target is made when it is asked for, because planning a query takes time."""


def by_name(makers: Mapping[str, Callable[[str], Audited]]) -> Catalogue:
    """Give every target the name that it is listed under."""
    return {name: partial(make, name) for name, make in makers.items()}


def _row(target: Audited, bound: float, **facts: Any) -> Row:
    """A line of the report."""
    return {
        "name": target.name,
        "control": target.control,
        "claimed": target.epsilon,
        "delta": target.delta,
        "lower_bound": bound,
        "share_of_claim": bound / target.epsilon,
        "rejected": bound > target.epsilon,
        "about": target.about,
        "simple": target.simple,
        **facts,
    }


def secret_of(text: str) -> bytes:
    """A secret for each part of an audit, so that a report can be made again."""
    return hashlib.blake2b(text.encode(), digest_size=32).digest()
