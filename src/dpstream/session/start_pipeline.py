"""Start the queries of a pipeline; nothing is paid for before all of them can begin."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dpstream.connectors.storage import safe_name
from dpstream.connectors.write_ahead import PUSHED
from dpstream.engines.clock import Clock, SystemClock
from dpstream.engines.query_run import AnyQuery, Engine, EngineOptions
from dpstream.errors import (
    BudgetExceeded,
    InvalidParameter,
    LedgerError,
    SecretError,
    StateError,
)
from dpstream.privacy.amounts import as_text
from dpstream.privacy.ledger.charges import Terms
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.ledger.refusals import book_in_words, promise_in_words
from dpstream.privacy.ledger.store import LedgerPlace
from dpstream.privacy.state.run_directory import read_about
from dpstream.session import Runs, refuse_early, run_all
from dpstream.session.change_plan import differences
from dpstream.session.changes import Changes, end_due, keep_texts
from dpstream.session.first_rows import LOOKED_AT, useless
from dpstream.session.pipeline import ENGINES, Pipeline, PipelineBook, load_pipeline
from dpstream.session.start import look, would_fit


def start(
    pipeline: Pipeline,
    ledgers: Mapping[LedgerPlace, Ledger],
    *,
    clock: Clock,
    sinks: Sequence[Any] = (),
    options: EngineOptions | None = None,
    anyway: bool = False,
    take_over: bool = False,
) -> Runs:
    """The queries, ready to be iterated over; `sinks` come after those of the file.

    `anyway`: they begin though none of the first rows can be used.
    """
    for book in pipeline.books:  # what does not fit is refused before a row is read
        ledger, terms = ledgers[book.ledger], book.terms()
        if ledger.terms(book.dataset) is not None:
            _open(book, terms, ledger)  # it is there: another budget is refused in these words
        _refuse_early(pipeline, book, ledger, terms=terms, now=clock.now(), take_over=take_over)
    opened = open_engine(pipeline)
    started = [
        run_all(
            book.queries,
            source=pipeline.feeds,
            sink=[*pipeline.sinks, *sinks] or None,
            state=pipeline.state,
            secret=pipeline.secret,
            ledger=ledgers[book.ledger],
            dataset=book.dataset,
            analysts=pipeline.analysts,
            clock=clock,
            options=options,
            engine=opened,
            anyway=anyway or pipeline.anyway,
            take_over=take_over,
            check_budget=False,  # the book is opened with the file's promise when all can begin
            more_options=_options_of_changes(pipeline),
        )
        for book in pipeline.books
    ]
    keep_texts(
        pipeline.state,
        {
            query.name: dict(pipeline.tables[query.name])
            for query in pipeline.queries
            if query.name in pipeline.tables
            and not differences(query, read_about(pipeline.folders[query.name]))
        },
    )
    return Runs.together(started)


def load_current(path: Path) -> Pipeline:
    """The pipeline of a file as it stands; runs that were to end, and are over, are ended first."""
    pipeline = load_pipeline(path)
    while end_due(pipeline.state, [book.ledger for book in pipeline.books]):
        pipeline = load_pipeline(path)
    return pipeline


def is_to_change(pipeline: Pipeline, runs: Runs) -> bool:
    """Has a run that is to end published all it may? Then the pipeline is to be loaded again.

    So it is if one was stopped at the end of its last period, because nobody has had the change
    taken up before.
    """
    if runs.failures:
        settled = Changes.read(pipeline.state).endings.keys() - pipeline.changes.endings.keys()
        if not settled.isdisjoint(runs.failures):
            return True
    return any(
        (steps := runs.runs[name].steps) is not None and runs.runs[name].steps_done >= steps
        for name in pipeline.changes.endings
        if name in runs.runs
    )


def check_reload(path: Path, *, who: str = "", anyway: bool = False) -> None:
    """Refuse a file that could not be started now, before what runs is stopped for it.

    Rows of new queries are looked at as at a start, unless `anyway`. `who`: who asks for queries
    that name nobody.
    """
    pipeline = load_pipeline(path).asked_by(who)
    for query in pipeline.queries:
        about = read_about(pipeline.folders[query.name])
        for words in differences(query, about)[:1]:
            raise StateError(
                f"{path}: the query {query.name!r} has changed: {words}; see what that costs, and "
                f"accept it: dpstream apply {path}"
            )
    for book in pipeline.books:
        pairs = [(query, pipeline.folders[query.name]) for query in book.queries]
        problem, charged = would_fit(
            pairs,
            ledger=book.ledger,
            dataset=book.dataset,
            terms=book.terms(),
            analysts=pipeline.analysts,
            held=pipeline.changes.held,
        )
        if problem:
            raise BudgetExceeded(problem)
        for query in book.queries:
            if query.name not in charged and not anyway:
                _check_new(pipeline, query)


def _check_new(pipeline: Pipeline, query: AnyQuery) -> None:
    """Look at some rows of a query that is not charged yet, and refuse what would be for nothing.

    Another engine reads its rows itself: there the start alone looks at them.
    """
    feed = pipeline.feeds[query.name]
    if pipeline.engine["name"] != "embedded" or query.name in pipeline.anyway or feed.source == "-":
        return
    samples = look(query, feed, state=pipeline.state, rows=LOOKED_AT, clock=SystemClock())
    for sample in samples.values():
        if sample.useless:
            raise useless(query.name, sample)


def keep_pipeline(pipeline: Pipeline, place: Path) -> None:
    """Write down a pipeline as it runs, to go on with it whatever its file says by then."""
    facts = {"text": pipeline.written, "changes": asdict(pipeline.changes)}
    place.write_text(json.dumps(facts), encoding="utf-8")


def load_kept(path: Path, place: Path) -> Pipeline:
    """The pipeline of a file as `keep_pipeline` has written it down."""
    told = json.loads(place.read_text(encoding="utf-8"))
    changes = Changes.from_json(told["changes"])
    return without_ended(load_pipeline(path, text=told["text"], changes=changes))


def without_ended(pipeline: Pipeline) -> Pipeline:
    """The pipeline without queries that were ended for good meanwhile, or are about to be."""
    endings, state = pipeline.changes.endings, pipeline.state
    gone = [name for name, each in endings.items() if each.is_over(state / safe_name(name))]
    with pipeline.open_ledgers() as ledgers:
        for book in pipeline.books:
            for query in book.queries:
                about = read_about(pipeline.folders[query.name])
                run = "" if about is None else about["run"].hex()
                if ledgers[book.ledger].known(run).ended is not None:
                    gone.append(query.name)
    return pipeline.without(gone)


def _options_of_changes(pipeline: Pipeline) -> dict[str, dict[str, Any]]:
    """Until when runs go on that are to end, and from when on their successors publish."""
    changes = pipeline.changes
    ends = {name: {"windows": one.windows} for name, one in changes.endings.items()}
    begins = {
        name: {"now": at, "instead_of": changes.held.get(name, "")}
        for name, at in changes.begins.items()
    }
    return ends | begins


def open_book(
    pipeline: Pipeline,
    book: PipelineBook,
    terms: Terms,
    ledger: Ledger,
    *,
    now: int,
    take_over: bool = False,
) -> None:
    """Open a book with the file's promise, and refuse queries that do not fit into it together."""
    _open(book, terms, ledger)
    _refuse_early(pipeline, book, ledger, terms=terms, now=now, take_over=take_over)


