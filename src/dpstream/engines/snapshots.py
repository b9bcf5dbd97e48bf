"""Snapshots of a query's state: segments that add to each other, and two manifests.

segments/<owner>-<number>.dps   one window's or period's state, whole or what is new
manifest-<number>.dps           the step to go on with, and the segments to load

A segment is durable before the manifest that names it; a manifest is durable before anything older
goes. If the newest manifest or one of its segments is damaged, the one before it serves: the steps
in between are replayed. A window's segments hold its noise, and who is in its groups, so they are
overwritten, with the window's key, once no manifest needs them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dpstream.engines.parts import Owner, Watermarks, extract, owners, restore, size_of
from dpstream.errors import StateError
from dpstream.privacy.state import read_packed, write_packed
from dpstream.privacy.state.files import erase, make_directory
from dpstream.stages.flow import Flow

_MANIFEST = re.compile(r"manifest-(\d+)\.dps")
_GROWTH = 2  # segments that hold this many times what there is are written anew
_SMALL = 1 << 20  # bytes; waste below is left alone
_AT_ONCE = 4  # files that are removed


Stored = tuple[str, int, bytes]
"""A segment that a manifest names: file, size, checksum."""


class DamagedSnapshot(UserWarning):
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
        self._whole: list[int] = []  # manifests that can be used, the newest last
        self._writer = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    def save(self, flow: Flow, facts: dict[str, Any]) -> None:
        """Begin to write the state of now; the one before must be durable first."""
        self.wait()
        self._number += 1
        current = owners(flow)
        parts = []
        for owner in current:
            stored = sum(size for _, size, _ in self._chains.get(owner, []))
            wasteful = stored > _GROWTH * size_of(flow, owner) + _SMALL
            watermarks = None if wasteful else self._watermarks.get(owner)
            part, self._watermarks[owner] = extract(flow, owner, watermarks)
            parts.append((owner, part, watermarks is None))
        for owner in [owner for owner in self._chains if owner not in current]:
            del self._chains[owner], self._watermarks[owner]
        self._pending = self._writer.submit(self._write, self._number, parts, facts)

    def save_whole(self, flow: Flow, facts: dict[str, Any]) -> None:
        """As `save`, with nothing taken over from the snapshots before."""
        self._chains, self._watermarks = {}, {}
        self.save(flow, facts)

    def wait(self) -> None:
        """Return when the last snapshot is durable; raise what went wrong with it."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def load(self, flow: Flow) -> dict[str, Any] | None:
        """Restore the newest whole snapshot; None if there is none."""
        numbers = sorted(self._manifests(), reverse=True)
        for at, number in enumerate(numbers):
            try:
                found = self._load(flow, number)
                self._whole = numbers[at:][::-1]
                return found
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
        if self._whole:
            self._whole = self._whole[-1:]
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
        self._whole = [*self._whole, number][-2:]
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
            if number in self._whole:
                manifest = read_packed(path, kind="manifest")
                kept |= {name for *_, chain in manifest["chains"] for name, *_ in chain}
                facts.append(manifest["facts"])
            else:
                path.unlink()
        old = [p for p in (self._folder / "segments").iterdir() if p.name not in kept]
        with ThreadPoolExecutor(_AT_ONCE) as pool:  # most of it is waiting for the disk
            for _ in pool.map(lambda path: _remove(path, overwrite=overwrite), old):
                pass
        if len(facts) > 1 or last:  # the only snapshot may turn out to be damaged
            self._settled(min(facts, key=lambda known: known["step"]))

    def _manifests(self) -> list[int]:
        names = (_MANIFEST.fullmatch(path.name) for path in self._folder.iterdir())
        return [int(name[1]) for name in names if name]


def _remove(path: Path, *, overwrite: bool) -> None:
    """What is about a window is always overwritten."""
    erase(path) if overwrite or path.name.startswith("window") else path.unlink()
