"""Follow a series through noisy means of blocks, and look back over the delay.

Guarantee: post-processing; it reads noisy sums and public numbers.

Many simple models are weighed. Model g says: level_t wanders around the middle of the range [0, 1]
with steps of variance drift_g, pulled back just so much that it fills the range in the long run
(variance 1/12, that of a uniform number); x_t = level_t + N(0, white_g). Of a block of b steps the
mean is seen, with noise of scale 1 / (epsilon b).

Forward, every model updates a Gaussian belief about the level by the exact Laplace noise
(`laplace_update`), and is weighed by how well it predicted. Backward, over the blocks that are not
yet published, each model's beliefs are smoothed (Rauch, Tung, Striebel, "Maximum Likelihood
Estimates of Linear Dynamic Systems", 1965). Between the middles of blocks levels are interpolated;
to a block's values its own mean is added as far as white noise may have moved it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from dpstream.compiled import compiled, njit
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals

SPREAD = 1.0 / 12.0
"""Variance of a uniform number in [0, 1]: what is known before anything is seen."""

_CENTRE, _WIDTH = -1.6, 0.5  # of log10 of the drift's deviation per step, before anything is seen
_PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # blocks that a delay is cut into
_SETTLED = 60  # rounds after which a filter's variance no longer moves


def _models() -> tuple[Reals, Reals, Reals]:
    """Variances of drift and white noise of every model, and its weight before it is tried."""
    drift_sd, white_sd = 10.0 ** np.arange(-4.0, -0.4, 0.5), np.array([0.0, 0.03, 0.1, 0.25])
    prior = np.exp(-0.5 * ((np.log10(drift_sd) - _CENTRE) / _WIDTH) ** 2)
    weight = np.repeat(prior / prior.sum() / len(white_sd), len(white_sd))
    drift, white = np.repeat(drift_sd**2, len(white_sd)), np.tile(white_sd**2, len(drift_sd))
    return drift, white, weight


MODELS = _models()


@lru_cache(maxsize=64)
def retentions(steps: float) -> Reals:
    """How much every model keeps of a level's distance from the middle after some steps."""
    return np.array([retention(float(drift), steps) for drift in MODELS[0]])


