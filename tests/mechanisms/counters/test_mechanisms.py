"""Counters as mechanisms: what they measure, what they publish, what they refuse."""

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import chi2

import dpstream as dps
from dpstream.audit.replay import record, replay
from dpstream.errors import BudgetExceeded, InvalidInput, InvalidParameter
from dpstream.mechanisms import find
from dpstream.mechanisms.counters.unbounded import UnboundedCounter
from dpstream.privacy.accounting.calibration import rho_for
from tests.counting.matrices import dense, dense_epochs, short_epochs
from tests.support.long import is_long

FIXED = ["naive_counter", "tree", "honaker", "smooth_binary", "toeplitz", "blt"]
EVERY = [*FIXED, "unbounded_counter"]
every_counter = pytest.mark.parametrize("name", EVERY)
RUN, SECRET = bytes(16), bytes(32)
FALSE_ALARM = 1e-6


def counter(name, steps=40, **more):
    """A small counter; the epochs of the unbounded one end at steps 4, 12 and 28."""
    budget = more if {"rho", "epsilon"} & set(more) else {"rho": 2} | more
    if name == "unbounded_counter":
        return UnboundedCounter(epochs=short_epochs(4, 8, 16), **budget)
    return find(name)(steps=steps, **budget)


def covariance(mechanism, steps):
    """B B^T of the scheme, at the mechanism's own noise."""
    if not isinstance(mechanism, UnboundedCounter):
        decoder = dense(mechanism)[0][:steps]
        product = decoder @ decoder.T
        return product * mechanism.stddev(steps) ** 2 / product[-1, -1]
    decoder = dense_epochs(mechanism, steps)[0]
    return decoder @ decoder.T / (2 * float(mechanism.budget))


@every_counter
@pytest.mark.parametrize(("off", "passes"), [(1.0, True), (1.2, False), (0.8, False)])
def test_errors_have_the_claimed_joint_law(name, off, passes):
    """Whitened by the claimed covariance, the errors of many bins are independent normals.

    A noise scale 20% off, or the same variances without the correlations, fails.
    """
    steps, bins = 30, 60
    mechanism = counter(name)
    data = np.random.default_rng(0).poisson(30, (steps, bins))
    series = dps.release(mechanism, data, secret=SECRET, run_id=RUN)
    errors = (series.values - data.cumsum(axis=0)) * off
    claimed = covariance(mechanism, steps)
    white = np.linalg.solve(np.linalg.cholesky(claimed), errors)
    total = (white**2).sum()
    inside = (
        chi2.isf(1 - FALSE_ALARM / 2, white.size) < total < chi2.isf(FALSE_ALARM / 2, white.size)
    )
    lagged = (white[1:] * white[:-1]).mean() * math.sqrt(white[1:].size)

    assert inside == passes
    assert abs(lagged) < 5.5 or not passes
    np.testing.assert_allclose(series.stddev[:, 0], np.sqrt(np.diag(claimed)), rtol=1e-4)


@every_counter
def test_the_joint_law_test_sees_missing_correlations(name):
    """Control: fresh noise of the right size at every step is told from the counter's."""
    steps, bins = 30, 60
    claimed = covariance(counter(name), steps)
    fresh = np.random.default_rng(1).normal(size=(steps, bins)) * np.sqrt(np.diag(claimed))[:, None]
    white = np.linalg.solve(np.linalg.cholesky(claimed), fresh)

    assert (white**2).sum() > chi2.isf(FALSE_ALARM / 2, white.size)


@every_counter
@pytest.mark.parametrize("rho", [Fraction(2), Fraction(1, 10**6), Fraction(10**9)])
def test_an_event_at_any_step_costs_at_most_rho(name, rho):
    """The squared changes of everything measured, over their noise; the worst step comes close."""
    mechanism = counter(name, rho=rho)
    data = np.random.default_rng(0).poisson(30, (40, 1))
    calls, _ = record(mechanism, data, secret=SECRET, run=RUN)
    losses = []
    for step in range(0, 40, 1 if is_long() else 3):
        other = data.copy()
        other[step] += 1 if step % 2 else -1
        result = replay(mechanism, other, calls)
        assert result.violations == []
        losses.append(result.loss)

    assert max(losses) <= rho
    worst = {"tree": 5 / 6, "honaker": 5 / 6}.get(name, 0.99)  # 40 < 64: no node of the last level
    assert max(losses) >= rho * Fraction(worst) * Fraction(99, 100) or rho < 1


@every_counter
def test_sums_are_exact_but_for_the_noise(name):
    """With almost no noise, large and negative sums come back."""
    mechanism = counter(name, rho=10**11, sensitivity=5, quantum="0.5")
    data = np.random.default_rng(0).integers(-(10**6), 10**6, (40, 2)) / 2
    series = dps.release(mechanism, data)

    np.testing.assert_allclose(series.values, data.cumsum(axis=0), rtol=0, atol=0.02)


