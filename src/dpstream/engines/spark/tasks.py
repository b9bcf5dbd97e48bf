"""What all tasks have in common: what they are told, their keys, and names for what they write."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.engines.spark.failures import TaskFailed
from dpstream.engines.spark.files import SharedFiles
from dpstream.engines.spark.packets import Shape
from dpstream.errors import DpstreamError
from dpstream.privacy.query_spend import LentKeys
from dpstream.privacy.state.secret import seal, unseal
from dpstream.records import Words
from dpstream.stages.flow import Flow
from dpstream.stages.plan import Plan
from dpstream.stages.row_reader import RowReader
from dpstream.stages.rows import RowKeys
from dpstream.stages.tables import in_buckets

Batches = Iterator[pa.RecordBatch]


@dataclass(frozen=True, kw_only=True)
class Keys:
    """What tasks need that nobody else may see.

    They travel sealed in a task's function, from memory to memory, and what opens them as a
    broadcast, which is a file on every machine for a while: neither alone says anything.
    """

    rows: RowKeys
    lent: LentKeys | None = None

    def halves(self) -> tuple[bytes, bytes]:
        """(what opens them, the sealed keys)."""
        return seal([asdict(self.rows), None if self.lent is None else asdict(self.lent)])

    @classmethod
    def joined(cls, opener: bytes, sealed: bytes) -> Keys:
        """As they were."""
        rows, lent = unseal(opener, sealed)
        return cls(rows=RowKeys(**rows), lent=None if lent is None else LentKeys(**lent))


@dataclass(frozen=True, kw_only=True)
class Task:
    """What all tasks of a job are told; public."""

    plan: Plan
    types: dict[str, pa.DataType]
    buckets: int
    files: SharedFiles
    job: str
    """Names the files that this job writes; no other job has it."""
    opener: bytes = field(repr=False)
    """Opens the keys."""
    keys: Keys | None = field(default=None, repr=False)
    """Added where the task is done."""

    @property
    def shape(self) -> Shape:
        """The columns that pass between tasks."""
        return Shape.of(self.plan.query)

    def reader(self) -> RowReader:
        """Reads rows with the run's keys."""
        assert self.keys is not None
        return RowReader.with_keys(self.plan.query, self.keys.rows, self.types)

    def flow(self, bucket: int) -> Flow:
        """The stages, for one bucket."""
        share = (bucket, self.buckets)
        return Flow(self.plan, self.reader(), buckets=1, threads=1, share=share)


def opening(
    work: Callable[[Any, Batches], Batches], shared: Any, sealed: bytes, batches: Batches
) -> Batches:
    """Do a task: all that is public comes as a broadcast, the sealed keys with the function."""
    try:
        task = packer().loads(shared.value)
        yield from work(replace(task, keys=Keys.joined(task.opener, sealed)), batches)
    except DpstreamError as problem:
        raise TaskFailed.of(problem) from None
    settle(work.__name__)


_SETTLED: set[str] = set()


def settle(work: str) -> None:
    """Take what the first task of a kind has loaded out of the garbage collector's sight.

    A worker of Spark's collects garbage after every task. With all that Numba and Arrow keep loaded
    this takes 0.1 s of processor time, more than most tasks; what stays for good need not be
    looked at again.
    """
    if work not in _SETTLED and context() is not None:
        _SETTLED.add(work)
        gc.collect()
        gc.freeze()


def packer() -> Any:
    """Spark's own way to send objects: a query may hold functions that were made of its SQL."""
    return import_module("pyspark.serializers").CloudPickleSerializer()


def divided(task: Task, table: pa.Table, words: Words) -> Iterator[tuple[int, pa.Table]]:
    """A table's rows by the bucket of an id."""
    places = in_buckets(words, task.buckets)
    in_order = table.take(pa.array(np.concatenate(places)))
    first = 0
    for bucket, mine in enumerate(places):
        yield bucket, in_order.slice(first, len(mine))
        first += len(mine)


def attempt() -> int:
    """Different for every try of every task: the driver learns the name that was accepted.

    A copy of a task that is still at work when another was accepted, and its input is removed,
    writes where nobody looks.
    """
    task = context()
    return 0 if task is None else int(task.taskAttemptId())  # None: not in a task of Spark's


def context() -> Any:
    """Spark's own description of the task."""
    from pyspark import TaskContext

    return TaskContext.get()
