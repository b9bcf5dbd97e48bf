"""Every fixed-T counter, materialised and compared with the dense matrices."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpstream.counting.binary_tree import Honaker
from dpstream.counting.buffered import BufferedLinearToeplitz
from dpstream.counting.factorisation import (
    NoiseProcess,
    Strategy,
    begin,
    late_normals,
    late_start,
    noise_paths,
    sensitivity,
    standard_deviation,
)
from dpstream.counting.growing_epochs import Unbounded
from dpstream.counting.last_twice import LastTwice
from dpstream.errors import InvalidParameter
from dpstream.mechanisms.counters.naive_counter import NaiveStrategy
from dpstream.mechanisms.counters.smooth_binary import SmoothBinary
from dpstream.mechanisms.counters.toeplitz import Toeplitz
from dpstream.mechanisms.counters.tree_counter import Tree
from tests.support.long import some_examples

COUNTERS: dict[str, Callable[..., Any]] = {
    "naive": NaiveStrategy,
    "tree": Tree,
    "honaker": Honaker,
    "smooth_binary": SmoothBinary,
    "toeplitz": Toeplitz,
    "blt1": lambda steps: BufferedLinearToeplitz(steps=steps, buffers=1),
    "blt4": lambda steps: BufferedLinearToeplitz(steps=steps, buffers=4),
    "blt6": lambda steps: BufferedLinearToeplitz(steps=steps, buffers=6),
    "last_twice": lambda steps: LastTwice(
        process=BufferedLinearToeplitz(steps=steps), share=Fraction(1, 5)
    ),
}
every_counter = pytest.mark.parametrize("name", COUNTERS)
some_steps = pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 13, 31, 32, 33, 70, 128])


def streamed(counter: Strategy) -> np.ndarray:
    """The square decoder that `advance` applies: column s is the answer to an impulse in z_s."""
    return noise_paths(counter, np.eye(counter.steps))


@every_counter
@some_steps
def test_factors_multiply_to_prefix_sums(name: str, steps: int) -> None:
    """B C = A, and C has no negative entry."""
    decoder, encoder = COUNTERS[name](steps=steps).dense()

    np.testing.assert_allclose(decoder @ encoder, np.tri(steps), rtol=0, atol=1e-9)
    assert (encoder >= 0).all()


@every_counter
@some_steps
def test_norms_are_those_of_the_dense_matrices(name: str, steps: int) -> None:
    """Closed-form error and sensitivity equal row norms of B and the largest column norm of C."""
    counter = COUNTERS[name](steps=steps)
    decoder, encoder = counter.dense()
    rows = np.linalg.norm(decoder, axis=1)

    np.testing.assert_allclose(counter.error(), rows, rtol=1e-11)
    np.testing.assert_allclose([counter.row_norm(t + 1) for t in range(steps)], rows, rtol=1e-11)
    columns = np.linalg.norm(encoder, axis=0)
    assert counter.column_norm() == pytest.approx(columns.max(), rel=1e-12)
    assert columns[0] == pytest.approx(columns.max(), rel=1e-12)  # worst case: the first step


@every_counter
@some_steps
def test_streamed_noise_has_the_law_of_the_dense_decoder(name: str, steps: int) -> None:
    """Covariance of the streamed noise path is B B^T, all steps jointly; the stream is causal."""
    counter = COUNTERS[name](steps=steps)
    decoder, square = counter.dense()[0], streamed(counter)

    np.testing.assert_allclose(square @ square.T, decoder @ decoder.T, atol=1e-11)
    assert (np.triu(square, 1) == 0).all()
    if name not in ("honaker", "last_twice"):  # their dense decoders have more columns
        np.testing.assert_allclose(square, decoder, atol=1e-12)


@every_counter
def test_kernel_equals_dense_multiplication_over_keys(name: str) -> None:
    """Many keys advance independently and in place."""
    counter = COUNTERS[name](steps=45)
    z = np.random.default_rng(7).normal(size=(45, 6))

    np.testing.assert_allclose(noise_paths(counter, z), streamed(counter) @ z, atol=1e-11)


@every_counter
@some_examples(40, of=4)
@given(data=st.data())
def test_jump_equals_single_steps(name: str, data: st.DataObject) -> None:
    """Transition and increment covariance of s -> t equal the product of single steps."""
    steps = data.draw(st.integers(1, 80))
    stop = data.draw(st.integers(0, steps))
    start = data.draw(st.integers(0, stop))
    counter = COUNTERS[name](steps=steps)
    transition, root = counter.jump(start, stop)

    # normals 0..start make the state at start, the later ones the increment
    state = begin(counter, stop)
    at_start = state.copy()
    for step in range(1, stop + 1):
        counter.advance(state, step, np.eye(stop)[step - 1])
        if step == start:
            at_start = state.copy()
    np.testing.assert_allclose(at_start[:start] @ transition, state[:start], atol=1e-11)
    increment = state[start:].T @ state[start:]
    np.testing.assert_allclose(root.T @ root, increment, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(counter.covariance(stop), state.T @ state, rtol=1e-11, atol=1e-11)


@every_counter
@pytest.mark.parametrize("join", [1, 2, 7, 24, 40])
def test_late_start_has_the_same_joint_law(name: str, join: int) -> None:
    """Noise from the joining step on has covariance (B B^T) of those steps."""
    counter = COUNTERS[name](steps=40)
    head = late_normals(counter, join)
    keys = head + 40 - join  # one key per impulse
    z = np.eye(keys)
    state, noise = late_start(counter, join, z[:, :head])
    later = range(join + 1, 41)
    path = [noise, *(counter.advance(state, t, z[:, head + t - join - 1]) for t in later)]
    late, decoder = np.array(path), counter.dense()[0][join - 1 :]

    np.testing.assert_allclose(late @ late.T, decoder @ decoder.T, rtol=1e-11, atol=1e-11)


@every_counter
@some_examples(25, of=4)
@given(data=st.data())
def test_sensitivity_of_a_set_of_changes(name: str, data: st.DataObject) -> None:
    """||C delta|| is the dense one, grows when signs agree, and never passes sum |delta| * norm."""
    steps = data.draw(st.integers(1, 40))
    values = data.draw(st.lists(st.integers(-3, 3), min_size=steps, max_size=steps))
    counter = COUNTERS[name](steps=steps)
    changes = np.array(values, dtype=float)
    exact = float(np.linalg.norm(counter.dense()[1] @ changes))

    assert sensitivity(counter, changes) == pytest.approx(exact, abs=1e-10)
    assert exact <= sensitivity(counter, np.abs(changes)) + 1e-9
    assert exact <= np.abs(changes).sum() * counter.column_norm() + 1e-9


TARGETS = {
    "tree": (5.29, 7.42, 11.66),
    "honaker": (4.15, 5.65, 8.65),
    "smooth_binary": (3.46, 4.47, 6.93),
    "toeplitz": (1.846, 2.314, 3.345),
    "blt4": (1.846, 2.314, 3.364),
}


@pytest.mark.parametrize("name", TARGETS)
def test_largest_errors_are_the_known_ones(name: str) -> None:
    """Largest standard deviation at rho = 1 for T = 128, 1024 and 10^5."""
    for steps, target in zip((128, 1024, 10**5), TARGETS[name], strict=True):
        largest = standard_deviation(COUNTERS[name](steps=steps), rho=1.0).max()
        assert largest == pytest.approx(target, rel=1.2e-3)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6, 8, 11, 16, 23, 64, 100])
def test_honaker_prefix_sums_alone_are_less_sensitive(steps: int) -> None:
    """The norm for published prefix sums is the largest column norm of B'^-1 A."""
    counter = Honaker(steps=steps)
    columns = np.linalg.norm(np.linalg.solve(streamed(counter), np.tri(steps)), axis=0)

    assert counter.released_norm() == pytest.approx(columns.max(), rel=1e-10)
    assert counter.released_norm() <= counter.column_norm()


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True])
@every_counter
def test_steps_must_be_a_positive_integer(name: str, wrong: Any) -> None:
    """Nonsense is refused at construction, with the value in the message."""
    with pytest.raises(InvalidParameter, match=f"steps .*got {wrong}"):
        COUNTERS[name](steps=wrong)


@every_counter
def test_steps_beyond_the_end_are_refused(name: str) -> None:
    """Noise past T would not be covered by the sensitivity."""
    counter = COUNTERS[name](steps=8)
    with pytest.raises(InvalidParameter, match="step must lie between 1 and 8; got 9"):
        counter.advance(begin(counter, 2), 9, np.zeros(2))
    with pytest.raises(InvalidParameter, match="state must be"):
        counter.advance(begin(counter, 2), 1, np.zeros(3))
    with pytest.raises(InvalidParameter, match="stop"):
        counter.jump(0, 9)
    with pytest.raises(InvalidParameter, match="start"):
        counter.jump(5, 4)


def test_every_counter_keeps_the_protocol() -> None:
    """The type checker reads this list; at run time the state sizes are those promised."""
    counters: list[Strategy] = [
        NaiveStrategy(steps=9),
        Tree(steps=9),
        Honaker(steps=9),
        SmoothBinary(steps=9),
        Toeplitz(steps=9),
        BufferedLinearToeplitz(steps=9),
    ]
    endless: NoiseProcess = Unbounded()

    assert [counter.width for counter in (*counters, endless)] == [1, 4, 4, 5, 9, 5, 6]
