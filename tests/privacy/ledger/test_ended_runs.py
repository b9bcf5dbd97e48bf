"""A run that was ended draws nothing more; the ledger also knows the last period it has begun."""

from contextlib import closing
from dataclasses import replace
from fractions import Fraction

import pytest

from dpstream.errors import BudgetExceeded, InvalidParameter, LedgerError, StateError
from dpstream.privacy.ledger.charges import Cells, Charge, Terms
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.ledger.period_losses import PeriodLosses

USERS = Terms(unit="user", total=8, measure="mu_squared", period="1 day")
SMALL = Fraction(2)


def charge(run="old", **more):
    cells = Cells(first=0, last=0)
    return Charge(
        run=run, query="q", purpose="query", step=0, amount=Fraction(1), cells=cells, **more
    )


@pytest.fixture(params=["in memory", "in a file"])
def ledger(request, tmp_path):
    """A book with a run that has drawn."""
    ledger = Ledger(None if request.param == "in memory" else tmp_path / "book")
    ledger.open("clicks", USERS)
    ledger.charge("clicks", charge(digest="d"), lambda step: "d")
    ledger.begin("clicks", "old", "first", after="")
    ledger.reach("clicks", "old", 0, ["00"], epoch="first", types="t")
    yield ledger
    ledger.close()


STEPS = {
    "start": lambda ledger: ledger.begin("clicks", "old", "second", after="first"),
    "step": lambda ledger: ledger.reach("clicks", "old", 1, ["01"], epoch="first", types="t"),
    "window": lambda ledger: ledger.note_windows("clicks", "old", minted=1, final=0, epoch="first"),
    "period": lambda ledger: ledger.note_begun("clicks", "old", 7),
    "end of a series": lambda ledger: ledger.note_finish("clicks", "old", 1, epoch="first"),
    "charge": lambda ledger: ledger.charge("clicks", charge(digest="d"), lambda step: "d"),
}


@pytest.mark.parametrize("what", STEPS)
def test_a_run_that_was_ended_is_refused_whatever_it_does_next(ledger, what):
    """With words that say by whom and why; the book goes on with others."""
    ledger.end("clicks", "old", because="its disk is lost", who="ana")

    with pytest.raises(StateError, match=r"ended for good by ana \(its disk is lost\)"):
        STEPS[what](ledger)
    assert ledger.charge("clicks", charge("new"))


@pytest.mark.parametrize("what", STEPS)
def test_a_run_that_was_not_ended_goes_on(ledger, what):
    """The control."""
    STEPS[what](ledger)


def test_an_end_is_irrevocable(ledger):
    """Ended again it stays as it was; versions that do not know of ends meet an epoch that no
    directory has."""
    ledger.end("clicks", "old", because="its disk is lost", who="ana")
    known = ledger.known("old")
    ledger.end("clicks", "old", because="changed my mind", who="bob")

    assert ledger.known("old") == known
    assert known.ended == ("its disk is lost", "ana")
    assert known.epoch not in ("", "first")


def test_only_a_run_of_the_book_is_ended_and_not_without_a_reason(ledger):
    """A mistyped run must not look as if it had been ended."""
    with pytest.raises(LedgerError, match="knows of no run 'odl'"):
        ledger.end("clicks", "odl", because="lost", who="ana")
    with pytest.raises(InvalidParameter, match="because"):
        ledger.end("clicks", "old", because=" ", who="ana")
    assert ledger.known("old").ended is None


def test_begun_only_grows(ledger):
    """A replay says again what was said before."""
    for period in (5, 7, 6):
        ledger.note_begun("clicks", "old", period)

    assert ledger.known("old").begun == 7


def test_a_file_tells_the_next_process(tmp_path):
    """Also if the book was in memory first."""
    ledger = Ledger()
    ledger.open("clicks", USERS)
    ledger.charge("clicks", charge())
    ledger.begin("clicks", "old", "first", after="")
    ledger.note_begun("clicks", "old", -3)
    ledger.end("clicks", "old", because="lost", who="ana")
    known = ledger.known("old")
    ledger.persist(tmp_path / "book")
    ledger.close()

    again = Ledger(tmp_path / "book")
    assert again.known("old") == known
    assert (known.begun, known.ended) == (-3, ("lost", "ana"))
    again.close()


