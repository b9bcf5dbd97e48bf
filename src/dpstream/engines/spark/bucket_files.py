"""Files that driver and executors share: rows that wait for their step, and bucket state.

They lie on a path that every machine of the cluster sees. A local or mounted path is written
durably (fsync, atomic rename); another address (`s3://`, `hdfs://`, `gs://`) through Arrow's file
systems, whose files appear whole when they are closed.

Waiting rows are in one file per unit bucket and batch, sorted by step. The driver knows the digest
of every file's bytes: rows that a task reads are those that were logged, or the task fails before
any noise is drawn.

A bucket's state is a chain of files: one that is whole, then what each job added. A job reads a
chain that is fixed before it begins, and each try of a task writes one more file under a name of
its own. So a task that is done twice begins from the same state, and what one try writes another
cannot spoil: the driver adds the file of the try whose output was accepted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import fs

from dpstream.engines.spark.shuffle_rows import Shape, numbers
from dpstream.engines.state_delta import Owner, Watermarks, extract, is_wasteful, owners, restore
from dpstream.errors import NoiseReuse, StateError
from dpstream.group_by.flow import Flow
from dpstream.privacy.state import mint_run_id, pack, read_packed, unpack, write_packed
from dpstream.privacy.state.durable_files import erase, replace, wrap_write_errors
from dpstream.privacy.state.serial import checksum_of
from dpstream.rows.row_batch import Rows, in_order
from dpstream.rows.row_ids import combine, multiset_digest


@dataclass(frozen=True)
class SharedFiles:
    """A folder of immutable files, named by what they hold."""

    location: str

    @property
    def local(self) -> Path | None:
        """The folder, if it is a path."""
        return None if "://" in self.location else Path(self.location)

    def write(self, name: str, *content: Any) -> None:
        """Put a file there, whole."""
        if self.local is not None:
            with wrap_write_errors(self.local / name):
                replace(self.local / name, *content)
            return
        system, root = _system(self.location)
        place = f"{root}/{name}"
        system.create_dir(place.rpartition("/")[0], recursive=True)
        with system.open_output_stream(place) as stream:
            for part in content:
                stream.write(part)

    def read(self, name: str) -> pa.Buffer:
        """All of a file; one that is gone is an error, never empty."""
        try:
            if self.local is not None:
                return pa.memory_map(str(self.local / name)).read_buffer()
            system, root = _system(self.location)
            with system.open_input_file(f"{root}/{name}") as file:
                return file.read_buffer()
        except FileNotFoundError:
            raise StateError(
                f"{self.location} lacks {name}; every executor must see the same files there: use "
                "a path that is mounted everywhere, or an address such as s3:// or hdfs://; if "
                "files were lost, restore them, or use a new state directory (a new run, charged "
                "anew)"
            ) from None

    def remove(self, names: Iterable[str]) -> None:
        """Remove files that nothing refers to any more; state, which holds noise, is overwritten
        first."""
        for name in names:
            if self.local is not None:
                path = self.local / name
                if path.exists() and name.startswith("state/"):
                    erase(path)
                else:
                    path.unlink(missing_ok=True)
                continue
            system, root = _system(self.location)
            if system.get_file_info(f"{root}/{name}").type != fs.FileType.NotFound:
                system.delete_file(f"{root}/{name}")

    def remove_all(self) -> None:
        """Remove the folder with everything in it; state, which holds noise, is overwritten."""
        self.remove(self.names("state"))
        system, root = _system(self.location)
        if system.get_file_info(root).type == fs.FileType.Directory:
            system.delete_dir(root)

    def names(self, folder: str) -> list[str]:
        """What is in a folder."""
        system, root = _system(self.location)
        selector = fs.FileSelector(f"{root}/{folder}", allow_not_found=True)
        return [f"{folder}/{file.base_name}" for file in system.get_file_info(selector)]


@lru_cache(maxsize=8)
def _system(location: str) -> tuple[Any, str]:
    if "://" not in location:
        return fs.LocalFileSystem(), location
    system, root = fs.FileSystem.from_uri(location)
    return system, root.rstrip("/")


Stored = tuple[str, int, str]
"""A file, its size, and the checksum of its content."""
Chain = Sequence[Stored]
"""Files, the oldest first."""
_LONGEST = 32  # files


def load_segments(
    files: SharedFiles, flow: Flow, stage: str, chain: Chain
) -> dict[Owner, Watermarks]:
    """Take a chain in; answers how much of each part it has."""
    watermarks: dict[Owner, Watermarks] = {}
    for name, _, checksum in chain:
        content, expected = files.read(name).to_pybytes(), bytes.fromhex(checksum)
        segment = unpack(content, kind="segment", origin=name, checksum=expected)
        living = {(kind, number) for kind, number in segment["owners"]}
        for kind, number in [owner for owner in watermarks if owner not in living]:
            del watermarks[kind, number]
            evict = flow.evict if kind == "window" else flow.state.evict_period
            evict(number)
        for kind, number, delta in segment["parts"]:
            watermarks[kind, number] = restore(flow, (kind, number), delta, [stage])
    return watermarks


def save(
    files: SharedFiles,
    flow: Flow,
    stage: str,
    name: str,
    chain: Chain,
    watermarks: dict[Owner, Watermarks],
) -> tuple[Stored, bool]:
    """Write what is new since the chain; (the file, whether it holds everything)."""
    current = [owner for owner in owners(flow) if stage == "units" or owner[0] == "window"]
    stored = sum(size for _, size, _ in chain)
    whole = not chain or len(chain) >= _LONGEST or is_wasteful(flow, current, stored)
    whole = whole or any(owner not in current for owner in watermarks)  # what is over must not stay
    parts = []
    for owner in current:
        delta, _ = extract(flow, owner, None if whole else watermarks.get(owner), [stage])
        parts.append([*owner, delta])
    packed = pack({"owners": [list(o) for o in current], "parts": parts}, kind="segment")
    files.write(name, packed)
    return (name, len(packed), checksum_of(packed).hex()), whole


StepDigests = dict[int, tuple[int, int]]
"""By step: the multiset digest of its rows."""


@dataclass(frozen=True)
class Waiting:
    """A file of waiting rows, as the driver knows it."""

    bucket: int
    name: str
    first: int
    last: int
    digest: str
    """Of its bytes."""


def step_digests(rows: Rows) -> StepDigests:
    """The digest of every step's rows."""
    digests: StepDigests = {}
    for step, runs in groupby(rows.runs, key=lambda run: run[0]):
        listed = list(runs)
        digests[step] = multiset_digest(rows.digests[listed[0][3] : listed[-1][4]])
    return digests


