"""One dataset's book: what its protected units have lost, cell by cell, and by which charges.

One rule serves every unit. A unit touches at most `width` successive steps (1 for an event, w for
w-event, all steps for a user) and one bin in each, so its loss is at most

    max over windows of `width` steps of
        sum over the window's steps of (max over bins of what was charged to that step and bin)
      + sum over the intervals that overlap the window of what each of them costs

Slacks, which books of users alone allow for, are plain sums over all charges. Where a user within a
period is one unit, charges may name periods: `PeriodLosses` adds these up, besides the others.
`Account` adds this up. A charge to the newest step, the ordinary case, is checked in O(1); one to
any other step takes a scan of the windows that it touches. `Book` also knows which charges were
made already: a charge that is made again, by a replay, must be the same and counts once.
"""

from __future__ import annotations

import dataclasses
from array import array
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from operator import itemgetter
from typing import Any

from dpstream.errors import LedgerError, NoiseReuse
from dpstream.privacy.amounts import GRID, floor_units, show
from dpstream.privacy.ledger.charges import Charge, Terms
from dpstream.privacy.ledger.period_losses import PeriodLosses

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of bins."""
Key = tuple[str, str, str, int]
"""Run, query, purpose and first step of an interval or cover."""
Span = tuple[int, int | None, int]
"""The first step of an interval or cover, its last (None while open), its cost."""
DigestAt = Callable[[int], str]
"""The digest of a run's input up to a step, or "" where it is not at hand."""


class StepLoss:
    """What was charged to one step: to all bins, and to some bins on top.

    A unit touches one bin of a step, so the largest loss of any bin, `top`, counts.
    """

    __slots__ = ("bin_charges", "everywhere", "top")

    def __init__(self) -> None:
        self.everywhere = self.top = 0
        self.bin_charges: list[tuple[Ranges, int]] | None = None  # most steps have none

    def with_charge(self, amount: int, bins: Ranges | None) -> int:
        """The largest loss of any bin if `amount` were charged to `bins` too."""
        if bins is None:
            return self.top + amount
        edges: dict[int, int] = {}
        for ranges, charged in [*(self.bin_charges or ()), (bins, amount)]:
            for start, stop in ranges:
                edges[start] = edges.get(start, 0) + charged
                edges[stop] = edges.get(stop, 0) - charged
        return self.everywhere + max(accumulate(edges[edge] for edge in sorted(edges)))

    def add(self, amount: int, bins: Ranges | None) -> None:
        """Charge `amount` to `bins`."""
        if bins is None:
            self.everywhere += amount
            self.top += amount
        else:
            self.top = self.with_charge(amount, bins)
            self.bin_charges = [*(self.bin_charges or ()), (bins, amount)]


