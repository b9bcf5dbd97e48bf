"""DPI against users who decide slots: in its own draws, with several queries, and from rows.

The hard pair: all others have one row in the last bin, and the user has so many in the first that
every slot's distribution moves from one end to the other, by the whole of what is declared. Few
large budgets come first (`in_order`, `telescoping`), and the public pool is one in which a single
synopsis fits the user and the others fit everybody else: where it is chosen, a slot loses nearly
all of its budget. A stream in which budgets are small and many, or scores barely move, hides that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from dpstream.audit.controls.dpi_published import DpiPublished
from dpstream.audit.neighbours import Pair, deciding
from dpstream.audit.samplers import OneByOne
from dpstream.audit.targets import Target
from dpstream.mechanisms.from_rows import bounded_counts
from dpstream.mechanisms.infinite.dpi import Dpi
from dpstream.records import Integers, Reals

EPSILON, LARGE = 2, 6
"""A budget that several draws share shows only if it is large."""
HARD: dict[str, Any] = {
    "pool": "dirichlet",
    "pool_size": 4,
    "seed": 9,
    "allocation": "in_order",
    "series": "telescoping",
    "error_bound": Fraction(1, 2),
    "overfitting_bound": Fraction(1, 2),
}
"""Parameters of a DPI that has much to lose; the seed was looked for."""
SLOTS = 4
_RUNS = (3_000, 20_000)


@dataclass(frozen=True, kw_only=True)
class UserRows:
    """In each slot: so many rows of one user in the first bin, and users with one in the last."""

    unit: int
    others: int

    def facts(self) -> dict[str, int]:
        """For a report."""
        return {"unit": self.unit, "others": self.others, "slots": SLOTS}

    def columns(self) -> dict[str, Integers]:
        """One entry a row; user 0 is the target."""
        users = np.concatenate([np.zeros(self.unit, np.int64), 1 + np.arange(self.others)])
        everywhere = np.tile(users, SLOTS)
        steps = np.repeat(np.arange(SLOTS), len(users))
        return {"steps": steps, "users": everywhere, "bins": (everywhere > 0).astype(np.int64)}


@dataclass(frozen=True, kw_only=True)
class FromRows:
    """Rows of users to counts to releases; `bounded`: as many rows a slot as was declared."""

    mechanism: Dpi
    bounded: bool = True

    def __call__(self, data: UserRows, runs: int, secret: bytes) -> Reals:
        """As `OneByOne`, over what the bound leaves of the rows."""
        most = self.mechanism.rows_per_user if self.bounded else None
        limit = data.unit + data.others if most is None else most
        counts = bounded_counts(**data.columns(), slots=SLOTS, domain=2, rows_per_user=limit)
        return OneByOne(mechanism=self.mechanism)(counts, runs, secret)


_LINEAR = HARD | {"error_bound": 0, "overfitting_bound": 2}  # a score that moves everywhere
_TWO_QUERIES = Dpi(epsilon=LARGE, queries=(2, (1, 0)), **HARD)


def _from_rows(epsilon: int) -> Dpi:
    return Dpi(epsilon=epsilon, rows_per_user=1, dummy_rows=9, **_LINEAR)


def _user(others: int) -> Pair:
    """Nobody else moves the distribution most within the bound, many others most without it."""
    return Pair(
        name=f"a user with 2,000 rows a slot, beside {others} others",
        one=UserRows(unit=2_000, others=others),
        two=UserRows(unit=0, others=others),
    )


def _target(name: str, about: str, sample: Any, pair: Pair, **facts: Any) -> Callable[[], Target]:
    usual: dict[str, Any] = {"epsilon": float(EPSILON), "runs": _RUNS}
    return lambda: Target(name=name, about=about, sample=sample, pairs=(pair,), **usual | facts)


def user_targets() -> dict[str, Callable[[], Target]]:
    """DPI where it looks back, and from rows; its row of the registry has the same hard pair."""
    return {
        "dpi_queries": _target(
            "dpi_queries",
            "DPI with two queries: what was chosen steers the next draw.",
            OneByOne(mechanism=_TWO_QUERIES),
            deciding(),
            epsilon=float(LARGE),
        ),
        "dpi_rows": _target(
            "dpi_rows",
            "DPI from rows: one of a user a slot, nine dummy rows.",
            FromRows(mechanism=_from_rows(LARGE)),
            _user(0),
            epsilon=float(LARGE),
        ),
    }


def broken_user_targets() -> dict[str, Callable[[], Target]]:
    """DPI that is charged too little."""
    usual = HARD | {"series": "level", "allocation": "sparse"}
    return {
        "dpi_charged_once": _target(
            "dpi_charged_once",
            "DPI as printed, sampled: scores summed over 64 slots, charged as those of one.",
            OneByOne(mechanism=DpiPublished(epsilon=1, **usual)),
            deciding(64),
            epsilon=1.0,
            control=True,
            runs=(400, 2_000),
        ),
        "dpi_rows_unbounded": _target(
            "dpi_rows_unbounded",
            "DPI charged for one row of a user a slot, and given all of them.",
            FromRows(mechanism=_from_rows(EPSILON), bounded=False),
            _user(100),
            control=True,
            runs=(2_000, 10_000),
        ),
    }
