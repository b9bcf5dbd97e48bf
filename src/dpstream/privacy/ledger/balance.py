"""The arithmetic of a book: what the protected units have lost, cell by cell.

One rule serves every unit. A unit touches at most `width` successive steps (1 for an event, w for
w-event, all steps for a user) and one bin in each, so its loss is at most

    max over windows of `width` steps of
        sum over the window's steps of (max over bins of what was charged to that step and bin)
      + sum over the intervals that overlap the window of what each of them costs

Tails and drifts, which books of users alone allow for, are plain sums over all charges.
Charges at the newest step, the ordinary case, are checked in O(1); any other place is allowed and
costs a scan of the windows that it touches.
"""

from __future__ import annotations

from fractions import Fraction

from dpstream.errors import LedgerError
from dpstream.privacy.amounts import GRID, floor_units
from dpstream.privacy.ledger.charges import Charge, Terms

# What one step has lost, bin by bin: a unit touches one bin of it, so the largest loss counts.

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of bins."""


class StepLoss:
    """What was charged to one step: everywhere, and to some bins on top."""

    __slots__ = ("everywhere", "pieces", "top")

    def __init__(self) -> None:
        self.everywhere = self.top = 0
        self.pieces: list[tuple[Ranges, int]] | None = None  # most steps have none

    def with_charge(self, amount: int, bins: Ranges | None) -> int:
        """The largest loss of any bin if `amount` were charged to `bins` too."""
        if bins is None:
            return self.top + amount
        return self.everywhere + _highest([*(self.pieces or ()), (bins, amount)])

    def add(self, amount: int, bins: Ranges | None) -> None:
        """Charge `amount` to `bins`."""
        if bins is None:
            self.everywhere += amount
            self.top += amount
        else:
            self.top = self.with_charge(amount, bins)
            self.pieces = [*(self.pieces or ()), (bins, amount)]


def _highest(pieces: list[tuple[Ranges, int]]) -> int:
    """Maximum of a sum of step functions over bins."""
    edges: dict[int, int] = {}
    for ranges, amount in pieces:
        for start, stop in ranges:
            edges[start] = edges.get(start, 0) + amount
            edges[stop] = edges.get(stop, 0) - amount
    height = highest = 0
    for edge in sorted(edges):
        height += edges[edge]
        highest = max(highest, height)
    return highest


Key = tuple[str, str, str, int]  # run, query, purpose and first step of an interval or cover
Span = tuple[int, int | None, int]  # its first step, its last (None while open), its cost


class Account:
    """Charges of one book added up, for new charges to step `since` and later.

    Steps that share a window with `since` are kept too, from `kept` on; older ones are settled.
    """

    def __init__(self, terms: Terms, *, since: int = 0) -> None:
        self.terms, self.since, self._width = terms, since, terms.width
        self.kept = self._oldest_kept()  # the oldest step in a window with one to be charged
        self.total = floor_units(terms.total)
        self.peak = 0
        self.tail, self.drift = Fraction(0), Fraction(0)
        self._steps: dict[int, StepLoss] = {}
        self._intervals: dict[Key, Span] = {}
        self._live: dict[Key, Span] = {}  # those that a window ending now or later can meet
        self._end = -1  # the newest step charged
        self._sum = 0  # losses of the `width` steps that end there

    def loss_with(self, charge: Charge) -> int:
        """The largest loss of any unit that the charge touches, if it were made, in grid units."""
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
        amount = charge.units
        if charge.tail or charge.drift:
            self.tail, self.drift = self.tail + charge.tail, self.drift + charge.drift
        if charge.cells.first < self.since:
            loss = self.peak  # read back from before; it was within the total when it was made
        self.peak = max(self.peak, self.loss_with(charge) if loss is None else loss)
        key = (charge.run, charge.query, charge.purpose, charge.cells.first)
        if charge.kind in ("open", "cover"):
            end = charge.cells.last if charge.kind == "cover" else None
            self._intervals[key] = self._live[key] = (charge.cells.first, end, amount)
            self._advance(charge.cells.first)
            return
        if charge.kind == "close":
            if key in self._intervals:
                start, _, cost = self._intervals[key]
                self._intervals[key] = self._live[key] = (start, charge.cells.last, cost)
            return
        bins = charge.cells.bins
        for offset in range(charge.repeat):
            first, last = charge.cells.first + offset, charge.cells.last + offset
            for number in range(max(first, self.kept), last + 1):
                step = self._steps.get(number)
                if step is None:
                    step = self._steps[number] = StepLoss()
                before = step.top
                step.add(amount, bins)
                if number > self._end:
                    self._advance(number)
                if self._inside(number):
                    self._sum += step.top - before

    def newest_loss_with(self, charge: Charge) -> int | None:
        """`loss_with` of a plain charge to the newest step or a later one; None: it is older."""
        first = charge.step
        if first < self._end or first < self.since:
            return None
        return self._sum_at(first) + (self._overlapping(first) if self._live else 0) + charge.units

    def add_newest(self, charge: Charge, loss: int) -> None:
        """`add` of a charge that `newest_loss_with` has judged."""
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
        low = 0 if width is None else max(self.kept, step - width + 1)
        tops = sum(self._steps[s].top for s in range(low, step + 1) if s in self._steps)
        return tops + self._overlapping(step)

    def left(self, step: int) -> Fraction:
        """What the window that ends at `step` may still spend."""
        return Fraction(self.total - self.loss_at(step), GRID)

    def forget_before(self, step: int) -> None:
        """Settle old steps: they can no longer share a window with a new one."""
        if step <= self.since or self._width is None:
            return
        self.since = step
        self.kept = self._oldest_kept()
        self._steps = {s: loss for s, loss in self._steps.items() if s >= self.kept}
        self._intervals = {
            key: value
            for key, value in self._intervals.items()
            if value[1] is None or value[1] >= self.kept
        }

    def interval(self, key: Key) -> Span | None:
        """First step, last step (None while open) and cost of an interval or cover, if known."""
        return self._intervals.get(key)

    @property
    def newest(self) -> int:
        """The newest step that was charged, or -1."""
        return self._end

    def _oldest_kept(self) -> int:
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
        start = max(self.kept, first - width + 1)
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
