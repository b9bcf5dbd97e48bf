"""What a pipeline would spend, before anything is spent: the figures of `dpstream ledger plan`.

Queries are charged to a copy of their book, in memory, in the order of the file; the ledger is
looked at and left as it is. Where units are users within a period, a charge counts in the periods
that its query reads; otherwise from its query's start on, for as long as there is a book.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

from rich.console import Console

from dpstream.cli.command_options import read_settings
from dpstream.cli.output import new_table, print_whole
from dpstream.engines.query_run import AnyQuery
from dpstream.errors import BudgetExceeded, InvalidParameter
from dpstream.optional import optional
from dpstream.privacy.amounts import as_text, positive, show
from dpstream.privacy.ledger.charges import Terms
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.ledger.refusals import amount_in_words, as_epsilon, promise_in_words
from dpstream.privacy.ledger.store import LedgerPlace
from dpstream.privacy.query_spend import QuerySpend
from dpstream.privacy.state import MemoryWindowKeys
from dpstream.privacy.state.run_directory import is_charged
from dpstream.query.book_periods import book_ticks
from dpstream.query.noise_plan import NoisePlan, plan_query
from dpstream.query.query import Query
from dpstream.query.series_query import SeriesQuery
from dpstream.query.windows import duration
from dpstream.session.budget import free_place
from dpstream.session.pipeline import Pipeline, PipelineBook

_COLUMNS = 12  # points in time that are shown
_WIDTH = 40  # characters of a full bar
_SHADES = "█▓▒░"
_USUAL = (Fraction(1, 10), Fraction(1, 2), Fraction(1))
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_CALENDAR = {"month": 30, "year": 365}  # days


@dataclass(frozen=True, kw_only=True)
class PlannedQuery:
    """What one query takes from its book."""

    query: AnyQuery
    analyst: str
    amount: Fraction
    """In what the book counts."""
    state: str
    """"charged" before, "fits", or why it does not."""
    changes: Sequence[Mapping[str, Any]] = ()
    """What another epsilon of this query would leave, and do to its noise."""
    by_period: bool = False
    """Does its charge count in the periods that it reads alone?"""

    @property
    def counts(self) -> bool:
        """Is it, or would it be, charged?"""
        return self.state in ("charged", "fits")

    def asks(self, terms: Terms) -> str:
        """What it asks for, in its own words."""
        if isinstance(self.query, Query):
            return f"epsilon = {show(self.query.epsilon)}, delta = {show(self.query.delta)}"
        return amount_in_words(terms, self.amount)

    def counts_at(self, moment: datetime) -> bool:
        """Does its charge count for units of that moment?"""
        start, end = self.query.start, self.query.end
        late = self.by_period and end is not None and _moment(end) <= moment
        return self.counts and not late and (start is None or _moment(start) <= moment)

    def over(self, now: datetime) -> str:
        """Says if it has published all it had to."""
        end = self.query.end
        return "" if end is None or _moment(end) > now else f", over since {_moment(end):%Y-%m-%d}"

    def begins(self, now: datetime) -> datetime:
        """When its charge begins to count."""
        return now if self.query.start is None else _moment(self.query.start)


Room = tuple[int, str]
"""How many more queries fit, and what is used up by then."""


@dataclass(frozen=True, kw_only=True)
class PlannedBook:
    """One book with all that would be charged to it."""

    dataset: str
    ledger: LedgerPlace
    terms: Terms
    before: Fraction
    """Spent by runs that are not the pipeline's."""
    queries: Sequence[PlannedQuery]
    left: Fraction
    further: Mapping[Fraction, Room]
    """How many more queries of an epsilon fit, and what is used up first."""
    runs_out: str
    note: str = ""

    def spend_at(self, moment: datetime) -> dict[str, Fraction]:
        """What a unit of then has lost, by query; "before" is what others have spent at most."""
        mine = {one.query.name: one.amount for one in self.queries if one.counts_at(moment)}
        return ({"before": self.before} if self.before else {}) | mine


