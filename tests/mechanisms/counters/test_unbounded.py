"""The counter without a known end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dpstream.errors import InvalidParameter
from dpstream.mechanisms.counters.toeplitz import root_coefficients
from dpstream.mechanisms.counters.unbounded import UnboundedCounter
from tests.counting.matrices import dense_epochs, short_epochs

SHAPES = [
    UnboundedCounter(rho=0.5),
    UnboundedCounter(rho=0.5, epochs=short_epochs(2, 4, 8)),
    UnboundedCounter(rho=0.5, epochs=short_epochs(3, 24, share=0.5, buffers=1)),
]


@pytest.mark.parametrize("counter", SHAPES)
@pytest.mark.parametrize("steps", [1, 2, 3, 8, 9, 27, 72, 300])
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
    norms = np.linalg.norm(dense_epochs(SHAPES[1], 14)[1], axis=0)

    np.testing.assert_allclose(norms[[0, 2, 6]], 1.0, rtol=1e-12)


def test_close_to_the_best_fixed_counter_at_every_step() -> None:
    """The largest error so far: up to 600 steps at each, then between and around ends of epochs.

    Within an epoch errors grow, so none is larger than those that are looked at. Behind 2^20 steps
    the best counter's error follows its logarithm.
    """
    counter, steps = SHAPES[0], 2**20
    fixed = np.cumsum(root_coefficients(steps) ** 2)  # column norm * row norm for T = t
    ends = np.cumsum([2**8, 2**16, 2**26])
    between = np.geomspace(1, 2**40, 3000).astype(np.int64)
    looked = np.unique(np.concatenate([ends, ends - 1, ends + 1, between, range(1, 600)]))
    best = fixed[np.minimum(looked, steps) - 1] + np.log(np.maximum(looked / steps, 1)) / np.pi
    so_far = np.maximum.accumulate([counter.stddev(int(t)) for t in looked])

    assert (so_far / best).max() < 1.32


def test_budget_is_constant_without_end() -> None:
    """A billion steps: the error stays moderate."""
    assert SHAPES[0].stddev(10**9) < 15


@pytest.mark.parametrize(
    "wrong",
    [(), ((8, 1.0, 0.1, 0.5),), ((1, 0.3, 0.1, 0.5),), ((8, 0.3, 0.1),), ((8, 0.3, 0.5, 0.1),)],
)
def test_bad_epochs_are_refused(wrong: Any) -> None:
    """None at all, a share of all, one step, decays that do not pair or do not rise."""
    with pytest.raises(InvalidParameter, match=r"epochs|decays|buffers"):
        UnboundedCounter(rho=1, epochs=wrong)
