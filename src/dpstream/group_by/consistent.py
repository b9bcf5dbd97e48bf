"""Several sets of keys in one release: levels made consistent, and rows for what is not shown.

Over public groups every figure is measured, the total as well as its parts. The least-squares
estimate is the most likely figure of each group given all of them, so it has the least error, and a
total equals the sum of its parts. Where keys are private, groups that are not shown are missing in
that sum, and nothing can be learned from it; a row for them has the difference.

All of this sees noisy sums and public numbers alone: it is post-processing. Every measure is taken
by itself, for its noise is independent of that of the others.
Proof: `docs/soundness/grouping_sets.md`.

Papers: Hay, Rastogi, Miklau, Suciu, "Boosting the Accuracy of Differentially Private Histograms
Through Consistency", 2010; for sets of which none holds the other, Barak, Chaudhuri, Dwork, Kale,
McSherry, Talwar, "Privacy, Accuracy, and Consistency Too", 2007.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dpstream.query.grouping_sets import GROUPING_ID, NOT_SHOWN, is_chain, parents
from dpstream.query.query import Query
from dpstream.records import Integers, Reals
from dpstream.rows.parse import row_codes, whole_column

_STEP = 2.0**-16
"""Figures of the finest set are rounded to this part of a grid step: sums of them are exact."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Levels:
    """The rows of a release in several sets of keys, whatever is measured of them."""

    sums: npt.NDArray[np.generic]
    """Groups x measures, in grid steps."""
    stddevs: Reals
    keys: pa.Table
    unknown: npt.NDArray[np.bool_] | None = None
    """Rows of which only what is additive is known."""


def make_consistent(query: Query, sums: Integers, stddevs: Reals, keys: pa.Table) -> Levels:
    """What is published of noisy sums of all sets: groups x measures."""
    sets = query.sets_of(keys)
    if query.public_groups is None:
        return _with_rest(query, sums, stddevs, keys, sets)
    adjusted, spread = sums.astype(np.float64), stddevs.copy()
    additive = [n for n, measure in enumerate(query.measures) if query.is_additive(measure)]
    if len(sums) and additive:
        solve = _Tree(query, keys, sets) if is_chain(query.grouping_sets) else None
        for number in additive:
            column = (adjusted[:, number], spread[:, number] ** 2)
            found = (solve or _Product(query, keys, sets)).solve(*column)
            adjusted[:, number], spread[:, number] = found[0], np.sqrt(found[1])
    return Levels(sums=adjusted, stddevs=spread, keys=keys)


def _parent_rows(query: Query, keys: pa.Table, sets: Integers) -> Integers:
    """For each row that of the group that it is a part of, in the next set of fewer keys; -1: none.

    That set is the one `parents` says.
    """
    parent: Integers = np.full(len(sets), -1)
    for at, above in enumerate(parents(query.grouping_sets)):
        if above is None:
            continue
        mine, theirs = np.flatnonzero(sets == at), np.flatnonzero(sets == above)
        names = query.grouping_sets[above]
        rows = keys.take(pa.array(np.concatenate([theirs, mine])))
        codes = row_codes([whole_column(rows[name]) for name in names], len(rows))
        found: Integers = np.full(len(rows) + 1, -1)
        found[codes[: len(theirs)]] = theirs
        parent[mine] = found[codes[len(theirs) :]]
    return parent


