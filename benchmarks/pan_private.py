"""What it costs in accuracy that memory may be seen: counts of steps, and distinct users per key.

Counts: a total epsilon is split between the mechanism and one intrusion, and the mean relative
error is divided by that of the same mechanism with all of the total and memory that must not be
seen. Users: the pan-private density estimator of Dwork, Naor, Pitassi, Rothblum, Yekhanin,
"Pan-Private Streaming Algorithms", 2010, one bit for each possible user and key, beside the noise
of one count of users that keeps exact sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from typing import Any, Final

import numpy as np

from benchmarks.harness import Findings, Progress, Row, target
from benchmarks.streams import streams
from dpstream.evaluate.trials import relative_errors
from dpstream.mechanisms import find
from dpstream.mechanisms.pan_private import PanPrivateRunner
from dpstream.privacy.accounting.curves import gdp_mu
from dpstream.records import Integers

MECHANISMS: Final = ("uniform", "sample", "budget_distribution", "budget_absorption", "pacer")
STREAMS: Final = ("unemployment", "flu outpatients", "t-drive", "synthetic 2")
SHARES: Final = tuple(map(Fraction, ("0", "1/8", "1/4", "1/2")))
"""Of the total, for the intrusion; 0: memory must not be seen."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    epsilons: Sequence[Fraction]
    window: int
    steps: int
    runs: int
    users: Sequence[int]


FULL: Final = Plan(
    epsilons=(Fraction(1, 2), Fraction(2)),
    window=40,
    steps=300,
    runs=2,
    users=(1_000, 10_000, 100_000, 1_000_000),
)
QUICK: Final = Plan(epsilons=(Fraction(1),), window=20, steps=120, runs=1, users=(1_000, 10_000))


class _Fixed(PanPrivateRunner):
    """Keys from a name, for public data: the same figures again."""

    def __init__(self, name: str, **asked: Any) -> None:
        self._name, self._asked = name, 0
        super().__init__(**asked)

    def _new_key(self) -> bytes:
        self._asked += 1
        return blake2b(f"{self._name} {self._asked}".encode(), digest_size=32).digest()


def measure(*, quick: bool, progress: Progress) -> Findings:
    """Both questions."""
    plan = QUICK if quick else FULL
    found = [each for each in streams(steps=plan.steps) if each.name in STREAMS]
    blocks = {each.name: each.block for each in found if each.block is not None}
    cells = [(name, epsilon) for name in blocks for epsilon in plan.epsilons]
    rows: list[Row] = []
    for done, (name, epsilon) in enumerate(cells):
        progress(done, len(cells), f"{name}, epsilon {float(epsilon)}")
        for mechanism in MECHANISMS:
            rows += _split(mechanism, name, blocks[name], epsilon, plan)
    users = [distinct_users(size, epsilon) for size in plan.users for epsilon in (1.0, 6.0)]
    progress(len(cells), len(cells), "done")
    best = [min(r["times_plain"] for r in rows if r["mechanism"] == m) for m in MECHANISMS]
    return Findings(
        rows=rows + users,
        targets=[
            target("mechanisms that were run in both forms", float(len(best)), "==", 5),
            target(
                "users: measured error over its formula, worst",
                max(abs(row["rms"] / row["formula"] - 1) for row in users),
                "<=",
                0.2,
            ),
        ],
        notes=[f"streams: {', '.join(blocks)}", *(["a short run"] if quick else [])],
    )


def _split(mechanism: str, name: str, block: Integers, epsilon: Fraction, plan: Plan) -> list[Row]:
    """One mechanism on one stream, for each share of the intrusion."""
    errors = []
    for share in SHARES:
        runs = [
            _error(mechanism, block, epsilon, share, plan.window, f"{name} {epsilon} {run}")
            for run in range(plan.runs)
        ]
        errors.append(float(np.mean(runs)))
    return [
        {
            "mechanism": mechanism,
            "stream": name,
            "epsilon": float(epsilon),
            "intrusion": float(share * epsilon),
            "mre": error,
            "times_plain": error / errors[0],
        }
        for share, error in zip(SHARES[1:], errors[1:], strict=True)
    ]


def _error(
    mechanism: str, block: Integers, epsilon: Fraction, share: Fraction, window: int, name: str
) -> float:
    """Mean relative error of one run, whose book holds epsilon in all."""
    kind: Any = find(mechanism)
    runner = _Fixed(
        f"{mechanism} {share} {name}",
        mechanism=kind(epsilon=epsilon * (1 - share), window=window),
        bins=block.shape[1],
        intrusion=share * epsilon or None,
    )
    released = []
    for row in block:
        runner._counts += row  # all of the step's events, at once
        released.append(runner.end_step().values)
    assert runner.ledger.peak("stream") <= epsilon
    return float(relative_errors(np.array(released), block).mean())


def distinct_users(users: int, epsilon: float, *, keys: int = 40) -> Row:
    """The error of pan-private counts of users, measured on keys that a tenth of all have used.

    Each user and key has a bit: a fair coin, tossed again with odds for 1 when the user comes. At
    most one key is a user's here, so a key has all of epsilon; with C keys it would be a C-th.
    """
    up = 1 - math.exp(-epsilon) / 2  # the most for which neither face is e^epsilon times likelier
    rng = np.random.default_rng(users)
    came = users // 10
    ones = rng.binomial(users - came, 0.5, keys) + rng.binomial(came, up, keys)
    estimates = (ones - users / 2) / (up - 0.5)
    formula = math.sqrt((users - came) / 4 + came * up * (1 - up)) / (up - 0.5)
    exact = 1 / gdp_mu(epsilon=epsilon, delta=1e-9)
    return {
        "users": users,
        "epsilon": epsilon,
        "rms": float(np.sqrt(np.mean((estimates - came) ** 2))),
        "formula": formula,
        "exact_sums": exact,
        "bytes_per_key": users // 8,
    }
