"""Latch keys: show a key from the first release on at which its noisy units pass the threshold.

Every active key is tested at every release of its window, also without new data: its noise moves on
by itself. Testing only keys with new data would reveal which keys those were.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dpstream.compiled import compiled
from dpstream.mechanisms.parts.counting.keyed import move
from dpstream.privacy.query_spend import Door
from dpstream.records import Integers
from dpstream.stages.groups import GroupBucket
from dpstream.stages.plan import WindowPlan
from dpstream.stages.prefetch import FAR, prefetch


def select_keys(
    bucket: GroupBucket, plan: WindowPlan, release: int, door: Door
) -> tuple[Integers, Integers]:
    """(noise of every active group's first measure, the groups that appear now).

    Groups that became active since the last release join with noise from the exact law that it
    has by now.
    """
    start = bucket.joined
    joining = bucket.ids(np.arange(start, len(bucket.active)))
    bucket.noise, noise = move(
        plan.process,
        bucket.noise,
        joining,
        release,
        plan.sigmas[0],
        lambda ids, purpose, each: door.normals(ids, release=release, purpose=purpose, each=each),
        distinct=True,
    )
    bucket.joined = len(bucket.active)
    hidden = np.ones(len(bucket.active), bool)
    hidden[bucket.shown.active] = False
    if plan.public:
        return noise, np.flatnonzero(hidden)
    found: Integers = np.empty(len(noise), np.int64)
    least = int(plan.thresholds[release - 1])
    count = _appearing(bucket.table.numbers, bucket.active, hidden, noise, least, found)
    return noise, found[:count]


@compiled
def _appearing(
    sums: Any, active: Integers, hidden: Any, noise: Integers, least: int, found: Integers
) -> int:
    """The hidden groups whose noisy units, column 0, have reached the threshold: how many."""
    count = 0
    lines, line = np.uint64(sums.ctypes.data), np.uint64(sums.strides[0])
    for group in range(len(active)):
        ahead = group + FAR
        if ahead < len(active):
            prefetch(lines + np.uint64(active[ahead]) * line)
        found[count] = group
        count += hidden[group] and sums[active[group], 0] + noise[group] >= least
    return count
