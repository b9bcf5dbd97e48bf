"""Exact samplers over addressed draws: integers in, integers out, no float decides a law.

Each sampler takes `Draws` (one private block range per draw) and returns one value per draw:

1. A compiled kernel makes an attempt for each draw. It compares `U < exp(-rate)`, or computes
   `floor(-scale * ln U)`, in float64. U is known to 63 or 64 bits and the float value carries an
   error; MARGIN bounds that error with room to spare (a math library may be off by over a hundred
   units in the last place). If every value within the bound gives the same answer, it is taken;
   otherwise the draw is UNSURE.
2. `LazyUniform` decides the few unsure draws by exact arithmetic, on the same bits and as many
   more as it needs. The tests decide all draws this way.
3. A rejected draw goes on to its next attempt.

So a result is a function of the random bits alone, the same on every platform, and its law is
exact.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dpstream.compiled import njit
from dpstream.errors import InvalidParameter
from dpstream.privacy.noise.keyed_draws import SMALL, Draws, counter
from dpstream.records import Integers, Words

Status = npt.NDArray[np.int8]
Kernel = Callable[[Integers, Words, Status, Integers], int]
"""(which draws, their words, status, values): how many are not accepted."""

REJECTED, ACCEPTED, UNSURE = 0, 1, 2
MARGIN = 2.0**-45
MAX_SCALE = 2**44
"""Largest noise scale on the integer grid: values of 64 scales still fit float64's integers."""
MAX_CANDIDATES = 1 << 14
"""Rejection keeps at least one attempt in 2^14; 2^20 attempts then fail with chance e^-64."""

_LN2 = math.log(2)
_TWO_63, _TWO_64 = 2.0**-63, 2.0**-64
_COARSE = 1024  # below this a 63-bit uniform says too little about its logarithm
_NONE = np.zeros(0, dtype=np.int64)
_CHUNK = 1 << 15  # draws in flight: their blocks and values stay in the cache
_SURE = 16  # scales per draw from which it is likely that none is rejected


def discrete_laplace(draws: Draws, scale: Fraction, *, margin: float = MARGIN) -> Integers:
    """P[X = x] proportional to exp(-|x| / scale)."""
    real = _check_scale(scale)
    return _sample(
        draws,
        lambda _, words, status, values: laplace_kernel(words, real, margin, status, values),
        lambda _, word, first, __: _signed(word, first.floor_minus_log(scale)),
    )


