"""`dps.Counter`: running sums for people, one stream or many keys."""

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import chi2, ks_2samp

import dpstream as dps
from dpstream.counting.buffered import BufferedLinearToeplitz
from dpstream.counting.noise_scale import calibrate, float_error, path_error
from dpstream.errors import InvalidInput, InvalidParameter, NoiseReuse
from dpstream.mechanisms.counter import KeyedCounting
from dpstream.privacy.accounting.accountant import delta_of
from tests.counting.matrices import decoder_coefficients, dense, noise_paths

SECRET, RUN, FALSE_ALARM = bytes(32), bytes(16), 1e-6
BUDGET = {"epsilon": 1, "delta": 1e-9}


def keyed(steps=12, **more):
    return dps.Counter(steps=steps, keys=True, secret=SECRET, run_id=RUN, **BUDGET | more)


def test_a_known_end_makes_the_error_smaller():
    """With steps the noise is that of the counter for T, without that of the unbounded one."""
    known, unknown = dps.Counter(steps=1000, **BUDGET), dps.Counter(**BUDGET)
    stddevs = [c._counting.mechanism.stddev(1000) for c in (known, unknown)]

    assert 1 < stddevs[1] / stddevs[0] < 2
    assert known.add(12).stddev[0] < stddevs[0]
    assert (known.add([5]).step, known.steps_done, unknown.steps_done) == (1, 2, 0)


def test_several_bins_have_sums_of_their_own():
    """One number per bin, every step."""
    counter = dps.Counter(rho=10**8, steps=10)
    counter.add([1, 10])

    np.testing.assert_allclose(counter.add([2, 20]).values, [3, 30], atol=0.01)


def test_keys_keep_their_order_and_sums():
    """A key that is not named adds nothing; one that joins late starts from zero."""
    counter = keyed(epsilon=20, delta=1e-3)
    counter.add({"a": 1000, "b": 1})
    counter.add({"b": 500})
    last = counter.add([7000], keys=["c"])

    assert counter.keys == ["a", "b", "c"]
    np.testing.assert_allclose(last.values, [1000, 501, 7000], atol=5)
    assert (last.values == np.rint(last.values)).all()


def late_errors(join, steps, keys, off=1.0):
    """Errors from `join` on of keys that join there."""
    counter = keyed(steps=steps)
    for _ in range(join - 1):
        counter.add({"early": 1})
    names = [f"k{i}" for i in range(keys)]
    path = [counter.add([3] * keys, keys=names).values[-keys:]]
    path += [counter.add({}).values[-keys:] for _ in range(steps - join)]
    mechanism = counter._counting.mechanism
    decoder = dense(mechanism.process)[0][join - 1 :]
    sigma = float(mechanism.calibrated[1])
    claimed = decoder @ decoder.T * sigma**2 + np.eye(steps - join + 1) / 12
    return (np.array(path) - 3) * off, claimed


@pytest.mark.parametrize("join", [1, 2, 6])
@pytest.mark.parametrize(("off", "passes"), [(1.0, True), (1.2, False), (0.8, False)])
def test_late_keys_have_the_law_of_early_ones(join, off, passes):
    """Whitened by the covariance of a process begun at step 1, at a 1e-6 level."""
    errors, claimed = late_errors(join, 12, 400, off)
    white = np.linalg.solve(np.linalg.cholesky(claimed), errors)
    squares = (white**2).sum(axis=1)  # of each step given the earlier ones
    level = FALSE_ALARM / len(squares)
    low, high = chi2.isf([1 - level / 2, level / 2], white.shape[1])

    assert bool(((low < squares) & (squares < high)).all()) == passes


def test_a_process_begun_when_the_key_joins_would_be_seen():
    """Control: noise of a fresh process is not the noise of one begun at step 1."""
    errors, _ = late_errors(1, 12, 400)
    claimed = late_errors(6, 12, 2)[1]
    white = errors[0] / math.sqrt(claimed[0, 0])

    assert (white**2).sum() < chi2.isf(1 - FALSE_ALARM / 2, white.size)


