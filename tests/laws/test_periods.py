"""Laws of charges by period: no two runs share one unless both fit, wherever the first is killed.

A run notes the last period that its windows reach into before it draws them. Its successor begins
behind that one. What was drawn is written down from outside, stream by stream.
"""

import shutil
from dataclasses import replace
from fractions import Fraction
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dpstream as dps
from dpstream.errors import BudgetExceeded, InvalidParameter, LedgerError, StateError
from dpstream.privacy.ledger.charges import Cells, Charge, Terms
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.query_spend import QuerySpend
from dpstream.query.row_spec import RowSpec
from tests.support.kill_and_replay import BeforeDiskOperation
from tests.support.long import is_long, some_examples
from tests.support.runs import group_by, query, start, table, write

# --- the rule


def charge(run, amount, periods, tail=0):
    cells, amount = Cells(first=0, last=0), Fraction(amount)
    tail = Fraction(tail)
    return Charge(
        run=run, query="q", purpose="query", step=0, amount=amount, cells=cells, periods=periods,
        delta_slack=tail,
    )  # fmt: skip


ranges = st.tuples(st.integers(-5, 12), st.none() | st.integers(0, 6)).map(
    lambda pair: (pair[0], None if pair[1] is None else pair[0] + pair[1])
)
charges = st.lists(
    st.tuples(
        st.integers(1, 4),
        st.none() | ranges,
        st.booleans(),
        st.none() | st.integers(-5, 9),
        st.none() | st.integers(-5, 12),
    ),
    max_size=9,
)


def brute(made, period):
    """The loss of one period, by the rule's own words."""
    total = 0
    for amount, periods, ended, begun, until in made:
        first, last = periods or (-inf, None)
        last = inf if last is None else last
        if until is not None and periods is not None:
            last = min(last, until)
        if ended and periods is not None:
            last = min(last, -inf if begun is None else begun)
        total += amount if first <= period <= last else 0
    return total


@some_examples(600)
@given(charges, ranges)
def test_a_period_loses_the_charges_whose_range_has_it(made, asked):
    """Ended runs cost up to what they have begun, and those that are to end with a period up to
    that one; others all that they name; a new charge fits exactly where the sum of every one of its
    periods does."""
    ledger = Ledger()
    ledger.open("d", Terms(unit="user", total=12, measure="mu_squared", period="1 day"))
    held = []
    for number, (amount, periods, ended, begun, until) in enumerate(made):
        run = f"run {number}"
        try:
            ledger.charge("d", charge(run, amount, periods))
        except BudgetExceeded:
            continue
        if begun is not None:
            ledger.note_begun("d", run, begun)
        if until is not None and (periods is None or (begun is not None and until < begun)):
            with pytest.raises(LedgerError):
                ledger.limit("d", run, until, because="test", who="test")
            until = None
        elif until is not None:
            ledger.limit("d", run, until, because="test", who="test")
            with pytest.raises(LedgerError, match="was to end"):
                ledger.note_begun("d", run, until + 1)
        if ended:
            ledger.end("d", run, because="test", who="test")
        held.append((amount, periods, ended, begun, until))
    days = range(-40, 60)

    assert ledger.peak("d") == max(brute(held, day) for day in days)
    first, last = asked
    within = [day for day in days if first <= day and (last is None or day <= last)]
    fits = {day: brute(held, day) + 3 <= 12 for day in within}
    wanted = charge("new", 3, asked)
    room = ledger.first_room("d", wanted)
    starts = [day for day in within if all(fits[later] for later in within if later >= day)]
    assert room == (starts[0] if starts else None)
    if all(fits.values()):
        assert ledger.charge("d", wanted)
    else:
        with pytest.raises(BudgetExceeded):
            ledger.charge("d", wanted)
    rehearsed = ledger.rehearsal()
    assert rehearsed.report() == ledger.report()


def test_slacks_fit_period_by_period():
    """Both parts of delta are those of the period that loses most."""
    ledger = Ledger()
    terms = Terms(
        unit="user", total=9, measure="mu_squared", period="1 day", delta_slack="0.4", epsilon=1
    )
    ledger.open("d", terms)
    ledger.charge("d", charge("a", 1, (0, 3), "0.3"))
    ledger.charge("d", charge("b", 1, (4, None), "0.3"))
    with pytest.raises(BudgetExceeded, match=r"only 0\.1 of 0\.4"):
        ledger.charge("d", charge("c", 1, (3, 3), "0.2"))
    with pytest.raises(BudgetExceeded, match=r"only 0\.1 of 0\.4"):
        ledger.charge("d", charge("c", 1, None, "0.2"))
    ledger.charge("d", charge("c", 1, (-9, -1), "0.4"))


def test_only_books_of_users_have_periods():
    ledger = Ledger()
    ledger.open("d", Terms(unit="event", total=9))
    with pytest.raises(LedgerError, match="only a book of users"):
        ledger.charge("d", charge("a", 1, (0, 3)))


def test_a_run_that_was_charged_for_ever_is_not_charged_again_by_period(tmp_path):
    """A state of an earlier version goes on: its charge covers all periods, and never ends."""
    with_periods, without = charge("a", 1, (3, None)), charge("a", 1, None)
    ledger = Ledger(tmp_path / "book")
    ledger.open("d", Terms(unit="user", total=1, measure="mu_squared", period="1 day"))
    assert ledger.charge("d", without)
    assert not ledger.charge("d", with_periods)
    ledger.note_begun("d", "a", 3)
    ledger.end("d", "a", because="test", who="test")
    with pytest.raises(BudgetExceeded):
        ledger.charge("d", charge("b", 1, (9, None)))
    ledger.close()


