"""Facts about each unit, from one pass over a source, and their histograms.

    groups   how many (key, window) groups it has rows in
    rows     how many rows it has in one of them, picked by a keyed hash, among units with 1, 2 to 4
             or more groups
    value    the value of one of its rows, picked by a keyed hash; for each column with clamps

Each is a function of the unit's own rows and of a secret key. Rows are read in chunks; what is kept
is a table of units and one of (unit, group) pairs, of a public share of the units if asked for.

Histograms are exact, or noisy and paid for. The noisy ones are a query like any other: one row per
unit and fact, grouped by (fact, bin), all groups public. So the charge, the order of ledger and
noise, and the noise itself are those of `dpstream.run`; with a state directory what was paid for is
kept, and read again instead of drawn again. The bins are public grids that never depend on the
data. Proof: `docs/soundness/bounds.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.connectors.files.sink import DirectorySink
from dpstream.engines.chunks import ChunkReader, OperatorCounts
from dpstream.engines.embedded.step_rows import check_columns
from dpstream.errors import InvalidParameter, StateError
from dpstream.group_by.hash_tables import HashTable
from dpstream.privacy.ledger.charges import Terms
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.state import Secret
from dpstream.query.aggregates import Count, Sum
from dpstream.query.noise_plan import plan_query
from dpstream.query.query import Query
from dpstream.records import Integers, Reals, Source, Words
from dpstream.rows.row_batch import Rows, RowSlice, rows_by_window
from dpstream.rows.row_ids import row_digests
from dpstream.rows.row_reader import RowReader
from dpstream.session import run

_ID_BITS: Final = 16  # a share of the units is sampled by so many bits of their ids
_FINE: Final = 16  # counts up to here have a bin each
_PER_OCTAVE: Final = 2
_OCTAVES: Final = 12  # beyond 16; larger counts fall into the last bin
_DECADES: Final = range(-3, 12)
_MANTISSAS: Final = (1, 2, 3, 5)
COUNTS: Final[Integers] = np.concatenate(
    [
        np.arange(1, _FINE + 1),
        np.round(_FINE * 2 ** (np.arange(1, _PER_OCTAVE * _OCTAVES + 1) / _PER_OCTAVE)),
    ]
).astype(np.int64)
"""Upper edges of the bins of counts: 1 to 16, then two per octave up to 65,536."""

SIZES: Final[Reals] = np.array([float(f"{m}e{d}") for d in _DECADES for m in _MANTISSAS])
"""Sizes that clamps may have: 1, 2, 3 and 5 times a power of ten, 0.001 to 5 * 10^11."""
CLASSES: Final = (1, 4)
"""Units are told apart by their groups: so many at most, or more."""
BINS: Final = {
    "groups": len(COUNTS),
    "rows": (len(CLASSES) + 1) * len(COUNTS),
    "value": 2 * len(SIZES) + 1,
}
"""Bins of a fact, by its kind."""
_FACT, _BIN, _UNITS = "dpstream fact", "dpstream bin", "dpstream units"


def fact_names(query: Query, columns: Sequence[str]) -> tuple[str, ...]:
    """The facts that a query's bounds depend on; where a unit has one group only, rows in it."""
    one_group = query.reachable == 1
    return (*(() if one_group else ("groups",)), "rows", *(f"value {name}" for name in columns))


def bins_of(fact: str) -> int:
    """How many bins a fact has."""
    return BINS[fact.partition(" ")[0]]


