"""The parts of the DPI bench: its streams, what is left of the budget, and a long run.

Streams are the paper's synthetic design, two that are not nearly even, and a real one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Final

import numpy as np

from benchmarks.harness import Row
from benchmarks.streams import Stream, streams
from dpstream.evaluate.trials import fixed_noise
from dpstream.mechanisms.infinite.budget_series import (
    allocation,
    budget_series,
    gap_for,
    one_minus_power,
)
from dpstream.mechanisms.infinite.dpi import Dpi
from dpstream.mechanisms.runner import Runner
from dpstream.privacy.amounts import on_grid
from dpstream.privacy.ledger.charges import Cells, Charge, Terms
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.state import pack
from dpstream.records import Integers, Reals

ROWS: Final = 10_000
"""Rows of a slot, about, where the domain has 100 bins."""

_CHUNK: Final = 500


def gaussian_counts(
    slots: int, *, items: int = 100, mean: float = 100, seed: int = 0
) -> Iterator[Integers]:
    """Section 6.4 of the paper: in every slot one variance of 1, 4, ..., 100, drawn afresh.

    The truth is the uniform distribution plus noise that no slot shares with another.
    """
    rng = np.random.default_rng(seed)
    for first in range(0, slots, _CHUNK):
        count = min(_CHUNK, slots - first)
        deviation = rng.integers(1, 11, (count, 1))
        drawn = rng.standard_normal((count, items), dtype=np.float32) * deviation + mean
        yield np.rint(np.maximum(drawn, 0)).astype(np.int64)


def zipf_counts(slots: int, *, items: int = 100, seed: int = 0) -> Integers:
    """Shares like 1 / rank^1.1 in the order of the bins: skewed, and the same in every slot."""
    shares = np.arange(1.0, items + 1) ** -1.1
    return np.random.default_rng(seed).poisson(ROWS * shares / shares.sum(), (slots, items))


def moving_bump(slots: int, *, items: int = 100, seed: int = 0) -> Integers:
    """A bump that moves over a third of the domain within the stream."""
    middle = items * (0.3 + 0.3 * np.arange(slots)[:, None] / slots)
    weights = np.exp(-0.5 * ((np.arange(items) - middle) / (items / 10)) ** 2)
    rows = ROWS * weights / weights.sum(axis=1, keepdims=True)
    block: Integers = np.random.default_rng(seed).poisson(rows)
    return block


def all_streams(slots: int) -> list[Stream]:
    """Gaussian counts at full length, the others a fifth of it; a taxi is one row of a slot."""
    gaussian = np.concatenate(list(gaussian_counts(slots)))
    taxis = next(one for one in streams(steps=slots // 5) if one.name == "t-drive")
    return [
        Stream(name="gaussian", source="generated", block=gaussian),
        Stream(name="zipf", source="generated", block=zipf_counts(slots // 5)),
        Stream(name="moving bump", source="generated", block=moving_bump(slots // 5)),
        taxis,
    ]


def distributions(block: Integers) -> Reals:
    """Counts as distributions; an empty slot is even."""
    rows = block.sum(axis=1, keepdims=True)
    shares: Reals = np.where(rows > 0, block / np.maximum(rows, 1), 1 / block.shape[1])
    return shares


def mean_squared(pdfs: Reals, truth: Reals) -> Reals:
    """By slot.

    >>> mean_squared(np.array([[0.5, 0.5]]), np.array([[0.6, 0.4]])).round(3).tolist()
    [0.01]
    """
    errors: Reals = ((pdfs - truth) ** 2).mean(axis=1)
    return errors


def divergence(pdfs: Reals, truth: Reals, least: float = 1e-9) -> Reals:
    """KL divergence of the release from the truth, by slot; released shares count as `least`.

    >>> divergence(np.array([[0.5, 0.5]]), np.array([[1.0, 0.0]])).round(4).tolist()
    [0.6931]
    """
    ratio = np.maximum(truth, least) / np.maximum(pdfs, least)
    found: Reals = np.where(truth > 0, truth * np.log(ratio), 0.0).sum(axis=1)
    return found


EPSILON: Final = Fraction(1)
RATE: Final = Fraction(10**8)
KNOWN_ETA: Final = (0.0415, 0.0190, 0.0117)
KNOWN_M_SQUARED: Final = 0.8337
SHOWN: Final = (100, 1_000, 10_000, 100_000, 200_000, 1_000_000)

# Algorithm 3 with the paper's rate, and with one that spends; Algorithm 4.
SCHEDULES: Final[dict[str, tuple[str, str, Fraction]]] = {
    "Algorithm 3": ("random", "telescoping", RATE),
    "Algorithm 3, rate 100": ("random", "telescoping", Fraction(100)),
    "Algorithm 4": ("ranges", "telescoping", RATE),
    "Algorithm 4, Theorem 5.4": ("ranges", "dilogarithm", RATE),
}
JUDGED: Final = ("Algorithm 3", "Algorithm 4")


def budget_rows(slots: int) -> list[Row]:
    """Every slot's charge in a book of users that promises epsilon = 1, in a row at decades."""
    rows: list[Row] = []
    for name, (rule, terms, rate) in SCHEDULES.items():
        count = slots if name in JUDGED else min(slots, 200_000)
        rows += _charged(name, rule, terms, rate, count)
    return rows