class Account:
    """Charges of one book added up, for new charges to step `since` and later.

    Steps that share a window with `since` are kept too, from `oldest` on; older ones are settled.
    """

    def __init__(self, terms: Terms, *, since: int = 0) -> None:
        self.terms, self.since, self._width = terms, since, terms.width
        self.total = floor_units(terms.total)
        self.peak = 0
        self.delta_slack, self.rounding_slack = Fraction(0), Fraction(0)
        self._periods: PeriodLosses | None = None  # of charges and runs that name any
        self._steps: dict[int, StepLoss] = {}
        self._intervals: dict[Key, Span] = {}
        self._live: dict[Key, Span] = {}  # those that a window ending now or later can meet
        self._end = -1  # the newest step charged
        self._sum = 0  # losses of the `width` steps that end there

    def loss_with(self, charge: Charge) -> int:
        """The largest loss of any unit that the charge touches, if it were made, in grid units."""
        if charge.periods is not None and self.terms.unit != "user":
            raise LedgerError("only a book of users has charges that name periods")
        if charge.periods is not None:
            return self._loss_always() + self.periods.worst(charge.periods).units + charge.units
        lost = self._loss_of_steps(charge)
        return lost + self._periods.worst().units if self._periods else lost

    @property
    def periods(self) -> PeriodLosses:
        """What periods have lost, by the charges that name them."""
        if self._periods is None:
            self._periods = PeriodLosses()
        return self._periods

    @property
    def has_periods(self) -> bool:
        """Has any charge named periods?"""
        return bool(self._periods)

    def _loss_always(self) -> int:
        """What every unit of a book of users has lost, whatever its period."""
        return self._sum + self._overlapping(self._end)

    def _loss_of_steps(self, charge: Charge) -> int:
        amount = charge.units
        if charge.kind == "close":
            self._refuse_second_close(charge)
            return self.peak
        first, last = charge.cells.first, charge.cells.last + charge.repeat - 1
        if charge.kind == "open":
            last = max(first, self._end)
        if first < self.since:
            raise LedgerError(f"step {first} is older than what this account still holds")
        if charge.kind == "cover":
            return self._highest_between(first, last) + amount
        if first == last and first >= self._end:
            loss = self._sum_at(first) + self._overlapping(first)
            if charge.kind == "open":
                return loss + amount
            step = self._steps.get(first) or StepLoss()
            return loss - step.top + step.with_charge(amount, charge.cells.bins)
        return self._scan(charge, amount, first, last)

    def add(self, charge: Charge, loss: int | None = None) -> None:
        """Make the charge; `loss` is what `loss_with` said of it."""
        if charge.periods is not None:
            self.peak = max(self.peak, self.loss_with(charge) if loss is None else loss)
            self.periods.add(charge)
            self._advance(charge.cells.last)
            return
        if charge.delta_slack or charge.rounding_slack:
            self.delta_slack += charge.delta_slack
            self.rounding_slack += charge.rounding_slack
        if charge.cells.first < self.since:
            loss = self.peak  # read back from before; it was within the total when it was made
        self.peak = max(self.peak, self.loss_with(charge) if loss is None else loss)
        if charge.kind != "cells":
            self._add_interval(charge)
            return
        bins, oldest = charge.cells.bins, self.oldest
        for offset in range(charge.repeat):
            first, last = charge.cells.first + offset, charge.cells.last + offset
            for number in range(max(first, oldest), last + 1):
                step = self._steps.get(number)
                if step is None:
                    step = self._steps[number] = StepLoss()
                before = step.top
                step.add(charge.units, bins)
                if number > self._end:
                    self._advance(number)
                if self._inside(number):
                    self._sum += step.top - before

    def _add_interval(self, charge: Charge) -> None:
        """Start an interval or cover, or end an interval."""
        first = charge.cells.first
        key = (charge.run, charge.query, charge.purpose, first)
        if charge.kind != "close":
            end = charge.cells.last if charge.kind == "cover" else None
            self._intervals[key] = self._live[key] = (first, end, charge.units)
            self._advance(first)
        elif key in self._intervals:
            cost = self._intervals[key][2]
            self._intervals[key] = self._live[key] = (first, charge.cells.last, cost)

    def newest_loss_with(self, charge: Charge) -> int | None:
        """`loss_with` of a plain charge to the newest step or a later one; None: it is older."""
        first = charge.step
        if first < self._end or first < self.since or self._periods:
            return None
        return self._sum_at(first) + (self._overlapping(first) if self._live else 0) + charge.units

    def add_newest(self, charge: Charge, loss: int) -> None:
        """`add` of a plain charge to the newest step; `loss` is what `newest_loss_with` gave."""
        number, amount = charge.step, charge.units
        if number > self._end:
            self._advance(number)
        step = self._steps.get(number)
        if step is None:
            step = self._steps[number] = StepLoss()
        step.everywhere += amount
        step.top += amount
        self._sum += amount
        if loss > self.peak:
            self.peak = loss

    def loss_at(self, step: int) -> int:
        """Loss of the window that ends at `step`, in grid units."""
        if step >= self._end:
            return self._sum_at(step) + self._overlapping(step)
        width = self._width
        low = 0 if width is None else max(self.oldest, step - width + 1)
        tops = sum(self._steps[s].top for s in range(low, step + 1) if s in self._steps)
        return tops + self._overlapping(step)

    def left(self, step: int) -> Fraction:
        """What the window that ends at `step` may still spend; of periods, the one with least."""
        lost = self.loss_at(step) + (self._periods.worst().units if self._periods else 0)
        return Fraction(self.total - lost, GRID)

    @property
    def left_to_come(self) -> Fraction:
        """What units of periods that nobody has begun may still lose, in a book of users."""
        return Fraction(self.total - self._loss_always() - self.periods.to_come().units, GRID)

    @property
    def most(self) -> int:
        """The most that any unit has lost, in grid units."""
        if not self.has_periods:
            return self.peak
        return self._loss_always() + self.periods.worst().units

    def first_room(self, charge: Charge) -> int | None:
        """The first period from which on a charge for periods fits; None: there is none."""
        assert charge.periods is not None
        first, last = charge.periods
        for start in self.periods.starts_from(first):
            if last is not None and start > last:
                break
            later = dataclasses.replace(charge, periods=(start, last))
            if self.loss_with(later) <= self.total and not self.slack_missing(later):
                return start
        return None

    def slack_missing(self, charge: Charge) -> str:
        """Which slack a charge asks too much of: delta_slack, rounding_slack, or none ("")."""
        for name in ("delta_slack", "rounding_slack"):
            asked = getattr(charge, name)
            if asked and self.spent_slack(name, charge) + asked > getattr(self.terms, name):
                return name
        return ""

    def spent_slack(self, name: str, charge: Charge) -> Fraction:
        """What is spent of a slack, in the periods that a charge names."""
        always: Fraction = getattr(self, name)
        dated: Fraction = getattr(self.periods.worst(charge.periods), name)
        return always + dated

    def settle_before(self, step: int) -> None:
        """Drop old steps: they can no longer share a window with a new one."""
        if step <= self.since or self._width is None:
            return
        self.since = step
        oldest = self.oldest
        self._steps = {s: loss for s, loss in self._steps.items() if s >= oldest}
        self._intervals = {
            key: value
            for key, value in self._intervals.items()
            if value[1] is None or value[1] >= oldest
        }

    def interval(self, key: Key) -> Span | None:
        """First step, last step (None while open) and cost of an interval or cover, if known."""
        return self._intervals.get(key)

    @property
    def newest(self) -> int:
        """The newest step that was charged, or -1."""
        return self._end

    @property
    def oldest(self) -> int:
        """The oldest step in a window with one that may still be charged."""
        return 0 if self._width is None else max(0, self.since - self._width + 1)

    def _refuse_second_close(self, charge: Charge) -> None:
        key = (charge.run, charge.query, charge.purpose, charge.cells.first)
        _, end, _ = self._intervals.get(key, (0, None, 0))
        if end not in (None, charge.cells.last):
            raise LedgerError(
                f"{charge.purpose!r}, open from step {charge.cells.first}, was closed at step {end}"
            )

    def _inside(self, step: int) -> bool:
        return self._width is None or step > self._end - self._width

    def _sum_at(self, step: int) -> int:
        """Losses of the `width` steps that end at `step`, for `step` at or after the newest."""
        width, end = self._width, self._end
        if width is None or step == end:
            return self._sum
        if step - end >= width:
            return 0
        steps, left = self._steps, self._sum
        for leaving in range(end - width + 1, step - width + 1):
            if leaving in steps:
                left -= steps[leaving].top
        return left

    def _advance(self, step: int) -> None:
        if step > self._end:
            self._sum = self._sum_at(step)
            self._end = step
            if self._live and self._width is not None:
                oldest = step - self._width + 1
                spans = self._live.items()
                for key in [k for k, (_, last, _) in spans if last is not None and last < oldest]:
                    del self._live[key]

    def _overlapping(self, end: int) -> int:
        """Cost of the intervals that overlap the window ending at `end`."""
        spans = self._live if end >= self._end else self._intervals
        if not spans:
            return 0
        start, total = 0 if self._width is None else end - self._width + 1, 0
        for first, last, cost in spans.values():
            if first <= end and (last is None or last >= start):
                total += cost
        return total

    def _highest_between(self, first: int, last: int) -> int:
        """The largest loss of any of these steps, however many; for books of single events.

        Between the steps that were charged by themselves the loss only rises where a cover starts.
        """
        starts = (start for start, _, _ in self._intervals.values())
        places = {first, *self._steps, *starts}
        return max(self.loss_at(step) for step in places if first <= step <= last)

    def _scan(self, charge: Charge, amount: int, first: int, last: int) -> int:
        """The worst window among all that touch steps `first` to `last`."""
        width = self._width
        extra: dict[int, int] = {}
        if charge.kind == "cells":
            for offset in range(charge.repeat):
                for s in range(charge.cells.first + offset, charge.cells.last + offset + 1):
                    extra[s] = extra.get(s, 0) + amount
        fixed = amount if charge.kind == "open" else 0
        bins = charge.cells.bins

        steps, none = self._steps, StepLoss()
        if width is None:
            total = sum(step.top for step in steps.values())
            for s, more in extra.items():
                step = steps.get(s, none)
                total += step.with_charge(more, bins) - step.top
            return total + self._overlapping(max(last, self._end)) + fixed
        start = max(self.oldest, first - width + 1)
        tops = [steps[s].top if s in steps else 0 for s in range(start, last + width)]
        for s, more in extra.items():
            tops[s - start] = steps.get(s, none).with_charge(more, bins)
        worst = running = 0
        for index, value in enumerate(tops):
            running += value - (tops[index - width] if index >= width else 0)
            if start + index >= first:
                over = self._overlapping(start + index) if self._intervals else 0
                worst = max(worst, running + over)
        return worst + fixed