def value_sums(column: str) -> tuple[Sum, Sum]:
    """Two grids that hold a value between them: thousandths up to a million, thousands beyond."""
    return (
        Sum(
            f"fine {column}",
            column=column,
            contribution_bounds_per_row=(-(10**6), 10**6),
            quantum=Fraction(1, 1000),
        ),
        Sum(
            f"coarse {column}",
            column=column,
            contribution_bounds_per_row=(-(10**12), 10**12),
            quantum=1000,
        ),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitFacts:
    """One entry per unit; `values` has a column for each value that was asked for.

    `pair_units`, `pair_rows`: of each (unit, group), the unit's place and how many rows it has.
    """

    units: Words
    periods: Integers
    groups: Integers
    rows: Integers
    values: Reals
    pair_units: Integers
    pair_rows: Integers

    def kept_rows(self, most: float) -> Reals:
        """Of each unit: its rows, of which at most so many count in each of its groups."""
        rows = np.minimum(self.pair_rows, most).astype(np.float64)
        return np.bincount(self.pair_units, rows, len(self.units)).astype(np.float64)


class _Tables:
    """What is known of units and of their groups so far."""

    def __init__(self, key: bytes, share: float, valued: int) -> None:
        self._key, self._valued = key, valued
        self._below = round(share * 2**_ID_BITS)
        self._units = HashTable(2 + valued)  # period, digest of the row picked, its values' bits
        self._pairs = HashTable(2)  # rows, the unit's place

    def add(self, rows: Rows) -> None:
        """Add the rows of a chunk."""
        sampled = (rows.units[:, 1] >> np.uint64(64 - _ID_BITS)).astype(np.int64) < self._below
        units, groups, windows = rows.units[sampled], rows.groups[sampled], rows.windows[sampled]
        if not len(units):
            return
        known = self._units.used
        places = self._units.rows(units)
        numbers = self._units.numbers
        numbers[known : self._units.used, 1] = np.int64(-1)  # the largest word: any row beats it
        numbers[places, 0] = rows.periods[sampled]
        pairs = self._pairs.rows(row_digests([units, groups, windows], self._key))
        np.add.at(self._pairs.numbers[:, 0], pairs, 1)
        self._pairs.numbers[pairs, 1] = places
        if self._valued:
            self._pick(places, rows.digests[sampled, 0], _values(rows.values[sampled]))

    def _pick(self, places: Integers, digests: Words, values: Reals) -> None:
        """The row with the least digest so far stands for its unit."""
        order = np.lexsort((digests, places))
        firsts = order[np.r_[True, np.diff(places[order]) > 0]]
        at, least = places[firsts], digests[firsts]
        words = self._units.words
        better = least < words[at, 3]
        words[at[better], 3] = least[better]
        picked = np.ascontiguousarray(values[firsts[better]])
        words[at[better], 4 : 4 + self._valued] = picked.view(np.uint64)

    def facts(self) -> UnitFacts:
        """The facts of each unit."""
        units, pairs = self._units.used, self._pairs.used
        of, rows = self._pairs.numbers[:pairs, 1], self._pairs.numbers[:pairs, 0]
        order = np.lexsort((self._pairs.words[:pairs, 0], of))  # a pair's id is a keyed hash
        firsts = order[np.r_[True, np.diff(of[order]) > 0]] if pairs else order
        values = self._units.words[:units, 4 : 4 + self._valued].copy().view(np.float64)
        return UnitFacts(
            units=self._units.ids[:units].copy(),
            periods=self._units.numbers[:units, 0].copy(),
            groups=np.bincount(of, minlength=units).astype(np.int64),
            rows=rows[firsts],
            values=values,
            pair_units=of.copy(),
            pair_rows=rows.copy(),
        )


def _values(grids: Integers) -> Reals:
    """The values that two grids each hold between them."""
    fine, coarse = grids[:, 0::2] / 1000.0, grids[:, 1::2] * 1000.0
    return np.where(np.abs(coarse) >= 10**6, coarse, fine)


def collect_unit_facts(
    source: Source,
    query: Query,
    *,
    secret: Secret,
    run: bytes,
    share: float,
    progress: Callable[[int, int], None],
) -> UnitFacts:
    """The facts of all units of a bounded source."""
    check_columns(source, query)
    operator = OperatorCounts()
    reader = ChunkReader(source, RowReader(query, secret, run), operator)
    key = secret.key("pairs of units and groups", run)[:16]
    tables = _Tables(key, share, valued=len(query.aggregates) // 2)
    partitions = source.partitions()
    waiting: list[RowSlice] = []  # rows that are grouped by unit
    for number, partition in enumerate(partitions):
        progress(number, len(partitions))
        position, done = None, False
        while not done:
            batch = reader.batch(partition, position)
            rows, rejected = reader.rows(partition, position, batch)
            operator.reject(f"{partition} {position}", rejected)
            if query.per_unit is None:
                tables.add(rows)
            else:
                waiting += [(rows, first, end) for *_, first, end in rows.runs]
            position, done = batch.position, batch.done
    for _, _, rows in rows_by_window(waiting):
        tables.add(reader.reader.inner_rows(rows, "bounds")[0])
    progress(len(partitions), len(partitions))
    return tables.facts()


def count_bins(counts: Integers) -> Integers:
    """The bin of each count: that of the least upper edge that holds it.

    >>> COUNTS[count_bins(np.array([1, 16, 17, 20, 10**9]))].tolist()
    [1, 16, 23, 23, 65536]
    """
    return np.minimum(np.searchsorted(COUNTS, counts), len(COUNTS) - 1)


def value_bins(values: Reals) -> Integers:
    """Bins from the most negative size over 0 (the middle one) to the largest.

    >>> value_bins(np.array([-1.5, 0.0, 2.0, 1e300])).tolist()
    [46, 60, 74, 120]
    """
    size = np.minimum(np.searchsorted(SIZES, np.abs(values)), len(SIZES) - 1)
    zero = len(SIZES)
    bins = np.where(values == 0, zero, zero + np.sign(values) * (size + 1))
    return bins.astype(np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Histograms:
    """Units by bin, for each fact; `stddev` of the noise in a bin, 0 if they are exact."""

    bins: dict[str, Reals]
    stddev: float


def exact_histograms(facts: UnitFacts, names: Sequence[str]) -> Histograms:
    """Counts as they are."""
    counts = {
        fact: np.bincount(bins, minlength=bins_of(fact)).astype(np.float64)
        for fact, bins in _bins_by_fact(facts, names).items()
    }
    return Histograms(bins=counts, stddev=0.0)


def _bins_by_fact(facts: UnitFacts, names: Sequence[str]) -> dict[str, Integers]:
    places = np.searchsorted(np.array(CLASSES), facts.groups)
    found = {
        "groups": count_bins(facts.groups),
        "rows": places * len(COUNTS) + count_bins(facts.rows),
    }
    columns = [name for name in names if name not in found]
    found |= {name: value_bins(facts.values[:, n]) for n, name in enumerate(columns)}
    return {name: found[name] for name in names}


def histogram_query(
    reading: Query, *, facts: Sequence[str], epsilon: Any, delta: Any, about: str = ""
) -> Query:
    """The query whose answer is all histograms; it protects what `reading` protects.

    `about`: what else was measured, in a few words that the ledger shows.
    """
    periods = reading.privacy_unit_period != "forever"
    if periods and (reading.start is None or reading.end is None):
        raise InvalidParameter(
            "to measure bounds that renew with each period takes the range of the data: give the "
            "query start and end, such as --set start=2024-05-01 --set end=2024-06-01"
        )
    times = ("time_column", "time_unit", "time_origin", "start", "end", "time_zone")
    return Query(
        name=f"bounds {about}".strip(),
        privacy_unit_column=reading.privacy_unit_column,
        privacy_unit_period=reading.privacy_unit_period,
        **({name: getattr(reading, name) for name in times} if periods else {}),
        keys=(_FACT, _BIN),
        aggregates=(Count(_UNITS),),
        epsilon=epsilon,
        delta=delta,
        public_groups=tuple((name, number) for name in facts for number in range(bins_of(name))),
        max_groups_contributed=len(facts),
        report_bias=False,
    )


def noisy_histograms(
    facts: UnitFacts,
    asked: Query,
    names: Sequence[str],
    *,
    ledger: Any,
    dataset: str,
    analyst: str = "",
    state: Path | None = None,
    secret: Secret | None = None,
) -> Histograms:
    """Charge the question to the dataset's book, then draw; with `state` it is kept there.

    A book that is not there is opened, and its budget is left to whoever opens it next.
    """
    payer = {"ledger": ledger, "dataset": dataset, "analyst": analyst}
    rows = fact_rows(facts, asked, names)
    open_provisional(plan_query(asked).terms(), ledger=ledger, dataset=dataset)
    return histograms_of(ask(asked, rows, state=state, secret=secret, **payer), names)


def open_provisional(terms: Terms, *, ledger: Any, dataset: str) -> None:
    """Open a book that is not there; its budget is left to whoever opens it next."""
    if ledger is not None:
        shared = isinstance(ledger, Ledger)
        with ExitStack() as stack:
            book = ledger if shared else stack.enter_context(closing(Ledger(ledger)))
            if book.terms(dataset) is None:
                book.open(dataset, terms, provisional=True)


def ask(asked: Query, rows: pa.Table, *, state: Path | None, **options: Any) -> pa.Table:
    """Charge a question about a table of units, and draw its answer."""
    sink = None if state is None else DirectorySink(state / RELEASED)
    tables = list(run(asked, source=rows, state=state, sink=sink, anyway=True, **options))
    if not tables:  # it was published, and the answer has been lost
        raise StateError(
            f"{state} has paid for this measurement, and {state}/{RELEASED} has lost it; restore "
            "it, or pay for another one (--again)"
        )
    return tables[0]


RELEASED: Final = "released"
"""Where a state directory keeps the histograms that were paid for."""


def kept_release(state: Path) -> pa.Table | None:
    """The histograms that a state directory has kept; None: it has none (yet)."""
    paths = sorted((state / RELEASED).glob("*.parquet"))
    return pq.read_table(paths[0]) if paths else None


def histograms_of(table: pa.Table, names: Sequence[str]) -> Histograms:
    """What was published, by fact."""
    counts = {fact: np.zeros(bins_of(fact)) for fact in names}
    columns = (table[name].to_pylist() for name in (_FACT, _BIN, _UNITS))
    for fact, number, units in zip(*columns, strict=True):
        counts[fact][number] = units
    return Histograms(bins=counts, stddev=float(table[f"{_UNITS}_stddev"][0].as_py()))


def fact_rows(facts: UnitFacts, asked: Query, names: Sequence[str]) -> pa.Table:
    """One row per unit and fact."""
    known, parts = unit_columns(facts, asked), []
    for name, bins in _bins_by_fact(facts, names).items():
        parts.append(pa.table(known | {_FACT: pa.array([name] * len(bins)), _BIN: pa.array(bins)}))
    return pa.concat_tables(parts)


def unit_columns(facts: UnitFacts, asked: Query) -> dict[str, pa.Array]:
    """A row per unit, and its time. It goes by its keyed id: a function of itself alone."""
    ids = np.ascontiguousarray(facts.units, "<u8").tobytes()
    units = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(16), len(facts.units), [None, pa.py_buffer(ids)]
    ).cast(pa.binary())
    times = _times(facts, asked)
    more = {} if times is None else {str(asked.time_column): times}
    return {asked.privacy_unit_column: units, **more}


def _times(facts: UnitFacts, asked: Query) -> pa.Array | None:
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
