"""Rows that wait for their step: one file per unit bucket and batch, sorted by step.

Each file tells the digest of every step's rows in it, and the driver knows the digest of that list:
rows that a task reads are those that were logged, or the task fails before any noise is drawn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.engines.spark.files import SharedFiles
from dpstream.engines.spark.packets import Shape, numbers
from dpstream.errors import NoiseReuse
from dpstream.stages.hashing import combine, multiset_digest
from dpstream.stages.rows import Rows, in_order

StepDigests = dict[int, tuple[int, int]]
"""By step: the multiset digest of its rows."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A file of waiting rows, as the driver knows it."""

    bucket: int
    name: str
    first: int
    last: int
    mark: str
    """Digest of its list of digests."""

    def to_json(self) -> list[Any]:
        """Plain values."""
        return [self.bucket, self.name, self.first, self.last, self.mark]

    @classmethod
    def from_json(cls, kept: Sequence[Any]) -> Waiting:
        """As it was."""
        bucket, name, first, last, mark = kept
        return cls(bucket=bucket, name=name, first=first, last=last, mark=mark)


def step_digests(rows: Rows) -> StepDigests:
    """The digest of every step's rows."""
    found: StepDigests = {}
    for step, runs in groupby(rows.runs, key=lambda run: run[0]):
        listed = list(runs)
        found[step] = multiset_digest(rows.digests[listed[0][3] : listed[-1][4]])
    return found


def added(parts: Iterable[StepDigests]) -> StepDigests:
    """The digests of all parts together."""
    found: StepDigests = {}
    for part in parts:
        for step, digest in part.items():
            found[step] = combine(found.get(step, (0, 0)), digest)
    return found


def as_text(digests: StepDigests) -> str:
    """For a file's own list."""
    return json.dumps([[step, *digests[step]] for step in sorted(digests)])


def from_text(text: str) -> StepDigests:
    """As it was."""
    return {step: (digest, count) for step, digest, count in json.loads(text)}


def keep(
    files: SharedFiles, shape: Shape, bucket: int, name: str, table: pa.Table
) -> tuple[Waiting, StepDigests]:
    """Write the rows that arrived at a unit bucket."""
    rows = in_order(shape.rows(table))
    digests = step_digests(rows)
    text = as_text(digests)
    kept = shape.packed(rows).replace_schema_metadata({"digests": text})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, kept.schema) as writer:
        writer.write_table(kept, max_chunksize=max(len(kept), 1))
    files.write(name, sink.getvalue())
    about = Waiting(
        bucket=bucket, name=name, first=min(digests), last=max(digests), mark=_mark(text)
    )
    return about, digests


def load(files: SharedFiles, shape: Shape, about: Waiting, first: int, end: int) -> Rows:
    """The rows of steps `first` to `end` - 1; others than those that were logged are refused."""
    table = pa.ipc.open_file(files.read(about.name)).read_all()
    text = (table.schema.metadata or {}).get(b"digests", b"").decode()
    steps = numbers(table, "step")
    low, high = np.searchsorted(steps, [first, end])
    rows = shape.rows(table.slice(low, high - low))
    logged = {step: d for step, d in from_text(text or "[]").items() if first <= step < end}
    if _mark(text) != about.mark or step_digests(rows) != logged:
        raise NoiseReuse(
            f"{about.name} does not hold the rows that were logged for steps {first} to {end - 1}; "
            "the same noise over other data would reveal the difference, so nothing was "
            "published; restore the file"
        )
    return rows


def _mark(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