@dataclass(frozen=True, kw_only=True)
class LedgerPlan:
    """The books of a pipeline from now until then."""

    now: datetime
    until: datetime
    books: Sequence[PlannedBook] = field(default_factory=list)

    @property
    def moments(self) -> list[datetime]:
        """Points in time, the first one now."""
        return [self.now + (self.until - self.now) * n / _COLUMNS for n in range(_COLUMNS + 1)]

    def to_json(self) -> dict[str, Any]:
        """Everything, amounts as fractions of what the book counts and as epsilon."""
        return {
            "from": self.now.isoformat(timespec="seconds"),
            "until": self.until.isoformat(timespec="seconds"),
            "books": [self._book(book) for book in self.books],
        }

    def _book(self, book: PlannedBook) -> dict[str, Any]:
        terms = book.terms

        def amount(value: Fraction) -> dict[str, Any]:
            return {"amount": str(value), "epsilon": as_epsilon(terms, value)}

        return {
            "dataset": book.dataset,
            "ledger": str(book.ledger),
            "promise": promise_in_words(terms),
            "measure": terms.measure,
            "period": terms.period if terms.unit == "user" else None,
            "total": amount(terms.total),
            "spent_before": amount(book.before),
            "left": amount(book.left),
            "queries": [
                {
                    "query": one.query.name,
                    "analyst": one.analyst or None,
                    "asks_for": one.asks(terms),
                    **amount(one.amount),
                    "share": float(one.amount / terms.total),
                    "state": one.state,
                    "begins": one.begins(self.now).isoformat(timespec="seconds"),
                    "changes": list(one.changes),
                }
                for one in book.queries
            ],
            "spend": [
                {"at": moment.isoformat(timespec="seconds")}
                | {name: str(value) for name, value in book.spend_at(moment).items()}
                for moment in self.moments
            ],
            "further": [
                {"epsilon": float(e), "fit": fit, "used_up_first": what}
                for e, (fit, what) in book.further.items()
            ],
            "runs_out": book.runs_out,
            "note": book.note or None,
        }

    def plot(self, path: Path) -> None:
        """Spend over time, by query, below the budget."""
        drawing = optional("matplotlib.figure", extra="plot", who="a plot")
        figure = drawing.Figure(figsize=(8, 3.5 * len(self.books)), dpi=144, layout="constrained")
        panels = figure.subplots(len(self.books), squeeze=False)[:, 0]
        for panel, book in zip(panels, self.books, strict=True):
            spends = [book.spend_at(moment) for moment in self.moments]
            names = list(dict.fromkeys(name for spend in spends for name in spend))
            heights = [[float(spend.get(name, 0)) for spend in spends] for name in names]
            if names:
                panel.stackplot(self.moments, heights, labels=names, step="post", alpha=0.8)
            panel.axhline(float(book.terms.total), color="#b03030", label="the book's total")
            panel.set(title=f"{book.dataset}: {promise_in_words(book.terms)}"[:90])
            panel.set_ylabel(book.terms.measure)
            panel.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
            panel.spines[["top", "right"]].set_visible(False)
        figure.savefig(path)


def plan_pipeline(
    pipeline: Pipeline,
    *,
    only: Sequence[str],
    length: str,
    further: Sequence[str],
    every: str | None,
    settings: Sequence[str],
) -> LedgerPlan:
    """Plan the books of a pipeline; nothing is written."""
    names = [query.name for query in pipeline.queries]
    epsilons = {
        name: positive(text, f"--set {name}")
        for name, text in read_settings(settings, word="query").items()
    }
    for name in (*only, *epsilons):
        if name not in names:
            raise InvalidParameter(
                f"{pipeline.path} has no query {name!r}; its queries are {', '.join(names)}"
            )
    now = datetime.now(UTC)
    asked = [positive(text, "--further") for text in further]
    pace = None if every is None else _length(every, "--every")
    books = [
        _plan_book(
            pipeline,
            replace(book, queries=tuple(_with_epsilon(q, epsilons.get(q.name)) for q in wanted)),
            asked=asked,
            pace=pace,
            now=now,
        )
        for book in pipeline.books
        if (wanted := [q for q in book.queries if not only or q.name in only])
    ]
    return LedgerPlan(now=now, until=now + _length(length, "--for"), books=books)