def add_digests(parts: Iterable[StepDigests]) -> StepDigests:
    """The digests of all parts together."""
    total: StepDigests = {}
    for part in parts:
        for step, digest in part.items():
            total[step] = combine(total.get(step, (0, 0)), digest)
    return total


def listed_digests(digests: StepDigests) -> list[list[Any]]:
    """Digests as they are written down: numbers of 128 bits as text."""
    return [[step, str(digest), count] for step, (digest, count) in digests.items()]


def digests_of(listed: Iterable[Any]) -> StepDigests:
    """As they were."""
    return {step: (int(digest), count) for step, digest, count in listed}


def keep(
    files: SharedFiles, shape: Shape, bucket: int, name: str, table: pa.Table
) -> tuple[Waiting, StepDigests]:
    """Write the rows that arrived at a unit bucket."""
    rows = in_order(shape.rows(table))
    digests, kept = step_digests(rows), shape.packed(rows)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, kept.schema) as writer:
        writer.write_table(kept, max_chunksize=max(len(kept), 1))
    body = sink.getvalue()
    files.write(name, body)
    return Waiting(bucket, name, min(digests), max(digests), _digest(body)), digests


def load_waiting(files: SharedFiles, shape: Shape, about: Waiting, first: int, end: int) -> Rows:
    """The rows of steps `first` to `end` - 1, from a file that is as it was when they were logged.

    Any other byte is refused before anything in it is believed.
    """
    body = files.read(about.name)
    if _digest(body) != about.digest:
        raise NoiseReuse(
            f"{about.name} does not hold the rows that were logged for steps {first} to {end - 1}; "
            "the same noise over other data would reveal the difference, so nothing was "
            "published; restore the file"
        )
    table = pa.ipc.open_file(body).read_all()
    low, high = np.searchsorted(numbers(table, "step"), [first, end])
    return shape.rows(table.slice(low, high - low))


def _digest(body: pa.Buffer) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()


_KIND = "spark progress"
_NOT_KEPT = ("path", "_start")


