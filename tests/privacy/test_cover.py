"""One charge for a whole matrix mechanism: what it costs, where it holds, who may draw under it."""

import math
from fractions import Fraction

import numpy as np
import pytest

from dpstream.errors import BudgetExceeded, InvalidParameter, LedgerError, NoiseReuse
from dpstream.privacy.accounting.curves import pure_mu_above, pure_rho_above
from dpstream.privacy.ledger.charges import Cells, Charge, Cover, Terms
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.spend import Spend
from dpstream.privacy.state import pack, unpack

EVENT = Terms(unit="event", total=Fraction(1), measure="rho")
GDP = Terms(unit="event", total=Fraction(1), measure="mu_squared")


def new_spend(terms=EVENT, *, ledger=None, run=bytes(16), query=""):
    ledger = Ledger() if ledger is None else ledger
    if ledger.terms("d") is None:
        ledger.open("d", terms)
    spend = Spend(run=run, key=bytes(32), ledger=ledger, dataset="d", query=query)
    spend.begin(0, lambda step: "")
    return spend, ledger


def gaussian(spend, cover, rho=Fraction(1)):
    return spend.gaussian([5], sensitivity=Fraction(2), rho=rho, purpose="count", cover=cover)


def test_a_cover_pays_once_for_every_step_it_spans():
    """Draws under it charge nothing more; every covered step has lost its amount, no other has."""
    spend, ledger = new_spend()
    cover = spend.cover(Fraction(3, 4), last=9)
    for step in range(10):
        spend.begin(step, lambda step: "")
        gaussian(spend, cover, Fraction(3, 4))

    assert [ledger.left("d", step) for step in (0, 5, 9, 10)] == [Fraction(1, 4)] * 3 + [1]


def test_other_charges_meet_the_cover():
    """A second query finds only the rest, within the block and not after it."""
    spend, ledger = new_spend()
    spend.cover(Fraction(3, 4), last=9)
    other, _ = new_spend(ledger=ledger, query="other")
    other.begin(4, lambda step: "")
    other.gaussian([1], sensitivity=Fraction(1), rho=Fraction(1, 4), purpose="a")
    with pytest.raises(BudgetExceeded):
        other.gaussian([1], sensitivity=Fraction(1), rho=Fraction(1, 100), purpose="b")
    other.begin(10, lambda step: "")
    other.gaussian([1], sensitivity=Fraction(1), rho=Fraction(1), purpose="a")


def test_a_cover_is_checked_against_every_step_of_its_block():
    """A charge made earlier anywhere in the block, or another cover, leaves too little."""
    spend, ledger = new_spend()
    spend.begin(7, lambda step: "")
    spend.gaussian([1], sensitivity=Fraction(1), rho=Fraction(1, 2), purpose="late")
    spend.begin(20, lambda step: "")
    spend.cover(Fraction(1, 2), last=30)
    other, _ = new_spend(ledger=ledger, query="other")
    for first, last in ((0, 10**12), (7, 7), (25, 40), (15, 20)):
        other.begin(first, lambda step: "")
        with pytest.raises(BudgetExceeded):
            other.cover(Fraction(6, 10), last=last)
    other.begin(8, lambda step: "")
    other.cover(Fraction(6, 10), last=19)


def test_a_cover_of_a_trillion_steps_is_one_entry():
    """Neither time nor memory grows with the length of the block."""
    spend, ledger = new_spend()
    spend.cover(Fraction(1), last=10**12)

    assert ledger.left("d", 10**11) == 0
    assert len(ledger.report()[0]["spent_on"]) == 1


@pytest.mark.parametrize("measure", ["rho", "mu_squared"])
@pytest.mark.parametrize("unit", [{"unit": "w_event", "window": 3}, {"unit": "user"}])
def test_blocks_are_refused_where_a_unit_touches_several_steps(measure, unit):
    """One joint Gaussian costs a unit with k changed cells up to k^2 times the amount."""
    spend, ledger = new_spend(Terms(total=Fraction(1), measure=measure, **unit))
    for last in (0, 5):
        with pytest.raises(LedgerError, match=r"k\^2"):
            spend.cover(Fraction(1, 10), last=last)
    block = Charge(
        run="00" * 16,
        query="",
        purpose="sum",
        step=5,
        amount=Fraction(1, 10),
        cells=Cells(first=0, last=5),
    )
    with pytest.raises(LedgerError, match=r"k\^2"):
        ledger.charge("d", block)


def test_blocks_of_pure_epsilon_still_add_up():
    """Changing k cells of a Laplace sum costs k epsilon, which is what charging each cell says."""
    spend, ledger = new_spend(Terms(unit="w_event", window=3, total=Fraction(1)))
    spend.begin(5, lambda step: "")
    spend.laplace(
        [1],
        sensitivity=Fraction(1),
        epsilon=Fraction(1, 3),
        purpose="sum",
        cells=Cells(first=0, last=5),
    )

    assert ledger.left("d", 5) == 0


