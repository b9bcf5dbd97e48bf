"""What a changed pipeline file means for the runs in its state directory.

Every query of the file is unchanged, added or changed, and a run that no query of the file stands
for is to be removed. A run that is to end goes on until the windows of the period that it is in
are published, where units have periods, and its book has room for a successor from there on.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dpstream.connectors.storage import safe_name
from dpstream.engines.embedded.series_run import KIND as SERIES
from dpstream.engines.query_run import AnyQuery, Beginning
from dpstream.engines.run_storage import KIND
from dpstream.errors import BudgetExceeded, DpstreamError, InvalidParameter, StateError
from dpstream.mechanisms.runner import as_begun, mechanism_of
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.ledger.store import LedgerPlace
from dpstream.privacy.query_spend import QuerySpend
from dpstream.privacy.state import MemoryWindowKeys
from dpstream.privacy.state.durable_files import make_directory
from dpstream.privacy.state.identity import canonical, readable
from dpstream.privacy.state.inspection import saved_step
from dpstream.privacy.state.mirrors import sync_mirror
from dpstream.privacy.state.run_directory import About, current_ledger_place, read_about
from dpstream.query.book_periods import book_share, book_ticks
from dpstream.query.noise_plan import plan_query
from dpstream.query.query import Query
from dpstream.query.settings import settings_as_begun
from dpstream.query.shared_noise import noise_as_begun
from dpstream.session.budget import free_place, refuse_early
from dpstream.session.changes import Changes, Ending, edit, is_known
from dpstream.session.pipeline import Pipeline, load_pipeline
from dpstream.session.start import would_fit


@dataclass(frozen=True, kw_only=True)
class Change:
    """What becomes of one query."""

    kind: Literal["unchanged", "added", "changed", "removed"]
    name: str
    """In the file; of one that is not there any more, what it was called."""
    called: str
    """What it is called from now on, in its state and in the sinks."""
    query: AnyQuery | None = None
    """As it will be; None: it is removed."""
    differences: tuple[str, ...] = ()
    ending: Ending | None = None
    ended_name: str = ""
    """What the run that is to end is called."""
    remark: str = ""
    """Why it ends at once, though that was not asked for."""
    beginning: Beginning = field(default_factory=Beginning)


@dataclass(frozen=True, kw_only=True)
class ChangePlan:
    """All changes of a file; `accept` makes them what the next start, or reload, carries out."""

    file: Pipeline
    changes: tuple[Change, ...]
    known: Changes
    """What was settled when the plan was made."""

    @property
    def empty(self) -> bool:
        """Is there nothing to accept?"""
        return (
            not self.known.unsettled
            and self._settled(self.known).settled == self.known.settled
            and all(change.kind == "unchanged" for change in self.changes)
        )

    def accept(self) -> None:
        """Make it durable; refused if something else was settled meanwhile."""

        def settle(known: Changes) -> Changes:
            if (known.settled, known.unsettled) != (self.known.settled, self.known.unsettled):
                raise StateError(
                    f"{self.file.state} has changed since this was worked out; apply it again"
                )
            with ExitStack() as stack:
                held = _Holder(plan=self, known=known, stack=stack).hold()
            return replace(self._settled(known), held=held)

        if self.file.state.exists():
            sync_mirror(self.file.state)  # nobody else goes on with it before the books are told
            edit(self.file.state, settle)

    def _settled(self, known: Changes) -> Changes:
        called = {change.called for change in self.changes}
        return replace(
            known,
            names={c.name: c.called for c in self.changes if c.query and c.called != c.name},
            endings={c.ended_name: c.ending for c in self.changes if c.ending is not None},
            begins={name: at for name, at in known.begins.items() if name in called},
            unsettled={},
        )


@dataclass(kw_only=True)
class _Holder:
    """What an accepted plan means for the books: which runs end when, whose places are held."""

    plan: ChangePlan
    known: Changes
    stack: ExitStack
    _ledgers: dict[str, Ledger] = field(default_factory=dict)

    def hold(self) -> dict[str, str]:
        """Write it into the ledgers; the runs that hold places, by the names of successors.

        What it is about to write is in the state directory before: after a kill the same plan,
        accepted again, finds what it has written, and another one takes it back.
        """
        waiting = [c for c in self.plan.changes if c.ending is not None and c.ending.at is not None]
        kept = {c.called for c in self.plan.changes if c.query is not None}
        kept -= {
            c.called for c in self.plan.changes if c.ending is not None and c.ending.at is None
        }
        new = {c.called: self._run(c) for c in waiting if isinstance(c.query, Query)}
        for name, run in self.known.held.items():
            if name not in kept or new.get(name, run) != run:
                self._give_back(name, run)
        taken_back = endings_taken_back(self.known, self.plan.changes)
        for ending in taken_back:
            self._limit(ending, None)
        endings = [c.ending for c in waiting if c.ending is not None]
        held = {n: r for n, r in self.known.held.items() if n in kept} | new
        unsettled = {c.ended_name: c.ending for c in waiting if c.ending is not None}
        state = self.plan.file.state
        replace(self.known, held=held, unsettled={**self.known.unsettled, **unsettled}).write(state)
        try:
            for ending in endings:
                self._limit(ending, ending.at)
            for change in waiting:  # one may need what another leaves
                if change.called in new:
                    self._charge(change, new[change.called])
        except DpstreamError:
            settled = {each.successor for each in self.known.endings.values()}
            settled |= self.known.begins.keys()
            known = self.known.held
            stay = {n: r for n, r in held.items() if n in settled and known.get(n) == r}
            for name in held.keys() - stay.keys():
                self._give_back(name, held[name])
            ends = {each.run: each.at for each in self.known.endings.values()}
            for ending in [*taken_back, *endings]:
                self._limit(ending, ends.get(ending.run))
            replace(self.known, held=stay, unsettled={}).write(state)
            raise
        return held

    def _book(self, name: str) -> tuple[Ledger, str]:
        """The ledger and the dataset of a query of the file."""
        books = self.plan.file.books
        book = next(b for b in books if any(query.name == name for query in b.queries))
        return self._open(book.ledger), book.dataset

    def _open(self, place: LedgerPlace) -> Ledger:
        if str(place) not in self._ledgers:
            self._ledgers[str(place)] = self.stack.enter_context(closing(Ledger(place)))
        return self._ledgers[str(place)]

    def _run(self, change: Change) -> str:
        """The run that holds the place of a change: always the same, unless it was given back."""
        ledger, dataset = self._book(change.name)
        facts = canonical((_later(change).facts(), dataset, change.called))
        assert change.ending is not None
        words = (f"{change.ending.run} {facts} {number}".encode() for number in count())
        runs = (hashlib.sha256(each).digest()[:16].hex() for each in words)
        return next(run for run in runs if ledger.known(run).ended is None)

    def _give_back(self, name: str, run: str) -> None:
        for book in self.plan.file.books:
            because = f"the change to {name!r} was changed or taken back (dpstream apply)"
            free_place(self._open(book.ledger), book.dataset, run, because=because)

    def _limit(self, ending: Ending, at: int | None) -> None:
        """A run is to end with a period, or not any more."""
        for place in {book.ledger for book in self.plan.file.books}:
            ledger = self._open(place)
            terms = ledger.terms(ending.dataset)
            ticks = None if terms is None else book_ticks(terms)
            if ticks is None or not _names_periods(ledger, ending):
                continue
            until = None if at is None else ticks.last_before(at - 1)
            said = {"because": ending.because, "who": ending.who}
            ledger.limit(ending.dataset, ending.run, until, **said)

    def _charge(self, change: Change, run: str) -> None:
        """Hold the place of a query that begins later."""
        ledger, dataset = self._book(change.name)
        if ledger.terms(dataset) is None:
            return  # its book is opened when it begins
        analyst = self.plan.file.analysts.get(change.name, "")
        hold_place(ledger, dataset, _later(change), run, analyst=analyst)


def hold_place(ledger: Ledger, dataset: str, query: Query, run: str, *, analyst: str = "") -> None:
    """Charge a query that begins later, in the name of a run that never begins."""
    called = f"holds the place of {query.name}"
    ledger.register(dataset, run, called, analyst=analyst, kept=True)
    spend = QuerySpend(
        run=bytes.fromhex(run),
        query=query.name,
        ledger=ledger,
        dataset=dataset,
        keys=MemoryWindowKeys(),
    )
    plan_query(query).for_book(spend.book).pay(spend, "held")


def endings_taken_back(known: Changes, changes: Sequence[Change]) -> list[Ending]:
    """Runs that were to end with a period, and now go on, or end at once."""
    still = {c.ending.run for c in changes if c.ending is not None and c.ending.at is not None}
    settled = {each.run: each for each in {**known.unsettled, **known.endings}.values()}
    return [each for each in settled.values() if each.at is not None and each.run not in still]


def _names_periods(ledger: Ledger, ending: Ending) -> bool:
    return any(
        line["run"] == ending.run and "periods" in line and not line["ended"]
        for book in ledger.report()
        if book["dataset"] == ending.dataset
        for line in book["spent_on"]
    )


def _later(change: Change) -> Query:
    """A successor from where it begins."""
    query = _pair(change, Path())[0]
    assert isinstance(query, Query)
    first = change.beginning.not_before
    return query if first is None else query.not_before(first)


def plan_changes(path: Path, *, at_once: bool, now: int, who: str) -> ChangePlan:
    """Compare a file with the runs of its state directory; what does not fit is refused.

    `at_once`: runs end now, and what takes their place is charged in full, from now on.
    """
    known = Changes.read(load_pipeline(path, changes=Changes()).state)
    file = load_pipeline(path, changes=Changes(asked=known.asked))
    with ExitStack() as stack:
        planner = _Planner(file=file, known=known, at_once=at_once, now=now, who=who, stack=stack)
        changes = [planner.change(query) for query in file.queries]
        changes += planner.removed()
        changes = planner.with_beginnings(changes)
    return ChangePlan(file=file, changes=tuple(changes), known=known)


def ask(path: Path, *, name: str, sql: str, analyst: str) -> None:
    """Add a query that an analyst asks for, if their share of its book has room for it.

    It runs from the next start, or reload, on. No row is looked at, before the charge either: what
    an analyst is told of that would be exact.
    """
    known = load_pipeline(path).changes
    pipeline = load_pipeline(path, changes=_with_asked(known, name, sql, analyst))
    query = next(query for query in pipeline.queries if query.name == name)
    if not isinstance(query, Query):
        raise InvalidParameter("an analyst asks for GROUP BY queries over users; this is a series")
    book = next(book for book in pipeline.books if query in book.queries)
    if book.ledger.exists():
        with closing(Ledger(book.ledger)) as ledger:
            lines = [line for line in ledger.report() if line["dataset"] == book.dataset]
    else:
        lines = []
    if not any(analyst in line.get("principals", {}) for line in lines):
        raise BudgetExceeded(
            f"the book {book.dataset!r} has no share for {analyst!r}; the operator gives one with "
            "dpstream ledger allow"
        )
    if any(line["query"] == name for each in lines for line in each["spent_on"]):
        raise InvalidParameter(f"a query {name!r} was charged before; choose another name")
    problem, _ = would_fit(
        [(each, pipeline.folders[each.name]) for each in book.queries],
        ledger=book.ledger,
        dataset=book.dataset,
        terms=book.terms(),
        analysts=pipeline.analysts,
    )
    if problem:
        raise BudgetExceeded(problem)
    make_directory(pipeline.state, mode=0o700)
    edit(pipeline.state, lambda now: _with_asked(now, name, sql, analyst))


def _with_asked(known: Changes, name: str, sql: str, analyst: str) -> Changes:
    if name in {*known.asked, *known.texts, *known.names, *known.names.values()}:
        raise InvalidParameter(f"there is, or was, a query {name!r} already; choose another name")
    table = {"name": name, "sql": sql, "analyst": analyst, "anyway": True}
    return replace(known, asked={**known.asked, name: table})


def withdraw(path: Path, name: str, *, who: str) -> None:
    """Take an analyst's query away: its run ends for good at the next start, or reload."""
    pipeline = load_pipeline(path)
    about = read_about(pipeline.state / safe_name(name))

    def without(known: Changes) -> Changes:
        left = {each: table for each, table in known.asked.items() if each != name}
        ending: dict[str, Ending] = {}
        if about is not None:
            because = f"{name!r} was withdrawn by {who}"
            facts = {"run": about["run"].hex(), "dataset": about["dataset"]}
            ending = {name: Ending(**facts, because=because, who=who)}
        return replace(known, asked=left, endings={**known.endings, **ending})

    edit(pipeline.state, without)


