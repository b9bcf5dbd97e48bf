"""Every counter for a known number of steps, compared with its matrices written out."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpstream.counting.binary_tree import Honaker
from dpstream.counting.buffered import BufferedLinearToeplitz, LastTwice
from dpstream.counting.noise_process import NoiseProcess, late_normals, late_start
from dpstream.errors import InvalidParameter
from dpstream.mechanisms import find
from tests.counting.matrices import dense, noise_paths, row_norms
from tests.support.long import some_examples

PROCESSES: dict[str, Callable[..., Any]] = {
    "honaker": Honaker,
    "blt1": lambda steps: BufferedLinearToeplitz(steps=steps, buffers=1),
    "blt4": lambda steps: BufferedLinearToeplitz(steps=steps, buffers=4),
    "blt6": lambda steps: BufferedLinearToeplitz(steps=steps, buffers=6),
    "last_twice": lambda steps: LastTwice(
        process=BufferedLinearToeplitz(steps=steps), share=Fraction(1, 5)
    ),
}
"""What noise for many keys is streamed from, in floats."""

COUNTERS = ("naive_counter", "tree", "honaker", "smooth_binary", "toeplitz", "blt")
"""Mechanisms that measure and add up in integers."""

every_process = pytest.mark.parametrize("name", PROCESSES)
every_counter = pytest.mark.parametrize("name", COUNTERS)
some_steps = pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 13, 31, 32, 33, 70, 128])


def scheme(name: str, steps: int) -> Any:
    """A noise process, or a counter that costs rho = 1."""
    if name in PROCESSES and name != "honaker":
        return PROCESSES[name](steps=steps)
    return find(name)(rho=1, steps=steps)  # type: ignore[call-arg]


def streamed(process: Any) -> np.ndarray:
    """The square decoder that `advance` applies: column s is the answer to an impulse in z_s."""
    return noise_paths(process, np.eye(process.steps))


@pytest.mark.parametrize("name", sorted({*PROCESSES, *COUNTERS}))
@some_steps
def test_factors_multiply_to_prefix_sums(name: str, steps: int) -> None:
    """B C = A, and C has no negative entry."""
    decoder, encoder = dense(scheme(name, steps))

    np.testing.assert_allclose(decoder @ encoder, np.tri(steps), rtol=0, atol=1e-9)
    assert (encoder >= 0).all()


@every_process
@some_steps
def test_norms_are_those_of_the_dense_matrices(name: str, steps: int) -> None:
    """Closed-form error and sensitivity equal row norms of B and the largest column norm of C."""
    process = PROCESSES[name](steps=steps)
    decoder, encoder = dense(process)

    rows = np.linalg.norm(decoder, axis=1)
    np.testing.assert_allclose(process.error(), rows, rtol=1e-11)
    np.testing.assert_allclose(row_norms(process), rows, rtol=1e-11)
    columns = np.linalg.norm(encoder, axis=0)
    assert process.column_norm() == pytest.approx(columns.max(), rel=1e-12)
    assert columns[0] == pytest.approx(columns.max(), rel=1e-12)  # worst case: the first step


@every_counter
@some_steps
def test_norms_of_the_exact_counters_are_those_of_the_dense_matrices(name: str, steps: int) -> None:
    """So are those of the mechanisms; their encoders' norms are rounded up, by next to nothing."""
    counter = scheme(name, steps)
    decoder, encoder = dense(counter)
    columns = np.linalg.norm(encoder, axis=0)
    norm = float(counter.coder(24).norm())

    np.testing.assert_allclose(row_norms(counter), np.linalg.norm(decoder, axis=1), rtol=1e-11)
    assert norm == pytest.approx(columns.max(), rel=1e-6)
    assert norm >= columns.max() * (1 - 1e-6 * (name == "toeplitz"))  # coefficients rounded down


@every_counter
@some_steps
def test_integer_coders_apply_the_dense_matrices(name: str, steps: int) -> None:
    """Materialised by impulses: C x is measured, and decoded without noise it gives A x."""
    counter = scheme(name, steps)
    coder, (_, encoder) = counter.coder(24), dense(counter)
    state, measured, sums = coder.begin(steps), [], []
    for step in range(1, steps + 1):
        impulse = np.eye(steps, dtype=np.int64)[step - 1] << 10
        state, values = coder.encode(state, step, impulse)
        state, answer = coder.decode(state, step, values)
        measured.append(np.atleast_2d(values) / 2.0 ** (10 + coder.bits))
        sums.append(answer / 2**10)

    np.testing.assert_allclose(sums, np.tri(steps), atol=1e-5)
    rows = np.vstack(measured)
    assert np.linalg.norm(rows, axis=0).max() <= float(coder.norm()) * (1 + 1e-5)
    if name == "honaker":  # another order of the nodes
        rows, encoder = (np.unique(block, axis=0) for block in (rows, encoder))
    np.testing.assert_allclose(rows, encoder, atol=1e-5)


