"""The state directory of a GROUP BY: its run, its log, its keys, its snapshots.

run.dps        the run id, the query, a check of the secret; written before the first charge
inputs.log     epochs, column types, digest and positions of every step; locked by one process
windows/       one key per open window, wrapped by the secret
segments/, manifest-*.dps   snapshots, two generations
spark.dps, shared/          in their place: progress and files of a run on Spark
ledger         the book, unless the run shares another

`privacy/run_directory.py` says how the files and the ledger are tied to each other, and refuses
what does not belong together before anything is drawn.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa

from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.state import InputLog, mint_run_id
from dpstream.privacy.state.durable_files import remove_leftovers, writing
from dpstream.privacy.state.input_log import noted_types
from dpstream.privacy.state.run_directory import (
    Facts,
    GivenLedger,
    GivenSecret,
    RunDirectory,
    find_run,
    make_run,
    open_ledger,
    open_run,
    read_about,
)
from dpstream.privacy.state.secret import beside
from dpstream.query.query import Query

KIND = "GROUP BY query"


def open_directory(
    folder: Path,
    *,
    facts: Facts,
    dataset: str,
    buckets: int,
    given_secret: GivenSecret,
    given_ledger: GivenLedger,
    notes: dict[str, Any],
    run_id: bytes | None = None,
) -> RunDirectory:
    """Open a query's directory, or make it; another query, secret or ledger is refused.

    With `run_id`, which is for tests, window keys are derived instead of drawn.
    """
    missing = tuple(path for path in _to_be_made(folder, given_ledger) if not path.exists())
    about, secret = find_run(
        folder,
        kind=KIND,
        facts=facts,
        names=Query.names_of_keys(),
        dataset=dataset,
        given_secret=given_secret,
    )
    owns_ledger = not isinstance(given_ledger, Ledger)
    with ExitStack() as undo, writing(folder):
        ledger = open_ledger(folder, about, given_ledger)
        if owns_ledger:
            undo.callback(ledger.close)
        if about is None:
            found = make_run(
                folder,
                kind=KIND,
                run=mint_run_id() if run_id is None else run_id,
                dataset=dataset,
                secret=secret,
                ledger=ledger,
                more={"facts": facts, "buckets": buckets, "notes": notes},
            )
            found.made = missing
        else:
            found = open_run(folder, about=about, secret=secret, ledger=ledger)
        undo.callback(found.close)  # a refused directory must not stay locked
        for place in (folder, folder / "windows", folder / "segments"):
            remove_leftovers(place, overwrite=True)  # a kill may leave half a key, or noise
        found.open_keys(derived_for_tests=run_id is not None)
        undo.pop_all()
    found.owns_ledger = owns_ledger
    return found


def _to_be_made(folder: Path, ledger: GivenLedger) -> list[Path]:
    """What a run on this folder makes, the outermost last: `withdraw` takes it back."""
    names = ["spark.dps", "run.dps", "inputs.log"]
    names += ["windows/final", "windows/minted", "windows", "segments", "shared"]
    own = [folder / "ledger", folder / "ledger.head"] if ledger is None else []
    return [*(folder / name for name in names), *own, beside(folder), folder]


def kept_types(folder: Path) -> dict[str, pa.DataType]:
    """The types that the run of a directory has met, which may be running; none without one."""
    about = read_about(folder)
    path = None if about is None else folder / about["log"]
    return {} if path is None or not path.exists() else _types(noted_types(path)[-1:])


def read_types(log: InputLog) -> dict[str, pa.DataType]:
    """The types of unit and keys that a run has met; none at first."""
    return _types(log.types[-1:])


def _types(newest: list[bytes]) -> dict[str, pa.DataType]:
    found = [pa.ipc.read_schema(pa.py_buffer(one)) for one in newest]
    return {field.name: field.type for schema in found for field in schema}


def write_types(log: InputLog, types: dict[str, pa.DataType]) -> None:
    """Fix the types of unit and keys: after a restart 5 and "5" must not be two users."""
    log.keep_types(pa.schema(list(types.items())).serialize().to_pybytes())
