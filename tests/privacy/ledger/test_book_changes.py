"""A book's budget may change, charges may be given back, and analysts have shares of it.

Laws: what is counted after a change is what a book that had the new budget all along would count;
a charge is never given back while its run could still draw, wherever a kill falls.
"""

import dataclasses
from collections import Counter
from contextlib import closing
from fractions import Fraction

import pytest

from benchmarks.recovery_child import killer, watched
from dpstream.errors import (
    BudgetExceeded,
    DpstreamError,
    InvalidParameter,
    LedgerError,
    StateError,
)
from dpstream.privacy.accounting.accountant import FloatError, delta_of
from dpstream.privacy.accounting.promises import promise, same_promise, with_lost_mass
from dpstream.privacy.ledger.charges import Allowance, Cells, Charge, Terms
from dpstream.privacy.ledger.ledger import Ledger
from tests.support.processes import run_in_fork

SMALL, LARGE = promise(epsilon=2, delta=1e-8), promise(epsilon=4, delta=1e-8)
TAU = Fraction(1, 10**11)
OWN = Fraction(1, 10**9)


def query(run="one", amount="1/100", **more):
    named = {"delta_slack": OWN, "lost_mass": TAU, "digest": "d"} | more
    return Charge(run=run, query=run, purpose="query", step=0, amount=Fraction(amount),
                  cells=Cells(first=0, last=0), **named)  # fmt: skip


def pay(ledger, charge, dataset="clicks"):
    return ledger.charge(dataset, charge, lambda step: charge.digest)


@pytest.fixture(params=["in memory", "in a file"])
def ledger(request, tmp_path):
    """A book of users with a charge."""
    with closing(Ledger(None if request.param == "in memory" else tmp_path / "book")) as ledger:
        ledger.open("clicks", SMALL)
        pay(ledger, query())
        yield ledger


# --- grow


def counted(ledger):
    (book,) = ledger.report()
    return book


def test_a_grown_book_counts_as_if_it_had_been_as_large_all_along(ledger):
    """Also what floats may lose, which counts 1 + e^epsilon times: what was charged before is
    counted anew, and the same charge made again counts once."""
    assert ledger.grow("clicks", LARGE, because="agreed", who="ana")
    always = Ledger()
    always.open("clicks", LARGE)
    pay(always, query())

    assert counted(ledger) == counted(always)
    assert not pay(ledger, query())
    slack = with_lost_mass(LARGE, delta_slack=OWN, error=FloatError(xi=Fraction(0), tau=TAU))
    assert Fraction(counted(ledger)["tail"]["spent"]) == slack
    assert slack - OWN > 6 * (with_lost_mass(SMALL, delta_slack=OWN, error=FloatError(
        xi=Fraction(0), tau=TAU)) - OWN)  # fmt: skip


def test_a_full_book_that_has_grown_keeps_its_new_promise():
    """The control counts lost mass as it was counted when it was charged, and breaks it."""
    tau = Fraction(5, 10**11)
    ledger = Ledger()
    ledger.open("clicks", SMALL)
    pay(ledger, query(delta_slack=Fraction(0), lost_mass=tau))
    before = Fraction(counted(ledger)["tail"]["spent"])
    ledger.grow("clicks", LARGE, because="agreed", who="ana")
    left = Fraction(counted(ledger)["tail"]["left"])
    pay(ledger, query("rest", Fraction(counted(ledger)["left"]), delta_slack=left, lost_mass=0))

    def truth(slack):
        return delta_of(
            epsilon=4,
            mu_squared=LARGE.total,
            delta_slack=slack,
            error=FloatError(xi=LARGE.rounding_slack, tau=tau),
        )

    assert truth(left) <= 1e-8
    assert truth(LARGE.delta_slack - before) > 1e-8


def test_everybody_sees_the_new_budget(tmp_path):
    """Whoever has the ledger open, whoever opens it, and whoever is refused before."""
    with closing(Ledger(tmp_path / "book")) as first, closing(Ledger(tmp_path / "book")) as second:
        first.open("clicks", SMALL)
        wanted = query(amount="1/5", lost_mass=0)
        with pytest.raises(BudgetExceeded, match="dpstream ledger grow"):
            pay(first, wanted)
        second.grow("clicks", LARGE, because="agreed", who="ana")
        assert pay(first, wanted)
        assert first.terms("clicks") == LARGE
    with closing(Ledger(tmp_path / "book")) as third:
        assert third.terms("clicks") == LARGE
        (record,) = [r for r in third.history() if "grown" in r]
        assert (record["who"], record["because"]) == ("ana", "agreed")
        third.open("clicks", LARGE)
        with pytest.raises(LedgerError, match="dpstream ledger grow changes a book's budget"):
            third.open("clicks", SMALL)


