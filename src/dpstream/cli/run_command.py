"""`dpstream run`: the queries of a pipeline file, together, for as long as they last."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Annotated, Any

import typer
from typer import Argument, Option

from dpstream.cli.command_options import (
    Anyway,
    Asker,
    Collector,
    LogFormat,
    LogLevel,
    TakeOver,
    TokenFile,
)
from dpstream.cli.output import INTERRUPTED, logs_lines, note, use_log, wants_json
from dpstream.cli.print_releases import ReleasePrinter, about, as_json, in_words
from dpstream.cli.watch import (
    Stopper,
    charged_runs,
    is_unfinished,
    progress,
    tell_beginnings,
    tell_charges,
    tell_lag,
    tell_operator,
)
from dpstream.engines.embedded.process_memory import keep_freed_memory
from dpstream.errors import DpstreamError, InvalidParameter
from dpstream.privacy.state.durable_files import make_directory
from dpstream.privacy.state.mirrors import mirror_of
from dpstream.query.windows import instant
from dpstream.serve.access import load_token
from dpstream.serve.metrics import metrics_address, run_samples, serve_metrics
from dpstream.serve.otel import check_collector, export
from dpstream.session import Runs
from dpstream.session.pipeline import Pipeline, load_pipeline
from dpstream.session.retention import Upkeep
from dpstream.session.start_pipeline import (
    check_reload,
    is_to_change,
    load_current,
    open_book,
    refuse_lost_secret,
    start,
    with_engine,
    without_ended,
)

_LOOK = 0.2  # seconds between two looks at how far queries are
_KEPT = (
    "what was published, and the exact sums behind it, which leave with noise only",
    "what was charged to the ledger, with digests of what was read",
    "a keyed hash of the unit, marked as full, until its period is over: it lets nothing more in",
    "backups, and rows that the source still has: erase them there, or bad ones come again",
)
"""What an erasure leaves."""


def run(
    path: Annotated[Path, Argument(metavar="PIPELINE", help="A pipeline.toml file.")],
    once: Annotated[
        bool, Option("--once", help="Stop after the next trigger of each query.")
    ] = False,
    erase_unit: Annotated[
        str | None,
        Option(
            "--erase-unit",
            metavar="UNIT",
            help="Do not run: erase one unit (such as a user id) from the state of all queries.",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        Option("--engine", help="embedded (this process) or spark; default: the file's."),
    ] = None,
    who: Asker = "",
    take_over: TakeOver = False,
    metrics: Annotated[
        str | None,
        Option(
            metavar="PORT|HOST:PORT",
            rich_help_panel="Metrics",
            help="Numbers for Prometheus at http://HOST:PORT/metrics (host: this machine alone; "
            "port 0: any), for who has the operator's token.",
        ),
    ] = None,
    token_file: TokenFile = None,
    allow_plain_http: Annotated[
        bool,
        Option(
            "--allow-plain-http",
            rich_help_panel="Metrics",
            help="Let --metrics listen where others can reach it.",
        ),
    ] = False,
    otel: Collector = None,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
    anyway: Anyway = False,
    as_lines: Annotated[bool, Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Run a pipeline's queries; started again, they go on where they stopped."""
    use_log(log_format, log_level)
    place = None if metrics is None else metrics_address(metrics)
    check_collector(otel, plain_http=allow_plain_http)
    if erase_unit is not None:
        _erase_unit(with_engine(load_pipeline(path), engine), erase_unit)
        return
    stopper, again = Stopper(), True
    keep_freed_memory()

    @contextmanager
    def metrics_of(pipeline: Pipeline, runs: Runs) -> Iterator[None]:
        collect = partial(run_samples, pipeline, runs)
        with export(otel, collect, name=pipeline.path.stem), ExitStack() as stack:
            if place is not None:
                if token_file is None and (mirror := mirror_of(pipeline.state)) is not None:
                    raise InvalidParameter(
                        f"{mirror.place} is in a bucket, where no token is kept; name a file for "
                        "it: --token-file FILE"
                    )
                token = load_token(token_file or pipeline.state / "operator.token")
                served = serve_metrics(place, token, collect, plain_http=allow_plain_http)
                address = stack.enter_context(served)
                note(f"metrics: {address}, with the token from {token.source}")
            yield

    before: Pipeline | None = None
    with stopper.reload_on_hangup():
        while again:
            begun = Event()
            how: dict[str, Any] = {"once": once, "anyway": anyway, "begun": begun}
            how["strict"] = before is not None
            try:
                pipeline = with_engine(load_current(path), engine).asked_by(who)
                again = _run(pipeline, stopper, metrics_of, take_over=take_over, **how)
            except (DpstreamError, OSError) as problem:
                if before is None or begun.is_set():
                    raise
                words = f"{path} is not taken up, and what ran goes on: {problem}"
                note(words, level=logging.ERROR)
                pipeline = without_ended(before)
                again = _run(pipeline, stopper, metrics_of, take_over=False, **how)
            before, take_over = pipeline, False  # a take-over is of those that ran before


