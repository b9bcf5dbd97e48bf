"""Snapshots of a query's state: segments that add to each other, and two manifests.

segments/<owner>-<number>.dps   one window's or period's state, whole or what is new
manifest-<number>.dps           the step to go on with, and the segments to load

A segment is durable before the manifest that names it; a manifest is durable before anything older
goes. If the newest manifest or one of its segments is damaged, the one before it serves: the steps
in between are replayed. A window's segments hold its noise, and who is in its groups, so they are
overwritten, with the window's key, once no manifest needs them.

`erase_unit` takes one unit out of the newest snapshot. The tables hold a unit as a keyed hash with
two counters, and a keyed hash for each group that it is in. The latter go. The former stays, marked
as full: a unit that could begin anew would contribute twice what the promise allows. What its rows
in a group add up to, and which values it has brought there, goes too. Sums have taken the unit in
long ago, and leave the process with noise only; nothing of them is taken back. A value that was
counted is kept as a keyed hash, which does not say who has brought it. Rows that wait for the end
of their window, to be grouped with others of their unit, go too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from dpstream.engines.state_delta import Owner, Watermarks, extract, is_wasteful, owners, restore
from dpstream.errors import DpstreamWarning, StateError
from dpstream.group_by.chosen_bounds import erase_reached, period_of
from dpstream.group_by.flow import Flow
from dpstream.group_by.hash_tables import HashTable
from dpstream.privacy.ledger.charges import chain_digest
from dpstream.privacy.state import read_packed, write_packed
from dpstream.privacy.state.durable_files import erase, make_directory
from dpstream.privacy.state.mirrors import sync_mirror
from dpstream.privacy.state.run_directory import RunDirectory
from dpstream.query.grouping_sets import set_name
from dpstream.records import Integers, Words
from dpstream.rows.column_values import unit_in_type
from dpstream.rows.row_batch import among, id_pairs, rows_at

_MANIFESTS = "manifest-*.dps"
_AT_ONCE = 4  # files that are removed
_FILE = 1 << 15  # bytes that cost as much as one more file: to make, to name, to read back

Stored = tuple[str, int, bytes]
"""A segment that a manifest names: file, size, checksum."""


class DamagedSnapshot(DpstreamWarning):
    """A snapshot could not be read; an older one, and a replay, took its place."""


class Snapshots:
    """The snapshots of one state directory; writing happens on a thread of its own."""

    def __init__(self, folder: Path, *, settled: Callable[[dict[str, Any]], None]) -> None:
        """`settled` is called with the facts of the oldest snapshot that is kept."""
        self._folder, self._settled = folder, settled
        make_directory(folder / "segments", mode=0o700)
        self._chains: dict[Owner, list[Stored]] = {}
        self._watermarks: dict[Owner, Watermarks] = {}
        self._number = max(self._manifests(), default=0)
        self._usable: list[int] = []  # manifests that can be used, the newest last
        self._held: dict[int, dict[str, Any]] = {}  # what these say
        self._writer = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    def save(self, flow: Flow, facts: dict[str, Any], *, whole: bool = False) -> None:
        """Begin to write the state of now; the one before must be durable first.

        `whole`: with nothing taken over from the snapshots before.
        """
        self.wait()
        if whole:
            self._chains, self._watermarks = {}, {}
        self._number += 1
        current = owners(flow)
        parts = []
        for owner in current:
            stored = sum(size + _FILE for _, size, _ in self._chains.get(owner, []))
            wasteful = is_wasteful(flow, [owner], stored)
            watermarks = None if wasteful else self._watermarks.get(owner)
            part, self._watermarks[owner] = extract(flow, owner, watermarks)
            parts.append((owner, part, watermarks is None))
        for owner in [owner for owner in self._chains if owner not in current]:
            del self._chains[owner], self._watermarks[owner]
        self._pending = self._writer.submit(self._write, self._number, parts, facts)

    def wait(self) -> None:
        """Return when the last snapshot is durable; raise what went wrong with it."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def load(self, flow: Flow) -> dict[str, Any] | None:
        """Restore the newest snapshot that is not damaged; None if there is none."""
        numbers = sorted(self._manifests(), reverse=True)
        for at, number in enumerate(numbers):
            try:
                facts = self._load(flow, number)
                self._usable = numbers[at:][::-1]
                return facts
            except StateError as error:  # it stays until there is a newer one: it may be restored
                flow.reset()
                self._chains, self._watermarks = {}, {}
                older = "the one before it" if number != numbers[-1] else "a replay from the start"
                warnings.warn(
                    f"snapshot {number} in {self._folder} is damaged ({error}); {older} is used",
                    DamagedSnapshot,
                    stacklevel=2,
                )
        return None

    def finish(self, *, overwrite: bool = False) -> None:
        """Only the last snapshot stays: the query is over, or nobody may go back beyond it."""
        self.wait()
        if self._usable:
            self._usable = self._usable[-1:]
            self._clean(overwrite=overwrite, last=True)

    def close(self) -> None:
        """Stop the writer."""
        self._writer.shutdown()

    def _write(
        self, number: int, parts: list[tuple[Owner, dict[str, Any], bool]], facts: dict[str, Any]
    ) -> None:
        for owner, part, whole in parts:
            name = f"{owner[0]}{owner[1]}-{number}.dps"
            path = self._folder / "segments" / name
            checksum = write_packed(path, part, kind="segment")
            chain = [] if whole else self._chains[owner]
            self._chains[owner] = [*chain, (name, path.stat().st_size, checksum)]
        chains = [(*owner, chain) for owner, chain in self._chains.items()]
        manifest = {"facts": facts, "chains": chains}
        write_packed(self._folder / f"manifest-{number}.dps", manifest, kind="manifest")
        self._held[number] = manifest
        self._usable = [*self._usable, number][-2:]
        self._clean()

    def _load(self, flow: Flow, number: int) -> dict[str, Any]:
        manifest = read_packed(self._folder / f"manifest-{number}.dps", kind="manifest")
        for kind, owner_number, chain in manifest["chains"]:
            owner = (kind, owner_number)
            for name, _, checksum in chain:
                path = self._folder / "segments" / name
                part = read_packed(path, kind="segment", checksum=checksum)
                self._watermarks[owner] = restore(flow, owner, part)
            self._chains[owner] = [tuple(stored) for stored in chain]
        facts: dict[str, Any] = manifest["facts"]
        if facts["run"] != flow.run_tag:
            raise StateError("it belongs to another run")
        return facts

    def _clean(self, *, overwrite: bool = False, last: bool = False) -> None:
        """Forget what the kept manifests do not need; `last`: nobody may go back beyond the one."""
        kept: set[str] = set()
        facts: list[dict[str, Any]] = []
        for number in self._manifests():
            path = self._folder / f"manifest-{number}.dps"
            if number in self._usable:
                manifest = self._held.get(number) or read_packed(path, kind="manifest")
                kept |= {name for *_, chain in manifest["chains"] for name, *_ in chain}
                facts.append(manifest["facts"])
            else:
                path.unlink()
        self._held = {number: self._held[number] for number in self._usable if number in self._held}
        old = [p for p in (self._folder / "segments").iterdir() if p.name not in kept]
        if len(old) > _AT_ONCE:
            with ThreadPoolExecutor(_AT_ONCE) as pool:  # most of it is waiting for the disk
                list(pool.map(lambda path: _remove(path, overwrite=overwrite), old))
        else:
            for path in old:
                _remove(path, overwrite=overwrite)
        if len(facts) > 1 or last:  # the only snapshot may turn out to be damaged
            self._settled(min(facts, key=lambda known: known["step"]))

    def _manifests(self) -> list[int]:
        names = (path.stem.removeprefix("manifest-") for path in self._folder.glob(_MANIFESTS))
        return [int(number) for number in names if number.isdecimal()]


