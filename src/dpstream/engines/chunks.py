"""A chunk of a source as a query's rows, and what becomes of the rows that cannot be used."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from dpstream.records import Batch, Position, Rejected, Source
from dpstream.rows.row_batch import Rows
from dpstream.rows.row_reader import ParsedColumns, RowReader


class RejectHandler(Protocol):
    """Takes the rows that are set aside, for the operator alone."""

    def rejected(self, chunk: str, rows: list[Rejected]) -> None:
        """Rows that could not be used."""

    def count(self, *, read: int, outside: int, late: int, other_keys: int) -> None:
        """How many rows were read, and how many were dropped by the query's own rules."""

    def lagged(self, seconds: float) -> None:
        """How long after its trigger a step of a live run was out."""


class ChunkReader:
    """Reads chunks and sets aside what cannot be used, always under the same names."""

    def __init__(self, source: Source, reader: RowReader, aside: RejectHandler) -> None:
        self.source, self.reader, self._aside = source, reader, aside

    def learn(self, partition: str) -> None:
        """Fix the types of unit and keys by the first partition."""
        if self.reader.query.privacy_unit_column not in self.reader.types:
            self.reader.learn(self.source.columns(partition))

    def batch(self, partition: str, position: Position, *, until: Position = None) -> Batch:
        """The chunk at a position, as the source has it."""
        self.learn(partition)
        columns = self.reader.query.source_columns
        return self.source.read(partition, position, columns=columns, until=until)

    def rows(self, partition: str, position: Position, batch: Batch) -> Rows:
        """The rows of such a chunk; what cannot be used is set aside."""
        rows, rejected = self._divided(partition, position, batch)
        self.set_aside(f"{partition} {position}", rejected)
        return rows

    def divided(
        self,
        partition: str,
        position: Position,
        *,
        arrived: int | None = None,
        until: Position = None,
    ) -> tuple[Rows, Batch, list[Rejected]]:
        """The rows of the chunk at a position, and those that cannot be used."""
        batch = self.batch(partition, position, until=until)
        rows, rejected = self._divided(partition, position, batch, arrived=arrived)
        return rows, batch, rejected

    def shared(
        self,
        partition: str,
        position: Position,
        batch: Batch,
        parsed: ParsedColumns,
        *,
        arrived: int,
    ) -> tuple[Rows, list[Rejected]]:
        """The rows of a chunk that several queries read, and those that cannot be used."""
        self.learn(partition)
        mine = replace(batch, table=batch.table.select(self.reader.query.source_columns))
        return self._divided(partition, position, mine, arrived=arrived, parsed=parsed)

    def tell_lag(self, seconds: float) -> None:
        """How long after its trigger a step was out."""
        self._aside.lagged(seconds)

    def set_aside(self, name: str, rows: list[Rejected]) -> None:
        """Keep rows that cannot be used, under a name that the same rows always have."""
        self._aside.rejected(name, rows)

    def _divided(
        self,
        partition: str,
        position: Position,
        batch: Batch,
        *,
        arrived: int | None = None,
        parsed: ParsedColumns | None = None,
    ) -> tuple[Rows, list[Rejected]]:
        where = batch.where or (partition if position is None else f"{partition} from {position}")
        rows, setting = self.reader.read(batch.table, where, arrived=arrived, parsed=parsed)
        self._aside.count(
            read=len(batch.table) + len(batch.rejected),
            outside=setting.outside,
            late=setting.late,
            other_keys=setting.other_keys,
        )
        return rows, [*batch.rejected, *setting.rejected]
