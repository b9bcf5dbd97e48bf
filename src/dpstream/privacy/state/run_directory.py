"""A run's directory and its ledger, and whether they still belong together.

Every kind of run that survives its process has one (a GROUP BY on either engine, a series query, a
Runner): `run.dps` says which run it is, the input log says what each step has read, and the ledger
is the witness of both. Noise is drawn from what they say, so before a draw:

- each start writes an epoch to the log, then to the ledger. A directory whose log lacks the
  ledger's newest epoch is an older copy; a process whose epoch is not the newest one stops.
- each step's digest is in the log, then in the ledger. A log that lacks steps takes them from the
  ledger; what differs is refused.
- the ledger is known by its file (inode and time of birth). A directory that carries its own
  ledger is copied with it, and nothing but this tells the copy from the original.

What a kill can leave is never refused: the log is ahead of the ledger, and nothing was drawn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpstream.errors import SecretError, ServerUnreachable, StateError
from dpstream.privacy.ledger.charges import KnownRun
from dpstream.privacy.ledger.ledger import Ledger, follow_moves
from dpstream.privacy.ledger.refusals import refuse_ended
from dpstream.privacy.ledger.store import LedgerPlace, as_ledger_place
from dpstream.privacy.state import (
    InputLog,
    Secret,
    WindowKeys,
    mint_run_id,
    pack,
    read_packed,
    write_packed,
)
from dpstream.privacy.state.durable_files import create_exclusive, erase, make_directory
from dpstream.privacy.state.identity import canonical, readable
from dpstream.privacy.state.input_log import types_digest
from dpstream.privacy.state.journal import Journal
from dpstream.privacy.state.mirrors import sync_mirror
from dpstream.privacy.state.secret import secret_path

FORMAT = 3
ANEW = "use a new state directory (a new run, charged anew)"
NEXT = "use a new state directory with --take-over (it begins with the next period, uncharged)"
"""Where units have periods."""

About = dict[str, Any]
Facts = dict[str, str]
GivenSecret = Secret | bytes | str | Path | None
GivenLedger = Ledger | str | LedgerPlace | None

_REMAINS = ("manifest-*.dps", "segments/*", "windows/*", "spark.dps", "snapshot*.dps", "rows-*.dps")
_DRAWN = ("windows/*.key", "windows/final", "rows-*.dps")  # what a run has that was charged


@dataclass(kw_only=True)
class RunDirectory:
    """An open directory; its log holds the lock."""

    folder: Path
    about: About
    secret: Secret
    ledger: Ledger
    log: InputLog
    owns_ledger: bool = False
    """Is the ledger closed with the directory?"""
    created: tuple[Path, ...] = ()
    """Files and folders that this start has made or will make, the outermost last; none for a run
    that goes on."""
    epoch_before: str = ""
    """The ledger's newest epoch of the run when the directory was opened."""
    _keys: WindowKeys | None = field(default=None, init=False)
    _epoch: str = field(default="", init=False)
    _reached: int = field(default=-1, init=False)
    """The newest step that the ledger knows; while the epoch is ours, nobody else adds to it."""

    @property
    def run(self) -> bytes:
        """The run's id."""
        run: bytes = self.about["run"]
        return run

    @property
    def dataset(self) -> str:
        """Whose book it is charged to."""
        dataset: str = self.about["dataset"]
        return dataset

    @property
    def abandoned(self) -> tuple[range, ...]:
        """Windows that are never published again: a backup was put back that lacks their keys."""
        return tuple(range(first, end) for first, end in self.about.get("abandoned", []))

    def record(self, step: int, digests: list[bytes], *, positions: Any = None) -> None:
        """Make the input of `step` and those after it durable: first in the log, then the ledger.

        Noise may be drawn for them when this returns. The first call begins an epoch.
        """
        self.begin()
        self.log.record(step, digests, ledger=self.ledger.head(), positions=positions)
        sync_mirror(self.folder)
        last = step + len(digests) - 1
        if last > self._reached:
            new = [digest.hex() for digest in digests[self._reached - last :]]
            types = types_digest(self.log.types[-1] if self.log.types else b"")
            run = self.run.hex()
            about = {"epoch": self._epoch, "types": types, "positions": positions}
            self.ledger.reach(self.dataset, run, last, new, **about)
            self._reached = last

    def begin(self) -> None:
        """Begin this start's epoch, if that was not done: in the log, then in the ledger.

        A kill between the two leaves an epoch that only the log has: nothing was drawn. Once it is
        in the ledger nobody else can add to what the ledger knows of the run, so what was compared
        when the directory was opened is compared again: another process may have gone on since.
        """
        if self._epoch:
            return
        epoch, run = mint_run_id().hex(), self.run.hex()
        self.log.begin(epoch)
        sync_mirror(self.folder)
        self.ledger.begin(self.dataset, run, epoch, after=self.epoch_before)
        _compare(self)
        if self._keys is not None:
            minted, final = self._keys.minted, self._keys.final
            _refuse_lost_keys(self, minted)
            self.ledger.note_windows(self.dataset, run, minted=minted, final=final, epoch=epoch)
        self._epoch, self._reached = epoch, self.ledger.known(run).reached

    def settle(self, step: int, *, endless: bool) -> None:
        """No recovery goes back beyond `step`; an endless run's files are compacted behind it.

        Other runs may begin again at their first step.
        """
        self.log.forget_before(step)
        if endless and self._epoch:
            self.log.compact_before(step)
            self.ledger.compact()
        sync_mirror(self.folder)  # before a source is told that it may forget

    def note_windows(self, minted: int, final: int) -> None:
        """Tell the ledger before a new key is used; without an epoch keys are only erased."""
        sync_mirror(self.folder)
        run, epoch = self.run.hex(), self._epoch or None
        minted = minted if epoch else 0
        self.ledger.note_windows(self.dataset, run, minted=minted, final=final, epoch=epoch)

    def finish(self, steps: int) -> None:
        """Tell the ledger that a series ends after these steps, before it is drawn to its end."""
        self.begin()
        self.ledger.note_finish(self.dataset, self.run.hex(), steps, epoch=self._epoch)

    def open_keys(self, *, derived_for_tests: bool = False) -> None:
        """Open the run's keys: not fewer than the ledger knows of, none that it knows as erased."""
        keys = WindowKeys(
            self.folder / "windows",
            self.secret,
            run=self.run,
            wrapping=wrapping_secrets(self.folder, self.about),
            derived_for_tests=derived_for_tests,
            witness=self.note_windows,
        )
        _refuse_lost_keys(self, keys.minted)
        known = self.ledger.known(self.run.hex())
        for window in range(keys.final, known.final):  # an older copy of the folder has them again
            keys.erase(window)
        self._keys = keys

    @property
    def keys(self) -> WindowKeys:
        """The keys of a GROUP BY's windows, once they are open."""
        assert self._keys is not None
        return self._keys

    def refuse_undone_erasure(self, step: int, chains: list[bytes]) -> None:
        """Refuse to go on from before a unit was erased, or from a state that still has it.

        `chains`: the digest chain before each erasure of the state at this step, and that of now.
        """
        erasure = self.ledger.known(self.run.hex()).erasure
        if erasure is None or step > erasure[0]:
            return
        if step < erasure[0] or bytes.fromhex(erasure[1]) not in chains:
            raise StateError(
                f"a unit was erased from {self.folder} before step {erasure[0]}, and the snapshot "
                f"of that is lost; going on from an older one would bring the unit back: restore "
                f"it, or {ANEW}"
            )

    @property
    def unused(self) -> bool:
        """Was it made just now, and nothing drawn?"""
        return bool(self.created) and self.log.unused

    def withdraw(self) -> None:
        """Take back what was made just now, if nothing was drawn: a second try begins afresh."""
        if not self.unused:
            return
        self.close()
        for path in self.created:
            if path.is_dir():
                with suppress(OSError):  # it holds something else
                    path.rmdir()
            else:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the lock; a mirror gets what came last, unless another goes on with it."""
        with suppress(StateError, ServerUnreachable):
            sync_mirror(self.folder, claim=False)
        self.log.close()
        if self.owns_ledger:
            self.ledger.close()


def read_about(folder: Path, *, kind: str | None = None) -> About | None:
    """What a directory says about its run; None if it holds none, and nothing of one."""
    path = folder / "run.dps"
    if not path.exists():
        _refuse_remains(folder)
        return None
    about: About = read_packed(path, kind="run")
    if about.get("format") != FORMAT:
        raise StateError(
            f"{folder} has state format {about.get('format')}; this version reads {FORMAT}; use "
            f"the version of dpstream that wrote it, or {ANEW}"
        )
    if kind is not None and about["kind"] != kind:
        raise StateError(
            f"{folder} holds the state of a {about['kind']}, not of a {kind}; name another place"
        )
    return about


def _refuse_remains(folder: Path) -> None:
    left = next((path for name in _REMAINS for path in folder.glob(name)), None)
    if left is not None:
        raise StateError(
            f"{folder} holds {left.relative_to(folder)} but no run.dps: it belongs to a run whose "
            f"noise must not meet other data; restore run.dps, or {ANEW}"
        )


def make_empty(folder: Path) -> None:
    """Make the directory of a run that begins; one that holds another run's remains is refused."""
    if str(folder).startswith(("s3:/", "gs:/", "az:/")):
        raise StateError(
            f"{folder} names a bucket, where only queries (dps.run, dps.run_all, dpstream sql, "
            "pipelines) keep their state; name a directory"
        )
    try:
        make_directory(folder, mode=0o700)
    except OSError as error:
        raise StateError(
            f"the state directory {folder} cannot be made: {error.strerror}; name another place"
        ) from None
    _refuse_remains(folder)
    for path in folder.glob("inputs*.log"):
        _drop_unused_log(path)


