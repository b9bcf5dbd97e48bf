"""Budgets for ever: exact terms, closed tails, and Theorem 5.4 with its true cost."""

import math
from fractions import Fraction as F

import pytest

from benchmarks.dpi_runs import Theorem54
from dpstream.errors import InvalidParameter
from dpstream.mechanisms.infinite.budget_series import (
    Dilogarithm,
    Level,
    Telescoping,
    budget_series,
    dilogarithm,
    gap_for,
)
from dpstream.privacy.amounts import GRID, floor_units

ALL = [
    Telescoping(total=F(1)),
    Telescoping(total=F("0.1")),
    Level(total=F(3)),
    Level(total=F(1), count=1),
    Level(total=F(2), count=7, head=F(4, 5)),
    Level.sized(total=F(1), change=F(1, 500), candidates=1000),
    Dilogarithm(total=F(1), change=F(2)),
    Dilogarithm(total=F("0.001"), change=F("0.01"), decay=F("0.3")),
    Dilogarithm(total=F(6), change=F(2), decay=F("0.9")),
]


class Basel:
    """Control: 1 / i^2 adds up to 1.64."""

    total = F(1)

    def term(self, i):
        return F(1, i * i)


def tail(one, n):
    """A bound in closed form on the sum of the terms after the n-th."""
    if isinstance(one, Level):  # what is left of the equal terms, and the telescoped rest
        equal = one.total * one.head * max(one.count - n, 0) / one.count
        return equal + one.total * (1 - one.head) * one.count / max(n, one.count)
    if isinstance(one, Dilogarithm):  # 1 / t^2 < 1 / (t - 1) - 1 / t
        return min(one.total, 2 * one.change / (one.decay * n)) if n else one.total
    return one.total / (n + 1)


def stays_within(one, slots=3000):
    """At several places: what was spent (as the ledger counts it) and the bound on all the rest."""
    spent = 0
    for i in range(1, slots + 1):
        spent += floor_units(one.term(i))
        if i in (1, 2, 5, 6, 7, 100, slots) and F(spent, GRID) + tail(one, i) > one.total:
            return False
    return tail(one, 0) <= one.total


@pytest.mark.parametrize("one", ALL, ids=repr)
def test_the_sum_for_ever_is_within_the_total(one):
    """Spent so far plus the closed bound on everything to come is at most epsilon, at any time."""
    if isinstance(one, Dilogarithm):  # its tail is a bound, so the sum is compared instead
        far = sum(floor_units(one.term(i)) for i in range(1, 20_001))
        assert F(far, GRID) <= one.total
        assert F(far, GRID) + tail(one, 20_000) >= one.total * F("0.999")
    else:
        assert stays_within(one)


def test_the_check_sees_a_series_that_is_too_large():
    """Control."""
    assert not stays_within(Basel())


@pytest.mark.parametrize("one", ALL, ids=repr)
def test_terms_are_exact_positive_and_fall(one):
    """The float that places are looked up with falls with them."""
    terms = [one.term(i) for i in (*range(1, 40), 10**3, 10**6, 10**9)]

    assert all(isinstance(term, F) and term > 0 for term in terms)
    assert terms == sorted(terms, reverse=True)
    for i in (1, 6, 7, 1000):
        assert one.about(i) == pytest.approx(float(one.term(i)), rel=1e-8)


def test_theorem_5_4_to_four_digits():
    """mu = 0.5, zeta = 1, epsilon = 2."""
    printed = Theorem54(epsilon=2, mu=0.5)

    assert round(printed.m_squared, 4) == 0.8337
    assert [round(printed.eta(t), 4) for t in (1, 2, 3)] == [0.0415, 0.0190, 0.0117]


@pytest.mark.parametrize(
    ("epsilon", "mu", "times"), [(1, 2, 4), (2, 0.5, 1), (0.3, 1, 2), (1.5, 1.9, 3.8)]
)
def test_the_true_cost_of_theorem_5_4(epsilon, mu, times):
    """Two draws of 2 alpha_t Delta_s each, alpha_t = X_t / 2, added up over a long stream."""
    printed = Theorem54(epsilon=epsilon, mu=mu)
    change = min(2, 2 * 2 / mu)
    added = math.fsum(2 * change * printed.x(t) for t in range(1, 200_001))

    assert printed.true_cost == pytest.approx(times * epsilon, rel=1e-9)
    assert added == pytest.approx(printed.true_cost, rel=1e-4)


def test_the_shipped_series_is_theorem_5_4_for_what_it_costs():
    """The same X_t, scaled to a total that holds: alpha_t = eps_t / (4 Delta_s) = X_t / 2."""
    shipped = Dilogarithm(total=F(2), change=F(2))
    printed = Theorem54(epsilon=2, mu=0.5)  # where it costs what it claims

    for t in (1, 2, 3, 50):
        alpha = float(shipped.term(t) / (4 * shipped.change))
        assert alpha == pytest.approx(printed.x(t) / 2, rel=1e-8)


@pytest.mark.parametrize("x", [1e-12, 1e-3, 0.25, 0.8337, 0.999999])
def test_the_dilogarithm_is_inverted(x):
    """And Li2 is the sum of x^t / t^2."""
    missing = math.pi**2 / 6 - dilogarithm(x)

    assert 1 - gap_for(missing, str) == pytest.approx(x, abs=1e-10)
    if x < 0.9:
        assert dilogarithm(x) == pytest.approx(
            math.fsum(x**t / t**2 for t in range(1, 400)), rel=1e-12
        )


def test_outside_its_range_the_inverse_is_refused_with_the_range():
    """A finite answer needs epsilon < C pi^2 / 6."""
    with pytest.raises(InvalidParameter, match=r"needs epsilon < C pi\^2 / 6 = 6.57974 .*got.*7"):
        Theorem54(epsilon=7, mu=0.5).eta(1)
    with pytest.raises(InvalidParameter, match=r"needs epsilon < 6.57974 at decay_rate=1"):
        Dilogarithm(total=F(7), change=F(2))
    assert Theorem54(epsilon=6.5, mu=0.5).eta(1) > 0.2


def test_an_unknown_series_is_refused():
    """With the names that there are."""
    with pytest.raises(InvalidParameter, match="one of sized, level, telescoping, dilogarithm"):
        budget_series("geometric", total=F(1), change=F(1), decay=F(1))