def block_lengths(delay: int) -> Integers:
    """Block lengths to choose from, the longest first."""
    lengths = {max(1, delay // part) for part in _PARTS} | {1}
    return np.array(sorted(lengths, reverse=True))


@lru_cache(maxsize=64)
def expected_errors(delay: int, epsilon: float) -> Reals:
    """Standard deviation of a published value, lengths x models, once a filter has settled."""
    out: Reals = _errors(block_lengths(delay), delay, epsilon, *MODELS[:2])
    return out


@njit(cache=True, nogil=True)
def retention(drift: float, steps: float) -> float:
    """How much of a level's distance from the middle is left after some steps."""
    return float(max(1.0 - drift / SPREAD, 0.0) ** (0.5 * steps))


@njit(cache=True, nogil=True)
def _errors(length: Integers, delay: int, epsilon: float, drift: Reals, white: Reals) -> Reals:
    out = np.empty((len(length), len(drift)))
    for i in range(len(length)):
        b = length[i]
        ahead = delay // b - 1  # blocks that are seen before the first of them is published
        noise = 2.0 / (epsilon * b) ** 2
        for g in range(len(drift)):
            phi, seen = retention(drift[g], b), noise + white[g] / b
            after = SPREAD
            for _ in range(_SETTLED):
                before = phi * phi * after + (1.0 - phi * phi) * SPREAD
                after = before * seen / (before + seen)
            smooth = after
            for _ in range(min(ahead, _SETTLED)):
                before = phi * phi * after + (1.0 - phi * phi) * SPREAD
                gain = phi * after / before
                smooth = after + gain * gain * (smooth - before)
            inside = min(drift[g] * b / (6.0 if ahead < 1 else 12.0), SPREAD)
            # the block's own share of white noise is partly seen, the rest is not
            hidden = white[g] * (1.0 - white[g] / b / seen / b)
            out[i, g] = math.sqrt(smooth + inside + hidden)
    return out


_SQRT2, _SQRT_PI = math.sqrt(2.0), math.sqrt(math.pi)
NEGLIGIBLE = 30.0  # sd / scale from which the noise is a correction, and h^2 / 2 would overflow
_TINY = 1e-4  # weights below this are left out
_RETURN = 0.01  # weight that goes back to the prior with every block: a series may change

_DOUBT = 10.0  # to one: what must speak against scatter within blocks before bars leave it out

Rows = tuple[Reals, Reals, Reals, Reals, Reals]
"""Of every block: its middle, length and noisy means, and the beliefs before and after it."""


@compiled
def erfcx(x: float) -> float:
    """exp(x^2) erfc(x) for x >= 0, without overflow."""
    if x < 20.0:
        return math.exp(x * x) * math.erfc(x)
    return (1.0 - 0.5 / (x * x) + 0.75 / (x * x * x * x)) / (x * _SQRT_PI)


@compiled
def lower_half(e: float, sd: float, h: float) -> tuple[float, float, float]:
    """The half below z: log mass, shift of its mean, its variance."""
    a = e / sd - h
    if a < 0:
        c = erfcx(-a / _SQRT2)
        log_mass = -0.5 * (e / sd) ** 2 + math.log(0.5 * c)
        hazard = math.sqrt(2.0 / math.pi) / c
    else:
        below = 0.5 * math.erfc(-a / _SQRT2)
        log_mass = 0.5 * h * h - e * h / sd + math.log(below)
        hazard = math.exp(-0.5 * a * a) / (_SQRT2 * _SQRT_PI * below)
    # variance of a unit Gaussian cut off at a; far out the difference loses its digits
    if a > -15.0:
        unit = 1.0 - a * hazard - hazard * hazard
    else:
        unit = (1.0 - (6.0 - 50.0 / (a * a)) / (a * a)) / (a * a)
    return log_mass, sd * (h - hazard), max(unit, 1e-9) * sd * sd


@compiled
def laplace_update(
    mean: float, variance: float, z: float, scale: float
) -> tuple[float, float, float]:
    """Log density of z, then mean and variance of x given z: the exact update of a belief.

    Before: x ~ N(mean, variance). Seen: z = x + Laplace(scale). The density of x given z is a
    Gaussian cut in two at z, each half tilted by exp(-+x / scale): its mass, mean and variance are
    in closed form. With sd = sqrt(variance), h = sd / scale and e = z - mean, the half x < z is a
    Gaussian of mean `mean + sd h`, cut off above at a = e / sd - h standard deviations, with mass
    exp(h^2 / 2 - e h / sd) Phi(a); the other half is its mirror image.

    >>> log_density, mean, variance = laplace_update(100.0, 25.0, 130.0, 10.0)
    >>> round(mean, 3), round(variance, 3)  # the pull is at most variance / scale
    (102.5, 25.0)
    """
    sd = math.sqrt(variance)
    h, e = sd / scale, z - mean
    if h > NEGLIGIBLE:  # Gaussian noise of the same variance
        noise = 2.0 * scale * scale
        total = variance + noise
        log_density = -0.5 * e * e / total - 0.5 * math.log(2.0 * math.pi * total)
        return log_density, mean + variance / total * e, variance * noise / total
    log_low, low, low_variance = lower_half(e, sd, h)
    log_high, high, high_variance = lower_half(-e, sd, h)
    high = -high
    top = max(log_low, log_high)
    p_low = 1.0 if log_low == top else math.exp(log_low - top)
    p_high = 1.0 if log_high == top else math.exp(log_high - top)
    total = p_low + p_high
    p_low, p_high = p_low / total, p_high / total
    shift = p_low * low + p_high * high
    spread = p_low * (low_variance + (low - shift) ** 2)
    spread += p_high * (high_variance + (high - shift) ** 2)
    return top + math.log(total) - math.log(2.0 * scale), mean + shift, spread


@njit(cache=True, nogil=True, error_model="numpy")
def forward(
    now: int, rows: Rows, scale: float, steps: float, phi: Reals, weight: Reals, new: Reals
) -> None:
    """New weights (bins x models), and beliefs before and after block `now`, from the one before.

    `scale` is that of the noise in the mean of a block of `steps`; `phi` is empty for the first.
    Models are the inner loop, so that a processor takes several of them at a time; sums over models
    are made in their order, whatever it does.
    """
    _, _, seen, before, after = rows
    _, white, prior = MODELS
    bins, size = weight.shape
    log = np.empty(size)
    for j in range(bins):
        best = -math.inf
        for g in range(size):
            mean, variance = 0.5, SPREAD
            if len(phi):
                mean = 0.5 + phi[g] * (after[now - 1, j, g, 0] - 0.5)
                variance = (
                    phi[g] * phi[g] * after[now - 1, j, g, 1] + (1.0 - phi[g] * phi[g]) * SPREAD
                )
            total = variance + white[g] / steps
            log[g], x, x_variance = laplace_update(mean, total, seen[now, j], scale)
            gain = variance / total
            before[now, j, g, 0], before[now, j, g, 1] = mean, variance
            after[now, j, g, 0] = mean + gain * (x - mean)
            after[now, j, g, 1] = variance * (1.0 - gain) + gain * gain * x_variance
            best = max(best, log[g])
        total = 0.0
        for g in range(size):
            u = (1.0 - _RETURN) * weight[j, g] + _RETURN * prior[g]
            new[j, g] = u * math.exp(log[g] - best)
            total += new[j, g]
        for g in range(size):
            new[j, g] /= total


@njit(cache=True, nogil=True, error_model="numpy")
def look_back(
    count: int, rows: Rows, weight: Reals, epsilon: float, first: int, out: Reals, deviation: Reals
) -> None:
    """From step `first` on, steps x bins: values in [0, 1], and of the first ones their deviation.

    The last `count` blocks are in use.
    """
    middle, length, _, _, _ = rows
    last = len(middle) - 1
    oldest = last + 1 - count
    while oldest < last and middle[oldest] + length[oldest] / 2 < first:
        oldest += 1
    until = oldest  # of the blocks before it deviations are asked for
    if len(deviation):
        while until < last and middle[until] + length[until] / 2 < first + len(deviation) - 1:
            until += 1
        until += 1
    oldest = max(oldest - 1, last + 1 - count)  # levels are interpolated from the one before on
    smoothed = np.empty((3, last + 1 - oldest))
    for j in range(out.shape[1]):
        _backward(j, oldest, until, rows, weight, epsilon, smoothed)
        _values(j, first, middle[oldest:], length[oldest:], smoothed, out, deviation)


@njit(cache=True, nogil=True, error_model="numpy")
def _backward(
    j: int, oldest: int, until: int, rows: Rows, weight: Reals, epsilon: float, smoothed: Reals
) -> None:
    """Of bin j: the level in the middle of each block, what is added in it, the variance.

    The variance of one value: that of the level, of its wandering within the block, of the white
    noise that the block's mean does not show, and of what the models disagree about. It is
    worked out for the blocks before `until`.
    """
    middle, length, seen, before, after = rows
    drift, white, _ = MODELS
    last, size = len(middle) - 1, weight.shape[1]
    mean, spread, phi, share = np.empty(size), np.empty(size), np.empty(size), np.empty(size)
    u = np.empty(size)
    for g in range(size):
        u[g] = weight[j, g] if weight[j, g] >= _TINY else 0.0
    gap = of_length = -1.0
    for k in range(last, oldest - 1, -1):
        if k == last:
            for g in range(size):
                mean[g], spread[g] = after[k, j, g, 0], after[k, j, g, 1]
        else:
            if middle[k + 1] - middle[k] != gap:
                gap = middle[k + 1] - middle[k]
                for g in range(size):
                    phi[g] = retention(drift[g], gap)
            for g in range(size):
                gain = phi[g] * after[k, j, g, 1] / before[k + 1, j, g, 1]
                mean[g] = after[k, j, g, 0] + gain * (mean[g] - before[k + 1, j, g, 0])
                spread[g] = after[k, j, g, 1] + gain * gain * (spread[g] - before[k + 1, j, g, 1])
        if length[k] != of_length:
            of_length = length[k]
            noise = 2.0 / (epsilon * of_length) ** 2
            for g in range(size):
                share[g] = white[g] / of_length / (white[g] / of_length + noise)
        y, level, own = seen[k, j], 0.0, 0.0
        for g in range(size):
            level += u[g] * mean[g]
            own += u[g] * (share[g] * (y - mean[g]))
        smoothed[0, k - oldest], smoothed[1, k - oldest] = level, own
        if k >= until:
            continue
        variance = square = 0.0
        for g in range(size):
            square += u[g] * (mean[g] + share[g] * (y - mean[g])) ** 2
            inside = min(drift[g] * (length[k] - 1.0) / 6.0, SPREAD)
            hidden = white[g] - white[g] / length[k] * share[g]
            variance += u[g] * ((1.0 - share[g]) ** 2 * spread[g] + inside + hidden)
        smoothed[2, k - oldest] = variance + max(square - (level + own) ** 2, 0.0)


@njit(cache=True, nogil=True, error_model="numpy")
def _values(
    j: int, first: int, middle: Reals, length: Reals, smoothed: Reals, out: Reals, deviation: Reals
) -> None:
    """Of bin j: what blocks say of each step.

    Levels are interpolated between the middles of blocks. By how much their mean over a block then
    differs from its own is taken off what is added in it: the distance of a block's steps before
    its middle, summed over them and divided by its length, is length/8, less 1/(8 length) if one
    step is the middle; the same after it.
    """
    blocks = len(middle)
    level, own, variance = smoothed[0], smoothed[1], smoothed[2]
    for k in range(blocks):
        away, bent = length[k] / 8 - (length[k] % 2) / (8 * length[k]), 0.0
        if away == 0.0:  # one step
            continue
        if k > 0:
            bent -= (level[k] - level[k - 1]) / (middle[k] - middle[k - 1]) * away
        if k < blocks - 1:
            bent += (level[k + 1] - level[k]) / (middle[k + 1] - middle[k]) * away
        own[k] -= bent
    inside, below = 0, -1  # the step's block; the newest block whose middle is not after it
    for i in range(len(out)):
        step = float(first + i)
        while inside < blocks - 1 and middle[inside] + length[inside] / 2 < step:
            inside += 1
        while below < blocks - 1 and middle[below + 1] <= step:
            below += 1
        there = level[max(below, 0)]
        if 0 <= below < blocks - 1 and middle[below] != step:
            slope = (level[below + 1] - level[below]) / (middle[below + 1] - middle[below])
            there = slope * (step - middle[below]) + level[below]
        out[i, j] = min(max(own[inside] + there, 0.0), 1.0)
        if i < len(deviation):
            deviation[i, j] = math.sqrt(variance[inside])


def _with_room(rows: Rows) -> tuple[Rows, int, list[int]]:
    """A copy with room for as many blocks again, the blocks' end there, and how many are taken.

    As in `History`, rows are written once, and the number taken is shared by all who see them:
    the first to learn owns the next row, and whoever comes later (or finds no room) takes a copy.
    """
    middle, length, seen, before, after = (np.concatenate([row, row]) for row in rows)
    return (middle, length, seen, before, after), len(rows[0]), [len(rows[0])]


@storable("block beliefs")
@dataclass(frozen=True, kw_only=True, eq=False)
class Beliefs:
    """What is believed after the newest block, and of each block kept, oldest first.

    Arrays have room for `delay` + 2 blocks, of which the last `count` are in use.
    """

    weight: Reals  # bins x models
    count: int
    middle: Reals  # of each block, in steps from the start of the stream
    length: Reals
    seen: Reals  # blocks x bins: noisy means
    before: Reals  # blocks x bins x models x (mean, variance): predicted
    after: Reals  # the same, with the block seen

    @classmethod
    def none(cls, bins: int, delay: int) -> Beliefs:
        """Before the first block."""
        prior = MODELS[2]
        slots, shape = delay + 2, (delay + 2, bins, len(prior), 2)
        return cls(
            weight=np.tile(prior, (bins, 1)),
            count=0,
            middle=np.zeros(slots),
            length=np.ones(slots),
            seen=np.zeros((slots, bins)),
            before=np.zeros(shape),
            after=np.zeros(shape),
        )

    @property
    def rows(self) -> Rows:
        """What is kept of each block."""
        return self.middle, self.length, self.seen, self.before, self.after

    @cached_property
    def _room(self) -> tuple[Rows, int, list[int]]:
        """See `_with_room`; beliefs that `learn` made share theirs."""
        return _with_room(self.rows)

    def learn(self, mean: Reals, *, first: int, steps: int, scale: float) -> Beliefs:
        """With one block more: noisy means of `steps` steps from `first` on."""
        (rows, end, taken), slots = self._room, len(self.middle)
        if taken[0] != end or end == len(rows[0]):
            rows, end, taken = _with_room(self.rows)
        middle, length, seen, before, after = rows
        taken[0] = end + 1
        middle[end], length[end], seen[end] = first + (steps - 1) / 2, steps, mean
        gap = float(middle[end]) - float(middle[end - 1])
        phi = retentions(gap) if self.count else np.zeros(0)
        weight = np.empty_like(self.weight)
        forward(end, rows, scale, float(steps), phi, self.weight, weight)
        newest = slice(end + 1 - slots, end + 1)
        learnt = Beliefs(
            weight=weight,
            count=min(self.count + 1, slots),
            middle=middle[newest],
            length=length[newest],
            seen=seen[newest],
            before=before[newest],
            after=after[newest],
        )
        learnt.__dict__["_room"] = rows, end + 1, taken
        return learnt

    def doubt(self) -> Reals:
        """What to add to each bin's variance: scatter within blocks that nothing speaks against.

        The mean of a block hardly shows how far apart its values lie: scatter of variance 1/12
        moves it less than the noise does, and many blocks must be seen before it is ruled out.
        Until then the mixture's variance is what the prior says. Here the loudest white noise
        counts as if it had been _DOUBT times as likely, with the variance of a uniform number.
        """
        white = MODELS[1]
        loud = self.weight[:, white == white.max()].sum(axis=1)
        counted = _DOUBT * loud / (_DOUBT * loud + (1.0 - loud))
        added: Reals = (counted - loud) * SPREAD
        return added

    def look_back(
        self, first: int, last: int, epsilon: float, *, deviations: int | None = None
    ) -> tuple[Reals, Reals]:
        """Values of steps `first` to `last`, in [0, 1], and their deviation: steps x bins.

        Deviations are worked out for the first `deviations` steps; by default for all.
        """
        steps, bins = last + 1 - first, self.seen.shape[1]
        out = np.empty((steps, bins))
        deviation = np.empty((steps if deviations is None else deviations, bins))
        look_back(self.count, self.rows, self.weight, epsilon, first, out, deviation)
        return out, deviation
