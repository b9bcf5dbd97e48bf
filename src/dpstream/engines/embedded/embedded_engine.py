"""The embedded engine: one process, buckets on threads, durable if it has a state directory.

`LocalRun` takes the steps that `query_run.py` names. Over files it works ahead: while a step is
published, the next one's rows are bounded and logged.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from dpstream.engines.embedded.live_reader import Positions
from dpstream.engines.embedded.snapshots import Snapshots, erase_unit
from dpstream.engines.embedded.step_rows import LiveInput, RunInput
from dpstream.engines.query_run import QueryRun
from dpstream.engines.release_sender import MOST_PENDING, Sender
from dpstream.engines.run_storage import START_CHAIN, step_content
from dpstream.errors import InvalidParameter
from dpstream.group_by.bounding import StepRows
from dpstream.group_by.flow import BoundedRows, Flow
from dpstream.privacy.state.durable_files import wrap_write_errors
from dpstream.privacy.state.mirrors import sync_mirror
from dpstream.privacy.state.run_directory import read_about
from dpstream.query.column_types import Types
from dpstream.telemetry import span

_STEPS_PER_PENDING = 16  # one step in this many may be ahead of what is durable
_LOGGED_ROWS = 1 << 16  # of steps that are logged together


@dataclass(kw_only=True, repr=False, eq=False)
class LocalRun(QueryRun):
    """A query that runs in this process."""

    _flow: Flow = field(init=False)
    _sender: Sender = field(init=False)
    _snapshots: Snapshots | None = field(init=False, default=None)
    _input: RunInput = field(init=False)
    _chain: bytes = field(init=False, default=START_CHAIN)
    _ahead: int = field(init=False, default=0)
    _begins: dict[int, bytes] = field(init=False, default_factory=dict)
    """Digests of what windows remember that begin with the step which is published next."""
    _taken: deque[tuple[StepRows, Future[list[bytes]], int]] = field(
        init=False, default_factory=deque
    )
    """Steps of files that are being logged: rows, and which of the chains of digests is theirs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._input = RunInput(self)

    def _schemas(self) -> list[Types | None]:
        return self._input.schemas()

    def _default_buckets(self) -> int:
        return self.options.buckets or self._input.buckets()

    def _notes(self) -> dict[str, Any]:
        return super()._notes() | {"partitions": self._input.partitions()}

    def erase_unit(self, unit: Any) -> int:
        """Erase one unit from the state directory, instead of running; how many places it had."""
        if self.folder is None or read_about(self.folder) is None:
            raise InvalidParameter("only a run with a state directory has anything to erase")
        self._open_storage()
        with ExitStack() as undo, wrap_write_errors(self.folder):
            undo.callback(self._close)
            self._open_flow(undo, threads=1)
            directory, key = self._storage.directory, self._storage.digest_key
            assert directory is not None
            places = erase_unit(self._flow, directory, unit, digest_key=key)
            self._erase_letters(unit, self._reader.types[self.query.privacy_unit_column])
            sync_mirror(self.folder)
            return places

    def _open_flow(self, undo: ExitStack, *, threads: int) -> None:
        directory = self._storage.directory
        if directory is not None:
            self._input.refuse_others(directory.about["notes"]["partitions"])
        self._flow = Flow(
            self.plan,
            self._reader,
            buckets=self._storage.buckets,
            threads=threads,
            run_tag=self._storage.run_tag,
        )
        undo.callback(self._flow.close)
        self._flow.abandoned = self._left_out
        self._flow.note_unused = self.operator.note_unused

    def _open(self, undo: ExitStack) -> None:
        """Everything that the run needs, and its state as the newest snapshot has it."""
        undo.enter_context(wrap_write_errors(self.folder or Path()))
        self._open_flow(undo, threads=self.options.threads or len(os.sched_getaffinity(0)))
        undo.callback(self._input.close)
        self._input.open(self._reader)
        self._bounder = undo.enter_context(ThreadPoolExecutor(1))
        self._logger = undo.enter_context(ThreadPoolExecutor(1))
        # A short run does not run away from who reads it, and may want to stop it.
        self._ahead = min(MOST_PENDING, (self.query.schedule.steps or 0) // _STEPS_PER_PENDING)
        live = self._input.live is not None
        self._sender = Sender(self.sink, self.query.name, self._ahead, here=live)
        undo.callback(self._sender.close)
        directory = self._storage.directory
        if directory is None:
            return
        self._snapshots = Snapshots(directory.folder, settled=self._settle)
        undo.callback(self._snapshots.close)
        facts = self._snapshots.load(self._flow) or {}
        self._flow.tables.restore_earlier(facts.get("earlier", []))
        self._chain, self.steps_done = facts.get("chain", START_CHAIN), facts.get("step", 0)
        self._input.go_on_from(facts, directory.folder, directory.run)
        before = facts.get("before_erasures", [])
        directory.refuse_undone_erasure(self.steps_done, [*before, self._chain])

    def _publish_steps(self) -> Iterator[pa.Table]:
        """Every table, as it is published; at the end, or when stopped, a last snapshot."""
        live = self._input.live
        yield from self._from_files() if live is None else self._from_live(live)
        finished = self.steps_done == self.query.schedule.steps
        if self._snapshots is not None and finished:
            self._snapshots.finish()
        elif self._snapshots is not None and self.steps_done:
            self._save(self._snapshots)
            self._snapshots.wait()
        if finished:
            self._finish_reading()

    def _from_live(self, live: LiveInput) -> Iterator[pa.Table]:
        """One step after another: a table is out before the next rows are waited for."""
        while (slices := self._read(self.steps_done)) is not None:
            with span("trigger", query=self.query.name, trigger=self.steps_done):
                self._begins |= self._flow.begin_windows(self.steps_done)
                with span("aggregate"):
                    self._flow.aggregate_rows(self._flow.bound_rows(self.steps_done, slices))
                self._charge()
                with span("log input"):
                    moved = self._input.moved()
                    (self._chain,) = self._log(self.steps_done, [slices], self._chain, moved)
                self._publish()
                tables = self._sender.arrived(all_of_them=True)
            live.note_release(self.steps_done - 1)
            yield from self._deliver(tables)

    def _from_files(self) -> Iterator[pa.Table]:
        """While a step is published, the next one's rows are bounded and its input is logged."""
        begun = self._begin_step(self.steps_done)
        while begun is not None:
            rows, chains, number = begun
            with span("trigger", query=self.query.name, trigger=self.steps_done):
                with span("aggregate"):
                    self._flow.aggregate_rows(rows.result())
                self._chain = chains.result()[number]
                ahead = self._may_go_ahead()
                begun = self._begin_step(self.steps_done + 1) if ahead else None
                self._publish()
            saves = self._saves_at(self.steps_done)
            yield from self._deliver(self._sender.arrived(all_of_them=saves))
            begun = begun if ahead else self._begin_step(self.steps_done)
        yield from chain.from_iterable(self._sender.arrived(all_of_them=True))

    def _read(self, step: int) -> StepRows | None:
        """The rows of a step; None if the run is over, or was stopped."""
        steps, directory = self.steps, self._storage.directory
        if steps is not None and step >= steps:
            return None
        log = None if directory is None else directory.log
        return self._input.read(step, log)

    def _may_go_ahead(self) -> bool:
        """May the next step's rows be bounded before this one is published?

        Not before a snapshot, which is of this step; nor if they would have to be waited for; nor
        where a window begins with what this step's tables show.
        """
        step = self.steps_done + 1
        if self.query.begins_with_tables and self.query.schedule.opens_windows(step):
            return False
        if self._saves_at(step) or not self._flow.workers.several:
            return False
        return bool(self._taken) or self._input.ready(step)

    def _begin_step(
        self, step: int
    ) -> tuple[Future[list[BoundedRows]], Future[list[bytes]], int] | None:
        """Begin to bound and to log the rows of a step; None if there is none."""
        if not self._taken:
            self._take_steps(step)
        if not self._taken:
            return None
        slices, chains, number = self._taken.popleft()
        self._begins |= self._flow.begin_windows(step)
        return self._bounder.submit(self._flow.bound_rows, step, slices), chains, number

    def _take_steps(self, step: int) -> None:
        """Read a step, and small ones after it whose rows are here; begin to log all of them.

        They are durable with one sync, and all of them are published before the run stops.
        """
        taken: list[StepRows] = []
        size = 0
        while (slices := self._read(step + len(taken))) is not None:
            taken.append(slices)
            moved = self._input.moved()
            size += sum(end - first for _, first, end in slices)
            few = len(taken) < self._ahead and size < _LOGGED_ROWS and moved is None
            if not few or not self._input.ready(step + len(taken)):
                break
        if not taken:
            return
        self._charge()
        chains = self._logger.submit(self._log, step, taken, self._chain, moved)
        self._taken += [(slices, chains, number) for number, slices in enumerate(taken)]

    def _log(
        self, step: int, taken: Sequence[StepRows], before: bytes, moved: Positions | None
    ) -> list[bytes]:
        """Make the input of steps durable; the chain of digests that each ends."""
        contents = (step_content(n, rows.digest()) for n, rows in enumerate(taken, start=step))
        return self._storage.log_steps(step, contents, before, positions=moved)

    def _publish(self) -> None:
        """Draw and publish; the sender says when every sink has the tables."""
        spend = self._charge()
        for window, digest in self._begins.items():
            self._storage.keys.note_content(window, digest)
        self._begins = {}
        spend.begin(self.steps_done)
        with span("publish"):
            publications = self._flow.publish(self.steps_done, spend)
        self._sender.send(publications)
        self._windows.add(*(publication.due.window for publication in publications))
        for due in self.query.schedule.due(self.steps_done):
            if due.release == due.releases:
                self._flow.evict(due.window)
        self.steps_done += 1
        self._flow.evict_periods(self.steps_done)
        if self._snapshots is None:
            self._windows.settle(self.steps_done)

    def _deliver(self, steps: list[list[pa.Table]]) -> Iterator[pa.Table]:
        """Give the tables that every sink has to the caller, and save if it is time for that.

        A snapshot says that everything is out: the tables of this step are in the sinks, and those
        of the steps before it were given to the caller, too.
        """
        if self._snapshots is not None and self._saves_at(self.steps_done):
            yield from chain.from_iterable(steps[:-1])
            self._save(self._snapshots)
            steps = steps[-1:]
        yield from chain.from_iterable(steps)

    def _saves_at(self, step: int) -> bool:
        """Does a snapshot belong before this step?"""
        at = step == self.query.schedule.steps or step % self.options.snapshot_every == 0
        return at and self._snapshots is not None

    def _save(self, snapshots: Snapshots) -> None:
        facts = {
            "run": self._storage.run_tag,
            "step": self.steps_done,
            "chain": self._chain,
        }
        if earlier := self._flow.tables.save_earlier():
            facts["earlier"] = earlier
        if self._flow.chosen is not None:
            facts["bounds"] = self._flow.chosen.newest(self.query)
        snapshots.save(self._flow, facts | self._input.save())

    def _settle(self, facts: dict[str, Any]) -> None:
        """No recovery goes back beyond this snapshot any more."""
        assert self._storage.directory is not None
        self._windows.settle(facts["step"])
        self._storage.directory.settle(facts["step"], endless=self.live)
        self._input.settle(facts)
