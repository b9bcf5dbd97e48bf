"""Learn from one noisy count: the exact update of a Gaussian belief by Laplace noise.

Guarantee: post-processing; only released values are read.

Before: x ~ N(mean, variance). Seen: z = x + Laplace(scale). The density of x given z is a Gaussian
cut in two at z, each half tilted by exp(-+x / scale): its mass, mean and variance are in closed
form. With sd = sqrt(variance), h = sd / scale and e = z - mean, the half x < z is a Gaussian of
mean `mean + sd h`, cut off above at a = e / sd - h standard deviations, with mass
exp(h^2 / 2 - e h / sd) Phi(a); the other half is its mirror image.
"""

from __future__ import annotations

import math

from dpstream.compiled import compiled, njit
from dpstream.mechanisms.parts.vector_math import erfcx as fast_erfcx
from dpstream.mechanisms.parts.vector_math import exp, log
from dpstream.records import Reals

_SQRT2, _SQRT_PI = math.sqrt(2.0), math.sqrt(math.pi)
_PHI_0 = 1.0 / (_SQRT2 * _SQRT_PI)  # density of a unit Gaussian at its middle
NEGLIGIBLE = 30.0  # sd / scale from which the noise is a correction, and h^2 / 2 would overflow


@compiled
def erfcx(x: float) -> float:
    """exp(x^2) erfc(x) for x >= 0, without overflow."""
    if x < 20.0:
        return math.exp(x * x) * math.erfc(x)
    return (1.0 - 0.5 / (x * x) + 0.75 / (x * x * x * x)) / (x * _SQRT_PI)


@compiled
def half(e: float, sd: float, h: float) -> tuple[float, float, float]:
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
    """Log density of z, then mean and variance of x given z.

    >>> log_density, mean, variance = laplace_update(100.0, 25.0, 130.0, 10.0)
    >>> round(mean, 3), round(variance, 3)  # the pull is at most variance / scale
    (102.5, 25.0)
    """
    sd = math.sqrt(variance)
    h, e = sd / scale, z - mean
    if h > NEGLIGIBLE:
        return gaussian_update(mean, variance, z, 2.0 * scale * scale)
    log_low, low, low_variance = half(e, sd, h)
    log_high, high, high_variance = half(-e, sd, h)
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


@compiled
def gaussian_update(
    mean: float, variance: float, z: float, noise: float
) -> tuple[float, float, float]:
    """The same for Gaussian noise of variance `noise`."""
    total = variance + noise
    e = z - mean
    log_density = -0.5 * e * e / total - 0.5 * math.log(2.0 * math.pi * total)
    return log_density, mean + variance / total * e, variance * noise / total


@njit(cache=True, nogil=True, error_model="numpy")
def updates(exact: Reals, size: int, scale: float) -> None:
    """`laplace_update` for many beliefs at once, without the branches.

    Rows of `exact`: e = z - mean and the variance in (at most (NEGLIGIBLE scale)^2), the log
    density, the shift of the mean and the variance out. By symmetry e is taken as positive; then
    the half above z is always a tail, and each half needs erfcx once: with r = e / sd the masses
    are, in units of exp(-r^2 / 2), erfcx(-a / sqrt(2)) / 2 for a < 0, and
    exp(a^2 / 2) - erfcx(a / sqrt(2)) / 2 for a >= 0.
    """
    log_two_scales = math.log(2.0 * scale)
    for i in range(size):
        sd = math.sqrt(exact[1, i])
        h, r = sd / scale, abs(exact[0, i]) / sd
        a, b = r - h, -r - h
        inside = max(a, 0.0)
        q = exp(-0.5 * inside * inside)
        ca, cb = fast_erfcx(abs(a) / _SQRT2), fast_erfcx(-b / _SQRT2)
        # both masses times q, which keeps them within range
        low = 1.0 - 0.5 * q * ca if a >= 0.0 else 0.5 * ca
        high = 0.5 * q * cb
        low_hazard = _PHI_0 * q / low
        high_hazard = 2.0 * _PHI_0 / cb  # q may be 0
        low_unit = _cut(a, low_hazard)
        high_unit = _cut(b, high_hazard)
        total = low + high
        p_low, p_high = low / total, high / total
        below, above = h - low_hazard, high_hazard - h
        shift = p_low * below + p_high * above
        spread = p_low * (low_unit + (below - shift) ** 2)
        spread += p_high * (high_unit + (above - shift) ** 2)
        exact[2, i] = (
            log(total) + (h * (0.5 * h - r) if a >= 0.0 else -0.5 * r * r) - log_two_scales
        )
        exact[3, i] = sd * (shift if exact[0, i] >= 0.0 else -shift)
        exact[4, i] = exact[1, i] * spread


@njit(cache=True, nogil=True, inline="always", error_model="numpy")
def _cut(a: float, hazard: float) -> float:
    """Variance of a unit Gaussian cut off at a; far out the difference loses its digits."""
    near = 1.0 - a * hazard - hazard * hazard
    far = (1.0 - (6.0 - 50.0 / (a * a)) / (a * a)) / (a * a)
    return max(near if a > -15.0 else far, 1e-9)