def _drop_unused_log(path: Path) -> None:
    """A kill while the directory was made may leave a log without a start: nothing was drawn."""
    with closing(Journal(path, kind="input log")) as journal:
        journal.acquire(wait=False)
        if len(journal.read_new()) > 1:
            raise StateError(
                f"{path.parent} has a log of published steps but no run.dps; restore it, or {ANEW}"
            )
        path.unlink()


def find_run(
    folder: Path,
    *,
    kind: str,
    facts: Facts,
    names: Mapping[str, str],
    dataset: str,
    given_secret: GivenSecret,
) -> tuple[About | None, Secret]:
    """What a query's directory says about its run, and the run's secret.

    Another query, dataset or secret than those of the run is refused. Without a run the directory
    is made, and the secret too where none is given. `names`: what users call a fact, by its key.
    """
    about = read_about(folder, kind=kind)
    if about is None:
        make_empty(folder)
        return None, Secret.of(secret_path(folder) if given_secret is None else given_secret)
    secret = known_secret(folder, about, given_secret)
    asked = {**facts, "dataset": canonical(dataset)}
    kept = {**about["facts"], "dataset": canonical(about["dataset"])}
    for key in asked | kept:
        if asked.get(key) != kept.get(key):
            raise StateError(
                f"{folder} belongs to another query: {names.get(key, key)} was "
                f"{readable(kept.get(key))} and is now {readable(asked.get(key))}; use the same "
                f"query, or {ANEW}; in a pipeline file, see what the change costs, and accept it: "
                "dpstream apply FILE"
            )
    return about, secret


