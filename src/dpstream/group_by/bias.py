"""What the bounds have left out: noisy totals of each window as a whole, and what they say.

Rows that bounding drops bias every count and sum down, and no error bar of the rows that were kept
shows it. Dropped rows (of each unit at most a public number, over all windows) and kept rows are
counted with noise of their own, under the query's budget; so are the values of sums, and the units
that lost more rows than count. Proof: `docs/soundness/latched.md`.

A share of all rows says nothing certain of one group: users who are cut are not everywhere alike.
`LOSES_AT_MOST` is the assumption that `high_all` needs instead; `debias` assumes that all groups
lose the same share: of all rows ("global"), or of rows in groups that their unit does not count in
("groups"). The latter depends on how many groups units have, the rest on who comes back to a group,
which differs far more from group to group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.compiled import compiled
from dpstream.errors import StateError
from dpstream.group_by.bounding import FIRST, KeepMask, UnitBucket, pair_table
from dpstream.group_by.groups import LARGEST_SUM, TOO_LARGE, GroupBucket
from dpstream.group_by.hash_tables import HashTable, find_known
from dpstream.group_by.key_selection import select_keys
from dpstream.group_by.perturb import perturb
from dpstream.privacy.query_spend import NoiseStream
from dpstream.query.aggregates import Aggregate, Lost, Measure, Sum
from dpstream.query.noise_plan import WindowPlan
from dpstream.query.query import Query
from dpstream.records import Integers, Reals, Words
from dpstream.rows.row_batch import Rows

LOSES_AT_MOST = 3
"""Times the share that all groups lose together: what `high_all` assumes of each group."""
_PRESENT = 4  # standard deviations from 0, before rows are believed to be there
_PRECISE = 0.1  # the largest relative deviation of a share that `debias` divides by
_FULL = 4.0  # times the threshold, from which on a key is made up for in full
_ONE_GROUP: Words = np.zeros((1, 2), np.uint64)


# Exact counts, seen by nobody.


def count_totals(
    query: Query,
    bucket: UnitBucket,
    window: int,
    period: int,
    rows: Rows,
    places: Integers,
    keep_mask: KeepMask,
) -> Integers:
    """What the rows at `places` of a bucket of units add to the totals of their window.

    Of a unit's dropped rows those of earlier steps and windows count first, then those with the
    smallest hashes: the same ones on every engine.
    """
    most = query.most_dropped
    kept, dropped = places[keep_mask[places] > 0], places[keep_mask[places] == 0]
    dropped = dropped[np.argsort(rows.digests[dropped, 0], kind="stable")]
    lost = bucket.dropped.setdefault(period, HashTable(1))
    if query.counts_units:
        kept = kept[keep_mask[kept] & FIRST > 0]
        pairs = bucket.counted_pairs.setdefault(window, HashTable())
        dropped = _new_pairs(pairs, lost, rows, kept, dropped, most)
    counted = np.zeros(len(dropped), np.bool_)
    beyond = int(_count_dropped(lost.rows(rows.units, dropped), lost.numbers, most, counted))
    dropped = dropped[counted]
    totals = [len(dropped), len(kept), beyond]
    for column, middle in query.summed_values:
        totals += [
            int(rows.values[some, column].sum()) + middle * len(some) for some in (dropped, kept)
        ]
    if query.counts_elsewhere:
        totals.append(_count_elsewhere(query, bucket, window, rows, kept, dropped))
    return np.array(totals, np.int64)


def _count_elsewhere(
    query: Query,
    bucket: UnitBucket,
    window: int,
    rows: Rows,
    kept: Integers,
    dropped: Integers,
) -> int:
    """How many dropped rows are of groups that their unit does not count in.

    That stays so: a unit gets into no group later that it did not get into with a row of a step.
    Where one row of a unit counts in all, bounding does not note in which group: that is done here.
    """
    if query.bounds.rows == 1 and len(kept):
        noted = bucket.windows.setdefault(window, pair_table(bucket.bounds))
        noted.rows(_pair_ids(rows, kept))
    pairs = bucket.windows.get(window)
    if pairs is None:
        return len(dropped)
    found: Integers = np.empty(len(dropped), np.int64)
    find_known(pairs.words, pairs.index, _pair_ids(rows, dropped), found)
    return int((found < 0).sum())


def _new_pairs(
    pairs: HashTable, lost: HashTable, rows: Rows, kept: Integers, dropped: Integers, most: int
) -> Integers:
    """The dropped rows that are the first of their unit in a group that it is not kept in.

    Units that are beyond what counts are left out: they take no more memory.
    """
    pairs.rows(_pair_ids(rows, kept))
    units = lost.rows(rows.units, dropped)  # before `numbers` is looked at: the table may grow
    dropped = dropped[lost.numbers[units, 0] <= most]
    before = pairs.used
    found, first = np.unique(pairs.rows(_pair_ids(rows, dropped)), return_index=True)
    return dropped[np.sort(first[found >= before])]


def _pair_ids(rows: Rows, places: Integers) -> Words:
    """Ids of units in groups, as bounding has them."""
    return np.ascontiguousarray(rows.units[places] ^ rows.groups[places][:, ::-1])


@compiled
def _count_dropped(rows: Any, counts: Any, most: int, counted: Any) -> int:
    """Mark the rows that count, `most` of a unit for ever; how many units get beyond that now."""
    beyond = 0
    for i in range(len(rows)):
        before = counts[rows[i], 0]
        counted[i] = before < most
        beyond += before == most
        if before <= most:
            counts[rows[i], 0] = before + 1
    return beyond


class Totals:
    """The totals of one window: one group that everybody knows, with a column for each."""

    def __init__(self, measures: Sequence[Measure]) -> None:
        self.bucket = GroupBucket([Measure(kind="rows") for _ in measures])
        self.bucket.open(_ONE_GROUP, pa.table({"": pa.nulls(1)}))

    def add(self, counts: Integers) -> None:
        """Add those of a step."""
        table = self.bucket.table
        table.numbers[0] += counts
        table.touched[0] = 1
        if (np.abs(table.numbers[0]) > LARGEST_SUM).any():
            raise StateError(TOO_LARGE)

    def noisy(
        self, plan: WindowPlan, release: int, streams: Sequence[NoiseStream]
    ) -> tuple[int, ...]:
        """All of them with noise, at a release."""
        noise, appearing = select_keys(self.bucket, plan, release, streams[0])
        noisy = perturb(self.bucket, plan, release, streams, noise, appearing)
        return tuple(noisy.sums[0].tolist())


# What noisy totals say: post-processing.


@dataclass(frozen=True, kw_only=True)
class KeptShare:
    """A share that was kept, and an interval that holds it; None: nothing is known of it."""

    share: float | None
    stddev: float
    low: float
    high: float
    dropped: float
    dropped_stddev: float
    dropped_high: float

    def lost(self, *, is_least: bool) -> Lost:
        """What one group may have lost, if that is at most `LOSES_AT_MOST` times the mean.

        Or all that the window has lost, unless `is_least`: some units have lost more than counts.
        """
        least = 1 - LOSES_AT_MOST * (1 - self.low)
        most = math.inf if is_least else self.dropped_high
        return Lost(least_kept=max(least, 0.0), most=most)

    @property
    def divisor(self) -> float | None:
        """The share, where it is known well enough to divide by it."""
        known = self.share is not None and self.stddev <= _PRECISE * self.share
        return self.share if known else None

    def facts(self) -> dict[str, float | None]:
        """For the metadata of a release."""
        names = ("share", "low", "high", "dropped", "dropped_stddev")
        return {name: getattr(self, name) for name in names}


def kept_share(
    dropped: tuple[float, float], kept: tuple[float, float], deviations: float
) -> KeptShare:
    """The share that was kept, from two noisy totals with their standard deviations.

    The interval is Fieller's: all shares s for which (1 - s) kept - s dropped lies within so many
    of its own standard deviations of 0. None of the totals is negative, whatever noise says; where
    all rows together may be noise, nothing is known.
    """
    (lost, of_lost), (left, of_left) = dropped, kept
    most = max(lost + deviations * of_lost, 0.0)
    measured, lost, left, z2 = lost, max(lost, 0.0), max(left, 0.0), deviations**2
    whole = lost + left
    square = whole**2 - z2 * (of_left**2 + of_lost**2)
    share: float | None = None
    stddev, low, high = 0.0, 0.0, 1.0
    if square > 0 and whole > _PRESENT * math.hypot(of_left, of_lost):
        share = left / whole
        stddev = math.hypot((1 - share) * of_left, share * of_lost) / whole
        half = left * whole - z2 * of_left**2
        root = math.sqrt(max(half**2 - square * (left**2 - z2 * of_left**2), 0.0))
        low, high = max((half - root) / square, 0.0), min((half + root) / square, 1.0)
    return KeptShare(
        share=share,
        stddev=stddev,
        low=low,
        high=high,
        dropped=measured,
        dropped_stddev=of_lost,
        dropped_high=most,
    )


def made_up_powers(units: Reals, threshold: float) -> tuple[Reals, Reals]:
    """For keys of so many noisy units, the power of the share that they are divided by.

    And how much an error of the units adds to it, in relative terms. A key at the threshold may owe
    its place to noise, and is then too large already: it is made up for by half, in logarithms.

    >>> [each.round(2).tolist() for each in made_up_powers(np.array([10.0, 40.0, 900.0]), 10)]
    [[0.5, 1.0, 1.0], [0.36, 0.0, 0.0]]
    """
    beyond = np.log(np.maximum(units, 1) / threshold) / math.log(_FULL)
    powers = np.clip(0.5 + beyond / 2, 0.5, 1.0)
    return powers, np.where((beyond >= 0) & (beyond < 1), 0.5 / math.log(_FULL), 0.0)


@dataclass(frozen=True, kw_only=True)
class Bias:
    """What the totals of one release say of the rows, and of the values of each sum."""

    rows: KeptShare
    values: dict[Measure, KeptShare]
    beyond: tuple[float, float]
    """Units that lost more rows than count, and the standard deviation of that."""
    groups: KeptShare
    """Of the rows, how many are of groups that their unit counts in, where that is measured."""
    is_least: bool
    """Are there such units, as far as noise lets one know? Then more is lost than is said."""

    @classmethod
    def of(cls, query: Query, noisy: Sequence[int], stddevs: Reals, deviations: float) -> Bias:
        """From all noisy totals."""
        pairs = list(zip(map(float, noisy), stddevs.tolist(), strict=True))
        values = {}
        for number, measure in enumerate(query.summed):
            quantum = float(measure.quantum)
            lost, left = (
                (total * quantum, stddev * quantum)
                for total, stddev in pairs[3 + 2 * number : 5 + 2 * number]
            )
            values[measure] = kept_share(lost, left, deviations)
        beyond, of_beyond = pairs[2]
        rows = kept_share(pairs[0], pairs[1], deviations)
        groups = rows
        if query.counts_elsewhere:
            whole = max(pairs[0][0], 0) + max(pairs[1][0], 0), math.hypot(pairs[0][1], pairs[1][1])
            inside = max(whole[0] - max(pairs[-1][0], 0.0), 0.0), whole[1]
            groups = kept_share(pairs[-1], inside, deviations)
        return cls(
            rows=rows,
            groups=groups,
            values=values,
            beyond=(beyond, of_beyond),
            is_least=beyond > deviations * of_beyond,
        )

    def of_aggregate(self, aggregate: Aggregate) -> KeptShare:
        """Of the values that it sums, where they were measured; else of the rows."""
        measure = aggregate.measures(True)[0] if isinstance(aggregate, Sum) else None
        return self.rows if measure is None else self.values.get(measure, self.rows)

    def made_up(self, aggregate: Aggregate, debias: str) -> float | None:
        """The share that it is divided by; None: it is not known well enough."""
        return (self.groups if debias == "groups" else self.of_aggregate(aggregate)).divisor

    def facts(self, query: Query) -> dict[str, Any]:
        """For the metadata of a release: the share of rows, and all that is known of it."""
        values = {
            a.name: self.of_aggregate(a).facts()
            for a in query.aggregates
            if self.of_aggregate(a) is not self.rows
        }
        facts = self.rows.facts() | {
            "units_beyond": self.beyond[0],
            "units_beyond_stddev": self.beyond[1],
            "at_least": self.is_least,
            "values": values,
        }
        if query.debias is not None:
            grow = (a for a in query.aggregates if a.grows)
            facts["debiased"] = [a.name for a in grow if self.made_up(a, query.debias) is not None]
        if query.counts_elsewhere:
            facts["groups"] = self.groups.facts()
        return {"kept_share": self.rows.share, "bias": facts}