def add_laplace(exact: Integers, draws: Draws, over: int, under: int) -> Integers | None:
    """A flat vector plus discrete Laplace noise of scale `over` / `under`, one draw per number.

    The ratio need not be reduced, which would take longer than all the rest for a few draws. None
    if a sum would leave 62 bits, which takes a draw that float64 could not decide.
    """
    if not 0 < over <= MAX_SCALE * under:
        _check_scale(Fraction(over, under))
    real = over / under  # correctly rounded, as float(Fraction) is
    # One draw in 2 scale is rejected, and then all are made again in the general way.
    words = draws.first(max(SMALL, min(int(real) // _SURE, _CHUNK)))
    if words is not None:
        out = np.empty(draws.size, dtype=np.int64)
        if add_laplace_kernel(words, real, MARGIN, exact, out) == 0:
            draws.use()
            return out
    drawn = discrete_laplace(draws, Fraction(over, under))
    return exact + drawn if within(drawn, 1 << 62) else None


def discrete_gaussian(draws: Draws, variance: Fraction, *, margin: float = MARGIN) -> Integers:
    """P[X = x] proportional to exp(-x^2 / (2 variance)).

    Paper: Canonne, Kamath, Steinke, "The Discrete Gaussian for Differential Privacy", 2020.
    """
    real = float(variance)
    if real <= 0:
        raise InvalidParameter(f"a noise variance must be positive; got {real:g}")
    proposal = math.isqrt(variance.numerator // variance.denominator) + 1
    scale = _check_scale(Fraction(proposal))

    def settle(_: int, word: int, first: LazyUniform, second: LazyUniform) -> tuple[int, int]:
        status, value = _signed(word, first.floor_minus_log(Fraction(proposal)))
        rate = (abs(value) - variance / proposal) ** 2 / (2 * variance)
        if status == ACCEPTED and not second.below_exp(rate):
            status = REJECTED
        return status, value

    return _sample(
        draws,
        lambda _, words, status, values: gaussian_kernel(
            words, scale, real, margin, status, values
        ),
        settle,
    )


def respond(
    draws: Draws, truth: Integers, *, buckets: int, epsilon: Fraction, margin: float = MARGIN
) -> Integers:
    """Generalised randomised response: the truth with weight 1, each other bucket exp(-epsilon)."""
    _check_candidates(buckets)
    others = np.ones(buckets, dtype=np.int64)  # by distance from the truth, round the ring
    others[0] = 0
    return (truth + weighted(draws, others, epsilon, margin)) % buckets


def choose(draws: Draws, gaps: Integers, slope: Fraction, *, margin: float = MARGIN) -> int:
    """Candidate j with probability proportional to exp(-gaps[j] slope); the smallest gap is 0."""
    _check_candidates(len(gaps))
    if int(gaps.min()) != 0 or slope < 0:
        raise InvalidParameter(
            "the best candidate must have gap 0 (subtract the smallest), and slope must be >= 0; "
            f"got a smallest gap of {int(gaps.min())} and slope {slope}"
        )
    return int(weighted(draws, gaps, slope, margin)[0])


def weighted(draws: Draws, gaps: Integers, slope: Fraction, margin: float) -> Integers:
    """Candidate j with probability proportional to exp(-gaps[j] slope), for every draw.

    The float64 rates are within 3 * 2^-53 of the exact ones, relatively: inside `margin`.
    """
    rates, count = gaps.astype(np.float64) * float(slope), len(gaps)
    limit = _largest_multiple(count)

    def settle(_: int, word: int, __: LazyUniform, second: LazyUniform) -> tuple[int, int]:
        j = word % count
        return (ACCEPTED if second.below_exp(int(gaps[j]) * slope) else REJECTED), j

    return _sample(
        draws,
        lambda _, words, status, values: weighted_kernel(
            words, rates, limit, margin, status, values
        ),
        settle,
    )


def choose_each(
    draws: Draws,
    count: int,
    gaps: Callable[[Integers, Integers], Integers],
    slope: Fraction,
    *,
    margin: float = MARGIN,
) -> Integers:
    """For every draw a candidate below `count`, with probability proportional to exp(-gap slope).

    `gaps(which, candidates)`: the gaps of these candidates of these draws, whole numbers from 0
    (the best candidate of a draw) to 2^62.
    """
    _check_candidates(count)
    if slope <= 0:
        raise InvalidParameter(f"a choice needs a slope above 0; got {slope}")
    limit, steepness = _largest_multiple(count), float(slope)

    def kernel(which: Integers, words: Words, status: Status, values: Integers) -> int:
        uniform_kernel(words, np.uint64(count), limit, status, values)
        rates = gaps(which, values).astype(np.float64) * steepness
        return int(keep_kernel(words, rates, margin, status))

    def settle(draw: int, word: int, _: LazyUniform, second: LazyUniform) -> tuple[int, int]:
        j = word % count
        gap = int(gaps(np.array([draw]), np.array([j]))[0])
        return (ACCEPTED if second.below_exp(gap * slope) else REJECTED), j

    return _sample(draws, kernel, settle)


@lru_cache(maxsize=1024)
def _check_scale(scale: Fraction) -> float:
    if not 0 < scale <= MAX_SCALE:
        raise InvalidParameter(
            f"a noise scale must be positive and at most 2^44 grid steps; got {float(scale):g}; "
            "use a coarser quantum"
        )
    return float(scale)


def _check_candidates(count: int) -> None:
    if not 2 <= count <= MAX_CANDIDATES:
        raise InvalidParameter(
            f"a private choice needs 2 to {MAX_CANDIDATES} candidates; got {count}"
        )


def _largest_multiple(count: int) -> np.uint64:
    """The largest multiple of `count` up to 2^64, which is written as 0."""
    return np.uint64((1 << 64) // count * count % (1 << 64))


def _sample(draws: Draws, kernel: Kernel, settle: Settle) -> Integers:
    """Attempt 0 for every draw, attempt 1 for those rejected, and so on."""
    draws.use()
    out = np.empty(draws.size, dtype=np.int64)
    for start in range(0, draws.size, _CHUNK):
        which = np.arange(start, min(start + _CHUNK, draws.size))
        out[which] = _sample_chunk(draws, which, kernel, settle)
    return out


def _sample_chunk(draws: Draws, which: Integers, kernel: Kernel, settle: Settle) -> Integers:
    undone, out = _attempts(draws, which, 0, 1, kernel, settle)
    attempt, ahead = 1, 1
    while len(undone):
        if len(undone) * ahead <= 64:  # few draws left: several attempts at a time
            ahead = min(4 * ahead, 64)
        left, values = _attempts(draws, which[undone], attempt, ahead, kernel, settle)
        out[undone] = values
        undone, attempt = undone[left], attempt + ahead
    return out


def _attempts(
    draws: Draws, pending: Integers, attempt: int, ahead: int, kernel: Kernel, settle: Settle
) -> tuple[Integers, Integers]:
    """`ahead` attempts for each pending draw: which are still undone, and the first accepted."""
    numbers = [counter(attempt + i) for i in range(ahead)]
    which = pending if ahead == 1 else np.repeat(pending, ahead)
    words = draws.blocks(which, np.array(numbers * len(pending) if ahead > 1 else numbers))
    status = np.empty(len(which), dtype=np.int8)
    values = np.empty(len(which), dtype=np.int64)
    if kernel(which, words, status, values) == 0 and ahead == 1:
        return _NONE, values
    for row in np.flatnonzero(status == UNSURE):
        status[row], values[row] = _settle(
            draws, int(which[row]), attempt + int(row) % ahead, words[row], settle
        )
    table = (status == ACCEPTED).reshape(-1, ahead)
    first = table.argmax(axis=1)
    undone = np.flatnonzero(~table.any(axis=1))
    return undone, values.reshape(-1, ahead)[np.arange(len(pending)), first]


def _settle(draws: Draws, draw: int, attempt: int, words: Words, settle: Settle) -> tuple[int, int]:
    def more(lane: int) -> Callable[[int], int]:
        return lambda number: draws.extension(draw, attempt, lane, number)

    first = LazyUniform(int(words[0]) >> 1, 63, more(0))
    second = LazyUniform(int(words[1]), 64, more(1))
    return settle(draw, int(words[0]), first, second)


def _signed(word: int, magnitude: int) -> tuple[int, int]:
    """The sign is the word's lowest bit; minus zero is rejected."""
    if word & 1:
        return (REJECTED if magnitude == 0 else ACCEPTED), -magnitude
    return ACCEPTED, magnitude


class LazyUniform:
    """A uniform real U in [0, 1), of which only the bits that were needed are known.

    >>> half = LazyUniform(1, 1, more=lambda number: 0)
    >>> half.below_exp(Fraction(1, 2)), half.below_exp(Fraction(7, 10))
    (True, False)
    """

    def __init__(self, value: int, bits: int, more: Callable[[int], int]) -> None:
        self.value, self.bits, self._more, self._extensions = value, bits, more, 0

    def extend(self) -> None:
        """Learn 128 more bits."""
        self._extensions += 1
        self.value = self.value << 128 | self._more(self._extensions)
        self.bits += 128

    def below_exp(self, rate: Fraction) -> bool:
        """Is U < exp(-rate)? exp(-rate) is irrational for rational rate > 0, so no tie lasts."""
        if rate == 0:
            return True
        while rate > self.bits:  # exp(-rate) < 2^-bits: any known bit that is set decides
            if self.value:
                return False
            self.extend()
        while True:
            low, high = exp_bounds(rate, digits=int(self.bits * 0.302) + 12)
            if Fraction(self.value + 1, 1 << self.bits) <= low:
                return True
            if Fraction(self.value, 1 << self.bits) >= high:
                return False
            self.extend()

    def floor_minus_log(self, scale: Fraction) -> int:
        """floor(-scale ln U): the k with exp(-(k + 1)/scale) <= U < exp(-k/scale)."""
        while self.value < 1 << 53:  # fewer bits leave the guess far off at a large scale
            self.extend()
        guess = float(scale) * (self.bits * _LN2 - math.log(self.value))
        k = max(0, math.floor(guess))
        while self.below_exp((k + 1) / scale):
            k += 1
        while k > 0 and not self.below_exp(k / scale):
            k -= 1
        return k


def exp_bounds(rate: Fraction, digits: int) -> tuple[Fraction, Fraction]:
    """Rationals around exp(-rate), about `digits` significant digits apart.

    `Decimal.exp` is correctly rounded, so one unit in the last place either way encloses it.
    """
    down = decimal.Context(prec=digits, rounding=decimal.ROUND_FLOOR, Emin=decimal.MIN_EMIN)
    up = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING, Emin=decimal.MIN_EMIN)
    top, bottom = decimal.Decimal(rate.numerator), decimal.Decimal(rate.denominator)
    low = down.next_minus(down.exp(up.divide(top, bottom).copy_negate()))
    high = up.next_plus(up.exp(down.divide(top, bottom).copy_negate()))
    return Fraction(low), Fraction(high)


Settle = Callable[[int, int, LazyUniform, LazyUniform], tuple[int, int]]
"""(draw, its first word, two uniforms): (status, value), decided exactly."""


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
    if not rate_error < 0.25:  # NaN too
        return UNSURE
    bound = math.exp(-rate)
    slack = 2.0 * (rate_error + margin)
    u = np.float64(word)
    if (u + 1.0) * (1.0 + margin) * _TWO_64 < bound * (1.0 - slack):
        return ACCEPTED
    if u * (1.0 - margin) * _TWO_64 > bound * (1.0 + slack):
        return REJECTED
    return UNSURE


@njit(cache=True, nogil=True, inline="always")
def _undone(status):  # type: ignore[no-untyped-def]
    """Rows that were not accepted: 0, the usual answer for a few draws, saves the bookkeeping."""
    count = 0
    for row in range(status.shape[0]):
        count += status[row] != ACCEPTED
    return count


@njit(cache=True, nogil=True)
def laplace_kernel(words, scale, margin, status, values):  # type: ignore[no-untyped-def]
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
def add_laplace_kernel(words, scale, margin, exact, out):  # type: ignore[no-untyped-def]
    """`exact` plus noise in `out`, if every draw is accepted; else how many are not.

    One call for what `laplace_kernel` and an addition do: for a few draws the calls are what costs.
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
def gaussian_kernel(words, scale, variance, margin, status, values):  # type: ignore[no-untyped-def]
    """Discrete Laplace of integer scale, kept with probability exp(-(|y| - s2/t)^2 / (2 s2))."""
    laplace_kernel(words, scale, margin, status, values)
    centre = variance / scale
    for row in range(words.shape[0]):
        if status[row] != ACCEPTED:
            continue
        size = np.float64(abs(values[row]))
        rate = (size - centre) ** 2 / (2.0 * variance)
        # cancellation in size - centre: its error is relative to size + centre
        rate_error = margin * ((size + centre) ** 2 / (2.0 * variance) + 1.0)
        status[row] = _below_exp(words[row, 1], rate, rate_error, margin)
    return _undone(status)


@njit(cache=True, nogil=True)
def uniform_kernel(words, count, limit, status, values):  # type: ignore[no-untyped-def]
    """0 .. count - 1 from 64 bits; words at or above `limit` (a multiple of count) are rejected."""
    for row in range(words.shape[0]):
        word = words[row, 0]
        status[row] = ACCEPTED if limit == np.uint64(0) or word < limit else REJECTED
        values[row] = np.int64(word % count)
    return _undone(status)


@njit(cache=True, nogil=True)
def weighted_kernel(words, rates, limit, margin, status, values):  # type: ignore[no-untyped-def]
    """A uniform candidate j, kept with probability exp(-rates[j])."""
    uniform_kernel(words, np.uint64(rates.shape[0]), limit, status, values)
    for row in range(words.shape[0]):
        rate = rates[values[row]]
        if status[row] == REJECTED or rate == 0.0:
            continue
        rate_error = margin * (rate + 1.0)
        status[row] = _below_exp(words[row, 1], rate, rate_error, margin)
    return _undone(status)


@njit(cache=True, nogil=True)
def keep_kernel(words, rates, margin, status):  # type: ignore[no-untyped-def]
    """Of values that `uniform_kernel` has drawn, each kept with probability exp(-its rate)."""
    for row in range(words.shape[0]):
        if status[row] != REJECTED and rates[row] > 0.0:
            rate_error = margin * (rates[row] + 1.0)
            status[row] = _below_exp(words[row, 1], rates[row], rate_error, margin)
    return _undone(status)


@njit(cache=True, nogil=True)
def within(values, limit):  # type: ignore[no-untyped-def]
    """Is every value between -limit and limit?"""
    inside = True
    for row in range(values.shape[0]):
        inside = inside and -limit < values[row] < limit
    return inside