def test_less_than_what_is_spent_is_refused(ledger):
    """Of any of the three; what is spent exactly may be the budget. A refusal leaves no trace."""
    before = counted(ledger)
    spent = Fraction(before["spent"])
    for other in ({"total": spent - Fraction(1, 10**9)}, {"delta_slack": OWN}):
        with pytest.raises(BudgetExceeded):
            ledger.grow("clicks", dataclasses.replace(SMALL, **other), because="less", who="ana")
    assert counted(ledger) == before
    ledger.grow("clicks", dataclasses.replace(SMALL, total=spent), because="less", who="ana")
    assert counted(ledger)["left"] == "0"


def test_a_change_of_budget_leaves_whom_it_protects_and_has_a_reason(ledger):
    """Another unit would be another promise; the same budget changes nothing."""
    other = dataclasses.replace(LARGE, period="1 day")
    with pytest.raises(LedgerError, match="leaves that as it is"):
        ledger.grow("clicks", other, because="agreed", who="ana")
    with pytest.raises(InvalidParameter, match="say why"):
        ledger.grow("clicks", LARGE, because=" ", who="ana")
    assert not ledger.grow("clicks", SMALL, because="agreed", who="ana")


def test_a_book_of_steps_grows_too(tmp_path):
    """Its windows are counted on; below the worst of them it cannot go."""
    with closing(Ledger(tmp_path / "book")) as ledger:
        ledger.open("flu", Terms(unit="w_event", window=3, total=1))

        def step(number, amount=Fraction(1, 2)):
            at = Cells(first=number, last=number)
            return ledger.charge("flu", Charge(run="r", query="q", purpose="p", step=number,
                                 amount=amount, cells=at, digest=str(number)), str)  # fmt: skip

        step(0), step(1)
        with pytest.raises(BudgetExceeded):
            step(2)
        terms = ledger.terms("flu")
        ledger.grow("flu", same_promise(terms, epsilon="3/2", delta=None), because="x", who="ana")
        assert step(2)
        with pytest.raises(BudgetExceeded):
            ledger.grow("flu", terms, because="x", who="ana")
        assert not step(1)


def test_a_charge_of_an_older_version_counts_in_full_until_its_run_tells(tmp_path):
    """It does not say what part of its slack floats may lose: then all of it may be that."""
    with closing(Ledger(tmp_path / "book")) as ledger:
        ledger.open("clicks", SMALL)
        told = ledger._book("clicks").priced(query())
        pay(ledger, dataclasses.replace(told, lost_mass=Fraction(0)))  # as 0.2 wrote it
        with pytest.raises(BudgetExceeded, match="larger --delta"):
            ledger.grow("clicks", promise(epsilon=5, delta=1e-8), because="x", who="ana")
        assert not pay(ledger, query())  # the run is started by this version
        assert ledger.grow("clicks", promise(epsilon=5, delta=1e-8), because="x", who="ana")
        assert not pay(ledger, query())
        report = ledger.report()
    with closing(Ledger(tmp_path / "book")) as again:
        assert again.report() == report


@pytest.mark.parametrize("delta", ["1e-8", "3.7e-9", "0.000000123"])
@pytest.mark.parametrize("epsilon", ["0.5", "2", "6"])
def test_the_delta_of_a_book_is_found_again(epsilon, delta):
    """Without --delta a book keeps the one that it was opened with."""
    book = promise(epsilon=epsilon, delta=delta, change="all rows with one 'user'")

    assert same_promise(book, epsilon=3, delta=None) == book.with_budget_of(
        promise(epsilon=3, delta=delta)
    )


def test_a_provisional_budget_is_set_by_whoever_opens_the_book(ledger):
    """What was charged to it before counts; a second opener must say the same."""
    other = Ledger(None if ledger.path is None else ledger.path.with_name("other"))
    other.open("clicks", SMALL, provisional=True)
    pay(other, query())
    other.open("clicks", LARGE)

    assert other.terms("clicks") == LARGE
    assert Fraction(counted(other)["spent"]) == Fraction(1, 100)
    with pytest.raises(LedgerError):
        other.open("clicks", SMALL)
    other.close()


# --- void


RUN = "unbegun"


def charged(path, *, kept=True):
    """A ledger with a run that has a state directory, is charged and has begun no step."""
    with closing(Ledger(path)) as ledger:
        ledger.open("clicks", SMALL)
        ledger.register("clicks", RUN, "print", kept=kept)
        pay(ledger, query(RUN))


