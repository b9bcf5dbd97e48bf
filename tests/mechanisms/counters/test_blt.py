"""Buffered linear Toeplitz: parameters, exact norms, float error."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest

from dpstream.counting.buffered import (
    BufferedLinearToeplitz,
    decays_for,
    gram,
    optimise,
    round_decays,
    shipped_decays,
)
from dpstream.errors import InvalidParameter
from dpstream.mechanisms.counters.toeplitz import ToeplitzCounter, root_coefficients
from tests.counting.matrices import encoder_coefficients


def largest(counter: BufferedLinearToeplitz) -> float:
    """Largest standard deviation at rho = 1."""
    return counter.column_norm() * counter.row_norm(counter.steps) / 2**0.5


def exact_coefficients(counter: BufferedLinearToeplitz, count: int) -> list[Fraction]:
    """C's first column by the recurrence of its generating function, in rationals."""
    poles = [1 - Fraction(decay) for decay in counter.decays]
    top, bottom = [Fraction(1)], [Fraction(1)]
    for index, pole in enumerate(poles):
        target = bottom if index % 2 == 0 else top
        target[:] = [
            (target[i] if i < len(target) else Fraction(0)) - (pole * target[i - 1] if i else 0)
            for i in range(len(target) + 1)
        ]
    column: list[Fraction] = []
    for i in range(count):
        value = top[i] if i < len(top) else Fraction(0)
        value -= sum(bottom[j] * column[i - j] for j in range(1, min(i, len(bottom) - 1) + 1))
        column.append(value)
    return column


@pytest.mark.parametrize("buffers", [1, 3, 6])
def test_column_norm_is_the_true_one(buffers: int) -> None:
    """The closed form equals exact rational arithmetic to 2e-14."""
    counter = BufferedLinearToeplitz(steps=60, buffers=buffers)
    squares = sum(value * value for value in exact_coefficients(counter, 60))

    assert counter.column_norm() ** 2 == pytest.approx(float(squares), rel=2e-14)


def test_column_norm_at_a_million_steps() -> None:
    """The closed form equals the sum over a million coefficients."""
    counter = BufferedLinearToeplitz(steps=10**6, buffers=4)
    direct = np.linalg.norm(encoder_coefficients(counter, 10**6))

    assert counter.column_norm() == pytest.approx(direct, rel=1e-12)


def test_closed_form_covariance_equals_long_streams() -> None:
    """After 5,000 steps the covariance and row norms still equal the summed outer products."""
    counter = BufferedLinearToeplitz(steps=5000, buffers=3)
    factors = (1 - counter.mode_decays)[None, :] ** np.arange(5000)[:, None]

    np.testing.assert_allclose(gram(counter.mode_decays, 5000), factors.T @ factors, rtol=1e-11)
    root = counter.late_root(5000)
    np.testing.assert_allclose(root.T @ root, factors.T @ factors, rtol=1e-12)
    assert root.shape == (4, 4)


@pytest.mark.parametrize("buffers", range(1, 7))
def test_more_buffers_are_never_worse(buffers: int) -> None:
    """State is at most 7 floats, weights are positive, error falls with the buffers."""
    for steps in (16, 1024, 10**6):
        counter = BufferedLinearToeplitz(steps=steps, buffers=buffers)
        assert counter.width == buffers + 1 <= 7
        assert (counter.weights > 0).all()
        assert counter.weights.sum() == pytest.approx(1)
        if buffers > 1:
            fewer = BufferedLinearToeplitz(steps=steps, buffers=buffers - 1)
            assert largest(counter) <= largest(fewer) * 1.001


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 9, 17, 128, 777, 12345, 10**5, 10**6])
def test_any_number_of_steps_is_near_the_square_root(steps: int) -> None:
    """Four buffers come within 2% of the sqrt-Toeplitz counter up to a million steps."""
    root = ToeplitzCounter(rho=1, steps=steps)

    assert largest(BufferedLinearToeplitz(steps=steps)) <= 1.02 * root.stddev(steps)


def test_required_errors() -> None:
    """Largest standard deviation of four buffers at rho = 1."""
    for steps, bound in ((128, 1.85), (1024, 2.32), (10**5, 3.37)):
        assert largest(BufferedLinearToeplitz(steps=steps, buffers=4)) <= bound


def test_table_is_what_the_optimiser_finds() -> None:
    """Shipped parameters are complete and as good as freshly optimised ones."""
    steps = sorted({int(key.partition("/")[0]) for key in shipped_decays()})
    assert set(shipped_decays()) == {
        f"{count}/{buffers}" for count in steps for buffers in range(1, 7)
    }
    assert {2**k for k in range(3, 31)} | {10**k for k in range(8)} | {365, 1440, 86400} <= {*steps}
    for steps, buffers in ((8, 1), (365, 4), (2**20, 3), (2**30, 6)):
        fresh = BufferedLinearToeplitz(
            steps=steps, buffers=buffers, decays=optimise(steps, buffers)
        )
        shipped = BufferedLinearToeplitz(steps=steps, buffers=buffers)
        assert largest(shipped) == pytest.approx(largest(fresh), rel=1e-6)
    assert decays_for(365, 4) == tuple(json.loads(json.dumps(shipped_decays()["365/4"])))


def test_decays_make_exact_factors() -> None:
    """1 - decay is a float without rounding, so the streamed matrix is the analysed one."""
    decays = round_decays(np.array([1e-12, 1e-5, 0.3, 0.77, 1.0]))
    for decay in decays:
        assert Fraction(1.0 - decay) == 1 - Fraction(decay)


@pytest.mark.parametrize("decays", [(0.1,), (0.2, 0.1), (0.0, 0.5), (0.5, 1.5), (0.1, np.nan)])
def test_bad_decays_are_refused(decays: tuple[float, ...]) -> None:
    """Parameters that break the interlacing have no positive weights."""
    with pytest.raises(InvalidParameter, match="increasing numbers"):
        BufferedLinearToeplitz(steps=4, buffers=1, decays=decays)


def test_square_root_coefficients_are_exact() -> None:
    """binomial(2i, i) / 4^i, also where the series takes over."""
    exactly, value = [], Fraction(1)
    for i in range(1, 400):
        exactly.append(float(value))
        value *= Fraction(2 * i - 1, 2 * i)

    np.testing.assert_allclose(root_coefficients(399), exactly, rtol=3e-14)