@every_process
@some_steps
def test_streamed_noise_has_the_law_of_the_dense_decoder(name: str, steps: int) -> None:
    """Covariance of the streamed noise path is B B^T, all steps jointly; the stream is causal."""
    process = PROCESSES[name](steps=steps)
    decoder, square = dense(process)[0], streamed(process)

    np.testing.assert_allclose(square @ square.T, decoder @ decoder.T, atol=1e-11)
    assert (np.triu(square, 1) == 0).all()
    if name not in ("honaker", "last_twice"):  # their dense decoders have more columns
        np.testing.assert_allclose(square, decoder, atol=1e-12)


@every_process
def test_kernel_equals_dense_multiplication_over_keys(name: str) -> None:
    """Many keys advance independently and in place."""
    process = PROCESSES[name](steps=45)
    z = np.random.default_rng(7).normal(size=(45, 6))

    np.testing.assert_allclose(noise_paths(process, z), streamed(process) @ z, atol=1e-11)


@every_process
@some_examples(40, of=4)
@given(data=st.data())
def test_late_state_has_the_covariance_of_single_steps(name: str, data: st.DataObject) -> None:
    """Who joins at a step draws from the law that single steps would have led to."""
    steps = data.draw(st.integers(1, 80))
    join = data.draw(st.integers(1, steps))
    process = PROCESSES[name](steps=steps)
    root = process.late_root(join)

    state = np.zeros((join, process.width))  # one key per normal
    for step in range(1, join + 1):
        process.advance(state, step, np.eye(join)[step - 1])
    np.testing.assert_allclose(root.T @ root, state.T @ state, rtol=1e-11, atol=1e-11)


@every_process
@pytest.mark.parametrize("join", [1, 2, 7, 24, 40])
def test_late_start_has_the_same_joint_law(name: str, join: int) -> None:
    """Noise from the joining step on has covariance (B B^T) of those steps."""
    process = PROCESSES[name](steps=40)
    head = late_normals(process, join)
    keys = head + 40 - join  # one key per impulse
    z = np.eye(keys)
    state, noise = late_start(process, join, z[:, :head])
    later = range(join + 1, 41)
    path = [noise, *(process.advance(state, t, z[:, head + t - join - 1]) for t in later)]
    late, decoder = np.array(path), dense(process)[0][join - 1 :]

    np.testing.assert_allclose(late @ late.T, decoder @ decoder.T, rtol=1e-11, atol=1e-11)


TARGETS = {
    "tree": (5.29, 7.42, 11.66),
    "honaker": (4.15, 5.65, 8.65),
    "smooth_binary": (3.46, 4.47, 6.93),
    "toeplitz": (1.846, 2.314, 3.345),
    "blt": (1.846, 2.314, 3.364),
}


@pytest.mark.parametrize("name", TARGETS)
def test_largest_errors_are_the_known_ones(name: str) -> None:
    """Largest standard deviation at rho = 1 for T = 128, 1024 and 10^5."""
    for steps, target in zip((128, 1024, 10**5), TARGETS[name], strict=True):
        counter = scheme(name, steps)
        last = range(max(1, steps - 40_000), steps + 1)
        worst = [steps] if name in ("toeplitz", "blt") else last  # whose errors grow
        assert max(counter.stddev(t) for t in worst) == pytest.approx(target, rel=1.2e-3)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True])
@every_process
def test_steps_must_be_a_positive_integer(name: str, wrong: Any) -> None:
    """Nonsense is refused at construction, with the value in the message."""
    with pytest.raises(InvalidParameter, match=f"steps .*got {wrong}"):
        PROCESSES[name](steps=wrong)


@every_process
def test_steps_beyond_the_end_are_refused(name: str) -> None:
    """Noise past T would not be covered by the sensitivity."""
    process = PROCESSES[name](steps=8)
    with pytest.raises(InvalidParameter, match="step must lie between 1 and 8; got 9"):
        process.advance(np.zeros((2, process.width)), 9, np.zeros(2))
    with pytest.raises(InvalidParameter, match="state must be"):
        process.advance(np.zeros((2, process.width)), 1, np.zeros(3))
    with pytest.raises(InvalidParameter, match="step must lie between 1 and 8; got 9"):
        process.late_root(9)


def test_every_process_keeps_the_protocol() -> None:
    """The type checker reads this list; at run time the state sizes are those promised."""
    blt = BufferedLinearToeplitz(steps=9)
    processes: list[NoiseProcess] = [
        Honaker(steps=9),
        blt,
        LastTwice(process=blt, share=Fraction(1, 5)),
    ]

    assert [process.width for process in processes] == [4, 5, 5]
