"""`dpstream state`: look after state directories."""

from __future__ import annotations

import getpass
import json
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from dpstream.cli.command_options import state_place
from dpstream.cli.ledger_command import File
from dpstream.cli.output import AsJson, UsageError, counted, note, print_json, progress_bar
from dpstream.connectors.server_base import is_object_uri
from dpstream.connectors.storage import printable
from dpstream.errors import DpstreamError, StateError, shown
from dpstream.mechanisms.runner import PAN_PRIVATE
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.ledger.store import LedgerAddress, LedgerPlace
from dpstream.privacy.state import Secret
from dpstream.privacy.state.backup import (
    Restoration,
    back_up,
    move,
    opened,
    runs_in,
    wrapping_in_use,
)
from dpstream.privacy.state.input_log import logged_quarantine
from dpstream.privacy.state.inspection import bounds_in_words, describe, find_faults, saved_step
from dpstream.privacy.state.mirrors import mirror_of, sync_mirror
from dpstream.privacy.state.run_directory import (
    About,
    adopt,
    read_about,
    refuse_rotation,
    rotate_keys,
)
from dpstream.privacy.state.secret import secret_path
from dpstream.query.schedule import Schedule
from dpstream.query.windows import Cumulate, Hop, Micros, Ticks, Tumble, iso
from dpstream.serve.release_store import collect_served, store_folder
from dpstream.session.changes import Changes
from dpstream.session.pipeline import load_pipeline
from dpstream.session.retention import collect_by_age, collect_runs
from dpstream.session.start import ledger_beside, state_folder

app = typer.Typer(help="Look after state directories.")
Folder = Annotated[
    Any,
    Argument(
        metavar="DIR",
        help="A state directory, of one run or of a pipeline; or s3://bucket/states/name.",
        parser=state_place,
    ),
]
Who = Annotated[str, Option(help="Who says so; by default the login name.")]
SecretFile = Annotated[
    Path | None, Option("--secret", help="The secret's file; by default DIR.secret.")
]
_AGES = ("releases", "served", "dead_letters")
_SHOWN = 20  # windows that are listed for people


@app.callback()
def state() -> None:
    """Look after state directories."""


