"""What the Spark engine has to reach."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dpstream.bench.harness import Row, target
from dpstream.bench.spark_kills import Disturbed

SLOWER: Final = 1.5
EXECUTORS: Final = 2


def targets(rows: Sequence[Row], killed: Sequence[Disturbed]) -> list[Row]:
    """The ratio in every case with two executors, and the same bytes after every kill."""
    judged = [
        target(
            f"{row['library']}: times slower than the plain group-by, {row['records']:,} records, "
            f"{row['keys']:,} keys, micro-batches: {row['batches']}",
            row["times_slower"],
            "<=",
            SLOWER,
        )
        for row in rows
        if row.get("times_slower") is not None and row["executors"] == EXECUTORS
    ]
    if not killed:
        why = "a short run kills nothing"
        return [*judged, target("killed runs with identical bytes", None, "==", 1, reason=why)]
    same = sum(not one.difference for one in killed) / len(killed)
    return [*judged, target("share of killed runs with identical bytes", same, "==", 1.0)]
