"""The input log: what each step was about to read, durable before its noise is drawn.

A replay brings the same digests and may draw the same noise again. Other data under an old
address would let a reader subtract two releases and cancel the noise: refused.

Records: the run; each start's epoch; the types of columns when they become known; then a digest
for each step, with how far a live source was read and where the ledger ended by then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from threading import Lock
from typing import Any

from dpstream.errors import NoiseReuse, StateError
from dpstream.privacy.state.journal import Journal, Record
from dpstream.records import is_quarantined


def types_digest(types: bytes) -> str:
    """Names the types of columns in the ledger; "" if none are known."""
    return hashlib.sha256(types).hexdigest()[:16] if types else ""


def logged_types(path: Path) -> list[bytes]:
    """The types that a log has, without its lock: it may be in use."""
    with closing(Journal(path, kind="input log")) as journal:
        return [bytes.fromhex(each["types"]) for each in journal.read_new() if "types" in each]


def logged_quarantine(path: Path) -> dict[str, Any]:
    """The partitions that are quarantined by a log, and how, without its lock."""
    with closing(Journal(path, kind="input log")) as journal:
        return _quarantined(journal.read_new())


def _quarantined(records: Sequence[Record]) -> dict[str, Any]:
    moved: dict[str, Any] = {}
    for record in records:
        moved |= record.get("positions") or record.get("quarantined") or {}
    return {name: at for name, at in moved.items() if is_quarantined(at)}


class InputLog:
    """One digest per step, in order, by one writer. Holds the file's lock until closed."""

    def __init__(self, path: Path, *, run: bytes, new: bool = False) -> None:
        """`new`: the run begins and makes its log; otherwise a log that is gone is refused."""
        if not new and not (path.exists() and path.stat().st_size):
            raise StateError(
                f"{path} is {'empty' if path.exists() else 'missing'}; it says what each published "
                "step has read; restore it, or use a new state directory (a new run, charged anew)"
            )
        self._journal, self._lock = Journal(path, kind="input log"), Lock()
        try:
            self._open(path, run, new)
        except BaseException:
            self._journal.close()  # a refused log must not stay locked
            raise

    def _open(self, path: Path, run: bytes, new: bool) -> None:
        self._journal.acquire(wait=False)
        records = self._journal.read_new()
        if not records and new:
            self._journal.append([{"run": run.hex()}])
            records = [{"run": run.hex()}]
        if not records or records[0].get("run") != run.hex():
            raise StateError(
                f"{path} belongs to another run; a log serves one run: restore its own, or use a "
                "new state directory (a new run, charged anew)"
            )
        self._digests: dict[int, bytes] = {}
        self.positions: dict[int, Any] = {}  # how far a step has read, where that was logged
        self.epochs: list[str] = []  # one for each start, the newest last
        self.types: list[bytes] = []  # of columns, as they became known, the newest last
        self.ledger_head: tuple[int, str] | None = None
        self.told = self._headed = -1  # up to `told` the ledger was told before more was logged
        self.last = -1  # the newest logged step
        self._enough = 0  # bytes of the file that it is worth to compact it at
        for record in records[1:]:
            self._apply(record)

    def _apply(self, record: Record) -> None:
        if "epoch" in record:
            self.epochs.append(record["epoch"])
        elif "types" in record:
            self.types.append(bytes.fromhex(record["types"]))
        elif "step" in record:
            self.last = record["step"]
            self._digests[self.last] = bytes.fromhex(record["digest"])
            if "positions" in record:
                self.positions[self.last] = record["positions"]
            if "ledger" in record:
                self.ledger_head = (record["ledger"][0], record["ledger"][1])
                self.told, self._headed = self._headed, self.last

    def begin(self, epoch: str) -> None:
        """A process starts, or goes on with, the run."""
        self._note({"epoch": epoch})

    def keep_types(self, types: bytes) -> None:
        """Fix the types of columns, which a restart must read as this start did."""
        if self.types[-1:] != [types]:
            self._note({"types": types.hex()})

    def _note(self, record: Record) -> None:
        with self._lock:
            self._journal.append([record])
            self._apply(record)

    def record(
        self,
        step: int,
        digests: Sequence[bytes],
        *,
        ledger: tuple[int, str] | None = None,
        positions: Any = None,
    ) -> None:
        """Log the digests of `step`, `step + 1`, ...; return when they are durable.

        `ledger`: where the ledger's file ended by then, to notice later if it was rolled back.
        `positions`: how far the source was read by then, for one that grows.
        """
        records: list[Record] = []
        with self._lock:
            for number, digest in enumerate(digests, start=step):
                known = self._digests.get(number)
                if known is None and number > self.last:
                    records.append({"step": number, "digest": digest.hex()})
                elif known != digest:
                    raise NoiseReuse(
                        f"step {number} was already published from other data; the same noise over "
                        "other data would reveal the difference, so nothing was published; feed "
                        "the same data to replay, or start a new run: charged anew, or, if units "
                        "have periods, with --take-over from the next one on, uncharged"
                    )
            if not records:
                return
            if ledger is not None:
                records[-1]["ledger"] = list(ledger)
            if positions is not None:
                records[-1]["positions"] = positions
            self._journal.append(records)
            for record in records:
                self._apply(record)

    def digest_at(self, step: int) -> bytes | None:
        """The digest that was logged for a step, if it is still held."""
        return self._digests.get(step)

    @property
    def unused(self) -> bool:
        """Has no start been noted in it? Then nothing was drawn under it."""
        return not self.epochs and self.last < 0

    def forget_before(self, step: int) -> None:
        """Drop digests from memory (not from the file) that no replay can reach any more."""
        with self._lock:  # snapshots settle on a thread of their own
            self._digests = {s: d for s, d in self._digests.items() if s >= step or s == self.last}
            self.positions = {s: p for s, p in self.positions.items() if s >= step - 1}

    def compact_before(self, step: int) -> None:
        """Drop from a long file, too, what no replay can reach any more, and epochs that are over.

        The newest epoch is in the ledger. What is quarantined stays, for the operator.
        """

        def fold(records: list[Record], folded: int) -> tuple[list[Record], int]:
            first = min(step - 1, self.told)
            count = next(n for n, r in enumerate(records) if r.get("step", -1) >= first)
            kept = [r for r in records[:count] if "types" in r]
            kept += [r for r in records[:count] if "epoch" in r][-1:]
            marks = _quarantined(records[:count])
            return [records[0], *kept, *([{"quarantined": marks}] if marks else [])], count

        with self._lock:
            if self._journal.is_long and self._journal.size >= self._enough:
                self._journal.compact(fold)
                self._enough = 2 * self._journal.size

    def close(self) -> None:
        """Release the log to another process."""
        self._journal.close()
