"""Compiled loops over AES blocks. Every decision is either certain or handed to exact arithmetic.

A comparison `U < exp(-rate)` or `floor(-scale * ln U)` is first made in float64. The uniform U is
known to 63 or 64 bits and the float value carries an error; MARGIN bounds that error with room to
spare (a math library may be off by over a hundred units in the last place). Only if every value
within the bound gives the same answer is it taken; otherwise the draw is marked UNSURE and decided
by `exact.py` on more bits. So the result is a function of the random bits alone, the same on every
platform, and its law is exact.
"""

from __future__ import annotations

import math

import numpy as np

from dpstream.compiled import njit

REJECTED, ACCEPTED, UNSURE = 0, 1, 2

MARGIN = 2.0**-45
MAX_SCALE = 2**44
"""Largest noise scale on the integer grid: values of 64 scales still fit float64's integers."""

_TWO_63 = 2.0**-63
_TWO_64 = 2.0**-64
_COARSE = 1024  # below this a 63-bit uniform says too little about its logarithm


@njit(cache=True, nogil=True)
def fill_vector(out, step, which, counters):  # type: ignore[no-untyped-def]
    """Blocks of vector mode: step 48 | coordinate 48 | counter 32."""
    one = counters.shape[0] == 1
    for row in range(which.shape[0]):
        coordinate = np.uint64(which[row])
        out[row, 0] = (np.uint64(step) << np.uint64(16)) | (coordinate >> np.uint64(32))
        out[row, 1] = ((coordinate & np.uint64(0xFFFFFFFF)) << np.uint64(32)) | np.uint64(
            counters[0 if one else row]
        )


