"""The process that runs a pipeline for the server: it writes releases, and tells how it goes.

It tells on standard output, a JSON object a line; that is for the operator alone. A line on its
standard input asks it to stop, with a snapshot. When that input ends it leaves at once: the server
that started it is gone, and a run survives a kill at any moment.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from dpstream.engines.clock import SystemClock
from dpstream.engines.embedded.process_memory import keep_freed_memory
from dpstream.engines.query_run import EngineOptions
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.state.durable_files import make_directory
from dpstream.serve.public_facts import describe_queries
from dpstream.serve.release_store import ReleaseStore, hold_folder
from dpstream.session import Run, Runs
from dpstream.session.pipeline import Pipeline, load_pipeline
from dpstream.session.start_pipeline import open_book, refuse_lost_secret, start, with_engine

_EVERY = 1.0  # seconds between two reports
_LOST = 70  # exit code when the process that started it is gone
PATIENCE = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Seconds before what has failed is tried again."""
NOT_AGAIN = ("BudgetExceeded",)
"""Errors that nothing changes about until the operator acts."""


def store_folder(pipeline: Pipeline) -> Path:
    """Where a pipeline's releases are kept for the server."""
    return pipeline.state / "served"


def publish(
    pipeline: Pipeline,
    *,
    tell: Any = lambda runs: None,
    clock: Any = None,
    options: EngineOptions | None = None,
    stopped: threading.Event | None = None,
) -> None:
    """Run a pipeline to its end, every release into its store."""
    terms = [book.terms() for book in pipeline.books]
    refuse_lost_secret(pipeline.secret, list(pipeline.folders.values()))
    make_directory(pipeline.state, mode=0o700)
    make_directory(store_folder(pipeline), mode=0o700)
    with hold_folder(store_folder(pipeline)), ExitStack() as stack:
        store = _open_store(pipeline)
        stack.callback(store.shut)
        paths = {book.ledger for book in pipeline.books}
        ledgers = {path: stack.enter_context(closing(Ledger(path))) for path in paths}
        runs = start(
            pipeline, ledgers, clock=clock or SystemClock(), sinks=[store], options=options
        )
        for book, wanted in zip(pipeline.books, terms, strict=True):
            open_book(pipeline, book, wanted, ledgers[book.ledger])
        runs.retry_delay = _retry_delay
        tell(runs)
        with runs:
            for name, release in runs:
                about = json.loads(release.schema.metadata[b"dpstream"])
                store.announce(name, about["window"], about["release_index"])
                if stopped is not None and stopped.is_set():
                    runs.stop()


def _open_store(pipeline: Pipeline) -> ReleaseStore:
    """The store of a pipeline; what a kill has left unannounced is announced."""
    queries = describe_queries(pipeline)
    store = ReleaseStore(
        store_folder(pipeline),
        keys={name: one.keys for name, one in queries.items()},
        partial=[name for name, one in queries.items() if one.partial],
    )
    store.announce_rest([*queries])
    return store


def report(runs: Runs) -> dict[str, Any]:
    """How far the queries are, and what became of their rows; not private."""
    starved = runs.warn_starved()
    queries = {}
    for name, run in [*runs.runs.items()]:
        queries[name] = _of_run(run) | {"starved": name in starved}
        problem = runs.failures.get(name)
        if problem is not None:
            queries[name]["failed"] = {"error": type(problem).__name__, "message": str(problem)}
    return {"queries": queries}


def _of_run(run: Run) -> dict[str, Any]:
    return {
        **run.operator_facts(),
        "triggers_done": run.steps_done,
        "triggers": run.query.schedule.steps,
        "next_trigger": run.next_trigger,
    }


def _retry_delay(problem: Exception, tries: int) -> float | None:
    """Seconds until a query that has failed is tried again; None: what is wrong stays so."""
    if type(problem).__name__ in NOT_AGAIN:
        return None
    return PATIENCE[min(tries, len(PATIENCE) - 1)]


def _tell(content: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


def _leave_with_parent(stop: threading.Event, runs: list[Runs]) -> None:
    while os.read(0, 4096):
        stop.set()
        for each in runs:
            each.stop()
    os._exit(_LOST)


def _report_for_ever(runs: Runs, over: threading.Event) -> None:
    while True:
        _tell(report(runs))
        if over.wait(_EVERY):
            _tell(report(runs))
            return


def main(args: Sequence[str]) -> int:
    """Run the pipeline of a file, on an engine; the exit code is that of `dpstream run`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server
    over, stop = threading.Event(), threading.Event()
    known: list[Runs] = []
    threads: list[threading.Thread] = []
    threading.Thread(target=_leave_with_parent, args=(stop, known), daemon=True).start()
    keep_freed_memory()

    def tell(runs: Runs) -> None:
        known.append(runs)
        thread = threading.Thread(target=_report_for_ever, args=(runs, over), daemon=True)
        thread.start()
        threads.append(thread)

    failed: dict[str, Any] | None = None
    try:
        engine = args[1] if len(args) > 1 else None
        publish(with_engine(load_pipeline(Path(args[0])), engine), tell=tell, stopped=stop)
    except Exception as problem:
        failed = {"error": type(problem).__name__, "message": str(problem)}
    finally:
        over.set()
        for thread in threads:
            thread.join()
    if failed is not None:
        _tell(failed)  # the last word: a report after it would say that all is well
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