@dataclass(slots=True)
class SpentOn:
    """What was charged under one purpose of a run: how often, how much, at which steps."""

    charges: int = 0
    units: int = 0
    first: int = -1
    last: int = -1
    delta_slack: Fraction = Fraction(0)
    rounding_slack: Fraction = Fraction(0)
    own_periods: tuple[int, int] | None = None

    def add(self, charge: Charge) -> None:
        """Count a charge."""
        self.charges += charge.repeat
        self.units += charge.units * charge.repeat
        if self.first < 0 or charge.step < self.first:
            self.first = charge.step
        self.last = max(self.last, charge.last_step)
        if not charge.plain:
            self.delta_slack += charge.delta_slack
            self.rounding_slack += charge.rounding_slack
            self.own_periods = charge.own_periods


class Book:
    """One dataset's terms, its account, and which charges are known."""

    def __init__(self, terms: Terms, *, since: int = 0, in_memory: bool = False) -> None:
        self.terms = terms
        self.account = Account(terms, since=since)
        self.reach = 0  # how far behind their own step charges have read
        self._settled = SettledCharges() if in_memory else None
        self.spent_on: dict[tuple[str, str, str], SpentOn] = {}
        self._known: dict[tuple[str, str, str, str], list[Charge]] = {}

    def missing(
        self, charge: Charge, digest_at: DigestAt, *, verified: bool = False
    ) -> list[Charge]:
        """The parts of a charge that were not made yet; a contradiction raises."""
        known = self._known.get(charge.source)
        if not known or known[-1].last_step < charge.step:
            return [_part(charge, charge.step, charge.last_step, digest_at)]
        parts, step = [], charge.step
        index = max(bisect_right(known, charge.step, key=lambda c: c.step) - 1, 0)
        for old in known[index:]:
            if old.last_step < step or old.step > charge.last_step:
                continue
            _agree(old, charge, digest_at, verified)
            if old.step > step:
                parts.append(_part(charge, step, old.step - 1, digest_at))
            step = old.last_step + 1
        if step <= charge.last_step:
            parts.append(_part(charge, step, charge.last_step, digest_at))
        return parts

    def newest_loss_with(self, charge: Charge) -> int | None:
        """What a charge that is plain and new leads to; None: it takes the long way."""
        if not (charge.plain and charge.digest):
            return None
        known = self._known.get(charge.source)
        if known and known[-1].last_step >= charge.step:
            return None
        return self.account.newest_loss_with(charge)

    def add_newest(self, charge: Charge, loss: int) -> None:
        """`add` of a charge for which `newest_loss_with` gave a loss."""
        self.account.add_newest(charge, loss)
        self._known.setdefault(charge.source, []).append(charge)
        self._count(charge)

    def _count(self, charge: Charge) -> None:
        purpose = charge.source[:3]
        spent = self.spent_on.get(purpose)
        if spent is None:
            spent = self.spent_on[purpose] = SpentOn()
        if charge.kind != "close":
            spent.add(charge)

    def add(self, charge: Charge, loss: int | None = None) -> None:
        """Apply a charge that is durable; `loss` is what the account said it leads to."""
        if charge.kind == "cells" and charge.step - charge.cells.first > self.reach:
            self.reach = charge.step - charge.cells.first
        reaches = charge.cells.last + charge.repeat > self.account.oldest
        if reaches or charge.kind in ("open", "close"):
            self.account.add(charge, loss)
            insort(self._known.setdefault(charge.source, []), charge, key=lambda c: c.step)
        elif self._settled is not None:
            self._settled.add(charge)
        self._count(charge)

    def charges(self) -> list[Charge]:
        """The charges still held, oldest first; of a book in memory, all of them."""
        charges = [charge for known in self._known.values() for charge in known]
        if self._settled is not None:
            charges += self._settled.charges()
        return sorted(charges, key=lambda c: (c.step, c.kind == "close"))

    def settle_before(self, step: int) -> None:
        """Keep memory bounded on a stream that never ends: settle what no window meets any more.

        An interval is held for as long as it is open, or its end meets a window.
        """
        self.account.settle_before(step)
        oldest = self.account.oldest
        for source, charges in self._known.items():
            current, old = list[Charge](), list[Charge]()
            for charge in charges:
                alive = max(charge.last_step, charge.cells.last) >= oldest or (
                    charge.kind == "open"
                    and self.account.interval((*source[:3], charge.cells.first)) is not None
                )
                (current if alive else old).append(charge)
            self._known[source] = current
            if self._settled is not None:
                for charge in old:
                    self._settled.add(charge)

    def reread(self, oldest: int, charges: Iterable[Charge]) -> Book:
        """The same book with all of `charges`, its own, that a charge to step `oldest` may meet."""
        since = max(0, oldest - (self.terms.width or oldest))
        book = Book(self.terms, since=since, in_memory=self._settled is not None)
        for charge in charges:
            book.add(charge)
        book.account.peak = max(book.account.peak, self.account.peak)
        book.account.periods.keep_runs(self.account.periods)
        return book


