"""The counter without a known end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpstream.counting.factorisation import begin, late_normals, late_start, noise_paths
from dpstream.counting.growing_epochs import Unbounded
from dpstream.errors import InvalidParameter
from dpstream.mechanisms.counters.toeplitz import Toeplitz
from tests.support.long import some_examples

SHAPES = [Unbounded(), Unbounded(first=2, growth=2), Unbounded(buffers=1, first=3, share=0.5)]


@pytest.mark.parametrize("counter", SHAPES)
@pytest.mark.parametrize("steps", [1, 2, 3, 8, 9, 72, 100])
def test_factors_norms_and_stream(counter: Unbounded, steps: int) -> None:
    """B C = A, columns of C have norm at most 1, rows of B and the stream are as claimed."""
    decoder, encoder = counter.dense(steps)

    np.testing.assert_allclose(decoder @ encoder, np.tri(steps), atol=1e-9)
    assert (encoder >= 0).all()
    assert np.linalg.norm(encoder, axis=0).max() <= counter.column_norm() + 1e-12
    rows = np.linalg.norm(decoder, axis=1)
    np.testing.assert_allclose(counter.error(steps), rows, rtol=1e-11)
    np.testing.assert_allclose([counter.row_norm(t + 1) for t in range(steps)], rows, rtol=1e-11)
    np.testing.assert_allclose(noise_paths(counter, np.eye(steps)), decoder, atol=1e-11)


def test_full_budget_is_used_once_an_epoch_is_over() -> None:
    """The first step of every closed epoch has column norm exactly 1."""
    norms = np.linalg.norm(Unbounded().dense(72)[1], axis=0)

    np.testing.assert_allclose(norms[[0, 8]], 1.0, rtol=1e-12)


@pytest.mark.parametrize("counter", SHAPES)
@some_examples(40, of=4)
@given(stop=st.integers(0, 90), back=st.integers(0, 90))
def test_jump_equals_single_steps(counter: Unbounded, stop: int, back: int) -> None:
    """Jumps within, to the end of, and across epochs."""
    start = max(0, stop - back)
    transition, root = counter.jump(start, stop)
    state = begin(counter, stop)
    at_start = state.copy()
    for step in range(1, stop + 1):
        counter.advance(state, step, np.eye(stop)[step - 1])
        if step == start:
            at_start = state.copy()

    np.testing.assert_allclose(at_start[:start] @ transition, state[:start], atol=1e-10)
    np.testing.assert_allclose(root.T @ root, state[start:].T @ state[start:], atol=1e-10)
    np.testing.assert_allclose(counter.covariance(stop), state.T @ state, atol=1e-10)


@pytest.mark.parametrize("join", [1, 7, 8, 9, 20, 72, 73])
def test_late_start_carries_closed_epochs(join: int) -> None:
    """Joint law of the noise from the joining step on, closed epochs included."""
    counter, last = Unbounded(), 80
    head = late_normals(counter, join)
    z = np.eye(head + last - join)
    state, noise = late_start(counter, join, z[:, :head])
    later = range(join + 1, last + 1)
    path = [noise, *(counter.advance(state, t, z[:, head + t - join - 1]) for t in later)]
    late, decoder = np.array(path), counter.dense(last)[0][join - 1 :]

    np.testing.assert_allclose(late @ late.T, decoder @ decoder.T, rtol=1e-10, atol=1e-10)


def test_within_a_factor_two_of_the_best_fixed_counter() -> None:
    """At every power of two up to 2^20, the largest error so far, and at every single step."""
    steps = 2**20
    errors = Unbounded().error(steps)
    fixed = Toeplitz(steps=steps).error() ** 2  # column norm * row norm for T = t
    so_far = np.maximum.accumulate(errors)
    ratios = [so_far[2**k - 1] / fixed[2**k - 1] for k in range(21)]

    assert max(ratios) < 1.65
    assert (so_far / fixed).max() < 1.75


def test_budget_is_constant_without_end() -> None:
    """A billion steps: the sensitivity stays 1, the state 6 floats, the error moderate."""
    counter = Unbounded()
    counter.advance(begin(counter, 2), 10**9, np.ones(2))

    assert counter.column_norm() == 1.0
    assert counter.width == 6
    assert counter.row_norm(10**9) < 15


@pytest.mark.parametrize("wrong", [{"share": 1.0}, {"first": 1}, {"growth": 1}, {"buffers": 6}])
def test_bad_parameters_are_refused(wrong: dict[str, int]) -> None:
    """Each parameter has its range."""
    with pytest.raises(InvalidParameter, match=next(iter(wrong))):
        Unbounded(**wrong)
