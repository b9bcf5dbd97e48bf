"""Arithmetic of the pacer without a branch or a call: loops over arrays then run in SIMD lanes.

Guarantee: none needed; arithmetic on whatever it is given.

Only additions, multiplications, divisions and shifts of IEEE doubles in a fixed order: the results
are the same on every machine, which a system's own functions do not promise. Each is within a few
units in the last place (the tests say how many). Loops that use them are compiled with
`error_model="numpy"`: a division that may raise would be a branch.
"""

from __future__ import annotations

import math

import numpy as np

from dpstream.compiled import njit
from dpstream.mechanisms.parts.block_filter import NEGLIGIBLE as NEGLIGIBLE
from dpstream.records import Reals

_SQRT2, _PHI_0 = math.sqrt(2.0), 1.0 / (math.sqrt(2.0) * math.sqrt(math.pi))  # density at 0

_SHIFT = 6755399441055744.0  # 1.5 * 2^52: a double this large has a whole number in its low bits
_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.6931471803691238, 1.9082149292705877e-10
_LEAST, _MOST = -708.0, 709.0
_ONE_BITS = 0x3FF0000000000000
_ROOT_HALF_BITS = 0x3FE6A09E667F3BCD
_MIDDLE = 3.0  # erfcx is a polynomial in (x - 3) / (x + 3)


@njit(cache=True, nogil=True, forceinline=True, error_model="numpy")
def exp(x: float) -> float:
    """e^x; 0 from -708 down, and as at 709 from there on.

    2^n e^r with |r| <= log(2) / 2; e^r = 1 + r + r^2 p(r).
    """
    y = min(max(x, _LEAST), _MOST)
    shifted = y * _LOG2_E + _SHIFT
    n = shifted - _SHIFT
    r = (y - n * _LN2_HIGH) - n * _LN2_LOW
    p = 2.510520706464424e-08 + r * 2.091812988660952e-09
    p = 2.755726330017862e-07 + r * p
    p = 2.755725542387984e-06 + r * p
    p = 2.4801587336422683e-05 + r * p
    p = 0.00019841269874802173 + r * p
    p = 0.0013888888888879082 + r * p
    p = 0.008333333333326141 + r * p
    p = 0.04166666666666668 + r * p
    p = 0.1666666666666667 + r * p
    p = 0.5 + r * p
    power = np.int64((np.float64(shifted).view(np.int64) << 52) + _ONE_BITS).view(np.float64)
    return (1.0 + (r + r * r * p)) * power if x > _LEAST else 0.0


@njit(cache=True, nogil=True, forceinline=True, error_model="numpy")
def log(x: float) -> float:
    """The natural logarithm of a positive, normal number.

    x = 2^n m with m within a factor sqrt(2) of 1; with f = (m - 1) / (m + 1), log(m) is
    2 f + f^3 p(f^2).
    """
    bits = np.float64(x).view(np.int64) - _ROOT_HALF_BITS
    exponent = bits >> 52
    m = np.int64(np.float64(x).view(np.int64) - (exponent << 52)).view(np.float64)
    n = float(exponent)
    f = (m - 1.0) / (m + 1.0)
    s = f * f
    p = 0.13268712289333262 + s * 0.13087217031578988
    p = 0.15386242164348365 + s * p
    p = 0.18181795590761907 + s * p
    p = 0.2222222239222216 + s * p
    p = 0.2857142857080112 + s * p
    p = 0.4000000000000088 + s * p
    p = 0.6666666666666666 + s * p
    return n * _LN2_HIGH + (2.0 * f + (f * s * p + n * _LN2_LOW))


@njit(cache=True, nogil=True, forceinline=True, error_model="numpy")
def erfcx(x: float) -> float:
    """exp(x^2) erfc(x) for x >= 0: a polynomial of degree 24, divided by 1 + 2x."""
    t = (x - _MIDDLE) / (x + _MIDDLE)
    p = 9.862533510345587e-10 + t * 8.393734858690877e-10
    p = -8.217595058711455e-09 + t * p
    p = -1.3312919661038687e-08 + t * p
    p = 4.1064013667940355e-08 + t * p
    p = 1.0183620603842736e-07 + t * p
    p = -1.4047654315428462e-07 + t * p
    p = -6.166011460398726e-07 + t * p
    p = 3.5576086684080595e-07 + t * p
    p = 3.472370944977168e-06 + t * p
    p = -7.308281468783614e-07 + t * p
    p = -2.0100542268525612e-05 + t * p
    p = 4.949196649968345e-06 + t * p
    p = 0.0001250993424583729 + t * p
    p = -0.00010515971958448065 + t * p
    p = -0.0007798322696543306 + t * p
    p = 0.0018886903449991718 + t * p
    p = 0.0025293918156939696 + t * p
    p = -0.02377051491717134 + t * p
    p = 0.0683080273440099 + t * p
    p = -0.11927366341538638 + t * p
    p = 0.1296451587027594 + t * p
    p = -0.0475622943534492 + t * p
    p = -0.13562110612458117 + t * p
    p = 1.2530080582697296 + t * p
    return p / (1.0 + 2.0 * x)


@njit(cache=True, nogil=True, forceinline=True)
def sum_of(values: Reals, first: int, size: int) -> float:
    """The sum of `size` values from `first` on, in four strands: one strand waits for each sum."""
    a = b = c = d = 0.0
    whole = size - size % 4
    for i in range(first, first + whole, 4):
        a += values[i]
        b += values[i + 1]
        c += values[i + 2]
        d += values[i + 3]
    for i in range(first + whole, first + size):
        a += values[i]
    return (a + b) + (c + d)


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
        ca, cb = erfcx(abs(a) / _SQRT2), erfcx(-b / _SQRT2)
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
