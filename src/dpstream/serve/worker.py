"""The process that runs a pipeline for the server, and the supervisor that keeps it alive.

The process writes releases, and tells on standard output how it goes, a JSON object a line: that
is for the operator alone. A line on its standard input asks it to stop, with a snapshot. When that
input ends it leaves at once: the server that started it is gone, and a run survives a kill at any
moment.
"""

from __future__ import annotations

import asyncio
import builtins
import json
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from dpstream import errors
from dpstream.engines.clock import SystemClock
from dpstream.engines.embedded.process_memory import keep_freed_memory
from dpstream.engines.query_run import EngineOptions, QueryRun
from dpstream.operator_log import FORMAT, LEVEL, log_to_stderr
from dpstream.privacy.state.durable_files import make_directory
from dpstream.serve.metrics import described, report, run_samples
from dpstream.serve.otel import VARIABLE, export
from dpstream.serve.public_facts import describe_queries
from dpstream.serve.release_store import ReleaseStore, hold_folder, store_folder
from dpstream.session import Runs
from dpstream.session.pipeline import Pipeline
from dpstream.session.retention import Upkeep
from dpstream.session.start_pipeline import (
    check_reload,
    is_to_change,
    load_current,
    load_kept,
    open_book,
    refuse_lost_secret,
    start,
    with_engine,
)

