"""Start the queries of a pipeline; nothing is paid for before all of them can begin."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpstream.connectors.write_ahead import PUSHED
from dpstream.engines.clock import Clock
from dpstream.engines.query_run import Engine, EngineOptions
from dpstream.errors import InvalidParameter, LedgerError, SecretError
from dpstream.privacy.ledger.charges import Terms
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.state.run_directory import read_about
from dpstream.session import Runs, refuse_early, run_all
from dpstream.session.pipeline import ENGINES, Pipeline, PipelineBook


def start(
    pipeline: Pipeline,
    ledgers: Mapping[Path, Ledger],
    *,
    clock: Clock,
    sinks: Sequence[Any] = (),
    options: EngineOptions | None = None,
    take_over: bool = False,
) -> Runs:
    """The queries, ready to be iterated over; `sinks` come after those of the file."""
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
            clock=clock,
            options=options,
            engine=opened,
            take_over=take_over,
            check_budget=False,  # the book is opened with the file's promise when all can begin
        )
        for book in pipeline.books
    ]
    return Runs.together(started)


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
    try:
        ledger.open(book.dataset, terms)
    except LedgerError as problem:
        raise LedgerError(f"{book.where}: {problem}") from None
    folders = pipeline.folders
    queries = [(query, folders[query.name]) for query in book.queries]
    refuse_early(ledger, book.dataset, queries, now=now, take_over=take_over)


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
