"""Rows in every one of several sets of keys, after they were bounded by all keys together.

A row that is kept counts in one group of each set: the keys that a set leaves out are NULL there,
and the column `grouping_id` says which they are. So all sets count the same rows.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from dpstream.group_by.bounding import FIRST, KEPT, KeepMask, UnitBucket
from dpstream.group_by.groups import GroupBucket
from dpstream.group_by.hash_tables import HashTable
from dpstream.query.grouping_sets import GROUPING_ID, grouping_id
from dpstream.query.query import Query
from dpstream.records import Integers, Words
from dpstream.rows.row_batch import Rows, id_pairs, rows_at
from dpstream.rows.row_ids import RowIds


def counts_in_sets(query: Query) -> bool:
    """Must it be remembered which units are in which groups of fewer keys than all?

    Not where a unit is in one group only: then its first row there is its first row anywhere.
    """
    units = any(measure.kind == "units" for measure in query.measures)
    return bool(query.grouping_sets) and units and query.bounds.groups > 1


def groups_of_rows(
    query: Query, ids: RowIds, names: tuple[str, ...], groups: Words, keys: pa.Table
) -> tuple[Words, pa.Table]:
    """Ids and key columns of one set, of rows whose groups by all keys are these."""
    size = len(keys)
    columns = {
        name: keys[name] if name in names else pa.nulls(size, keys[name].type)
        for name in query.keys
    }
    number = np.full(size, grouping_id(query.keys, names), np.int64)
    table = pa.table(columns | {GROUPING_ID: pa.array(number)})
    return (groups if len(names) == len(query.keys) else ids.groups(table, size)), table


def rows_in_sets(
    query: Query, ids: RowIds, rows: Rows, keep_mask: KeepMask
) -> tuple[Rows, KeepMask, Integers | None]:
    """The rows that are kept, set after set, and their marks.

    And where it is still to be said which of them are the first of their unit in their group.
    """
    kept = np.flatnonzero(keep_mask & KEPT)
    rows, marks = rows_at(rows, kept), keep_mask[kept]
    size, sets = len(kept), query.grouping_sets
    made = [groups_of_rows(query, ids, names, rows.groups, rows.keys) for names in sets]
    several = Rows(
        **{
            name: np.concatenate([getattr(rows, name)] * len(sets))
            for name in ("units", "digests", "windows", "periods", "steps", "values")
        },
        groups=np.concatenate([groups for groups, _ in made]),
        keys=pa.concat_tables([table for _, table in made]),
    )
    all_marks: KeepMask = np.concatenate([marks] * len(sets))
    if not counts_in_sets(query):
        return several, all_marks, None
    full = np.repeat([len(names) == len(query.keys) for names in sets], size)
    again = np.flatnonzero(~full)
    all_marks[again] = KEPT
    return several, all_marks, again


def mark_first(
    bucket: UnitBucket, window: int, rows: Rows, places: Integers, keep_mask: KeepMask
) -> None:
    """Mark those of the rows at `places`, of a bucket's units, that are their unit's first."""
    known = bucket.set_pairs.setdefault(window, HashTable())
    before = known.used
    # Ids are pseudo-random, so an exclusive or with the words swapped is an id of the pair.
    pairs = np.ascontiguousarray(rows.units[places] ^ rows.groups[places][:, ::-1])
    found, first = np.unique(known.rows(pairs), return_index=True)
    keep_mask[places[first[found >= before]]] |= FIRST


def groups_in_sets(
    query: Query, ids: RowIds, groups: Words, keys: pa.Table
) -> tuple[Words, pa.Table]:
    """Public groups in every set, each once."""
    made = []
    for names in query.grouping_sets:
        of_set, table = groups_of_rows(query, ids, names, groups, keys)
        first = np.sort(np.unique(id_pairs(of_set), return_index=True)[1])
        made.append((of_set[first], table.take(pa.array(first))))
    return (
        np.concatenate([of_set for of_set, _ in made]),
        pa.concat_tables([table for _, table in made]).combine_chunks(),
    )


def sets_of_bucket(query: Query, bucket: GroupBucket) -> Integers | None:
    """Of every active group which of the sets it is of; None where there is one."""
    if not query.grouping_sets:
        return None
    if not bucket.keys:
        return np.zeros(0, np.int64)
    columns = pa.concat_tables(table.select([GROUPING_ID]) for table in bucket.keys)
    return query.sets_of(columns.combine_chunks())
