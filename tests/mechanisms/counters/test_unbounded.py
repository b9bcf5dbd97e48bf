"""The counter without a known end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dpstream.errors import InvalidParameter
from dpstream.mechanisms.counters.toeplitz import root_coefficients
from dpstream.mechanisms.counters.unbounded import UnboundedCounter
from tests.counting.matrices import dense_epochs

SHAPES = [
    UnboundedCounter(rho=0.5),
    UnboundedCounter(rho=0.5, first=2, growth=2),
    UnboundedCounter(rho=0.5, buffers=1, first=3, share=0.5),
]


@pytest.mark.parametrize("counter", SHAPES)
@pytest.mark.parametrize("steps", [1, 2, 3, 8, 9, 72, 100])
def test_factors_and_norms(counter: UnboundedCounter, steps: int) -> None:
    """B C = A, columns of C have norm at most 1, rows of B are the claimed deviations."""
    decoder, encoder = dense_epochs(counter, steps)

    np.testing.assert_allclose(decoder @ encoder, np.tri(steps), atol=1e-9)
    assert (encoder >= 0).all()
    assert np.linalg.norm(encoder, axis=0).max() <= 1 + 1e-12
    claimed = [counter.stddev(step) for step in range(1, steps + 1)]  # at rho = 1/2, sigma = 1
    np.testing.assert_allclose(claimed, np.linalg.norm(decoder, axis=1), rtol=1e-4)


def test_full_budget_is_used_once_an_epoch_is_over() -> None:
    """The first step of every closed epoch has column norm exactly 1."""
    norms = np.linalg.norm(dense_epochs(SHAPES[0], 72)[1], axis=0)

    np.testing.assert_allclose(norms[[0, 8]], 1.0, rtol=1e-12)


def test_within_a_factor_two_of_the_best_fixed_counter() -> None:
    """The largest error so far up to 2^20 steps: at powers of two, around ends of epochs, between.

    Within an epoch errors grow, so none is larger than those that are looked at.
    """
    counter, steps = SHAPES[0], 2**20
    fixed = np.cumsum(root_coefficients(steps) ** 2)  # column norm * row norm for T = t
    powers, ends = 2 ** np.arange(21), np.cumsum(8 ** np.arange(1, 7))
    between = np.geomspace(1, steps, 2000).astype(np.int64)
    looked = np.unique(np.concatenate([powers, ends, ends - 1, ends + 1, between, range(1, 600)]))
    so_far = np.maximum.accumulate([counter.stddev(int(t)) for t in looked])
    ratios = so_far / fixed[looked - 1]

    assert ratios[np.isin(looked, powers)].max() < 1.65
    assert ratios.max() < 1.75


def test_budget_is_constant_without_end() -> None:
    """A billion steps: the error stays moderate."""
    assert SHAPES[0].stddev(10**9) < 15


@pytest.mark.parametrize("wrong", [{"share": 1.0}, {"first": 1}, {"growth": 1}, {"buffers": 6}])
def test_bad_parameters_are_refused(wrong: dict[str, Any]) -> None:
    """Each parameter has its range."""
    with pytest.raises(InvalidParameter, match=next(iter(wrong))):
        UnboundedCounter(rho=1, **wrong)
