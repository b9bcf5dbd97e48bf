"""Several sources as one: the partitions of each, under the name of its table.

A column of the source `clicks` is called `clicks.page`, and `$table` says whose row it is; columns
of the other sources are NULL. Positions are those of the partitions: what was read, and to where,
is logged and replayed for each of them. Sources that go by the clock must be of one kind (several
topics, several directories): what one of them is able to do, all are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from dpstream.errors import InvalidParameter
from dpstream.query.union_tables import TABLE
from dpstream.records import (
    Batch,
    CheckedSource,
    Columns,
    CommittingSource,
    EmptyingSource,
    EndingSource,
    FinitePartitions,
    InferredTypes,
    MeasuredSource,
    Position,
    Source,
    StampedPartitions,
    StartOffsets,
)


class UnionSource:
    """Reads each partition from its own source."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources: dict[str, Any] = dict(sources)
        self.bounded = all(each.bounded for each in sources.values())
        self.replayable = all(each.replayable for each in sources.values())
        self.inferred = {
            f"{name}.{column}": words
            for name, each in sources.items()
            if isinstance(each, InferredTypes)
            for column, words in each.inferred.items()
        }

    def partitions(self) -> list[str]:
        """Those of every source, under its name."""
        return [f"{n}/{each}" for n, s in self._sources.items() for each in s.partitions()]

    def columns(self, partition: str) -> dict[str, pa.DataType] | None:
        """The types of a partition's own columns; the others have none."""
        name, source, inner = self._own(partition)
        known = source.columns(inner)
        if known is None:
            return None
        own = {f"{name}.{column}": kind for column, kind in known.items()}
        return _OwnTypes(own | {TABLE: pa.string()}, name, tuple(self._sources))

    def read(
        self, partition: str, position: Position, *, columns: Columns = None, until: Position = None
    ) -> Batch:
        """A chunk of one partition; columns of other sources are NULL."""
        name, source, inner = self._own(partition)
        wanted = None if columns is None else _of_source(name, columns)
        batch: Batch = source.read(inner, position, columns=wanted, until=until)
        given = {f"{name}.{each}": batch.table[each] for each in batch.table.column_names}
        size = batch.table.num_rows
        given[TABLE] = pa.repeat(name, size)
        names = list(given) if columns is None else list(columns)
        table = pa.table({each: given.get(each, pa.nulls(size)) for each in names})
        return replace(batch, table=table)

    def close(self) -> None:
        """Close every source."""
        for source in self._sources.values():
            source.close()

    def _own(self, partition: str) -> tuple[str, Any, str]:
        """The name of the source that a partition is of, the source, and its own name for it."""
        name, _, inner = partition.partition("/")
        return name, self._sources[name], inner

    @property
    def _any(self) -> Any:
        return next(iter(self._sources.values()))


class _OwnTypes(dict[str, pa.DataType]):
    """Types of columns; those of other sources have a type without values."""

    def __init__(self, known: Mapping[str, pa.DataType], name: str, names: tuple[str, ...]) -> None:
        super().__init__(known)
        self._others = tuple(f"{each}." for each in names if each != name)

    def __missing__(self, column: str) -> pa.DataType:
        if column.startswith(self._others):
            return pa.null()
        raise KeyError(column)

    def __contains__(self, column: object) -> bool:
        other = isinstance(column, str) and column.startswith(self._others)
        return super().__contains__(column) or other


def _of_source(name: str, columns: Columns) -> list[str]:
    """The names that a source has for those of its columns."""
    return [each.removeprefix(f"{name}.") for each in columns or () if each.startswith(f"{name}.")]


class _Checks:
    quarantines = property(lambda self: self._any.quarantines)

    def check(self: Any, partition: str, columns: Columns, *, whole: bool = False) -> Position:
        name, source, inner = self._own(partition)
        if not isinstance(source, CheckedSource):
            return None
        wanted = None if columns is None else _of_source(name, columns)
        return source.check(inner, wanted, whole=whole)


def _of_owner(name: str, positions: Mapping[str, Position]) -> dict[str, Position]:
    """The positions of one source, under its own names of the partitions."""
    split = ((each.partition("/"), at) for each, at in positions.items())
    return {inner: at for (owner, _, inner), at in split if owner == name}


class _Commits:
    def commit(self: Any, positions: Mapping[str, Position]) -> None:
        for name, source in self._sources.items():
            source.commit(_of_owner(name, positions))


class _Measures:
    def behind(self: Any, positions: Mapping[str, Position]) -> dict[str, int]:
        return {
            f"{name}/{inner}": count
            for name, source in self._sources.items()
            for inner, count in source.behind(_of_owner(name, positions)).items()
        }


class _Ends:
    ended = property(lambda self: all(each.ended for each in self._sources.values()))


class _Starts:
    def start_offset(self: Any, position: Position) -> Position:
        return self._any.start_offset(position)


class _Finite:
    partitions_end = property(
        lambda self: all(each.partitions_end for each in self._sources.values())
    )


class _Stamps:
    def stamp(self: Any, partition: str) -> Any:
        _, source, inner = self._own(partition)
        return source.stamp(inner)

    def resume(self: Any, partition: str, position: Position, stamp: Any) -> bool:
        _, source, inner = self._own(partition)
        return bool(source.resume(inner, position, stamp))


class _Empties:
    def removed(self: Any) -> list[str]:
        return [f"{n}/{each}" for n, s in self._sources.items() for each in s.removed()]


_ABILITIES: tuple[tuple[type, type], ...] = (
    (CheckedSource, _Checks),
    (CommittingSource, _Commits),
    (EndingSource, _Ends),
    (StartOffsets, _Starts),
    (MeasuredSource, _Measures),
    (FinitePartitions, _Finite),
    (StampedPartitions, _Stamps),
    (EmptyingSource, _Empties),
)  # not `ChunkRanges`: the time of a row is one of several columns


def union_source(sources: Mapping[str, Source]) -> Source:
    """Sources as one, by the names of their tables."""
    kinds = {type(each) for each in sources.values()}
    if any("/" in name for name in sources):
        raise InvalidParameter("a table in a UNION ALL must not have a slash in its name")
    if len({each.bounded for each in sources.values()}) > 1:
        raise InvalidParameter(
            "sources of a UNION ALL must be all live, or none; name older files as history"
        )
    if len(kinds) > 1 and not all(each.bounded for each in sources.values()):
        raise InvalidParameter(
            "live sources of a UNION ALL must be of one kind: several topics, several directories"
        )
    able: list[type] = [
        mixin
        for protocol, mixin in _ABILITIES
        if all(isinstance(each, protocol) for each in sources.values())
        or (protocol is CheckedSource and any(isinstance(e, protocol) for e in sources.values()))
    ]
    made: Source = type("UnionSource", (UnionSource, *able), {})(sources)
    return made
