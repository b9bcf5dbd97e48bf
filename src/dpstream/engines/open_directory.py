"""Open a query's state directory, or make it; refuse it where noise could meet other data.

Another query, secret or ledger, a copy, a rollback, remains of another run: each is refused before
anything is drawn, in words that say what to do.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dpstream.engines.directory import STATE_FORMAT, StateDirectory, keep_book, read_about
from dpstream.errors import StateError
from dpstream.privacy.amounts import plain
from dpstream.privacy.ledger import Ledger
from dpstream.privacy.state import (
    InputLog,
    Journal,
    Secret,
    WindowKeys,
    mint_run_id,
    write_packed,
)
from dpstream.privacy.state.files import make_directory, remove_leftovers, writing
from dpstream.privacy.state.secret import beside

Facts = dict[str, str]


def open_directory(
    folder: Path,
    *,
    facts: Facts,
    dataset: str,
    buckets: int,
    given_secret: Secret | bytes | str | Path | None,
    given_ledger: Ledger | str | Path | None,
    notes: dict[str, Any],
    run_id: bytes | None = None,
) -> StateDirectory:
    """Open a query's directory, or make it; another query, secret or ledger is refused.

    With `run_id`, which is for tests, window keys are derived instead of drawn.
    """
    about = read_about(folder)
    made: tuple[Path, ...] = ()
    if about is None:
        made = tuple(path for path in _to_be_made(folder, given_ledger) if not path.exists())
        _make(folder)
        secret = Secret.of(beside(folder) if given_secret is None else given_secret)
        run = mint_run_id() if run_id is None else run_id
    else:
        secret = Secret.of(_existing(folder, given_secret))
        _check(folder, about, facts, dataset, secret)
        run = about["run"]
    with ExitStack() as undo, writing(folder):
        ledger = _ledger(folder, given_ledger)
        if not isinstance(given_ledger, Ledger):
            undo.callback(ledger.close)
        log = InputLog(folder / "inputs.log", run=run)
        undo.callback(log.close)  # a refused directory must not stay locked
        for place in (folder, folder / "windows", folder / "segments"):
            remove_leftovers(place, overwrite=True)  # a kill may leave half a key, or noise
        if about is None:
            about = {
                "format": STATE_FORMAT,
                "run": run,
                "facts": facts,
                "dataset": dataset,
                "buckets": buckets,
                "secret check": secret.key("check", run),
                "log": log.identity,
                "ledger": ledger.identity(),
                "ledger place": str(ledger.place),
                "notes": notes,
            }
            write_packed(folder / "run.dps", about, kind="query run")
        _refuse_strangers(folder, about, ledger, log)
        keys = WindowKeys(
            folder / "windows", secret, derived_for_tests=run_id is not None, ordered=True
        )
        undo.pop_all()
    return StateDirectory(
        folder=folder,
        about=about,
        secret=secret,
        ledger=ledger,
        log=log,
        keys=keys,
        created=bool(made),
        own_ledger=not isinstance(given_ledger, Ledger),
        made=made,
    )


def _to_be_made(folder: Path, ledger: Ledger | str | Path | None) -> list[Path]:
    """What a run on this folder makes, the outermost last: `withdraw` takes it back."""
    names = ["spark.dps", "run.dps", "types.dps", "inputs.log"]
    names += ["windows/final", "windows/minted", "windows", "segments", "shared"]
    own = [folder / "ledger", folder / "ledger.head"] if ledger is None else []
    return [*(folder / name for name in names), *own, beside(folder), folder]


def _make(folder: Path) -> None:
    """Make the directory; one that holds another run's remains is refused."""
    try:
        make_directory(folder, mode=0o700)
    except OSError as error:
        raise StateError(
            f"the state directory {folder} cannot be made: {error.strerror}; name another place"
        ) from None
    if any(any(folder.glob(name)) for name in ("manifest-*.dps", "segments/*", "spark.dps")):
        raise StateError(
            f"{folder} holds snapshots but no run.dps: they belong to another run, whose noise "
            "must not meet other data; use a new state directory"
        )
    _drop_unused_log(folder / "inputs.log")


def _drop_unused_log(path: Path) -> None:
    """A kill while the directory was made may leave a log without steps: nothing was drawn."""
    if not path.exists():
        return
    journal = Journal(path, kind="input log")
    try:
        journal.acquire(wait=False)
        if len(journal.read_new()) > 1:
            raise StateError(
                f"{path.parent} has a log of published steps but no run.dps; restore it, or use a "
                "new state directory (a new run, charged anew)"
            )
        path.unlink()
    finally:
        journal.close()


def _existing(folder: Path, given: Secret | bytes | str | Path | None) -> Secret | bytes:
    """The secret that a begun run has: a lost one is not remade."""
    if isinstance(given, Secret | bytes):
        return given
    return Secret.load(beside(folder) if given is None else given)


def _check(folder: Path, about: dict[str, Any], facts: Facts, dataset: str, secret: Secret) -> None:
    """It must be the same query of the same dataset, with the same secret."""
    if secret.key("check", about["run"]) != about["secret check"]:
        raise StateError(f"{folder} was made with another secret; name the right one")
    asked = {**facts, "dataset": repr(dataset)}
    kept = {**about["facts"], "dataset": repr(about["dataset"])}
    other = [name for name in asked | kept if asked.get(name) != kept.get(name)]
    if other:
        name = other[0]
        raise StateError(
            f"{folder} belongs to another query: {name} was {plain(kept.get(name))} and is now "
            f"{plain(asked.get(name))}; use the same query, or a new state directory (a new run, "
            "charged anew)"
        )


def _ledger(folder: Path, given: Ledger | str | Path | None) -> Ledger:
    if isinstance(given, Ledger):
        keep_book(given, folder)
        return given
    return Ledger(folder / "ledger" if given is None else given)


def _refuse_strangers(folder: Path, about: dict[str, Any], ledger: Ledger, log: InputLog) -> None:
    """Log and ledger must be the files that the run was made with, and the ledger whole."""
    if ledger.identity() != about["ledger"]:
        raise StateError(
            f"the ledger {ledger.path} is not the one that {folder} is charged to, "
            f"{about.get('ledger place', 'another file')}; name that one, or use a new state "
            "directory (a new run, charged anew)"
        )
    if log.identity != about["log"]:
        raise StateError(
            f"{folder} is a copy, or was moved here: two copies would put the same noise on "
            "different data; use the original, or a new state directory (a new run)"
        )
    reached = ledger.reached(about["run"].hex())
    if reached is not None:
        step, digest = reached
        if log.last == step - 2 and not log.positions:
            log.record(step - 1, [bytes.fromhex(digest)])  # its last line was torn
        logged = log.digest_at(step - 1)
        if logged is None or logged.hex() != digest:
            raise StateError(
                f"{folder} is older than what {ledger.path} has seen of its run: it was rolled "
                "back, and the same noise could meet other data; use a new state directory (a new "
                "run, charged anew)"
            )
    if log.ledger_head is not None and not ledger.has(log.ledger_head):
        raise StateError(
            f"{ledger.path} lacks charges that {folder} has seen: it was rolled back; restore it"
        )
