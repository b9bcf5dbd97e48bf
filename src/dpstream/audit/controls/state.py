"""Engines that go on although their state has lost something: keys, the log of inputs, types.

All claim the (epsilon, delta) of the query's plan. The state directory itself stays whole, and what
guards it may be as strict as it likes: each form has one piece that remembers nothing across a
restart, which is what the loss of a file comes to where nobody notices.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import pyarrow as pa

from dpstream.engines.local import LocalRun
from dpstream.engines.loop import Loop
from dpstream.engines.query_run import Storage
from dpstream.privacy.keys import derive
from dpstream.privacy.state import WindowKeySource
from dpstream.stages.flow import Flow
from dpstream.stages.pieces import Piece


@dataclass(frozen=True, kw_only=True)
class _OtherKeys:
    """Keys of windows that are others at each start, whatever was minted before."""

    real: WindowKeySource
    start: int

    def mint(self, window: int) -> bytes:
        return derive(self.real.mint(window), b"start %d" % self.start)

    def get(self, window: int) -> bytes:
        return derive(self.real.get(window), b"start %d" % self.start)

    def erase(self, window: int) -> None:
        self.real.erase(window)


class KeysLost(LocalRun):
    """Lost window keys: noise is drawn anew for releases that were shown before.

    True: a run that is begun again k times publishes k noisy copies for one charge.
    """

    def _storage(self) -> Storage:
        storage = super()._storage()
        assert self.folder is not None
        storage.keys = _OtherKeys(real=storage.keys, start=_starts(self.folder))
        return storage


class _Blind(Loop):
    """Logs that a step was taken, and not what it has read."""

    def _logged(self, step: int, pieces: list[Piece], before: bytes) -> bytes:
        return super()._logged(step, [], before)


class LogLost(LocalRun):
    """A lost log of inputs: after a restart the same noise meets whatever is read now.

    True: who has two releases of one address subtracts them, and is left with the difference of
    the data, without noise.
    """

    def _opened(self, storage: Storage) -> Loop:
        made = super()._opened(storage)
        return _Blind(**{one.name: getattr(made, one.name) for one in fields(made) if one.init})


class TypesLost(LocalRun):
    """Lost column types: they are learned anew, and a unit of another type is another unit.

    True: bounds begin anew with every type in which the unit's column comes.
    """

    def _flow(self, storage: Storage, *, threads: int) -> Flow:
        flow = super()._flow(storage, threads=threads)
        flow.reader.types.clear()
        flow.reader.learned = lambda types: None
        return flow


def _starts(folder: Path) -> int:
    """How many times a directory was opened by these engines, before now."""
    count = folder.with_name(f"{folder.name}.starts")
    before = int(count.read_text(encoding="ascii")) if count.exists() else 0
    count.write_text(str(before + 1), encoding="ascii")
    return before


def target_gone(table: pa.Table, start: int) -> pa.Table:
    """Rows of which the target's are gone after the first start: data that were corrected."""
    return table if start == 0 else table.filter(pa.array(table["user"].to_numpy() % 10**6 > 0))


def another_type(table: pa.Table, start: int) -> pa.Table:
    """The same rows, their users as numbers, as text, or as floats."""
    kind = (pa.int64(), pa.string(), pa.float64())[start]
    return table.set_column(0, "user", table["user"].cast(kind))
