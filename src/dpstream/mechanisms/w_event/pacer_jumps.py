"""Tell a level that has shifted from a one-step spike, and count how often either happens.

Guarantee: post-processing; only released values are read.

A release that most of a bin's models find beyond five deviations is a jump. From one release it
cannot be told whether the level has shifted or the count was a spike, so both are kept until the
next release of that bin: the bank that has learnt the release, and the bank of before. The next
release decides by its density under either, and by what earlier jumps of the bin turned out to be.
A spike is forgotten. Where more than a tenth of the releases would be, it is no outlier: the models
have to learn it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dpstream.compiled import njit
from dpstream.mechanisms.w_event.pacer_models import (
    Bank,
    Belief,
    Later,
    Models,
    later,
    learn,
)
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals

SPIKE, SHIFT, SQUARE = 0, 1, 2

_MOST = 0.5  # weight of surprised models from which a release is a jump
_MEMORY = 50.0  # releases after which an earlier jump counts for a third
_OFTEN = 5.0  # spikes within the memory from which they are no outliers
_RECENT = 20.0  # releases after which a shift is as well known as all else
_WINDOWS = 4.0  # windows that the costs of jumps are remembered for


@storable("pacer jumps")
@dataclass(frozen=True, kw_only=True, eq=False)
class Jumps:
    """What jumps of each bin have been, and the bins whose last release was one."""

    counts: Reals  # spikes, shifts x bins: how many, fading; from 1 each
    sizes: Reals  # sums of sizes, and of squared shifts x bins: fading
    steps: float  # that they were seen in, fading
    fresh: Reals  # releases since a recent shift, their mean, its variance x bins
    bins: Integers  # whose newest release was a jump
    before: Bank | None = None  # of these bins, without that release


def no_jumps(bins: int, window: int) -> Jumps:
    """Before the first release: half of the jumps are thought to be spikes."""
    return Jumps(
        counts=np.ones((2, bins)),
        sizes=np.zeros((3, bins)),
        steps=float(window),
        fresh=np.zeros((3, bins)),
        bins=np.zeros(0, np.int64),
    )


def learn_jumps(
    jumps: Jumps, bank: Bank, z: Reals, scale: float, gap: int, grid: Models, window: int
) -> tuple[Jumps, Bank, Belief]:
    """After another release, `gap` steps later: `learn`, with jumps decided and found."""
    new, belief = learn(bank, z, scale, gap, grid)
    fade, fade_steps = math.exp(-1.0 / _MEMORY), math.exp(-gap / (_WINDOWS * window))
    counts, sizes = _fade(jumps.counts, jumps.sizes, fade, fade_steps)
    fresh = _average(jumps.fresh, z, 2.0 * scale * scale)
    bins, before = jumps.bins, jumps.before
    forgotten = bins[:0]  # positions in `bins`
    if before is not None:
        old, old_belief = learn(before, z[bins], scale, gap, grid, bins=len(z))
        odds = np.log(counts[:, bins])
        spike = old_belief.evidence + odds[SPIKE] > belief.evidence[bins] + odds[SHIFT]
        size = np.abs(bank.level[bins] - before.level)
        kind = np.where(spike, SPIKE, SHIFT)
        counts[kind, bins] += 1.0
        sizes[kind, bins] += size
        sizes[SQUARE, bins] += np.where(spike, 0.0, size**2)
        forgotten = np.flatnonzero(spike)
        _put(new, bins[forgotten], old, forgotten)
        _put(belief, bins[forgotten], old_belief, forgotten)
        fresh[0, bins[forgotten]] = 0.0
    steps = fade_steps * jumps.steps + gap
    found = _find(belief.surprised, counts, _MOST, 1.0 + _OFTEN)
    kept = None
    if len(found):
        fresh[0, found], fresh[1, found], fresh[2, found] = 1.0, z[found], 2.0 * scale * scale
        kept = Bank(
            weight=bank.weight[found],
            mean=bank.mean[found],
            variance=bank.variance[found],
            level=bank.level[found],
            pool=bank.pool,
        )
        if before is not None and len(forgotten):  # these have not learnt the spike
            _, again, which = np.intersect1d(
                found, bins[forgotten], assume_unique=True, return_indices=True
            )
            _put(kept, again, before, forgotten[which])
        kept.variance[:] += grid.drift * gap
    jumps = Jumps(counts=counts, sizes=sizes, steps=steps, fresh=fresh, bins=found, before=kept)
    _doubt(belief.variance, belief.count, fresh)
    return jumps, new, belief


@njit(cache=True, nogil=True, error_model="numpy")
def _fade(counts: Reals, sizes: Reals, fade: float, fade_steps: float) -> tuple[Reals, Reals]:
    """What earlier jumps still count for."""
    bins = counts.shape[1]
    new_counts, new_sizes = np.empty((2, bins)), np.empty((3, bins))
    for kind in range(2):
        for j in range(bins):
            new_counts[kind, j] = 1.0 + fade * (counts[kind, j] - 1.0)
    for kind in range(3):
        for j in range(bins):
            new_sizes[kind, j] = fade_steps * sizes[kind, j]
    return new_counts, new_sizes


@njit(cache=True, nogil=True, error_model="numpy")
def _find(surprised: Reals, counts: Reals, most: float, often: float) -> Integers:
    """Bins whose release is a jump: more than `most` is surprised, spikes are not yet `often`."""
    found, size = np.empty(len(surprised), np.int64), 0
    for j in range(len(surprised)):
        if surprised[j] > most and counts[SPIKE, j] < often:
            found[size] = j
            size += 1
    return found[:size].copy()


@njit(cache=True, nogil=True, error_model="numpy")
def _average(fresh: Reals, z: Reals, noise: float) -> Reals:
    """The mean of the releases since a shift, with one more; none once there are _RECENT."""
    new = np.zeros_like(fresh)
    for j in range(len(z)):
        if 0.0 < fresh[0, j] < _RECENT:
            new[0, j] = fresh[0, j] + 1.0
            share = 1.0 / new[0, j]
            new[1, j] = fresh[1, j] + share * (z[j] - fresh[1, j])
            new[2, j] = (1.0 - share) ** 2 * fresh[2, j] + share * share * noise
    return new


@njit(cache=True, nogil=True, error_model="numpy")
def _doubt(variance: Reals, level: Reals, fresh: Reals) -> None:
    """After a shift the variance is at least that of who knows the releases since then alone.

    Models that hold on to a level from before the shift, or remember one from long ago, say too
    little: releases that none of them expected have moved them, and they do not know it.
    """
    for j in range(len(variance)):
        if fresh[0, j] > 0.0:
            away = level[j] - fresh[1, j]
            variance[j] = max(variance[j], fresh[2, j] + away * away)


def hold(jumps: Jumps, shifted: Later, after: float, grid: Models, gamma: float) -> Later:
    """What to hold until the next release, `shifted` being what follows if no jump was a spike.

    Of the two levels the one with the least expected |error| / level^gamma is held. The variance is
    that of the true count around it, whichever of the two is true; with every step it grows by what
    shifts have been like. Spikes to come are left out: they are rare, and would be all of it.
    """
    _grow(shifted.growth, jumps.sizes, jumps.steps)
    _doubt(shifted.variance, shifted.level, jumps.fresh)
    if jumps.before is None:
        return shifted
    bins, back = jumps.bins, later(jumps.before, after, grid)
    back.growth[:] += jumps.sizes[SQUARE, bins] / jumps.steps
    here = Later(*(row[bins] for row in shifted))
    spike = jumps.counts[SPIKE, bins] / jumps.counts[:, bins].sum(axis=0)
    shift = 1.0 - spike
    low, high = (np.maximum(each.level, 1.0) ** gamma for each in (back, here))
    chosen = spike * high >= shift * low
    missed = np.where(chosen, shift, spike) * (here.level - back.level) ** 2
    rows = (
        np.where(chosen, back.level, here.level),
        np.where(chosen, back.typical, here.typical),
        spike * back.variance + shift * here.variance + missed,
        spike * back.growth + shift * here.growth,
    )
    for row, found in zip(shifted, rows, strict=True):
        row[bins] = found
    return shifted


@njit(cache=True, nogil=True, error_model="numpy")
def _grow(growth: Reals, sizes: Reals, steps: float) -> None:
    """What shifts add to the variance per step."""
    for j in range(len(growth)):
        growth[j] += sizes[SQUARE, j] / steps


def _put(here: Bank | Belief, bins: Integers, there: Bank | Belief, which: Integers) -> None:
    """Rows of `there` into `here`."""
    for name, values in vars(there).items():
        if name != "pool":
            getattr(here, name)[bins] = values[which]
