"""Queries of other periods in a book: what its units move, by brute force; who is refused.

Each bound is compared with every choice of rows that bounding could keep, and with a smaller bound,
which some choice must pass.
"""

import itertools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

import dpstream as dps
from dpstream.counting.buffered import BufferedLinearToeplitz
from dpstream.errors import BudgetExceeded, InvalidParameter, LedgerError
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.query.book_periods import book_share, loss_over, periods_in_a_window
from dpstream.query.noise_plan import plan_query
from tests.counting.matrices import dense

DAY, STEPS = 86_400_000_000, 3


def asked(period="1 day", **changes):
    """A query over two weeks of days."""
    facts = {
        "name": f"of {period}",
        "privacy_unit_column": "user",
        "privacy_unit_period": period,
        "keys": ("page",),
        "public_groups": ("a", "b"),
        "epsilon": 1,
        "delta": 1e-6,
        "max_groups_contributed": 2,
        "time_column": "at",
        "window": dps.Tumble("1 day"),
        "start": "2024-05-02",
        "end": "2024-05-16",
    }
    return dps.Query(**facts | changes)


BOOK = asked().promise(epsilon=8, delta=1e-4)


LONG = {"start": "2023-01-01", "end": "2027-01-01"}


# --- brute force


def encoder(steps=STEPS):
    return dense(BufferedLinearToeplitz(steps=steps, buffers=2))[1]


def cost(moved):
    """The squared shift of columns [groups, steps], over that of one row at the first step."""
    matrix = encoder(moved.shape[-1])
    return float(np.sum((moved @ matrix.T) ** 2) / (matrix[:, 0] @ matrix[:, 0]))


def kept_by_one_unit(values, rows=2, groups=2):
    """Everything that bounding may keep of a unit: up to `rows` rows, in any places."""
    places = list(itertools.product(range(groups), range(STEPS), values))
    for count in range(rows + 1):
        for chosen in itertools.combinations_with_replacement(places, count):
            kept = np.zeros((groups, STEPS))
            for group, step, value in chosen:
                kept[group, step] += value
            yield kept


@pytest.mark.parametrize(("values", "factor", "reached"), [((1,), 2, 1.85), ((-1, 1), 4, 2.8)])
def test_without_a_day_other_rows_are_kept(values, factor, reached):
    """A coarser unit: what is kept with a day and without it are any two of its choices."""
    choices = list(kept_by_one_unit(values))
    own = max(map(cost, choices))
    pairs = itertools.product(choices, repeat=2)
    worst = max(cost(one - other) for one, other in pairs) / own

    assert reached < worst <= factor * (1 + 1e-12)
    share = book_share(asked("7 days"), BOOK)
    assert (share.squared, share.squared_signed) == (2, 4)


def test_encoders_have_no_negative_entries():
    """So that what two sets of rows share only lowers the cost of their difference."""
    for steps in (1, 2, 3, 24, 100):
        assert encoder(steps).min() >= 0


