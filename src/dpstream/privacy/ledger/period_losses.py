"""What units of each period have lost, where a user within a period (a day, a week) is one unit.

A charge then names the periods whose rows its run reads: `first` to `last`, or from `first` on. A
unit of period p loses the sum of the charges whose range has p, and every such sum must fit into
the book (`docs/soundness/periods.md`). A run that was ended has read nothing beyond the last period
that it has begun, so its charge ends there; one that has begun none costs nothing. A run that is to
end with a period may begin none after it, and its charge ends there, too; what it has begun all the
same, in a version that does not know of it, counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import inf
from typing import Any, NamedTuple

from dpstream.privacy.ledger.charges import Charge

Periods = tuple[int, int | None]
"""The first and the last period; None: it goes on for ever."""


class Loss(NamedTuple):
    """What a unit loses: an amount in grid units, and slacks."""

    units: int = 0
    delta_slack: Fraction = Fraction(0)
    rounding_slack: Fraction = Fraction(0)


@dataclass(slots=True)
class _Span:
    run: str
    first: int
    last: float
    charged: float
    """The last period that its charge names; it may end before."""
    loss: Loss


class PeriodLosses:
    """The charges that name periods, and what any period has lost by them."""

    def __init__(self) -> None:
        self._spans: list[_Span] = []
        self._begun: dict[str, int] = {}
        self._ended: set[str] = set()
        self._limits: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._spans)

    def add(self, charge: Charge) -> None:
        """Charge the periods that a charge names."""
        assert charge.periods is not None
        first, last = charge.periods
        loss = Loss(charge.units, charge.delta_slack, charge.rounding_slack)
        charged = inf if last is None else last
        self._spans.append(_Span(charge.run, first, charged, charged, loss))
        self._cut(charge.run)

    def begin(self, run: str, period: int) -> None:
        """The windows that a run draws reach into this period."""
        self._begun[run] = max(self._begun.get(run, period), period)
        self._cut(run)

    def _cut(self, run: str) -> None:
        """End a run's charges where it ends, or is to end; never before what it has begun."""
        if run not in self._ended and run not in self._limits:
            return
        reach: float = self._begun.get(run, -inf)
        if run not in self._ended:
            reach = max(reach, self._limits[run])
        for span in self._spans:
            if span.run == run:
                span.last = min(span.charged, reach)

    def limit(self, run: str, last: int | None) -> None:
        """The run begins no period after this one (None: it may, as its charge says)."""
        self._limits.pop(run, None)
        if last is not None:
            self._limits[run] = last
        for span in self._spans:
            if span.run == run:
                span.last = span.charged
        self._cut(run)

    def end(self, run: str) -> None:
        """The run draws nothing more: it costs the periods up to the last one that it has begun."""
        self._ended.add(run)
        self._cut(run)

    @property
    def newest(self) -> int | None:
        """The last period that any run has begun."""
        return max(self._begun.values(), default=None)

    def at(self, period: int) -> Loss:
        """What a unit of one period has lost."""
        return self.worst((period, period))

    def worst(self, periods: Periods | None = None) -> Loss:
        """The most that a unit of any of these periods (None: of any at all) has lost, each part by
        itself."""
        first, last = _limits(periods)
        spans = [span for span in self._spans if span.last >= span.first]
        places = sorted({max(span.first, first) for span in spans if span.first <= last})
        begins = sorted(spans, key=lambda span: span.first)
        ends = sorted(spans, key=lambda span: span.last)
        most, units, tail, drift = Loss(), 0, Fraction(0), Fraction(0)
        begun = over = 0
        for place in places:
            while begun < len(begins) and begins[begun].first <= place:
                loss, begun = begins[begun].loss, begun + 1
                units, tail, drift = units + loss[0], tail + loss[1], drift + loss[2]
            while over < begun and ends[over].last < place:
                loss, over = ends[over].loss, over + 1
                units, tail, drift = units - loss[0], tail - loss[1], drift - loss[2]
            most = Loss(max(most[0], units), max(most[1], tail), max(most[2], drift))
        return most

    def to_come(self) -> Loss:
        """The most that a unit of any period which no run has begun will have lost."""
        return self.worst(None if self.newest is None else (self.newest + 1, None))

    def of_run(self, run: str) -> dict[str, Any]:
        """Which periods pay for a run, as a report has it; nothing: all of them."""
        spans = [span for span in self._spans if span.run == run]
        if not spans:
            return {}
        first, last = min(span.first for span in spans), max(span.last for span in spans)
        known = [] if last < first else [first, None if last == inf else int(last)]
        return {"periods": known, "begun": self._begun.get(run), "ended": run in self._ended}

    def keep_runs(self, other: PeriodLosses) -> None:
        """Take over what is known of runs."""
        self._begun = other._begun
        for run, last in other._limits.items():
            self.limit(run, last)
        for run in other._ended:
            self.end(run)

    def starts_from(self, first: int) -> Iterator[int]:
        """Where a range that may begin at `first` could begin: there, or where a charge ends."""
        ends = {int(span.last) + 1 for span in self._spans if first <= span.last < inf}
        yield from sorted({first, *ends})


def _limits(periods: Periods | None) -> tuple[float, float]:
    if periods is None:
        return -inf, inf
    first, last = periods
    return first, inf if last is None else last
