"""The way to noise: what it charges, and what it does not believe."""

import os
from fractions import Fraction as F

import numpy as np
import pytest

import dpstream as dps
from dpstream.errors import InvalidInput, InvalidParameter, LedgerError, NoiseReuse, StateError
from dpstream.privacy.ledger.charges import Cells, Charge, Cover, Interval, Paid
from dpstream.privacy.spend import Spend

ONE = {"sensitivity": F(1), "epsilon": F(1, 2)}


def new_spend(measure="epsilon", **terms):
    """A fresh book and a way to its noise, at step 0."""
    ledger = dps.Ledger()
    ledger.open("s", dps.Terms(**{"unit": "event", "total": 1, "measure": measure} | terms))
    spend = Spend(run=bytes(16), key=bytes(32), ledger=ledger, dataset="s")
    at(spend, 0)
    return spend, ledger


def at(spend, step):
    spend.begin(step, lambda _: "")


def charge(**changed):
    fields = {"run": "a", "query": "", "purpose": "p", "step": 0, "amount": F(1)}
    return Charge(**fields | {"cells": Cells(first=0, last=0)} | changed)


def spent(ledger):
    return F(ledger.report()[0]["spent"])


def test_one_call_is_one_charge_and_one_draw_per_coordinate():
    """A vector costs what its sensitivity says, whatever its length."""
    spend, ledger = new_spend()
    answer = spend.laplace(np.zeros(500, int), purpose="p", sensitivity=F(1), epsilon=F(1, 100))

    assert spent(ledger) == F(1, 100)
    assert len(np.unique(answer)) > 100


def test_a_purpose_is_asked_once_a_step():
    """The same question again would meet the same noise, another kind the same charge."""
    spend, _ = new_spend(total=10)
    spend.laplace([7], purpose="p", **ONE)
    with pytest.raises(NoiseReuse):
        spend.laplace([7], purpose="p", **ONE)
    for ask in (
        lambda: spend.respond([1], buckets=4, epsilon=F(1, 2), purpose="p"),
        lambda: spend.choose([1, 2], purpose="p", **ONE),
    ):
        with pytest.raises(InvalidParameter, match="another kind of noise"):
            ask()


def test_noise_is_added_to_integers_only():
    """Floats and integers near the end of int64 are refused."""
    spend, ledger = new_spend()
    for value in (np.array([0.5]), np.array([2**62])):
        with pytest.raises(InvalidInput, match="integers below"):
            spend.laplace(value, purpose="p", **ONE)
    assert spent(ledger) == 0


def test_an_interval_pays_only_while_it_is_open():
    """Not before it is opened, not after it is closed, not for more than it cost."""
    spend, _ = new_spend(unit="w_event", window=5)
    interval = spend.open_interval(F(1, 2))
    spend.laplace([7], purpose="t", interval=interval, **ONE)
    with pytest.raises(InvalidParameter, match="does not pay"):
        spend.laplace([7], purpose="u", interval=interval, sensitivity=F(1), epsilon=F(1))
    at(spend, 1)
    spend.close_interval(interval)
    at(spend, 2)
    with pytest.raises(InvalidParameter, match="or is over"):
        spend.laplace([7], purpose="t", interval=interval, **ONE)
    with pytest.raises(InvalidParameter, match="or is over"):
        spend.close_interval(interval)
    nobodys = Interval(purpose="x", start=0, amount=F(9), run=bytes(16).hex())
    with pytest.raises(InvalidParameter, match="never opened"):
        spend.laplace([7], purpose="t", interval=nobodys, **ONE)


def test_a_book_of_gdp_has_no_intervals():
    """Neither its own nor a copied one; nothing is charged."""
    spend, ledger = new_spend("mu_squared")
    theirs = Interval(purpose="svt", start=0, amount=F(1, 4), run="ab" * 16)
    for ask in (lambda: spend.open_interval(F(1, 2)), lambda: spend.adopt(theirs)):
        with pytest.raises(InvalidParameter, match="must be in a book of epsilon or rho"):
            ask()
    assert spent(ledger) == 0


def test_what_another_run_paid_for_pays_for_nothing():
    """Intervals, covers and payments are tied to their run and to the ledger."""
    spend, _ = new_spend("rho")
    for token in (Cover(purpose="x", first=0, last=9, amount=F(9)), None):
        cover = token or Cover(purpose="x", first=0, last=9, amount=F(9), run=bytes(16).hex())
        with pytest.raises(InvalidParameter, match="does not pay"):
            spend.gaussian([7], sensitivity=F(1), rho=F(1), purpose="g", cover=cover)
    spend, _ = new_spend()
    with pytest.raises(InvalidParameter, match="another run"):
        spend.laplace([7], purpose="p", interval=Paid(purpose="x", run="ab"), **ONE)


def test_a_copied_token_is_paid_for_in_full():
    """Adopting another run's interval or cover charges it again."""
    spend, ledger = new_spend(unit="w_event", window=5)
    theirs = Interval(purpose="svt", start=0, amount=F(1, 4), run="ab" * 16)
    mine = spend.adopt(theirs)
    spend.laplace([7], purpose="t", interval=mine, sensitivity=F(1), epsilon=F(1, 8))

    assert spent(ledger) == F(1, 4)
    assert mine.run == bytes(16).hex()


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Cells(first=0, last=0, bins=()),
        lambda: Cells(first=3, last=2),
        lambda: charge(amount=F(-1)),
        lambda: charge(repeat=0),
        lambda: charge(step=-1),
    ],
)
def test_charges_that_would_cost_nothing_are_refused(bad):
    """No empty block of bins, no refund, no charge repeated zero times."""
    with pytest.raises(LedgerError):
        bad()


def test_a_total_off_the_grid_is_rounded_down():
    """What is admitted never passes the promise, not by one grid step."""
    spend, ledger = new_spend(total=F(1, 53))
    spend.laplace([7], purpose="p", sensitivity=F(1), epsilon=F(1, 53))

    assert spent(ledger) < F(1, 53)
    assert ledger.left("s") == 0


def test_a_fork_draws_nothing():
    """A child would draw the parent's noise over its own data."""
    spend, _ = new_spend()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            at(spend, 1)
            os.write(writer, b"drawn")
        except StateError:
            os.write(writer, b"refused")
        finally:
            os._exit(0)
    os.waitpid(child, 0)

    assert os.read(reader, 20) == b"refused"