def dated(run, first, last=None, amount=1):
    """A charge that names periods."""
    return replace(charge(run, digest="d"), amount=Fraction(amount), periods=(first, last))


@pytest.fixture
def daily(ledger):
    """The book with a run from period 5 on that takes three parts of four."""
    for run in ("daily", "place"):
        ledger.register("clicks", run, run, kept=True)
    ledger.charge("clicks", dated("daily", 5, amount=3 * SMALL), lambda step: "d")
    ledger.note_begun("clicks", "daily", 6)
    return ledger


SAID = {"because": "it is changed", "who": "ana"}


def test_a_run_that_is_to_end_with_a_period_begins_none_after_it(daily):
    """And pays for none: others may. Taken back, the periods must be free still."""
    with pytest.raises(BudgetExceeded):
        daily.charge("clicks", dated("next", 8, amount=2 * SMALL))
    daily.limit("clicks", "daily", 7, **SAID)
    daily.note_begun("clicks", "daily", 7)
    with pytest.raises(LedgerError, match="was to end"):
        daily.note_begun("clicks", "daily", 8)
    daily.limit("clicks", "daily", None, **SAID)
    daily.limit("clicks", "daily", 7, **SAID)
    assert daily.charge("clicks", dated("next", 8, amount=2 * SMALL))
    with pytest.raises(BudgetExceeded, match="given to others"):
        daily.limit("clicks", "daily", None, **SAID)
    with pytest.raises(LedgerError, match="begun a later period"):
        daily.limit("clicks", "daily", 6, **SAID)
    with pytest.raises(LedgerError, match="names periods"):
        daily.limit("clicks", "old", 6, **SAID)
    assert daily.rehearsal().report() == daily.report()


def test_what_was_begun_behind_the_last_period_of_a_run_counts():
    """An earlier version of the program does not know of it, and goes on: nobody else has room."""
    losses = PeriodLosses()
    losses.add(dated("daily", 5, amount=3))
    losses.begin("daily", 6)
    losses.limit("daily", 7)
    assert losses.at(7).units > losses.at(8).units == 0
    losses.begin("daily", 9)
    assert losses.at(8) == losses.at(9) == losses.at(7) != losses.at(10)
    losses.end("daily")
    assert losses.at(9) == losses.at(7) != losses.at(10)


def test_a_place_that_was_held_is_given_to_its_run_at_once(daily):
    """One record does both: it is never counted twice, and nobody comes between."""
    daily.limit("clicks", "daily", 7, **SAID)
    daily.charge("clicks", dated("place", 8, amount=3 * SMALL), lambda step: "d")
    before = daily.report()
    with pytest.raises(BudgetExceeded):  # it does not fit, though nothing is held
        daily.charge("clicks", dated("run", 7, amount=SMALL), lambda step: "d", instead_of="place")
    assert daily.report() == before
    ours = dated("run", 8, amount=4 * SMALL - SMALL / 2)
    assert daily.charge("clicks", ours, lambda step: "d", instead_of="place")
    assert not daily.charge("clicks", ours, lambda step: "d", instead_of="place")
    (book,) = daily.report()
    runs = [line["run"] for line in book["spent_on"]]

    assert sorted(runs) == ["daily", "old", "run"]
    assert daily.known("place").voided
    with pytest.raises(StateError, match="ended for good"):
        daily.charge("clicks", dated("place", 9))
    assert daily.rehearsal().report() == daily.report()
    if daily.path is not None:
        with closing(Ledger(daily.path)) as again:
            assert again.report() == daily.report()


def test_a_run_that_has_begun_holds_no_place(daily):
    """What it has drawn stays charged."""
    with pytest.raises(LedgerError, match="stays"):
        daily.charge("clicks", dated("run", 9), lambda step: "d", instead_of="daily")