def _with_epsilon(query: AnyQuery, epsilon: Fraction | None) -> AnyQuery:
    if epsilon is None:
        return query
    if isinstance(query, Query):
        return replace(query, epsilon=epsilon)
    if not hasattr(query.mechanism, "epsilon"):
        raise InvalidParameter(f"--set: the mechanism of {query.name!r} has no epsilon")
    return replace(query, mechanism=replace(query.mechanism, epsilon=epsilon))  # type: ignore[type-var]


def _plan_book(
    pipeline: Pipeline,
    book: PipelineBook,
    *,
    asked: Sequence[Fraction],
    pace: timedelta | None,
    now: datetime,
) -> PlannedBook:
    wanted = book.terms()
    copy = Ledger()
    if book.ledger.exists():  # looking makes no file
        with closing(Ledger(book.ledger)) as ledger:
            copy = ledger.rehearsal()
    if copy.terms(book.dataset) is None:
        copy.open(book.dataset, wanted)
    report = _report(copy, book.dataset)
    if "provisional" in report:
        copy.open(book.dataset, wanted)
        report = _report(copy, book.dataset)
    paid, folders = {line["run"] for line in report["spent_on"]}, pipeline.folders
    charged = {q.name for q in book.queries if is_charged(folders[q.name], paid, copy.known)}
    terms = Terms.from_json(report["terms"])
    note = ""
    if terms != wanted and terms.with_budget_of(wanted) == wanted:
        note = f"{book.where} says {promise_in_words(wanted)}; this plan is for the book as it is"
    if terms.unit == "user":
        queries, before, left, room = _plan_users(pipeline, book, copy, charged, now)
    else:
        queries, before, left, room = _plan_series(pipeline, book, report, charged)
    usual = [e for e in _USUAL if terms.epsilon is None or e <= terms.epsilon]
    further = {e: room(e) for e in sorted({*(asked or usual)})}
    return PlannedBook(
        dataset=book.dataset,
        ledger=book.ledger,
        terms=terms,
        before=before,
        queries=queries,
        left=left,
        further=further,
        runs_out=_runs_out(queries, further, pace, now),
        note=note,
    )


Planned = tuple[list[PlannedQuery], Fraction, Fraction, Any]
"""Queries, what others have spent, what is left, and how many more of an epsilon fit."""


def _plan_users(
    pipeline: Pipeline, book: PipelineBook, copy: Ledger, charged: set[str], now: datetime
) -> Planned:
    """Every query is one charge, which pays for all of its releases."""
    dataset, at = book.dataset, (now - _EPOCH) // timedelta(microseconds=1)
    terms = copy.terms(dataset)
    assert terms is not None
    queries = [query.starting(at) for query in book.queries if isinstance(query, Query)]
    plans = {query.name: plan_query(query).for_book(terms) for query in queries}
    states = {}
    for number, (name, plan) in enumerate([*plans.items()]):
        states[name] = "charged" if name in charged else "fits"
        if name not in charged:
            free_place(copy, dataset, pipeline.changes.held.get(name, ""))
            spend = _spend(copy, dataset, plan, number, pipeline.analysts.get(name, ""))
            try:
                plan.pay(spend, "plan")
            except BudgetExceeded as problem:
                first, ticks = plan.first_room(spend), book_ticks(terms)
                if first is None or ticks is None or plan.query.end is not None:
                    states[name] = f"does not fit: {problem}"
                else:  # it begins with the first period that has room, as a run would
                    later = plan_query(plan.query.not_before(ticks.at(first)))
                    plans[name] = later.for_book(terms)
                    plans[name].pay(spend, "plan")
    after = _report(copy, dataset)
    left = Fraction(after.get("left_to_come", after["left"]))
    planned = [
        PlannedQuery(
            query=plan.query,
            analyst=pipeline.analysts.get(name, ""),
            amount=plan.cost(terms)["amount"],
            state=states[name],
            by_period=book_ticks(terms) is not None,
            changes=[] if name in charged else _changes(terms, plan, states[name], left),
        )
        for name, plan in plans.items()
    ]
    mine = sum((q.amount for q in planned if q.counts), Fraction(0))
    slack = {key: Fraction(after[key]["left"]) for key in ("tail", "drift") if key in after}
    template = next(iter(plans.values())).query

    def room(epsilon: Fraction) -> Room:
        cost = plan_query(replace(template, epsilon=epsilon)).cost(terms)
        takes = {"tail": cost["delta_slack"], "drift": cost["error"].xi}
        most = {"epsilon": left / cost["amount"]}
        most |= {key: rest / takes[key] for key, rest in slack.items() if takes[key]}
        first = min(most, key=lambda key: most[key])
        words = {"tail": "delta", "drift": "what floats add"}
        return max(0, math.floor(most[first])), words.get(first, first)

    return planned, max(terms.total - left - mine, Fraction(0)), left, room


