"""The budget book: what it adds, what it refuses, what survives a kill."""

import json
import os
import signal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpstream.errors import BudgetExceeded, InvalidParameter, LedgerError, NoiseReuse
from dpstream.privacy.accounting.accountant import FloatError
from dpstream.privacy.accounting.promises import delta_of_terms, own_terms, promise, with_lost_mass
from dpstream.privacy.amounts import GRID, exact, on_grid, units
from dpstream.privacy.ledger.balance import Account
from dpstream.privacy.ledger.charges import Cells, Charge, Terms
from dpstream.privacy.ledger.ledger import Ledger
from tests.laws.cases import worst_loss
from tests.support.kill_and_replay import KindOfRun, WhenSeen
from tests.support.long import part_of
from tests.support.processes import exit_status, start_fork


def charge(step=0, amount="1/4", *, cells=None, **more):
    defaults = {"run": "ab" * 16, "query": "q", "purpose": "publish"}
    cells = cells or Cells(first=step, last=step)
    return Charge(**defaults | {"step": step, "amount": Fraction(amount), "cells": cells} | more)


def w_event(window=3, total=1, **more):
    return Terms(unit="w_event", window=window, total=Fraction(total), **more)


def opened(terms, path=None):
    ledger = Ledger(path)
    ledger.open("flu", terms)
    return ledger


bins = st.none() | st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 3)).map(lambda t: (t[0], t[0] + t[1])),
    min_size=1,
    max_size=2,
    unique_by=lambda pair: pair[0],
).map(lambda pairs: tuple(sorted(pairs)[:1]))


@st.composite
def books(draw):
    """Charges in any order of steps: cells, repeated ones, intervals opened and closed."""
    made, open_at = [], {}
    for number in range(draw(st.integers(1, 12))):
        step, amount = draw(st.integers(0, 15)), Fraction(draw(st.integers(1, 5)), 7)
        kind = draw(st.sampled_from(["cells", "cells", "repeat", "open", "close"]))
        name = {"purpose": f"p{number}"}
        if kind == "repeat":
            made.append(charge(step, amount, repeat=draw(st.integers(1, 4)), **name))
        elif kind == "open":
            open_at[f"p{number}"] = step
            made.append(charge(step, amount, kind="open", **name))
        elif kind == "close" and open_at:
            purpose, start = open_at.popitem()
            end = start + draw(st.integers(0, 5))
            cells = Cells(first=start, last=end)
            made.append(charge(end, 0, kind="close", purpose=purpose, cells=cells))
        else:
            last = step + draw(st.integers(0, 3))
            cells = Cells(first=step, last=last, bins=draw(bins))
            made.append(charge(last, amount, cells=cells, **name))
    return made


def as_plain(charges):
    """The same charges for the brute-force ledger."""
    ends = {(c.purpose, c.cells.first): c.cells.last for c in charges if c.kind == "close"}
    plain = []
    for c in charges:
        first, last = c.cells.first, c.cells.last
        if c.kind == "open":
            plain.append(("interval", first, ends.get((c.purpose, first)), None, c.amount))
        elif c.kind == "cells":
            plain += [
                ("cells", first + i, last + i, c.cells.bins, c.amount) for i in range(c.repeat)
            ]
    return plain


@given(books(), st.sampled_from([1, 2, 3, 7, None]))
def test_the_account_agrees_with_brute_force(charges, width):
    """After every charge, at whatever place, the loss equals a sum over all windows."""
    unit = {1: "event", None: "user"}.get(width, "w_event")
    terms = Terms(unit=unit, total=100, window=width if unit == "w_event" else None)
    account, worst = Account(terms), Fraction(0)
    for position, one in enumerate(charges, start=1):
        account.add(one)
        worst = max(worst, worst_loss(as_plain(charges[:position]), width))
        assert abs(Fraction(account.peak, GRID) - worst) < Fraction(1, 10**40)


def test_a_window_gives_budget_back():
    """A charge returns when its step leaves the window, not before."""
    ledger = opened(w_event(window=3, total=1))
    for step in (0, 3, 6):
        ledger.charge("flu", charge(step, 1))
    with pytest.raises(BudgetExceeded):
        ledger.charge("flu", charge(8, 1))
    ledger.charge("flu", charge(9, 1))

    assert ledger.left("flu") == 0
    assert ledger.left("flu", 12) == 1


