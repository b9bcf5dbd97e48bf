"""`dpstream state`: look after state directories."""

from __future__ import annotations

import getpass
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from dpstream.cli.ledger_command import File
from dpstream.cli.output import AsJson, UsageError, print_json
from dpstream.errors import StateError
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.state.input_log import logged_quarantine
from dpstream.privacy.state.run_directory import adopt, read_about

app = typer.Typer(help="Look after state directories.")


@app.callback()
def state() -> None:
    """Look after state directories."""


@app.command("adopt")
def adopt_directory(
    folder: Annotated[
        Path, Argument(metavar="DIR", help="A state directory, of one run or of a pipeline.")
    ],
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
    who: Annotated[str, Option(help="Who says so; by default the login name.")] = "",
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
    adopted = []
    for place in _runs_in(folder):
        path = file or next((p for p in (place / "ledger", folder / "ledger") if p.exists()), None)
        if path is None or not path.exists():
            raise StateError(
                f"{place}: there is no ledger at {path}; name the one it is charged to"
            )
        with closing(Ledger(path)) as book:
            about = adopt(place, ledger=book, because=because, who=who or getpass.getuser())
        run = about["run"].hex()[:8]
        adopted.append({"directory": str(place), "run": run, "ledger": str(path)})
    if as_json:
        print_json({"adopted": adopted})
        return
    for one in adopted:
        print(f"{one['directory']} is adopted (run {one['run']}, charged to {one['ledger']})")


@app.command("quarantine")
def list_quarantine(
    folder: Annotated[
        Path, Argument(metavar="DIR", help="A state directory, of one run or of a pipeline.")
    ],
    as_json: AsJson = False,
) -> None:
    """List the files that runs have set aside because they could not be read.

    A run never reads them again, whatever becomes of them: mend a file and give it a new name. Runs
    on Spark tell theirs in the dead letters.
    """
    listed = []
    for place in _runs_in(folder):
        about = read_about(place)
        assert about is not None
        for name, mark in logged_quarantine(place / about["log"]).items():
            facts = {"file": name, "sha256": mark["quarantined"], "reason": mark["reason"]}
            listed.append({"directory": str(place), **facts, "counted_up_to": mark.get("after")})
    if as_json:
        print_json({"quarantined": listed})
        return
    for one in listed:
        line = f"{one['directory']}: {one['file']} (SHA-256 {one['sha256']}): {one['reason']}"
        print(line.encode(errors="backslashreplace").decode())  # names of files may be no UTF-8


def _runs_in(folder: Path) -> list[Path]:
    """The directory itself, or those of a pipeline's queries in it."""
    directories = sorted(
        path.parent for path in (*folder.glob("run.dps"), *folder.glob("*/run.dps"))
    )
    if not directories:
        raise StateError(f"{folder} holds no run; name the directory that has a run.dps")
    return directories