@pytest.mark.parametrize(("number", "together"), [(4, 1), (4, 2), (4, 4), (3, 3)])
def test_finer_units_add_up_by_window(number, together):
    """k units, s of them in one window: min(k, s) k, and it is reached."""
    windows = number // together
    worst = 0.0
    for steps in itertools.product(range(2), repeat=number):
        moved = np.zeros((windows, 2))
        for unit, step in enumerate(steps):
            moved[unit // together, step] += 1
        worst = max(worst, cost(moved))

    assert worst == pytest.approx(together * number)


# --- what is charged


def test_a_coarser_query_costs_twice_and_signed_columns_four_times():
    """The half of mu^2 that a signed sum has counts four times."""
    signed = (dps.Count("n"), dps.Sum("s", column="x", contribution_bounds_per_row=(-5, 5)))
    for query in (asked("7 days"), asked("7 days", aggregates=signed), asked("forever")):
        plan = plan_query(query)
        own, charged = plan.calibrated, plan.cost(BOOK)
        several = len(plan.query.measures) > 1
        factor = 2 + (2 * plan.shares[1] / own.mu_squared if several else 0)
        assert float(charged["amount"] / own.mu_squared) == pytest.approx(float(factor))
        assert charged["error"].xi == 2 * own.error.xi
        assert (charged["periods"].first, charged["periods"].last) == (19845, 19858)


def test_selection_is_paid_for_as_often_as_groups_are_reached():
    """2 delta_sel of a coarser query, k of a finer one."""
    week, hours = (
        asked(period, public_groups=None, window=dps.Tumble("6 hours"))
        for period in ("7 days", "6 hours")
    )
    for query, factor in ((week, 2), (hours, 4)):
        plan = plan_query(query)
        assert plan.cost(BOOK)["delta_slack"] == factor * plan.delta_slack
    ratio = plan.cost(BOOK)["amount"] / plan.calibrated.mu_squared
    assert ratio == 4


def test_a_book_for_ever_pays_for_every_period():
    """A daily query of two weeks costs a user fourteen times; one without end is refused."""
    forever = asked("forever").promise(epsilon=30, delta=1e-4)
    plan = plan_query(asked())
    assert plan.cost(forever)["amount"] == 14 * plan.calibrated.mu_squared
    with pytest.raises(LedgerError, match="goes on without end"):
        book_share(asked(end=None), forever)


def test_a_window_begins_all_of_its_own_period():
    """A week is begun with its first day, and with it all seven days of the book."""
    periods = book_share(asked("7 days"), BOOK).periods
    assert [periods.last_of(window) for window in (0, 6, 7, 13)] == [19851, 19851, 19858, 19858]
    assert book_share(asked("forever"), BOOK).periods.last_of(0) == 19858


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 1),
        ({"period": "7 days"}, 1),
        ({"window": dps.Tumble("6 hours")}, 1),
        ({"window": dps.Tumble("7 hours")}, 2),
        ({"window": dps.Tumble("2 days")}, 2),
        ({"window": dps.Tumble("2 days"), "start": "2024-05-02T01:00"}, 3),
        ({"window": dps.Hop("2 days", slide="12 hours")}, 3),
        ({"window": dps.Hop("2 days", slide="1 day")}, 2),
        ({"window": dps.Cumulate("1 day", step="6 hours")}, 1),
        ({"window": None}, 14),
        ({"period": "1 month"}, 1),
        ({"period": "1 month", "window": dps.Tumble("7 days")}, 2),
        ({"period": "1 month", "window": dps.Tumble("6 hours")}, 1),
        ({"period": "1 month", "window": dps.Tumble("6 hours"), "start": "2024-05-02T01:00"}, 2),
        ({"period": "1 month", "window": dps.Hop("1 day", slide="6 hours")}, 2),
        ({"period": "1 month", "window": dps.Tumble("30 days")} | LONG, 3),
        ({"period": "1 month", "window": dps.Tumble("1 month")} | LONG, 1),
        (
            {"period": "1 month", "window": dps.Tumble("1 month")} | LONG | {"start": "2023-01-31"},
            2,
        ),
        ({"period": "1 month", "window": dps.Hop("1 year", slide="1 month")} | LONG, 12),
        ({"period": "1 year", "window": dps.Tumble("1 quarter")} | LONG, 1),
        (
            {"period": "1 year", "window": dps.Tumble("1 quarter")}
            | LONG
            | {"start": "2023-02-01"},
            2,
        ),
        ({"period": "1 year", "window": dps.Cumulate("1 year", step="1 month")} | LONG, 1),
        ({"window": dps.Tumble("1 month")} | LONG, 37),
        (
            {"period": "1 month", "window": dps.Tumble("1 month"), "time_zone": "Europe/Rome"}
            | LONG,
            1,
        ),
        ({"period": "1 month", "time_zone": "Europe/Rome"}, 1),
        ({"time_zone": "Europe/Rome"}, 1),
        ({"time_zone": "Europe/Rome", "window": dps.Tumble("6 hours")}, 2),
    ],
)
def test_how_many_periods_a_window_holds(changes, expected):
    """At most; windows are looked at one by one."""
    query = asked(**changes)
    counted = 0
    for window in range(query.schedule.windows):
        start, end = query.schedule.span(window)
        first, last = query.periods.last_before(start), query.periods.last_before(end - 1)
        counted = max(counted, last - first + 1)

    assert counted <= periods_in_a_window(query) == expected