DRAWS = {
    "start": lambda ledger: ledger.begin("clicks", RUN, "e", after=""),
    "step": lambda ledger: ledger.reach("clicks", RUN, 0, ["00"], epoch="", types="t"),
    "window": lambda ledger: ledger.note_windows("clicks", RUN, minted=1, final=0, epoch=""),
    "charge": lambda ledger: pay(ledger, query(RUN)),
}
"""What an old state, or a process that is at it, does before it draws."""


def can_draw(ledger):
    """Would the ledger let the run go on? Every way is tried."""
    allowed = []
    for name, draw in DRAWS.items():
        try:
            draw(ledger)
        except StateError:
            continue
        except DpstreamError:
            pass
        allowed.append(name)
    return allowed


def void(ledger):
    ledger.void("clicks", RUN, because="the wrong query", who="ana")


def void_and_then_end(ledger):
    """A broken one: what is given back may still be drawn after a kill."""
    with ledger._locked():
        ledger._note("clicks", RUN, voided="the wrong query", who="ana")
        ledger.end("clicks", RUN, because="the wrong query", who="ana")


def kill_everywhere(place, give_back):
    """Kill it before each operation on the disk; the runs that could draw for nothing."""
    bad, statuses = [], []
    for nth in range(1, 60):
        path = place / f"book-{nth}"
        charged(path)

        def work(path=path, nth=nth):
            with closing(Ledger(path)) as ledger:
                ledger.report()
                kill = {"where": "any", "nth": nth, "torn": False}
                with watched(killer({"kill": kill}, Counter())):
                    give_back(ledger)

        statuses.append(run_in_fork(work))
        with closing(Ledger(path)) as ledger:
            given_back = counted(ledger)["spent"] == "0"
            if given_back and can_draw(ledger):
                bad.append(nth)
        if not statuses[-1]:
            break
    assert statuses[-1] == 0
    assert any(statuses)
    return bad


def test_no_charge_is_given_back_while_its_run_could_draw(tmp_path):
    """Wherever a kill falls; the control writes the two records the other way round."""
    assert kill_everywhere(tmp_path, void) == []
    (tmp_path / "control").mkdir()
    assert kill_everywhere(tmp_path / "control", void_and_then_end) != []


def test_a_voided_charge_is_room_for_others_and_stays_given_back(tmp_path):
    """Also for who opens the ledger later; and it is given back once."""
    path = tmp_path / "book"
    charged(path)
    with closing(Ledger(path)) as ledger:
        pay(ledger, query("other"))
        void(ledger)
        report = ledger.report()
        assert {line["run"] for line in report[0]["spent_on"]} == {"other"}
        assert report[0]["spent"] == "1/100"
        with pytest.raises(LedgerError, match="given back already"):
            void(ledger)
    with closing(Ledger(path)) as ledger:
        assert ledger.report() == report
        assert can_draw(ledger) == []


@pytest.mark.parametrize("begun", ["step", "window", "period"])
def test_a_run_that_has_begun_is_not_voided(tmp_path, begun):
    """One step, one key or one period is enough; the run itself is left alone."""
    charged(tmp_path / "book")
    with closing(Ledger(tmp_path / "book")) as ledger:
        ledger.begin("clicks", RUN, "e", after="")
        if begun == "step":
            ledger.reach("clicks", RUN, 0, ["00"], epoch="e", types="t")
        elif begun == "window":
            ledger.note_windows("clicks", RUN, minted=1, final=0, epoch="e")
        else:
            ledger.note_begun("clicks", RUN, 1)
        with pytest.raises(LedgerError, match="has begun 1 steps"):
            void(ledger)
        assert ledger.known(RUN).ended is None


def test_what_the_ledger_does_not_show_is_not_voided(tmp_path):
    """A run without a state directory tells of no step; a book of steps has nothing to give."""
    charged(tmp_path / "book", kept=False)
    with closing(Ledger(tmp_path / "book")) as ledger:
        with pytest.raises(LedgerError, match="does not show that nothing was drawn"):
            void(ledger)
        with pytest.raises(LedgerError, match="no charge of a run 'x'"):
            ledger.void("clicks", "x", because="typo", who="ana")


def test_a_process_that_has_charged_and_not_begun_is_refused_at_its_first_step(tmp_path):
    """It holds the ledger open while somebody else gives its charge back."""
    charged(tmp_path / "book")
    with closing(Ledger(tmp_path / "book")) as mine, closing(Ledger(tmp_path / "book")) as theirs:
        mine.begin("clicks", RUN, "e", after="")
        void(theirs)
        with pytest.raises(StateError, match="ended for good by ana"):
            mine.reach("clicks", RUN, 0, ["00"], epoch="e", types="t")


# --- analysts


def allow(ledger, analyst="ana", because="agreed", **more):
    ledger.allow("clicks", analyst, because=because, who="op", **more)


