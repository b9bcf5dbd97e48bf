"""Normals from whole AES blocks: their precision, their law, their bytes."""

import hashlib
import math

import mpmath
import numpy as np
import pytest
from scipy.special import ndtri_exp

from dpstream.errors import NoiseReuse
from dpstream.privacy.noise import LARGEST, LOST, PRECISION, Address, Stream, normals
from dpstream.privacy.noise.normals import PIECES, _invert, table

Z = 4.9  # two-sided false-alarm rate below 1e-6


def stream(mode="vector", purpose="test"):
    return Stream(bytes(range(32)), Address(run=bytes(16), purpose=purpose), mode)


def inverted(tail_bits, negative=False):
    """The normal that a block with these 127 bits gives."""
    high, low = tail_bits >> 64, tail_bits & (2**64 - 1)
    words = np.array([[high << 1 | negative, low]], dtype=np.uint64)
    out = np.empty(1)
    _invert(words, table(), out)
    return float(out[0])


def exactly(tail_bits):
    """|z| with P[|normal| > |z|] = (tail_bits + 1/2) / 2^127, to 40 digits."""
    u = (mpmath.mpf(tail_bits) + mpmath.mpf(1) / 2) / mpmath.mpf(2) ** 127
    z = mpmath.mpf(float(-ndtri_exp(float(mpmath.log(u / 2)))))
    for _ in range(6):
        q = mpmath.erfc(z / mpmath.sqrt(2))
        z += mpmath.log(q / u) * q / (2 * mpmath.npdf(z))
    return z


def test_normals_are_within_their_precision():
    """In every region of the bell and its tail the error is below half of PRECISION."""
    rng = np.random.default_rng(0)
    worst = 0.0
    with mpmath.workdps(40):
        for zeros in (*range(12), 20, 40, 60, 75, 76):
            for _ in range(12):
                bits = (
                    1 << 126 | int(rng.integers(2**62)) << 64 | int(rng.integers(2**62))
                ) >> zeros
                worst = max(worst, abs(float(exactly(bits) - mpmath.mpf(inverted(bits)))))

    assert 2.0**-60 < worst < PRECISION / 2


def test_pieces_meet():
    """Neighbouring polynomials agree where they meet, to the last bits, over the whole table."""
    left, right = table().sum(axis=2), (table() * (-1.0) ** np.arange(9)).sum(axis=2)
    ends = np.concatenate([left[:, :-1].ravel(), left[1:, -1]])
    starts = np.concatenate([right[:, 1:].ravel(), right[:-1, 0]])

    np.testing.assert_allclose(ends, starts, rtol=0, atol=2 * PRECISION)
    assert table().shape == (128, PIECES, 9)


@pytest.mark.parametrize(
    ("bits", "size"), [(0, 13.0), (2**127 - 1, 0.0), (2**126, 0.6744897), (2**50 - 1, LARGEST)]
)
def test_the_ends_of_the_tail(bits, size):
    """No block fails: the smallest tail probability, the largest, and the border of LARGEST."""
    assert inverted(bits) == pytest.approx(size, abs=0.13 if bits < 2**60 else 1e-6)
    assert inverted(bits, negative=True) == -inverted(bits)


def test_the_border_of_precision_is_lost_with_its_probability():
    """Tails below LOST lie beyond every |z| that the analysis assumes, others within."""
    assert inverted(math.ceil(LOST * 2**127)) < LARGEST
    assert math.erfc(LARGEST / math.sqrt(2)) < LOST


@pytest.mark.parametrize(("off", "passes"), [(1.0, True), (1.02, False), (0.98, False)])
@pytest.mark.parametrize("mode", ["vector", "keyed"])
def test_the_law_is_standard_normal(mode, off, passes):
    """Mean, variance, fourth moment and tails at a 1e-6 level; a scale 2% off fails."""
    count = 60_000
    if mode == "vector":
        z = normals(stream().at(0, count), each=2).ravel() * off
    else:
        ids = np.arange(2 * count, dtype=np.uint64).reshape(-1, 2)
        z = normals(stream("keyed").at_keys(0, ids), each=2).ravel() * off
    scores = [
        z.mean() * math.sqrt(len(z)),
        ((z**2).mean() - 1) * math.sqrt(len(z) / 2),
        ((z**4).mean() - 3) * math.sqrt(len(z) / 96),
    ]
    for cut in (0.5, 1.0, 2.0, 3.0):
        chance = math.erfc(cut / math.sqrt(2))
        seen = (np.abs(z) > cut).mean()
        scores.append((seen - chance) / math.sqrt(chance * (1 - chance) / len(z)))

    assert (max(map(abs, scores)) < Z) == passes


def test_each_row_and_column_is_independent():
    """The normals of one key, and of two keys, are uncorrelated."""
    z = normals(stream().at(0, 40_000), each=3)
    correlation = (z.T @ z / len(z) - np.eye(3))[np.triu_indices(3, 1)]

    assert np.abs(correlation).max() * math.sqrt(len(z)) < Z
    assert abs((z[1:, 0] * z[:-1, 0]).mean()) * math.sqrt(len(z)) < Z


def test_the_bytes_are_pinned():
    """The same address gives the same bytes, on every platform and in every version."""
    z = normals(stream().at(7, 1000), each=2)
    digest = hashlib.sha256(z.astype("<f8").tobytes()).hexdigest()

    assert digest == "3442c91448ecb8341c6dd04891518c3c1cddf903ba078aa0b85e079671bbea17"


def test_draws_serve_one_sampler():
    """The same blocks never make two sets of normals."""
    draws = stream().at(0, 3)
    normals(draws)
    with pytest.raises(NoiseReuse):
        normals(draws)
