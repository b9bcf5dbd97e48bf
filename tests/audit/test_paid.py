"""Values paid for when they come: the ledger's charge, and what the replay allows later draws."""

import math
from dataclasses import dataclass
from fractions import Fraction as F
from statistics import NormalDist

import numpy as np
import pytest

import dpstream as dps
from dpstream.audit.replay import Changed, record, replay
from dpstream.errors import BudgetExceeded, InvalidParameter
from dpstream.mechanisms.base import HistogramMechanism
from dpstream.privacy.accounting.calibration import round_up
from dpstream.privacy.accounting.curves import pure_mu_above
from dpstream.privacy.ledger.charges import Paid
from dpstream.privacy.spend import Spend
from dpstream.records import Release
from tests.support.fixed import RUN, SECRET


@dataclass(frozen=True, kw_only=True)
class Reader(HistogramMechanism, identity="test reader", keys="factor pays"):
    """Pays epsilon / window for each step, then draws on `factor` times the sum so far."""

    factor: int = 1
    pays: bool = True

    def start(self):
        return 0

    def step(self, state, x, spend):
        state, paid = state + int(x.sum()), Paid(purpose="read", run=RUN.hex())
        if self.pays:
            share = self.budget / self.window
            paid = spend.pay(x, sensitivity=F(1), epsilon=share, purpose="read")
        noisy = spend.laplace(
            np.array([self.factor * state]),
            sensitivity=F(2),
            epsilon=F(1, 9),
            purpose="look",
            interval=paid,
        )
        return state, [Release(step=spend.step, values=noisy * 1.0, paid=True)]


def replayed(reader, changed_steps):
    block = np.full((8, 2), 5)
    other = block.copy()
    other[changed_steps, 1] += 1
    calls, _ = record(reader, block, secret=SECRET, run=RUN)
    return replay(reader, other, calls)


def test_a_path_costs_what_was_paid_for_the_changed_values():
    """Two changed steps of eps / w; the draws cost nothing more."""
    result = replayed(Reader(epsilon=1, window=4), [2, 5])

    assert result.loss == F(1, 2)
    assert result.violations == []


def test_draws_may_move_with_all_changes_paid_so_far():
    """Sensitivity 2: a factor of 2 is within it after one change or two, 3 is not."""
    assert replayed(Reader(epsilon=1, window=4, factor=2), [2, 5]).violations == []
    violations = replayed(Reader(epsilon=1, window=4, factor=3), [2, 5]).violations

    assert violations[0] == "step 2, 'look': moved by 3"
    assert len(violations) == 6


def test_a_draw_that_nobody_paid_for_is_a_violation():
    """A Paid made up by the mechanism allows no change at all."""
    result = replayed(Reader(epsilon=1, window=4, pays=False), [7])

    assert result.violations == ["step 7, 'look': moved by 1"]


def test_a_payment_that_depends_on_data_is_caught():
    """Paying only for busy steps is control flow on raw data."""

    class Choosy(Reader, identity="test choosy"):
        def step(self, state, x, spend):
            if x.sum() > 10:
                spend.pay(x, sensitivity=F(1), epsilon=F(1, 100), purpose="extra")
            return super().step(state, x, spend)

    with pytest.raises(Changed):
        replayed(Choosy(epsilon=1, window=4), [3])


def spender(terms):
    ledger = dps.Ledger()
    ledger.open("stream", terms)
    return ledger, Spend(run=RUN, key=bytes(32), ledger=ledger, dataset="stream")


def test_paying_charges_the_step_and_later_draws_do_not():
    """One charge per step in the book; a window can be overdrawn by paying, not by drawing."""
    ledger, spend = spender(dps.Terms(unit="w_event", total=F(1), window=3))
    for step in range(2):
        spend.begin(step, lambda _: "")
        paid = spend.pay(np.array([4]), sensitivity=F(1), epsilon=F(1, 2), purpose="read")
        spend.laplace(np.array([4]), sensitivity=F(2), epsilon=F(9), purpose="look", interval=paid)
        assert ledger.left("stream", step) == F(1) - F(step + 1, 2)
    assert paid.purpose == "read"
    spend.begin(2, lambda _: "")
    with pytest.raises(BudgetExceeded):
        spend.pay(np.array([4]), sensitivity=F(1), epsilon=F(1, 2), purpose="read")
    with pytest.raises(InvalidParameter, match="epsilon must be greater than 0"):
        spend.pay(np.array([4]), sensitivity=F(1), epsilon=F(0), purpose="read")


def test_a_book_of_gdp_is_charged_what_a_pure_payment_is_there():
    """The square of mu = 2 Phi^-1(e^eps / (1 + e^eps)), rounded up, as for Laplace noise itself;
    draws under it cost nothing more."""
    ledger, spend = spender(dps.Terms(unit="event", total=F(1), measure="mu_squared"))
    spend.begin(0, lambda _: "")
    paid = spend.pay(np.array([4]), sensitivity=F(1), epsilon=F(1, 2), purpose="read")
    cost = round_up(pure_mu_above(F(1, 2)) ** 2)
    exact = 4 * NormalDist().inv_cdf(1 / (1 + math.exp(-0.5))) ** 2
    assert exact <= cost <= exact * (1 + 1e-9)
    assert ledger.left("stream", 0) == 1 - cost
    spend.laplace(np.array([4]), sensitivity=F(2), epsilon=F(9), purpose="look", interval=paid)
    assert ledger.left("stream", 0) == 1 - cost
    with pytest.raises(BudgetExceeded):
        spend.pay(np.array([4]), sensitivity=F(1), epsilon=F(1), purpose="more")
