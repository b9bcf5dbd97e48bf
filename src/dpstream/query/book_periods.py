"""A query in a book of other periods: what one unit of the book loses, and which periods pay.

A book protects users for ever, or within each period (a day, a week). A query may have finer or
coarser ones, if one kind is made of whole ones of the other in the same time zone. Its noise fits
its own unit; a unit of the book moves it further (`docs/soundness/periods.md`):

- finer, k in one of the book, at most s of them in one window: mu^2 of k min(k, s) units;
- coarser, or for ever: removing one day of a week lets other rows of that user in, so 2 mu^2 where
  every row adds something nonnegative, 4 mu^2 where it may be signed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from dpstream.errors import LedgerError
from dpstream.privacy.accounting.promises import rows_of
from dpstream.privacy.ledger.charges import Terms
from dpstream.privacy.query_spend import ALL_PERIODS, PaidPeriods
from dpstream.query.aggregates import Measure
from dpstream.query.query import Query
from dpstream.query.windows import (
    DAY,
    Ticks,
    Tumble,
    duration,
    instant,
    keeps_its_offset,
    longest,
    months_in,
    shortest,
)

FOREVER = "forever"


@dataclass(frozen=True, kw_only=True)
class BookShare:
    """How much of a query one unit of a book moves, against a unit of the query."""

    squared: int = 1
    """mu^2 of a column to which every row adds something nonnegative."""
    squared_signed: int = 1
    """mu^2 of any other column."""
    groups: int = 1
    """Groups that are reached: thresholds and float error count so often."""
    periods: PaidPeriods = ALL_PERIODS
    """Those of the book that pay."""

    def mu_squared(
        self, whole: Fraction, shares: Sequence[Fraction], columns: Sequence[Measure]
    ) -> Fraction:
        """What a unit of the book loses; `shares` of `whole` belong to the columns."""
        more = (s * (self.times(c) - self.squared) for s, c in zip(shares, columns, strict=True))
        return self.squared * whole + sum(more, Fraction(0))

    def times(self, column: Measure) -> int:
        """mu^2 of one column."""
        return self.squared_signed if column.signed else self.squared


def book_ticks(terms: Terms) -> Ticks | None:
    """The periods of a book of users; None: it has none."""
    if terms.unit != "user" or terms.period == FOREVER:
        return None
    origin = instant("1970-01-01", "the first period", terms.time_zone)
    size = duration(terms.period, "the period of the book", calendar=True)
    return Ticks(origin=origin, size=size, zone=terms.time_zone)


def same_rows(query: Query, book: Terms) -> bool:
    """Does the query protect users as the book names them, within whatever periods?"""
    if book.unit != "user" or book.measure != "mu_squared":
        return False
    words = rows_of(query.privacy_unit_column)
    if FOREVER in (book.period, query.privacy_unit_period):
        return book.change == words or book.change.startswith(f"{words} and ")
    return book.change == query.protected


def has_finer_periods(query: Query, book: Terms) -> bool:
    """Is a unit of the book made of whole units of the query, or just one of them?"""
    mine, theirs = query.periods, book_ticks(book)
    if query.period_in_words == book.period:
        return True
    return mine is not None and (theirs is None or mine.size < theirs.size)


def book_share(query: Query, book: Terms) -> BookShare:
    """What one unit of the book moves of a query over the same users; others are refused."""
    theirs = book_ticks(book)
    if theirs is not None and query.time_zone != book.time_zone:
        raise LedgerError(_refusal(query, book, "their days begin at other times"))
    if query.period_in_words == book.period:
        return BookShare(periods=_with_own(query.paid_periods, 1, periods_in_a_window(query)))
    if query.chooses:
        raise LedgerError(_refusal(query, book, "bounds that are chosen: not counted so"))
    if query.strategy != "latched":
        raise LedgerError(_refusal(query, book, f"strategy {query.strategy!r} is not counted so"))
    mine = query.periods
    if mine is None:
        return _coarser(query, book, theirs)
    if theirs is None:
        return _finer(query, book, None)
    small, large = sorted((mine, theirs), key=lambda ticks: ticks.size)
    by_calendar = large.calendar and not keeps_its_offset(large.zone)
    if bool(large.months) != bool(small.months):
        raise LedgerError(_refusal(query, book, "months have 28 to 31 days: not counted so"))
    if large.size % small.size or (by_calendar and not small.calendar):
        raise LedgerError(_refusal(query, book, "one is not made of whole ones of the other"))
    return _finer(query, book, theirs) if small is mine else _coarser(query, book, theirs)


def _refusal(query: Query, book: Terms, why: str) -> str:
    return (
        f"the query {query.name!r} has periods of {query.period_in_words} ({query.time_zone}), its "
        f"book of {book.period} ({book.time_zone}): {why}; give the query the book's period, one "
        "that divides it or is divided by it (such as 1 day and 7 days), or a book of its own "
        "(another dataset name)"
    )


def _finer(query: Query, book: Terms, theirs: Ticks | None) -> BookShare:
    """A unit of the book is several of the query, which share a window or do not."""
    mine, paid = query.periods, query.paid_periods
    assert mine is not None
    if theirs is not None:
        number = theirs.size // mine.size
    elif paid.first is None or paid.last is None:
        raise LedgerError(
            f"the query {query.name!r} goes on without end, and each of its periods "
            f"({query.period_in_words}) costs a user of this book (for ever) as much again; give "
            "it an end, or use a book of its period (another dataset name)"
        )
    else:
        number = paid.last - paid.first + 1
    together = min(number, periods_in_a_window(query))
    if together > 1 and query.public_groups is None:
        raise LedgerError(
            f"windows of {query.name!r} hold rows of several of its periods "
            f"({query.period_in_words}): finding keys is not counted for a book of {book.period}; "
            "use windows within a period, public groups, or a book of its own (another dataset "
            "name)"
        )
    squared, windows = together * number, periods_in_a_window(query)
    periods = ALL_PERIODS if theirs is None else _paid(query, theirs, theirs)
    return BookShare(
        squared=squared,
        squared_signed=squared,
        groups=number,
        periods=_with_own(periods, 1, -(-windows // number)),
    )


def _coarser(query: Query, book: Terms, theirs: Ticks | None) -> BookShare:
    """A unit of the book is a part of one of the query: without it, other rows are kept."""
    if query.correlated_noise:  # None: not in such a book (`NoisePlan.for_book`)
        raise LedgerError(_refusal(query, book, "noise that groups share: not counted so"))
    assert theirs is not None
    times = rows_of(query.privacy_unit_column, time=f"{query.time_column}{query.counted_from}")
    paid = _paid(query, theirs, query.periods) if book.change == times else ALL_PERIODS
    size = 0 if query.periods is None else query.periods.size // theirs.size
    paid = _with_own(paid, size, periods_in_a_window(query))
    return BookShare(squared=2, squared_signed=4, groups=2, periods=paid)


def _with_own(paid: PaidPeriods, size: int, together: int) -> PaidPeriods:
    """Say how the query's own periods lie in those of the book, where it is not one by one."""
    return paid if (size, together) == (1, 1) else replace(paid, own=(size, together))


