"""What is audited: a claim, a way to run it, and neighbours to run it on."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from dpstream.audit.lower_bounds import LEARNERS, Bound, Learner, lower_bound
from dpstream.audit.mechanism_samplers import Sampler
from dpstream.records import Integers

CONFIDENCE = 0.999
FINALISTS = 2
"""Pairs that are tested, of those that were tried out: they share the error."""
_SCOUT = 16  # trying a pair out takes this part of the runs of a test
_LOOSE = 0.05

Row: TypeAlias = dict[str, Any]
Watch: TypeAlias = Callable[[int, int], None]


@runtime_checkable
class Reported(Protocol):
    """An input that says in a report what it is."""

    def facts(self) -> Mapping[str, Any]:
        """As JSON has them."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two inputs that differ by one unit."""

    name: str
    one: Any
    two: Any

    def facts(self) -> dict[str, Any]:
        """The witness, for a report."""
        one, two = (
            data.facts() if isinstance(data, Reported) else np.asarray(data).tolist()
            for data in (self.one, self.two)
        )
        return {"name": self.name, "one": one, "two": two}


def block(*rows: Any) -> Integers:
    """A stream written down: steps x bins."""
    return np.array(rows, dtype=np.int64).reshape(len(rows), -1)


@dataclass(frozen=True, kw_only=True)
class _Claim:
    name: str
    about: str
    epsilon: float
    delta: float = 0.0
    control: bool = False
    simple: bool = False

    def _row(self, bound: float, began: float, **facts: Any) -> Row:
        """A line of the report, for work that began at this time."""
        return {
            "name": self.name,
            "control": self.control,
            "claimed": self.epsilon,
            "delta": self.delta,
            "lower_bound": bound,
            "share_of_claim": bound / self.epsilon,
            "rejected": bound > self.epsilon,
            "about": self.about,
            "simple": self.simple,
            **facts,
            "seconds": round(time.perf_counter() - began, 2),
        }


@dataclass(frozen=True, kw_only=True)
class Target(_Claim):
    """A claim that runs can refute.

    `runs`: of each world, in a quick audit and in a full one. A quick audit tests the first pair
    alone. `simple`: the attack should come near the claim.
    """

    sample: Sampler
    pairs: tuple[Pair, ...]
    runs: tuple[int, int] = (2_000, 10_000)
    learners: Mapping[str, Learner] = field(default_factory=lambda: LEARNERS)

    def audit(self, *, quick: bool, seed: int, watch: Watch) -> Row:
        """Try every pair out, test the best ones on fresh runs, keep the strongest bound."""
        began, runs = time.perf_counter(), self.runs[0 if quick else 1]
        tried = self.pairs[:1] if quick else self.pairs
        few, total = min(runs, max(400, runs // _SCOUT)), len(tried) + FINALISTS
        promises = [0.0] * len(tried)
        for number, pair in enumerate(tried if len(tried) > 1 else ()):
            promises[number] = self._bound(pair, few, f"{seed} scout {number}", _LOOSE).epsilon
            watch(number + 1, total)
        best = sorted(range(len(tried)), key=promises.__getitem__, reverse=True)[:FINALISTS]
        bounds = []
        for done, number in enumerate(best, start=1):
            pair, error = tried[number], (1 - CONFIDENCE) / len(best)
            bounds.append((self._bound(pair, runs, f"{seed} test {number}", error), pair))
            watch(len(tried) + done, total)
        bound, pair = max(bounds, key=lambda tested: tested[0].epsilon)
        return self._row(
            bound.epsilon,
            began,
            method="events",
            confidence=CONFIDENCE,
            delta_lower_bound=bound.delta,
            runs=runs,
            seed=seed,
            tests=len(bounds),
            witness={"pair": pair.facts(), "event": asdict(bound.event)},
        )

    def _bound(self, pair: Pair, runs: int, part: str, error: float) -> Bound:
        one, two = (
            self.sample(data, runs, secret_of(f"{self.name} {part} {world}"))
            for world, data in (("one", pair.one), ("two", pair.two))
        )
        claim: dict[str, float] = {"epsilon": self.epsilon, "delta": self.delta}
        return lower_bound(one, two, error=error, learners=self.learners, **claim)


@dataclass(frozen=True, kw_only=True)
class Exact(_Claim):
    """A claim that arithmetic refutes: the log ratio of two probabilities of one outcome."""

    loss: Callable[[], float]
    witness: str
    control: bool = True

    def audit(self, *, quick: bool, seed: int, watch: Watch) -> Row:
        """Compute it; nothing is random."""
        began, loss = time.perf_counter(), self.loss()
        watch(1, 1)
        facts: Row = {"method": "exact", "confidence": 1.0, "runs": 0, "seed": seed}
        return self._row(loss, began, **facts, witness={"outcome": self.witness})


Audited: TypeAlias = Target | Exact
Maker: TypeAlias = Callable[[str], Audited]
"""From the name of a row to what is audited in it."""
Catalogue: TypeAlias = dict[str, Callable[[], Audited]]
"""By name; a target is made when it is asked for, because planning a query takes time."""


def by_name(**makers: Maker) -> Catalogue:
    """Give every target the name that it is listed under."""
    return {name: partial(make, name) for name, make in makers.items()}


def target(about: str, sample: Sampler, *pairs: Pair, **facts: Any) -> Maker:
    """A `Target` that has all but its name."""
    return lambda name: Target(name=name, about=about, sample=sample, pairs=pairs, **facts)


def secret_of(text: str) -> bytes:
    """A secret for each part of an audit, so that a report can be made again."""
    return hashlib.blake2b(text.encode(), digest_size=32).digest()
