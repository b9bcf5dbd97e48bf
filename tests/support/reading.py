"""Read sources to their end."""

from collections.abc import Sequence
from typing import Any

from dpstream.records import Batch, Source


def read_all(
    source: Source,
    partition: str | None = None,
    columns: Sequence[str] | None = None,
    start: Any = None,
) -> list[Batch]:
    """The batches of a partition, or of all of them, from a position to the end."""
    batches = []
    for name in source.partitions() if partition is None else [partition]:
        position, done = start, False
        while not done:
            batch = source.read(name, position, columns=columns)
            batches.append(batch)
            position, done = batch.position, batch.done
    return batches


def rows(batches: Sequence[Batch]) -> list[dict[str, object]]:
    """The rows of some batches, one after the other."""
    return [row for batch in batches for row in batch.table.to_pylist()]


def read_users(source: Source, partition: str, position: object = None) -> tuple[list[str], object]:
    """The users of a partition from a position on, and the position behind them."""
    batches = read_all(source, partition, ["user"], position)
    return [user for batch in batches for user in batch.table["user"].to_pylist()], batches[
        -1
    ].position