class _Tree:
    """Sets of which each holds all smaller ones: groups are nodes of trees, and two passes do.

    From the leaves up, a group's own figure and the sum of its parts are averaged by their
    variances; from the roots down, what a group has more than its parts is divided among them in
    proportion to theirs.
    """

    def __init__(self, query: Query, keys: pa.Table, sets: Integers) -> None:
        order = sorted(range(len(query.grouping_sets)), key=lambda at: len(query.grouping_sets[at]))
        self._levels = [np.flatnonzero(sets == at) for at in order]  # from the roots down
        self._parent = _parent_rows(query, keys, sets)
        self._size = len(sets)

    def _of_parts(self, rows: Integers, values: Reals) -> Reals:
        """By row the sum over its parts, which are these rows."""
        sums: Reals = np.bincount(
            self._parent[rows], weights=values[rows], minlength=self._size
        ).astype(np.float64)
        return sums

    def solve(self, values: Reals, variances: Reals) -> tuple[Reals, Reals]:
        """The least-squares estimates and their variances."""
        best, known = values.copy(), variances.copy()
        below: list[tuple[Reals, Reals]] = []
        for rows, parts in zip(self._levels[-2::-1], self._levels[:0:-1], strict=True):
            total, spread = self._of_parts(parts, best), self._of_parts(parts, known)
            below.insert(0, (total, spread))
            weight = variances[rows] / (variances[rows] + spread[rows])  # of the parts' sum
            best[rows] += weight * (total[rows] - best[rows])
            known[rows] = weight * spread[rows]
        for parts, (total, spread) in zip(self._levels[1:], below, strict=True):
            above = self._parent[parts]
            share = known[parts] / spread[above]
            best[parts] += share * (best[above] - total[above])
            known[parts] -= share**2 * (spread[above] - known[above])
        leaves = self._levels[-1]
        best[leaves] = np.rint(best[leaves] / _STEP) * _STEP
        for rows, parts in zip(self._levels[-2::-1], self._levels[:0:-1], strict=True):
            best[rows] = self._of_parts(parts, best)[rows]
        return best, known


class _Product:
    """Any sets, over all combinations of the values of each key.

    A table over all keys falls into parts that vary with some keys and have mean 0 over each of
    them. A set measures the parts that vary with keys of its own alone; each part is the average of
    all sets that do, by their variances.
    """

    def __init__(self, query: Query, keys: pa.Table, sets: Integers) -> None:
        self._sets = query.grouping_sets
        self._rows = [np.flatnonzero(sets == at) for at in range(len(self._sets))]
        codes: dict[str, Integers] = {}
        for name in query.keys:
            rows = np.concatenate(
                [r for r, names in zip(self._rows, self._sets, strict=True) if name in names]
            )
            of_rows = row_codes([whole_column(keys[name].take(pa.array(rows)))], len(rows))
            codes[name] = np.zeros(len(sets), np.int64)
            codes[name][rows] = of_rows
        self._sizes = {name: int(column.max()) + 1 for name, column in codes.items()}
        self._places = [
            tuple(codes[name][rows] for name in names)
            for rows, names in zip(self._rows, self._sets, strict=True)
        ]

    def _left_out(self, names: Sequence[str]) -> int:
        """Cells of the whole table in one of a set."""
        sizes = (size for name, size in self._sizes.items() if name not in names)
        return int(np.prod([*sizes], dtype=np.int64))

    def solve(self, values: Reals, variances: Reals) -> tuple[Reals, Reals]:
        """The least-squares estimates and their variances."""
        weights = [1 / float(variances[rows[0]]) for rows in self._rows]  # one noise for a set
        tables = []
        for rows, places, names in zip(self._rows, self._places, self._sets, strict=True):
            table = np.zeros([self._sizes[name] for name in names])
            table[places] = values[rows] if names else values[rows[0]]
            tables.append(table)
        parts: dict[tuple[str, ...], tuple[Reals, float]] = {}
        for names in self._sets:
            for size in range(len(names) + 1):
                for some in combinations(names, size):
                    parts[some] = self._part(some, tables, weights)
        complete = len(self._sizes)  # keys: one of a single value is a column of the table, too
        full = next((n for n, names in enumerate(self._sets) if len(names) == complete), None)
        found = [self._sum(names, parts) for names in self._sets]
        if full is not None:
            finest = np.rint(found[full][0] / _STEP) * _STEP
            names = self._sets[full]
            for at, mine in enumerate(self._sets):
                axes = tuple(n for n, name in enumerate(names) if name not in mine)
                found[at] = (finest.sum(axis=axes), found[at][1])
        best, known = np.empty(len(values)), np.empty(len(values))
        for rows, places, (table, variance) in zip(self._rows, self._places, found, strict=True):
            best[rows], known[rows] = table[places], variance
        return best, known

    def _part(
        self, some: tuple[str, ...], tables: Sequence[Reals], weights: Sequence[float]
    ) -> tuple[Reals, float]:
        """What varies with just these keys, for a cell of the whole table, and 1 / its variance."""
        total: Reals = np.zeros([self._sizes[name] for name in some])
        precision = 0.0
        for names, table, weight in zip(self._sets, tables, weights, strict=True):
            if not {*some} <= {*names}:
                continue
            mean = table.mean(axis=tuple(n for n, name in enumerate(names) if name not in some))
            for axis in range(len(some)):
                mean = mean - mean.mean(axis=axis, keepdims=True)
            total = total + weight * mean
            precision += weight * self._left_out(names)
        return total / precision, precision

    def _sum(
        self, names: tuple[str, ...], parts: dict[tuple[str, ...], tuple[Reals, float]]
    ) -> tuple[Reals, float]:
        """A set's table, and the variance of each of its figures."""
        cells = self._left_out(names)
        table: Reals = np.zeros([self._sizes[name] for name in names])
        variance = 0.0
        for some, (part, precision) in parts.items():
            if not {*some} <= {*names}:
                continue
            shape = [self._sizes[name] if name in some else 1 for name in names]
            table = table + cells * part.reshape(shape)
            means = (1 - 1 / size if n in some else 1 / size for n, size in self._of(names))
            variance += cells / precision * float(np.prod([*means]))
        return table, variance

    def _of(self, names: tuple[str, ...]) -> list[tuple[str, int]]:
        return [(name, self._sizes[name]) for name in names]


