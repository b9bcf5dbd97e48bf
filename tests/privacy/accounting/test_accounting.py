"""What noise amounts to, and that every answer errs on the safe side."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from dpstream.errors import InvalidParameter
from dpstream.privacy.accounting.accountant import FloatError, delta_of, with_float_error
from dpstream.privacy.accounting.calibration import (
    mu_squared_for,
    rho_for,
    round_down,
    round_up,
    split_budget,
)
from dpstream.privacy.accounting.curves import (
    choice_epsilon,
    choice_mu_above,
    gdp_delta,
    gdp_epsilon,
    pure_mu_above,
    pure_rho_above,
    zcdp_delta,
    zcdp_epsilon,
    zcdp_rho,
)

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60)
repeatable = settings.get_profile("repeatable")


def discrete_gaussian_delta(sigma: float, epsilon: float) -> float:
    """Delta of the discrete Gaussian at sensitivity 1, summed over its outcomes."""
    outcomes = np.arange(-40 * math.ceil(sigma), 40 * math.ceil(sigma) + 1)
    here = np.exp(-(outcomes**2) / (2 * sigma**2))
    there = np.exp(-((outcomes - 1) ** 2) / (2 * sigma**2))
    difference = there / there.sum() - math.exp(epsilon) * here / here.sum()
    return float(np.maximum(difference, 0).sum())


# Digits from 80-digit arithmetic.
@pytest.mark.parametrize(
    ("mu", "epsilon", "expected"),
    [
        (1, 1, 0.1269367375066439458),
        (0.5, 3, 3.4009117356735288e-10),
        (0.1, 1.2, 2.6579607339351375e-35),
        (2, 30, 9.6621066829751802e-46),
        (5, 3, 0.95184861011790586),
        (0.01, 0.001, 0.0035110920258420983),
    ],
)
def test_gdp_delta_is_accurate_down_to_the_smallest_tails(mu, epsilon, expected):
    """Digits hold where Phi underflows a naive difference, and the error is upward only."""
    found = gdp_delta(mu=mu, epsilon=epsilon)

    assert expected <= found <= expected * (1 + 1e-10)


@pytest.mark.parametrize("mu", [0.05, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0, 5.0])
def test_gdp_delta_agrees_with_dp_accounting(mu, epsilon):
    """Two implementations of the formula agree to 1e-9."""
    loss = pytest.importorskip("dp_accounting.pld.privacy_loss_mechanism")
    theirs = loss.GaussianPrivacyLoss(1 / mu).get_delta_for_epsilon(epsilon)

    assert gdp_delta(mu=mu, epsilon=epsilon) == pytest.approx(theirs, rel=1e-9, abs=1e-15)


def test_gdp_delta_survives_extreme_arguments():
    """Nothing overflows, and what underflows is never reported as exactly no risk."""
    assert gdp_delta(mu=0, epsilon=0) == 0
    assert 0 < gdp_delta(mu=1e-3, epsilon=1e4) < 1e-300
    assert gdp_delta(mu=1e4, epsilon=1) == 1
    assert gdp_delta(mu=100, epsilon=5000) == pytest.approx(0.5, abs=0.01)


@given(mu=st.floats(1e-2, 20), log_delta=st.floats(-60, -0.1))
@repeatable
def test_gdp_epsilon_inverts_delta_on_the_safe_side(mu, log_delta):
    """The epsilon keeps delta, and a slightly smaller one does not."""
    delta = math.exp(log_delta)
    epsilon = gdp_epsilon(mu=mu, delta=delta)

    assert gdp_delta(mu=mu, epsilon=epsilon) <= delta * (1 + 1e-13)
    assert epsilon == 0 or gdp_delta(mu=mu, epsilon=epsilon * (1 - 1e-9)) > delta * (1 - 1e-12)


@given(rho=st.floats(1e-5, 20), log_delta=st.floats(-60, -0.1))
@repeatable
def test_zcdp_conversions_invert_each_other(rho, log_delta):
    """Rho, epsilon and delta name the same point on the same bound."""
    delta = math.exp(log_delta)
    epsilon = zcdp_epsilon(rho=rho, delta=delta)

    assert zcdp_delta(rho=rho, epsilon=epsilon) <= delta * (1 + 1e-9)
    if epsilon > 0:
        assert zcdp_delta(rho=rho, epsilon=epsilon) == pytest.approx(delta, rel=1e-6)
        assert zcdp_rho(epsilon=epsilon, delta=delta) == pytest.approx(rho, rel=1e-6)


def test_zcdp_conversion_is_the_best_over_all_orders():
    """A dense search over orders finds no better bound, and the simple conversion is worse."""
    rho, epsilon = 0.1, 3.0
    order = 1 + np.geomspace(1e-3, 1e3, 200_001)
    logs = (order - 1) * (order * rho - epsilon) - np.log(order - 1) + order * np.log1p(-1 / order)

    assert zcdp_delta(rho=rho, epsilon=epsilon) == pytest.approx(np.exp(logs.min()), rel=1e-6)
    assert zcdp_epsilon(rho=rho, delta=1e-9) < rho + 2 * math.sqrt(rho * math.log(1e9))


@pytest.mark.parametrize(("levels", "expected"), [(7, 177.170), (10, 211.758)])
def test_tree_noise_of_the_continual_group_by(levels, expected):
    """The tight conversion gives the published standard deviations; the simple one does not."""
    rho = float(rho_for(epsilon=3, delta=1e-9 / 3))

    assert 32 * math.sqrt(levels / (2 * rho)) == pytest.approx(expected, abs=5e-4)


def coin_delta(one, two, epsilon):
    """Of coins that fall on heads with these chances."""
    return sum(max(p - math.exp(epsilon) * q, 0) for p, q in ((one, two), (1 - one, 1 - two)))


@pytest.mark.parametrize("epsilon", [0.01, 0.3, 1, 2.5, 8])
def test_pure_mechanisms_and_choices_are_gdp(epsilon):
    """No hockey stick of randomised response, or of coins whose log-odds differ by epsilon (which
    is what bounds a choice), is above that of normals mu apart; 1% closer, one is."""

    def log_odds(x):
        return 1 / (1 + math.exp(-x))

    respond = [(log_odds(epsilon), log_odds(-epsilon))]
    coins = [(log_odds(x + epsilon), log_odds(x)) for x in np.linspace(-epsilon, 0, 41) - 0.0]
    far = [(log_odds(x + epsilon), log_odds(x)) for x in (-12, -6, 3, 9)]
    for laws, mu in ((respond, pure_mu_above(epsilon)), (coins + far, choice_mu_above(epsilon))):
        above = below = False
        for one, two in [*laws, *((b, a) for a, b in laws)]:
            for at in np.linspace(0, epsilon, 60):
                delta = coin_delta(one, two, at)
                above |= delta > gdp_delta(mu=mu, epsilon=at) + 1e-12
                below |= delta > gdp_delta(mu=float(mu) * 0.99, epsilon=at) + 1e-12
        assert not above
        assert below
    assert choice_mu_above(choice_epsilon(epsilon)) <= epsilon
    assert float(choice_mu_above(choice_epsilon(epsilon))) == pytest.approx(epsilon, rel=1e-6)


def test_the_slope_of_normal_scores_of_coins_falls_away_from_the_middle():
    """k(z) of the proof is above 0, and its derivative changes sign once."""
    z = np.linspace(1e-3, 8, 4000)
    phi, up, down = norm.pdf(z), norm.cdf(z), norm.sf(z)
    assert (phi * (up - down) - z * up * down > 0).all()
    assert (np.diff(np.sign(2 * phi**2 - up * down)) != 0).sum() == 1


def test_discrete_gaussians_are_not_gdp():
    """At sigma 2 the GDP formula is 47% short of the true delta; zCDP is not short anywhere."""
    grid = np.linspace(0, 3.4, 341)
    true = np.array([discrete_gaussian_delta(2, epsilon) for epsilon in grid])
    formula = np.array([gdp_delta(mu=0.5, epsilon=epsilon) for epsilon in grid])
    safe = np.array([zcdp_delta(rho=Fraction(1, 8), epsilon=epsilon) for epsilon in grid])

    assert (true / formula).max() == pytest.approx(1.467, abs=2e-3)
    assert (safe >= true).all()
    assert zcdp_delta(rho=Fraction(1, 8), epsilon=3) > 4 * gdp_delta(mu=0.5, epsilon=3)


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 1.0, 4.0])
def test_pure_rho_bounds_randomised_response_and_is_attained(epsilon):
    """No order exceeds it, the order 1 limit meets it, and it beats epsilon^2/2."""
    order = 1 + np.geomspace(1e-3, 1e3, 10_001)
    half = epsilon / 2
    log_cosh = np.logaddexp((2 * order - 1) * half, -(2 * order - 1) * half)
    divergence = (log_cosh - np.logaddexp(half, -half)) / (order - 1)
    rho = float(pure_rho_above(Fraction(epsilon)))

    assert (divergence / order <= rho * (1 + 1e-6)).all()
    assert (divergence / order).max() == pytest.approx(epsilon * math.tanh(half), rel=2e-3)
    assert rho < epsilon**2 / 2
    if epsilon <= 1:  # the series has three terms
        assert rho == pytest.approx(epsilon * math.tanh(half), rel=2e-3)


@given(
    mu_squared=st.fractions(0, 2, max_denominator=50),
    slack=st.fractions(0, Fraction(1, 100), max_denominator=10**9),
    xi=st.fractions(0, Fraction(1, 10), max_denominator=10**6),
    tau=st.fractions(0, Fraction(1, 1000), max_denominator=10**9),
    target=st.floats(0, 8),
)
@repeatable
def test_more_of_anything_never_lowers_delta(mu_squared, slack, xi, tau, target):
    """Noise, slack and float error each cost, alone and together."""

    def delta(mu_squared=mu_squared, slack=slack, xi=xi, tau=tau):
        error = FloatError(xi=xi, tau=tau)
        return delta_of(epsilon=target, mu_squared=mu_squared, delta_slack=slack, error=error)

    together = delta()
    assert together <= 1
    assert max(delta(mu_squared=0), delta(slack=0), delta(tau=0)) <= together * (1 + 1e-9)
    assert delta(xi=0, tau=0) <= delta(tau=0) * (1 + 1e-9)
    for more in ({"mu_squared": 3}, {"slack": Fraction(1, 50)}, {"tau": Fraction(1, 500)}):
        assert together == 1 or delta(**more) > together


def test_float_error_is_carried_to_the_claim():
    """Epsilon widens by twice xi, delta by e^xi; tau enters from both sides."""
    xi, tau = 0.01, 1e-8
    epsilon, delta = with_float_error(epsilon=1, delta=1e-6, xi=xi, tau=tau)
    assert epsilon == pytest.approx(1.02)
    assert delta == pytest.approx(math.exp(xi) * 1e-6 + (1 + math.exp(1 + xi)) * tau)

    error = FloatError(xi=Fraction(xi), tau=Fraction(tau))
    ideal = delta_of(epsilon=1, mu_squared=1)
    _, expected = with_float_error(epsilon=1, delta=ideal, xi=xi, tau=tau)
    found = delta_of(epsilon=1.02, mu_squared=1, error=error)
    assert found == pytest.approx(expected, rel=1e-9)
    assert delta_of(epsilon=0.01, mu_squared=0, error=error) == 1


def test_float_error_claim_is_attained():
    """Two laws within (xi, tau) of an (epsilon, delta)-DP pair need all of the claim, no more."""
    epsilon, delta, xi, tau, small = 1.0, 1e-3, 0.1, 1e-4, 1e-2
    # Outcomes: likelier by e^epsilon and delta; only in the first law sampled; only in the second
    # ideal law's tail; everything else.
    first_ideal = np.array([math.exp(epsilon) * small + delta, 0, math.exp(epsilon) * tau])
    second_ideal = np.array([small, 0, tau])
    first = math.exp(xi) * first_ideal + [0, tau, 0]
    second = math.exp(-xi) * second_ideal * [1, 1, 0]
    rest = [1 - law.sum() for law in (first, first_ideal, second, second_ideal)]
    assert max(abs(math.log(rest[0] / rest[1])), abs(math.log(rest[2] / rest[3]))) < xi
    assert first_ideal.sum() - math.exp(epsilon) * second_ideal.sum() == pytest.approx(delta)

    claimed, bound = with_float_error(epsilon=epsilon, delta=delta, xi=xi, tau=tau)

    assert first.sum() - math.exp(claimed) * second.sum() == pytest.approx(bound, rel=1e-9)


def test_a_tail_adds_to_delta():
    """Failure probabilities add up, without a factor e^epsilon."""
    tail, mu_squared = Fraction(1, 10**9), Fraction(1, 4)

    ideal = delta_of(epsilon=2, mu_squared=mu_squared)
    both = delta_of(epsilon=2, mu_squared=mu_squared, delta_slack=tail)
    assert both == pytest.approx(ideal + 1e-9, rel=1e-12)
    assert delta_of(epsilon=100, mu_squared=mu_squared, delta_slack=tail) >= 1e-9


@given(epsilon=st.floats(0.05, 20), log_delta=st.floats(-45, -2))
@repeatable
def test_calibration_keeps_the_promise_and_wastes_nothing(epsilon, log_delta):
    """Rounded budgets stay within (epsilon, delta); a millionth more would not."""
    delta = math.exp(log_delta)
    rho = rho_for(epsilon=epsilon, delta=delta)
    mu_squared = mu_squared_for(epsilon=epsilon, delta=delta)
    more = Fraction(1_000_001, 1_000_000)

    assert zcdp_delta(rho=rho, epsilon=epsilon) <= delta
    assert zcdp_delta(rho=rho * more, epsilon=epsilon) > delta
    assert delta_of(epsilon=epsilon, mu_squared=mu_squared) <= delta
    assert delta_of(epsilon=epsilon, mu_squared=mu_squared * more) > delta


@given(value=st.fractions(min_value=0, max_value=10**9), bits=st.integers(1, 60))
@repeatable
def test_rounding_goes_one_way(value, bits):
    """Down is never above, up never below, both within one part in 2^(bits - 1)."""
    down, up = round_down(value, bits=bits), round_up(value, bits=bits)

    assert down <= value <= up
    assert up - down <= value * Fraction(4, 2**bits)


def test_split_never_exceeds_the_total():
    """Shares follow the weights; their exact sum stays within the budget."""
    budget = mu_squared_for(epsilon=1, delta=1e-6)
    equal = split_budget(budget, weights=[1] * 3)
    uneven = split_budget(budget, weights=[1, Fraction(1, 3), 0.7])

    for shares in [equal, uneven]:
        assert budget * (1 - Fraction(1, 2**30)) < sum(shares) <= budget
    assert len(set(equal)) == 1
    assert float(uneven[0] / uneven[1]) == pytest.approx(3)


@pytest.mark.parametrize("value", [-1, Fraction(-1, 9), math.nan, math.inf, 0.1, None, True])
def test_float_error_refuses_what_is_not_exact(value):
    """Negative, NaN and inexact amounts are refused with the value in the message."""
    for make in [
        lambda: FloatError(xi=value, tau=Fraction(0)),
        lambda: FloatError(xi=Fraction(0), tau=value),
    ]:
        with pytest.raises(InvalidParameter, match="got "):
            make()


@pytest.mark.parametrize(
    "call",
    [
        lambda: FloatError(xi=Fraction(0), tau=Fraction(2)),
        lambda: gdp_delta(mu=-1, epsilon=1),
        lambda: gdp_delta(mu=1, epsilon=math.nan),
        lambda: gdp_epsilon(mu=1, delta=0),
        lambda: zcdp_delta(rho=math.inf, epsilon=1),
        lambda: rho_for(epsilon=1, delta=1),
        lambda: delta_of(epsilon=-1, mu_squared=1),
        lambda: delta_of(epsilon=1, mu_squared=Fraction(-1, 9)),
        lambda: delta_of(epsilon=1, mu_squared=1, delta_slack=math.nan),
        lambda: split_budget(Fraction(1), weights=[]),
        lambda: split_budget(Fraction(1), weights=[1, 0]),
    ],
)
def test_parameters_out_of_range_are_refused(call):
    """A value without meaning raises InvalidParameter instead of giving a number."""
    with pytest.raises(InvalidParameter):
        call()
