"""Select keys: which groups are published, by the noisy number of their units.

"latched" shows a key from the first release on at which its noisy units pass the threshold
(`select_keys`); one that an earlier window has shown needs no threshold, and is only hidden while
its noisy units are few. "sqlp" publishes a group when enough units have come to it since the last
time (`end_rounds`): a group's round begins when it was last published, at first with the window;
remembered ones are published all the time. A group's units of the round are a running count with
noise of its own, a binary tree over the window's releases; when the count passes the threshold, all
that has come so far is published, and the next round begins. Sums are noisy by a second tree per
column, which is never begun anew.

Either way every active key is tested at every release of its window, also without new data: its
noise moves on by itself. Testing only keys with new data would reveal which keys those were.

Paper: Zhang, Doroshenko, Kairouz, Steinke, Thakurta, Ma, Apte, Spacek, "Differentially Private
Stream Processing at Scale", 2023, Algorithms 2 to 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dpstream.compiled import compiled
from dpstream.counting.noise_process import KeyedNoise
from dpstream.group_by.groups import GroupBucket
from dpstream.group_by.hash_tables import FAR, prefetch
from dpstream.group_by.perturb import NoisySums, next_noise, perturb
from dpstream.privacy.query_spend import NoiseStream
from dpstream.query.noise_plan import WindowPlan
from dpstream.records import Integers, Words

Mask = npt.NDArray[np.bool_]
Passes = Callable[[Words, Integers, int], Mask]
"""(group ids, noisy units, threshold): whose round ends."""


def select_keys(
    bucket: GroupBucket,
    plan: WindowPlan,
    release: int,
    stream: NoiseStream,
    sets: Integers | None = None,
) -> tuple[Integers, Integers]:
    """(noise of every active group's first measure, the groups that appear now).

    `sets`: of every active group which set of keys it is of, where there are several.
    """
    if not len(bucket.codes):  # all groups are known, and nothing of them is measured but cells
        return np.zeros(len(bucket.active), np.int64), np.flatnonzero(bucket.hidden())
    joining = bucket.ids(np.arange(bucket.joined, len(bucket.active)))
    bucket.noise, noise = next_noise(plan, 0, bucket.noise, joining, release, stream, sets)
    bucket.joined = len(bucket.active)
    hidden = bucket.hidden()
    if plan.public:
        return noise, np.flatnonzero(hidden)
    appearing: Integers = np.empty(len(noise), np.int64)
    above, least = noise, 0
    if sets is None:
        least = int(plan.thresholds[release - 1])
    else:
        above = noise - plan.thresholds[sets, release - 1]
    count = _appearing(bucket.table.numbers, bucket.active, hidden, above, least, appearing)
    appearing = appearing[:count]
    if len(bucket.remembered):
        waiting = bucket.remembered[hidden[bucket.remembered]]
        noisy = bucket.table.numbers[bucket.active[waiting], 0] + noise[waiting]
        visible = waiting[noisy >= plan.visible[0, release - 1]]
        appearing = np.union1d(appearing, visible)
    return noise, appearing


@compiled
def _appearing(
    sums: Any, active: Integers, hidden: Any, noise: Integers, least: int, appearing: Integers
) -> int:
    """The hidden groups whose noisy units, column 0, have reached the threshold: how many."""
    count = 0
    lines, line = np.uint64(sums.ctypes.data), np.uint64(sums.strides[0])
    for group in range(len(active)):
        ahead = group + FAR
        if ahead < len(active):
            prefetch(lines + np.uint64(active[ahead]) * line)
        appearing[count] = group
        count += hidden[group] and sums[active[group], 0] + noise[group] >= least
    return count


def passes(_: Words, noisy: Integers, threshold: int) -> Mask:
    """Those with enough noisy units."""
    return noisy >= threshold


def end_rounds(
    bucket: GroupBucket,
    plan: WindowPlan,
    release: int,
    step: int,
    streams: Sequence[NoiseStream],
    choose: Passes,
) -> NoisySums:
    """The groups whose round ends now, with all their sums; their next round begins."""
    ending = _ending(bucket, plan, release, streams[0], choose)
    rows = bucket.active[np.concatenate([ending, bucket.remembered])]
    bucket.table.numbers[rows, 0] = 0
    bucket.table.numbers[rows, -1] = step + 2  # see GroupBucket
    bucket.table.touched[rows] = 1
    shown = np.union1d(ending, bucket.remembered)
    appearing = shown[bucket.hidden()[shown]]
    unseen: Integers = np.zeros(len(bucket.active), np.int64)  # nobody sees the count itself
    noisy = perturb(bucket, plan, release, streams, unseen, appearing)
    if len(bucket.remembered):  # these have no rounds: they are hidden while they are small
        small = np.abs(noisy.sums[:, 1]) < plan.visible[1, release - 1]  # Query.sized_by
        shown = np.setdiff1d(shown, np.intersect1d(bucket.remembered, noisy.groups[small]))
    return noisy.select(np.isin(noisy.groups, shown))


def _ending(
    bucket: GroupBucket, plan: WindowPlan, release: int, stream: NoiseStream, choose: Passes
) -> Integers:
    """Active groups whose noisy units of the round pass the threshold; their noise ends here."""
    units = bucket.table.numbers[bucket.active, 0]
    resting = np.ones(len(bucket.active), bool)
    resting[bucket.round] = False
    resting[bucket.remembered] = False
    joining = np.flatnonzero(resting & (units > plan.pre_threshold))
    state, noise = next_noise(plan, 0, bucket.noise, bucket.ids(joining), release, stream)
    tested = np.concatenate([bucket.round, joining])
    passed = choose(state.ids, units[tested] + noise, int(plan.thresholds[release - 1]))
    bucket.round = tested[~passed]
    bucket.noise = KeyedNoise(ids=state.ids[~passed], state=state.state[~passed], step=release)
    ending: Integers = tested[passed]
    return ending
