"""Find keys in rounds: publish a group when enough units have come to it since the last time.

A group's round begins when it was last published (at first, with the window). Its units of the
round are a running count with noise of its own, a binary tree over the window's releases; when the
count passes the threshold, all that has come so far is published, and the next round begins. Sums
are noisy by a second tree per column, which is never begun anew.

Paper: Zhang, Doroshenko, Kairouz, Steinke, Thakurta, Ma, Apte, Spacek, "Differentially Private
Stream Processing at Scale", 2023, Algorithms 2 to 4. Every group with enough units is
tested at every release, also without new rows, so there is nothing to predict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from dpstream.mechanisms.parts.counting.keyed import KeyedNoise, move
from dpstream.privacy.query_spend import Door
from dpstream.records import Integers, Words
from dpstream.stages.groups import GroupBucket
from dpstream.stages.perturb import Noisy, perturb
from dpstream.stages.plan import WindowPlan

Mask = npt.NDArray[np.bool_]
Passes = Callable[[Words, Integers, int], Mask]
"""(group ids, noisy units, threshold): whose round ends."""


def passes(_: Words, noisy: Integers, threshold: int) -> Mask:
    """Those with enough noisy units."""
    found: Mask = noisy >= threshold
    return found


def in_rounds(
    bucket: GroupBucket,
    plan: WindowPlan,
    release: int,
    step: int,
    doors: Sequence[Door],
    choose: Passes = passes,
) -> Noisy:
    """The groups whose round ends now, with all their sums; their next round begins."""
    chosen = _chosen(bucket, plan, release, doors[0], choose)
    rows = bucket.active[chosen]
    bucket.table.numbers[rows, 0] = 0
    bucket.table.numbers[rows, -1] = step + 2  # see GroupBucket
    bucket.table.touched[rows] = 1
    hidden = np.ones(len(bucket.active), bool)
    hidden[bucket.shown.active] = False
    unseen: Integers = np.zeros(len(bucket.active), np.int64)  # nobody sees the count itself
    noisy = perturb(bucket, plan, release, doors, unseen, chosen[hidden[chosen]])
    ends = np.zeros(len(bucket.active), bool)
    ends[chosen] = True
    return noisy.part(ends[noisy.groups])


def _chosen(
    bucket: GroupBucket, plan: WindowPlan, release: int, door: Door, choose: Passes
) -> Integers:
    """Active groups whose noisy units of the round pass the threshold; their noise ends here."""
    units = bucket.table.numbers[bucket.active, 0]
    resting = np.ones(len(bucket.active), bool)
    resting[bucket.round] = False
    joining = np.flatnonzero(resting & (units > plan.pre_threshold))
    state, noise = move(
        plan.process,
        bucket.noise,
        bucket.ids(joining),
        release,
        plan.sigmas[0],
        lambda ids, purpose, each: door.normals(ids, release=release, purpose=purpose, each=each),
        distinct=True,
    )
    tested = np.concatenate([bucket.round, joining])
    passed = choose(state.ids, units[tested] + noise, int(plan.thresholds[release - 1]))
    bucket.round = tested[~passed]
    bucket.noise = KeyedNoise(ids=state.ids[~passed], state=state.state[~passed], step=release)
    found: Integers = tested[passed]
    return found