def make_run(
    folder: Path,
    *,
    kind: str,
    run: bytes,
    dataset: str,
    secret: Secret,
    ledger: Ledger,
    more: About,
    log_name: str = "inputs.log",
    instead: bool = False,
) -> RunDirectory:
    """Make a run's directory, of which the folder exists; the log first, then `run.dps`.

    `instead`: in place of another run, which is over.
    """
    with ExitStack() as undo:
        log = undo.enter_context(closing(InputLog(folder / log_name, run=run, new=True)))
        about = {
            "format": FORMAT,
            "kind": kind,
            "run": run,
            "dataset": dataset,
            "log": log_name,
            "secret check": secret.key("check", run),
            "ledger": ledger.identity(),
            "own ledger": _is_own(folder, ledger),
            "ledger place": str(ledger.place),
            **more,
        }
        try:
            if instead:
                write_packed(folder / "run.dps", about, kind="run")
            else:
                create_exclusive(folder / "run.dps", pack(about, kind="run"))
        except FileExistsError:
            raise StateError(
                f"another run was begun in {folder} just now; name another place"
            ) from None
        sync_mirror(folder)  # a run that is charged must be found again
        undo.pop_all()
    return RunDirectory(folder=folder, about=about, secret=secret, ledger=ledger, log=log)


