"""Histograms of facts about units: exact, or noisy and paid for.

The noisy ones are a query like any other: one row per unit and fact, grouped by (fact, bin), all
groups public. So the charge, the order of ledger and noise, and the noise itself are those of
`dpstream.run`. Proof: `docs/soundness/bounds.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from dpstream.choosing.facts import Facts
from dpstream.choosing.grids import COUNTS, SIZES, count_bins, value_bins
from dpstream.privacy.ledger import Ledger
from dpstream.records import Integers, Reals
from dpstream.session import run
from dpstream.stages.aggregates import Count
from dpstream.stages.plan import planned
from dpstream.stages.query import Query

BINS: Final = {"groups": len(COUNTS), "rows": len(COUNTS), "value": 2 * len(SIZES) + 1}
_FACT, _BIN, _UNITS = "dpstream fact", "dpstream bin", "dpstream units"


@dataclass(frozen=True, kw_only=True, eq=False)
class Histograms:
    """Units by bin, for each fact; `stddev` of the noise in a bin, 0 if they are exact."""

    bins: dict[str, Reals]
    stddev: float


def exact(facts: Facts) -> Histograms:
    """Counts as they are."""
    found = {
        fact: np.bincount(bins, minlength=BINS[fact]).astype(np.float64)
        for fact, bins in _binned(facts).items()
    }
    return Histograms(bins=found, stddev=0.0)


def _binned(facts: Facts) -> dict[str, Integers]:
    found = {"groups": count_bins(facts.groups), "rows": count_bins(facts.rows)}
    if facts.values is not None:
        found["value"] = value_bins(facts.values)
    return found


def question(reading: Query, *, facts: int, epsilon: Any, delta: Any) -> Query:
    """The query whose answer is all histograms; it protects what `reading` protects."""
    names = list(BINS)[:facts]
    return replace(
        reading,
        name="bounds",
        keys=(_FACT, _BIN),
        aggregates=(Count(_UNITS),),
        epsilon=epsilon,
        delta=delta,
        arrival=None,
        window=None,
        every=None,
        triggers=None,
        public_keys=[(name, number) for name in names for number in range(BINS[name])],
        max_groups_contributed=facts,
        max_rows_per_group=1,
        max_rows_contributed=None,
    )


def noisy(facts: Facts, asked: Query, *, ledger: Ledger | Any, dataset: str) -> Histograms:
    """Charge the question to the dataset's book, then draw."""
    (table,) = run(asked, source=_rows(facts, asked), ledger=ledger, dataset=dataset)
    found = {fact: np.zeros(BINS[fact]) for fact in _binned(facts)}
    names, bins = table[_FACT].to_pylist(), table[_BIN].to_pylist()
    for name, at, units in zip(names, bins, table[_UNITS].to_pylist(), strict=True):
        found[name][at] = units
    plan = planned(asked).window(1)
    return Histograms(bins=found, stddev=float(plan.stddevs[0, -1]))


def _rows(facts: Facts, asked: Query) -> pa.Table:
    """One row per unit and fact. A unit goes by its keyed id: a function of itself alone."""
    ids = np.ascontiguousarray(facts.units, "<u8").tobytes()
    units = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(16), len(facts.units), [None, pa.py_buffer(ids)]
    ).cast(pa.binary())
    times = _times(facts, asked)
    parts = []
    for name, bins in _binned(facts).items():
        columns = {asked.unit: units, _FACT: pa.array([name] * len(bins)), _BIN: pa.array(bins)}
        parts.append(pa.table(columns if times is None else columns | {str(asked.time): times}))
    return pa.concat_tables(parts)


def _times(facts: Facts, asked: Query) -> pa.Array | None:
    """A moment of each unit's period, within the public range, as the time column has them."""
    if asked.time is None:
        return None
    begins = np.full(len(facts.periods), asked.start, np.int64)
    if asked.periods is not None:
        known, where = np.unique(facts.periods, return_inverse=True)
        at = np.array([asked.periods.at(int(period)) for period in known], np.int64)
        begins = np.maximum(begins, at[where]) if len(at) else begins
    unit = asked.time_unit_micros
    if unit is None:
        return pa.array(begins, pa.timestamp("us", "UTC"))
    return pa.array(-(-(begins - int(asked.time_origin)) // unit))
