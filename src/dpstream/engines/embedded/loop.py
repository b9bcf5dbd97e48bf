"""The life of a run, step by step: rows, log, noise, sink, snapshot.

Each step's digest and positions are durable before its noise is drawn, its tables are durable
before a snapshot says that it is done, and a snapshot is durable before anything older goes. So a
kill at any moment loses nothing: the newest snapshot is loaded, the logged steps are taken again,
the same rows meet the same noise, and the sink already has the tables that come out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from threading import Lock
from typing import Any

import pyarrow as pa

from dpstream.engines.embedded.snapshots import Snapshots
from dpstream.engines.embedded.step_rows import FileInput, LiveInput
from dpstream.engines.sender import MOST_ON_THE_WAY, Sender
from dpstream.group_by.flow import BoundedRows, Flow
from dpstream.privacy.query_spend import QuerySpend
from dpstream.privacy.state import chain_digest
from dpstream.privacy.state.run_directory import RunDirectory
from dpstream.records import Position, Sink, fence
from dpstream.rows.row_batch import RowSlice
from dpstream.rows.row_ids import combine, multiset_digest

_START = bytes(16)  # the digest chain before the first step
_MANY = 16  # one step in this many may be ahead of what is durable


@dataclass(kw_only=True)
class Loop:
    """One run of one query in this process."""

    flow: Flow
    pay: Callable[[], QuerySpend]
    """Opens the book if need be, charges the run, and gives the door to its noise."""
    digest_key: bytes
    files: FileInput | None
    live: LiveInput | None
    sink: Sink | None
    directory: RunDirectory | None
    snapshot_every: int
    stopped: Callable[[], bool]
    commit: Callable[[dict[str, Position]], None] | None = None
    """Tells a live source up to which positions no recovery needs its rows any more."""
    step: int = field(init=False, default=0)
    _chain: bytes = field(init=False, default=_START)
    _spend: QuerySpend | None = field(init=False, default=None)
    _snapshots: Snapshots | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        steps = self.flow.query.schedule.steps or 0
        # A short run does not run away from who reads it, and may want to stop it.
        on_the_way = min(MOST_ON_THE_WAY, steps // _MANY)
        self._sender = Sender(self.sink, self.flow.query.name, on_the_way)
        self._judge, self._logger = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._windows = OpenWindows(self.flow.query.schedule.last_step, self._erase)
        self._steps = self.flow.query.schedule.steps

    def releases(self) -> Iterator[pa.Table]:
        """Every table, as it is published."""
        self._resume()
        yield from self._from_files() if self.live is None else self._from_live()
        self._end()

    def _from_live(self) -> Iterator[pa.Table]:
        """One step after another: a table is out before the next rows are waited for."""
        assert self.live is not None
        while (pieces := self._rows(self.step)) is not None:
            self.flow.aggregate_rows(self.flow.bound_rows(pieces))
            self._charge()
            self._chain = self._logged(self.step, pieces, self._chain)
            self._publish()
            tables = self._sender.arrived(all_of_them=True)
            self.live.released(self.step - 1)
            yield from self._delivered(tables)

    def _from_files(self) -> Iterator[pa.Table]:
        """While a step is published, the next one's rows are bounded and its input is logged."""
        coming = self._coming(self.step)
        while coming is not None:
            rows, logged = coming
            self.flow.aggregate_rows(rows.result())
            self._chain = logged.result()
            ahead = self._may_go_ahead()
            coming = self._coming(self.step + 1) if ahead else None
            self._publish()
            saves = self._saves_at(self.step)
            yield from self._delivered(self._sender.arrived(all_of_them=saves))
            coming = coming if ahead else self._coming(self.step)
        yield from chain.from_iterable(self._sender.arrived(all_of_them=True))

    def _delivered(self, steps: list[list[pa.Table]]) -> Iterator[pa.Table]:
        """Tables that every sink has, by step, and a snapshot if it is time for one.

        A snapshot says that everything is out: in the sinks, and, but for this step's tables, with
        who iterates here.
        """
        if self._saves_at(self.step):
            yield from chain.from_iterable(steps[:-1])
            self._save()
            steps = steps[-1:]
        yield from chain.from_iterable(steps)

    @property
    def finished(self) -> bool:
        """Was every step published?"""
        return self.step == self._steps

    def close(self) -> None:
        """Stop the threads."""
        self._sender.close()
        self._judge.shutdown()
        self._logger.shutdown()
        self.flow.close()
        if self.files is not None:
            self.files.close()
        if self.live is not None:
            self.live.close()
        if self._snapshots is not None:
            self._snapshots.close()

    def _resume(self) -> None:
        if self.directory is None:
            return
        self._snapshots = Snapshots(self.directory.folder, settled=self._settled)
        self._windows.add(*self.directory.keys.open_windows())
        facts = self._snapshots.load(self.flow)
        before: list[bytes] = []
        if facts is not None:
            self._chain, self.step = facts["chain"], facts["step"]
            before = facts.get("before_erasures", [])
            if self.live is not None:
                self.live.positions = dict(facts["positions"])
        self.directory.refuse_undone_erasure(self.step, [*before, self._chain])

    def _rows(self, step: int) -> list[RowSlice] | None:
        """The rows of a step; None if the run is over, or was stopped."""
        if self._steps is not None and step >= self._steps:
            return None
        pieces: list[RowSlice] = []
        if self.live is not None:
            logged = None
            if self.directory is not None:
                logged = self.directory.log.positions.get(step)
            found = self.live.take(step) if logged is None else self.live.replay(step, logged)
            if found is None:
                return None
            pieces += found
        elif self.stopped():
            return None
        return pieces if self.files is None else pieces + self.files.take(step)

    def _may_go_ahead(self) -> bool:
        """May the next step's rows be bounded before this one is published?

        Not before a snapshot, which is of this step; nor if they would have to be waited for.
        """
        step = self.step + 1
        if self._saves_at(step) or not self.flow.workers.several:
            return False
        return self.files is None or self.files.ready(step)

    def _coming(self, step: int) -> tuple[Future[list[BoundedRows]], Future[bytes]] | None:
        """A step's rows, which are being bounded and logged."""
        pieces = self._rows(step)
        if pieces is None:
            return None
        self._charge()
        rows = self._judge.submit(self.flow.bound_rows, pieces)
        return rows, self._logger.submit(self._logged, step, pieces, self._chain)

    def _charge(self) -> None:
        """Charge the run, after its first rows: a source that cannot be read costs nothing."""
        if self._spend is not None:
            return
        fence(self.sink, self.flow.query.name, self.flow.run_tag)
        self._spend = self.pay()

    def _logged(self, step: int, pieces: list[RowSlice], before: bytes) -> bytes:
        """Make a step's input durable; the chain of digests that it ends."""
        digest = chain_digest(self.digest_key, before, step_content(step, pieces))
        if self.directory is not None:
            positions = None if self.live is None else self.live.moved()
            self.directory.record(step, [digest], positions=positions)
        return digest

    def _publish(self) -> None:
        """Draw and publish; the sender says when every sink has the tables."""
        assert self._spend is not None
        self._spend.begin(self.step)
        tables = self.flow.publish(self.step, self._spend)
        self._sender.send(tables)
        for due in (table.due for table in tables):
            self._windows.add(due.window)
            if due.release == due.releases:
                self.flow.evict(due.window)
        self.step += 1
        self.flow.evict_periods(self.step)
        if self._snapshots is None:
            self._windows.settle(self.step)

    def _saves_at(self, step: int) -> bool:
        """Does a snapshot belong before this step?"""
        at = step == self._steps or step % self.snapshot_every == 0
        return at and self._snapshots is not None

    def _save(self) -> None:
        assert self._snapshots is not None
        positions = {} if self.live is None else dict(self.live.positions)
        facts = {
            "run": self.flow.run_tag,
            "step": self.step,
            "chain": self._chain,
            "positions": positions,
        }
        self._snapshots.save(self.flow, facts)

    def _end(self) -> None:
        if self._snapshots is None:
            return
        if self.finished:
            self._snapshots.finish()
        elif self.step:
            self._save()
            self._snapshots.wait()

    def _settled(self, facts: dict[str, Any]) -> None:
        """No recovery goes back beyond this snapshot any more."""
        assert self.directory is not None
        self._windows.settle(facts["step"])
        self.directory.log.forget_before(facts["step"])
        if self.commit is not None:
            self.commit(facts["positions"])

    def _erase(self, window: int) -> None:
        """Forget a window's key; a run that has not drawn yet may have one to forget, too."""
        if self._spend is not None:
            self._spend.erase(window)
        elif self.directory is not None:
            self.directory.keys.erase(window)


class OpenWindows:
    """Windows whose keys exist; they are erased once nothing can replay them."""

    def __init__(self, last_step: Callable[[int], int], erase: Callable[[int], None]) -> None:
        self._last_step, self._erase = last_step, erase
        self._known: set[int] = set()
        self._lock = Lock()  # the snapshots' writer settles while the engine goes on

    def add(self, *windows: int) -> None:
        """Their keys exist."""
        with self._lock:
            self._known.update(windows)

    def settle(self, before: int) -> None:
        """Erase the keys of windows whose last step is before this one."""
        with self._lock:
            over = sorted(w for w in self._known if self._last_step(w) < before)
            self._known.difference_update(over)
        for window in over:
            self._erase(window)


def step_content(step: int, pieces: list[RowSlice]) -> bytes:
    """What a step has read, in any order: the sum of its rows' digests, and their number."""
    total = (0, 0)
    for rows, first, end in pieces:
        total = combine(total, multiset_digest(rows.digests[first:end]))
    return content_of(step, total)


def content_of(step: int, total: tuple[int, int]) -> bytes:
    """The same, of the multiset digest of its rows."""
    digest, count = total
    return step.to_bytes(8, "little") + digest.to_bytes(16, "little") + count.to_bytes(8, "little")