def _run(
    pipeline: Pipeline,
    stopper: Stopper,
    metrics_of: Callable[[Pipeline, Runs], AbstractContextManager[None]],
    *,
    once: bool,
    anyway: bool,
    take_over: bool,
    strict: bool,
    begun: Event,
) -> bool:
    """Run to the end, a signal or a change; True: the file is to be loaded again.

    `strict`: all queries can begin, or none does. `begun` is set when they can.
    """
    for words in pipeline.remarks:
        note(words)
    terms = [book.terms() for book in pipeline.books]
    refuse_lost_secret(pipeline.secret, list(pipeline.folders.values()))
    existed = pipeline.secret.exists()
    make_directory(pipeline.state, mode=0o700)
    with pipeline.open_ledgers() as ledgers:
        runs = start(pipeline, ledgers, clock=stopper, anyway=anyway, take_over=take_over)
        before = []
        for book, wanted in zip(pipeline.books, terms, strict=True):
            before.append(charged_runs(ledgers[book.ledger], book.dataset))
            now, shared = stopper.now(), ledgers[book.ledger]
            open_book(pipeline, book, wanted, shared, now=now, take_over=take_over)
        tell_beginnings([*runs.runs.values()])
        if not existed:
            note(
                f"created the secret {pipeline.secret}; back it up: without it the pipeline cannot "
                "go on"
            )
        reloading = _reload_on_signal(pipeline, stopper, runs, anyway=anyway)
        with metrics_of(pipeline, runs), reloading as asked:
            if strict:
                _open_all(runs)
            begun.set()
            count = _publish(pipeline, runs, stopper, once=once)
        new = sum(
            tell_charges(book.queries, was, ledgers[book.ledger], book.dataset)
            for book, was in zip(pipeline.books, before, strict=True)
        )
    if not stopper.signals and (asked.is_set() or (not once and is_to_change(pipeline, runs))):
        note(f"{pipeline.path} is taken up anew")
        return True
    if pipeline.alerts:
        note("the file's alerts were not looked at: `dpstream serve` sends them")
    if not count and not stopper.signals:
        note("everything was published before")
    places = [sink for sink in pipeline.sinks if sink != "-" and "://" not in sink]
    if count and places:
        note(f"the releases are in {' and '.join(places)}")
    _finish(pipeline, runs, stopper, new)
    return False


def _open_all(runs: Runs) -> None:
    """Open all queries; one that is refused leaves none of them open."""
    try:
        runs.open()
    except BaseException:
        runs.close()
        raise


@contextmanager
def _reload_on_signal(
    pipeline: Pipeline, stopper: Stopper, runs: Runs, *, anyway: bool
) -> Iterator[Event]:
    """Stop the runs when SIGHUP comes and the file can be started; the event says that it was so.

    A file that cannot be started leaves them as they are.
    """
    asked, over, path = Event(), Event(), pipeline.path

    def watch() -> None:
        while stopper.reload.wait():
            stopper.reload.clear()
            if over.is_set() or stopper.signals:
                return
            try:
                check_reload(path, who=pipeline.who, anyway=anyway)
            except (DpstreamError, OSError) as problem:
                words = f"{path} is not taken up, and what ran goes on: {problem}"
                note(words, level=logging.ERROR)
            else:
                asked.set()
                runs.stop()
                return

    watcher = Thread(target=watch, name="dpstream-reload", daemon=True)
    watcher.start()
    try:
        yield asked
    finally:
        over.set()
        stopper.reload.set()
        watcher.join()
        stopper.reload.clear()


