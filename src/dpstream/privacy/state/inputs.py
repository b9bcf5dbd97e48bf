"""The input log: what each step was about to read, durable before its noise is drawn.

A replay brings the same digests and may draw the same noise again. Other data under an old
address would let a reader subtract two releases and cancel the noise: refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from dpstream.errors import NoiseReuse, StateError
from dpstream.privacy.state.journal import Journal, Record


def chain_digest(key: bytes, previous: bytes, content: bytes) -> bytes:
    """Keyed digest of a step's input, chained to everything before it."""
    return hashlib.blake2b(previous + content, digest_size=16, key=key).digest()


class InputLog:
    """One digest per step, in order, by one writer. Holds the file's lock until closed."""

    def __init__(self, path: Path, *, run: bytes) -> None:
        self._journal, self._lock = Journal(path, kind="input log"), Lock()
        try:
            self._open(path, run)
        except BaseException:
            self._journal.close()  # a refused log must not stay locked
            raise

    def _open(self, path: Path, run: bytes) -> None:
        self._journal.acquire(wait=False)
        records = self._journal.read_new()
        if not records:
            self._journal.append([{"run": run.hex()}])
            records = [{"run": run.hex()}]
        if records[0].get("run") != run.hex():
            raise StateError(
                f"{path} belongs to another run; a log serves one run, use a new state directory"
            )
        self._digests: dict[int, bytes] = {}
        self.positions: dict[int, Any] = {}  # how far a step has read, where that was logged
        self.ledger_head: tuple[int, str] | None = None
        for record in records[1:]:
            self._digests[record["step"]] = bytes.fromhex(record["digest"])
            if "positions" in record:
                self.positions[record["step"]] = record["positions"]
            if "ledger" in record:
                self.ledger_head = (record["ledger"][0], record["ledger"][1])
        self.last = max(self._digests, default=-1)  # the newest logged step
        self.identity = self._journal.identity()

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
        with self._lock:
            self._record(step, digests, ledger, positions)

    def _record(
        self,
        step: int,
        digests: Sequence[bytes],
        ledger: tuple[int, str] | None,
        positions: Any,
    ) -> None:
        new: dict[int, bytes] = {}
        for number, digest in enumerate(digests, start=step):
            known = self._digests.get(number)
            if known is None and number > self.last:
                new[number] = digest
            elif known != digest:
                raise NoiseReuse(
                    f"step {number} was already published from other data; the same noise over "
                    "other data would reveal the difference, so nothing was published; feed the "
                    "same data to replay, or start a new run"
                )
        if new:
            records: list[Record] = [{"step": s, "digest": d.hex()} for s, d in new.items()]
            if ledger is not None:
                records[-1]["ledger"] = list(ledger)
                self.ledger_head = ledger
            if positions is not None:
                records[-1]["positions"] = positions
                self.positions[max(new)] = positions
            self._journal.append(records)
            self._digests |= new
            self.last = max(new)

    def digest_at(self, step: int) -> bytes | None:
        """The digest that was logged for a step, if it is still held."""
        return self._digests.get(step)

    def forget_before(self, step: int) -> None:
        """Drop digests from memory (not from the file) that no replay can reach any more."""
        with self._lock:  # snapshots settle on a thread of their own
            self._digests = {s: d for s, d in self._digests.items() if s >= step or s == self.last}
            self.positions = {s: p for s, p in self.positions.items() if s >= step - 1}

    def close(self) -> None:
        """Release the log to another process."""
        self._journal.close()