@dataclass(kw_only=True)
class DriverProgress:
    """How far a run is: what the driver makes durable between two jobs.

    It says which step is next, which rows wait, and which files hold each bucket's state. Files
    that it does not name are leftovers of a job that did not come to its end.

    There is one copy, replaced atomically and durably, with a checksum. An older one would not do:
    the stream's own checkpoint has gone on, rows that were published are removed, and the noise of
    windows that are over is erased with their keys, at once.
    """

    path: Path
    run: str
    """The tag of the run that it belongs to."""
    step: int = 0
    chain: bytes = bytes(16)
    """The digest chain of all steps before."""
    jobs: int = 0
    """How many were begun: their files have names of their own."""
    waiting: list[Waiting] = field(default_factory=list)
    digests: StepDigests = field(default_factory=dict)
    """Of the rows that wait, by step."""
    units: dict[int, list[Stored]] = field(default_factory=dict)
    groups: dict[int, list[Stored]] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)
    """Inputs that were read to their end."""
    listed: list[str] = field(default_factory=list)
    """The files of a stream, where they are read without it."""
    batch: int = -1
    """The last batch of the stream whose rows wait or have been published."""
    batch_digests: StepDigests = field(default_factory=dict)
    batch_arrived: int | None = None
    """The step at which that batch was read; None: its rows' event times tell."""
    earlier: list[tuple[int, int, bytes]] = field(default_factory=list)
    """What was published of earlier windows, where the query looks at it."""
    remembered: dict[str, Any] = field(default_factory=dict)
    """The keys that earlier windows have shown, where the query remembers them."""
    chosen: dict[str, Any] = field(default_factory=dict)
    """The bounds of periods and what they are chosen by, where they are chosen."""
    tables_step: int = 0
    """The last step whose public tables are known, where some are read anew."""
    tables: dict[str, str] = field(default_factory=dict)
    """The digests of the versions that rows meet now."""
    batch_tables: dict[str, str] = field(default_factory=dict)
    """Those that the last batch of the stream has met."""
    _start: str = field(default_factory=lambda: mint_run_id().hex()[:8], init=False)

    @classmethod
    def load(cls, path: Path, run: str) -> DriverProgress:
        """The newest one; another run's is refused."""
        if not path.exists():
            return cls(path=path, run=run)
        try:
            kept = read_packed(path, kind=_KIND)
        except StateError as problem:
            raise StateError(
                f"{path} cannot be used ({problem}); restore it from a backup of the whole state "
                "directory, or use a new one (a new run, charged anew)"
            ) from None
        if kept["run"] != run:
            raise StateError(
                f"{path} belongs to another run; restore the run's own, or use a new state "
                "directory (a new run, charged anew)"
            )
        kept["waiting"] = [Waiting(*file) for file in kept["waiting"]]
        for name in ("digests", "batch_digests"):
            kept[name] = digests_of(kept[name])
        return cls(path=path, **kept)

    def save(self) -> None:
        """Make it the newest one, durably."""
        kept = {name: value for name, value in vars(self).items() if name not in _NOT_KEPT}
        kept["waiting"] = [list(astuple(file)) for file in self.waiting]
        for name in ("earlier", "remembered", "chosen", "listed"):
            if not kept[name]:
                del kept[name]
        if not self.tables:
            del kept["tables_step"], kept["tables"], kept["batch_tables"]
        for name in ("digests", "batch_digests"):
            kept[name] = listed_digests(kept[name])
        write_packed(self.path, kept, kind=_KIND)

    def name_job(self, name: str) -> str:
        """A name that no other job of the run has, also after a kill."""
        self.jobs += 1
        return f"{self.jobs}-{name}-{self._start}"

    def advance(
        self, end: int, chain: bytes, saved: Iterable[dict[str, Any]], *, finished: bool
    ) -> None:
        """The steps up to `end` are published; `saved` names the files of the new state."""
        for note in saved:
            chains, bucket = getattr(self, note["stage"]), note["bucket"]
            before = [] if note["whole"] else chains.get(bucket, [])
            chains[bucket] = [*before, tuple(note["segment"])]
        self.waiting = [file for file in self.waiting if file.last >= end]
        if finished:  # nothing of the query's state is needed any more
            self.waiting, self.units, self.groups, self.earlier = [], {}, {}, []
            self.remembered = {}
            self.chosen = {name: self.chosen[name] for name in self.chosen if name == "bounds"}
        self.digests = {step: digest for step, digest in self.digests.items() if step >= end}
        self.step, self.chain = end, chain

    def names(self) -> set[str]:
        """Every file that is needed."""
        chains = [*self.units.values(), *self.groups.values()]
        return {file.name for file in self.waiting} | {n for chain in chains for n, *_ in chain}