def test_thirds_fill_a_budget_exactly():
    """Rationals: three thirds fit one, and nothing fits after them."""
    ledger = opened(Terms(unit="user", total=1))
    for step in range(3):
        ledger.charge("flu", charge(step, "1/3"))

    assert ledger.left("flu") == 0
    with pytest.raises(BudgetExceeded):
        ledger.charge("flu", charge(3, Fraction(1, GRID)))


def test_the_refusal_says_what_to_do():
    """The error carries what was asked, what is left, and the remedy."""
    ledger = opened(w_event(window=120, total=1))
    ledger.charge("flu", charge(0, "3/4"))
    with pytest.raises(BudgetExceeded) as refusal:
        ledger.charge("flu", charge(1, 1))

    for part in ("epsilon=1", "only 0.25 of 1", "120 steps", "wait for an older step"):
        assert part in str(refusal.value)


def test_a_refused_charge_leaves_no_trace():
    """What was refused is not counted, in memory or in the file."""
    ledger = opened(w_event())
    ledger.charge("flu", charge(0, "3/4"))
    before = ledger.report()
    with pytest.raises(BudgetExceeded):
        ledger.charge("flu", charge(1, "1/2"))

    assert ledger.report() == before


def test_groups_of_bins_cost_their_maximum():
    """Disjoint bins of a step compose in parallel, overlapping ones add."""
    ledger = opened(Terms(unit="event", total=1))
    for number, ranges in enumerate([((0, 2),), ((2, 4),), ((4, 9),)]):
        cells = Cells(first=0, last=0, bins=ranges)
        ledger.charge("flu", charge(0, 1, cells=cells, purpose=f"group {number}"))
    overlap = charge(0, "1/8", cells=Cells(first=0, last=0, bins=((3, 5),)), purpose="overlap")
    with pytest.raises(BudgetExceeded):
        ledger.charge("flu", overlap)


def test_an_open_interval_is_held_until_its_end_leaves_the_window():
    """A test over steps 1 to 4 costs every window that overlaps it, once."""
    ledger = opened(w_event(window=3, total=1))
    ledger.charge("flu", charge(1, "1/2", kind="open", purpose="svt"))
    with pytest.raises(BudgetExceeded):
        ledger.charge("flu", charge(50, "3/4"))
    end = Cells(first=1, last=4)
    ledger.charge("flu", charge(4, 0, kind="close", purpose="svt", cells=end))

    with pytest.raises(BudgetExceeded):
        ledger.charge("flu", charge(6, "3/4"))
    ledger.charge("flu", charge(7, "3/4"))


def test_the_same_charge_counts_once():
    """A replay charges nothing; another amount, other cells or other data are refused."""
    ledger = opened(w_event())
    first = charge(5, "1/2", digest="aa")

    assert ledger.charge("flu", first, lambda step: "aa")
    assert not ledger.charge("flu", first, lambda step: "aa")
    with pytest.raises(LedgerError):
        ledger.charge("flu", charge(5, "1/3", digest="aa"), lambda step: "aa")
    other_cells = charge(5, "1/2", cells=Cells(first=4, last=5))
    with pytest.raises(LedgerError):
        ledger.charge("flu", other_cells, lambda step: "aa")
    with pytest.raises(NoiseReuse):
        ledger.charge("flu", charge(5, "1/2", digest="bb"), lambda step: "bb")
    assert ledger.left("flu", 5) == Fraction(1, 2)


def test_a_repeated_charge_may_be_replayed_in_other_pieces():
    """Steps 0-9 charged at once, then 5-12: only 10-12 are new."""
    ledger = opened(w_event(window=3, total="3/4"))
    ledger.charge("flu", charge(0, "1/4", repeat=10))

    assert not ledger.charge("flu", charge(5, "1/4"))
    assert ledger.charge("flu", charge(5, "1/4", repeat=8))
    assert [line["charges"] for line in ledger.report()[0]["spent_on"]] == [13]


def test_a_run_id_is_tied_to_what_it_publishes():
    """The same run with another fingerprint is refused."""
    ledger = opened(w_event())
    ledger.register("flu", "ab", "plan 1")
    ledger.register("flu", "ab", "plan 1")
    with pytest.raises(NoiseReuse):
        ledger.register("flu", "ab", "plan 2")


