"""What share of all rows the bounds have kept: two noisy counts of each window as a whole.

Rows that bounding drops bias every count and sum down. Rows offered (of each unit at most a public
number, over all windows) and rows kept are counted with noise of their own, under the query's
budget; their quotient makes up for the bias on average, if units that were cut choose groups as
the others do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.compiled import compiled
from dpstream.group_by.groups import GroupBucket
from dpstream.group_by.hash_tables import HashTable
from dpstream.group_by.key_selection import select_keys
from dpstream.group_by.perturb import perturb
from dpstream.privacy.query_spend import NoiseStream
from dpstream.query.aggregates import Measure
from dpstream.query.noise_plan import WindowPlan
from dpstream.records import Integers, Words

_ONE_GROUP: Words = np.zeros((1, 2), np.uint64)


class Totals:
    """Rows offered and kept in one window."""

    def __init__(self, measures: Sequence[Measure]) -> None:
        self.bucket = GroupBucket([Measure(kind="rows") for _ in measures])
        self.bucket.open(_ONE_GROUP, pa.table({"": pa.nulls(1)}))

    def add(self, *, offered: int, kept: int) -> None:
        """Count rows of a step."""
        self.bucket.table.numbers[0] += (offered, kept)
        self.bucket.table.touched[0] = 1

    def share(
        self, plan: WindowPlan, release: int, streams: Sequence[NoiseStream]
    ) -> tuple[float, float]:
        """The noisy share of rows kept, and its standard deviation."""
        noise, appearing = select_keys(self.bucket, plan, release, streams[0])
        noisy = perturb(self.bucket, plan, release, streams, noise, appearing)
        offered, kept = noisy.sums[0].tolist()
        of_offered, of_kept = plan.stddevs[:, release - 1].tolist()
        return kept_share((offered, of_offered), (kept, of_kept))


def kept_share(offered: tuple[int, float], kept: tuple[int, float]) -> tuple[float, float]:
    """Share of rows that were kept, and its standard deviation, from two noisy counts.

    Where the counts drown in their noise nothing is known, and nothing is made up for.
    """
    (rows, of_rows), (left, of_left) = offered, kept
    if rows < 10 * of_rows or left < 10 * of_left or left >= rows:
        return 1.0, 0.0
    share = left / rows
    return share, share * math.hypot(of_rows / rows, of_left / left)


def count_offered(counters: HashTable, units: Words, places: Integers, most: int) -> int:
    """How many of the rows at `places` count, at most `most` of a unit for ever."""
    rows = counters.rows(units, places)
    return int(_count_offered(rows, counters.numbers, most))


@compiled
def _count_offered(rows: Any, counts: Any, most: int) -> int:
    counted = 0
    for row in rows:
        if counts[row, 0] < most:
            counts[row, 0] += 1
            counted += 1
    return counted