def _paid(query: Query, theirs: Ticks, whole: Ticks | None) -> PaidPeriods:
    """Periods of the book that a query reads; a window begins all of its `whole` period.

    Without such periods the first window begins all that is ever read, which must have an end.
    """
    if query.start is None or (whole is None and query.end is None):
        return ALL_PERIODS
    start, end, schedule = query.start, query.end, query.schedule
    last = None if end is None else theirs.last_before(end - 1)

    def last_of(window: int) -> int:
        if whole is None:
            assert last is not None
            return last
        closes = schedule.span(window)[1]
        assert closes is not None
        reached = theirs.last_before(whole.at(whole.last_before(closes - 1) + 1) - 1)
        return reached if last is None else min(reached, last)

    return PaidPeriods(first=theirs.last_before(start), last=last, last_of=last_of)


def periods_in_a_window(query: Query) -> int:
    """How many periods of one user a window may hold, at most."""
    ticks = query.periods
    if ticks is None:
        return 1
    if query.window is None:
        paid = query.paid_periods
        assert paid.first is not None
        assert paid.last is not None
        return paid.last - paid.first + 1
    start, size = query.start or 0, int(query.window.size)
    fixed = query.time_zone == "UTC" or keeps_its_offset(query.time_zone)
    days = size % DAY == 0 and ticks.size % DAY == 0
    cell = query.window.cell
    if ticks.months or months_in(size):
        return _periods_by_months(query.window, ticks, start, fixed=fixed)
    aligned = (fixed or days) and (ticks.at(ticks.last_before(start)) - start) % cell == 0
    if days and not fixed:  # the calendar's days, from midnight on
        aligned = ticks.at(ticks.last_before(start)) == start
    if aligned and ticks.size % size == 0 and cell == size:
        return 1
    if aligned and query.window.kind == "cumulate" and ticks.size % size == 0:
        return 1 if (ticks.at(ticks.last_before(start)) - start) % size == 0 else 2
    if aligned and size % ticks.size == 0 and cell % ticks.size == 0:
        return size // int(ticks.size)
    return -(-size // int(ticks.size)) + 1


def _periods_by_months(window: Tumble, ticks: Ticks, start: int, *, fixed: bool) -> int:
    """The same where the calendar's months are windows, periods or both."""
    size, cell = int(window.size), window.cell
    first = ticks.at(ticks.last_before(start))

    def begins_one(length: int) -> bool:
        grid = replace(ticks, origin=first, size=length)
        return grid.at(grid.last_before(start)) == start

    whole_days = fixed or size == DAY  # a day in a zone of changing clocks has 23 or 25 hours
    nests = not ticks.size % size if months_in(size) else whole_days and not DAY % size
    if ticks.months and nests and window.kind != "hop" and begins_one(size):
        return 1
    if months_in(size) and ticks.months and not cell % ticks.size and first == start:
        return size // int(ticks.size)
    if months_in(size) and ticks.months:
        return -(-size // int(ticks.size)) + 1
    return -(-longest(size) // shortest(ticks.size)) + 1


def loss_over(book: dict[str, Any], days: int) -> Fraction | None:
    """mu^2 that one user may have lost within so many days in a row, as a book is reported.

    None: the book does not say. Users for ever lose what the book has spent, whatever the days.
    """
    terms = Terms.from_json(dict(book["terms"]))
    if terms.unit != "user" or terms.measure != "mu_squared":
        return None
    ticks = book_ticks(terms)
    if ticks is None:
        return Fraction(book["spent"])
    stray = longest(ticks.size) - ticks.size if days > 1 else 0  # a day is in one month
    count = _touched(days * DAY + stray, ticks.size, min(DAY, ticks.size))
    spans = [_Span.of(line) for line in book["spent_on"]]
    starts = {place for span in spans for place in (span.first, span.last - count + 1)}
    losses = (sum(span.loss(start, start + count - 1) for span in spans) for start in starts)
    return Fraction(max(losses, default=0))


def held_places(book: dict[str, Any]) -> dict[str, int]:
    """By run, when the first period begins that it pays for, of runs that have begun none yet."""
    ticks = book_ticks(Terms.from_json(dict(book["terms"])))
    return {
        line["run"]: ticks.at(line["periods"][0])
        for line in book["spent_on"]
        if ticks is not None and line.get("periods") and line["begun"] is None
    }


_FAR = 1 << 40  # periods, where a charge has no end


@dataclass(frozen=True, kw_only=True)
class _Span:
    """A charge: its amount, the periods that pay, and how they are joined to the query's own."""

    first: int
    last: int
    amount: Fraction
    own: tuple[int, int] | None

    @classmethod
    def of(cls, line: dict[str, Any]) -> _Span:
        """As reported; an empty range is a run that was ended before it began."""
        periods = line.get("periods", [-_FAR, None])
        own = line.get("own_periods", [1, 1] if "periods" in line else None)
        first, last = periods or (1, 0)
        return cls(
            first=first,
            last=_FAR if last is None else last,
            amount=Fraction(line["amount"]),
            own=None if own is None else (own[0], own[1]),
        )

    def loss(self, start: int, end: int) -> Fraction:
        """What a user loses in the periods from `start` to `end`."""
        count = max(0, min(self.last, end) - max(self.first, start) + 1)
        if self.own is None:  # nobody knows how many of them share a window
            return self.amount * count * count
        size, together = self.own
        units = min(count, 1) if not size else min(count, _touched(count, size, 1))
        return self.amount * units * min(units, together)


def _touched(length: int, size: int, step: int) -> int:
    """How many periods of a size a stretch from one multiple of `step` to another may touch."""
    return -(-(length - step) // size) + 1
