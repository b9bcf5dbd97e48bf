"""What the tests of connectors share."""

from collections.abc import Sequence

from dpstream.records import Batch, Source


def read_all(
    source: Source, partition: str | None = None, columns: Sequence[str] | None = None
) -> list[Batch]:
    """The batches of a partition, or of all of them, to the end."""
    batches = []
    for name in source.partitions() if partition is None else [partition]:
        position, done = None, False
        while not done:
            batch = source.read(name, position, columns=columns)
            batches.append(batch)
            position, done = batch.position, batch.done
    return batches


def rows(batches: Sequence[Batch]) -> list[dict[str, object]]:
    """The rows of some batches, one after the other."""
    return [row for batch in batches for row in batch.table.to_pylist()]
