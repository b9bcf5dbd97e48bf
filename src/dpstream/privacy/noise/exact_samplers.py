"""Exact samplers over addressed draws: integers in, integers out, no float decides a law.

Each takes `Draws` (one private block range per draw) and returns one value per draw. A compiled
kernel makes the attempts; draws that it rejects go to their next attempt, draws that float64
cannot decide are settled by `exact.py` on the same bits.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dpstream.errors import InvalidParameter
from dpstream.privacy.noise import aes_kernels
from dpstream.privacy.noise.aes_kernels import ACCEPTED, MARGIN, MAX_SCALE, REJECTED, UNSURE
from dpstream.privacy.noise.keyed_draws import SMALL, Draws, Words, counter

# Decisions in exact arithmetic, on as many random bits as they need.
#
# Used for the few draws that float64 leaves undecided, and by the tests for all of them.

_LN2 = math.log(2)


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


Integers = npt.NDArray[np.int64]
Status = npt.NDArray[np.int8]
Kernel = Callable[[Words, Integers, Status, Integers], int]
Settle = Callable[[int, LazyUniform, LazyUniform], tuple[int, int]]

MAX_CANDIDATES = 1 << 14
"""Rejection keeps at least one attempt in 2^14; 2^20 attempts then fail with chance e^-64."""

_NONE = np.zeros(0, dtype=np.int64)
_CHUNK = 1 << 15  # draws in flight: their blocks and values stay in the cache
_SURE = 16  # scales per draw from which it is likely that none is rejected


def discrete_laplace(draws: Draws, scale: Fraction, *, margin: float = MARGIN) -> Integers:
    """P[X = x] proportional to exp(-|x| / scale)."""
    real = _checked_scale(scale)
    draws.use()
    return _laplace(draws, scale, real, margin)


def add_laplace(exact: Integers, draws: Draws, over: int, under: int) -> Integers | None:
    """A flat vector plus discrete Laplace noise of scale `over` / `under`, one draw per number.

    The ratio need not be reduced, which would take longer than all the rest for a few draws. None
    if a sum would leave 62 bits, which takes a draw that float64 could not decide.
    """
    if not 0 < over <= MAX_SCALE * under:
        _checked_scale(Fraction(over, under))
    draws.use()
    real = over / under  # correctly rounded, as float(Fraction) is
    # One draw in 2 scale is rejected, and then all are made again in the general way.
    words = draws.first(max(SMALL, min(int(real) // _SURE, _CHUNK)))
    if words is not None:
        out = np.empty(draws.size, dtype=np.int64)
        if aes_kernels.laplace_added(words, real, MARGIN, exact, out) == 0:
            return out
    drawn = _laplace(draws, Fraction(over, under), real, MARGIN)
    return exact + drawn if aes_kernels.within(drawn, 1 << 62) else None


def _laplace(draws: Draws, scale: Fraction, real: float, margin: float) -> Integers:
    def attempt(words: Words, _: Integers, status: Status, values: Integers) -> int:
        return int(aes_kernels.laplace(words, real, margin, status, values))

    def settle(word: int, first: LazyUniform, _: LazyUniform) -> tuple[int, int]:
        return _signed(word, first.floor_minus_log(scale))

    return _sampled(draws, attempt, settle)


def discrete_gaussian(draws: Draws, variance: Fraction, *, margin: float = MARGIN) -> Integers:
    """P[X = x] proportional to exp(-x^2 / (2 variance)).

    Paper: Canonne, Kamath, Steinke, "The Discrete Gaussian for Differential Privacy", 2020.
    """
    if float(variance) <= 0:
        raise InvalidParameter(f"a noise variance must be positive; got {float(variance):g}")
    proposal = math.isqrt(variance.numerator // variance.denominator) + 1
    _checked_scale(Fraction(proposal))
    real = float(variance)

    def attempt(words: Words, _: Integers, status: Status, values: Integers) -> int:
        return int(aes_kernels.gaussian(words, float(proposal), real, margin, status, values))

    def settle(word: int, first: LazyUniform, second: LazyUniform) -> tuple[int, int]:
        status, value = _signed(word, first.floor_minus_log(Fraction(proposal)))
        rate = (abs(value) - variance / proposal) ** 2 / (2 * variance)
        if status == ACCEPTED and not second.below_exp(rate):
            status = REJECTED
        return status, value

    return _sample(draws, attempt, settle)


def geometric(draws: Draws, scale: Fraction, *, margin: float = MARGIN) -> Integers:
    """P[X >= k] = exp(-k / scale), k = 0, 1, ..."""
    real = _checked_scale(scale)

    def attempt(words: Words, _: Integers, status: Status, values: Integers) -> int:
        return int(aes_kernels.geometric(words, real, margin, status, values))

    def settle(word: int, first: LazyUniform, _: LazyUniform) -> tuple[int, int]:
        return ACCEPTED, first.floor_minus_log(scale)

    return _sample(draws, attempt, settle)


def bernoulli_exp(draws: Draws, rate: Fraction, *, margin: float = MARGIN) -> Integers:
    """1 with probability exp(-rate), else 0."""
    if rate < 0:
        raise InvalidParameter(f"the rate of exp(-rate) must not be negative; got {rate}")
    real = float(rate)

    def attempt(words: Words, _: Integers, status: Status, values: Integers) -> int:
        aes_kernels.bernoulli_exp(words, real, margin, status)
        values[:] = status == ACCEPTED
        status[status == REJECTED] = ACCEPTED
        return int((status == UNSURE).sum())

    def settle(_: int, __: LazyUniform, second: LazyUniform) -> tuple[int, int]:
        return ACCEPTED, int(second.below_exp(rate))

    return _sample(draws, attempt, settle)


def uniform(draws: Draws, count: int) -> Integers:
    """0 .. count - 1, all equally likely."""
    if not 1 <= count < 1 << 63:
        raise InvalidParameter(f"a uniform draw needs 1 <= count < 2^63; got {count}")
    limit = np.uint64((1 << 64) // count * count % (1 << 64))

    def attempt(words: Words, _: Integers, status: Status, values: Integers) -> int:
        return int(aes_kernels.uniform(words, np.uint64(count), limit, status, values))

    return _sample(draws, attempt, _never)


def respond(
    draws: Draws, truth: Integers, *, buckets: int, epsilon: Fraction, margin: float = MARGIN
) -> Integers:
    """Generalised randomised response: the truth with weight 1, each other bucket exp(-epsilon)."""
    _check_candidates(buckets)
    others = np.ones(buckets, dtype=np.int64)  # by distance from the truth, round the ring
    others[0] = 0
    return (truth + _weighted(draws, others, epsilon, margin)) % buckets


def choose(draws: Draws, gaps: Integers, slope: Fraction, *, margin: float = MARGIN) -> int:
    """Candidate j with probability proportional to exp(-gaps[j] slope); the smallest gap is 0."""
    _check_candidates(len(gaps))
    if int(gaps.min()) != 0 or slope < 0:
        raise InvalidParameter(
            "the best candidate must have gap 0 (subtract the smallest), and slope must be >= 0; "
            f"got a smallest gap of {int(gaps.min())} and slope {slope}"
        )
    return int(_weighted(draws, gaps, slope, margin)[0])


def _weighted(draws: Draws, gaps: Integers, slope: Fraction, margin: float) -> Integers:
    """Candidate j with probability proportional to exp(-gaps[j] slope), for every draw.

    The float64 rates are within 3 * 2^-53 of the exact ones, relatively: inside `margin`.
    """
    real, count = gaps.astype(np.float64) * float(slope), len(gaps)
    limit = np.uint64((1 << 64) // count * count % (1 << 64))

    def attempt(words: Words, _: Integers, status: Status, values: Integers) -> int:
        return int(aes_kernels.weighted(words, real, limit, margin, status, values))

    def settle(word: int, _: LazyUniform, second: LazyUniform) -> tuple[int, int]:
        j = word % count
        return (ACCEPTED if second.below_exp(int(gaps[j]) * slope) else REJECTED), j

    return _sample(draws, attempt, settle)


def _sample(draws: Draws, kernel: Kernel, settle: Settle) -> Integers:
    """Attempt 0 for every draw, attempt 1 for those rejected, and so on."""
    draws.use()
    return _sampled(draws, kernel, settle)


def _sampled(draws: Draws, kernel: Kernel, settle: Settle) -> Integers:
    if draws.size <= _CHUNK:
        return _sample_chunk(draws, np.arange(draws.size), kernel, settle)
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
    if kernel(words, which, status, values) == 0 and ahead == 1:
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
    return settle(int(words[0]), first, second)


def _signed(word: int, magnitude: int) -> tuple[int, int]:
    """The sign is the word's lowest bit; minus zero is rejected."""
    if word & 1:
        return (REJECTED if magnitude == 0 else ACCEPTED), -magnitude
    return ACCEPTED, magnitude


def _never(*_: object) -> tuple[int, int]:
    raise AssertionError("a uniform draw is never undecided")


@lru_cache(maxsize=1024)
def _checked_scale(scale: Fraction) -> float:
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
