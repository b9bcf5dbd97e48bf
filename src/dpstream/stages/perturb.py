"""Noisy sums of the groups that are shown: all of them, at every release of their window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpstream.mechanisms.parts.counting.keyed import move
from dpstream.privacy.query_spend import Door
from dpstream.records import Integers, Reals, Words
from dpstream.stages.groups import GroupBucket
from dpstream.stages.plan import WindowPlan


@dataclass(frozen=True, kw_only=True)
class Noisy:
    """What one bucket publishes: groups x measures, in grid steps, oldest appearance first."""

    ids: Words
    since: Integers
    sums: Integers
    groups: Integers
    """Which of the bucket's active groups they are."""

    def part(self, kept: npt.NDArray[np.bool_]) -> Noisy:
        """Some of them."""
        return Noisy(
            ids=self.ids[kept],
            since=self.since[kept],
            sums=self.sums[kept],
            groups=self.groups[kept],
        )


def perturb(
    bucket: GroupBucket,
    plan: WindowPlan,
    release: int,
    doors: Sequence[Door],
    first: Integers,
    appearing: Integers,
) -> Noisy:
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
        state, path = move(
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
    return Noisy(ids=bucket.ids(shown.active), since=shown.since, sums=sums, groups=shown.active)


def thinned(bucket: GroupBucket, noisy: Noisy, least: Reals) -> Noisy:
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
