"""What events amount to, and that every answer errs on the safe side."""

import math
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpstream.errors import InvalidParameter, UnknownPrivacyEvent
from dpstream.privacy.accounting import accountant
from dpstream.privacy.accounting.accountant import (
    delta_of,
    epsilon_of,
    with_float_error,
)
from dpstream.privacy.accounting.calibration import (
    gaussian_sigma,
    mu_squared_for,
    rho_for,
    round_down,
    round_up,
    split_budget,
)
from dpstream.privacy.accounting.curves import (
    gdp_delta,
    gdp_epsilon,
    pure_rho,
    zcdp_delta,
    zcdp_epsilon,
    zcdp_rho,
)
from dpstream.privacy.accounting.privacy_events import (
    Composed,
    Concentrated,
    DeltaSlack,
    FloatError,
    Gaussian,
    Pure,
    Repeated,
    total,
)

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60)
repeatable = settings.get_profile("repeatable")

EVENTS = [
    Pure(epsilon=Fraction(1, 3)),
    Concentrated(rho=Fraction(1, 20)),
    Gaussian(mu_squared=Fraction(1, 10)),
    DeltaSlack(delta=Fraction(1, 10**7)),
    FloatError(xi=Fraction(1, 10**6), tau=Fraction(1, 10**12)),
    Composed(events=(Pure(epsilon=Fraction(1, 3)), Gaussian(mu_squared=Fraction(1, 10)))),
    Repeated(event=Concentrated(rho=Fraction(1, 20)), count=2),
]


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


def test_discrete_gaussians_are_not_gdp():
    """At sigma 2 the GDP formula is 47% short of the true delta; zCDP is not short anywhere."""
    grid = np.linspace(0, 3.4, 341)
    true = np.array([discrete_gaussian_delta(2, epsilon) for epsilon in grid])
    formula = np.array([gdp_delta(mu=0.5, epsilon=epsilon) for epsilon in grid])
    safe = np.array([delta_of(Concentrated(rho=Fraction(1, 8)), epsilon=e) for e in grid])

    assert (true / formula).max() == pytest.approx(1.467, abs=2e-3)
    assert (safe >= true).all()


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 1.0, 4.0])
def test_pure_rho_bounds_randomised_response_and_is_attained(epsilon):
    """No order exceeds it, the order 1 limit meets it, and it beats epsilon^2/2."""
    order = 1 + np.geomspace(1e-3, 1e3, 10_001)
    half = epsilon / 2
    log_cosh = np.logaddexp((2 * order - 1) * half, -(2 * order - 1) * half)
    divergence = (log_cosh - np.logaddexp(half, -half)) / (order - 1)

    assert (divergence / order <= pure_rho(epsilon) * (1 + 1e-6)).all()
    assert (divergence / order).max() == pytest.approx(pure_rho(epsilon), rel=2e-3)
    assert pure_rho(epsilon) < epsilon**2 / 2


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_repeating_equals_composing_one_by_one(event, count):
    """No kind of event loses its count, alone or nested."""
    listed = Composed(events=(event,) * count)
    nested = Composed(events=(Repeated(event=event, count=count), Composed(events=())))

    assert total(Repeated(event=event, count=count)) == total(listed) == total(nested)
    assert delta_of(nested, epsilon=2) == delta_of(listed, epsilon=2)
    twice = Repeated(event=Repeated(event=event, count=count), count=2)
    assert total(twice) == total(listed) + total(listed)


@pytest.mark.parametrize("event", EVENTS[:5], ids=lambda event: type(event).__name__)
def test_every_repetition_costs(event):
    """A second copy of an event raises what is claimed."""
    base = Composed(events=(Gaussian(mu_squared=1), event))
    more = Composed(events=(Gaussian(mu_squared=1), Repeated(event=event, count=2)))

    assert delta_of(more, epsilon=2) > delta_of(base, epsilon=2)


def test_pure_composition_is_exact_at_delta_zero():
    """Epsilons add as rationals; delta only buys less."""
    event = Repeated(event=Pure(epsilon=Fraction(1, 8)), count=80)

    assert epsilon_of(event, delta=0) == 10.0
    assert delta_of(event, epsilon=10) == 0
    assert 0 < delta_of(event, epsilon=9.99) < 1e-9
    assert epsilon_of(event, delta=1e-6) < 6


