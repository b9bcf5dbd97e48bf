"""Everything that is shipped, with its claim: mechanisms by their family, queries, noise itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from fractions import Fraction
from typing import Any

import numpy as np

from dpstream.audit.books import book_targets
from dpstream.audit.dealer import real_spend
from dpstream.audit.neighbours import Pair, block, pairs_of, present
from dpstream.audit.queries import query_targets
from dpstream.audit.samplers import ChoicesApart, OneByOne, Sampler, SideBySide
from dpstream.audit.series_queries import series_targets
from dpstream.audit.targets import Audited, Exact, Target
from dpstream.audit.user_level import HARD, user_targets
from dpstream.mechanisms import REGISTRY, find
from dpstream.mechanisms.base import HistogramMechanism, Mechanism, SeriesMechanism
from dpstream.mechanisms.infinite.dpi import Dpi
from dpstream.mechanisms.parts.counting.budget import CountingParameters
from dpstream.mechanisms.parts.counting.mechanism import CounterMechanism
from dpstream.privacy.curves import zcdp_epsilon
from dpstream.records import Integers, Reals

EPSILON, WINDOW, DELAY, DELTA = 2, 3, 3, 0.01
RHO = Fraction(1, 2)
LO, HI = 0, 8

EXTRA: dict[str, dict[str, Any]] = {
    "adapub": {"pivots": 2},
    "contin_group": {"threshold": 2},
    "discontin_group": {"threshold": 2},
    "buc_order": {"bucket": 2},
    "sensitivity_truncation": {"options": (("threshold", 2),), "every": 2},
    "dpi": HARD,
}
"""What a mechanism needs beside its family's parameters."""

SIMPLE = ("uniform", "sample", "naive")
BINS_APART = (
    *SIMPLE,
    "pegasus_w",
    "pegasus",
    "pegasus_delay",
    "contin_group",
    "discontin_group",
    "comp_order",
    "buc_order",
    "block_smoother",
)
"""Mechanisms, beside the counters, that treat every bin by itself: see `SideBySide`."""

_MANY, _SLOW = (24_000, 200_000), (1_200, 8_000)
_USERS, _APART = (3_000, 20_000), (16_000, 100_000)

WORST: dict[str, str] = {
    "uniform": "flat counts, steps 3 to 5, one bin",
    "sample": "jumping counts, steps 0 to 2, the low bin",
    "budget_distribution": "jumping counts, steps 0 to 2, one bin",
    "budget_absorption": "random counts 0",
    "spas": "jumping counts, steps 0 to 2, another bin each step",
    "pacer": "random counts 1",
    "fast_w": "flat counts, steps 0 to 2, one bin",
    "dsat": "flat counts, steps 0 to 2, another bin each step",
    "dsft": "random counts 3",
    "pegasus_w": "jumping counts, steps 0 to 2, the low bin",
    "adapub": "random counts 0",
    "naive": "all at the lower end, step 1 from 0 to 8",
}
"""The pair that full audits found worst: the one that a quick audit tries."""


def example(name: str) -> Mechanism:
    """A registered mechanism with small parameters."""
    cls: type[Any] = find(name)
    family: dict[str, Any] = {"epsilon": EPSILON}
    if issubclass(cls, HistogramMechanism):
        family |= {"window": WINDOW}
    elif issubclass(cls, SeriesMechanism):
        family |= {"lo": LO, "hi": HI}
        if "delay" in {field.name for field in fields(cls)}:
            family["delay"] = DELAY
    elif issubclass(cls, CountingParameters):
        family = {"rho": RHO}
        if issubclass(cls, CounterMechanism):
            family["steps"] = 8
    made: Mechanism = cls(**(family | EXTRA.get(name, {})))
    return made