REFUSED = {
    "another zone": asked("7 days", time_zone="Europe/Rome"),
    "for ever, in another zone": asked("forever", time_zone="Europe/Rome"),
    "no whole number": asked("36 hours"),
    "weeks and 30 days": asked("30 days"),
    "rounds": asked("7 days", strategy="sqlp"),
    "windows of several": asked("6 hours", public_groups=None),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_does_not_nest_is_refused_with_the_way_out(why):
    """Nothing is charged."""
    terms = BOOK
    if why == "weeks and 30 days":
        terms = asked("7 days").promise(epsilon=8, delta=1e-4)
    ledger = Ledger()
    ledger.open("stream", terms)
    with pytest.raises(LedgerError, match="another dataset name"):
        dps.run(REFUSED[why], source=rows(), ledger=ledger).finish()
    assert ledger.report()[0]["spent_on"] == []


# --- together, live in one ledger


def rows():
    return {"user": ["ann"] * 9, "page": ["a"] * 9, "at": ["2024-05-03T10:00"] * 9}


def as_frame():
    import pyarrow as pa

    return pa.table(rows())


def test_periods_of_three_kinds_share_a_book_and_a_person_sees_what_is_lost():
    """A day loses all three; over seven days the daily one counts seven times, the weekly one twice
    (they may touch two weeks), and the one for ever once."""
    ledger = Ledger()
    ledger.open("stream", BOOK)
    for query in (asked(), asked("7 days"), asked("forever")):
        dps.run(query, source=as_frame(), ledger=ledger).finish()
    (book,) = ledger.report()
    day, week, ever = (
        plan_query(asked(*period)).calibrated.mu_squared
        for period in ((), ("7 days",), ("forever",))
    )

    assert Fraction(book["spent"]) == day + 2 * week + 2 * ever
    assert [loss_over(book, days) for days in (1, 7, 365)] == [
        day + 2 * week + 2 * ever,
        7 * day + 4 * week + 2 * ever,
        14 * day + 6 * week + 2 * ever,
    ]


def test_what_a_person_loses_over_days_counts_the_months_that_they_touch():
    """One day is in one month; 30 days may touch three, February among them; 365 days 13."""
    monthly, ledger = asked("1 month", window=dps.Tumble("1 month"), **LONG), Ledger()
    ledger.open("stream", monthly.promise(epsilon=8, delta=1e-4))
    dps.run(monthly, source=as_frame(), ledger=ledger).finish()
    (book,) = ledger.report()
    once = plan_query(monthly).calibrated.mu_squared

    assert [loss_over(book, days) / once for days in (1, 7, 30)] == [1, 2, 3]
    assert 13 <= loss_over(book, 365) / once <= 14


def test_another_query_does_not_fit_where_the_week_is_too_dear():
    """Twice its own price does not fit into a book of that price."""
    ledger = Ledger()
    ledger.open("stream", replace(plan_query(asked()).terms(), epsilon=1))
    with pytest.raises(BudgetExceeded):
        dps.run(asked("7 days"), source=as_frame(), ledger=ledger)
    dps.run(asked(), source=as_frame(), ledger=ledger).finish()


def test_a_query_that_found_its_periods_spent_is_told_from_when_on_there_is_room():
    """One with an end is refused, and told; its second half fits."""
    ledger = Ledger()
    ledger.open("stream", plan_query(asked()).terms())
    dps.run(asked(end="2024-05-09"), source=as_frame(), ledger=ledger).finish()
    with pytest.raises(BudgetExceeded, match=r"from 2024-05-09T00:00:00\+00:00 on there is room"):
        dps.run(asked(), source=as_frame(), ledger=ledger)
    dps.run(asked(start="2024-05-09"), source=as_frame(), ledger=ledger, anyway=True).finish()
    assert Fraction(ledger.report()[0]["left"]) == 0


class At:
    """A clock that stands still."""

    real_time = False

    def __init__(self, day):
        self.day = day

    def now(self):
        return (19844 + self.day) * DAY + DAY // 2

    def wait(self, until, stop):
        stop.set()


def test_a_live_query_in_a_full_book_begins_with_the_next_period(tmp_path):
    """Without being asked, if the run before it was ended; and it says so. Begun again, it goes on
    with the same windows."""
    (tmp_path / "in").mkdir()
    query = asked(start=None, end=None, name="live")
    ledger = Ledger(tmp_path / "book")
    ledger.open("stream", plan_query(query.starting(0)).terms())

    def live(state, day, **named):
        return dps.run(
            query, source=tmp_path / "in", live=True, state=tmp_path / state, ledger=ledger,
            clock=At(day), **named,
        )  # fmt: skip

    first = live("one", 0)
    spend = (first.open(), first._charge())[1]
    spend.begin(0)
    spend.noise_stream(window=0, column="rows", part=0)
    first.close()
    with pytest.raises(BudgetExceeded, match="--take-over"):
        live("two", 0)
    ledger.end("stream", first._storage.run.hex(), because="lost", who="ana")
    second = live("two", 0)

    assert second.query.start == 19845 * DAY
    assert "no room for 'live' in periods that have begun" in second.beginning.notice
    assert live("three", 4).query.start == 19848 * DAY
    second.open()
    second._charge()
    second.close()
    assert live("two", 3).query.start == 19845 * DAY
    with pytest.raises(InvalidParameter, match="no window"):
        asked().not_before(19900 * DAY)
    ledger.close()