def test_mixture_is_the_exact_expectation():
    """Randomised response with a Gaussian: compared with the integral over both outcomes."""
    epsilon, mu, target = 0.5, 0.5, 1.0
    grid = np.linspace(-12, 12, 2_000_001)
    density = np.exp(-(grid**2) / 2) / math.sqrt(2 * math.pi)
    shifted = np.exp(-((grid - mu) ** 2) / 2) / math.sqrt(2 * math.pi)
    truth = 1 / (1 + math.exp(-epsilon))
    exact = sum(
        float(np.maximum(mine * shifted - math.exp(target) * other * density, 0).sum())
        for mine, other in [(truth, 1 - truth), (1 - truth, truth)]
    ) * (grid[1] - grid[0])
    event = Composed(events=(Pure(epsilon=Fraction(1, 2)), Gaussian(mu_squared=Fraction(1, 4))))

    assert delta_of(event, epsilon=target) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_loss_distribution_bounds_the_exact_mixture(mu):
    """The grid of dp-accounting stays above the exact value, and close to it."""
    pytest.importorskip("dp_accounting")
    pure = [(Fraction(1, 10), 20), (Fraction(1, 7), 10)]
    exact, gridded = (
        accountant.mixture_curve(pure, mu),
        accountant.mixture_curve(pure, mu, most_states=1),
    )

    for epsilon in [0.0, 1.0, 2.0, 3.0]:
        assert exact(epsilon) <= gridded(epsilon) <= exact(epsilon) * 1.05 + 1e-10


def test_loss_distribution_covers_its_transform_error():
    """With many copies the transforms fall short of the truth by some 1e-12; the claim must not."""
    pytest.importorskip("dp_accounting")
    pure = [(Fraction(1, 100), 10**5)]
    exact, gridded = (
        accountant.mixture_curve(pure, 0.0),
        accountant.mixture_curve(pure, 0.0, most_states=1),
    )

    assert all(gridded(epsilon) >= exact(epsilon) for epsilon in np.linspace(0, 48, 25))


def test_mixing_takes_the_best_sound_bound():
    """A grain of zCDP beside a Gaussian costs little; converting all of it would cost more."""
    rho = Fraction(1, 10**5)
    event = Composed(events=(Gaussian(mu_squared=Fraction(1, 4)), Concentrated(rho=rho)))
    alone = epsilon_of(Gaussian(mu_squared=Fraction(1, 4)), delta=1e-9)

    found = epsilon_of(event, delta=1e-9)
    assert alone < found < alone + 0.06 < zcdp_epsilon(rho=Fraction(1, 8) + rho, delta=1e-9)


@given(
    epsilon=st.fractions(0, 2, max_denominator=50),
    rho=st.fractions(0, 1, max_denominator=50),
    mu_squared=st.fractions(0, 2, max_denominator=50),
    target=st.floats(0, 8),
)
@repeatable
def test_adding_an_event_never_lowers_delta(epsilon, rho, mu_squared, target):
    """The bound of a composition is at least that of each part."""
    parts = (Pure(epsilon=epsilon), Concentrated(rho=rho), Gaussian(mu_squared=mu_squared))
    whole = delta_of(Composed(events=parts), epsilon=target)

    assert whole <= 1
    assert all(whole >= delta_of(part, epsilon=target) * (1 - 1e-9) for part in parts)


def test_zcdp_never_meets_the_gdp_formula():
    """A discrete Gaussian is charged more than a continuous one of the same size, mixed or not."""
    discrete, continuous = Concentrated(rho=Fraction(1, 8)), Gaussian(mu_squared=Fraction(1, 4))

    assert delta_of(discrete, epsilon=3) == zcdp_delta(rho=Fraction(1, 8) * (1 + 2**-48), epsilon=3)
    assert delta_of(discrete, epsilon=3) > 4 * delta_of(continuous, epsilon=3)
    assert total(discrete).mu_squared == 0


def test_float_error_is_carried_to_the_claim():
    """Epsilon widens by twice xi, delta by e^xi; tau enters from both sides."""
    xi, tau = 0.01, 1e-8
    epsilon, delta = with_float_error(epsilon=1, delta=1e-6, xi=xi, tau=tau)
    assert epsilon == pytest.approx(1.02)
    assert delta == pytest.approx(math.exp(xi) * 1e-6 + (1 + math.exp(1 + xi)) * tau)

    parts = (Gaussian(mu_squared=1), FloatError(xi=Fraction(xi), tau=Fraction(tau)))
    _, expected = with_float_error(epsilon=1, delta=delta_of(parts[0], epsilon=1), xi=xi, tau=tau)
    assert delta_of(Composed(events=parts), epsilon=1.02) == pytest.approx(expected, rel=1e-9)
    assert delta_of(parts[1], epsilon=0.01) == 1


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
    tail = Fraction(1, 10**9)
    event = Composed(events=(Gaussian(mu_squared=Fraction(1, 4)), DeltaSlack(delta=tail)))

    ideal = delta_of(Gaussian(mu_squared=Fraction(1, 4)), epsilon=2)
    assert delta_of(event, epsilon=2) == pytest.approx(ideal + 1e-9, rel=1e-12)
    assert epsilon_of(event, delta=1e-9) == math.inf