@every_counter
def test_one_cover_per_stream_or_epoch(name, tmp_path):
    """The ledger holds rho once for every step, whatever the number of draws."""
    ledger = dps.Ledger(tmp_path / "ledger")
    dps.release(counter(name), [[1]] * 40, ledger=ledger)
    lines = {line["purpose"]: line for line in ledger.report()[0]["spent_on"]}

    assert lines["cover"]["charges"] == (4 if name == "unbounded_counter" else 1)
    assert lines["count"]["amount"] == "0"
    assert [ledger.left("stream", step) for step in (0, 3, 4, 39)] == [0, 0, 0, 0]
    with pytest.raises(BudgetExceeded):
        dps.release(counter(name), [[1]], ledger=ledger, name="again")


def test_epsilon_and_delta_buy_their_rho():
    """The two ways to name a budget meet."""
    mechanism = counter("blt", epsilon=1, delta=1e-9)

    assert mechanism.budget <= rho_for(epsilon=1, delta=1e-9)
    assert mechanism.terms().measure == "rho"
    assert mechanism.stddev(40) == pytest.approx(counter("blt", rho=mechanism.budget).stddev(40))


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({}, "rho, or epsilon and delta"),
        ({"epsilon": 1}, "rho, or epsilon and delta"),
        ({"rho": 1, "epsilon": 1, "delta": 1e-6}, "not both ways"),
        ({"rho": 0}, "rho must be greater than 0"),
        ({"rho": 1, "lo": 0}, "both lo and hi"),
        ({"rho": 1, "lo": 0, "hi": 5, "sensitivity": 2}, "fixes the sensitivity"),
        ({"rho": 1, "lo": 5, "hi": 5}, "lo < hi"),
        ({"rho": 1, "sensitivity": 1, "quantum": 3}, "multiple of quantum"),
        ({"rho": 1, "steps": 0}, "steps must be a whole number"),
        ({"rho": 1, "steps": 2.5}, "steps must be a whole number"),
        ({"rho": 1, "buffers": 9}, "buffers"),
    ],
)
def test_bad_parameters_are_refused(wrong, match):
    """Each with a message that names the parameter."""
    with pytest.raises(InvalidParameter, match=match):
        find("blt")(**({"steps": 10} | wrong))


@pytest.mark.parametrize("name", FIXED)
def test_a_stream_longer_than_declared_is_refused(name):
    """Noise past T would not be covered by the sensitivity."""
    runner = dps.Runner(counter(name, steps=3))
    list(runner.feed([[1]] * 3))
    with pytest.raises(InvalidInput, match="steps=3"):
        runner.step(1)


def test_bad_values_are_refused():
    """Fractions of a count, sums off the grid, and sums that no integer can hold."""
    with pytest.raises(InvalidInput, match="not whole"):
        dps.release(counter("blt"), [0.5])
    with pytest.raises(InvalidInput, match="multiple of quantum"):
        dps.release(counter("blt", rho=1, sensitivity=2, quantum="0.25"), [0.3])
    for name in ("blt", "toeplitz"):
        with pytest.raises(InvalidInput, match="coarser quantum"):
            dps.release(counter(name), [[2**52]] * 3)
    with pytest.raises(InvalidInput, match="coarser quantum"):
        dps.release(counter("tree"), [[2**53 - 1]] * 10)


def test_a_public_range_is_clamped_and_fixes_the_noise():
    """Values beyond lo and hi count as lo and hi; the change is hi - lo."""
    mechanism = counter("tree", rho=10**9, lo=-1, hi=4, quantum="0.5")
    series = dps.release(mechanism, [9.0, -9.0, 1.3])

    np.testing.assert_allclose(series.values[:, 0], [4, 3, 4.5], atol=0.01)
    assert mechanism.change == 10


def test_a_book_says_what_an_event_changes():
    """A counter of sums does not fit a book of counts."""
    assert counter("blt").terms().change == "a count by 1"
    assert counter("blt", rho=1, sensitivity=20).terms().change == "a sum by 20"
    assert counter("blt", rho=1, lo=0, hi=5).terms().change == "one value within [0, 5]"


def test_the_unbounded_counter_keeps_its_budget_over_epochs():
    """Every epoch is paid once; the noisy totals of closed epochs stay as they are."""
    mechanism = UnboundedCounter(rho=2, epochs=short_epochs(4, 8, 16, 32, 64, 128))
    ledger = dps.Ledger()
    series = dps.release(mechanism, np.ones((200, 1)), ledger=ledger)

    assert {ledger.left("stream", step) for step in range(200)} == {0}
    assert series.stddev[-1, 0] < 4 * series.stddev[3, 0]


@pytest.mark.parametrize("step", [0, -1, 10, 2**41, 1.5])
@pytest.mark.parametrize("name", ["naive_counter", "toeplitz", "tree", "honaker", "blt"])
def test_an_error_bar_is_of_a_step_that_there_is(name, step):
    """Never a number for a step outside the stream."""
    with pytest.raises(InvalidParameter):
        find(name)(rho=1, steps=9).stddev(step)