class SettledCharges:
    """Charges that no window meets any more, 16 bytes for each run of equal ones.

    A book in memory has no file to read them back from. Their digests are dropped: made again
    without a log that proves the same input, such a charge is refused.
    """

    DIGEST = "settled"

    def __init__(self) -> None:
        self._runs: dict[tuple[Any, ...], tuple[Charge, array[int]]] = {}

    def add(self, charge: Charge) -> None:
        """Keep a charge; it lengthens the run of equal ones that it follows."""
        step, digest = charge.step, SettledCharges.DIGEST if charge.digest else ""
        slack = charge.delta_slack, charge.rounding_slack
        key = (charge.source, charge.amount, charge.offsets, slack, digest)
        if key not in self._runs:
            self._runs[key] = dataclasses.replace(charge, digest=digest), array("q")
        _, runs = self._runs[key]
        single = charge.kind != "cells" or any(slack)
        if runs and not single and runs[-2] + runs[-1] == step:
            runs[-1] += charge.repeat
        else:
            runs.extend((step, charge.repeat))

    def charges(self) -> Iterator[Charge]:
        """All of them, run by run."""
        for charge, runs in self._runs.values():
            for step, repeat in zip(runs[::2], runs[1::2], strict=True):
                yield charge.at(step, repeat=repeat)


