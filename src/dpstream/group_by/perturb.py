"""Noisy sums of the groups that are shown: all of them, at every release of their window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dpstream.counting.keyed_noise import advance_noise
from dpstream.group_by.groups import GroupBucket
from dpstream.privacy.query_spend import NoiseStream
from dpstream.query.noise_plan import WindowPlan
from dpstream.records import Integers, Reals, Words


@dataclass(frozen=True, kw_only=True)
class NoisySums:
    """What one bucket publishes: groups x measures, in grid steps, oldest appearance first."""

    ids: Words
    since: Integers
    sums: Integers
    groups: Integers
    """Which of the bucket's active groups they are."""

    def part(self, kept: npt.NDArray[np.bool_]) -> NoisySums:
        """Some of them."""
        return NoisySums(
            ids=self.ids[kept],
            since=self.since[kept],
            sums=self.sums[kept],
            groups=self.groups[kept],
        )


def perturb(
    bucket: GroupBucket,
    plan: WindowPlan,
    release: int,
    doors: Sequence[NoiseStream],
    first: Integers,
    appearing: Integers,
) -> NoisySums:
    """Add noise to every measure of every group shown; `first` is the noise of measure 0.

    The other measures' processes begin at step 1 as well, but nobody has seen them before, so
    their state at this release is drawn from its exact law.
    """
    shown = bucket.shown
    ids = bucket.ids(appearing)
    in_order = appearing[np.lexsort((ids[:, 1], ids[:, 0]))]
    joining = bucket.ids(in_order)
    shown.active = np.concatenate([shown.active, in_order])
    shown.since = np.concatenate([shown.since, np.full(len(in_order), release, np.int64)])
    noise = [first[shown.active]]
    for number, door in enumerate(doors[1:]):
        known = shown.noise[number] if number < len(shown.noise) else None
        state, path = advance_noise(
            plan.process,
            known,
            joining,
            release,
            plan.sigmas[number + 1],
            lambda rows, purpose, each, door=door: door.normals(  # type: ignore[misc]
                rows, release=release, purpose=purpose, each=each
            ),
            distinct=True,
        )
        shown.noise[number:] = [state, *shown.noise[number + 1 :]]
        noise.append(path)
    sums = bucket.sums(shown.active) + np.stack(noise, axis=1)
    return NoisySums(
        ids=bucket.ids(shown.active), since=shown.since, sums=sums, groups=shown.active
    )


def thinned(bucket: GroupBucket, noisy: NoisySums, least: Reals) -> NoisySums:
    """Only groups of which some noisy sum has moved by `least` since it was last published.

    Noisy values decide, so this is post-processing: which rows are left out reveals nothing more.
    """
    shown = bucket.shown
    new = np.ones(len(noisy.since), bool)
    published = noisy.sums.astype(np.float64)
    if shown.published is not None:
        known = len(shown.published)
        moved = np.abs(noisy.sums[:known] - shown.published) >= least
        new[:known] = moved.any(axis=1)
        published[:known] = np.where(new[:known, None], noisy.sums[:known], shown.published)
    shown.published = published
    return noisy.part(new)


# The order of a window's rows in its tables: oldest appearance first, then by id.
#
# Groups only ever join at the end, so the order and the key columns grow with each release instead
# of being made anew.


@dataclass(kw_only=True)
class Layout:
    """Where each bucket's groups stand, and the key columns of all of them in order."""

    size: int = 0
    places: list[Integers] = field(default_factory=list)
    keys: pa.Table | None = None

    def arranged(
        self, buckets: Sequence[GroupBucket], noisy: Sequence[NoisySums]
    ) -> tuple[Integers, pa.Table | None]:
        """(sums, keys) of everything shown, in order; no keys as long as nothing was."""
        self._grow(buckets, noisy)
        sums: Integers = np.empty((self.size, noisy[0].sums.shape[1]), np.int64)
        for places, part in zip(self.places, noisy, strict=True):
            sums[places] = part.sums
        return sums, self.keys

    def _grow(self, buckets: Sequence[GroupBucket], noisy: Sequence[NoisySums]) -> None:
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