def asked(ledger, run, analyst, amount="1/100", **more):
    ledger.register("clicks", run, f"print of {run}", analyst=analyst)
    return pay(ledger, query(run, amount, **more))


def test_a_share_is_used_up_before_the_book_is(ledger):
    """The refusal says whose; others have theirs; without names anybody may (the control)."""
    half = SMALL.total / 2
    assert asked(ledger, "free", "", amount="1/1000")
    allow(ledger, share=Fraction(1, 2)), allow(ledger, "bob", share=Fraction(1, 2))
    assert asked(ledger, "a1", "ana", half - Fraction(1, 100))
    with pytest.raises(BudgetExceeded, match=r"share of 'ana', 0.5 of the book, is used up: 'a2'"):
        asked(ledger, "a2", "ana", "1/50")
    assert asked(ledger, "b1", "bob", "1/50")
    (book,) = ledger.report()
    assert Fraction(book["principals"]["ana"]["spent"]) == half - Fraction(1, 100)
    assert {line["run"]: line.get("analyst") for line in book["spent_on"]} == {
        "one": None, "free": None, "a1": "ana", "b1": "bob",
    }  # fmt: skip


def test_one_query_may_be_too_large(ledger):
    """Read as epsilon at the book's delta."""
    allow(ledger, largest=Fraction(1))
    small, large = promise(epsilon=1, delta=1e-8).total, promise(epsilon="1.3", delta=1e-8).total
    with pytest.raises(BudgetExceeded, match="one query of 'ana' may cost epsilon = 1 at most"):
        asked(ledger, "large", "ana", large)
    assert asked(ledger, "small", "ana", small)


def test_delta_has_shares_too(ledger):
    """Half a book is half of its delta."""
    allow(ledger, share=Fraction(1, 2))
    with pytest.raises(BudgetExceeded, match="its part of delta is used up"):
        asked(ledger, "a", "ana", delta_slack=SMALL.delta_slack * Fraction(3, 5), lost_mass=0)


def test_a_book_with_names_takes_new_runs_from_them_alone(ledger):
    """Runs that began before go on."""
    ledger.register("clicks", "old", "print of old")
    allow(ledger)
    for stranger, said in (("eve", "'eve' is none of them"), ("", "nobody is said to ask")):
        with pytest.raises(BudgetExceeded, match=f"charged by 'ana', and {said}"):
            asked(ledger, "new", stranger)
    assert asked(ledger, "old", "")
    assert asked(ledger, "new", "ana")


def test_charges_from_before_the_share_count(ledger):
    """A share is not a fresh one."""
    asked(ledger, "a1", "ana", SMALL.total * Fraction(1, 4))
    allow(ledger, share=Fraction(1, 4))
    with pytest.raises(BudgetExceeded, match="'ana'"):
        asked(ledger, "a2", "ana", "1/1000")


def test_shares_follow_the_budget_and_what_is_given_back(tmp_path):
    """And are the same for who opens the ledger later."""
    charged(tmp_path / "book")
    with closing(Ledger(tmp_path / "book")) as ledger:
        allow(ledger, share=Fraction(1, 10))
        assert asked(ledger, "a1", "ana", "1/1000", delta_slack=0, lost_mass=0)
        wanted = {"amount": SMALL.total / 5, "delta_slack": 0, "lost_mass": 0}
        with pytest.raises(BudgetExceeded, match="'ana'"):
            asked(ledger, "a2", "ana", **wanted)
        ledger.grow("clicks", promise(epsilon=6, delta=2e-8), because="x", who="op")
        assert asked(ledger, "a2", "ana", **wanted)
        report = ledger.report()
    with closing(Ledger(tmp_path / "book")) as ledger:
        assert ledger.report() == report


def test_a_share_of_a_book_of_steps_is_of_every_window():
    """Steps leave the share as they leave the window."""
    ledger = Ledger()
    ledger.open("flu", Terms(unit="w_event", window=3, total=4))
    ledger.allow("flu", "ana", share="1/4", because="x", who="op")
    ledger.register("flu", "r", "print", analyst="ana")

    def step(number):
        at = Cells(first=number, last=number)
        return ledger.charge("flu", Charge(run="r", query="q", purpose="p", step=number,
                             amount=Fraction(1, 3), cells=at, digest=str(number)), str)  # fmt: skip

    assert all(step(number) for number in range(20))
    ledger.allow("flu", "ana", share="1/6", because="less", who="op")
    with pytest.raises(BudgetExceeded, match="share of 'ana'"):
        step(20)


@pytest.mark.parametrize("bad", [{"share": 0}, {"share": "3/2"}, {"largest": 0}])
def test_allowances_are_checked(bad):
    """A share is a part of the book."""
    with pytest.raises(InvalidParameter):
        Allowance(**bad)
