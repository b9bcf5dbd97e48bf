"""Add noise to the sums of the groups that are shown, at every release of their window.

A window's table has its groups in the order of their appearance, then of their ids (`TableOrder`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dpstream.counting.noise_process import KeyedNoise, advance_noise
from dpstream.group_by.groups import GroupBucket
from dpstream.privacy.query_spend import NoiseStream
from dpstream.query.noise_plan import WindowPlan
from dpstream.records import Integers, Reals, Words

_ALL_GROUPS: Words = np.zeros((1, 2), np.uint64)


@dataclass(frozen=True, kw_only=True)
class NoisySums:
    """What one bucket publishes: groups x measures, in grid steps, oldest appearance first."""

    ids: Words
    since: Integers
    sums: Integers
    groups: Integers
    """Which of the bucket's active groups they are."""

    def select(self, kept: npt.NDArray[np.bool_] | slice) -> NoisySums:
        """Some of them."""
        return NoisySums(**{name: column[kept] for name, column in vars(self).items()})


def next_noise(
    plan: WindowPlan,
    measure: int,
    known: KeyedNoise | None,
    joining: Words,
    release: int,
    stream: NoiseStream,
    sets: Integers | None = None,
) -> tuple[KeyedNoise, Integers]:
    """A measure's noise moves on to a release: its new state, and the noise of each group.

    Groups that join draw theirs from the exact law that it has by now. Laplace noise is drawn once:
    its windows are published once. `sets`: of each group, of known ones and then of those that
    join, which set of keys it is of, where there are several.
    """
    if plan.scales:
        drawn = stream.laplace(joining, release=release, scale=plan.scales[measure])
        state = np.zeros((len(joining), plan.process.width))
        return KeyedNoise(ids=joining, state=state, step=release), drawn

    def draw(ids: Words, purpose: str, each: int) -> Reals:
        return stream.normals(ids, release=release, purpose=purpose, each=each)

    sigma, alike = plan.sigma(measure, sets), 0.0
    last = release == plan.process.steps
    if last and plan.shared and plan.shared[measure]:  # of all groups: one draw, wherever
        one = stream.normals(_ALL_GROUPS, release=release, purpose="shared")
        alike = plan.shared[measure] * float(one[0, 0])
    how: dict[str, Any] = {"distinct": True, "alike": alike}
    return advance_noise(plan.process_of(measure), known, joining, release, sigma, draw, **how)


def perturb(
    bucket: GroupBucket,
    plan: WindowPlan,
    release: int,
    streams: Sequence[NoiseStream],
    first: Integers,
    appearing: Integers,
    sets: Integers | None = None,
) -> NoisySums:
    """Add noise to every measure of every group shown; `first` is the noise of measure 0.

    The other measures' processes begin at step 1 as well, but nobody has seen them before, so
    their state at this release is drawn from its exact law. `sets`: of every active group which set
    of keys it is of, where there are several.
    """
    shown = bucket.shown
    ids = bucket.ids(appearing)
    appearing = appearing[np.lexsort((ids[:, 1], ids[:, 0]))]
    joining = bucket.ids(appearing)
    shown.active = np.concatenate([shown.active, appearing])
    shown.since = np.concatenate([shown.since, np.full(len(appearing), release, np.int64)])
    if not streams:  # nothing is measured but cells
        ids, sums = bucket.ids(shown.active), bucket.sums(shown.active)
        return NoisySums(ids=ids, since=shown.since, sums=sums, groups=shown.active)
    known: Sequence[KeyedNoise | None] = shown.noise or [None] * (len(streams) - 1)
    of_shown = None if sets is None else sets[shown.active]
    others = [
        next_noise(plan, measure, noise, joining, release, stream, of_shown)
        for measure, (noise, stream) in enumerate(zip(known, streams[1:], strict=True), start=1)
    ]
    shown.noise = [state for state, _ in others]
    noise = np.stack([first[shown.active], *(path for _, path in others)], axis=1)
    return NoisySums(
        ids=bucket.ids(shown.active),
        since=shown.since,
        sums=bucket.sums(shown.active) + noise,
        groups=shown.active,
    )


def thin_out(bucket: GroupBucket, noisy: NoisySums, least: Reals) -> NoisySums:
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
    return noisy.select(new)


@dataclass(kw_only=True)
class TableOrder:
    """Where each bucket's groups stand in a window's tables, and the key columns in that order.

    Groups only ever join at the end, so both grow with each release instead of being made anew.
    """

    size: int = 0
    places: list[Integers] = field(default_factory=list)
    keys: pa.Table | None = None

    def arrange(
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
        self.places = self.places or [np.zeros(0, np.int64) for _ in noisy]
        new = [
            part.select(slice(len(known), None))
            for known, part in zip(self.places, noisy, strict=True)
        ]
        ids = np.concatenate([part.ids for part in new])
        if not len(ids):
            return
        since = np.concatenate([part.since for part in new])
        order = np.lexsort((ids[:, 1], ids[:, 0], since))
        rank = np.empty(len(order), np.int64)
        rank[order] = self.size + np.arange(len(order))
        ends = np.cumsum([len(part.ids) for part in new])
        self.places = [
            np.concatenate([known, more])
            for known, more in zip(self.places, np.split(rank, ends[:-1]), strict=True)
        ]
        keys = pa.concat_tables(
            bucket.key_columns(part.groups)
            for bucket, part in zip(buckets, new, strict=True)
            if len(part.groups)
        ).take(pa.array(order))
        self.keys = keys if self.keys is None else pa.concat_tables([self.keys, keys])
        self.keys = self.keys.combine_chunks()
        self.size += len(order)
