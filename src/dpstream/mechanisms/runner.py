"""Run a mechanism over a stream: digest, log, charge, draw, publish; survive a restart.

A Runner's state directory:

run.dps           mechanism, dataset, run id, a check of the secret
snapshot.dps      the newest state; snapshot.1.dps the one before
inputs-<run>.log  digests of every later step, durable before its noise
ledger            the book, unless the run shares another

`privacy/state/run_directory.py` says how the files and the ledger are tied to each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from dpstream.errors import InvalidInput, InvalidParameter, StateError
from dpstream.mechanisms import find, name_of
from dpstream.mechanisms.base import Mechanism, as_block
from dpstream.mechanisms.counters.blt import BltCounter
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
    GivenLedger,
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
from dpstream.privacy.state.secret import secret_path
from dpstream.records import Integers, Position, Reals, Release

PAN_PRIVATE = "PanPrivateRunner"
"""The kind of run that `pan_private.py` keeps in such a directory."""

_BATCH = 1024  # steps whose digests, and steady charges, become durable together


class RunnerProgress(NamedTuple):
    """Where a run stands; replaced as a whole, so that an interrupt never leaves half a step."""

    state: Any
    steps: int = 0
    chain: bytes = bytes(16)  # of no input


class Runner:
    """A mechanism, its state and its budget, one step at a time, in one thread of one process.

    `state` names a directory that lets the run go on after a stop. The first Runner makes it; from
    then on every step is logged there before its noise is drawn, and `save` writes a snapshot. A
    later Runner of the same mechanism goes on from the last snapshot: the steps that follow it are
    fed again, and publish the same values. With `replay` it goes on from its first step, for data
    that are fed whole each time, such as a file that grows: the same data publish the same values
    and charge nothing, appended steps are new, changed data raise NoiseReuse.

    A state that is a copy, or older than what its ledger has seen of it, or has lost a file, is
    refused, and so is a ledger that was rolled back. `new_run=True` goes on from the snapshot all
    the same, as a new run: new noise, new charges.

    Without `secret` a fresh one lives in memory; with `state` it is written beside the directory
    (`<state>.secret`): back it up, without it the run cannot go on. `ledger` is a Ledger, a path,
    or None for a book that this run does not share. `name`: what the ledger calls the run. `clock`
    says in words what one step is; it must be that of the dataset's book. `run_id` is for tests: a
    run id is otherwise minted, so that no two runs see the same noise.

    >>> from dpstream.mechanisms import Sample
    >>> runner = Runner(Sample(epsilon=1, window=2))
    >>> [release.paid for count in (5, 7, 9) for release in runner.step([count])]
    [True, False, True]
    """

    def __init__(
        self,
        mechanism: Mechanism,
        *,
        state: str | Path | None = None,
        secret: Secret | bytes | str | Path | None = None,
        ledger: GivenLedger = None,
        dataset: str = "stream",
        name: str = "",
        clock: str = "steps",
        analyst: str = "",
        replay: bool = False,
        new_run: bool = False,
        run_id: bytes | None = None,
    ) -> None:
        if new_run and replay:
            raise InvalidParameter(
                "a new run goes on from a snapshot, and a replay repeats a run from its first "
                "step; choose new_run or replay"
            )
        folder = None if state is None else Path(state)
        saved = None if folder is None else SavedRun.find(folder)
        if saved is not None:
            mechanism = as_begun(mechanism, saved.mechanism)
        self.mechanism, self.dataset, self.name = mechanism, dataset, name
        self._analyst = analyst
        self._progress = RunnerProgress(mechanism.start())
        self._bins: int | None = None
        self.directory: RunDirectory | None = None
        self._logged_from = 0
        self._finished = self._closed = False
        self._ended: int | None = None  # the steps after which this run was once finished
        self._own_ledger = not isinstance(ledger, Ledger)
        with ExitStack() as undo:
            if saved is None:
                if secret is None and folder is not None and secret_path(folder).exists():
                    secret = secret_path(folder)
                self._secret = Secret.of(secret)
                self._ledger = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
            else:
                saved.refuse_others(mechanism, dataset, name)
                self._secret = known_secret(saved.folder, saved.about, secret)
                if new_run and not isinstance(ledger, Ledger | None):
                    self._ledger = Ledger(ledger)  # a new run may be charged to another one
                else:
                    self._ledger = open_ledger(saved.folder, saved.about, ledger)
            undo.callback(self.close)
            if saved is not None and new_run:
                saved.take_for_new_run(self._ledger)
            elif saved is not None:
                self.directory = saved.open(self._secret, self._ledger)
                run_id = self.directory.run
            self.run_id = mint_run_id() if run_id is None else run_id
            asked = dataclasses.replace(mechanism.terms(), clock=clock)
            self._ledger.admit(dataset, asked, type(mechanism).__name__)
            self._connect()
            if saved is not None:
                self._take_over(saved)
            elif folder is not None:
                self.attach(folder)
                self.save()
            if replay:
                self._rewind()
            undo.pop_all()

    def step(
        self, x: npt.ArrayLike, *, positions: Mapping[str, Position] | None = None
    ) -> list[Release]:
        """Feed one step (a number, or one number per bin); return what may be published now.

        `positions`: how far a live source was read for it, to be kept in the state directory.

        >>> from dpstream.mechanisms import Uniform
        >>> from dpstream.mechanisms.runner import Runner
        >>> with Runner(Uniform(epsilon=1, window=2)) as runner:
        ...     [release.step for release in runner.step([5, 7])]
        [0]
        """
        row = np.atleast_1d(np.asarray(x))
        batches = self.feed(row[None], positions=positions)
        return [release for batch in batches for release in batch]

    def feed(
        self, data: npt.ArrayLike, *, positions: Mapping[str, Position] | None = None
    ) -> Iterator[list[Release]]:
        """Feed many steps (steps x bins); yield each step's releases.

        The whole block is checked before its first step. Digests are logged, and charges that
        come every step are written, a batch at a time.

        >>> from dpstream.mechanisms import Uniform
        >>> from dpstream.mechanisms.runner import Runner
        >>> with Runner(Uniform(epsilon=1, window=2)) as runner:
        ...     sum(len(releases) for releases in runner.feed([[5, 7], [6, 6], [4, 9]]))
        3
        """
        block = self._checked(as_block(data))
        while len(block):
            size = min(_BATCH - self.steps_done % _BATCH, len(block))
            yield from self._batch(block[:size], positions)
            block = block[size:]

    def finish(self) -> list[Release]:
        """The stream has ended: return what a delay still held back.

        Saved afterwards, a run remembers it: the same steps may be repeated, none may follow.

        >>> from dpstream.mechanisms import Spas
        >>> from dpstream.mechanisms.runner import Runner
        >>> with Runner(Spas(epsilon=1, window=4)) as runner:
        ...     known = [release for n in range(9) for release in runner.step([n])]
        ...     len(known) + len(runner.finish())
        9
        """
        if self._finished:
            return []
        state, steps, chain = self._progress
        if self._ended not in (None, steps):
            raise StateError(
                f"this run was finished after {self._ended} steps, and what a delay held back then "
                f"is published; feed the same steps before you finish it again; got {steps}"
            )
        if self.directory is not None:
            self.directory.finish(steps)
        logged = self.directory is not None
        self._spend.begin(max(steps - 1, 0), lambda _: chain.hex(), verified=logged)
        state, releases = self.mechanism.finish(state, self._spend)
        self._progress, self._finished = RunnerProgress(state, steps, chain), True
        return releases

    def save(self) -> None:
        """Write a snapshot to the state directory: a later Runner goes on from here.

        >>> from dpstream.mechanisms import Uniform
        >>> from dpstream.mechanisms.runner import Runner
        >>> from tempfile import mkdtemp
        >>> state = mkdtemp() + "/state"
        >>> with Runner(Uniform(epsilon=1, window=2), state=state) as runner:
        ...     _ = runner.step([5, 7])
        ...     runner.save()
        >>> with Runner(Uniform(epsilon=1, window=2), state=state) as runner:
        ...     runner.steps_done
        1
        """
        if self.directory is None:
            raise StateError("this run has no state directory; give Runner(..., state=PATH)")
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
        write_snapshot(self.directory.folder, snapshot)
        self.directory.log.forget_before(self.steps_done)

    def close(self) -> None:
        """Release the state directory and a ledger of its own; a new Runner may go on.

        A Ledger that was given stays open: others may use it.

        >>> from dpstream.mechanisms import Uniform
        >>> from dpstream.mechanisms.runner import Runner
        >>> runner = Runner(Uniform(epsilon=1, window=2))
        >>> runner.close()
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
        facts = ("mechanism", self.mechanism, self.dataset, self.name, tuple(noise_versions()))
        return self._secret.fingerprint(self.run_id, canonical(facts))

    def _batch(
        self, block: Integers, positions: Mapping[str, Position] | None
    ) -> Iterator[list[Release]]:
        """Steps of one batch: log all digests, then charge and draw step by step."""
        first, digests = self.steps_done, self._digests(block)

        def digest_at(step: int) -> str:
            return digests[step - first].hex() if 0 <= step - first < len(digests) else ""

        self._spend.new_batch()
        ahead = first + len(block) - 1 if self.mechanism.constant_charges else -1
        if self.directory is not None:
            self.directory.record(first, digests, positions=positions)
        for offset, row in enumerate(block):
            step = first + offset
            if self.steps_done != step:
                raise InvalidInput("this run has moved on since this feed was begun; begin again")
            self._spend.begin(step, digest_at, ahead=ahead, verified=self.directory is not None)
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
        size = block.shape[1].to_bytes(8, "little")
        for row in block.astype("<i8"):
            chain = chain_digest(self._digest_key, chain, size + row.tobytes())
            digests.append(chain)
        return digests

    def _checked(self, block: Reals) -> Integers:
        if self._closed:
            raise StateError("this run is closed; go on with a new Runner(..., state=...)")
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
        """Open, or open again, the one way to noise for this run."""
        fingerprint = self.fingerprint()
        self._ledger.register(self.dataset, self.run_id.hex(), fingerprint, analyst=self._analyst)
        self._digest_key = self._secret.key("input digest", self.run_id)
        self._spend = Spend(
            run=self.run_id,
            key=self._secret.noise_key(self.run_id, fingerprint),
            ledger=self._ledger,
            dataset=self.dataset,
            query=self.name,
        )

    def attach(self, folder: Path, *, kind: str = "Runner", more: About | None = None) -> None:
        """Make the state directory: who this run is, its log, its secret, its ledger.

        `kind` and `more` are for those who keep a run of their own around this one.
        """
        if self.steps_done:
            raise StateError(
                "a state directory is made before a run's first step: the input of its steps must "
                "be logged before their noise is drawn"
            )
        if (folder / "run.dps").exists():
            raise StateError(f"{folder} holds another run; name another place")
        make_empty(folder)
        if self._secret.fresh and self._secret.path is None:
            self._secret.write(secret_path(folder))
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
                "query": self.name,
                **more,
            },
            instead=instead,
        )
        self._logged_from = self.steps_done

    def _take_over(self, saved: SavedRun) -> None:
        """Go on from a snapshot; without its directory, as the new run that this runner is."""
        snapshot = saved.snapshot
        state = unpack(snapshot["state"], kind="mechanism state")
        steps, chain = snapshot["steps"], snapshot["chain"]
        self._bins, self._finished = snapshot["bins"], snapshot["finished"]
        if self.directory is None:
            self._spend.begin(steps, lambda _: chain.hex())
            self._progress = RunnerProgress(rebuild(state, self._pay_again), steps, chain)
            self._sign(saved.folder, "Runner", {}, instead=True)
            self.save()
            return
        self._progress = RunnerProgress(state, steps, chain)
        self._logged_from = snapshot["logged from"]
        if not self._finished:
            self._ended = self._ledger.known(self.run_id.hex()).finished

    def _rewind(self) -> None:
        """Begin again at the first step; what was finished may be repeated, and no more."""
        if self._logged_from > 0:
            raise StateError(
                f"this run is logged from step {self._logged_from} on only, so it cannot start "
                "again from step 0; leave replay out and feed what follows its snapshot"
            )
        if self._finished:
            self._ended = self.steps_done
        self._progress, self._finished = RunnerProgress(self.mechanism.start()), False

    def _pay_again(self, item: Any) -> Any:
        """What another run has paid for and this one would draw under, it pays in full.

        (Values paid for one by one cannot be: `Spend` refuses draws under another run's `Paid`,
        and mechanisms that keep one begin afresh.)
        """
        return self._spend.adopt(item) if isinstance(item, Interval | Cover) else item