def open_run(folder: Path, *, about: About, secret: Secret, ledger: Ledger) -> RunDirectory:
    """Open a directory to go on with its run; what does not agree with its ledger is refused."""
    _refuse_other_secret(folder, about, secret)
    refuse_moved(folder, about, ledger)
    with ExitStack() as undo:  # a refused directory must not stay locked
        log = undo.enter_context(closing(InputLog(folder / about["log"], run=about["run"])))
        known = ledger.known(about["run"].hex())
        directory = RunDirectory(
            folder=folder,
            about=about,
            secret=secret,
            ledger=ledger,
            log=log,
            epoch_before=known.epoch,
        )
        _compare(directory)
        if str(ledger.place) != str(about["ledger place"]) and ledger.identity() != about["ledger"]:
            _follow_ledger(directory)
        undo.pop_all()
    return directory


def _follow_ledger(directory: RunDirectory) -> None:
    """Note where the ledger is since it was moved to a server, for all that look for it."""
    ledger, own = directory.ledger, _is_own(directory.folder, directory.ledger)
    where = {"own ledger": own, "ledger place": str(ledger.place), "ledger": ledger.identity()}
    directory.about = directory.about | where
    write_packed(directory.folder / "run.dps", directory.about, kind="run")


def keep_book(ledger: Ledger, folder: Path) -> None:
    """A book in memory must not end before a run that is kept: it moves to a file.

    To the one that the directory is charged to, or to a new one in it.
    """
    if ledger.path is not None:
        return
    about = read_about(folder)
    if about is None:
        ledger.persist(folder / "ledger")
    else:
        place = ledger_place(folder, about)
        _refuse_missing(place)
        Ledger(place).close()
        ledger.persist(place)


def open_ledger(folder: Path, about: About | None, given: GivenLedger) -> Ledger:
    """The ledger that is given, or the run's own. A run that begins makes it, a begun one does not:
    a ledger that is lost is refused."""
    if isinstance(given, Ledger):
        keep_book(given, folder)
        return given
    if about is None:
        return Ledger(given or folder / "ledger")
    place = ledger_place(folder, about)
    if given is not None:
        if not as_ledger_place(given).exists():
            raise StateError(
                f"there is no ledger at {given}, and the run in {folder} is charged to {place}; "
                f"restore it, or {ANEW}"
            )
        return Ledger(given)
    if not about["own ledger"]:
        raise StateError(
            f"{folder} keeps its budget in another ledger, {place}; name that one (--ledger, or "
            "ledger= in Python)"
        )
    _refuse_missing(place)
    return Ledger(place)


def _refuse_missing(ledger: LedgerPlace) -> None:
    if not ledger.exists():
        raise StateError(f"{ledger} is missing, and its run may be charged; restore it, or {ANEW}")


def ledger_place(folder: Path, about: About) -> LedgerPlace:
    """Where the ledger of a begun run is: in its directory, wherever that is now, or outside."""
    return folder / "ledger" if about["own ledger"] else as_ledger_place(about["ledger place"])


def current_ledger_place(
    folder: Path, about: About, others: Iterable[LedgerPlace] = ()
) -> LedgerPlace:
    """The same, or where the ledger is since it was moved (`dpstream ledger move`).

    A directory that was not started since then names the old place, where a fence says to which
    one it went. `others`: ledgers to look at where that one is gone.
    """
    place = ledger_place(folder, about)
    if place.exists():
        return follow_moves(place)
    for other in others:
        if other.exists():
            with closing(Ledger(other)) as ledger:
                if ledger.moved_to is None and ledger.replaces(about["ledger"]):
                    return other
    return place


