"""What every ledger on a server must do: the laws of one book, and lost answers."""

from contextlib import closing
from datetime import timedelta
from fractions import Fraction

import pytest
from hypothesis import strategies as st

import dpstream as dps
from dpstream.connectors import ledger_lines
from dpstream.errors import BudgetExceeded, LedgerError
from dpstream.privacy.ledger import ledger as ledgers
from dpstream.privacy.ledger.charges import Cells, Charge
from dpstream.privacy.ledger.ledger import Ledger
from tests.laws import test_one_book as laws
from tests.support.processes import exit_status, start_fork

USER = dps.Terms(unit="user", total=Fraction(1))
BOTH = st.sampled_from([1, 3, 8, None])


def charge(step, amount="1/16", run="ab" * 16):
    cells = Cells(first=step, last=step)
    return Charge(
        run=run, query="q", purpose="p", step=step, amount=Fraction(amount), cells=cells, digest="d"
    )


def opened(uri, terms=USER):
    ledger = Ledger(uri)
    ledger.open("flu", terms)
    return ledger


def charged(uri):
    """The steps that were charged, as the server has them."""
    with closing(Ledger(uri)) as ledger:
        return [record["step"] for record in ledger.history() if "amount" in record]


def decides_as_a_file(uri, folder, charges, width):
    """Every charge, refusal and balance is that of a file, also of a second reader."""
    unit = {1: "event", None: "user"}.get(width, "w_event")
    terms = dps.Terms(unit=unit, window=width if unit == "w_event" else None, total=1)
    file, server = Ledger(folder / "book"), Ledger(uri)
    for ledger in (file, server):
        ledger.open("s", terms)
        ledger.register("s", laws.RUN, "plan")
        ledger.begin("s", laws.RUN, "epoch", after="")
        ledger.reach("s", laws.RUN, 3, ["digest"], epoch="epoch", types="types")
    for one in charges:
        assert laws.decision(file, one) == laws.decision(server, one), one
    with closing(server), closing(Ledger(uri)) as other:
        stands = [laws.standing(each, charges) for each in (file, server, other)]
    assert stands[0] == stands[1] == stands[2]


class ServerLedgerSuite:
    """`uri`: of a ledger that is not there yet. `lose(when, meanwhile)`: from now on one write has
    no answer, `before` or `after` the server has made it, and `meanwhile` happens."""

    def test_compaction_changes_no_answer(self, uri, monkeypatch):
        """The oldest records fold; who has the ledger open, and who comes later, see the same."""
        monkeypatch.setattr(ledger_lines, "LARGE", 0)
        monkeypatch.setattr(ledgers, "_WORTHWHILE", 1)
        monkeypatch.setattr(ledgers, "_VERBATIM", timedelta(0))
        terms = dps.Terms(unit="w_event", window=3, total=Fraction(1))
        ledger, other = opened(uri, terms), Ledger(uri)
        heads = []
        for step in range(40):
            ledger.charge("flu", charge(step))
            heads.append(ledger.head())
            if step in (5, 25):
                before, seen = ledger.report(), other.report()
                ledger._look_again = ""
                ledger.compact()
                assert ledger.report() == before == seen
        late = Ledger(uri)

        assert ledger.report() == other.report() == late.report()
        assert all(one.has(head) for one in (ledger, other, late) for head in heads)
        assert not late.has((heads[-1][0], "0" * 16))
        assert not late.has((heads[-1][0] + 9, heads[-1][1]))
        records = list(late.history())
        assert len(records) < 40
        assert any("compacted" in record for record in records)
        other.charge("flu", charge(40))
        assert ledger.peak("flu") == other.peak("flu")

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_an_answer_that_is_lost_is_looked_up(self, uri, lose, when):
        """Whether the server has made the write or not, the charge is there once."""
        ledger = opened(uri)
        lose(when)

        assert ledger.charge("flu", charge(0)) is True
        assert charged(uri) == [0]
        assert ledger.charge("flu", charge(1))
        assert ledger.left("flu") == Fraction(7, 8)

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_others_that_write_meanwhile_are_counted(self, uri, lose, when):
        """What did not get through is checked again, against what others have charged since."""
        ledger, other = opened(uri), Ledger(uri)

        def meanwhile():
            other.charge("flu", charge(0, "1/2" if when == "before" else "1/8", run="cd" * 16))

        lose(when, meanwhile)
        if when == "before":
            with pytest.raises(BudgetExceeded):
                ledger.charge("flu", charge(0, "3/4"))
        else:
            assert ledger.charge("flu", charge(0, "3/4")) is True

        left = Fraction(1, 2) if when == "before" else Fraction(1, 8)
        assert ledger.left("flu") == other.left("flu") == left

    def test_a_ledger_of_before_a_fork_is_refused(self, uri):
        """A child would speak over its parent's connection, or wait for threads it has not."""
        ledger = opened(uri)

        def use():
            with pytest.raises(LedgerError, match="before a fork"):
                ledger.charge("flu", charge(0))
            ledger.close()

        assert exit_status(start_fork(use)) == 0
        assert ledger.charge("flu", charge(0))