def _charged(name: str, rule: str, kind: str, rate: Fraction, slots: int) -> list[Row]:
    ledger = Ledger()
    ledger.open("bench", Terms(unit="user", total=EPSILON))
    terms = budget_series(kind, total=EPSILON, change=Fraction(2), decay=Fraction(1))
    picking = allocation(rule, series=terms, rate=rate, seed=0)
    used, rows = picking.start(), []
    for slot in range(1, slots + 1):
        used, term = picking.pick(used, slot)
        half = on_grid(terms.term(term) / 2)  # one for each of the two draws
        cells = Cells(first=slot - 1, last=slot - 1)
        charge = Charge(
            run="bench", query="", purpose="slot", step=slot - 1, amount=2 * half, cells=cells
        )
        ledger.charge("bench", charge)  # raises if it does not fit
        if slot in SHOWN or slot == slots:
            left = ledger.left("bench")
            rows.append(
                {"part": "budget", "form": name, "slots": slot, "epsilon": float(EPSILON)}
                | {"spent": float(EPSILON - left), "left": float(left)}
                | {"within": bool(left >= 0)}
            )
    return rows


@dataclass(frozen=True, kw_only=True)
class Theorem54:
    """The series as the paper states it, for a claimed epsilon; `true_cost` is what it spends.

    C (Li2(1) - Li2(m^2)) = epsilon with C = change_of_pdf / (mu zeta).

    >>> printed = Theorem54(epsilon=2, mu=0.5)
    >>> round(printed.m_squared, 4), [round(printed.eta(t), 4) for t in (1, 2, 3)]
    (0.8337, [0.0415, 0.019, 0.0117])
    >>> round(Theorem54(epsilon=1, mu=2).true_cost / 1, 3)
    4.0
    """

    epsilon: float
    mu: float
    zeta: float = 1.0
    change_of_pdf: float = 2.0

    @property
    def constant(self) -> float:
        """The paper's C."""
        return self.change_of_pdf / (self.mu * self.zeta)

    @cached_property
    def m_squared(self) -> float:
        """Li2^-1(pi^2 / 6 - epsilon / C)."""
        return 1 - gap_for(
            self.epsilon / self.constant,
            lambda most: (
                f"Theorem 5.4 needs epsilon < C pi^2 / 6 = {self.constant * most:g} (C = "
                f"{self.constant:g}); got epsilon={self.epsilon:g}; lower epsilon, mu or zeta"
            ),
        )

    def x(self, t: int) -> float:
        """X_t."""
        return one_minus_power(1 - self.m_squared, t) / (t * t * self.zeta)

    def eta(self, t: int) -> float:
        """The learning rate of slot t: tanh(X_t / 2) / 2."""
        return math.tanh(self.x(t) / 2) / 2

    @property
    def true_cost(self) -> float:
        """What all draws cost a user: 2 score_change * sum of X_t."""
        change = min(2.0, 2 * self.change_of_pdf / self.mu)
        return 2 * change * self.epsilon / self.constant / self.zeta