def _is_own(folder: Path, ledger: Ledger) -> bool:
    return ledger.place is not None and ledger.place == folder.resolve() / "ledger"


def _refuse_lost_keys(directory: RunDirectory, minted: int) -> None:
    """Another key in place of a lost one would publish a second noisy copy."""
    known = directory.ledger.known(directory.run.hex())
    if minted < known.minted:
        raise StateError(
            f"{directory.folder / 'windows'} has lost keys: {known.minted} windows have had one, "
            f"and it knows of {minted}; other keys would publish second noisy copies; restore it, "
            f"or {ANEW}"
        )


def is_charged(folder: Path | None, paid: set[str], known: Callable[[str], KnownRun]) -> bool:
    """Is the run of this directory among those that are `paid`? None there: it is not.

    `known`: what the ledger knows of a run. A run that has drawn, and of which it knows nothing,
    is refused.
    """
    about = None if folder is None else read_about(folder)
    if folder is None or about is None:
        return False
    run = about["run"].hex()
    if run in paid:
        return True
    if known(run).dataset:  # begun, and not charged yet
        return False
    drawn = any(any(folder.glob(name)) for name in _DRAWN)
    if drawn or not (folder / about["log"]).exists():
        raise StateError(
            f"{folder} may have published, but the book knows nothing of the run that its run.dps "
            f"names; restore run.dps, name the ledger that the run is charged to, or {ANEW}"
        )
    return False


def drop_unbegun(folder: Path) -> None:
    """A kill may come after a Runner's `run.dps` and before its first snapshot: it never began."""
    path = folder / "run.dps"
    if not path.exists() or any(folder.glob("snapshot*.dps")):
        return
    about = read_about(folder)
    if about is None or "mechanism" not in about or not (folder / about["log"]).exists():
        return
    with closing(InputLog(folder / about["log"], run=about["run"])) as log:
        if log.unused:
            path.unlink()
            (folder / about["log"]).unlink()


def known_secret(folder: Path, about: About, given: GivenSecret) -> Secret:
    """The secret that a begun run has: given, or beside its directory. A lost one is not remade."""
    if isinstance(given, Secret | bytes):
        secret = Secret.of(given)
    else:
        secret = Secret.load(secret_path(folder) if given is None else given)
    _refuse_other_secret(folder, about, secret)
    return secret


def _refuse_other_secret(folder: Path, about: About, secret: Secret) -> None:
    """Another secret would draw other noise for what was published."""
    if secret.key("check", about["run"]) != about["secret check"]:
        raise StateError(f"{folder} was made with another secret; name the right one")


def adopt(folder: Path, *, ledger: Ledger, because: str, who: str) -> About:
    """Go on with a directory or a ledger that was moved: somebody vouches that it is the only one.

    What else does not agree is refused as ever. Noted in the ledger.
    """
    about = read_about(folder)
    if about is None:
        raise StateError(f"{folder} holds no run; name the directory that has its run.dps")
    own = {"own ledger": _is_own(folder, ledger), "ledger place": str(ledger.place)}
    adopted = about | {"ledger": ledger.identity()} | own
    nothing = Secret(bytes(32))  # to draw with
    with closing(InputLog(folder / about["log"], run=about["run"])) as log:
        _compare(RunDirectory(folder=folder, about=about, secret=nothing, ledger=ledger, log=log))
        ledger.note_adoption(about["dataset"], about["run"].hex(), because=because, who=who)
        write_packed(folder / "run.dps", adopted, kind="run")
    return adopted


@dataclass(frozen=True, kw_only=True)
class RestoredRun:
    """How a run goes on from a backup."""

    about: About
    logged: int
    """Steps that the backup's log has."""
    told: int
    """Steps that the ledger was told of: those in between are read and published again."""
    final: range
    """Windows that were over since the backup: published to their ends, and not again."""
    lost: tuple[int, ...]
    """Windows whose keys were made since the backup: nothing more is published of them."""
    remembers_from: int | None = None
    """Windows from this one on lack the keys that only final or lost ones have shown; None: none
    lacks any."""


