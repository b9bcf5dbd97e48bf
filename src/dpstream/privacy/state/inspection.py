"""What a state directory holds, and whether all of it is whole and agrees with its ledger.

Nothing is locked and nothing is changed: the runs may go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

from dpstream.errors import DpstreamError, StateError
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.state import Secret, WindowKeys, read_packed
from dpstream.privacy.state.identity import readable
from dpstream.privacy.state.journal import Journal, Record
from dpstream.privacy.state.run_directory import (
    About,
    current_ledger_place,
    read_about,
    refuse_moved,
    wrapping_secrets,
)
from dpstream.privacy.state.serial import check_packed

_LOGS = ("inputs*.log", "finished-*.log")


def saved_step(place: Path) -> int:
    """How many steps the newest snapshot has; 0 without one."""
    steps = [0]
    for path in place.glob("manifest-*.dps"):
        with suppress(StateError):  # damaged, or replaced meanwhile
            steps.append(read_packed(path, kind="manifest")["facts"]["step"])
    if (place / "snapshot.dps").exists():
        steps.append(read_packed(place / "snapshot.dps", kind="snapshot")["steps"])
    if (place / "spark.dps").exists():
        steps.append(read_packed(place / "spark.dps", kind="spark progress")["step"])
    return int(max(steps))


def chosen_bounds(place: Path) -> dict[str, Any] | None:
    """The bounds of the newest period, and since when they hold; None: they are not chosen.

    They are public: every release of the period says them.
    """
    found = []
    for path in place.glob("manifest-*.dps"):
        with suppress(StateError):
            facts = read_packed(path, kind="manifest")["facts"]
            found.append((facts["step"], facts.get("bounds")))
    if (place / "spark.dps").exists():
        saved = read_packed(place / "spark.dps", kind="spark progress")
        found.append((saved["step"], (saved.get("chosen") or {}).get("bounds")))
    newest = max(found, key=lambda pair: int(pair[0]), default=(0, None))[1]
    return None if newest is None else dict(newest)


def bounds_in_words(bounds: dict[str, Any]) -> str:
    """Which hold, and since when."""
    clamps = bounds.get("contribution_bounds_per_row", {})
    names = ("max_groups_contributed", "max_rows_per_group")
    told = [f"{name} = {bounds[name]}" for name in names if name in bounds]
    told += [f"{name} within [{lo:g}, {hi:g}]" for name, (lo, hi) in clamps.items()]
    return f"{', '.join(told)}, since {bounds['since']}"


def describe(place: Path) -> dict[str, Any]:
    """What a directory is: its run, how far it is, what it takes."""
    about = _about(place)
    log = _log_records(place, about)
    book = current_ledger_place(place, about)
    windows = WindowNumbers(place, about)
    sizes = [path.stat().st_size for path in place.rglob("*") if path.is_file()]
    facts: dict[str, Any] = {
        "directory": str(place),
        "kind": about["kind"],
        "query": _name(about),
        "run": about["run"].hex(),
        "engine": about.get("notes", {}).get("engine", "embedded"),
        "dataset": about["dataset"],
        "format": about["format"],
        "steps": {
            "saved": saved_step(place),
            "logged": 1 + max((r["step"] for r in log if "step" in r), default=-1),
        },
        "starts": sum("epoch" in record for record in log),
        "windows": {
            "minted": windows.minted,
            "final": windows.final,
            "open": windows.open,
            "abandoned": about.get("abandoned", []),
        },
        "ledger": {"path": str(book), "own": about["own ledger"], "here": book.exists()},
        "bytes": sum(sizes),
        "files": len(sizes),
        "bounds": chosen_bounds(place),
    }
    if book.exists():
        with closing(Ledger(book)) as ledger:
            known = ledger.known(about["run"].hex())
        facts["steps"]["told_to_ledger"] = known.reached + 1
    return facts


def find_faults(place: Path, *, secret: Secret | None, book: Path | None = None) -> list[str]:
    """Everything that is damaged, missing or does not agree; what needs the data is not tried."""
    try:
        about = _about(place)
    except DpstreamError as problem:
        return [str(problem)]
    return [*_tried(_faulty_files(place)), *_tried(_faults_by_law(place, about, secret, book))]


def _tried(found: Iterator[str]) -> Iterator[str]:
    """Faults that are told, and the one that ends the search."""
    try:
        yield from found
    except DpstreamError as problem:
        yield str(problem)


def _faulty_files(place: Path) -> Iterator[str]:
    named: dict[Path, tuple[Path, bytes]] = {}
    for path in sorted(place.rglob("*.dps")):
        try:
            if path.parent.name != "segments":
                check_packed(path)
            if path.name.startswith("manifest-"):
                for *_, chain in read_packed(path, kind="manifest")["chains"]:
                    for name, _, checksum in chain:
                        named[place / "segments" / name] = path, checksum
        except FileNotFoundError:
            continue  # it is replaced by a newer one
        except StateError as problem:
            yield str(problem)
    for path, (manifest, checksum) in named.items():
        try:
            read_packed(path, kind="segment", checksum=checksum)
        except StateError as problem:
            if manifest.exists():  # else there is a newer one meanwhile
                yield str(problem)
    for path in sorted(path for name in _LOGS for path in place.glob(name)):
        yield from _tried(_read_all(path))


def _read_all(path: Path) -> Iterator[str]:
    kind = "input log" if path.name.startswith("inputs") else "finished"
    with closing(Journal(path, kind=kind)) as journal:
        journal.read_new()
    yield from ()


def _faults_by_law(
    place: Path, about: About, secret: Secret | None, book: Path | None
) -> Iterator[str]:
    records, windows = _log_records(place, about), WindowNumbers(place, about)
    logged = {r["step"]: r["digest"] for r in records if "step" in r}
    if records and records[0].get("run") != about["run"].hex():
        yield f"{place / about['log']} belongs to another run"
    if sorted(logged) != [*range(min(logged, default=0), max(logged, default=-1) + 1)]:
        yield f"{place / about['log']} lacks steps in the middle"
    if saved_step(place) > max(logged, default=-1) + 1:
        yield f"{place} has a snapshot of steps that its log does not know"
    if secret is not None and secret.key("check", about["run"]) != about["secret check"]:
        yield f"{place} was made with another secret"
        secret = None
    path = book or current_ledger_place(place, about)
    if not path.exists():
        yield from windows.faults(secret)
        yield f"{place} is charged to {path}, which is not there"
        return
    with closing(Ledger(path)) as ledger:
        ended = ledger.known(about["run"].hex()).ended is not None
        if not ended:  # its keys are erased then
            yield from windows.faults(secret)
        if book is None:  # a backup's ledger is a copy
            try:
                refuse_moved(place, about, ledger)
            except StateError as problem:
                yield str(problem)
        known, run = ledger.known(about["run"].hex()), about["run"].hex()
        for one in ledger.report():
            if Fraction(one["left"]) < 0:
                yield f"{path}: more than all of the budget of {one['dataset']!r} is spent"
        epochs = [record["epoch"] for record in records if "epoch" in record]
        if known.epoch and known.epoch not in epochs and not ended:
            yield f"{place} is older than what {path} has seen of its run"
        for step, digest in ledger.steps_of(run)[0].items():
            if logged.get(step, digest) != digest:
                yield f"{place}: step {step} has read something else than {path} was told"
        if known.reached > max(logged, default=-1):
            yield f"{place / about['log']} lacks steps that {path} knows"
        if windows.minted < known.minted or windows.final < known.final:
            yield f"{place / 'windows'} is older than what {path} knows of its keys"


class WindowNumbers:
    """The keys of a run's windows as they lie in its folder; nothing is made or erased."""

    def __init__(self, place: Path, about: About) -> None:
        self._folder, self._run = place / "windows", about["run"]
        self._place, self._about = place, about
        self.minted, self.final = self._number("minted"), self._number("final")
        self._keys = {int(path.stem) for path in self._folder.glob("*.key")}
        self._erased = {int(path.stem) for path in self._folder.glob("*.erased")}

    @property
    def open(self) -> list[int]:
        """Windows whose keys exist."""
        return sorted(w for w in self._keys - self._erased if w >= self.final)

    def faults(self, secret: Secret | None) -> Iterator[str]:
        """Keys that are lost, or do not open."""
        lost = set(range(self.final, self.minted)) - self._keys - self._erased
        for window in sorted(lost):
            yield f"{self._folder} has lost the key of window {window}"
        if secret is not None and self.open:
            wrapping = wrapping_secrets(self._place, self._about)
            keys = WindowKeys(self._folder, secret, run=self._run, wrapping=wrapping)
            for window in self.open:
                yield from _tried(_opens(keys, window))

    def _number(self, name: str) -> int:
        path, tag = self._folder / name, self._run.hex().encode()
        number, _, found = path.read_bytes().partition(b" ") if path.exists() else (b"0", b"", tag)
        if not number.isdigit() or found != tag:
            raise StateError(f"{path} is damaged, or belongs to another run; restore it")
        return int(number)


def _opens(keys: WindowKeys, window: int) -> Iterator[str]:
    keys.get(window)
    yield from ()


def _about(place: Path) -> About:
    about = read_about(place)
    if about is None:
        raise StateError(f"{place} holds no run; name the directory that has a run.dps")
    return about


def _log_records(place: Path, about: About) -> list[Record]:
    path = place / about["log"]
    if not path.exists():
        raise StateError(f"{path} is missing; it says what each published step has read")
    with closing(Journal(path, kind="input log")) as journal:
        return journal.read_new()


def _name(about: About) -> str:
    facts = about.get("facts", {})
    return str(about.get("query") or readable(facts.get("name")).strip("'"))