def _agree(old: Charge, new: Charge, digest_at: DigestAt, verified: bool) -> None:
    """A charge made again must be the same charge over the same input."""
    spent, asked = ((c.amount, c.delta_slack, c.rounding_slack, c.offsets) for c in (old, new))
    if spent != asked or old.periods not in (None, new.periods):  # None: all of them have paid
        raise LedgerError(
            f"run {new.run[:8]} already charged {_amounts(old)} for {new.purpose!r} at step "
            f"{old.step}; a replay now asks for {_amounts(new)}; a replay must be identical"
        )
    digest = digest_at(old.last_step)
    if old.digest and digest != old.digest and not (verified and not digest):
        data = "other data" if digest else "data of which this replay brings only a part"
        raise NoiseReuse(
            f"run {new.run[:8]} already published step {old.last_step} from {data}; nothing "
            "was published; feed the same data to replay, or start a new run"
        )


def _amounts(charge: Charge) -> str:
    amount, tail, drift = map(show, (charge.amount, charge.delta_slack, charge.rounding_slack))
    if not (charge.delta_slack or charge.rounding_slack):
        return amount
    return f"{amount} (tail {tail}, drift {drift})"


def _part(charge: Charge, first: int, last: int, digest_at: DigestAt) -> Charge:
    """The share of a repeated charge that falls on steps `first` to `last`."""
    digest = digest_at(last) or charge.digest
    if first == charge.step and last == charge.last_step:
        return charge if charge.digest == digest else dataclasses.replace(charge, digest=digest)
    return charge.at(first, repeat=last - first + 1, digest=digest)