def drop_unbegun(state: Path) -> list[str]:
    """Take analysts' queries away that have not begun: a start with them was refused."""
    asked = Changes.read(state).asked
    gone = [name for name in asked if read_about(state / safe_name(name)) is None]
    left = {name: table for name, table in asked.items() if name not in gone}
    if gone:
        edit(state, lambda known: replace(known, asked=left))
    return gone


def differences(query: AnyQuery, about: About | None) -> tuple[str, ...]:
    """How a query differs from the one that a state directory was begun with; none: it goes on."""
    if about is None:
        return ()
    kept, notes = about["facts"], about["notes"]
    try:
        if isinstance(query, Query) and about["kind"] == KIND:
            mine = plan_query(_begun(query, about), kept["counters"]).query.facts()
        elif not isinstance(query, Query) and about["kind"] == SERIES:
            mechanism = as_begun(query.mechanism, mechanism_of(about))
            mine = replace(query, mechanism=mechanism).starting(notes["now"]).facts()
        else:
            return (f"it was a {about['kind']}",)
    except InvalidParameter as problem:
        return (str(problem),)
    names = query.names_of_keys()
    return tuple(
        f"{names.get(key, key)} was {readable(kept.get(key))} and is now {readable(mine.get(key))}"
        for key in mine | {key: "" for key in kept if key not in ("noise", "counters")}
        if mine.get(key) != kept.get(key)
    )


