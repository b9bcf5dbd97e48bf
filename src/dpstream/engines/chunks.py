"""A chunk of a source as a query's rows, and what the operator learns of rows that are not used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from dpstream.query.column_types import Types
from dpstream.query.row_spec import Prepare
from dpstream.records import (
    Batch,
    CheckedSource,
    Columns,
    ParallelReads,
    Position,
    Rejected,
    Source,
)
from dpstream.rows.row_batch import RejectedRows, Rows
from dpstream.rows.row_reader import ParsedColumns, RowReader


@dataclass(kw_only=True)
class OperatorCounts:
    """What only the operator may see: rows read and rows that were not used. Not private."""

    keep_rejected: Callable[[str, list[Rejected]], None] | None = None
    """Keeps rows that cannot be used, by their chunk's name; the same rows may come again."""
    erase_rejected: Callable[[Callable[[list[str]], Any]], tuple[int, int]] | None = None
    """Erases those that are selected by their texts; see `DeadLetters.erase`."""
    letters_erased: int = 0
    """Dead letters of a unit that was erased."""
    letters_unclear: int = 0
    """Dead letters that do not tell whose they are, and stay."""
    read: int = 0
    rejected_rows: int = 0
    outside: int = 0
    late: int = 0
    other_keys: int = 0
    latest: list[Rejected] = field(default_factory=list)
    quarantined: dict[str, str] = field(default_factory=dict)
    """Partitions that cannot be used, and why."""
    stale_tables: dict[str, str] = field(default_factory=dict)
    """Public tables that could not be read anew when they were due, and why: rows go on to meet
    their last version."""
    lag_seconds: float = 0.0
    """How long after its trigger the last step of a live run was out."""
    worst_lag_seconds: float = 0.0
    releases: int = 0
    """How many were published since this start."""
    last_release: float | None = None
    """When the last one was, in seconds since 1970."""

    def losses(self) -> list[str]:
        """What an operator has to look after at the end of a run, a sentence each.

        >>> counts = OperatorCounts(read=9, rejected_rows=2)
        >>> counts.losses()
        ['operator only: 2 of 9 rows read since this start could not be used, and are left out']
        """
        words = []
        if self.rejected_rows:
            first = "".join(f"; such as {row.where}" for row in self.latest[:1])
            words.append(
                f"operator only: {self.rejected_rows:,} of {self.read:,} rows read since this "
                f"start could not be used, and are left out{first}"
            )
        for name, reason in self.quarantined.items():
            words.append(
                f"operator only: {name} is quarantined, none of its rows is counted: {reason}"
            )
        for name, reason in self.stale_tables.items():
            words.append(f"operator only: the public table {name} could not be read anew: {reason}")
        return words

    def reject(self, chunk: str, rows: list[Rejected]) -> None:
        """Keep rows that cannot be used, under a name that the same rows always have."""
        self.rejected_rows += len(rows)
        self.latest = [*self.latest, *rows][-100:]
        if self.keep_rejected is not None and rows:
            self.keep_rejected(chunk, rows)

    def quarantine(self, partition: str, mark: Position) -> None:
        """Keep the name, digest and reason of a partition that is not read, or no further."""
        self.quarantined[partition] = mark["reason"]
        after, digest = mark.get("after"), mark["quarantined"]
        which = "the file" if after is None else f"the file after {after}"
        row = Rejected(where=partition, reason=mark["reason"], row=f"{which}, SHA-256 {digest}")
        if self.keep_rejected is not None:
            self.keep_rejected(f"{partition} quarantined", [row])

    def count(self, read: int, unused: RejectedRows) -> None:
        """Count the rows that were read, and those that the query's own rules dropped."""
        self.read += read
        self.outside += unused.outside
        self.late += unused.late
        self.other_keys += unused.other_keys

    def note_unused(self, name: str, unused: RejectedRows) -> None:
        """Count and keep what was not used of rows that were made of others."""
        self.count(0, unused)
        if unused.rejected:
            self.reject(name, unused.rejected)

    def add(self, counted: OperatorCounts) -> None:
        """Add rows that were counted elsewhere."""
        self.read += counted.read
        self.outside += counted.outside
        self.late += counted.late
        self.other_keys += counted.other_keys

    def note_lag(self, seconds: float) -> None:
        """Note how long after its trigger a step of a live run was out."""
        self.lag_seconds = seconds
        self.worst_lag_seconds = max(self.worst_lag_seconds, seconds)

    def counts(self) -> dict[str, int]:
        """What became of the rows, by name."""
        return {
            "read": self.read,
            "outside": self.outside,
            "late": self.late,
            "other_keys": self.other_keys,
            "rejected": self.rejected_rows,
            "quarantined": len(self.quarantined),
        }


def first_types(
    source: Source, columns: Columns, partitions: Sequence[str] | None = None
) -> list[Types | None]:
    """What the first partition that can be used declares; nothing if there is none."""
    for name in source.partitions() if partitions is None else partitions:
        if not isinstance(source, CheckedSource) or source.check(name, columns) is None:
            return [source.columns(name)]
    return []


class ChunkReader:
    """Reads chunks of a source, and makes rows of them."""

    def __init__(self, source: Source, reader: RowReader, operator: OperatorCounts) -> None:
        self.source, self.reader, self.operator = source, reader, operator
        self.prepare: Prepare | None = None
        """Prepares rows in place of the query's own, where its tables are read anew."""

    def learn(self, partition: str) -> None:
        """Fix the types of unit and keys by the first partition."""
        if self.reader.query.privacy_unit_column not in self.reader.types:
            self.reader.learn(self.source.columns(partition))

    def beside(self) -> ChunkReader:
        """The same for another thread, if the source can be read by several; else this one."""
        if not isinstance(self.source, ParallelReads):
            return self
        other = copy(self)
        other.source = self.source.reader()
        return other

    def batch(self, partition: str, position: Position, *, until: Position = None) -> Batch:
        """The chunk at a position, as the source has it."""
        self.learn(partition)
        columns = self.reader.query.source_columns
        return self.source.read(partition, position, columns=columns, until=until)

    def rows(
        self,
        partition: str,
        position: Position,
        batch: Batch,
        *,
        arrived: int | None = None,
        parsed: ParsedColumns | None = None,
        counts: OperatorCounts | None = None,
    ) -> tuple[Rows, list[Rejected]]:
        """The rows of a chunk, and those of it that cannot be used.

        `arrived`: the step at which it came, and was counted; None: the rows' times tell.
        `counts`: where rows are counted, if not at once for the operator.
        """
        where = batch.where or (partition if position is None else f"{partition} from {position}")
        parsed = batch.parsed if parsed is None else parsed
        rows, unused = self.reader.read(
            batch.table, where, arrived=arrived, parsed=parsed, prepare=self.prepare
        )
        counts = self.operator if counts is None else counts
        counts.count(0 if arrived is not None else batch.size, unused)
        return rows, [*batch.rejected, *unused.rejected]

    def joined_rows(self, batches: Sequence[Batch], *, arrived: int) -> Rows | None:
        """The rows of several chunks with the same columns, parsed as one.

        None if one of them cannot be used: chunk by chunk it is named by its place.
        """
        table = pa.concat_tables(batch.table for batch in batches)
        rows, unused = self.reader.read(table, "", arrived=arrived, prepare=self.prepare)
        if unused.rejected:
            return None
        self.operator.count(0, unused)
        return rows