def test_draws_outside_their_cover_are_refused():
    """Another step, or less noise than was paid for."""
    spend, _ = new_spend()
    cover = spend.cover(Fraction(1, 2), last=3)
    with pytest.raises(InvalidParameter, match="does not pay"):
        gaussian(spend, cover, Fraction(51, 100))
    spend.begin(4, lambda step: "")
    with pytest.raises(InvalidParameter, match="at step 4"):
        gaussian(spend, cover, Fraction(1, 2))


def test_each_book_has_its_own_noise():
    """Discrete Gaussians are not GDP, normals not for books of rho; pure noise pays its mu^2."""
    gdp, _ = new_spend(GDP)
    cover = gdp.cover(Fraction(1), last=3)
    with pytest.raises(InvalidParameter, match="mu_squared"):
        gaussian(gdp, cover)
    gdp, ledger = new_spend(GDP)
    gdp.laplace([1], sensitivity=Fraction(1), epsilon=Fraction(1, 2), purpose="a")
    spent = Fraction(ledger.report()[0]["spent"])
    assert pure_mu_above(Fraction(1, 2)) ** 2 <= spent < Fraction(2, 5)
    zcdp, _ = new_spend()
    with pytest.raises(InvalidParameter, match="rho"):
        zcdp.normals(3, purpose="z", cover=zcdp.cover(Fraction(1), last=3))
    pure, _ = new_spend(Terms(unit="event", total=Fraction(1)))
    with pytest.raises(InvalidParameter, match="epsilon"):
        pure.cover(Fraction(1), last=3)


def test_normals_are_drawn_after_the_ledger_and_once(tmp_path):
    """Rows for a size or for key ids; a second draw at a step is refused."""
    spend, ledger = new_spend(GDP, ledger=Ledger(tmp_path / "ledger"))
    cover = spend.cover(Fraction(1), last=3)
    ids = np.arange(8, dtype=np.uint64).reshape(-1, 2)

    assert spend.normals(5, purpose="z", cover=cover).shape == (5, 1)
    assert spend.normals(ids, each=3, purpose="k", cover=cover).shape == (4, 3)
    assert {line["purpose"] for line in ledger.report()[0]["spent_on"]} == {"cover", "z", "k"}
    with pytest.raises(NoiseReuse):
        spend.normals(5, purpose="z", cover=cover)


def test_covered_draws_are_tied_to_their_input(tmp_path):
    """The same draw over other data is refused, although it would cost nothing."""
    ledger = Ledger(tmp_path / "ledger")
    spend, _ = new_spend(ledger=ledger)
    cover = spend.cover(Fraction(1), last=9)
    spend.begin(1, lambda step: "one input")
    gaussian(spend, cover)
    again, _ = new_spend(ledger=ledger)
    assert again.cover(Fraction(1), last=9) == cover
    again.begin(1, lambda step: "another input")
    with pytest.raises(NoiseReuse):
        gaussian(again, cover)


def test_a_cover_survives_a_restart_of_the_book(tmp_path):
    """Read back from the file, also where only its later part is still held."""
    spend, _ = new_spend(ledger=Ledger(tmp_path / "ledger"))
    spend.cover(Fraction(3, 4), last=10**6)
    again = Ledger(tmp_path / "ledger")
    late = {"run": "11" * 16, "query": "", "purpose": "x"}
    for step in (0, 40_000, 80_000, 120_000):
        cells = Cells(first=step, last=step)
        again.charge("d", Charge(**late, step=step, amount=Fraction(1, 4), cells=cells))
    for step in (500, 119_999, 120_001):
        cells = Cells(first=step, last=step)
        with pytest.raises(BudgetExceeded):
            again.charge("d", Charge(**late, step=step, amount=Fraction(1, 3), cells=cells))


def test_a_cover_is_a_plain_value():
    """It is stored with a mechanism's state."""
    cover = Cover(purpose="p", first=0, last=5, amount=Fraction(1, 3))

    assert unpack(pack(cover, kind="x"), kind="x") == cover


def test_pure_noise_in_a_zcdp_book_costs_its_tight_rho():
    """An upper bound on epsilon tanh(epsilon / 2), never above epsilon^2 / 2."""
    for epsilon in (Fraction(1, 100), Fraction(1, 2), Fraction(1), Fraction(2), Fraction(5)):
        bound = pure_rho_above(epsilon)
        assert epsilon * math.tanh(epsilon / 2) <= float(bound) * (1 + 1e-12)
        assert bound <= min(epsilon**2 / 2, epsilon)
    spend, ledger = new_spend()
    spend.laplace([1], sensitivity=Fraction(1), epsilon=Fraction(1), purpose="a")
    assert 1 - ledger.left("d", 0) == pytest.approx(0.4625, abs=1e-4)