# --- the engine: kill it at every write of the ledger


OLD = query(
    aggregates=(dps.Count("clicks"),),
    public_groups=("/1", "/2"),
    end="1970-01-01T04:00",
    window=dps.Tumble("2 hours"),
    allowed_lateness="0 hours",
    privacy_unit_period="1 hour",
)
"""2 windows of 2 periods each, published every hour."""
NEW = replace(OLD, window=dps.Tumble("1 hour"), every=None)
"""The query that takes over: windows of one period."""


def wrapped_streams(place):
    """Write down which window's noise is opened, by which run; in this process and its forks."""
    real = QuerySpend.noise_stream

    def noise_stream(self, *, window, column, part):
        stream = real(self, window=window, column=column, part=part)
        with (place / "drawn").open("a") as file:
            file.write(f"{self._run.hex()} {window}\n")
        return stream

    return noise_stream


def drawn_periods(place, begins):
    """Run: the periods that its drawn windows reach into. `begins`: query and first start of it."""
    drawn = {}
    lines = (place / "drawn").read_text().splitlines() if (place / "drawn").exists() else []
    for run, window in map(str.split, lines):
        asked = begins[run]
        start, end = asked.schedule.span(int(window))
        first, last = asked.periods.last_before(start), asked.periods.last_before(end - 1)
        drawn.setdefault(run, set()).update(range(first, last + 1))
    return drawn


def old_run(place):
    return start(place, OLD, ledger=place / "book", fixed=False)


def new_run(place):
    named = {"state": place / "new", "sink": place / "new-out", "secret": place / "new.secret"}
    return start(place, NEW, ledger=place / "book", fixed=False, take_over=True, **named)


def strike_and_take_over(place, nth):
    """Kill the old run before its n-th operation on the disk, lose its state, take over from it.

    None: it came to its end, or had begun all periods. Else what each of the two has drawn.
    """
    write(place, table())
    ledger = Ledger(place / "book")
    ledger.open("stream", OLD.promise(epsilon=10, delta=1e-5))
    ledger.close()
    kind = replace(group_by(OLD), start=old_run)
    if not BeforeDiskOperation(nth).strike(kind, place):
        return None
    shutil.rmtree(place / "state", ignore_errors=True)
    try:
        taken = new_run(place).finish()
    except InvalidParameter:  # all periods are begun
        return None
    ledger = Ledger(place / "book")
    (book,) = ledger.report()
    begins = {line["run"]: OLD for line in book["spent_on"]}
    begins |= {run: OLD for run in drawn_runs(place) if run not in begins}
    begins[taken._storage.run.hex()] = taken.query
    ledger.close()
    return drawn_periods(place, begins), book


def drawn_runs(place):
    path = place / "drawn"
    return {line.split()[0] for line in path.read_text().splitlines()} if path.exists() else set()


def shares_a_period(drawn):
    sets = list(drawn.values())
    return any(a & b for n, a in enumerate(sets) for b in sets[:n])


KILLS = range(1, 180) if is_long() else (45, 60, 90, 120)
"""After the charge, after the first period is begun, after the first draw, and later."""


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """Streams of noise are written down, and nothing waits for the disk."""
    monkeypatch.setattr(QuerySpend, "noise_stream", wrapped_streams(tmp_path))
    return tmp_path


@pytest.mark.parametrize("nth", KILLS)
def test_two_runs_never_share_a_period_wherever_the_first_is_killed(watch, nth):
    """The book is for one of them; what the first has begun, the second does not touch."""
    after = strike_and_take_over(watch, nth)
    if after is None:
        return
    drawn, book = after

    assert not shares_a_period(drawn)
    assert Fraction(book["spent"]) <= Fraction(book["terms"]["total"])
    assert any(drawn.values())


def by_clock(self):
    """The control: a period is begun when the clock is in it; windows may reach further."""
    real = RowSpec.__dict__["paid_periods"].fget(self)
    schedule, ticks = self.schedule, self.periods

    def last_of(window):
        return ticks.last_before(schedule.time_of(schedule.first_step(window)) - 1)

    return real.__class__(first=real.first, last=real.last, last_of=last_of)


def test_periods_begun_by_the_clock_are_caught(watch, monkeypatch):
    """Killed after the first trigger of a window of two periods, the second period is drawn by
    both."""
    monkeypatch.setattr("dpstream.query.query.Query.paid_periods", property(by_clock))
    after = strike_and_take_over(watch, 75)

    assert after is not None
    assert shares_a_period(after[0])


def test_the_old_state_is_refused_when_it_turns_up(tmp_path):
    """Its next step is, and so is its next start."""
    write(tmp_path, table())
    ledger = Ledger(tmp_path / "book")
    ledger.open("stream", OLD.promise(epsilon=10, delta=1e-5))
    alive = iter(old_run(tmp_path))
    next(alive)
    taken = new_run(tmp_path)
    spans = [release["window_start"][0].as_py().hour for release in taken]

    assert spans == [2, 3]
    assert taken.operator.outside > 0
    with pytest.raises(StateError, match="ended for good"):
        list(alive)
    with pytest.raises(StateError, match="ended for good"):
        list(old_run(tmp_path))
    ledger.close()