def test_a_book_keeps_its_terms(tmp_path):
    """Another neighbour relation, period, time zone or clock for the same dataset is refused."""
    path = tmp_path / "ledger"
    opened(w_event(), path).close()
    opened(w_event(), path).close()
    for other in (
        w_event(window=4),
        w_event(total=2),
        w_event(clock="1 week"),
        w_event(time_zone="Europe/Zurich"),
        Terms(unit="event", total=1),
    ):
        with pytest.raises(LedgerError):
            opened(other, path)


def test_a_second_process_sees_the_first_ones_charges(tmp_path):
    """Two open ledgers on one file share one budget."""
    path = tmp_path / "ledger"
    one, two = opened(w_event(), path), opened(w_event(), path)
    one.charge("flu", charge(0, "3/4"))
    with pytest.raises(BudgetExceeded):
        two.charge("flu", charge(0, "1/2", purpose="other"))
    two.charge("flu", charge(0, "1/4", purpose="other"))

    assert one.left("flu") == two.left("flu") == 0
    assert one.report() == two.report()


def test_old_steps_are_forgotten_in_memory_and_read_back_when_asked(tmp_path, monkeypatch):
    """Memory stays bounded, and a charge to a step long gone still meets its past."""
    monkeypatch.setattr("dpstream.privacy.ledger.ledger._KEEP", 20)
    ledger = opened(w_event(window=3), tmp_path / "ledger")
    for step in range(0, 300, 3):
        ledger.charge("flu", charge(step, "3/4"))
    book = ledger._books["flu"]

    assert len(book.account._steps) < 60
    assert len(book.charges()) < 60
    with pytest.raises(BudgetExceeded):
        ledger.charge("flu", charge(30, "1/2", purpose="late query"))
    assert ledger.charge("flu", charge(31, "1/4", purpose="late query"))
    assert not ledger.charge("flu", charge(0, "3/4"))


def test_damage_is_found(tmp_path):
    """An altered amount, a removed line, a foreign file and a lost end are refused."""
    path = tmp_path / "ledger"
    ledger = opened(w_event(), path)
    for step in range(4):
        ledger.charge("flu", charge(step, "1/4"))
    ledger.close()
    good = path.read_bytes()
    lines = good.splitlines(keepends=True)

    path.write_bytes(good.replace(b'"1/4"', b'"1/9"', 1))
    with pytest.raises(LedgerError, match="damaged"):
        Ledger(path).report()
    path.write_bytes(b"".join(lines[:3] + lines[4:]))
    with pytest.raises(LedgerError, match="damaged"):
        Ledger(path).report()
    path.write_bytes(b"some other file\n")
    with pytest.raises(LedgerError, match="not a dpstream ledger"):
        Ledger(path).report()
    for lost in (good[:-5], b"".join(lines[:-1]), b"".join(lines[:-3]), b""):
        path.write_bytes(lost)
        with pytest.raises(LedgerError, match="shorter than it was"):
            Ledger(path).report()
        assert path.read_bytes() == lost


def test_the_report_is_json(tmp_path):
    """What was spent, on what and what is left can be read by a program."""
    ledger = opened(w_event(window=2, total=1), tmp_path / "ledger")
    ledger.charge("flu", charge(0, "1/4"))
    report = json.loads(json.dumps(ledger.report()))[0]
    history = list(ledger.history("flu"))

    assert (report["spent"], report["left"]) == ("1/4", "3/4")
    assert report["spent_on"][0]["purpose"] == "publish"
    assert [("book" in r, r.get("amount")) for r in history] == [(True, None), (False, "1/4")]
    assert all("at" in r for r in history)


def charging(run, count):
    """Charge a ledger step by step, from `begin` on; `told` has what was acknowledged."""

    def start(place):
        ledger = opened(Terms(unit="user", total=10**6), place / "ledger")
        begin = int((place / "begin").read_text()) if (place / "begin").exists() else 0
        with (place / "told").open("a", buffering=1) as told:
            for step in range(begin, begin + count):
                cells = Cells(first=step, last=step)
                ledger.charge("flu", Charge(run=run, query="", purpose="p", step=step,
                                            amount=Fraction(1), cells=cells))  # fmt: skip
                told.write(f"{step}\n")
                yield step

    return KindOfRun(start=start, published=acknowledged, charges=lambda place: charged(place)[0])


def acknowledged(place):
    told = (place / "told").read_text() if (place / "told").exists() else ""
    return dict(enumerate(map(int, told.splitlines())))


def charged(place):
    """How many charges the ledger has, and their sum."""
    (report,) = Ledger(place / "ledger").report()
    return int(report["spent_on"][0]["charges"]), Fraction(report["spent"])