def _with_rest(
    query: Query, sums: Integers, stddevs: Reals, keys: pa.Table, sets: Integers
) -> Levels:
    """The rows shown, and for each group one for those of its parts that are not."""
    parent = _parent_rows(query, keys, sets)
    additive = np.array([query.is_additive(measure) for measure in query.measures])
    places, of_sets, rest, spread = [], [], [], []
    for at, above in enumerate(parents(query.grouping_sets)):
        if above is None:
            continue
        whole, parts = np.flatnonzero(sets == above), np.flatnonzero(sets == at)
        parts = parts[parent[parts] >= 0]
        left, variances = sums.copy(), stddevs**2
        np.subtract.at(left, parent[parts], sums[parts])
        np.add.at(variances, parent[parts], stddevs[parts] ** 2)
        places.append(whole)
        of_sets.append(np.full(len(whole), query.grouping_ids[at]))
        rest.append(np.where(additive, left[whole], 0))
        spread.append(np.sqrt(variances[whole]))
    none: Integers = np.zeros(0, np.int64)
    taken, numbers = np.concatenate([none, *places]), np.concatenate([none, *of_sets])
    order = np.argsort(taken, kind="stable")
    more = keys.take(pa.array(taken[order]))
    number = more.column_names.index(GROUPING_ID)
    more = more.set_column(number, GROUPING_ID, pa.array(numbers[order]))
    unknown = np.arange(len(sums) + len(taken)) >= len(sums)
    return Levels(
        sums=np.concatenate([sums, *rest])[
            np.concatenate([np.arange(len(sums)), len(sums) + order])
        ],
        stddevs=np.concatenate([stddevs, *spread])[
            np.concatenate([np.arange(len(sums)), len(sums) + order])
        ],
        keys=pa.concat_tables([keys, more])
        .combine_chunks()
        .append_column(NOT_SHOWN, pa.array(unknown)),
        unknown=unknown,
    )