def refuse_restore(folder: Path, *, ledger: Ledger) -> None:
    """Refuse an older copy of a directory that could not go on; nothing is changed."""
    about = read_about(folder)
    if about is None:
        raise StateError(f"{folder} holds no run; name the directory that has its run.dps")
    nothing, run = Secret(bytes(32)), about["run"].hex()
    with closing(InputLog(folder / about["log"], run=about["run"])) as log:
        directory = RunDirectory(folder=folder, about=about, secret=nothing, ledger=ledger, log=log)
        _compare(directory, older=True)
        reached = ledger.known(run).reached
        _refuse_chosen_bounds(directory, reached=reached)
        _missing_steps(directory, *ledger.steps_of(run), reached=reached)


def restore_run(
    folder: Path, *, ledger: Ledger, home: Path, book: LedgerPlace, because: str, who: str
) -> RestoredRun:
    """Go on from an older copy of a directory, whose newest state is lost; the ledger is not.

    `home`, `book`: where the two will be when a run is started there.

    The log takes the digests of the steps that it lacks from the ledger, so that a step is drawn
    again only for the rows that it had (and from where it had read them, if they are live). Keys
    that are gone, or that the copy does not have, are given up with their windows, and with all
    that are open where what these draw depends on them. A new epoch fences every other copy. What
    cannot be repeated for certain is refused.
    """
    about = read_about(folder)
    if about is None:
        raise StateError(f"{folder} holds no run; name the directory that has its run.dps")
    run, dataset, nothing = about["run"].hex(), about["dataset"], Secret(bytes(32))
    known = ledger.known(run)
    with closing(InputLog(folder / about["log"], run=about["run"])) as log:
        directory = RunDirectory(folder=folder, about=about, secret=nothing, ledger=ledger, log=log)
        _compare(directory, older=True)
        _refuse_chosen_bounds(directory, reached=known.reached)
        logged, epoch = log.last + 1, mint_run_id().hex()
        _take_from_ledger(directory, *ledger.steps_of(run), reached=known.reached)
        final, lost = range(0), list[int]()
        if known.minted:
            keys = WindowKeys(folder / "windows", nothing, run=about["run"])
            final = range(keys.final, max(keys.final, known.final))
            together = _depend_on_others(about, later_final=bool(final))
            lost = keys.abandon(minted=known.minted, final=known.final, together=together)
        forgets = _remembers_keys(about) and (bool(final) or bool(lost))
        gone = [[final.start, final.stop], *([window, window + 1] for window in lost)]
        own = {"own ledger": book == home / "ledger", "ledger place": str(book)}
        about = about | {"ledger": ledger.identity()} | own
        about["abandoned"] = [*about.get("abandoned", []), *(r for r in gone if r[0] < r[1])]
        log.begin(epoch)
        ledger.begin(dataset, run, epoch, after=known.epoch)
        ledger.note_restore(dataset, run, because=because, who=who, told=known.reached, lost=lost)
        write_packed(folder / "run.dps", about, kind="run")
    return RestoredRun(
        about=about,
        logged=logged,
        told=known.reached + 1,
        final=final,
        lost=tuple(lost),
        remembers_from=known.minted if forgets else None,
    )


_CHOOSES = {"choose_groups", "choose_rows", "choose_clamps"}


def _refuse_chosen_bounds(directory: RunDirectory, *, reached: int) -> None:
    """Refuse a run whose periods may have begun with bounds that the backup does not have.

    What is left of such a period would get other bounds, beside windows that have drawn under the
    first ones: more than one charge.
    """
    if reached > directory.log.last and _CHOOSES & directory.about.get("facts", {}).keys():
        raise StateError(
            f"the run in {directory.folder} chooses the bounds of each period "
            "(AUTO, or none given), and the backup does not know those of periods that "
            f"have begun since: it cannot go on; {NEXT}"
        )


