"""Run a mechanism over a stream: digest, log, charge, draw, publish; survive a restart.

A Runner's state directory:

run.dps           mechanism, dataset, run id, a check of the secret
snapshot.dps      the newest state; snapshot.1.dps the one before
inputs-<run>.log  digests of every later step, durable before its noise
ledger            the book, unless the run shares another

`privacy/run_directory.py` says how the files and the ledger are tied to each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeGuard

import numpy as np

from dpstream.errors import InvalidInput, StateError
from dpstream.mechanisms import find, name_of
from dpstream.mechanisms.base import Mechanism, as_block
from dpstream.privacy.ledger.charges import Cover, Interval, chain_digest
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.spend import Spend, noise_versions
from dpstream.privacy.state import (
    InputLog,
    Secret,
    mint_run_id,
    pack,
    read_packed,
    rebuild,
    unpack,
    write_packed,
)
from dpstream.privacy.state.identity import canonical
from dpstream.privacy.state.run_directory import (
    About,
    RunDirectory,
    drop_unbegun,
    known_secret,
    make_empty,
    make_run,
    open_ledger,
    open_run,
    read_about,
    refuse_moved,
    refuse_rolled_back,
)
from dpstream.privacy.state.secret import beside
from dpstream.records import Integers, Reals, Release

_BATCH = 1024  # steps whose digests, and steady charges, become durable together
_NO_INPUT = bytes(16)  # the digest chain before the first step


class RunnerProgress(NamedTuple):
    """Where a run stands; replaced as a whole, so that an interrupt never leaves half a step."""

    state: Any
    steps: int = 0
    chain: bytes = _NO_INPUT


class Runner:
    """A mechanism, its state and its budget, one step at a time, in one thread of one process.

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
        clock: str = "steps",
    ) -> None:
        """`clock` says in words what one step is; it must be that of the dataset's book."""
        self.mechanism, self.dataset, self.query = mechanism, dataset, query
        self.run_id = mint_run_id() if run_id is None else run_id
        self._secret = Secret.of(secret)
        self._ledger = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
        self._own_ledger = not isinstance(ledger, Ledger)
        self._progress = RunnerProgress(mechanism.start())
        self._bins: int | None = None
        self.directory: RunDirectory | None = None
        self._logged_from = 0
        self._finished = self._closed = False
        self._ended: int | None = None  # the steps after which this run was once finished
        asked = dataclasses.replace(mechanism.terms(), clock=clock)
        self._ledger.admit(dataset, asked, type(mechanism).__name__)
        self._connect()

    def step(self, x: Any, *, positions: Any = None) -> list[Release]:
        """Feed one step (a number, or one number per bin); return what may be published now.

        `positions`: how far a live source was read for it, to be kept in the state directory.
        """
        row = np.atleast_1d(np.asarray(x))
        batches = self.feed(row[None], positions=positions)
        return [release for batch in batches for release in batch]

    def feed(self, data: Any, *, positions: Any = None) -> Iterator[list[Release]]:
        """Feed many steps (steps x bins); yield each step's releases.

        The whole block is checked before its first step. Digests are logged, and charges that
        come every step are written, a batch at a time.
        """
        block = self._checked(as_block(data))
        while len(block):
            size = min(_BATCH - self.steps_done % _BATCH, len(block))
            yield from self._batch(block[:size], positions)
            block = block[size:]

    def finish(self) -> list[Release]:
        """The stream has ended: return what a delay still held back.

        Saved afterwards, a run remembers it: the same steps may be repeated, none may follow.
        """
        if self._finished:
            return []
        state, steps, chain = self._progress
        verified = self.directory is not None
        if self._ended not in (None, steps):
            raise StateError(
                f"this run was finished after {self._ended} steps, and what a delay held back then "
                f"is published; feed the same steps before you finish it again; got {steps}"
            )
        if self.directory is not None:
            self.directory.finish(steps)
        self._spend.begin(max(steps - 1, 0), lambda _: chain.hex(), verified=verified)
        state, releases = self.mechanism.finish(state, self._spend)
        self._progress, self._finished = RunnerProgress(state, steps, chain), True
        return releases

    def save(self, path: str | Path) -> None:
        """Write the state to a directory, and from now on log every step there before it draws.

        A secret that this run drew for itself is written beside the directory (`<path>.secret`):
        back it up, without it the state cannot go on.
        """
        folder = Path(path)
        if self.directory is None:
            self.attach(folder)
        elif self.directory.folder.resolve() != folder.resolve():
            raise StateError(
                f"this run is kept in {self.directory.folder}; a second copy in {folder} would be "
                "another run; save to the first place"
            )
        assert self.directory is not None
        snapshot = {
            "state": pack(self._progress.state, kind="mechanism state"),
            "steps": self._progress.steps,
            "chain": self._progress.chain,
            "bins": self._bins,
            "finished": self._finished,
            "logged from": self._logged_from,
            "ledger head": self._ledger.head(),
            "run": self.run_id,
        }
        _write_snapshot(folder, snapshot)
        self.directory.log.forget_before(self.steps_done)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        secret: Secret | bytes | str | Path | None = None,
        ledger: Ledger | str | Path | None = None,
        new_run: bool = False,
        clock: str = "steps",
    ) -> Runner:
        """Go on from a saved state; steps fed again after the snapshot replay their releases.

        A state that is a copy, or older than what its ledger has seen of it, or has lost a file,
        is refused, and so is a ledger that was rolled back. `new_run=True` goes on from the
        snapshot all the same, as a new run: new noise, new charges.
        """
        drop_unbegun(Path(path))
        saved = SavedRun.read(Path(path))
        find(saved.about["name"])  # its module knows the classes that the snapshot holds
        kept = known_secret(saved.folder, saved.about, secret)
        with ExitStack() as undo:
            if new_run and _is_path(ledger):
                book = Ledger(ledger)
            else:
                book = open_ledger(saved.folder, saved.about, ledger)
            if not isinstance(ledger, Ledger):
                undo.callback(book.close)
            directory = None
            if new_run:
                saved.take_for_new_run(book)
            else:
                directory = saved.open(kept, book)
                undo.callback(directory.close)
            runner = cls(
                unpack(saved.about["mechanism"], kind="mechanism"),
                secret=kept,
                run_id=None if directory is None else directory.run,
                ledger=book,
                dataset=saved.about["dataset"],
                query=saved.about["query"],
                clock=clock,
            )
            runner._own_ledger = not isinstance(ledger, Ledger)
            undo.callback(runner.close)
            runner._take_over(saved, directory)
            undo.pop_all()
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
        drop_unbegun(folder)
        if not (folder / "run.dps").exists():
            keep = secret if secret is not None or not beside(folder).exists() else beside(folder)
            runner = cls(mechanism, secret=keep, ledger=ledger, dataset=dataset, query=query)
            try:
                runner.save(folder)
            except BaseException:
                runner.close()  # a directory that was not made whole must not stay locked
                raise
            return runner
        runner = cls.load(folder, secret=secret, ledger=ledger)
        asked, kept = (mechanism, dataset, query), (runner.mechanism, runner.dataset, runner.query)
        if asked != kept or runner._logged_from > 0:
            runner.close()
            raise StateError(
                f"{folder} was made for {_shown(*kept)}; asked for {_shown(*asked)}; use the same "
                "parameters, or a new state directory (a new run, charged anew)"
                if asked != kept
                else f"{folder} is logged from step {runner._logged_from} on only, so it cannot "
                "start again from step 0; use Runner.load and feed what follows its snapshot"
            )
        runner._ended = runner.steps_done if runner._finished else None
        runner._progress, runner._finished = RunnerProgress(mechanism.start()), False
        return runner

    def close(self) -> None:
        """Release the state directory and a ledger of its own; the run is loaded to go on.

        A Ledger that was given stays open: others may use it.
        """
        if self.directory is not None:
            self.directory.close()
        if self._own_ledger:
            self._ledger.close()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def steps_done(self) -> int:
        """How many steps were taken."""
        return self._progress.steps

    @property
    def ended(self) -> bool:
        """Was this run, which is repeated now, once finished after as many steps?"""
        return self._ended is not None and self._ended == self.steps_done

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
        facts = ("mechanism", self.mechanism, self.dataset, self.query, tuple(noise_versions()))
        return self._secret.fingerprint(self.run_id, canonical(facts))

    def _batch(self, block: Integers, positions: Any) -> Iterator[list[Release]]:
        """Steps of one batch: log all digests, then charge and draw step by step."""
        first, digests = self.steps_done, self._digests(block)

        def digest_at(step: int) -> str:
            return digests[step - first].hex() if 0 <= step - first < len(digests) else ""

        self._spend.new_batch()
        ahead = first + len(block) - 1 if self.mechanism.steady else -1
        logged: RunDirectory | None = None
        for offset, row in enumerate(block):
            step = first + offset
            if self.steps_done != step:
                raise InvalidInput("this run has moved on since this feed was begun; begin again")
            if self.directory is not logged and self.directory is not None:  # or saved meanwhile
                self.directory.record(step, digests[offset:], positions=positions)
                logged = self.directory
            self._spend.begin(step, digest_at, ahead=ahead, verified=logged is not None)
            try:
                state, releases = self.mechanism.step(self._progress.state, row, self._spend)
            except BaseException:
                self._connect()  # a second try may replay what this one has already drawn
                raise
            self._progress = RunnerProgress(state, step + 1, digests[offset])
            yield releases

    def _digests(self, block: Integers) -> list[bytes]:
        """One digest for each step, of its input and all before it."""
        chain, digests = self._progress.chain, []
        size, rows = block.shape[1].to_bytes(8, "little"), block.astype("<i8").tobytes()
        for start in range(0, len(rows), 8 * block.shape[1]):
            content = size + rows[start : start + 8 * block.shape[1]]
            chain = chain_digest(self._digest_key, chain, content)
            digests.append(chain)
        return digests

    def _checked(self, block: Reals) -> Integers:
        if self._closed:
            raise StateError("this run is closed; load it again to go on")
        if self._finished:
            raise InvalidInput("this stream was finished; start a new run for a new stream")
        if self._ended is not None and self.steps_done + len(block) > self._ended:
            raise StateError(
                f"this run was finished after {self._ended} steps, and what a delay held "
                f"back then is published; {self.steps_done + len(block)} steps need a new state "
                "directory (a new run, charged anew)"
            )
        if self._bins is not None and block.shape[1] != self._bins:
            raise InvalidInput(
                f"every step must have {self._bins} bins, as the first one; got {block.shape[1]}"
            )
        checked = self.mechanism.check(block)
        self._bins = block.shape[1]
        return checked

    def _connect(self) -> None:
        """(Re)open the door to noise for this run."""
        fingerprint = self.fingerprint()
        self._ledger.register(self.dataset, self.run_id.hex(), fingerprint)
        self._digest_key = self._secret.key("input digest", self.run_id)
        self._spend = Spend(
            run=self.run_id,
            key=self._secret.noise_key(self.run_id, fingerprint),
            ledger=self._ledger,
            dataset=self.dataset,
            query=self.query,
        )

    def attach(self, folder: Path, *, kind: str = "Runner", more: About | None = None) -> None:
        """Make the state directory: who this run is, its log, its secret, its ledger.

        `kind` and `more` are for those who keep a run of their own around this one.
        """
        drop_unbegun(folder)
        if (folder / "run.dps").exists():
            raise StateError(f"{folder} holds another run; load it, or save to a new directory")
        make_empty(folder)
        if self._secret.fresh and self._secret.path is None:
            self._secret.write(beside(folder))
        self._ledger.persist(folder / "ledger")  # a book in memory must not end before its run
        self._sign(folder, kind, more or {})

    def _sign(self, folder: Path, kind: str, more: About, *, instead: bool = False) -> None:
        self.directory = make_run(
            folder,
            kind=kind,
            run=self.run_id,
            dataset=self.dataset,
            secret=self._secret,
            ledger=self._ledger,
            log_name=f"inputs-{self.run_id.hex()[:16]}.log",
            more={
                "name": name_of(self.mechanism),
                "mechanism": pack(self.mechanism, kind="mechanism"),
                "query": self.query,
                **more,
            },
            instead=instead,
        )
        self._logged_from = self.steps_done

    def _take_over(self, saved: SavedRun, directory: RunDirectory | None) -> None:
        """Go on from a snapshot; without its directory, as the new run that this runner is."""
        snapshot = saved.snapshot
        state = unpack(snapshot["state"], kind="mechanism state")
        self._bins, self._finished = snapshot["bins"], snapshot["finished"]
        if directory is not None:
            self.directory, self._logged_from = directory, snapshot["logged from"]
            if not self._finished:
                self._ended = self._ledger.known(self.run_id.hex()).finished
            self._progress = RunnerProgress(state, snapshot["steps"], snapshot["chain"])
            return
        self._spend.begin(snapshot["steps"], lambda _: snapshot["chain"].hex())
        state = rebuild(state, self._pay_again)
        self._progress = RunnerProgress(state, snapshot["steps"], snapshot["chain"])
        self._sign(saved.folder, "Runner", {}, instead=True)
        self.save(saved.folder)

    def _pay_again(self, item: Any) -> Any:
        """What another run has paid for and this one would draw under, it pays in full.

        (Values paid for one by one cannot be: the door refuses draws under another run's `Paid`,
        and mechanisms that keep one begin afresh.)
        """
        return self._spend.adopt(item) if isinstance(item, Interval | Cover) else item


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedRun:
    """What a Runner's state directory says about its run, and the last whole snapshot."""

    folder: Path
    about: About
    snapshot: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> SavedRun:
        """The run and its last whole snapshot; an older generation covers a bad medium."""
        about = read_about(folder)
        if about is None:
            raise StateError(f"there is no run at {folder}: it has no run.dps")
        if "mechanism" not in about:
            raise StateError(f"{folder} holds the state of a {about['kind']}, not of a Runner")
        try:
            snapshot = read_packed(folder / "snapshot.dps", kind="snapshot")
        except StateError:
            if not (folder / "snapshot.1.dps").exists():
                raise
            snapshot = read_packed(folder / "snapshot.1.dps", kind="snapshot")
        return cls(folder=folder, about=about, snapshot=snapshot)

    def open(self, secret: Secret, ledger: Ledger) -> RunDirectory:
        """The directory, to go on with its run; refused if it is not what the ledger has seen."""
        if self.snapshot["run"] != self.about["run"]:
            raise StateError(
                f"{self.folder} holds a snapshot of another run than its run.dps names; restore "
                "both, or start a new run that is charged anew (new_run=True)"
            )
        found = open_run(self.folder, about=self.about, secret=secret, ledger=ledger)
        try:
            refuse_rolled_back(self.folder, ledger, self.snapshot["ledger head"])
        except BaseException:
            found.close()
            raise
        return found

    def take_for_new_run(self, ledger: Ledger) -> None:
        """A new run may begin from this snapshot: nobody goes on with the old one just now.

        Its ledger may be another one, but no copy of the old one: two copies of a book cannot keep
        one budget.
        """
        if self.about["own ledger"] and ledger.place == self.folder.resolve() / "ledger":
            refuse_moved(self.folder, self.about, ledger)
        if ledger.identity() == self.about["ledger"]:
            refuse_rolled_back(self.folder, ledger, self.snapshot["ledger head"])
        log = self.folder / self.about["log"]
        if log.exists() and log.stat().st_size:
            InputLog(log, run=self.about["run"]).close()  # it is locked while somebody goes on


def _write_snapshot(folder: Path, snapshot: dict[str, Any]) -> None:
    """Put a new snapshot in place of the last one, which becomes the older generation."""
    current = folder / "snapshot.dps"
    with suppress(StateError):  # there is none, or it is damaged and the older one was used
        last = read_packed(current, kind="snapshot")
        write_packed(folder / "snapshot.1.dps", last, kind="snapshot")
    write_packed(current, snapshot, kind="snapshot")


def _is_path(ledger: Ledger | str | Path | None) -> TypeGuard[str | Path]:
    return isinstance(ledger, str | Path)


def _shown(mechanism: Mechanism, dataset: str, query: str) -> str:
    """A run's parameters, for people."""
    values = vars(mechanism).items()
    fields = {f.name for f in dataclasses.fields(mechanism)}  # type: ignore[arg-type]
    given = ", ".join(f"{name}={value}" for name, value in values if name in fields)
    return f"{type(mechanism).__name__}({given}) on dataset {dataset!r}, query {query!r}"