@njit(cache=True, nogil=True)
def fill_ahead(out, step, width):  # type: ignore[no-untyped-def]
    """Attempt 0 of coordinates 0 to `width` - 1 at `step` and the steps after it, in vector mode.

    `width` < 2^32.
    """
    for row in range(out.shape[0]):
        out[row, 0] = np.uint64(step + row // width) << np.uint64(16)
        out[row, 1] = np.uint64(row % width) << np.uint64(32)


@njit(cache=True, nogil=True)
def fill_keyed(out, masked, step, which, counters):  # type: ignore[no-untyped-def]
    """Second blocks of keyed mode: AES(key id) xor (step 64 | counter 32)."""
    one = counters.shape[0] == 1
    for row in range(which.shape[0]):
        out[row, 0] = masked[which[row], 0] ^ np.uint64(step)
        out[row, 1] = masked[which[row], 1] ^ np.uint64(counters[0 if one else row])


@njit(cache=True, nogil=True)
def fill_all_keyed(out, masked, step, counter):  # type: ignore[no-untyped-def]
    """The same of every row, in order, at one counter."""
    for row in range(out.shape[0]):
        out[row, 0] = masked[row, 0] ^ np.uint64(step)
        out[row, 1] = masked[row, 1] ^ np.uint64(counter)


@njit(cache=True, nogil=True, inline="always")
def _magnitude(word, scale, margin):  # type: ignore[no-untyped-def]
    """floor(-scale ln U) for U in [u, u + 1) 2^-63, u = the word's upper 63 bits; -1 if unsure."""
    u = np.float64(word >> np.uint64(1))
    if u < _COARSE:
        return -1
    minus_log = -math.log((u + 0.5) * _TWO_63)
    y = scale * minus_log
    error = scale * (1.0 / u + margin * (minus_log + 1.0))
    low, high = math.floor(y - error), math.floor(y + error)
    return np.int64(high) if low == high and low >= 0 else np.int64(-1)


@njit(cache=True, nogil=True, inline="always")
def _below_exp(word, rate, rate_error, margin):  # type: ignore[no-untyped-def]
    """Is U < exp(-rate), U in [word, word + 1) 2^-64?"""
    bound = math.exp(-rate)
    slack = 2.0 * (rate_error + margin)
    u = np.float64(word)
    if (u + 1.0) * (1.0 + margin) * _TWO_64 < bound * (1.0 - slack):
        return ACCEPTED
    if u * (1.0 - margin) * _TWO_64 > bound * (1.0 + slack):
        return REJECTED
    return UNSURE


@njit(cache=True, nogil=True)
def within(values, limit):  # type: ignore[no-untyped-def]
    """Is every value between -limit and limit?"""
    inside = True
    for row in range(values.shape[0]):
        inside = inside and -limit < values[row] < limit
    return inside


@njit(cache=True, nogil=True, inline="always")
def _undone(status):  # type: ignore[no-untyped-def]
    """Rows that were not accepted: 0, the usual answer for a few draws, saves the bookkeeping."""
    count = 0
    for row in range(status.shape[0]):
        count += status[row] != ACCEPTED
    return count


@njit(cache=True, nogil=True)
def geometric(words, scale, margin, status, values):  # type: ignore[no-untyped-def]
    """P[X >= k] = exp(-k / scale)."""
    for row in range(words.shape[0]):
        magnitude = _magnitude(words[row, 0], scale, margin)
        status[row] = UNSURE if magnitude < 0 else ACCEPTED
        values[row] = magnitude
    return _undone(status)


@njit(cache=True, nogil=True)
def laplace(words, scale, margin, status, values):  # type: ignore[no-untyped-def]
    """Sign and geometric magnitude; minus zero is rejected, so zero is not counted twice."""
    for row in range(words.shape[0]):
        negative = words[row, 0] & np.uint64(1)
        magnitude = _magnitude(words[row, 0], scale, margin)
        if magnitude < 0:
            status[row] = UNSURE
        elif negative and magnitude == 0:
            status[row] = REJECTED
        else:
            status[row] = ACCEPTED
            values[row] = -magnitude if negative else magnitude
    return _undone(status)


@njit(cache=True, nogil=True)
def laplace_added(words, scale, margin, exact, out):  # type: ignore[no-untyped-def]
    """`exact` plus noise in `out`, if every draw is accepted; else how many are not.

    One call for what `laplace` and an addition do: for a few draws the calls are what costs.
    """
    undone = 0
    for row in range(words.shape[0]):
        negative = words[row, 0] & np.uint64(1)
        magnitude = _magnitude(words[row, 0], scale, margin)
        if magnitude < 0 or (negative and magnitude == 0):
            undone += 1
        else:
            out[row] = exact[row] + (-magnitude if negative else magnitude)
    return undone


@njit(cache=True, nogil=True)
def gaussian(words, scale, variance, margin, status, values):  # type: ignore[no-untyped-def]
    """Discrete Laplace of integer scale, kept with probability exp(-(|y| - s2/t)^2 / (2 s2))."""
    laplace(words, scale, margin, status, values)
    centre = variance / scale
    for row in range(words.shape[0]):
        if status[row] != ACCEPTED:
            continue
        size = np.float64(abs(values[row]))
        rate = (size - centre) ** 2 / (2.0 * variance)
        # cancellation in size - centre: its error is relative to size + centre
        rate_error = margin * ((size + centre) ** 2 / (2.0 * variance) + 1.0)
        status[row] = (
            _below_exp(words[row, 1], rate, rate_error, margin) if rate_error < 0.25 else UNSURE
        )
    return _undone(status)


@njit(cache=True, nogil=True)
def bernoulli_exp(words, rate, margin, status):  # type: ignore[no-untyped-def]
    """ACCEPTED with probability exp(-rate)."""
    for row in range(words.shape[0]):
        rate_error = margin * (rate + 1.0)
        status[row] = (
            _below_exp(words[row, 1], rate, rate_error, margin) if rate_error < 0.25 else UNSURE
        )
    return _undone(status)


@njit(cache=True, nogil=True)
def uniform(words, count, limit, status, values):  # type: ignore[no-untyped-def]
    """0 .. count - 1 from 64 bits; words at or above `limit` (a multiple of count) are rejected."""
    for row in range(words.shape[0]):
        word = words[row, 0]
        status[row] = ACCEPTED if limit == np.uint64(0) or word < limit else REJECTED
        values[row] = np.int64(word % count)
    return _undone(status)


@njit(cache=True, nogil=True)
def weighted(words, rates, limit, margin, status, values):  # type: ignore[no-untyped-def]
    """A uniform candidate j, kept with probability exp(-rates[j])."""
    uniform(words, np.uint64(rates.shape[0]), limit, status, values)
    for row in range(words.shape[0]):
        rate = rates[values[row]]
        if status[row] == REJECTED or rate == 0.0:
            continue
        rate_error = margin * (rate + 1.0)
        status[row] = (
            _below_exp(words[row, 1], rate, rate_error, margin) if rate_error < 0.25 else UNSURE
        )
    return _undone(status)
