"""Rows that wait for their step: one file per unit bucket and batch, sorted by step.

The driver knows the digest of every file's bytes: rows that a task reads are those that were
logged, or the task fails before any noise is drawn.
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
    digest: str
    """Of its bytes."""

    def to_json(self) -> list[Any]:
        """Plain values."""
        return [self.bucket, self.name, self.first, self.last, self.digest]

    @classmethod
    def from_json(cls, kept: Sequence[Any]) -> Waiting:
        """As it was."""
        bucket, name, first, last, digest = kept
        return cls(bucket=bucket, name=name, first=first, last=last, digest=digest)


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
    """On its way to the driver."""
    return json.dumps([[step, *digests[step]] for step in sorted(digests)])


def from_text(text: str) -> StepDigests:
    """As it was."""
    return {step: (digest, count) for step, digest, count in json.loads(text)}


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
    about = Waiting(
        bucket=bucket, name=name, first=min(digests), last=max(digests), digest=_digest(body)
    )
    return about, digests


def load(files: SharedFiles, shape: Shape, about: Waiting, first: int, end: int) -> Rows:
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