def _erase_unit(pipeline: Pipeline, unit: str) -> None:
    """Erase a unit from every query that has state, and say in how many groups it was."""
    refuse_lost_secret(pipeline.secret, list(pipeline.folders.values()))
    with pipeline.open_ledgers() as ledgers:
        runs = start(pipeline, ledgers, clock=Stopper(), anyway=True)
        places = {name: one.erase_unit(unit) for name, one in runs.runs.items()}
    counts = {name: one.operator for name, one in runs.runs.items()}
    if wants_json():
        letters = {
            name: {"erased": seen.letters_erased, "unclear": seen.letters_unclear}
            for name, seen in counts.items()
        }
        facts = {"erased": unit, "groups": places, "dead_letters": letters, "kept": _KEPT}
        print(json.dumps(facts | {"operator_only": True}))
        return
    for name, count in places.items():
        seen = counts[name]
        print(
            f"{name}: erased from {count} groups and from {seen.letters_erased} dead letters (for "
            "the operator only: exact counts); nothing more of this unit is counted"
        )
        if seen.letters_unclear:
            print(
                f"{name}: {seen.letters_unclear} dead letters do not tell whose they are, and "
                f"stay: look through {pipeline.folders[name] / 'dead-letters'}"
            )
    print(f"kept: {'; '.join(_KEPT)}")


def _publish(pipeline: Pipeline, runs: Runs, stopper: Stopper, *, once: bool) -> int:
    """Publish until the end, a signal, or (once) the first trigger from now on."""
    began, count, upkeep = stopper.now(), 0, Upkeep(pipeline)
    upkeep()
    printers = {
        name: ReleasePrinter(zone=run.query.time_zone, together=not run.live)
        for name, run in runs.runs.items()
    }
    watching = _stop_after_trigger(runs, began) if once else nullcontext()
    try:
        with stopper.stop_on_signals(), watching, progress([*runs.runs.values()]) as draw:
            for name, release in runs:
                count += 1
                zone = runs.runs[name].query.time_zone
                if not pipeline.sinks:
                    printers[name].show(release)
                elif wants_json() and "-" not in pipeline.sinks:
                    print(as_json(release, rows=False), flush=True)
                elif "-" not in pipeline.sinks and not logs_lines():
                    print(in_words(release, zone), flush=True)
                draw()
                upkeep()
                at = about(release)["trigger_time"]
                live = pipeline.feeds[name].live
                if once and (not live or instant(at, "trigger_time", "UTC") >= began):
                    runs.runs[name].stop()
                if stopper.signals or (not once and is_to_change(pipeline, runs)):
                    runs.stop()
    except Exception as problem:
        alone = len(runs.failures) == len(runs.runs) and not is_to_change(pipeline, runs)
        if alone or problem not in runs.failures.values():
            raise  # of others it was told when they failed
    finally:
        for printer in printers.values():
            printer.flush()
        runs.close()
    return count


@contextmanager
def _stop_after_trigger(runs: Runs, began: int) -> Iterator[None]:
    """Stop live queries whose next trigger is over, though it has published nothing.

    That is so for a window that was given up when a backup was put back.
    """
    over = Event()

    def watch() -> None:
        while not over.wait(_LOOK):
            for run in runs.runs.values():
                done, schedule = run.steps_done, run.query.schedule
                at = schedule.time_of(done - 1) if run.live and done else None
                if at is not None and at >= began:
                    run.stop()

    watcher = Thread(target=watch, name="dpstream-once", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _finish(pipeline: Pipeline, runs: Runs, stopper: Stopper, new_charges: int) -> None:
    """The last lines: what became of the rows, what is left to do, and how to go on."""
    each = [*runs.runs.values()]
    tell_operator(
        each, {name: folder / "dead-letters" for name, folder in pipeline.folders.items()}
    )
    tell_lag(each, runs.warn_starved())
    left = is_unfinished(each)
    if wants_json():
        queries: dict[str, dict[str, Any]] = {}
        for name, run_ in runs.runs.items():
            queries[name] = {
                "triggers_done": run_.steps_done,
                "triggers": run_.query.schedule.steps,
                "operator_only": run_.operator_facts(),
            }
            if problem := runs.failures.get(name):
                failed = {"error": type(problem).__name__, "message": str(problem)}
                queries[name]["failed"] = failed
        datasets = [book.dataset for book in pipeline.books]
        facts = {"pipeline": str(pipeline.path), "dataset": datasets[0], "finished": not left}
        if len(datasets) > 1:
            facts |= {"dataset": datasets}
        print(json.dumps(facts | {"new_charges": new_charges, "queries": queries}), flush=True)
    if left:
        note(f"not finished; go on with: dpstream run {pipeline.path}")
    if runs.failures:
        raise next(iter(runs.failures.values()))
    if left and stopper.signals:
        raise typer.Exit(INTERRUPTED)