def eta_rows() -> list[Row]:
    """The learning rates of Theorem 5.4 at mu = 0.5, zeta = 1, epsilon = 2, and true costs."""
    printed = Theorem54(epsilon=2, mu=0.5)
    rows: list[Row] = [
        {"part": "eta", "slot": t, "value": printed.eta(t), "known": known}
        for t, known in enumerate(KNOWN_ETA, start=1)
    ]
    rows.append({"part": "eta", "value": printed.m_squared, "known": KNOWN_M_SQUARED})
    for mu in (0.5, 1, 2):
        claimed = Theorem54(epsilon=1, mu=mu)
        rows.append({"part": "true cost", "mu": mu, "epsilon": 1.0, "value": claimed.true_cost})
    return rows


DOMAIN, POOL, SLOTS = 10_000, 6_500, 100_000
_ERRORS_EVERY: Final = 50
_SHARES: Final = 10  # rows, each over so large a part of the run
_WARM: Final = 3


def long_rows(slots: int, progress: Callable[[float], None]) -> list[Row]:
    """Both draws charged in every slot (Algorithm 3), three queries, a pool of 6,500.

    Making the pool and compiling are not in the time per slot; they have their own column.
    """
    mechanism = Dpi(
        epsilon=2,
        rows_per_user=1,
        dummy_rows=1_000_000,
        pool_size=POOL,
        allocation="random",
        series="telescoping",
        queries=(DOMAIN, 16, 4),
    )
    began = time.perf_counter()
    runner = Runner(mechanism, **fixed_noise("dpi long", 0))
    warm = np.concatenate(list(gaussian_counts(_WARM, items=DOMAIN, mean=1_000, seed=1)))
    for _ in runner.feed(warm):
        pass
    made = time.perf_counter() - began
    rows: list[Row] = []
    seconds, cpu, done = 0.0, 0.0, 0
    errors: list[tuple[float, float]] = []
    for block in gaussian_counts(slots, items=DOMAIN, mean=1_000):
        wall, processor = time.perf_counter(), time.process_time()
        values = [releases[0].values for releases in runner.feed(block)]
        seconds += time.perf_counter() - wall
        cpu += time.process_time() - processor
        picked = slice(0, len(block), _ERRORS_EVERY)
        truth, found = distributions(block[picked]), np.array(values[picked])
        errors += zip(
            mean_squared(found, truth).tolist(), divergence(found, truth).tolist(), strict=True
        )
        even = np.full(truth.shape, 1 / DOMAIN)
        last, done = done, done + len(block)
        progress(done / slots)
        if done == slots or _SHARES * done // slots > _SHARES * last // slots:
            mse, kl = (float(np.mean([pair[i] for pair in errors])) for i in (0, 1))
            errors = []
            rows.append(
                {"part": "long", "form": "Algorithm 3", "slots": done, "bins": DOMAIN}
                | {"pool": POOL, "seconds": seconds, "cpu_seconds": cpu}
                | {"ms_per_slot": 1e3 * seconds / done, "made_in_seconds": made}
                | {"mse": mse, "kl": kl, "uniform_mse": float(mean_squared(even, truth).mean())}
                | {"uniform_kl": float(divergence(even, truth).mean())}
                | {"state_bytes": len(pack(runner._progress.state, kind="mechanism state"))}
                | {"left": float(runner.left)}
            )
    return rows