def _remove(path: Path, *, overwrite: bool) -> None:
    """What is about a window is always overwritten."""
    erase(path) if overwrite or path.name.startswith("window") else path.unlink()


def erase_unit(flow: Flow, directory: RunDirectory, unit: Any, *, digest_key: bytes) -> int:
    """Erase a unit from the newest snapshot; returns in how many (period, group) places it was.

    The run must have stopped in good order: steps that a restart takes again would lack the unit,
    and the same noise would meet other sums.
    """
    sets, keys = flow.query.grouping_sets, flow.query.keys
    if sets and keys not in sets:
        raise StateError(
            f"{directory.folder} groups by {', '.join(map(set_name, sets))}, and not by all keys "
            "together, by which a unit is kept: where it is cannot be told. Its state goes with "
            "its windows; or give a next query that set, too"
        )
    snapshots = Snapshots(directory.folder, settled=lambda facts: None)
    try:
        facts = snapshots.load(flow)
        if facts is None:
            raise StateError(
                f"{directory.folder} holds no snapshot yet; let the run publish and stop first"
            )
        if directory.log.last >= facts["step"]:
            raise StateError(
                f"the run in {directory.folder} was killed after its last snapshot (step "
                f"{facts['step']} of {directory.log.last + 1} is saved); start it, stop it with "
                "Ctrl-C, and try again"
            )
        before = [*facts.get("before_erasures", []), facts["chain"]]
        directory.refuse_undone_erasure(facts["step"], before)
        directory.begin()  # a copy must not go on with the unit
        ids = list(_ids_of_unit(flow, unit))
        places = sum(_erase(flow, unit_id) for unit_id in ids)
        # What follows depends on this: a replay without it must not pass for the same input.
        content = b"forgot" + b"".join(unit_id.tobytes() for unit_id in ids)
        chain = chain_digest(digest_key, facts["chain"], content)
        facts |= {"chain": chain, "before_erasures": before}
        snapshots.save(flow, facts, whole=True)
        snapshots.finish(overwrite=True)
        about, run = directory.about, directory.run.hex()
        sync_mirror(directory.folder)
        directory.ledger.note_erasure(about["dataset"], run, facts["step"], chain.hex())
    finally:
        snapshots.close()
    return places