def _spend(copy: Ledger, dataset: str, plan: NoisePlan, number: int, analyst: str) -> QuerySpend:
    run = number.to_bytes(16, "big")
    name = plan.query.name
    copy.admit(dataset, plan.terms(copy.terms(dataset)), f"query {name!r}")
    copy.register(dataset, run.hex(), "plan", analyst=analyst)
    keys = MemoryWindowKeys()
    return QuerySpend(run=run, query=name, ledger=copy, dataset=dataset, keys=keys)


def _changes(terms: Terms, plan: NoisePlan, state: str, left: Fraction) -> list[dict[str, Any]]:
    """Half and twice the epsilon of one query, all else unchanged."""
    amount, changes = plan.cost(terms)["amount"], []
    room = left + (amount if state == "fits" else 0)
    for factor in (Fraction(1, 2), Fraction(2)):
        other = plan_query(replace(plan.query, epsilon=plan.query.epsilon * factor))
        takes = other.cost(terms)["amount"]
        changes.append(
            {
                "epsilon": float(other.query.epsilon),
                "fits": takes <= room,
                "left_epsilon": as_epsilon(terms, room - takes) if takes <= room else None,
                "noise": math.sqrt(amount / takes),
            }
        )
    return changes


def _plan_series(
    pipeline: Pipeline, book: PipelineBook, report: dict[str, Any], charged: set[str]
) -> Planned:
    """A mechanism may spend all that it promises in any of its windows of steps."""
    terms = Terms.from_json(report["terms"])
    mine = {line["query"] for line in report["spent_on"]} <= {q.name for q in book.queries}
    before = Fraction(0) if mine else Fraction(report["spent"])
    left, queries = terms.total - before, []
    for query in book.queries:
        assert isinstance(query, SeriesQuery)
        own = query.mechanism.terms()
        amount = own.total * math.ceil(Fraction(terms.width or 1, own.width or 1))
        state = "charged" if query.name in charged else "fits"
        if amount > left and state == "fits":
            state = f"does not fit: it may spend {show(amount)} and {show(left)} is left"
        left -= amount if state in ("charged", "fits") else 0
        analyst = pipeline.analysts.get(query.name, "")
        queries.append(PlannedQuery(query=query, analyst=analyst, amount=amount, state=state))
    return queries, before, left, lambda each: (max(0, math.floor(left / each)), terms.measure)