def _depend_on_others(about: About, *, later_final: bool) -> bool:
    """Would windows draw other noise, or under other sums, than before, if some are given up?

    Windows that remember keys begin with what tables of earlier ones have shown, and those of
    windows that are final are not made again. And bounding prefers keys that a window remembers,
    which one that was given up does not: so a unit may have more or less left for other windows,
    unless it has no others (its period is a window), or each row is a group of its own: then order
    matters only to who has nothing left. Proof: `docs/soundness/latched.md`, section 12.
    """
    if not _remembers_keys(about):
        return False
    facts = about["facts"]
    names = ("window", "period", "start", "time_zone")
    window, period, start, zone = (json.loads(facts[name]) for name in names)
    alone = (
        (window["class"], window["is"], zone) == ("tumble", {"size": period}, "UTC")
        and isinstance(start, int)
        and start % period == 0
    )
    return later_final or not (alone or facts["max_rows_per_group"] == "1")


def _remembers_keys(about: About) -> bool:
    """Do windows begin with keys that earlier ones have shown?"""
    return "remember_keys" in about.get("facts", {})


def wrapping_path(folder: Path, rotations: int) -> Path:
    """Where the secret is that wraps a run's keys since it was rotated so many times."""
    return folder.with_name(f"{folder.name}.keys-{rotations}.secret")


def wrapping_secrets(folder: Path, about: About) -> list[Secret]:
    """What wraps a run's keys, the newest first; none if they were never rotated.

    A rotation that was killed leaves two.
    """
    rotations = about.get("rotations", 0)
    if not rotations:
        return []
    newest = wrapping_path(folder, rotations)
    if not newest.exists():
        raise SecretError(
            f"the keys of {folder} are wrapped by {newest} since they were rotated, and it is not "
            f"there; restore it from your backup; or, if units have periods, {NEXT}; or {ANEW}"
        )
    older = [wrapping_path(folder, n) for n in range(rotations - 1, 0, -1)]
    return [Secret.load(path) for path in (newest, *(path for path in older if path.exists()))]


def refuse_rotation(folder: Path) -> About:
    """What a directory says about its run, whose keys can be wrapped anew; others are refused."""
    about = read_about(folder)
    if about is None:
        raise StateError(f"{folder} holds no run; name the directory that has its run.dps")
    if "mechanism" in about:
        raise StateError(
            f"the noise of the {about['kind']} in {folder} comes from its secret alone, for its "
            f"whole life; for another secret end it, and {ANEW}"
        )
    return about


def rotate_keys(folder: Path, *, given_secret: GivenSecret) -> tuple[Path, list[int]]:
    """Wrap a stopped run's keys by a new secret: its place, and the windows that are open.

    Windows that are not begun yet get keys that the old secret never opens. Those that are open
    keep theirs, and with them their noise. The secret of the run stays that of its hashes and
    digests: with others a unit's bounds would begin anew. After a kill on the way every key opens
    with one of the secrets, and a second call brings all of them to the newest.
    """
    about = refuse_rotation(folder)
    secret = known_secret(folder, about, given_secret)
    rotations = about.get("rotations", 0) + 1
    while wrapping_path(folder, rotations).exists():
        rotations += 1  # left by an earlier run of this directory, or by a rotation that was killed
    with closing(InputLog(folder / about["log"], run=about["run"])):  # nobody runs it
        place = wrapping_path(folder, rotations)
        wrapping = [Secret.of(place), *wrapping_secrets(folder, about)]
        write_packed(folder / "run.dps", about | {"rotations": rotations}, kind="run")
        keys = WindowKeys(folder / "windows", secret, run=about["run"], wrapping=wrapping)
        windows = keys.rewrap()
        for number in range(1, rotations):
            with suppress(FileNotFoundError):
                erase(wrapping_path(folder, number))
    return place, windows