def mechanism_of(about: About) -> Mechanism:
    """The mechanism that a run has begun with."""
    find(about["name"])  # its module knows the classes that the files hold
    mechanism: Mechanism = unpack(about["mechanism"], kind="mechanism")
    return mechanism


def as_begun(mechanism: Mechanism, begun: Mechanism) -> Mechanism:
    """The mechanism with what the run has found on the spot, maybe on another machine."""
    return mechanism.as_begun(begun) if isinstance(mechanism, BltCounter) else mechanism


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedRun:
    """What a Runner's state directory says about its run, and the last whole snapshot."""

    folder: Path
    about: About
    snapshot: dict[str, Any]

    @classmethod
    def find(cls, folder: Path) -> SavedRun | None:
        """The run and its last whole snapshot; an older generation covers a bad medium."""
        drop_unbegun(folder)
        about = read_about(folder)
        if about is None:
            return None
        if "mechanism" not in about or about["kind"] == PAN_PRIVATE:
            raise StateError(f"{folder} holds the state of a {about['kind']}, not of a Runner")
        try:
            snapshot = read_packed(folder / "snapshot.dps", kind="snapshot")
        except StateError:
            if not (folder / "snapshot.1.dps").exists():
                raise
            snapshot = read_packed(folder / "snapshot.1.dps", kind="snapshot")
        return cls(folder=folder, about=about, snapshot=snapshot)

    @property
    def mechanism(self) -> Mechanism:
        """What the run has begun with."""
        return mechanism_of(self.about)

    def refuse_others(self, mechanism: Mechanism, dataset: str, name: str) -> None:
        """Another mechanism, dataset or name is another run."""
        begun = (self.mechanism, self.about["dataset"], self.about["query"])
        if (mechanism, dataset, name) != begun:
            raise StateError(
                f"{self.folder} was made for {_describe(*begun)}; asked for "
                f"{_describe(mechanism, dataset, name)}; use the same parameters, or a new state "
                "directory (a new run, charged anew)"
            )

    def open(self, secret: Secret, ledger: Ledger) -> RunDirectory:
        """The directory, to go on with its run; refused if it is not what the ledger has seen."""
        if self.snapshot["run"] != self.about["run"]:
            raise StateError(
                f"{self.folder} holds a snapshot of another run than its run.dps names; restore "
                "both, or start a new run that is charged anew (new_run=True)"
            )
        with ExitStack() as undo:  # a refused directory must not stay locked
            directory = open_run(self.folder, about=self.about, secret=secret, ledger=ledger)
            undo.callback(directory.close)
            self._refuse_rolled_back(ledger)
            undo.pop_all()
        return directory

    def _refuse_rolled_back(self, ledger: Ledger) -> None:
        head, steps = self.snapshot["ledger head"], self.snapshot["steps"]
        told = steps - 1 if steps > self.snapshot["logged from"] else -1
        refuse_rolled_back(self.folder, ledger, head, run=self.about["run"], told=told)

    def take_for_new_run(self, ledger: Ledger) -> None:
        """A new run may begin from this snapshot: nobody goes on with the old one just now.

        Its ledger may be another one, but no copy of the old one: two copies of a book cannot keep
        one budget.
        """
        if self.about["own ledger"] and ledger.place == self.folder.resolve() / "ledger":
            refuse_moved(self.folder, self.about, ledger)
        if ledger.replaces(self.about["ledger"]):
            self._refuse_rolled_back(ledger)
        log = self.folder / self.about["log"]
        if log.exists() and log.stat().st_size:
            InputLog(log, run=self.about["run"]).close()  # it is locked while somebody goes on


def write_snapshot(folder: Path, snapshot: dict[str, Any]) -> None:
    """Put a new snapshot in place of the last one, which becomes the older generation."""
    current = folder / "snapshot.dps"
    with suppress(StateError):  # there is none, or it is damaged and the older one was used
        last = read_packed(current, kind="snapshot")
        write_packed(folder / "snapshot.1.dps", last, kind="snapshot")
    write_packed(current, snapshot, kind="snapshot")


def _describe(mechanism: Mechanism, dataset: str, name: str) -> str:
    """A run's parameters, for people."""
    fields = [f.name for f in dataclasses.fields(mechanism)]  # type: ignore[arg-type]
    given = ", ".join(f"{field}={getattr(mechanism, field)}" for field in fields)
    return f"{type(mechanism).__name__}({given}) on dataset {dataset!r}, query {name!r}"
