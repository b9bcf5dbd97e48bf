"""Open a query's state directory, or make it; refuse it where noise could meet other data.

Another query, secret or ledger, a copy, a rollback, lost files, remains of another run: each is
refused before anything is drawn, in words that say what to do.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dpstream.engines.directory import KIND, StateDirectory
from dpstream.errors import StateError
from dpstream.privacy.ledger import Ledger
from dpstream.privacy.run_directory import (
    ANEW,
    About,
    RunDirectory,
    existing_ledger,
    keep_book,
    known_secret,
    make_empty,
    make_run,
    open_run,
    read_about,
    refuse_lost_keys,
    refuse_other_secret,
)
from dpstream.privacy.state import Secret, WindowKeys, mint_run_id
from dpstream.privacy.state.files import remove_leftovers, writing
from dpstream.privacy.state.identity import canonical, readable
from dpstream.privacy.state.secret import beside
from dpstream.stages.query import Query

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
    about = read_about(folder, kind=KIND)
    made: tuple[Path, ...] = ()
    if about is None:
        made = tuple(path for path in _to_be_made(folder, given_ledger) if not path.exists())
        make_empty(folder)
        secret = Secret.of(beside(folder) if given_secret is None else given_secret)
    else:
        secret = known_secret(folder, given_secret)
        refuse_other_query(folder, about, facts, dataset, secret)
    with ExitStack() as undo, writing(folder):
        ledger = open_ledger(folder, about, given_ledger)
        if not isinstance(given_ledger, Ledger):
            undo.callback(ledger.close)
        if about is None:
            run = mint_run_id() if run_id is None else run_id
            found = make_run(
                folder,
                kind=KIND,
                run=run,
                dataset=dataset,
                secret=secret,
                ledger=ledger,
                more={"facts": facts, "buckets": buckets, "notes": notes},
            )
        else:
            found = open_run(folder, about=about, secret=secret, ledger=ledger)
        undo.callback(found.close)  # a refused directory must not stay locked
        for place in (folder, folder / "windows", folder / "segments"):
            remove_leftovers(place, overwrite=True)  # a kill may leave half a key, or noise
        keys = _window_keys(found, derived=run_id is not None)
        undo.pop_all()
    return StateDirectory(
        run_directory=found,
        keys=keys,
        created=bool(made),
        own_ledger=not isinstance(given_ledger, Ledger),
        made=made,
    )


def _window_keys(found: RunDirectory, *, derived: bool) -> WindowKeys:
    """The run's keys: not fewer than the ledger knows of, and none that it knows to be erased."""
    keys = WindowKeys(
        found.folder / "windows",
        found.secret,
        run=found.run,
        ordered=True,
        derived_for_tests=derived,
        witness=found.note_windows,
    )
    refuse_lost_keys(found, keys.minted)
    found.windows = lambda: (keys.minted, keys.final)
    known = found.ledger.known(found.run.hex())
    for window in range(keys.final, known.final):  # an older copy of the folder brought them back
        keys.erase(window)
    return keys


def _to_be_made(folder: Path, ledger: Ledger | str | Path | None) -> list[Path]:
    """What a run on this folder makes, the outermost last: `withdraw` takes it back."""
    names = ["spark.dps", "run.dps", "inputs.log"]
    names += ["windows/final", "windows/minted", "windows", "segments", "shared"]
    own = [folder / "ledger", folder / "ledger.head"] if ledger is None else []
    return [*(folder / name for name in names), *own, beside(folder), folder]


def refuse_other_query(
    folder: Path, about: About, facts: Facts, dataset: str, secret: Secret
) -> None:
    """It must be the same query of the same dataset, with the same secret."""
    refuse_other_secret(folder, about, secret)
    asked = {**facts, "dataset": canonical(dataset)}
    kept = {**about["facts"], "dataset": canonical(about["dataset"])}
    other = [key for key in asked | kept if asked.get(key) != kept.get(key)]
    if other:
        key, names = other[0], {key: name for name, key in Query.written_keys.items()}
        raise StateError(
            f"{folder} belongs to another query: {names.get(key, key)} was "
            f"{readable(kept.get(key))} and is now {readable(asked.get(key))}; use the same query, "
            f"or {ANEW}"
        )


def open_ledger(folder: Path, about: About | None, given: Ledger | str | Path | None) -> Ledger:
    """The one given, or the run's own, which a new run makes."""
    if isinstance(given, Ledger):
        keep_book(given, folder)
        return given
    if about is not None:
        return existing_ledger(folder, about, given)
    return Ledger(given or folder / "ledger")