def _begun(query: Query, about: About) -> Query:
    """The query from where its run has begun."""
    query = query.starting(about["notes"]["now"])
    first = Beginning(**about["notes"].get("beginning", {})).not_before
    query = query if first is None else query.not_before(first)
    return settings_as_begun(noise_as_begun(query, about["facts"]), about["facts"])


@dataclass(kw_only=True)
class _Planner:
    """One comparison of a file with its state directory."""

    file: Pipeline
    known: Changes
    at_once: bool
    now: int
    who: str
    stack: ExitStack
    runs: dict[str, About] = field(init=False)
    """Runs that are not ended, by the names of their folders."""
    ended: set[str] = field(init=False)
    """Folders of those that are; some may be gone."""
    charged: set[str] = field(init=False)
    """Folders of all runs in the books: the state directory may be an older one than they are."""
    _ledgers: dict[str, Ledger] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.runs, self.ended, self.charged = {}, set(), set()
        for path in sorted(self.file.state.glob("*/run.dps")):
            about = read_about(path.parent)
            if about is None:
                continue  # it was ended, and is being removed (dpstream state gc)
            ledger = self._ledger(self._place(path.parent, about))
            if ledger.known(about["run"].hex()).ended is not None:
                self.ended.add(path.parent.name)
            else:
                self.runs[path.parent.name] = about
        for book in self.file.books:
            if book.ledger.exists():
                ledger = self._ledger(book.ledger)
                books = [each for each in ledger.report() if each["dataset"] == book.dataset]
                lines = [line for each in books for line in each["spent_on"]]
                self.ended |= self._removed(ledger, lines)
                held = self.known.held.values()
                self.charged |= {
                    safe_name(line["query"]) for line in lines if line["run"] not in held
                }

    def _removed(self, ledger: Ledger, lines: list[dict[str, Any]]) -> set[str]:
        """What runs were called that are ended, and whose states are gone (dpstream state gc).

        Sinks have their releases under that name still.
        """
        known = [line for line in lines if line["query"] in self.known.texts]
        ended = {line["query"] for line in known if ledger.known(line["run"]).ended is not None}
        return {safe_name(name) for name in ended} - self.runs.keys()

    def _place(self, folder: Path, about: About) -> LedgerPlace:
        """Where the ledger of a run is now."""
        return current_ledger_place(folder, about, [book.ledger for book in self.file.books])

    def _ledger(self, place: LedgerPlace) -> Ledger:
        if str(place) not in self._ledgers:
            if not place.exists():
                raise StateError(f"there is no ledger at {place}; restore it")
            self._ledgers[str(place)] = self.stack.enter_context(closing(Ledger(place)))
        return self._ledgers[str(place)]

    def change(self, query: AnyQuery) -> Change:
        """What becomes of a query of the file."""
        base = query.name
        called = self.known.names.get(base, base)
        before = next((n for n, e in self.known.endings.items() if e.successor == called), called)
        about = self.runs.pop(safe_name(before), None)
        if about is None:
            called = self._new_name(base) if safe_name(called) in self.ended else called
            return Change(kind="added", name=base, called=called, query=replace(query, name=called))
        found = differences(replace(query, name=before), about)
        book = next(book for book in self.file.books if query in book.queries)
        if book.dataset != about["dataset"]:
            was, now = readable(canonical(about["dataset"])), readable(canonical(book.dataset))
            found = (*found, f"the dataset was {was} and is now {now}")
        if not found:
            query = replace(query, name=before)
            return Change(kind="unchanged", name=base, called=before, query=query)
        called = called if called != before else self._new_name(base)
        ending, remark = self._ending(before, about, called)
        return Change(
            kind="changed",
            name=base,
            called=called,
            query=replace(query, name=called),
            differences=found,
            ending=ending,
            ended_name=before,
            remark=remark,
        )

    def removed(self) -> Iterator[Change]:
        """Runs that no query of the file stands for."""
        names = {safe_name(name): name for name in self.known.texts}
        for folder, about in self.runs.items():
            name = names.get(folder, folder)
            ending, remark = self._ending(name, about, None)
            yield Change(
                kind="removed",
                name=name,
                called=name,
                ending=ending,
                ended_name=name,
                remark=remark,
            )

    def _new_name(self, base: str) -> str:
        """The next name that no run, here or in the book, and no query of the file has."""
        taken = {query.name for query in self.file.queries} | set(self.known.names.values())
        names = (f"{base}_{number}" for number in count(2))
        return next(
            n
            for n in names
            if n not in taken
            and safe_name(n) not in self.ended | self.charged
            and not (self.file.state / safe_name(n)).exists()
        )

    def _ending(self, name: str, about: About, successor: str | None) -> tuple[Ending, str]:
        """How far a run goes on; if it ends at once though it was not asked to, why."""
        run = about["run"].hex()
        known = self.known.endings.get(name)
        if known is not None and known.run == run and not self.at_once:
            return replace(known, successor=successor), ""
        because = f"{name!r} was {'removed' if successor is None else 'changed'} (dpstream apply)"
        ending = Ending(
            run=run, dataset=about["dataset"], successor=successor, because=because, who=self.who
        )
        if self.at_once:
            return ending, ""
        try:
            return self._at_end_of_period(name, about, ending), ""
        except DpstreamError as problem:
            return ending, str(problem)

    def _at_end_of_period(self, name: str, about: About, ending: Ending) -> Ending:
        """The same, after the windows of the period that it is in."""
        if name not in self.known.texts:
            raise StateError("how it was asked is not kept in its state directory")
        going_on = replace(ending, windows=1)
        as_it_was = Changes(
            texts=self.known.texts, asked=self.known.asked, endings={name: going_on}
        )
        pipeline = load_pipeline(self.file.path, changes=as_it_was)
        query = next(query for query in pipeline.queries if query.name == name)
        if differences(query, about):
            raise StateError("what it reads is declared otherwise in the file now")
        folder = self.file.state / safe_name(name)
        ledger = self._ledger(self._place(folder, about))
        terms = ledger.terms(about["dataset"])
        ticks = None if terms is None else book_ticks(terms)
        if terms is None or ticks is None or not isinstance(query, Query):
            raise StateError("its units have no periods")
        if not pipeline.feeds[name].live:
            raise StateError("it does not go by the clock")
        begun = plan_query(_begun(query, about), about["facts"]["counters"]).query
        schedule, last_of = begun.schedule, book_share(begun, terms).periods.last_of
        if schedule.steps is not None and saved_step(folder) >= schedule.steps:
            raise StateError("it has published all it had to")
        reached = ledger.known(ending.run).begun
        window = int(schedule.window_of(np.array([self.now]))[0])
        periods = [] if reached is None else [reached]
        periods += [last_of(window)] if window >= 0 else []
        if not periods:
            raise StateError("it has not begun")
        last = max(periods)
        most = schedule.windows or _beyond(last, last_of)
        windows = bisect_right(range(most), last, key=last_of)
        if not windows:
            raise StateError("none of its windows ends within a period")
        steps = schedule.last_step(windows - 1) + 1
        return replace(ending, windows=windows, steps=steps, at=ticks.at(last + 1))

    def with_beginnings(self, changes: list[Change]) -> list[Change]:
        """The changes with where new queries begin; refused if the book has no room for them."""
        found: dict[str, Beginning] = {}
        for book in self.file.books:
            copy = Ledger()
            if book.ledger.exists():
                copy = self._ledger(book.ledger).rehearsal()
            _free_places(copy, book.dataset, self.known, changes)
            terms = copy.terms(book.dataset)
            ticks = None if terms is None else book_ticks(terms)
            ending = [c.ending for c in changes if c.ending and c.ending.dataset == book.dataset]
            for each in ending:
                if not is_known(copy, each.dataset, each.run):
                    continue
                if each.at is not None and ticks is not None:
                    copy.note_begun(each.dataset, each.run, ticks.last_before(each.at - 1))
                copy.end(each.dataset, each.run, because="it is to end", who=self.who)
            mine = {query.name for query in book.queries}
            pairs = [
                _pair(change, self.file.state)
                for change in changes
                if change.query is not None and change.name in mine
            ]
            by = {c.called: self.file.analysts.get(c.name, "") for c in changes if c.query}
            asked: dict[str, Any] = {"now": self.now, "terms": book.terms(), "analysts": by}
            found |= refuse_early(copy, book.dataset, pairs, **asked)
        return [replace(c, beginning=found.get(c.called, c.beginning)) for c in changes]


def _free_places(copy: Ledger, dataset: str, known: Changes, changes: list[Change]) -> None:
    """Let a copy of a book be as if an earlier change had never been accepted."""
    said = {"because": "it is planned anew", "who": ""}
    for run in known.held.values():
        free_place(copy, dataset, run)
    for ending in endings_taken_back(known, changes):
        if ending.dataset == dataset and _names_periods(copy, ending):
            copy.limit(dataset, ending.run, None, **said)


def _pair(change: Change, state: Path) -> tuple[AnyQuery, Path | None]:
    """A query as it will be, and the state directory of one that goes on."""
    query = change.query
    assert query is not None
    if change.kind == "unchanged":
        return query, state / safe_name(change.called)
    if change.ending is not None and change.ending.at is not None:
        query = query.starting(change.ending.at)
    return query, None


def _beyond(last: int, last_of: Any) -> int:
    """A number of windows by which this period is over."""
    number = 1
    while last_of(number) <= last:
        number *= 2
    return number