def refuse_moved(folder: Path, about: About, ledger: Ledger) -> None:
    """The ledger must be the one that the run is charged to, not a copy of it."""
    if ledger.replaces(about["ledger"]):
        return
    way_out = (
        f"and nothing was published since: dpstream state adopt {folder} --ledger {ledger.path} "
        "--only-copy --nothing-since --because TEXT"
    )
    if about["own ledger"] and _is_own(folder, ledger):
        raise StateError(
            f"{folder} is a copy, or was moved here from another file system, its ledger too; two "
            "copies of a book cannot keep one budget, and would put the same noise on different "
            f"data; use the original; or {ANEW}; if this is the only copy that is left, {way_out}"
        )
    raise StateError(
        f"the ledger {ledger.path} is not the file that {folder} is charged to, "
        f"{ledger_place(folder, about)}, but a copy or another one; name that one; or {ANEW}; if "
        f"it is the same ledger, moved or put back here, the only copy that is left, {way_out}"
    )


def refuse_rolled_back(
    folder: Path, ledger: Ledger, head: tuple[int, str], *, run: bytes, told: int
) -> None:
    """The ledger must hold what it held at `head`, when the run saw it last.

    A compaction may have folded that; what it was told of the run's steps is there all the same.
    """
    if not ledger.has(head) or ledger.known(run.hex()).reached < told:
        raise StateError(
            f"{ledger.path} lacks charges that {folder} has seen: it was rolled back; restore it"
        )


def _compare(directory: RunDirectory, *, older: bool = False) -> None:
    """The log and the ledger must tell the same story, as far as the ledger knows it.

    `older`: as far as the log goes.
    """
    folder, ledger, log = directory.folder, directory.ledger, directory.log
    known = ledger.known(directory.run.hex())
    refuse_ended(directory.run.hex(), known)
    if log.ledger_head is not None:
        refuse_rolled_back(folder, ledger, log.ledger_head, run=directory.run, told=log.told)
    if not known.epoch and log.last >= 0:
        raise StateError(
            f"the ledger {ledger.path} knows nothing of the run in {folder}, which was charged; "
            f"restore it, or {ANEW}"
        )
    if known.epoch and known.epoch not in log.epochs and not older:
        raise StateError(
            f"{folder} is older than what {ledger.path} has seen of its run: it was rolled back, "
            "or another copy of it has gone on since; the same noise could meet other data; use "
            "the newest one; or if that is lost, put a backup back (dpstream state backup) with "
            f"dpstream state restore; or, if units have periods, {NEXT}; or {ANEW}"
        )
    if known.types and known.types not in map(types_digest, log.types):
        raise StateError(
            f"{folder / directory.about['log']} has lost the types of unit and keys; restore it, "
            f"or {ANEW}"
        )
    if not older:
        _take_from_ledger(directory, known.digests, {}, reached=known.reached)


def _take_from_ledger(
    directory: RunDirectory, digests: dict[int, str], positions: dict[int, Any], *, reached: int
) -> None:
    """Give the log the steps that it lacks; refuse what differs, and what cannot be read again."""
    log, missing = directory.log, _missing_steps(directory, digests, positions, reached=reached)
    taken = [bytes.fromhex(digests[step]) for step in missing]
    if not _is_live(log, positions):
        log.record(log.last + 1, taken)
        return
    for step, one in zip(missing, taken, strict=True):
        log.record(step, [one], positions=positions[step])


def _is_live(log: InputLog, positions: dict[int, Any]) -> bool:
    return log.last in log.positions or bool(positions)


def _missing_steps(
    directory: RunDirectory, digests: dict[int, str], positions: dict[int, Any], *, reached: int
) -> range:
    """The steps that the log lacks; refuse what differs, and what cannot be read again."""
    folder, log = directory.folder, directory.log
    other = f"{folder} is not the state that {directory.ledger.path} has seen of its run"
    for step, digest in digests.items():
        logged = log.digest_at(step)
        if logged is not None and logged.hex() != digest:
            raise StateError(f"{other}: step {step} has read something else; {ANEW}")
    missing = range(log.last + 1, reached + 1)
    live = _is_live(log, positions)
    unknown = [s for s in missing if s not in digests or (live and s not in positions)]
    if unknown:
        raise StateError(
            f"{folder / directory.about['log']} has lost its end: {len(missing)} steps were "
            f"published since, and what {len(unknown)} of them have read is not known (the first: "
            f"step {unknown[0]}); restore it; or, if units have periods, {NEXT}; or {ANEW}"
        )
    return missing