def _ids_of_unit(flow: Flow, unit: Any) -> Iterator[Words]:
    """The unit's ids, one per period that has state."""
    name = flow.query.privacy_unit_column
    kind = flow.reader.types.get(name)
    if kind is None:
        raise StateError("this run has read nothing yet; there is nothing to erase")
    value = unit_in_type(unit, kind, name)
    held = (rows for pieces in flow.state.held.values() for rows in pieces)
    for period in sorted(flow.state.periods | {int(rows.periods[0]) for rows in held}):
        yield flow.reader.ids.units(value, np.array([period]))


def _erase(flow: Flow, unit_id: Words) -> int:
    """Empty the places of one unit, and mark it as full."""
    bounds, most = flow.query.bounds, flow.query.most_dropped  # the most, where they are chosen
    emptied = _forget_held(flow, unit_id)
    for bucket in flow.state.units:
        for units in bucket.periods.values():
            rows = _rows_of(units, unit_id)
            if bounds.rows == 1:  # no table says which group it is in
                emptied += int(np.count_nonzero(units.numbers[rows, 0] == 1))
            units.numbers[rows] = (bounds.rows + 1, bounds.groups + 1)
        for period, reached in bucket.reached.items():
            rows = _rows_of(reached, unit_id)
            erase_reached(flow.query, reached, rows)  # it stays in its bins
            for window, of_window in bucket.reached_pairs.items():
                if period_of(flow.query, window) == period:
                    mine = np.isin(of_window.numbers[: of_window.used, 0], rows + 1)
                    of_window.words[np.flatnonzero(mine)] = 0
        for dropped in bucket.dropped.values():
            dropped.numbers[_rows_of(dropped, unit_id)] = most + 1  # beyond, and counted as that
    for window, buckets in flow.state.windows.items():
        groups = np.concatenate([b.table.ids[: b.table.used] for b in buckets])
        places = unit_id ^ groups[:, ::-1]  # as bounding names a unit in a group
        tables = [b.windows[window] for b in flow.state.units if window in b.windows]
        pairs = sum(_empty(table, places) for table in tables)
        emptied += pairs if bounds.rows > 1 else 0
        for bucket in flow.state.units:
            if window in bucket.counted_pairs:
                _empty(bucket.counted_pairs[window], places)
            if window in bucket.set_pairs:
                _empty(bucket.set_pairs[window], places)
            if window in bucket.contributions:
                _empty(bucket.contributions[window], places)
                for number, brought in enumerate(bucket.values[window]):
                    for group in buckets:  # which holds all values, and not who brought them
                        known = group.values[number]
                        _empty(brought, known.ids[: known.used] ^ unit_id)
        for group in buckets:
            if group.members is not None:
                _empty(group.members, places)
    return emptied


def _forget_held(flow: Flow, unit_id: Words) -> int:
    """Let go of a unit's rows that wait for the end of their window; in how many they were.

    They have contributed nothing yet: what the unit has until then is a window without them.
    """
    places = set()
    for window, pieces in flow.state.held.items():
        for at, rows in enumerate(pieces):
            mine = among(rows.units, unit_id)
            if mine.any():
                pieces[at] = rows_at(rows, np.flatnonzero(~mine))
                places.add((window, int(rows.periods[0])))
        flow.state.held[window] = [rows for rows in pieces if len(rows)]
    return len(places)


def _rows_of(table: HashTable, wanted: Words) -> Integers:
    """The rows of ids that are there."""
    return np.flatnonzero(np.isin(id_pairs(table.ids[: table.used]), id_pairs(wanted)))


def _empty(table: HashTable, places: Words) -> int:
    """Overwrite rows with zeros; the index forgets them when it is next built."""
    rows = _rows_of(table, places)
    table.words[rows] = 0
    return len(rows)
