import math

import numpy as np
import pytest

from dpstream.errors import InvalidParameter
from dpstream.mechanisms.parts.counting.buffered import BufferedLinearToeplitz
from dpstream.mechanisms.parts.counting.float_error import float_error
from dpstream.mechanisms.parts.counting.last_table import LastTable
from dpstream.mechanisms.parts.counting.strategy import begin, late_normals, late_start
from dpstream.stages.plan import planned
from dpstream.stages.query import Query

CASES = [(2, 0.1), (7, 0.5), (24, 0.25), (100, 0.1), (100, 0.9)]


@pytest.mark.parametrize(("steps", "share"), CASES)
def test_it_is_a_factorisation(steps, share):
    """B C = A, and the norms are those of the matrices."""
    process = LastTable(steps=steps, share=share)
    decoder, encoder = process.dense()
    assert np.allclose(decoder @ encoder, np.tril(np.ones((steps, steps))), atol=1e-9)
    assert process.column_norm() == pytest.approx(np.linalg.norm(encoder, axis=0).max(), rel=1e-9)
    assert process.error() == pytest.approx(np.linalg.norm(decoder, axis=1), rel=1e-9)
    assert process.row_norm(steps) == pytest.approx(process.error()[-1], rel=1e-12)
    change = np.random.default_rng(0).normal(size=steps)
    assert process.encode(change) == pytest.approx(encoder @ change, abs=1e-9)
    assert math.isclose(process.extra / process.column_norm() ** 2, share, rel_tol=1e-9)


@pytest.mark.parametrize(("steps", "share"), CASES)
def test_streamed_noise_has_the_law_of_the_matrix(steps, share):
    """The linear map from normals to noise has the covariance B B^T, to float accuracy."""
    process = LastTable(steps=steps, share=share)
    state, rows = begin(process, steps), []
    for step in range(1, steps + 1):  # key k gets a 1 at step k: column k of the map
        z = np.zeros(steps)
        z[step - 1] = 1.0
        rows.append(process.advance(state, step, z))
    streamed, decoder = np.array(rows), process.dense()[0]
    assert np.allclose(streamed @ streamed.T, decoder @ decoder.T, atol=1e-9)


@pytest.mark.parametrize("joining", [1, 12, 23, 24])
def test_joining_late_changes_nothing(joining):
    """From the step of joining on the covariance is that of a stream begun at step 1."""
    process = LastTable(steps=24, share=0.25)
    count = late_normals(process, joining)
    keys = count + process.steps - joining
    first = np.zeros((keys, count))
    first[:count] = np.eye(count)
    state, noise = late_start(process, joining, first)
    rows = [noise]
    for number, step in enumerate(range(joining + 1, process.steps + 1)):
        z = np.zeros(keys)
        z[count + number] = 1.0
        rows.append(process.advance(state, step, z))
    decoder = process.dense()[0][joining - 1 :]
    assert np.allclose(np.array(rows) @ np.array(rows).T, decoder @ decoder.T, atol=1e-9)


def test_what_it_buys_and_costs():
    """A quarter of the budget: a third less noise at the end, 15% more before."""
    plain, last = BufferedLinearToeplitz(steps=100), LastTable(steps=100, share=0.25)
    ratio = last.error() * last.column_norm() / (plain.error() * plain.column_norm())
    assert ratio[:-1] == pytest.approx(1 / math.sqrt(0.75))
    assert 0.6 < ratio[-1] < 0.67


def test_float_error_is_counted():
    """Floats err more with the extra step, and a little spread at the end counts more."""
    plain = float_error(BufferedLinearToeplitz(steps=100), sigma=10.0, quantum=1.0)
    last = float_error(LastTable(steps=100, share=0.25), sigma=10.0, quantum=1.0)
    assert plain.xi < last.xi < 3 * plain.xi


@pytest.mark.parametrize("share", [0, 1, 1.5])
def test_shares_are_shares(share):
    """Nothing and everything are no shares."""
    with pytest.raises(InvalidParameter):
        LastTable(steps=10, share=share)


def test_queries_have_it():
    """The plan's noise and threshold fall at the last release alone, if there are several."""
    known = {"unit": "u", "keys": ["k"], "epsilon": 1, "delta": 1e-9, "max_groups_contributed": 4}
    days = {"time": "t", "start": "2024-01-01", "end": "2024-01-02"}
    plain = planned(Query(**known, **days, every="1 hour")).window(24)
    last = planned(Query(**known, **days, every="1 hour", last_budget=0.25)).window(24)
    assert last.stddevs[0, -1] < 0.75 * plain.stddevs[0, -1]
    assert (last.stddevs[0, :-1] > plain.stddevs[0, :-1]).all()
    assert last.thresholds[-1] < 0.75 * plain.thresholds[-1]
    once = planned(Query(**known, last_budget=0.25)).window(1)
    assert once.stddevs[0, 0] == planned(Query(**known)).window(1).stddevs[0, 0]
    with pytest.raises(InvalidParameter, match="latched"):
        Query(**known, last_budget=0.25, strategy="sqlp")
