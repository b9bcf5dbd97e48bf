"""Buffered linear Toeplitz counters: near-optimal error with a handful of floats per key.

The noise is a weighted sum of geometric modes x_j(t) = (1 - decay_j) x_j(t - 1) + z_t under a
shared z. Decays lie in [0, 1]; decay 0 is the plain sum of z. All formulas work on decays, not on
factors near 1, and add nonnegative numbers only, so they lose no more than some units in the last
place. Compiled loops use no fast-math: they give the same bytes on every replay.

A counter of d buffers is fixed by 2d decays 0 < a_1 < b_1 < a_2 < ... < a_d < b_d <= 1: the a are
those of C, the b those of B. Interlacing makes every weight of both matrices positive. Common
parameters are in `blt_table.json`; others are optimised on the spot.

`LastTwice` measures the last step once more: what a window ends with is what people keep.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from importlib.resources import files

import numpy as np
import scipy  # which loads `scipy.optimize` when it is used

from dpstream.compiled import compiled
from dpstream.counting.noise_process import check_advance, check_whole
from dpstream.errors import InvalidParameter
from dpstream.records import Reals

MOST_BUFFERS = 6
MOST_STEPS = 2**40
_MOST_TRIED = 1 << 17  # steps of which all distances are tried
UNIT = 2.0**-53  # largest relative error of one rounded operation


def powers(decays: Reals, count: int) -> Reals:
    """(1 - decay)^count."""
    if count == 0:
        return np.ones_like(decays)
    with np.errstate(divide="ignore"):
        return np.asarray(np.exp(count * np.log1p(-decays)))


def spans(decays: Reals, count: int) -> Reals:
    """Sum over i < count of (1 - decay)^i: what a mode reaches under z = 1."""
    with np.errstate(divide="ignore"):
        decayed = -np.expm1(count * np.log1p(-decays))
    still = decays == 0
    return np.where(still, float(count), decayed / np.where(still, 1.0, decays))


def gram(decays: Reals, count: int) -> Reals:
    """Covariance of the modes after `count` steps: sum over i < count of (f_j f_k)^i.

    >>> gram(np.array([0.5, 0.0]), 2)
    array([[1.25, 1.5 ],
           [1.5 , 2.  ]])
    """
    if count == 0:
        return np.zeros((len(decays), len(decays)))
    gaps = decays[:, None] + decays[None, :] * (1 - decays[:, None])  # 1 - f_j f_k
    with np.errstate(divide="ignore"):
        logs = np.log1p(-decays)
    decayed = -np.expm1(count * (logs[:, None] + logs[None, :]))
    still = gaps == 0
    return np.where(still, float(count), decayed / np.where(still, 1.0, gaps))


def root(decays: Reals, count: int) -> Reals:
    """R with R.T @ R = gram(decays, count), found without ever squaring.

    The rows of V(n) are f^i for i < n. V(2n) stacks V(n) on V(n) f^n, so its triangular QR factor
    follows from that of V(n); likewise for one more row. The error of R is a few log2(count) units
    in the last place, where a Cholesky factor of the nearly singular gram would lose half of
    them.
    """
    factor = np.zeros((0, len(decays)))
    done = 0
    for bit in bin(count)[2:] if count else "":
        if done:
            twice = np.vstack([factor, factor * powers(decays, done)])
            factor = np.asarray(np.linalg.qr(twice, mode="r"))
            done *= 2
        if bit == "1":
            ones = np.ones((1, len(decays)))
            more = np.vstack([ones, factor * powers(decays, 1)])
            factor = np.asarray(np.linalg.qr(more, mode="r"))
            done += 1
    return factor


def round_decays(decays: Reals) -> Reals:
    """Round decays so that the factors 1 - decay are exact floats: multiples of 2^-53."""
    return np.asarray(1.0 - (1.0 - decays))


def encoder_weights(decays: Reals) -> Reals:
    """Weights w with c_i = sum_j w_j (1 - a_j)^(i - 1) for i >= 1, c_0 = 1; all positive."""
    a, b = decays[0::2], decays[1::2]
    return _residues(b[None, :] - a[:, None], a[None, :] - a[:, None])


def decoder_weights(decays: Reals) -> Reals:
    """Weights w with b_i = sum_j w_j (1 - b_j)^i, last decay 0; all positive, sum 1."""
    a, b = decays[0::2], np.append(decays[1::2], 0.0)
    return _residues(a[None, :] - b[:, None], b[None, :] - b[:, None])


def _residues(above: Reals, below: Reals) -> Reals:
    return np.asarray(above.prod(axis=1) / (below + np.eye(len(below))).prod(axis=1))


def squared_norms(decays: Reals, steps: int) -> tuple[float, float]:
    """(largest squared column norm of C, largest squared row norm of B)."""
    encoder, decoder = encoder_weights(decays), decoder_weights(decays)
    column = 1 + encoder @ gram(decays[0::2], steps - 1) @ encoder
    row = decoder @ gram(np.append(decays[1::2], 0.0), steps) @ decoder
    return float(column), float(row)


def optimise(steps: int, buffers: int) -> tuple[float, ...]:
    """Decays that minimise the largest standard deviation over `steps` steps.

    Local search from a geometric grid between 1/steps and 2 (rates -log(1 - decay)); the gaps are
    searched on a logarithmic scale, which keeps the interlacing. Six significant digits are kept:
    the optimum is flat, and the last bits of a search differ between machines.
    """
    check_whole("steps", steps, 1, MOST_STEPS)
    check_whole("buffers", buffers, 1, MOST_BUFFERS)
    horizon = max(steps, 4 * buffers)  # fewer steps leave parameters undetermined

    def decays_of(point: Reals) -> Reals:
        rates = np.exp(point[0]) * np.cumprod(np.append(1.0, 1 + np.exp(point[1:])))
        return np.asarray(-np.expm1(-rates))

    def loss(point: Reals) -> float:
        with np.errstate(all="ignore"):
            column, row = squared_norms(decays_of(point), horizon)
            value = np.log(column) + np.log(row)
        return float(value) if np.isfinite(value) else 1e9

    grid = np.linspace(-np.log(horizon), np.log(2.0), 2 * buffers)
    start = np.append(grid[0], np.log(np.expm1(np.diff(grid))))
    how = {"gtol": 1e-6, "maxiter": 1000}
    best = scipy.optimize.minimize(loss, start, method="BFGS", options=how)
    return tuple(float(f"{decay:.6g}") for decay in decays_of(best.x))


@lru_cache(maxsize=1)
def shipped_decays() -> dict[str, list[float]]:
    """The shipped parameters, by "steps/buffers": what `optimise` says for common ones."""
    text = files("dpstream.counting").joinpath("blt_table.json").read_text("ascii")
    loaded: dict[str, list[float]] = json.loads(text)
    return loaded


@lru_cache(maxsize=256)
def decays_for(steps: int, buffers: int) -> tuple[float, ...]:
    """Decays for any number of steps: from the table if there, else optimised on the spot.

    >>> decays_for(1024, 2)
    (0.00188792, 0.0147575, 0.0911752, 0.464216)
    """
    known = shipped_decays().get(f"{steps}/{buffers}")
    return tuple(known) if known else optimise(steps, buffers)


@dataclass(frozen=True, kw_only=True)
class BufferedLinearToeplitz:
    """Toeplitz B and C whose coefficients are sums of few geometric sequences.

    C has the generating function prod (1 - f_j x) / (1 - g_j x) and B, its quotient from 1/(1 - x),
    prod (1 - g_j x) / (1 - f_j x) / (1 - x), with 1 > g_1 > f_1 > g_2 > ... > f_d >= 0. In partial
    fractions b_i = w_0 + sum_j w_j f_j^i with positive weights: the noise is a weighted sum of d
    decaying buffers x_j <- f_j x_j + z and of the plain sum of z, d + 1 floats per key. (The
    paper's form keeps d buffers and the running noise sum: the same space, another basis.)

    `decays` are 1 - g_1, 1 - f_1, 1 - g_2, ...; left out, they are those that minimise the largest
    standard deviation over `steps`. Store them with a run: they fix the strategy.

    Guarantee: an impulse has L2 sensitivity at most `column_norm()`, attained at step 1, with
    relative float error below 2e-14; noise at step t is sigma * row_norm(t), increasing in t.
    Paper: Dvijotham, McMahan, Pillutla, Steinke, Thakurta, "Efficient and Near-Optimal Noise
    Generation for Streaming Differential Privacy", 2024.

    >>> blt = BufferedLinearToeplitz(steps=1024, buffers=4)
    >>> blt.width, round(blt.column_norm() * blt.row_norm(1024) / 2**0.5, 3)
    (5, 2.314)
    """

    steps: int
    buffers: int = 4
    decays: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_whole("steps", self.steps, 1, MOST_STEPS)
        check_whole("buffers", self.buffers, 1, MOST_BUFFERS)
        given = self.decays or decays_for(int(self.steps), int(self.buffers))
        decays = tuple(float(decay) for decay in round_decays(np.array(given)))
        object.__setattr__(self, "decays", decays)
        rising = all(low < high for low, high in zip((0.0, *decays), decays, strict=False))
        if len(decays) != 2 * self.buffers or not rising or decays[-1] > 1:
            raise InvalidParameter(
                f"decays must be {2 * self.buffers} increasing numbers in (0, 1]; got {given}"
            )

    @property
    def width(self) -> int:
        """The buffers, then the plain sum."""
        return self.buffers + 1

    @cached_property
    def mode_decays(self) -> Reals:
        """Decays of the state's columns; the last is 0."""
        return np.append(np.array(self.decays[1::2]), 0.0)

    @cached_property
    def weights(self) -> Reals:
        """Weights of the state's columns in the noise."""
        return decoder_weights(np.array(self.decays))

    def column_norm(self) -> float:
        """Norm of C's first column over all steps, in closed form."""
        return math.sqrt(squared_norms(np.array(self.decays), self.steps)[0])

    def opposed_norms(self, fall: float) -> Reals:
        """||C(e_1 - fall e_(1 + k))||^2 for every k from 1 on, in closed form.

        C e_1 has the norm n_T, C e_(1 + k) is c shifted by k and cut: norm n_(T - k), and the
        product of both is sum_i c_i c_(i + k).
        """
        decays, weights = np.array(self.decays[0::2]), encoder_weights(np.array(self.decays))
        steps, behind = self.steps, np.arange(1, self.steps)
        rest = self.steps - 1 - behind  # coefficients behind the first that both have
        with np.errstate(divide="ignore"):
            logs = np.log1p(-decays)
        shorter, product = np.ones(len(rest)), np.exp(np.outer(behind - 1, logs)) @ weights
        for j, one in enumerate(weights):
            for k, other in enumerate(weights):
                gap = decays[j] + decays[k] * (1 - decays[j])
                common = one * other * -np.expm1(rest * (logs[j] + logs[k])) / gap
                shorter += common
                product += common * np.exp(behind * logs[k])
        first = squared_norms(np.array(self.decays), steps)[0]
        return np.asarray(first + fall**2 * shorter - 2 * fall * product)

    def opposed_norm(self, fall: float) -> float:
        """The largest norm of C(e_a - fall e_b): an impulse, and a part of it gone elsewhere.

        Of pairs with one distance the earliest are the worst, with the larger part first. A stream
        too long to try them all has the bound for columns that never overlap.
        """
        return _largest_opposed(self, fall, 0.0)

    def row_norm(self, step: int) -> float:
        """Norm of the first `step` coefficients of B, in closed form."""
        check_whole("step", step, 1, self.steps)
        return math.sqrt(self.weights @ gram(self.mode_decays, step) @ self.weights)

    def error(self) -> Reals:
        """All row norms, sqrt(weights @ gram(mode_decays, t) @ weights) for every t at once."""
        counts = np.arange(1, self.steps + 1, dtype=np.float64)
        decays, weights, total = self.mode_decays, self.weights, np.zeros(self.steps)
        with np.errstate(divide="ignore"):
            logs = np.log1p(-decays)
        for j in range(len(decays)):
            for k in range(j + 1):
                weight = weights[j] * weights[k] * (1 if j == k else 2)
                gap = decays[j] + decays[k] * (1 - decays[j])
                total += weight * (-np.expm1(counts * (logs[j] + logs[k])) / gap if gap else counts)
        return np.sqrt(total)

    def advance(self, state: Reals, step: int, z: Reals) -> Reals:
        """Decay the buffers, add the new normals, weigh."""
        check_whole("step", step, 1, self.steps)
        check_advance(state, self.width, z)
        noise = np.empty(len(z))
        _advance_modes(state, 1 - self.mode_decays, self.weights, z, noise)
        return noise

    @property
    def readout(self) -> Reals:
        """The weights."""
        return self.weights

    def late_root(self, step: int) -> Reals:
        """A square root of the modes' covariance."""
        check_whole("step", step, 1, self.steps)
        return root(self.mode_decays, int(step))


@compiled
def _advance_modes(state: Reals, factors: Reals, weights: Reals, z: Reals, noise: Reals) -> None:
    """state[k, j] = factors[j] state[k, j] + z[k]; noise[k] = weights . state[k]."""
    for k in range(state.shape[0]):
        total = 0.0
        for j in range(factors.shape[0]):
            value = factors[j] * state[k, j] + z[k]
            state[k, j] = value
            total += weights[j] * value
        noise[k] = total


@lru_cache(maxsize=256)
def _largest_opposed(process: BufferedLinearToeplitz, fall: float, gain: float) -> float:
    """The largest norm of two opposed impulses, or of one, with a last row of `gain`."""
    alone = process.column_norm() ** 2
    if process.steps > _MOST_TRIED:
        return math.sqrt(alone * (1 + fall**2) + gain**2)
    pairs = max(process.opposed_norms(fall), default=0.0) + (gain * (1 - fall)) ** 2
    return math.sqrt(max(alone + gain**2, pairs))


@dataclass(frozen=True, kw_only=True)
class LastTwice:
    """`process`, and one more measurement of the total, both weighed by their variances.

    The encoder has one more row, g times all ones, with g^2 = kappa^2 share / (1 - share): of what
    an impulse costs, `share` goes to it, whenever the impulse comes. The last answer is
    a N_T + (1 - a) n/g, n standard normal, a = 1 / (1 + g^2 row_T^2). Given the steps before, N_T
    is known but for its newest normal, so one normal is enough for both.

    `own`, `alike`: where many processes have a part of the last row's noise in common, its standard
    deviations, beside sigma, of each alone and of all together (`correlated_noise` says which cost
    no more). The caller draws the common normal once, and adds it times `shared`.

    Guarantee: an impulse has L2 sensitivity `column_norm()`; the noise of the last step has the
    variance of the two measurements' best average, all other steps that of `process`. With `alike`
    that holds of the process; what all last rows cost together is up to the caller.

    >>> blt = BufferedLinearToeplitz(steps=100)
    >>> twice = LastTwice(process=blt, share=Fraction(1, 8))
    >>> [round(p.column_norm() * p.row_norm(t), 2) for p in (blt, twice) for t in (99, 100)]
    [2.53, 2.53, 2.7, 1.96]
    """

    process: BufferedLinearToeplitz
    share: Fraction
    own: float = 0.0
    alike: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise InvalidParameter(f"share must lie between 0 and 1; got {self.share}")
        if self.alike and not self.own > 0:
            raise InvalidParameter(f"own must be above 0 where alike is; got {self.own}")

    @property
    def steps(self) -> int:
        """T."""
        return self.process.steps

    @property
    def width(self) -> int:
        """Floats of state per key."""
        return self.process.width

    @property
    def decays(self) -> tuple[float, ...]:
        """Those of the process: with the share they fix the noise."""
        return self.process.decays

    @cached_property
    def gain(self) -> float:
        """g, the entries of the encoder's last row."""
        odds = self.share / (1 - self.share)
        return self.process.column_norm() * math.sqrt(odds)

    @cached_property
    def weights(self) -> tuple[float, float]:
        """(a, b): the last answer is a times the process, plus b times a normal."""
        if self.alike:
            other = self.own**2 + self.alike**2
            first = other / (other + self.process.row_norm(self.steps) ** 2)
            return first, (1 - first) * self.own
        first = 1 / (1 + (self.gain * self.process.row_norm(self.steps)) ** 2)
        return first, (1 - first) / self.gain

    @property
    def shared(self) -> float:
        """What the common normal is multiplied with in the last answer, beside sigma."""
        return (1 - self.weights[0]) * self.alike

    @cached_property
    def _newest(self) -> float:
        """What the newest normal adds to a N_T, so that it stands for the other one too."""
        first, other = self.weights
        own = first * float(self.process.weights.sum())
        return math.hypot(own, other) - own

    def column_norm(self) -> float:
        """Norm of the process's first column and of the last row's entry."""
        return math.hypot(self.process.column_norm(), self.gain)

    def opposed_norm(self, fall: float) -> float:
        """That of the process with the last row, in which what goes takes back what came."""
        return _largest_opposed(self.process, fall, self.gain)

    def row_norm(self, step: int) -> float:
        """That of the process, but for the last step; without what is common to all."""
        check_whole("step", step, 1, self.steps)
        known = self.process.row_norm(step)
        first, other = self.weights
        return known if step < self.steps else math.hypot(first * known, other)

    def error(self) -> Reals:
        """All row norms."""
        rows = self.process.error()
        rows[-1] = self.row_norm(self.steps)
        return rows

    def advance(self, state: Reals, step: int, z: Reals) -> Reals:
        """The process; at the last step, less of it, and more of the newest normals."""
        noise = self.process.advance(state, step, z)
        if step == self.steps:
            state *= self.weights[0]
            state += z[:, None] * self._other_row
            noise *= self.weights[0]
            noise += self._newest * z
        return noise

    @property
    def readout(self) -> Reals:
        """That of the process; the state at the last step is weighed already."""
        return self.process.readout

    def late_root(self, step: int) -> Reals:
        """That of the process; at the last step, of the one before it and one step on."""
        if step != self.steps:
            return self.process.late_root(step)
        before = root(self.process.mode_decays, step - 1)
        decayed = before * (self.weights[0] * powers(self.process.mode_decays, 1))
        return np.vstack([decayed, self.weights[0] + self._other_row])

    @cached_property
    def _other_row(self) -> Reals:
        """How the other measurement enters the state: in its first column."""
        row = np.zeros(self.width)
        row[0] = self._newest / self.process.weights[0]
        return row