def mechanism_target(name: str) -> Target:
    """One registered mechanism against its own terms."""
    mechanism = example(name)
    counts = isinstance(mechanism, CountingParameters)
    apart, simple = counts or name in BINS_APART, counts or name in SIMPLE
    sample: Sampler = OneByOne(mechanism=mechanism)
    if apart:
        sample = SideBySide(mechanism=mechanism)
    users = mechanism.terms().unit == "user"
    first, *_ = (type(mechanism).__doc__ or name).splitlines()
    claim: dict[str, Any] = {"epsilon": float(EPSILON)}
    if counts:
        claim = {"epsilon": zcdp_epsilon(rho=float(RHO), delta=DELTA), "delta": DELTA}
    return Target(
        name=name,
        about=first,
        sample=sample,
        pairs=tuple(sorted(pairs_of(mechanism), key=lambda pair: pair.name != WORST.get(name))),
        simple=simple,
        runs=_MANY if simple else _APART if apart else _USERS if users else _SLOW,
        **claim,
    )


def _laplace(data: Integers, runs: int, secret: bytes) -> Reals:
    return _drawn(secret, "laplace", np.repeat(data[:1], runs, axis=0), epsilon=Fraction(1))


def _gaussian(data: Integers, runs: int, secret: bytes) -> Reals:
    return _drawn(secret, "gaussian", np.repeat(data[:1], runs, axis=0), rho=RHO)


def _respond(data: Integers, runs: int, secret: bytes) -> Reals:
    spend = real_spend(secret)
    spend.begin(0, lambda _: "")
    asked = np.repeat(data[0], runs)
    found = spend.respond(asked, buckets=4, epsilon=Fraction(1), purpose="audit")
    return found.astype(np.float64)[:, None]


def _choose(data: Integers, runs: int, secret: bytes) -> Reals:
    spend, found = real_spend(secret), np.empty((runs, 1))
    for run in range(runs):
        spend.begin(run, lambda _: "")
        found[run] = spend.choose(
            data[0], sensitivity=Fraction(1), epsilon=Fraction(1), purpose="audit"
        )
    return found


def _drawn(secret: bytes, kind: str, value: Integers, **amount: Fraction) -> Reals:
    spend = real_spend(secret, "rho" if "rho" in amount else "epsilon")
    spend.begin(0, lambda _: "")
    noisy = getattr(spend, kind)(value, sensitivity=Fraction(1), purpose="audit", **amount)
    found: Reals = noisy.astype(np.float64)
    return found


def draw_targets() -> dict[str, Callable[[], Target]]:
    """The four draws that everything else is made of, straight from the door to noise."""
    one_more = (Pair(name="one more", one=block([5]), two=block([6])),)
    gaussian = {"epsilon": zcdp_epsilon(rho=float(RHO), delta=DELTA), "delta": DELTA}
    buckets = (Pair(name="another bucket", one=block([0]), two=block([3])),)
    scores = (Pair(name="scores part", one=block([5, 4, 4]), two=block([4, 5, 5])),)
    about = "One draw of the door to noise."

    def target(name: str, **facts: Any) -> Callable[[], Target]:
        return lambda: Target(name=name, about=about, simple=True, **{"runs": _MANY} | facts)

    return {
        "laplace": target("laplace", sample=_laplace, pairs=one_more, epsilon=1.0),
        "gaussian": target("gaussian", sample=_gaussian, pairs=one_more, **gaussian),
        "randomised_response": target(
            "randomised_response", sample=_respond, pairs=buckets, epsilon=1.0
        ),
        "choice": target("choice", sample=_choose, pairs=scores, epsilon=1.0, runs=(4_000, 40_000)),
    }


def _dpi_exactly() -> Exact:
    """Over 200 slots, so many that runs show nothing; budgets in any order, one row of a user."""
    mechanism = Dpi(epsilon=EPSILON, rows_per_user=1, pool_size=20, allocation="ranges")
    pair = present()
    return Exact(
        name="dpi_exactly",
        about="DPI: the worst path of choices over all slots, computed.",
        loss=lambda: ChoicesApart(mechanism=mechanism).loss(pair.one, pair.two),
        epsilon=float(EPSILON),
        witness=f"{pair.name}; the choices that they make likelier, in every slot",
        control=False,
    )


def shipped() -> dict[str, Callable[[], Audited]]:
    """By name, and made when asked for."""
    mechanisms = {name: lambda name=name: mechanism_target(name) for name in REGISTRY}
    return {
        **draw_targets(),
        **mechanisms,
        "dpi_exactly": _dpi_exactly,
        **user_targets(),
        **query_targets(),
        **series_targets(),
        **book_targets(),
    }
