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

from dpstream.bounds_proposal.unit_facts import Facts
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.query.aggregates import Count
from dpstream.query.noise_plan import plan_query
from dpstream.query.query import Query
from dpstream.records import Integers, Reals
from dpstream.session import run

# Public grids: where a unit's count or value may fall. They never depend on the data.

_FINE: Final = 16  # counts up to here have a bin each
_PER_OCTAVE: Final = 2
_OCTAVES: Final = 12  # beyond 16; larger counts fall into the last bin
_DECADES: Final = range(-3, 12)


def _counts() -> Integers:
    wide = _FINE * 2 ** (np.arange(1, _PER_OCTAVE * _OCTAVES + 1) / _PER_OCTAVE)
    return np.concatenate([np.arange(1, _FINE + 1), np.round(wide).astype(np.int64)])


COUNTS: Final[Integers] = _counts()
"""Upper edges of the bins of counts: 1 to 16, then two per octave up to 65,536."""

SIZES: Final[Reals] = np.array([float(f"{m}e{d}") for d in _DECADES for m in (1, 2, 5)])
"""Sizes that clamps may have: 1, 2 and 5 times a power of ten, 0.001 to 5 * 10^11."""


def count_bins(counts: Integers) -> Integers:
    """The bin of each count: that of the least upper edge that holds it.

    >>> COUNTS[count_bins(np.array([1, 16, 17, 20, 10**9]))].tolist()
    [1, 16, 23, 23, 65536]
    """
    found: Integers = np.searchsorted(COUNTS, counts)
    return np.minimum(found, len(COUNTS) - 1)


def value_bins(values: Reals) -> Integers:
    """Bins from the most negative size over 0 (the middle one) to the largest.

    >>> value_bins(np.array([-1.5, 0.0, 2.0, 1e300])).tolist()
    [34, 45, 56, 90]
    """
    size = np.minimum(np.searchsorted(SIZES, np.abs(values)), len(SIZES) - 1)
    zero = len(SIZES)
    found: Integers = np.where(values == 0, zero, zero + np.sign(values) * (size + 1))
    return found.astype(np.int64)


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
        arrival_column=None,
        window=None,
        every=None,
        triggers=None,
        public_groups=tuple((name, number) for name in names for number in range(BINS[name])),
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
    plan = plan_query(asked).window(1)
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
        columns = {
            asked.privacy_unit_column: units,
            _FACT: pa.array([name] * len(bins)),
            _BIN: pa.array(bins),
        }
        parts.append(
            pa.table(columns if times is None else columns | {str(asked.time_column): times})
        )
    return pa.concat_tables(parts)


def _times(facts: Facts, asked: Query) -> pa.Array | None:
    """A moment of each unit's period, within the public range, as the time column has them."""
    if asked.time_column is None:
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
