"""What DPI's allocations leave of the budget, by the ledger; and Theorem 5.4's learning rates."""

from __future__ import annotations

from fractions import Fraction
from typing import Final

from dpstream.bench.harness import Row
from dpstream.mechanisms.parts.synopses.allocation import allocation
from dpstream.mechanisms.parts.synopses.series import series
from dpstream.mechanisms.parts.synopses.theorem import Theorem54
from dpstream.privacy.amounts import on_grid
from dpstream.privacy.charges import Cells, Charge, Terms
from dpstream.privacy.ledger import Ledger

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
    terms = series(kind, total=EPSILON, change=Fraction(2), decay=Fraction(1))
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
