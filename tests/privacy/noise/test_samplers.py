"""The samplers' laws: against the exact pmf, at the edges of float64, and at large scales.

FALSE_ALARM is the chance that a right sampler fails one test. The secrets are fixed, so a test
that passes once passes always; the rate says how much a pass is worth.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from fractions import Fraction

import mpmath
import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import chi2, norm

from dpstream.errors import InvalidParameter
from dpstream.privacy.noise import (
    Address,
    Draws,
    Stream,
    choose,
    discrete_gaussian,
    discrete_laplace,
    exact_samplers,
    respond,
)
from dpstream.privacy.noise.exact_samplers import (
    ACCEPTED,
    MARGIN,
    MAX_SCALE,
    REJECTED,
    UNSURE,
    choose_each,
    weighted,
)

FALSE_ALARM = 1e-6
ALWAYS_EXACT = 2.0**60  # a margin that leaves every comparison to exact arithmetic
OFF = Fraction(103, 100)
SAMPLES = 400_000
BINS = 60

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def fresh(purpose: str, size: int) -> Draws:
    """Draws that no other purpose shares."""
    address = Address(run=b"sampler tests 01", purpose=purpose)
    return Stream(bytes(range(32)), address).at(0, size)


def p_value(sample: Integers, support: Integers, weights: Floats) -> float:
    """Chi-square of a sample against weights on a sorted support that holds (nearly) all mass.

    Neighbouring values are pooled to bins that expect at least 10 and about 1/BINS of the sample.
    """
    if sample.min() < support[0] or sample.max() > support[-1]:
        return 0.0
    expected = weights / weights.sum() * len(sample)
    observed = np.bincount(np.searchsorted(support, sample), minlength=len(support))
    assert (support[np.searchsorted(support, sample)] == sample).all()
    least = max(10.0, len(sample) / BINS)
    pooled: list[list[float]] = [[0.0, 0.0]]
    for want, got in zip(expected, observed, strict=True):
        if pooled[-1][0] >= least:
            pooled.append([0.0, 0.0])
        pooled[-1][0] += want
        pooled[-1][1] += got
    if pooled[-1][0] < 10 and len(pooled) > 1:
        want, got = pooled.pop()
        pooled[-1][0] += want
        pooled[-1][1] += got
    wants, gots = np.array(pooled).T
    assert len(wants) > 1
    assert wants.min() >= 10
    return float(chi2.sf(((gots - wants) ** 2 / wants).sum(), len(wants) - 1))


def laplace_law(scale: Fraction) -> tuple[Integers, Floats]:
    """Support and weights of the discrete Laplace law."""
    reach = int(60 * scale) + 60
    support = np.arange(-reach, reach + 1)
    return support, np.exp(-np.abs(support) / float(scale))


def gaussian_law(variance: Fraction) -> tuple[Integers, Floats]:
    """Support and weights of the discrete Gaussian law."""
    reach = int(15 * math.sqrt(variance)) + 15
    support = np.arange(-reach, reach + 1)
    return support, np.exp(-(support**2) / (2 * float(variance)))


def check(sample: Integers, off: Integers, law: tuple[Integers, Floats]) -> None:
    """The sample fits the law; the one drawn 3% off does not."""
    assert p_value(sample, *law) > FALSE_ALARM
    assert p_value(off, *law) < FALSE_ALARM


@pytest.mark.parametrize("scale", ["1/3", "7/10", "7/2", "10", "1000"])
def test_discrete_laplace_follows_its_pmf(scale: str):
    """P[X = x] is proportional to exp(-|x|/scale); a scale 3% off is caught."""
    exact = Fraction(scale)
    sample = discrete_laplace(fresh(f"laplace {scale}", SAMPLES), exact)
    off = discrete_laplace(fresh(f"laplace off {scale}", SAMPLES), exact * OFF)

    check(sample, off, laplace_law(exact))


@pytest.mark.parametrize("variance", ["1/4", "9/4", "7", "100", "1000000"])
def test_discrete_gaussian_follows_its_pmf(variance: str):
    """P[X = x] is proportional to exp(-x^2/(2 variance)); a sigma 3% off is caught."""
    exact = Fraction(variance)
    sample = discrete_gaussian(fresh(f"gaussian {variance}", SAMPLES), exact)
    off = discrete_gaussian(fresh(f"gaussian off {variance}", SAMPLES), exact * OFF**2)

    check(sample, off, gaussian_law(exact))


@pytest.mark.parametrize("count", [2, 10, 64, 100, 1000])
def test_candidates_without_preference_are_uniform(count: int):
    """Every candidate is equally likely; a count 3% off is caught."""

    def uniform(purpose: str, count: int) -> Integers:
        draws, gaps = fresh(f"{purpose} {count}", SAMPLES), np.zeros(count, np.int64)
        return weighted(draws, gaps, Fraction(1), MARGIN)

    sample, off = uniform("uniform", count), uniform("uniform off", math.ceil(count * OFF))

    check(sample, off, (np.arange(count), np.ones(count)))


def test_candidates_reject_the_uneven_rest():
    """At 3 * 2^61 the word's remainder alone would favour the lower third by 3 to 2."""
    count = 3 << 61
    words = fresh("uniform words", SAMPLES).blocks(np.arange(SAMPLES), np.zeros(SAMPLES, np.int64))
    status, values = np.empty(SAMPLES, np.int8), np.empty(SAMPLES, np.int64)
    limit = np.uint64((1 << 64) // count * count)
    exact_samplers.uniform_kernel(words, np.uint64(count), limit, status, values)

    law = (np.arange(48), np.ones(48))
    check(values[status == ACCEPTED] >> 57, values >> 57, law)


@pytest.mark.parametrize("truth", [0, 3])
def test_respond_follows_its_pmf(truth: int):
    """The truth has weight 1, every other bucket exp(-epsilon); an epsilon 3% off is caught."""
    epsilon, truths = Fraction(2), np.full(SAMPLES, truth)
    weights = np.full(5, math.exp(-epsilon))
    weights[truth] = 1.0
    sample = respond(fresh(f"respond {truth}", SAMPLES), truths, buckets=5, epsilon=epsilon)
    off = respond(fresh(f"respond off {truth}", SAMPLES), truths, buckets=5, epsilon=epsilon * OFF)

    check(sample, off, (np.arange(5), weights))


def test_respond_answers_each_draw_from_its_own_truth():
    """Truths that differ from draw to draw are each kept with the same probability."""
    truths = np.arange(SAMPLES) % 5
    kept = respond(fresh("respond mixed", SAMPLES), truths, buckets=5, epsilon=Fraction(2))
    once = 1 / (1 + 4 * math.exp(-2))

    for truth in range(5):
        hits = (kept == truths)[truths == truth].astype(np.int64)
        assert p_value(hits, np.arange(2), np.array([1 - once, once])) > FALSE_ALARM


def test_choose_follows_its_pmf():
    """Candidate j has weight exp(-gap slope); the same choices do not fit a slope 3% off."""
    gaps, slope = np.array([0] + [7] * 20 + [6] * 10), Fraction(1, 2)
    stream = Stream(bytes(range(32)), Address(run=b"sampler tests 01", purpose="choose"))
    sample = np.array([choose(stream.at(step, 1), gaps, slope) for step in range(20_000)])
    weights, off = (np.exp(-gaps * float(slope * factor)) for factor in (1, OFF))

    assert p_value(sample, np.arange(31), weights) > FALSE_ALARM
    # the first candidate against the rest: where all of the difference is
    first, share = (sample == 0).astype(np.int64), off[0] / off.sum()
    assert p_value(first, np.arange(2), np.array([1 - share, share])) < FALSE_ALARM


def moments_fit(
    sample: Integers, even: tuple[float, float, float, float], *, scale: float
) -> tuple[bool, bool]:
    """Do variance and kurtosis fit E x^2, x^4, x^6, x^8 (in units of the scale)?

    Both statistics are close to normal; the delta method gives their relative variances times n:
    m4/m2^2 - 1 for the variance, and m8/m4^2 - 4 m6/(m4 m2) + 4 m4/m2^2 - 1 for the kurtosis.
    """
    m2, m4, m6, m8 = even
    z = norm.isf(FALSE_ALARM / 2) / math.sqrt(len(sample))
    squares = (sample / scale) ** 2
    variance, fourth = squares.mean(), (squares**2).mean()
    bound = z * math.sqrt(m4 / m2**2 - 1)
    kurtosis_bound = z * math.sqrt(m8 / m4**2 - 4 * m6 / (m4 * m2) + 4 * m4 / m2**2 - 1)
    return (
        bool(abs(variance / m2 - 1) < bound),
        bool(abs(fourth / variance**2 / (m4 / m2**2) - 1) < kurtosis_bound),
    )


LAPLACE_MOMENTS = (2.0, 24.0, 720.0, 40320.0)
GAUSSIAN_MOMENTS = (1.0, 3.0, 15.0, 105.0)


@pytest.mark.parametrize("scale", [20_000, 10**6, 10**9, 1 << 34])
def test_laplace_moments_at_large_scales(scale: int):
    """Variance 2 scale^2 and kurtosis 6, where 64-bit arithmetic has overflowed before."""
    sample = discrete_laplace(fresh(f"moments laplace {scale}", 1_000_000), Fraction(scale))

    assert moments_fit(sample, LAPLACE_MOMENTS, scale=scale) == (True, True)
    assert moments_fit(sample, LAPLACE_MOMENTS, scale=scale * 1.03) == (False, True)
    # values that wrap or saturate lose their tails first
    assert not moments_fit(sample.clip(-7 * scale, 7 * scale), LAPLACE_MOMENTS, scale=scale)[1]


@pytest.mark.parametrize("sigma", [20_000, 10**6, 10**9, 1 << 34])
def test_gaussian_moments_at_large_scales(sigma: int):
    """Variance sigma^2 and kurtosis 3."""
    sample = discrete_gaussian(fresh(f"moments gaussian {sigma}", 1_000_000), Fraction(sigma) ** 2)

    assert moments_fit(sample, GAUSSIAN_MOMENTS, scale=sigma) == (True, True)
    assert moments_fit(sample, GAUSSIAN_MOMENTS, scale=sigma * 1.03) == (False, True)
    clipped = sample.clip(-2.5 * sigma, 2.5 * sigma)
    assert not moments_fit(clipped, GAUSSIAN_MOMENTS, scale=sigma)[1]


Sampler = Callable[[Draws, float], Integers]
SCALES = ["1/1000", "1/3", "7/2", "1000000", "1000000000", str(MAX_SCALE)]
SAMPLERS: dict[str, Sampler] = {
    **{
        f"laplace {s}": lambda draws, margin, s=s: discrete_laplace(
            draws, Fraction(s), margin=margin
        )
        for s in SCALES
    },
    **{
        f"gaussian {s}": lambda draws, margin, s=s: discrete_gaussian(
            draws, (Fraction(s) * Fraction(99, 100)) ** 2, margin=margin
        )
        for s in SCALES
    },
    **{
        f"weighted {r}": lambda draws, margin, r=r: weighted(
            draws, np.arange(2), Fraction(r), margin
        )
        for r in ["0", "1/1000", "1/3", "5", "1000000000000"]
    },
    "respond": lambda draws, margin: respond(
        draws, np.arange(draws.size) % 7, buckets=7, epsilon=Fraction(1, 3), margin=margin
    ),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_fast_and_exact_paths_agree_bit_for_bit(name: str):
    """The result is a function of the random bits, whichever arithmetic decided it."""
    fast = SAMPLERS[name](fresh(f"paths {name}", 300), MARGIN)
    exact = SAMPLERS[name](fresh(f"paths {name}", 300), ALWAYS_EXACT)

    np.testing.assert_array_equal(fast, exact)


def steps_from(which, candidates):
    """Gaps of draws that prefer 0, 1 or 2, each in turn."""
    return 3 * np.abs(candidates - which % 3)


def test_each_draw_chooses_by_its_own_gaps():
    """Against the exact pmf of each kind of draw; a slope that is 3% off is seen."""
    drawn = choose_each(fresh("choices", SAMPLES), 9, steps_from, Fraction(1, 7))
    for kind in range(3):
        mine = drawn[kind::3]
        for slope, right in ((Fraction(1, 7), True), (Fraction(1, 7) * OFF, False)):
            weights = np.exp(-steps_from(kind, np.arange(9)) * float(slope))
            assert (p_value(mine, np.arange(9), weights) > FALSE_ALARM) is right
    exact = choose_each(fresh("choices", 300), 9, steps_from, Fraction(1, 7), margin=ALWAYS_EXACT)
    assert exact.tolist() == drawn[:300].tolist()


def test_choices_agree_bit_for_bit():
    """Choosing by exact arithmetic gives the same candidates, huge rates included."""
    gaps, slope = np.array([1000, 0, 6000, 3000 << 50, 3]), Fraction(1, 3000)

    fast, exact = (
        [choose(fresh(f"choice {i}", 1), gaps, slope, margin=margin) for i in range(200)]
        for margin in (MARGIN, ALWAYS_EXACT)
    )

    assert fast == exact
    assert set(fast) == {0, 1, 2, 4}


class Scripted(Draws):
    """One draw whose first block and extensions are given; later attempts are unremarkable."""

    def __init__(self, first: tuple[int, int], extensions: Iterable[int]) -> None:
        super().__init__(fresh("scripted", 1).stream, 0, 1)
        self.first, self.extensions = first, list(extensions)
        self.asked: list[tuple[int, int]] = []

    def blocks(self, which: Integers, counters: Integers) -> npt.NDArray[np.uint64]:
        middle = (1 << 63) + 12346
        rows = [self.first if c == 0 else (middle, middle) for c in counters.tolist()]
        return np.array(rows, dtype=np.uint64)

    def extension(self, draw: int, attempt: int, lane: int, number: int) -> int:
        assert (draw, attempt) == (0, 0)
        self.asked.append((lane, number))
        return self.extensions[number - 1]


def straddling(bound: mpmath.mpf, bits: int) -> tuple[int, int, int]:
    """The word of `bits` bits that holds the bound in its interval, and the next 256 bits of it."""
    scaled = mpmath.floor(bound * mpmath.mpf(2) ** (bits + 256))
    value = int(scaled)
    return value >> 256, value >> 128 & (1 << 128) - 1, value & (1 << 128) - 1


@pytest.fixture(autouse=True)
def _precise():
    with mpmath.workdps(250):
        yield


def as_real(value: Fraction) -> mpmath.mpf:
    """The fraction, to the working precision."""
    return mpmath.mpf(value.numerator) / value.denominator


BOUNDARIES = [
    ("1/3", 1),
    ("7/2", 1),
    ("7/2", 20),
    ("1000000", 1),
    ("1000000", 700_001),
    ("1000000000", 3_999_999_999),
    (str(MAX_SCALE), 5),
    (str(MAX_SCALE), 6 * MAX_SCALE + 1),
]


@pytest.mark.parametrize(("scale", "k"), BOUNDARIES)
@pytest.mark.parametrize("sign", [0, 1])
def test_words_on_a_boundary_are_settled_by_further_bits(scale: str, k: int, sign: int):
    """A word whose interval holds exp(-k/scale) is k below it and k - 1 above it, never guessed."""
    exact = Fraction(scale)
    word, next_bits, last_bits = straddling(mpmath.exp(-k / as_real(exact)), 63)
    first = (word << 1 | sign, 0)
    words = np.array([first], dtype=np.uint64)
    status, values = np.empty(1, np.int8), np.empty(1, np.int64)
    exact_samplers.laplace_kernel(words, float(exact), MARGIN, status, values)
    assert status[0] == UNSURE

    def draw(*extensions: int) -> int:
        draws = Scripted(first, extensions)
        magnitude = abs(int(discrete_laplace(draws, exact)[0]))
        assert [number for _, number in draws.asked] == list(range(1, len(extensions) + 1))
        return magnitude

    assert draw(next_bits - 1) == draw(next_bits, last_bits - 1) == k
    if sign == 0 or k > 1:  # minus zero goes to the next attempt
        assert draw(next_bits + 1) == draw(next_bits, last_bits + 1) == k - 1


def below_exp(words: list[int], rate: Fraction, margin: float) -> list[int]:
    """What the float path says of U < exp(-rate), U in [word, word + 1) 2^-64."""
    status, values = np.empty(len(words), np.int8), np.empty(len(words), np.int64)
    blocks = np.array([[0, word] for word in words], dtype=np.uint64)
    rates = np.full(2, float(rate))
    exact_samplers.weighted_kernel(blocks, rates, np.uint64(0), margin, status, values)
    return status.tolist()


@pytest.mark.parametrize("rate", ["1/1000000", "1/3", "1", "17/2", "40"])
def test_comparisons_on_the_boundary(rate: str):
    """A word whose interval holds exp(-rate) is kept below it and rejected above it, by its
    further bits; the next attempt keeps the other candidate."""
    exact = Fraction(rate)
    word, next_bits, last_bits = straddling(mpmath.exp(-as_real(exact)), 64)
    assert below_exp([word], exact, MARGIN) == [UNSURE]

    def draw(*extensions: int) -> int:
        draws = Scripted((1, word), extensions)
        result = int(weighted(draws, np.arange(2), exact, MARGIN)[0])
        assert draws.asked == [(1, number) for number in range(1, len(extensions) + 1)]
        return result

    assert (draw(next_bits - 1), draw(next_bits + 1)) == (1, 0)
    assert (draw(next_bits, last_bits - 1), draw(next_bits, last_bits + 1)) == (1, 0)


@pytest.mark.parametrize("variance", ["9/4", "100", "1000000000001", str((MAX_SCALE - 1) ** 2)])
def test_gaussian_words_on_the_acceptance_boundary(variance: str):
    """The second comparison of the Gaussian is settled by further bits of its own lane."""
    exact = Fraction(variance)
    proposal = math.isqrt(math.floor(exact)) + 1
    k = proposal * 2 + 1
    # exp(-(k + 1/2)/t): safely inside the magnitude k
    word = int(mpmath.exp(-(k + mpmath.mpf(1) / 2) / proposal) * 2**63)
    rate = (as_real(Fraction(k)) - as_real(exact) / proposal) ** 2 / (2 * as_real(exact))
    second, next_bits, _ = straddling(mpmath.exp(-rate), 64)
    first = (word << 1, second)

    kept = int(discrete_gaussian(Scripted(first, [next_bits - 1]), exact)[0])
    dropped = int(discrete_gaussian(Scripted(first, [next_bits + 1]), exact)[0])

    assert kept == k
    assert dropped != k  # the next attempt's value


@pytest.mark.parametrize("small", [0, 1, 5, 1023, 1 << 20])
@pytest.mark.parametrize("scale", ["1/1000", "7/2", str(MAX_SCALE)])
def test_the_far_tail_is_exact_and_quick(small: int, scale: str):
    """A word next to zero says little about its logarithm: more bits are read, not more steps."""
    exact, bits = Fraction(scale), (1 << 127) + 12345
    drawn = int(discrete_laplace(Scripted((small << 1, 0), [bits, bits, bits]), exact)[0])
    u = mpmath.mpf(small << 128 | bits) / mpmath.mpf(2) ** 191
    u_next = mpmath.mpf((small << 128 | bits) + 1) / mpmath.mpf(2) ** 191

    assert mpmath.floor(-as_real(exact) * mpmath.log(u_next)) <= drawn
    assert drawn <= mpmath.floor(-as_real(exact) * mpmath.log(u))


def edge_words(bits: int) -> list[int]:
    """Random words, words at both ends, and words around each power of two."""
    rng = np.random.default_rng(1)
    top = (1 << bits) - 1
    words = [int(w) >> (64 - bits) for w in rng.integers(0, 1 << 64, 600, dtype=np.uint64)]
    words += [int(w) >> int(s) for w, s in zip(words, rng.integers(0, 62, 600), strict=False)]
    words += [*range(40), *range(1000, 1040), *range(top - 40, top + 1)]
    words += [(1 << p) + d for p in range(10, bits) for d in (-1, 0, 1)]
    return words


def wrong_magnitudes(scale: Fraction, margin: float) -> tuple[int, int]:
    """How many decided words, and how many of them differ from 60-digit arithmetic."""
    with mpmath.workdps(60):
        real = as_real(scale)
        near = [
            int(mpmath.exp(-(k / real)) * 2**63) + offset
            for k in (1, 2, 3, int(scale) + 1, int(7 * scale) + 1)
            for offset in (*range(-20, 21), *(s << p for p in range(6, 52) for s in (-1, 1)))
        ]
        uppers = [u for u in edge_words(63) + near if 0 <= u < 1 << 63]
        words = np.array([[u << 1, 0] for u in uppers], dtype=np.uint64)
        status, values = np.empty(len(words), np.int8), np.empty(len(words), np.int64)
        exact_samplers.laplace_kernel(words, float(scale), margin, status, values)
        decided = wrong = 0
        for u, state, value in zip(uppers, status.tolist(), values.tolist(), strict=True):
            if state == ACCEPTED:
                decided += 1
                ends = [mpmath.floor(-real * mpmath.log(mpmath.ldexp(w, -63))) for w in (u, u + 1)]
                # the upper end is open, so on an exact 1 the floor there is one low: never 0 here
                wrong += value != ends[0] or (value != ends[1] and u + 1 != 1 << 63)
        return decided, wrong


@pytest.mark.parametrize("scale", ["1/1000", "1/3", "7/2", "1000", "1000000", str(1 << 40)])
def test_decided_magnitudes_are_right(scale: str):
    """Whatever floor(-scale ln U) the float path decides, 60-digit arithmetic decides too."""
    decided, wrong = wrong_magnitudes(Fraction(scale), MARGIN)

    assert decided > 700
    assert wrong == 0


def test_magnitudes_without_margin_would_be_wrong():
    """Control: the words above do catch a float path that trusts its rounding."""
    assert sum(wrong_magnitudes(Fraction(s), 0.0)[1] for s in ("1/3", "7/2", "1000000")) > 0


def wrong_comparisons(rate: Fraction, margin: float) -> tuple[int, int]:
    """The same for U < exp(-rate)."""
    with mpmath.workdps(60):
        bound = mpmath.exp(-as_real(rate)) * mpmath.mpf(2) ** 64
        offsets = (*range(-20, 21), *(s << p for p in range(6, 52) for s in (-1, 1)))
        words = [w for w in edge_words(64) + [int(bound) + o for o in offsets] if 0 <= w < 1 << 64]
        right = {
            ACCEPTED: lambda w: w + 1 <= bound,
            REJECTED: lambda w: w >= bound,
        }
        sure = [
            (w, s)
            for w, s in zip(words, below_exp(words, rate, margin), strict=True)
            if s != UNSURE
        ]
        return len(sure), sum(not right[s](w) for w, s in sure)


@pytest.mark.parametrize("rate", ["1/1000000000", "1/3", "1", "10", "43", "45", "700", "1000000"])
def test_decided_comparisons_are_right(rate: str):
    """Whatever U < exp(-rate) the float path decides, 60-digit arithmetic decides too."""
    decided, wrong = wrong_comparisons(Fraction(rate), MARGIN)

    assert decided > 1000
    assert wrong == 0


def test_comparisons_without_margin_would_be_wrong():
    """Control: the words above do catch a float path that trusts its rounding."""
    assert sum(wrong_comparisons(Fraction(i, 7), 0.0)[1] for i in range(29, 56)) > 0


@pytest.mark.parametrize(
    "variance", ["1/1000", "1/3", "9/4", "1000000", "1000000000001/7", str(1 << 80)]
)
def test_decided_gaussians_are_right(variance: str):
    """Whatever the float path keeps or drops, 60-digit arithmetic keeps or drops too."""
    exact = Fraction(variance)
    proposal = math.isqrt(math.floor(exact)) + 1
    rng = np.random.default_rng(2)
    rows: list[tuple[int, int]] = []
    with mpmath.workdps(60):
        real, t = as_real(exact), mpmath.mpf(proposal)

        def bound(size: int) -> mpmath.mpf:
            return mpmath.exp(-((size - real / t) ** 2) / (2 * real)) * mpmath.mpf(2) ** 64

        for i, spread in itertools.product(range(60), (0.01, 1, 5, 30)):
            word = int(mpmath.exp(-spread * rng.random()) * 2**64)
            size = int(-t * mpmath.log(mpmath.mpf(word | 1) / 2**64))
            edge = int(bound(size)) + int(rng.integers(-1, 2)) * (1 << (i % 58))
            rows += [(word, int(w)) for w in rng.integers(0, 1 << 64, 5, dtype=np.uint64)]
            rows += [(word, min(max(edge, 0), (1 << 64) - 1))]
        words = np.array(rows, dtype=np.uint64)
        status, values = np.empty(len(rows), np.int8), np.empty(len(rows), np.int64)
        exact_samplers.gaussian_kernel(words, float(proposal), float(exact), MARGIN, status, values)
        decided = 0
        for (word, second), state, value in zip(rows, status, values, strict=True):
            size = int(mpmath.floor(-t * mpmath.log(mpmath.mpf(word >> 1) / 2**63)))
            if state == UNSURE:
                continue
            decided += 1
            if word & 1 and size == 0:
                assert state == REJECTED
                continue
            assert abs(int(value)) == size
            assert state == (ACCEPTED if second + 1 <= bound(size) else REJECTED)
            assert state == (REJECTED if second >= bound(size) else ACCEPTED)
    assert decided > 900


def test_huge_rates_are_decided_at_once():
    """exp(-rate) of a rate beyond 2^43 leaves float64's bound; it is still 0 in no time."""
    assert not weighted(fresh("huge rate", 100), np.arange(2), Fraction(1 << 62), MARGIN).any()
    assert choose(fresh("huge choice", 1), np.array([1 << 62, 0]), Fraction(1)) == 1


@pytest.mark.parametrize("scale", [Fraction(0), Fraction(-1), Fraction(MAX_SCALE + 1)])
def test_scales_out_of_range_are_refused(scale: Fraction):
    """A scale must be positive and at most 2^44."""
    with pytest.raises(InvalidParameter, match="noise scale must be positive and at most"):
        discrete_laplace(fresh("refused", 1), scale)


def test_other_parameters_out_of_range_are_refused():
    """Variance and candidates are checked before any block is read."""
    with pytest.raises(InvalidParameter, match="variance must be positive"):
        discrete_gaussian(fresh("refused", 1), Fraction(0))
    with pytest.raises(InvalidParameter, match="noise scale"):
        discrete_gaussian(fresh("refused", 1), Fraction(MAX_SCALE) ** 2)
    with pytest.raises(InvalidParameter, match="2 to 16384 candidates"):
        choose(fresh("refused", 1), np.array([0]), Fraction(1))
    for gaps, slope in ((np.array([1, 2]), Fraction(1)), (np.array([0, 2]), Fraction(-1))):
        with pytest.raises(InvalidParameter, match="must have gap 0"):
            choose(fresh("refused", 1), gaps, slope)