@app.command("backup")
def back_up_directory(
    folder: Folder,
    to: Annotated[Path, Argument(metavar="TO", help="A new folder, or a .tar or .tar.gz file.")],
    with_secret: Annotated[
        bool,
        Option("--with-secret", help="Copy the secret, too: it opens all noise."),
    ] = False,
    secret: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Copy a state directory and its ledger, consistently, while its runs go on.

    Runs wait while the ledger, and what has changed during the copying, is copied. Not in a backup,
    unless asked for: the secret, without which it cannot go on. Example:

    dpstream state backup state/ /backups/2026-05-01.tar.gz
    """
    in_bucket, folder = isinstance(folder, str), state_folder(folder)
    place = secret or secret_path(folder.resolve())
    if with_secret and not place.exists():
        what = "a state in a bucket has no secret beside it" if in_bucket else f"no secret {place}"
        raise StateError(f"{what}; name it: --secret FILE")
    with progress_bar("files") as told:
        facts = back_up(folder, to, secret=place if with_secret else None, told=told)
    size = sum(file["bytes"] for file in facts["files"].values())
    if as_json:
        about = {key: facts[key] for key in ("at", "folder", "runs", "ledgers", "secret")}
        listed = {"backup": str(to), **about, "files": len(facts["files"]), "bytes": size}
        print_json(_shown(listed))
        return
    runs, files = counted(len(facts["runs"]), "run"), counted(len(facts["files"]), "file")
    print(f"{to}: {runs}, {files}, {counted(size, 'byte')}")
    if not with_secret and _has_secret(folder):
        which = "its secret" if in_bucket and secret is None else f"the secret {place}"
        note(f"{which} is not in it; keep a copy of it elsewhere, for this user alone")
    note("rows, releases and pipeline files are not in it either; keep the newest ledger as well")


def _has_secret(folder: Path) -> bool:
    """Does one of its runs have a secret? Those whose memory may be seen keep none."""
    kinds = [about["kind"] for place in runs_in(folder) if (about := read_about(place))]
    return any(kind != PAN_PRIVATE for kind in kinds)


@app.command("restore")
def restore_directory(
    source: Annotated[Path, Argument(metavar="FROM", help="What state backup has written.")],
    folder: Annotated[
        Any,
        Argument(
            metavar="DIR",
            help="Where the state will be; or s3://bucket/states/name.",
            parser=state_place,
        ),
    ],
    file: File = None,
    nothing_since: Annotated[
        bool,
        Option(
            "--nothing-since",
            help="Your word that nothing was published since the backup; needed where the newest "
            "ledger is lost, too.",
        ),
    ] = False,
    newest_ledger: Annotated[
        bool,
        Option(
            "--newest-ledger",
            help="Your word that the ledger is the newest there is; needed where it is a copy, or "
            "in a server.",
        ),
    ] = False,
    without: Annotated[
        list[str] | None, Option(metavar="NAME", help="Leave out the run of this query.")
    ] = None,
    because: Annotated[str, Option(help="Why; it is written into the ledger.")] = "",
    who: Who = "",
    as_json: AsJson = False,
) -> None:
    """Put a backup back, here or on another machine, and go on without a new charge.

    The next start reads again what was read since the backup, and publishes the same tables: rows
    that differ from what the ledger was told of are refused. Windows whose keys were made since, or
    erased, are not published again; they are listed. Example:

    dpstream state restore /backups/2026-05-01.tar.gz state/ --because "disk lost"
    """
    folder = _free_folder(folder, file)
    restoration = Restoration(
        folder=folder,
        ledger=file,
        nothing_since=nothing_since,
        newest_ledger=newest_ledger,
        without=without or (),
        because=because or f"the backup {source.name} was put back",
        who=who or getpass.getuser(),
    )
    found, restored = [], restoration.restore(source)
    if mirror_of(folder) is not None and wrapping_in_use(folder):
        raise StateError(
            f"keys of {folder} were rotated, and the secret that wraps them lies beside a "
            "directory: in a bucket there is no place for it; restore into a directory"
        )
    sync_mirror(folder)
    for name, run in restored.items():
        saved = saved_step(folder / name)
        later = [] if run.remembers_from is None else [run.remembers_from]
        found.append(
            {
                "directory": shown(str(folder / name)),
                "run": run.about["run"].hex()[:8],
                "saved_steps": saved,
                "steps_to_repeat": max(0, run.told - saved),
                "published_and_final": _windows(run.about, run.final),
                "lost": _windows(run.about, run.lost),
                "keys_begin_anew": next(iter(_windows(run.about, later)), None),
            }
        )
    if as_json:
        print_json({"restored": found})
        return
    for one in found:
        steps = one["steps_to_repeat"]
        verb = "is" if steps == 1 else "are"
        again = f"{counted(steps, 'step')} since then {verb} read and published again"
        print(f"{one['directory']} goes on from step {one['saved_steps']}; {again}")
        kinds = (
            ("published_and_final", "published to its end before, not again"),
            ("lost", "its key is lost: nothing more is published of it"),
        )
        for kind, meaning in kinds:
            for window in islice(one[kind], _SHOWN):
                print(f"  window {window['window']} {_span(window)}: {meaning}")
            if len(one[kind]) > _SHOWN:
                print(f"  and {len(one[kind]) - _SHOWN} more (see --json): {meaning}")
        if one["keys_begin_anew"] is not None:
            first = one["keys_begin_anew"]
            print(
                f"  window {first['window']} {_span(first)} and later ones: a key that none but "
                "the windows above have shown needs its threshold again"
            )
    if any(folder.glob("**/dead-letters/*.jsonl")):
        note(
            "dead letters are those of the backup: erase units once more that were erased since, "
            "dpstream run PIPELINE --erase-unit UNIT"
        )
    if mirror_of(folder) is not None:
        note("its secret is not in the bucket: name it to the run, and remove other copies of it")
    elif not secret_path(folder.resolve()).exists() and _has_secret(folder):
        note(f"its secret is not at {secret_path(folder)}; put it there, or name it to the run")
    for path in wrapping_in_use(folder).values():
        if not path.exists():
            note(f"keys were rotated: the secret {path} is not there; put it back, too")


@app.command("move")
def move_directory(
    folder: Folder,
    to: Annotated[
        Any,
        Argument(metavar="TO", help="Where it will be: a place that is free.", parser=state_place),
    ],
    because: Annotated[str, Option(help="Why; it is written into the ledger.")] = "moved",
    who: Who = "",
    as_json: AsJson = False,
) -> None:
    """Move the state of runs that have stopped, with its secret, to another place.

    To another machine: copy the directory, its ledger and its secret, remove them here, and use
    dpstream state adopt there. Example:

    dpstream state move state/ /data/state/
    """
    if isinstance(folder, str) or is_object_uri(to):
        raise StateError(
            "a state is moved from and to directories; into a bucket and out of it, stop its runs "
            "and bring its ledger there (dpstream ledger move), then: dpstream state backup FROM "
            "FILE; dpstream state restore FILE TO --ledger LEDGER --newest-ledger"
        )
    move(folder, to, because=because, who=who or getpass.getuser())
    if as_json:
        print_json({"moved": str(folder), "to": str(to)})
        return
    print(f"{folder} is now {to}")
    note(f"name {to} in the pipeline file, or with --state, before the next start")
    if secret_path(to.resolve()).exists():
        note(f"its secret is now {secret_path(to)}: name that, too, where the old one is named")


@app.command("inspect")
def inspect_directory(folder: Folder, as_json: AsJson = False) -> None:
    """Say what a state directory is: its runs, how far they are, what it takes. Example:

    dpstream state inspect state/
    """
    found = _shown([describe(place) for place in runs_in(state_folder(folder))])
    if as_json:
        print_json({"runs": found})
        return
    for one in found:
        steps, windows = one["steps"], one["windows"]
        told = steps.get("told_to_ledger", "?")
        print(f"{one['directory']}: {one['kind']} {one['query']!r} of {one['dataset']!r}")
        print(f"  run {one['run'][:8]}, engine {one['engine']}, format {one['format']}")
        print(f"  steps: {steps['saved']} saved, {steps['logged']} logged, {told} in the ledger")
        if windows["minted"]:
            lost = sum(end - first for first, end in windows["abandoned"])
            print(
                f"  windows: {windows['minted']} begun, {windows['final']} final, "
                f"{len(windows['open'])} open, {lost} given up"
            )
        if one["bounds"] is not None:
            print(f"  bounds: {bounds_in_words(one['bounds'])}")
        here = "" if one["ledger"]["here"] else " (not there)"
        size = f"{counted(one['files'], 'file')}, {counted(one['bytes'], 'byte')}"
        print(f"  ledger {one['ledger']['path']}{here}; {size}")


@app.command("verify")
def verify_directory(
    folder: Annotated[
        Any,
        Argument(
            metavar="DIR",
            help="A state directory, a backup, or s3://bucket/states/name.",
            parser=state_place,
        ),
    ],
    secret: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Check every digest and every law that can be checked without the data. Example:

    dpstream state verify /backups/2026-05-01.tar.gz
    """
    faults: list[str] = []
    folder = state_folder(folder)
    if folder.is_file() or (folder / "backup.json").exists():
        try:
            with opened(folder) as (content, facts):
                books = {n: facts["ledgers"].get(b) for n, b in facts["runs"].items()}
                for name, book in books.items():
                    path = None if book is None else content / book
                    known = None if secret is None else Secret.load(secret)
                    faults += find_faults(content / "state" / name, secret=known, book=path)
        except DpstreamError as problem:
            faults.append(str(problem))
    else:
        try:
            Changes.read(folder)
        except DpstreamError as problem:
            faults.append(str(problem))
        for place in runs_in(folder):
            paths = (secret, secret_path(place.resolve()), secret_path(folder.resolve()))
            at = next((path for path in paths if path is not None and path.exists()), None)
            known = None if at is None else Secret.load(at)
            if known is None and _has_secret(place):
                note(f"{place}: without its secret keys are not opened (--secret FILE)")
            faults += find_faults(place, secret=known)
    faults = _shown(faults)
    if as_json:
        print_json({"faults": faults})
    for fault in [] if as_json else faults or ["no fault was found"]:
        print(fault)
    if faults:
        raise typer.Exit(4)


@app.command("rotate")
def rotate_directory(folder: Folder, secret: SecretFile = None, as_json: AsJson = False) -> None:
    """Give the windows that a stopped run has not begun new noise keys: the old secret opens none.

    No release changes and nothing is charged. Windows that are open keep their noise to their ends.
    The secret stays that of the hashes of units: another one would let every unit begin anew.
    Example:

    dpstream state rotate state/
    """
    if isinstance(folder, str):
        raise StateError(
            f"{folder}: new secrets lie beside a state directory, and nothing does in a bucket; "
            "rotate it in a directory: dpstream state backup, restore, rotate"
        )
    found = []
    for place in runs_in(folder):  # before any of them is rotated
        refuse_rotation(place)
    for place in runs_in(folder):
        given = next((p for p in (secret, secret_path(place.resolve())) if p and p.exists()), None)
        given = given or secret_path(folder.resolve())
        new, windows = rotate_keys(place, given_secret=given)
        facts = {"secret": str(new), "open_windows": windows}
        found.append({"directory": str(place), **facts, "hashes_stay_with": str(given)})
    if as_json:
        print_json({"rotated": found})
        return
    for one in found:
        print(f"{one['directory']}: keys are wrapped by {one['secret']} from now on")
        if one["open_windows"]:
            print(f"  open windows keep their noise to their ends: {len(one['open_windows'])}")
    stays = "hashes of units stay with the secret they had: another one would reset their bounds"
    note(f"{stays}; keep both secrets, and back the new one up")


def _free_folder(folder: Path | str, ledger: LedgerPlace | None) -> Path:
    """Where a state is put back; in a bucket there must be none, and its ledger is on a server."""
    if not is_object_uri(folder):
        return Path(folder)
    if not isinstance(ledger, LedgerAddress):
        raise StateError(
            f"{folder} is in a bucket: name the ledger that the runs are charged to, on a server "
            "or in a bucket (--ledger); one that is a file goes there by dpstream ledger move"
        )
    if not ledger.exists():
        raise StateError(
            f"there is no ledger at {ledger}, and only the newest one knows what was published "
            "since the backup; bring it there: dpstream ledger move"
        )
    place = state_folder(folder)
    if any(place.iterdir()):
        raise StateError(
            f"{place} holds a state already; name another place, or remove its objects `head` and "
            "`files/`, and leave those of a ledger beside them"
        )
    return place


def _shown(found: Any) -> Any:
    """Facts with the names of places that users know."""
    return json.loads(shown(json.dumps(found)))


def _windows(about: About, windows: Iterable[int]) -> list[dict[str, Any]]:
    """Windows with their times, as far as the run's query has any."""
    schedule = _schedule(about)
    return [
        {"window": window, "start": iso(span[0]), "end": iso(span[1])}
        for window in windows
        for span in [schedule.span(window)]
    ]


def _schedule(about: About) -> Schedule:
    """When the windows of a run are."""
    facts = {key: json.loads(text) for key, text in about.get("facts", {}).items()}
    start, written = facts.get("start"), facts.get("window")
    if start is None:
        return Schedule()
    if written is None:
        return Schedule(start=start, end=facts["end"])
    kind = next(k for k in (Tumble, Hop, Cumulate) if k.identity == written["class"])
    names, sizes = kind.names_of_keys(), written["is"]
    window = kind(**{names[key]: Micros(size) for key, size in sizes.items()})
    edges = Ticks(origin=start, size=window.cell, zone=facts["time_zone"])
    return Schedule(
        start=start, end=facts["end"], edges=edges, kind=window.kind, cells=window.cells
    )


def _span(window: dict[str, Any]) -> str:
    return "" if window["start"] is None else f"({window['start']} to {window['end']})"


@app.command("adopt")
def adopt_directory(
    folder: Folder,
    because: Annotated[str, Option(help="Why; it is written into the ledger.")],
    only_copy: Annotated[
        bool, Option("--only-copy", help="Your word that the original, and every copy, is gone.")
    ] = False,
    nothing_since: Annotated[
        bool,
        Option(
            "--nothing-since",
            help="Your word that nothing was published since this copy was made.",
        ),
    ] = False,
    file: File = None,
    who: Who = "",
    as_json: AsJson = False,
) -> None:
    """Go on with a state directory, or a ledger, that was moved to another file system.

    Two copies of a book cannot keep one budget, and two runs from copies of one state put the same
    noise on different data: whoever adopts a directory vouches that no other copy goes on. A backup
    from before the last release is not to be adopted: what was published since would come again.
    """
    if not only_copy:
        raise UsageError(
            f"two copies of {folder} that both go on would spend its budget twice, and show the "
            "difference of their data; if this is the only one left, say so: add --only-copy"
        )
    if not nothing_since:
        raise UsageError(
            f"an older copy of {folder} would draw again for what was published since, from the "
            "same noise; if nothing was published since this copy was made, say so: add "
            "--nothing-since; otherwise use a new state directory (a new run, charged anew)"
        )
    if not because.strip():
        raise UsageError("an adoption is recorded with its reason; say why: --because TEXT")
    adopted, folder = [], state_folder(folder)
    for place in runs_in(folder):
        path = ledger_beside(folder, file)
        path = path or next((p for p in (place / "ledger", folder / "ledger") if p.exists()), None)
        if path is None or not path.exists():
            raise StateError(
                f"{place}: there is no ledger at {path}; name the one it is charged to"
            )
        with closing(Ledger(path)) as book:
            about = adopt(place, ledger=book, because=because, who=who or getpass.getuser())
        run = about["run"].hex()[:8]
        adopted.append({"directory": shown(str(place)), "run": run, "ledger": str(path)})
    sync_mirror(folder)
    if as_json:
        print_json({"adopted": adopted})
        return
    for one in adopted:
        print(f"{one['directory']} is adopted (run {one['run']}, charged to {one['ledger']})")


@app.command("gc")
def collect_garbage(
    place: Annotated[
        Any,
        Argument(
            metavar="PIPELINE|DIR",
            help="A pipeline.toml file, or a state directory.",
            parser=state_place,
        ),
    ],
    yes: Annotated[bool, Option("--yes", help="Remove it; otherwise it is only told.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what may go, how much it is and why; with --yes it goes.

    Of a state directory: what kills have left, and runs that were ended for good. Of a pipeline
    also what is older than its [retention] says. Runs that are going are left alone. Example:

    dpstream state gc pipeline.toml --yes
    """
    found_file = isinstance(place, Path) and place.is_file()
    pipeline = load_pipeline(place) if found_file else None
    folder = state_folder(place) if pipeline is None else pipeline.state
    if yes and mirror_of(folder) is not None:
        raise StateError(
            f"{folder} is in a bucket, where nobody sees whether its runs go on: nothing is "
            "removed from outside; a run removes what [retention] does not keep itself"
        )
    begun = runs_in(folder) if pipeline is None else [*folder.glob("*/")]
    books = [] if pipeline is None else [book.ledger for book in pipeline.books]
    found = [*collect_runs(begun, remove=yes, ledgers=books)]
    if pipeline is not None:
        found += collect_by_age(pipeline, remove=yes)
        found += collect_served(store_folder(pipeline), pipeline.retention.get("served"), yes)
    found = [one for one in dict.fromkeys(found) if one.files or one.what == "in use"]
    total = sum(one.bytes for one in found)
    if as_json:
        listed = [asdict(one) | {"where": shown(str(one.where))} for one in found]
        print_json({"removed": yes, "bytes": total, "waste": listed})
        return
    for one in found:
        if one.files:
            verb = "removed" if one.removed else "may go"
            size = f"{counted(one.files, 'file')}, {counted(one.bytes, 'byte')}"
            print(shown(f"{verb}: {one.where}: {one.what}: {size}; {one.why}"))
        else:
            print(shown(f"left: {one.where}: {one.why}"))
    if not any(one.files for one in found):
        print("nothing may go")
    elif not yes:
        note(
            f"nothing was removed; dpstream state gc {place} --yes removes {counted(total, 'byte')}"
        )
    if pipeline is not None:
        for_ever = [key for key in _AGES if key not in pipeline.retention]
        if for_ever:
            note(f"kept for ever: {', '.join(for_ever)}; [retention] in {place} says how long")


@app.command("quarantine")
def list_quarantine(
    folder: Folder,
    as_json: AsJson = False,
) -> None:
    """List the files that runs have set aside because they could not be read.

    A run never reads them again, whatever becomes of them: mend a file and give it a new name. Runs
    on Spark tell theirs in the dead letters.
    """
    listed = []
    for place in runs_in(state_folder(folder)):
        about = read_about(place)
        assert about is not None
        for name, mark in logged_quarantine(place / about["log"]).items():
            facts = {"file": name, "sha256": mark["quarantined"], "reason": mark["reason"]}
            listed.append(
                {"directory": shown(str(place)), **facts, "counted_up_to": mark.get("after")}
            )
    if as_json:
        print_json({"quarantined": listed})
        return
    for one in listed:
        line = f"{one['directory']}: {one['file']} (SHA-256 {one['sha256']}): {one['reason']}"
        print(printable(line))