def _runs_out(
    queries: Sequence[PlannedQuery],
    further: Mapping[Fraction, Room],
    pace: timedelta | None,
    now: datetime,
) -> str:
    refused = [one.query.name for one in queries if not one.counts]
    if refused:
        return f"now: {', '.join(refused)} would be refused"
    if pace is None or not further:
        return "never by these queries: each is charged once, for as long as it runs"
    epsilon, (fit, _) = next(iter(further.items()))
    return (
        f"{(now + (fit + 1) * pace):%Y-%m-%d}: with one more query of epsilon = {as_text(epsilon)} "
        f"after each such time, number {fit + 1} does not fit"
    )


def _length(text: str, name: str) -> timedelta:
    """A length of time; also in months (of 30 days) and years (of 365)."""
    match = re.fullmatch(r"\s*(\d+)\s*(month|year)s?\s*", text.lower())
    if match:
        return timedelta(days=int(match[1]) * _CALENDAR[match[2]])
    return timedelta(microseconds=duration(text, name))


def _moment(micros: int) -> datetime:
    return _EPOCH + timedelta(microseconds=int(micros))


def _report(ledger: Ledger, dataset: str) -> dict[str, Any]:
    return next(book for book in ledger.report() if book["dataset"] == dataset)


def print_plan(console: Console, plan: LedgerPlan) -> None:
    """A table, a drawing and the answers, for each book."""
    for book in plan.books:
        console.print(f"{book.dataset}: {promise_in_words(book.terms)}", style="bold")
        if book.note:
            console.print(book.note, soft_wrap=True)
        headings = ("query", "analyst", "asks for", "of the book", "counts from", "")
        table = new_table(*headings, right=("of the book",))
        if book.before:
            takes = amount_in_words(book.terms, book.before)
            share = f"{float(book.before / book.terms.total):.1%}"
            table.add_row("(spent before)", "-", takes, share, "-", "charged")
        for one in book.queries:
            table.add_row(
                one.query.name,
                one.analyst or "-",
                one.asks(book.terms),
                f"{float(one.amount / book.terms.total):.1%}",
                f"{one.begins(plan.now):%Y-%m-%d}",
                one.state.partition(":")[0] + one.over(plan.now),
            )
        print_whole(console, table)
        for one in book.queries:
            if not one.counts:
                console.print(f"{one.query.name} {one.state}", soft_wrap=True)
        _draw(console, plan, book)
        console.print(f"left: {amount_in_words(book.terms, book.left)}")
        for epsilon, (fit, what) in book.further.items():
            first = f"; then its {what} is used up"
            console.print(f"further queries of epsilon = {as_text(epsilon)} that fit: {fit}{first}")
        console.print(f"the book runs out: {book.runs_out}", soft_wrap=True)
        for one in book.queries:
            for change in one.changes:
                console.print(_change_in_words(one, change), soft_wrap=True)
        console.print()


def _draw(console: Console, plan: LedgerPlan, book: PlannedBook) -> None:
    """One bar for each point in time at which something changes, in as many shades as queries."""
    names = [
        *(["before"] if book.before else []),
        *(q.query.name for q in book.queries if q.counts),
    ]
    shades = {name: _SHADES[n % len(_SHADES)] for n, name in enumerate(names)}
    last: dict[str, Fraction] | None = None
    for moment in plan.moments:
        spend = book.spend_at(moment)
        if spend == last and moment != plan.moments[-1]:
            continue
        last = spend
        bar = "".join(
            shades[name] * max(1, round(_WIDTH * float(amount / book.terms.total)))
            for name, amount in spend.items()
        )
        share = float(sum(spend.values(), Fraction(0)) / book.terms.total)
        console.print(f"{moment:%Y-%m-%d} {bar[:_WIDTH].ljust(_WIDTH, '·')} {share:.0%}")
    console.print("           " + "  ".join(f"{shade} {name}" for name, shade in shades.items()))


def _change_in_words(one: PlannedQuery, change: Mapping[str, Any]) -> str:
    what = f"{one.query.name} at epsilon = {change['epsilon']:g}: noise times {change['noise']:.2g}"
    if not change["fits"]:
        return f"{what}, and it does not fit"
    return f"{what}, epsilon = {change['left_epsilon']:.3g} left"