def test_exact_and_float_noise_agree():
    """At the same scale the two forms cannot be told apart: two-sample test at 1e-6."""
    steps, bins = 20, 400
    mechanism = KeyedCounting(steps=steps, **BUDGET)
    sigma = float(mechanism.calibrated[1]) / mechanism.process.column_norm()
    exact = dps.mechanisms.BltCounter(rho=1 / (2 * sigma**2), steps=steps)
    series = dps.release(exact, np.zeros((steps, bins)), secret=SECRET, run_id=RUN)
    counter = keyed(steps=steps)
    path = [counter.add([0] * bins, keys=range(bins)).values]
    path += [counter.add({}).values for _ in range(steps - 1)]
    for step in (0, 7, 19):
        assert ks_2samp(series.values[step], path[step]).pvalue > FALSE_ALARM
    assert ks_2samp(1.5 * series.values.ravel(), np.array(path).ravel()).pvalue < FALSE_ALARM
    np.testing.assert_allclose(series.stddev[:, 0], counter_stddev(mechanism, steps), rtol=0.01)


def counter_stddev(mechanism, steps):
    return [mechanism.stddev(step) for step in range(1, steps + 1)]


def test_the_same_run_repeats_and_other_data_are_refused(tmp_path):
    """Same secret and run: same bytes and no new cost; changed counts raise before publishing."""
    ledger = dps.Ledger(tmp_path / "ledger")
    first = [keyed(ledger=ledger).add({"a": 5, "b": 7}).values for _ in range(2)]
    spent = ledger.report()

    assert (first[0] == first[1]).all()
    assert (keyed(ledger=ledger).add({"a": 5, "b": 7}).values == first[0]).all()
    assert ledger.report() == spent
    with pytest.raises(NoiseReuse):
        keyed(ledger=ledger).add({"a": 5, "b": 8})


def test_the_promise_covers_float_error():
    """mu^2, xi and tau together stay within epsilon and delta, and little is lost to floats."""
    for steps in (1, 10, 1000, 20_000):
        process = BufferedLinearToeplitz(steps=steps)
        epsilon, delta = Fraction(1), Fraction(1, 10**9)
        mu_squared, sigma, event = calibrate(
            process, change=Fraction(1), epsilon=epsilon, delta=delta
        )
        assert delta_of(epsilon=epsilon, mu_squared=mu_squared, error=event) <= delta
        assert 2 * event.xi < epsilon / 100
        assert float(sigma) ** 2 * float(mu_squared) >= process.column_norm() ** 2


def test_streams_too_long_for_floats_are_refused():
    """Where the bound on float error is not negligible, the exact counter is named."""
    with pytest.raises(InvalidParameter, match="exact counter"):
        dps.Counter(steps=10**7, keys=True, **BUDGET)


@pytest.mark.parametrize("steps", [60, 3000])
def test_streamed_noise_is_within_its_bound(steps):
    """Against sums in extended precision, on ordinary normals."""
    process = BufferedLinearToeplitz(steps=steps)
    z = np.random.default_rng(0).normal(size=(steps, 4))
    powers = decoder_coefficients(process, steps)[::-1].astype(np.longdouble)
    truth = powers @ z.astype(np.longdouble)
    error = np.abs(noise_paths(process, z)[-1] - truth).max()

    assert error < path_error(process) < 1e-9
    assert float_error(process, sigma=1e12).tau == 1


@pytest.mark.parametrize(
    ("counts", "keys", "match"),
    [
        (3, None, "one count per key"),
        ([1, 2], ["a"], "one count per key"),
        ([1, 2], ["a", "a"], "named once"),
        ({"a": 1}, ["a"], "not both"),
        ({"a": -1}, None, "negative"),
        ({"a": math.nan}, None, "finite"),
    ],
)
def test_bad_steps_are_refused(counts, keys, match):
    """With the reason, and before anything is drawn: the counter goes on."""
    counter = keyed()
    with pytest.raises(InvalidInput, match=match):
        counter.add(counts, keys=keys)
    counter.add({"a": 1})


def test_bad_parameters_are_refused():
    """Keys need steps, epsilon and delta; a counter without keys takes none."""
    with pytest.raises(InvalidParameter, match="needs steps"):
        dps.Counter(keys=True, **BUDGET)
    with pytest.raises(InvalidParameter, match="epsilon and delta"):
        dps.Counter(keys=True, steps=5, rho=1)
    with pytest.raises(InvalidInput, match="no keys"):
        dps.Counter(steps=5, rho=1).add({"a": 1})
    counter = keyed(steps=1)
    counter.add({})
    with pytest.raises(InvalidInput, match="steps=1"):
        counter.add({})
