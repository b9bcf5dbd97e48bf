"""Files for several queries: what one of them has read, the others need not read again.

Live sources are shared by `engines.arrivals`.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from threading import RLock

import pyarrow as pa

from dpstream.records import Batch, ChunkRanges, InferredTypes, Position, Source


class SharedSource:
    """Serves queries that go through a source side by side, each at its own pace by its own view.

    `wanted`: the columns of each query. A chunk is read once with all of them and kept while there
    is room; other projections (a look at the time column) are read as they are asked for.

    Of the source's abilities, the views have those of bounded sources: `chunk_ranges`, `inferred`.
    """

    def __init__(
        self, source: Source, wanted: Sequence[Sequence[str]], *, memory: int = 1 << 28
    ) -> None:
        self.source = source
        self.bounded, self.replayable = source.bounded, source.replayable
        self.inferred = source.inferred if isinstance(source, InferredTypes) else {}
        self._wanted = [frozenset(columns) for columns in wanted]
        self._all = list(dict.fromkeys(name for columns in wanted for name in columns))
        self._memory, self._held = memory, 0
        self._chunks: OrderedDict[tuple[str, str], Batch] = OrderedDict()
        self._lock = RLock()
        self._open = len(wanted)

    def views(self) -> list[View]:
        """A source for each of the queries, in their order."""
        return [View(self) for _ in self._wanted]

    def partitions(self) -> list[str]:
        """Those of the source."""
        with self._lock:
            return self.source.partitions()

    def columns(self, partition: str) -> dict[str, pa.DataType] | None:
        """Those of the source."""
        with self._lock:
            return self.source.columns(partition)

    def read(
        self,
        partition: str,
        position: Position,
        *,
        columns: Sequence[str] | None = None,
        until: Position = None,
    ) -> Batch:
        """A chunk with the columns that are asked for."""
        with self._lock:
            if columns is None or frozenset(columns) not in self._wanted:
                return self.source.read(partition, position, columns=columns, until=until)
            whole = self._chunk(partition, position, until)
        return replace(whole, table=whole.table.select(list(columns)))

    def chunk_ranges(self, partition: str, column: str) -> list[tuple[Position, int, int]] | None:
        """What the source knows of them."""
        with self._lock:
            if not isinstance(self.source, ChunkRanges):
                return None
            return self.source.chunk_ranges(partition, column)

    def close(self) -> None:
        """Close the source when the last query has closed it."""
        with self._lock:
            self._open -= 1
            if self._open == 0:
                self._chunks.clear()
                self.source.close()

    def _chunk(self, partition: str, position: Position, until: Position) -> Batch:
        place = (partition, json.dumps([position, until]))
        if place in self._chunks:
            self._chunks.move_to_end(place)
            return self._chunks[place]
        batch = self.source.read(partition, position, columns=self._all, until=until)
        if batch.position == position and not batch.done:
            return batch  # nothing yet
        self._chunks[place] = batch
        self._held += int(batch.table.nbytes)
        while self._held > self._memory and len(self._chunks) > 1:
            _, gone = self._chunks.popitem(last=False)
            self._held -= int(gone.table.nbytes)
        return batch


class View:
    """What one query sees of a shared source."""

    def __init__(self, shared: SharedSource) -> None:
        self.bounded, self.replayable = shared.bounded, shared.replayable
        self.partitions, self.columns = shared.partitions, shared.columns
        self.chunk_ranges, self.inferred = shared.chunk_ranges, shared.inferred
        self.read, self.close = shared.read, shared.close