_EVERY = 1.0  # seconds between two reports
_AGAIN = 75  # exit code when the pipeline is to be loaded again
_LOST = 70  # exit code when the process that started it is gone
PATIENCE = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Seconds before what has failed is tried again."""
NOT_AGAIN = ("BudgetExceeded",)
"""Errors that nothing changes about until the operator acts."""
_LOG = logging.getLogger("dpstream.serve")
_STOPPING = 5.0  # seconds that a stop may take
_LONGEST_LINE = 1 << 24
_SAYING = 60.0  # seconds between two notes about rows that were not used
State = Literal["starting", "running", "restarting", "finished", "stopped", "not run", "refused"]


def publish(
    pipeline: Pipeline,
    *,
    tell: Any = lambda runs: None,
    clock: Any = None,
    options: EngineOptions | None = None,
    stopped: threading.Event | None = None,
    strict: bool = False,
    anyway: bool = False,
    take_over: bool = False,
) -> bool:
    """Run a pipeline to its end, every release into its store; True: it is to be loaded again.

    `strict`: none of the queries is run unless all can begin; otherwise one that cannot is tried
    again while the others go on. `anyway`: they begin though none of the first rows can be used.
    `take_over`: earlier runs of the same queries are ended, where units have periods.
    """
    terms = [book.terms() for book in pipeline.books]
    refuse_lost_secret(pipeline.secret, list(pipeline.folders.values()))
    make_directory(pipeline.state, mode=0o700)
    folder, queries = store_folder(pipeline), describe_queries(pipeline)
    make_directory(folder, mode=0o700)
    with hold_folder(folder), ExitStack() as stack:
        keys = {name: query.keys for name, query in queries.items()}
        partial_queries = [name for name, query in queries.items() if query.partial]
        served = pipeline.retention.get("served")
        store = ReleaseStore(folder, keys=keys, partial=partial_queries, served=served)
        stack.callback(store.shut)
        store.announce_rest(list(queries))  # what a kill has left unannounced
        ledgers = stack.enter_context(pipeline.open_ledgers())
        clock = clock or SystemClock()
        how: dict[str, Any] = {"sinks": [store], "options": options, "anyway": anyway}
        runs = start(pipeline, ledgers, clock=clock, take_over=take_over, **how)
        for book, wanted in zip(pipeline.books, terms, strict=True):
            shared, now = ledgers[book.ledger], clock.now()
            open_book(pipeline, book, wanted, shared, now=now, take_over=take_over)
        _tell_beginnings(runs)
        runs.retry_delay = lambda problem, tries: (
            None if is_to_change(pipeline, runs) else _retry_delay(problem, tries)
        )
        with runs:
            if strict:
                runs.open()
            tell(runs)
            upkeep = Upkeep(pipeline)
            upkeep()
            try:
                for name, release in runs:
                    about = json.loads(release.schema.metadata[b"dpstream"])
                    store.announce(name, about["window"], about["release_index"])
                    upkeep()
                    if (stopped is not None and stopped.is_set()) or is_to_change(pipeline, runs):
                        runs.stop()
            except errors.DpstreamError:
                if not is_to_change(pipeline, runs):
                    raise
        return is_to_change(pipeline, runs)


def _tell_beginnings(runs: Runs) -> None:
    """Say, at their first start, which runs begin later than asked, or take over from others."""
    for run in runs.runs.values():
        if isinstance(run, QueryRun) and run.is_new and run.beginning.notice:
            _LOG.warning("%s", run.beginning.notice)


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


def _tell_opened_books() -> None:
    """Tell the server that a book is opened, and with what, unless log lines do."""
    if FORMAT in os.environ or LEVEL in os.environ:
        return
    log = logging.getLogger("dpstream.ledger")
    log.addHandler(_Teller())
    log.setLevel(logging.INFO)


class _Teller(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _tell({"note": record.getMessage()})


def main(args: Sequence[str]) -> int:
    """Run the pipeline of a file: FILE ENGINE WHO KEPT WORDS.

    KEPT is the file of a pipeline that ran before, to go on with; "" for none. Words are "strict",
    "anyway" and "take_over", as `publish` takes them.
    """
    with log_to_stderr(os.environ.get(FORMAT), os.environ.get(LEVEL)):
        return _run(args)


def _run(args: Sequence[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server
    warnings.simplefilter("ignore", errors.UnexpectedResult)  # the log says what they say
    _tell_opened_books()
    over, stop = threading.Event(), threading.Event()
    known: list[Runs] = []
    threads: list[threading.Thread] = []
    threading.Thread(target=_leave_with_parent, args=(stop, known), daemon=True).start()
    keep_freed_memory()

    exporting = ExitStack()

    def tell(runs: Runs) -> None:
        known.append(runs)
        collect = partial(run_samples, pipeline, runs)
        exporting.enter_context(export(os.environ.get(VARIABLE), collect, name=pipeline.path.stem))
        thread = threading.Thread(target=_report_for_ever, args=(runs, over), daemon=True)
        thread.start()
        threads.append(thread)

    failed: dict[str, Any] | None = None
    again = False
    try:
        path, engine, who, kept, *words = args
        pipeline = load_kept(Path(path), Path(kept)) if kept else load_current(Path(path))
        pipeline = with_engine(pipeline, engine).asked_by(who)
        how: dict[str, Any] = {word: word in words for word in ("strict", "anyway", "take_over")}
        again = publish(pipeline, tell=tell, stopped=stop, **how)
    except Exception as problem:
        failed = described(problem)
    finally:
        over.set()
        exporting.close()
        for thread in threads:
            thread.join()
    if failed is not None:
        _tell(failed)  # the last word: a report after it would say that all is well
        return 1
    return _AGAIN if again and not stop.is_set() else 0


@dataclass(kw_only=True)
class Supervisor:
    """Starts a pipeline's process, and starts it again when it dies."""

    path: Path
    engine: str = "embedded"
    """Where the queries run."""
    anyway: bool = False
    """Do queries begin though none of the first rows can be used?"""
    take_over: bool = False
    """Are earlier runs of the same queries ended at the first start?"""
    who: str = ""
    """Who asks for queries that name no analyst."""
    kept: Path | None = None
    """A pipeline that ran before, to go on with instead of what the file says now."""
    command: tuple[str, ...] = (sys.executable, "-m", "dpstream.serve.worker")
    state: State = "not run"
    restarts: int = 0
    told: dict[str, Any] = field(default_factory=dict)
    """What the process has told last; not private."""
    problem: dict[str, Any] | None = None
    """What it has died of; not private."""
    pid: int | None = None
    began: float = field(default_factory=time.time)
    """When the process was started."""
    say: Callable[[str], None] = lambda words: None
    """Tells the operator, and nobody else, about rows that were not used."""
    to_reload: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set when the pipeline file is to be taken up anew."""
    not_reloaded: dict[str, Any] | None = None
    """Why a file was not taken up when that was asked for last."""
    _begun: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _kills: int = field(default=0, init=False)
    _said: str = field(default="", init=False)
    _said_at: float = field(default=-_SAYING, init=False)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The pipeline runs while this lasts; what it is refused for at first is raised."""
        task = asyncio.create_task(self._keep())
        try:
            await self._begun.wait()
            if self.state == "refused" and self.problem is not None:
                raise refusal(self.problem)
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            self.state = "stopped" if self.state not in ("finished", "refused") else self.state

    async def reload(self) -> dict[str, Any] | None:
        """Take the pipeline file up anew, or go on; returns why, if it could not be started."""
        self.not_reloaded = None
        try:
            await asyncio.to_thread(check_reload, self.path, who=self.who, anyway=self.anyway)
        except (errors.DpstreamError, OSError) as problem:
            self.not_reloaded = described(problem)
            _LOG.error("%s is not taken up, and what ran goes on: %s", self.path, problem)
        else:
            self.to_reload.set()
        return self.not_reloaded

    async def change(self, change: Callable[[], None]) -> None:
        """Make a change of what is to run, one at a time, and take it up; a refusal is raised."""
        async with self._changing:
            await asyncio.to_thread(change)
            self.to_reload.set()

    async def _keep(self) -> None:
        while True:
            self.state = "starting"
            try:
                code: int | None = await self._once()
            except Exception as problem:  # it could not even be started
                code = None
                self.problem = described(problem)
            first = not self._begun.is_set()
            self._begun.set()
            if code == 0:
                self.state = "finished"
                return
            if code == _AGAIN:
                self.to_reload.set()
                return
            if first and code is not None and self.problem is not None:
                self.state = "refused"
                return
            if code is not None and self._is_refused():
                return
            if self.problem is None and code is not None:
                out_of_memory = oom_kills() > self._kills
                self.problem = {"error": "Died", "message": died(code, out_of_memory)}
            pause = PATIENCE[min(self.restarts, len(PATIENCE) - 1)]
            _LOG.error(
                "the pipeline's process is gone (%s: %s); it is started again in %g s, and goes on "
                "where it was",
                *(self.problem or {}).values(),
                pause,
            )
            self.state = "restarting"
            self.restarts += 1
            await asyncio.sleep(pause)

    def _is_refused(self) -> bool:
        """Has it left for a reason that the next try would find unchanged?"""
        if self.problem is None or self.problem.get("error") not in NOT_AGAIN:
            return False
        self.state = "refused"
        self.problem["next"] = (
            "it is not tried again; what was released is still served; mend the budget or the "
            "pipeline file, and start dpstream serve again"
        )
        _LOG.error("the pipeline does not run: %s", "; ".join([*self.problem.values()][1:]))
        return True

    async def _once(self) -> int:
        process = await asyncio.create_subprocess_exec(
            *self.command,
            *(str(self.path), self.engine, self.who, "" if self.kept is None else str(self.kept)),
            *(() if self._begun.is_set() else ("strict",)),
            *(("anyway",) if self.anyway else ()),
            *(("take_over",) if self.take_over else ()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LONGEST_LINE,
        )
        assert process.stdout is not None
        self.pid, self.began, self._kills = process.pid, time.time(), oom_kills()
        try:
            async for line in process.stdout:
                self._hear(line)
            return await process.wait()
        finally:
            self.pid = None
            if process.returncode is None:
                await _end(process)

    def _hear(self, line: bytes) -> None:
        try:
            told = json.loads(line)
        except ValueError:
            told = None
        if not isinstance(told, dict):
            return
        if "note" in told:
            self.say(told["note"])
        elif "error" in told:
            self.problem = told
        else:
            self.state, self.told, self.problem = "running", told, None
            self._begun.set()
            self._note_rows()

    @property
    def queries(self) -> dict[str, Any]:
        """What it has told of each query; not private."""
        return dict(self.told.get("queries", {}))

    @property
    def failed(self) -> dict[str, Any]:
        """Queries that have failed while the others go on, and why; not private."""
        return {name: told["failed"] for name, told in self.queries.items() if "failed" in told}

    def refused(self, query: str) -> bool:
        """Has its book refused the query? Public: it follows from what was declared and paid."""
        if self.state == "refused":
            return self.problem is not None and self.problem["error"] in NOT_AGAIN
        return query in self.failed and self.failed[query]["error"] in NOT_AGAIN

    @property
    def starved(self) -> list[str]:
        """Queries that have read nothing though others over their source have; not private."""
        return [name for name, told in self.queries.items() if told.get("starved")]

    def _note_rows(self) -> None:
        words = "; ".join(
            f"{name}: {told['rejected']} of {told['read']} rows rejected since this start, "
            f"{told['outside']} outside the range"
            for name, told in self.queries.items()
            if told["rejected"] or told["outside"]
        )
        for name, told in self.queries.items():
            if told.get("quarantined"):
                words = f"{name}: {told['quarantined']} files are quarantined; {words}"
            for table in told.get("stale_tables", ()):
                words = f"{name}: the public table {table} could not be read anew; {words}"
        for name in self.starved:
            words = f"{name} has read nothing, and others over its source have; {words}"
        for name, why in self.failed.items():
            words = f"{name} has failed, the others go on: {why['message']}; {words}"
        now = time.monotonic()
        if words and words != self._said and now >= self._said_at + _SAYING:
            self._said, self._said_at = words, now
            self.say(f"operator only: {words}; see /dead-letters and /lag")


def died(code: int, out_of_memory: bool) -> str:
    """Why a process left without a word, as far as its exit code and the kernel tell.

    >>> died(-11, False)
    'it was ended by SIGSEGV, a fault in native code: please report it'
    """
    if code >= 0:
        return f"it left with the exit code {code}, and what it said is on standard error above"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if out_of_memory:
        why = (
            ", and the kernel has ended a process for want of memory meanwhile: give it more (the "
            "service's or container's limit), run fewer queries at once, or see `dpstream explain` "
            "for what each takes"
        )
    elif code == -signal.SIGKILL:
        why = (
            ": somebody has killed it, or the kernel for want of memory: look for 'oom' in "
            "`journalctl -k` or in what the container's runtime says"
        )
    elif name in ("SIGSEGV", "SIGBUS", "SIGILL", "SIGABRT", "SIGFPE"):
        why = ", a fault in native code: please report it"
    else:
        why = ": somebody has sent it"
    return f"it was ended by {name}{why}"


def oom_kills() -> int:
    """How many processes the kernel has ended for want of memory since it started; 0: unknown."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def refusal(problem: Mapping[str, Any]) -> Exception:
    """What the run's process was refused for, as `dpstream run` would raise it."""
    kind = getattr(errors, problem["error"], None) or getattr(builtins, problem["error"], None)
    if not (isinstance(kind, type) and issubclass(kind, errors.DpstreamError | OSError)):
        return errors.StateError(f"{problem['error']}: {problem['message']}")
    refused: Exception = kind(problem["message"])
    return refused


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ask it to stop; if that takes too long its input ends, and it leaves where it is."""
    pipe = process.stdin
    assert pipe is not None
    for ending in (partial(pipe.write, b"stop\n"), pipe.close, process.kill):
        with suppress(OSError):
            ending()
        try:
            await asyncio.wait_for(process.wait(), _STOPPING)
        except TimeoutError:
            continue
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
