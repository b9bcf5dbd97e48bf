"""Run a mechanism over a stream: digest, log, charge, draw, publish; survive a restart."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from dpstream.errors import InvalidInput, StateError
from dpstream.mechanisms import find, name_of
from dpstream.mechanisms.base import Mechanism, as_block
from dpstream.privacy.ledger import Ledger
from dpstream.privacy.spend import Spend, noise_versions
from dpstream.privacy.state import (
    InputLog,
    Secret,
    chain_digest,
    mint_run_id,
    pack,
    read_packed,
    unpack,
    write_packed,
)
from dpstream.privacy.state.secret import beside
from dpstream.records import Integers, Release

_BATCH = 1024  # steps whose digests, and steady charges, become durable together


class NewRun(UserWarning):
    """A state was copied or lost its log: it goes on as a new run, with new charges."""


class Runner:
    """A mechanism, its state and its budget, one step at a time.

    Without `secret` a fresh one lives in memory. `ledger` is a Ledger, a path, or None for a book
    in memory that this run does not share. `run_id` is for tests: a run id is otherwise minted, so
    that no two runs see the same noise.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        *,
        secret: Secret | bytes | str | Path | None = None,
        run_id: bytes | None = None,
        ledger: Ledger | str | Path | None = None,
        dataset: str = "stream",
        query: str = "",
    ) -> None:
        self.mechanism, self.dataset, self.query = mechanism, dataset, query
        self.run_id = mint_run_id() if run_id is None else run_id
        self.steps_done = 0
        self._secret = Secret.of(secret)
        self._ledger = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
        self._state = mechanism.start()
        self._bins: int | None = None
        self._chain = bytes(16)
        self._log: InputLog | None = None
        self._folder: Path | None = None
        self._finished = False
        self._logged_from = 0
        if self._ledger.terms(dataset) is None:
            self._ledger.open(dataset, mechanism.terms())
        self._connect()

    def step(self, x: Any) -> list[Release]:
        """Feed one step (a number, or one number per bin); return what may be published now."""
        row = np.atleast_1d(np.asarray(x))
        return [release for batch in self.feed(row[None]) for release in batch]

    def feed(self, data: Any) -> Iterator[list[Release]]:
        """Feed many steps (steps x bins); yield each step's releases.

        The whole block is checked before its first step. Digests are logged, and charges that
        come every step are written, a batch at a time.
        """
        block = self._checked(as_block(data))
        while len(block):
            size = min(_BATCH - self.steps_done % _BATCH, len(block))
            yield from self._batch(block[:size])
            block = block[size:]

    def finish(self) -> list[Release]:
        """The stream has ended: return what a delay still held back."""
        if self._finished:
            return []
        step = max(self.steps_done - 1, 0)
        self._spend.begin(step, lambda _: self._chain.hex())
        self._state, releases = self.mechanism.finish(self._state, self._spend)
        self._finished = True
        return releases

    def save(self, path: str | Path) -> None:
        """Write the state to a directory, and from now on log every step there before it draws.

        A secret that this run drew for itself is written beside the directory (`<path>.secret`):
        back it up, without it the state cannot go on.
        """
        folder = Path(path)
        if self._folder is None:
            self._attach(folder)
        elif self._folder.resolve() != folder.resolve():
            raise StateError(
                f"this run is kept in {self._folder}; a second copy in {folder} would be another "
                "run; save to the first place"
            )
        assert self._log is not None
        snapshot = {
            "state": pack(self._state, kind="mechanism state"),
            "steps": self.steps_done,
            "bins": self._bins,
            "chain": self._chain,
            "finished": self._finished,
            "log": self._log.identity,
            "logged from": self._logged_from,
            "own ledger": self._own_ledger(folder) and self._ledger.identity(),
            "run": self.run_id,
        }
        current, older = folder / "snapshot.dps", folder / "snapshot.1.dps"
        if current.exists():
            write_packed(older, read_packed(current, kind="snapshot"), kind="snapshot")
        write_packed(current, snapshot, kind="snapshot")
        self._log.forget_before(self.steps_done)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        secret: Secret | bytes | str | Path | None = None,
        ledger: Ledger | str | Path | None = None,
    ) -> Runner:
        """Go on from a saved state; steps fed again after the snapshot replay their releases.

        A copied state, or one whose log is missing or behind the ledger, goes on as a new run:
        new noise, new charges, and a NewRun warning.
        """
        folder = Path(path)
        about = read_packed(folder / "run.dps", kind="run")
        find(about["name"])  # its module knows the classes that the snapshot holds
        snapshot = _newest_snapshot(folder)
        known_secret = Secret.of(secret) if secret is not None else Secret.load(beside(folder))
        if known_secret.key("check", about["run"]) != about["secret check"]:
            raise StateError(
                f"{folder} was made with another secret; name the right one, or start a new run"
            )
        if ledger is None:
            if not (folder / "ledger").exists():
                raise StateError(f"{folder} keeps its budget in another ledger; pass ledger=")
            ledger = Ledger(folder / "ledger")
            if ledger.identity() != snapshot["own ledger"]:
                raise StateError(
                    f"{folder} is a copy, its ledger too; two copies of a book cannot keep one "
                    "budget; pass ledger= with the book that counts"
                )
        runner = cls(
            unpack(about["mechanism"], kind="mechanism"),
            secret=known_secret,
            run_id=snapshot["run"],
            ledger=ledger,
            dataset=about["dataset"],
            query=about["query"],
        )
        runner._restore(folder, snapshot)
        return runner

    @classmethod
    def resume(
        cls,
        path: str | Path,
        mechanism: Mechanism,
        *,
        secret: Secret | bytes | str | Path | None = None,
        ledger: Ledger | str | Path | None = None,
        dataset: str = "stream",
        query: str = "",
    ) -> Runner:
        """A run that is fed from its first step each time, such as a file that grows.

        On first use it makes the state directory; later it replays: the same data publish the
        same values and charge nothing, appended steps are new, changed data raise NoiseReuse.
        """
        folder = Path(path)
        if not (folder / "run.dps").exists():
            keep = secret if secret is not None or not beside(folder).exists() else beside(folder)
            runner = cls(mechanism, secret=keep, ledger=ledger, dataset=dataset, query=query)
            runner.save(folder)
            return runner
        runner = cls.load(folder, secret=secret, ledger=ledger)
        asked, kept = (mechanism, dataset, query), (runner.mechanism, runner.dataset, runner.query)
        if asked != kept:
            runner.close()
            raise StateError(
                f"{folder} was made for {kept}; asked for {asked}; use the same parameters, or a "
                "new state directory (a new run, charged anew)"
            )
        if runner._logged_from > 0:
            raise StateError(
                f"{folder} is logged from step {runner._logged_from} on only, so it cannot start "
                "again from step 0; use Runner.load and feed the steps that follow its snapshot"
            )
        runner.steps_done, runner._chain, runner._finished = 0, bytes(16), False
        runner._state = mechanism.start()
        return runner

    def close(self) -> None:
        """Release the state directory and the ledger file."""
        if self._log is not None:
            self._log.close()
        self._ledger.close()

    @property
    def left(self) -> Fraction:
        """What may still be spent in the window that ends at the newest step."""
        return self._ledger.left(self.dataset, max(self.steps_done - 1, 0))

    @property
    def ledger(self) -> Ledger:
        """The book that this run charges."""
        return self._ledger

    def fingerprint(self) -> str:
        """Digest of everything that fixes the releases besides the data."""
        facts = (
            repr(self.mechanism),
            type(self.mechanism).__qualname__,
            self.dataset,
            self.query,
            tuple(noise_versions()),
        )
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def _batch(self, block: Integers) -> Iterator[list[Release]]:
        """Steps of one batch: log all digests, then charge and draw step by step."""
        first, chain, digests = self.steps_done, self._chain, []
        for row in block:
            content = len(row).to_bytes(8, "little") + row.astype("<i8").tobytes()
            chain = chain_digest(self._digest_key, chain, content)
            digests.append(chain)
        if self._log is not None:
            self._log.record(first, digests)

        def digest_at(step: int) -> str:
            return digests[step - first].hex() if 0 <= step - first < len(digests) else ""

        ahead = first + len(block) - 1 if self.mechanism.steady else -1
        for offset, row in enumerate(block):
            self._spend.begin(first + offset, digest_at, ahead=ahead)
            try:
                self._state, releases = self.mechanism.step(self._state, row, self._spend)
            except BaseException:
                self._connect()  # a second try may replay what this one has already drawn
                raise
            self.steps_done, self._chain = first + offset + 1, digests[offset]
            yield releases

    def _checked(self, block: np.ndarray[Any, np.dtype[np.float64]]) -> Integers:
        if self._finished:
            raise InvalidInput("this stream was finished; start a new run for a new stream")
        if self._bins is not None and block.shape[1] != self._bins:
            raise InvalidInput(
                f"every step must have {self._bins} bins, as the first one; got {block.shape[1]}"
            )
        checked = self.mechanism.check(block)
        self._bins = block.shape[1]
        return checked

    def _connect(self) -> None:
        """(Re)open the door to noise for this run."""
        self._ledger.register(self.dataset, self.run_id.hex(), self.fingerprint())
        self._digest_key = self._secret.key("input digest", self.run_id)
        self._spend = Spend(
            run=self.run_id,
            key=self._secret.key("runner noise", self.run_id),
            ledger=self._ledger,
            dataset=self.dataset,
            query=self.query,
        )

    def _attach(self, folder: Path) -> None:
        """Make the state directory: who this run is, its log, its secret, its ledger."""
        if (folder / "run.dps").exists():
            raise StateError(f"{folder} holds another run; load it, or save to a new directory")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._secret.fresh and self._secret.path is None:
            self._secret.write(beside(folder))
        if self._ledger.path is None:
            self._ledger = self._ledger.persist(folder / "ledger")
            self._connect()
        about = {
            "name": name_of(self.mechanism),
            "mechanism": pack(self.mechanism, kind="mechanism"),
            "dataset": self.dataset,
            "query": self.query,
            "run": self.run_id,
            "secret check": self._secret.key("check", self.run_id),
        }
        write_packed(folder / "run.dps", about, kind="run")
        self._log, self._folder = InputLog(self._log_path(folder), run=self.run_id), folder
        self._logged_from = self.steps_done

    def _restore(self, folder: Path, snapshot: dict[str, Any]) -> None:
        """Take over a snapshot; if its log is not the one it was taken with, as a new run."""
        self._state = unpack(snapshot["state"], kind="mechanism state")
        self.steps_done, self._bins = snapshot["steps"], snapshot["bins"]
        self._chain, self._finished, self._folder = snapshot["chain"], snapshot["finished"], folder
        self._logged_from = snapshot["logged from"]
        path = self._log_path(folder)
        if path.exists():
            log = InputLog(path, run=self.run_id)
            charged = self._ledger.newest_step(self.dataset, self.run_id.hex())
            if log.identity == snapshot["log"] and charged <= max(log.last, self.steps_done - 1):
                self._log = log
                return
            log.close()
        warnings.warn(
            f"{folder} is a copy, or its log is missing or older than the ledger: it goes on as a "
            "new run with new noise and new charges",
            NewRun,
            stacklevel=3,
        )
        self.run_id = mint_run_id()
        self._connect()
        self._log = InputLog(self._log_path(folder), run=self.run_id)
        self._logged_from = self.steps_done
        about = read_packed(folder / "run.dps", kind="run")
        about |= {"run": self.run_id, "secret check": self._secret.key("check", self.run_id)}
        write_packed(folder / "run.dps", about, kind="run")
        self.save(folder)

    def _log_path(self, folder: Path) -> Path:
        return folder / f"inputs-{self.run_id.hex()[:16]}.log"

    def _own_ledger(self, folder: Path) -> bool:
        own = self._ledger.path is not None and self._ledger.path.parent.resolve()
        return own == folder.resolve()


def _newest_snapshot(folder: Path) -> dict[str, Any]:
    """The last whole snapshot: writing one is atomic, an older generation covers a bad medium."""
    try:
        snapshot: dict[str, Any] = read_packed(folder / "snapshot.dps", kind="snapshot")
    except StateError:
        if not (folder / "snapshot.1.dps").exists():
            raise
        snapshot = read_packed(folder / "snapshot.1.dps", kind="snapshot")
    return snapshot