def test_kill_nine_loses_and_doubles_nothing(tmp_path):
    """Killed many times in the middle of charging: every acknowledged charge is there once."""
    kind, kills = charging("run", 100_000), part_of(50, of=2)
    for kill in range(kills):
        wanted = len(acknowledged(tmp_path)) + 1 + kill % 7
        kill = WhenSeen(lambda place: len(acknowledged(place)) >= wanted)  # noqa: B023
        assert kill.strike(kind, tmp_path) == -signal.SIGKILL
        last = [*acknowledged(tmp_path).values()][-1]
        charges, spent = charged(tmp_path)

        assert charges - (last + 1) in (0, 1)  # at most the one in flight
        assert spent == charges
        # start again a little earlier: replays are free
        (tmp_path / "begin").write_text(str(max(0, charges - 2)))
    assert last >= kills


def test_several_processes_share_one_budget(tmp_path):
    """Four processes charging at once: no charge is lost, none is doubled."""
    kinds = [charging(f"run{number}", 50) for number in range(4)]
    workers = [start_fork(lambda kind=kind: kind.finish(tmp_path)) for kind in kinds]
    assert [exit_status(worker) for worker in workers] == [0, 0, 0, 0]
    (report,) = Ledger(tmp_path / "ledger").report()

    assert report["spent"] == "200"
    assert [line["charges"] for line in report["spent_on"]] == [50] * 4


def test_the_ledger_file_is_private(tmp_path):
    """Only its owner may read a ledger."""
    opened(w_event(), tmp_path / "ledger")

    assert os.stat(tmp_path / "ledger").st_mode & 0o777 == 0o600


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), "x", None, True])
def test_a_book_needs_a_positive_budget(bad):
    """Zero, negative, NaN, infinite and other kinds of value are refused."""
    with pytest.raises(InvalidParameter):
        Terms(unit="event", total=bad)


def test_amounts_are_exact_decimals_and_shares():
    """0.1 means one tenth; usual shares lie on the grid; the rest is rounded down, charged up."""
    assert exact(0.1) == Fraction(1, 10)
    for share in (exact(0.7) / 240, exact(0.9) / 200, Fraction(1, 3 * 17), Fraction(1, 2**64)):
        assert on_grid(share) == share
    odd = Fraction(1, 101)
    assert 0 < odd - on_grid(odd) < Fraction(1, GRID)
    assert units(odd) == units(on_grid(odd)) + 1


def test_a_long_replay_reads_the_file_back_once(tmp_path, monkeypatch):
    """Replaying far behind the newest step must not re-read the whole file at every charge."""
    monkeypatch.setattr("dpstream.privacy.ledger.ledger._KEEP", 20)
    ledger = opened(w_event(window=3), tmp_path / "ledger")
    for step in range(0, 300, 3):
        ledger.charge("flu", charge(step, "3/4"))
    reads, real = [], Ledger._read_all
    monkeypatch.setattr(Ledger, "_read_all", lambda self: reads.append(1) or real(self))
    for step in range(0, 300, 3):
        assert not ledger.charge("flu", charge(step, "3/4"))

    assert len(reads) <= 2


def test_a_refused_batch_names_the_first_step_that_does_not_fit():
    """A charge for many steps is refused with the figures of one of them."""
    ledger = opened(w_event(window=3, total=1))
    for step in (5, 6):
        ledger.charge("flu", charge(step, "2/5", purpose="other"))
    with pytest.raises(BudgetExceeded, match=r"epsilon=0.3 but only 0.2 of 1 is left in the 3"):
        ledger.charge("flu", charge(0, "3/10", repeat=10))


# --- books of users: tails and drifts


def users(**more):
    slacks = {"delta_slack": Fraction(1, 10**9), "rounding_slack": Fraction(1, 100)}
    return Terms(unit="user", measure="mu_squared", **{"total": 1, "epsilon": 1} | slacks | more)


def query(number=0, amount="1/4", tail="1/4000000000", drift="1/400", **more):
    slacks = {"delta_slack": Fraction(tail), "rounding_slack": Fraction(drift)}
    return charge(0, amount, query=f"query {number}", **slacks | more)


