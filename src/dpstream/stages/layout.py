"""The order of a window's rows in its tables: oldest appearance first, then by id.

Groups only ever join at the end, so the order and the key columns grow with each release instead of
being made anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from dpstream.records import Integers
from dpstream.stages.groups import GroupBucket
from dpstream.stages.perturb import Noisy


@dataclass(kw_only=True)
class Layout:
    """Where each bucket's groups stand, and the key columns of all of them in order."""

    size: int = 0
    places: list[Integers] = field(default_factory=list)
    keys: pa.Table | None = None

    def arranged(
        self, buckets: Sequence[GroupBucket], noisy: Sequence[Noisy]
    ) -> tuple[Integers, pa.Table | None]:
        """(sums, keys) of everything shown, in order; no keys as long as nothing was."""
        self._grow(buckets, noisy)
        sums: Integers = np.empty((self.size, noisy[0].sums.shape[1]), np.int64)
        for places, part in zip(self.places, noisy, strict=True):
            sums[places] = part.sums
        return sums, self.keys

    def _grow(self, buckets: Sequence[GroupBucket], noisy: Sequence[Noisy]) -> None:
        """Take in the groups that have come since the last release."""
        places = self.places = self.places or [np.zeros(0, np.int64) for _ in noisy]
        new = [slice(len(known), None) for known in places]
        ids = np.concatenate([part.ids[rest] for part, rest in zip(noisy, new, strict=True)])
        since = np.concatenate([part.since[rest] for part, rest in zip(noisy, new, strict=True)])
        if not len(ids):
            return
        order = np.lexsort((ids[:, 1], ids[:, 0], since))
        rank = np.empty(len(order), np.int64)
        rank[order] = self.size + np.arange(len(order))
        ends = np.cumsum([len(part.ids[rest]) for part, rest in zip(noisy, new, strict=True)])
        self.places = [
            np.concatenate([known, more])
            for known, more in zip(places, np.split(rank, ends[:-1]), strict=True)
        ]
        shown = [
            bucket.key_columns(part.groups[rest])
            for bucket, part, rest in zip(buckets, noisy, new, strict=True)
            if len(part.groups[rest])
        ]
        fresh = pa.concat_tables(shown).take(pa.array(order))
        known = [] if self.keys is None else [self.keys]
        self.keys = pa.concat_tables([*known, fresh]).combine_chunks()
        self.size += len(order)