def _open(book: PipelineBook, terms: Terms, ledger: Ledger) -> None:
    try:
        ledger.open(book.dataset, terms)
    except LedgerError as problem:
        known = ledger.terms(book.dataset)
        if known is not None and known.with_budget_of(terms) == terms:
            raise LedgerError(_other_budget(book, known, ledger)) from None
        raise LedgerError(f"{book.where}: {problem}") from None


def _refuse_early(
    pipeline: Pipeline,
    book: PipelineBook,
    ledger: Ledger,
    *,
    terms: Terms,
    now: int,
    take_over: bool,
) -> None:
    refuse_early(
        ledger,
        book.dataset,
        [(query, pipeline.folders[query.name]) for query in book.queries],
        now=now,
        terms=terms,
        take_over=take_over,
        analysts=pipeline.analysts,
        held=pipeline.changes.held,
    )


def _other_budget(book: PipelineBook, known: Terms, ledger: Ledger) -> str:
    """The file and its book have two budgets: say both, and the command that makes them one."""
    asked = [f"epsilon = {as_text(book.epsilon)}"]
    command = ["dpstream", "ledger", "grow", str(ledger.path), "--dataset", book.dataset]
    command += ["--epsilon", as_text(book.epsilon)]
    if book.delta is not None and known.measure != "epsilon":
        asked.append(f"delta = {as_text(book.delta)}")
        command += ["--delta", as_text(book.delta)]
    return (
        f"{book.where} says {', '.join(asked)}; {book_in_words(book.dataset, ledger.path)} has "
        f"{promise_in_words(known)}; write that into the file, or give the book the file's budget: "
        f'{shlex.join(command)} --because "..."'
    )


def refuse_lost_secret(secret: Path, folders: Sequence[Path]) -> None:
    """A run whose secret is gone cannot go on, and a new secret would not help it."""
    begun = [folder for folder in folders if read_about(folder) is not None]
    if begun and not secret.exists():
        raise SecretError(
            f"{begun[0]} was made with the secret {secret}, which is not there; restore it from "
            "your backup; if it is lost this run cannot go on: begin anew with a new state "
            "directory, which makes a new secret and is charged anew"
        )


def open_engine(pipeline: Pipeline) -> Engine | None:
    """The engine; None is this process.

    Under `spark-submit` the session is the one that was submitted, whatever the file says.
    """
    asked = pipeline.engine
    if asked["name"] != "spark":
        return None
    from dpstream.engines.spark import SparkEngine, local_session

    session = local_session(asked.get("master"))
    return SparkEngine(
        session, buckets=asked.get("buckets", 0), state_location=asked.get("state_location")
    )


def with_engine(pipeline: Pipeline, name: str | None) -> Pipeline:
    """The pipeline on the engine that the command line names, if it names one."""
    if name is None or name == pipeline.engine["name"]:
        return pipeline
    if name not in ENGINES:
        raise InvalidParameter(f"--engine must be one of {', '.join(ENGINES)}; got {name!r}")
    if name != "embedded" and pipeline.pushed:
        raise InvalidParameter(
            f"{pipeline.path}: rows that are posted ({PUSHED!r}) are read by the embedded engine; "
            f"{name} reads files; leave --engine out"
        )
    return replace(pipeline, engine={"name": name})


def check_engine(pipeline: Pipeline) -> None:
    """Refuse an engine that cannot start here, before anything is begun."""
    if pipeline.engine["name"] != "spark":
        return
    from dpstream.engines.spark.spark_engine import require_java, require_pyspark

    require_pyspark()
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # else a JVM has started us
        require_java()