def report(name: str, book: Book) -> dict[str, Any]:
    """What was spent, on what, and what is left, ready for JSON."""
    account, terms = book.account, book.terms
    also: dict[str, Any] = {}
    if terms.delta_slack or terms.rounding_slack:
        dated = account.periods.worst()
        for slack, allowed, spent in (
            ("tail", terms.delta_slack, account.delta_slack + dated.delta_slack),
            ("drift", terms.rounding_slack, account.rounding_slack + dated.rounding_slack),
        ):
            also[slack] = {"spent": str(spent), "left": str(allowed - spent)}
    return {
        "dataset": name,
        "promise": terms.describe(),
        "terms": terms.to_json(),
        "newest_step": account.newest,
        "spent": str(Fraction(account.most, GRID)),
        "left": str(account.left(max(account.newest, 0))),
        "left_next_step": str(account.left(account.newest + 1)),
        **({"left_to_come": str(account.left_to_come)} if account.has_periods else {}),
        **also,
        "runs": len({key[0] for key in book.spent_on}),
        "spent_on": [
            {
                "run": run,
                "query": query,
                "purpose": purpose,
                "charges": line.charges,
                "amount": str(Fraction(line.units, GRID)),
                "first_step": line.first,
                "last_step": line.last,
            }
            | ({"tail": str(line.delta_slack), "drift": str(line.rounding_slack)} if also else {})
            | ({} if line.own_periods is None else {"own_periods": list(line.own_periods)})
            | account.periods.of_run(run)
            for (run, query, purpose), line in sorted(book.spent_on.items(), key=itemgetter(0))
        ],
    }