def test_tails_and_drifts_add_up_over_all_queries():
    """Four quarters fill a book; the report says what was spent and what is left of each."""
    ledger = opened(users())
    for number in range(4):
        assert ledger.charge("flu", query(number))
    (book,) = json.loads(json.dumps(ledger.report()))

    assert book["left"] == book["tail"]["left"] == book["drift"]["left"] == "0"
    assert (book["tail"]["spent"], book["drift"]["spent"]) == ("1/1000000000", "1/100")
    assert {line["tail"] for line in book["spent_on"]} == {"1/4000000000"}


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (
            {"tail": "1/999999999", "drift": 0},
            "1e-09 of delta to find keys but only 7.5e-10 of 1e-09",
        ),
        ({"tail": 0, "drift": "1/100"}, "0.01 to round noise but only 0.0075 of 0.01"),
        ({"amount": 1}, "mu_squared=1 but only 0.75 of 1 is left .*about epsilon=0.749 of 1"),
    ],
)
def test_whichever_runs_out_is_named(asked, named):
    """A charge beyond tail, drift or total is refused, and leaves no trace."""
    ledger = opened(users())
    ledger.charge("flu", query(0))
    before = ledger.report()
    with pytest.raises(BudgetExceeded, match=named):
        ledger.charge("flu", query(1, **asked))

    assert ledger.report() == before


def test_the_refusal_names_the_book_and_its_file(tmp_path):
    """Whoever has several books must know which one is short."""
    for path, named in ((None, "the book 'flu': "), (tmp_path / "b", f"'flu' (in {tmp_path}/b): ")):
        ledger = Ledger(path)
        ledger.open("flu", users())
        with pytest.raises(BudgetExceeded) as refusal:
            ledger.charge("flu", query(1, amount=2, tail="1/2"))
        assert named in str(refusal.value)
        assert "tail" not in str(refusal.value)  # and mu_squared is named first where both lack


def test_a_book_without_allowances_takes_no_tail():
    """The default of a book is none at all."""
    ledger = opened(Terms(unit="user", total=1, measure="mu_squared"))
    for asked in ({"tail": "1/10", "drift": 0}, {"tail": 0, "drift": "1/10"}):
        with pytest.raises(BudgetExceeded):
            ledger.charge("flu", query(0, **asked))


def test_a_replay_has_the_same_tail_and_drift():
    """The same charge counts once; with another tail or drift it is refused."""
    ledger = opened(users())
    ledger.charge("flu", query(0))

    assert not ledger.charge("flu", query(0))
    for other in ({"tail": "1/5000000000"}, {"drift": "1/500"}, {"tail": 0}):
        with pytest.raises(LedgerError, match="a replay must be identical"):
            ledger.charge("flu", query(0, **other))
    assert ledger.report()[0]["tail"]["spent"] == "1/4000000000"


def test_allowances_survive_the_file(tmp_path):
    """Terms and charges read back as they were; where there are none, nothing is written."""
    ledger = opened(users(), tmp_path / "ledger")
    ledger.charge("flu", query(0))
    again = Ledger(tmp_path / "ledger")

    assert again.terms("flu") == users()
    assert again.report() == ledger.report()
    assert not again.charge("flu", query(0))
    assert Charge.from_json(query(0).to_json()) == query(0)
    memory = opened(users())
    memory.charge("flu", query(0))
    before = memory.report()
    memory.persist(tmp_path / "kept")
    assert memory.report() == before == Ledger(tmp_path / "kept").report()
    for plain in (w_event().to_json(), charge().to_json()):
        assert not {"tail", "drift", "epsilon"} & plain.keys()


def test_old_books_read_as_before():
    """Records without tail and drift have none."""
    old = {"unit": "user", "total": "1/3", "window": None, "measure": "rho", "period": "1 day"}
    old |= {"time_zone": "UTC", "clock": "steps", "change": "a count by 1"}

    assert Terms.from_json(old) == Terms(
        unit="user", total=Fraction(1, 3), measure="rho", period="1 day"
    )
    assert Terms.from_json(old).to_json() == old


@pytest.mark.parametrize(
    "bad",
    [
        {"delta_slack": 1},
        {"delta_slack": -1},
        {"rounding_slack": -1},
        {"epsilon": 0},
        {"delta_slack": float("nan")},
    ],
)
def test_allowances_are_checked(bad):
    """Probabilities and log-ratios only, in books of users only, on single charges only."""
    with pytest.raises(InvalidParameter):
        users(**bad)
    with pytest.raises(InvalidParameter, match="unit 'user'"):
        Terms(unit="event", total=1, delta_slack="1/10")
    for wrong in ({"repeat": 2}, {"kind": "open"}, {"tail": "-1/10"}):
        with pytest.raises(LedgerError):
            query(0, **wrong)