@given(epsilon=st.floats(0.05, 20), log_delta=st.floats(-45, -2))
@repeatable
def test_calibration_keeps_the_promise_and_wastes_nothing(epsilon, log_delta):
    """Rounded budgets stay within (epsilon, delta); a millionth more would not."""
    delta = math.exp(log_delta)
    rho = rho_for(epsilon=epsilon, delta=delta)
    mu_squared = mu_squared_for(epsilon=epsilon, delta=delta)
    more = Fraction(1_000_001, 1_000_000)

    assert delta_of(Concentrated(rho=rho), epsilon=epsilon) <= delta
    assert delta_of(Concentrated(rho=rho * more), epsilon=epsilon) > delta
    assert delta_of(Gaussian(mu_squared=mu_squared), epsilon=epsilon) <= delta
    assert delta_of(Gaussian(mu_squared=mu_squared * more), epsilon=epsilon) > delta
    sigma = gaussian_sigma(epsilon=epsilon, delta=delta, sensitivity=3)
    assert delta_of(Gaussian(mu_squared=(3 / sigma) ** 2), epsilon=epsilon) <= delta
    assert float(sigma) == pytest.approx(3 / math.sqrt(mu_squared), rel=1e-8)


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


def test_unknown_events_are_refused():
    """No rule means no answer, also deep inside a composition."""

    class Unheard:
        pass

    for event in [Unheard(), Composed(events=(Repeated(event=Unheard(), count=2),))]:
        with pytest.raises(UnknownPrivacyEvent, match="no accounting rule"):
            delta_of(event, epsilon=1)


@pytest.mark.parametrize("value", [-1, Fraction(-1, 9), math.nan, math.inf, 0.1, None, True])
def test_events_refuse_what_is_not_an_exact_budget(value):
    """Negative, NaN and inexact budgets are refused with the value in the message."""
    for make in [
        lambda: Pure(epsilon=value),
        lambda: Concentrated(rho=value),
        lambda: Gaussian(mu_squared=value),
        lambda: DeltaSlack(delta=value),
        lambda: FloatError(xi=value, tau=Fraction(0)),
        lambda: FloatError(xi=Fraction(0), tau=value),
    ]:
        with pytest.raises(InvalidParameter, match="got "):
            make()


@pytest.mark.parametrize(
    "call",
    [
        lambda: DeltaSlack(delta=2),
        lambda: Repeated(event=Pure(epsilon=1), count=-1),
        lambda: Repeated(event=Pure(epsilon=1), count=1.5),
        lambda: gdp_delta(mu=-1, epsilon=1),
        lambda: gdp_delta(mu=1, epsilon=math.nan),
        lambda: gdp_epsilon(mu=1, delta=0),
        lambda: zcdp_delta(rho=math.inf, epsilon=1),
        lambda: rho_for(epsilon=1, delta=1),
        lambda: gaussian_sigma(epsilon=0, delta=1e-30, sensitivity=1),
        lambda: gaussian_sigma(epsilon=1, delta=1e-6, sensitivity=-1),
        lambda: delta_of(Pure(epsilon=1), epsilon=-1),
        lambda: epsilon_of(Pure(epsilon=1), delta=1.5),
        lambda: split_budget(Fraction(1), weights=[]),
        lambda: split_budget(Fraction(1), weights=[1, 0]),
    ],
)
def test_parameters_out_of_range_are_refused(call):
    """A value without meaning raises InvalidParameter instead of giving a number."""
    with pytest.raises(InvalidParameter):
        call()


def test_closed_forms_need_no_accounting_library(monkeypatch):
    """Single kinds and small mixtures never import dp-accounting."""
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)

    assert epsilon_of(Composed(events=tuple(EVENTS)), delta=1e-5) > 0
    with pytest.raises(ImportError):
        accountant.mixture_curve([(Fraction(1), 1)], 0.0, most_states=1)