def test_a_users_book_admits_its_own_unit_alone():
    """Another unit, period, time zone, measure or change would be counted for too little."""
    ledger, book = Ledger(), promise(epsilon=1, delta=1e-6, privacy_unit_period="1 day")
    ledger.admit("clicks", book, "a query")
    ledger.admit(
        "clicks", promise(epsilon=2, delta=1e-5, privacy_unit_period="1 day"), "another query"
    )
    for other in (
        promise(epsilon=1, delta=1e-6),
        promise(epsilon=1, delta=1e-6, privacy_unit_period="1 day", time_zone="Europe/Zurich"),
        promise(epsilon=1, delta=1e-6, privacy_unit_period="1 day", change="one row"),
        Terms(unit="user", total=1, measure="rho", period="1 day", change="all its rows"),
        Terms(unit="event", total=1, measure="mu_squared", period="1 day", change="all its rows"),
        w_event(),
    ):
        with pytest.raises(LedgerError, match="protects users"):
            ledger.admit("clicks", other, "another query")
    ledger.open("flu", w_event())
    with pytest.raises(LedgerError, match="protects events in windows"):
        ledger.admit("flu", book, "a query")

    assert ledger.terms("clicks") == book


@pytest.mark.parametrize("epsilon", [0.01, 0.1, 1, 3, 6, 12, 30, 100])
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-9, 1e-12, 1e-15])
def test_the_book_of_a_promise_keeps_it(epsilon, delta):
    """All of mu^2, tail and drift spent stays within (epsilon, delta), and wastes little of it."""
    terms = promise(epsilon=epsilon, delta=delta)

    assert 0.97 * delta < delta_of_terms(terms) <= delta
    assert terms.epsilon == exact(epsilon)
    assert terms.delta_slack > exact(delta) * Fraction(48, 100)


def test_lost_float_mass_counts_with_the_books_epsilon():
    """A query of epsilon 1 in a book of epsilon 12 loses e^12 times its mass, not e^1 times."""
    error = FloatError(xi=Fraction(1, 10**6), tau=Fraction(1, 10**15))
    small, large = (promise(epsilon=e, delta=1e-9) for e in (1, 12))
    own = own_terms(
        epsilon=Fraction(1),
        mu_squared=Fraction(1, 50),
        delta_slack=Fraction(1, 10**10),
        error=error,
        period="forever",
        time_zone="UTC",
    )

    assert with_lost_mass(small, delta_slack=Fraction(1, 10**10), error=error) == own.delta_slack
    assert float(own.delta_slack) == pytest.approx(1e-10 + (1 + 2.718281828) * 1e-15, rel=1e-12)
    assert float(with_lost_mass(large, delta_slack=Fraction(0), error=error)) == pytest.approx(
        162755.79e-15
    )
    with pytest.raises(InvalidParameter, match="names its epsilon"):
        with_lost_mass(users(epsilon=None), delta_slack=Fraction(0), error=error)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.sampled_from("ab")), max_size=25)
)
def test_the_short_way_and_the_long_way_keep_the_same_books(asked):
    """Charges that come in order are added up and refused as the account of all of them says."""
    short, long = (opened(w_event(window=3, total=1)) for _ in range(2))
    step, outcomes = 0, ([], [])
    for ahead, sevenths, purpose in asked:
        step += ahead
        for ledger, digest, seen in zip((short, long), ("d", ""), outcomes, strict=True):
            one = charge(step, Fraction(sevenths, 7), purpose=purpose, digest=digest)
            try:
                seen.append(ledger.charge("flu", one, lambda _, digest=digest: digest))
            except (BudgetExceeded, LedgerError) as refusal:
                seen.append(type(refusal))

    assert outcomes[0] == outcomes[1]
    assert short.report() == long.report()


def test_the_short_way_still_sees_other_data():
    """A charge made again, with another digest, is a reuse of noise."""
    ledger = opened(w_event())
    ledger.charge("flu", charge(0, digest="one"), lambda _: "one")
    ledger.charge("flu", charge(1, digest="two"), lambda _: "two")

    assert not ledger.charge("flu", charge(1, digest="two"), lambda _: "two")
    with pytest.raises(NoiseReuse):
        ledger.charge("flu", charge(1, digest="three"), lambda _: "three")
