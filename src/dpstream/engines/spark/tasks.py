"""What all tasks have in common: what they are told, their keys, and names for what they write."""

from __future__ import annotations

import gc
import json
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from typing import Any, Final

import numpy as np
import pyarrow as pa

from dpstream import errors
from dpstream.engines.spark.bucket_files import SharedFiles
from dpstream.engines.spark.packets import Shape
from dpstream.errors import DpstreamError, MissingDependency, StateError
from dpstream.group_by.flow import Flow
from dpstream.group_by.hash_tables import in_buckets
from dpstream.privacy.query_spend import WindowKeyGrant
from dpstream.privacy.state.secret import seal, unseal
from dpstream.query.noise_plan import NoisePlan
from dpstream.records import Words
from dpstream.rows.row_batch import RowKeys
from dpstream.rows.row_reader import RowReader

# Errors of tasks: what an executor raises on purpose reaches the caller as itself.
#
# Spark wraps whatever a task raises into pages of two languages' stacks. An error of ours travels
# through them as one line of JSON, and comes out with its type and its message.

_LOG: Final = logging.getLogger("dpstream.spark")
_TOLD: Final = re.compile(r'TaskFailed: (\["\w+", ".*"\])\s*$', re.MULTILINE)
_OUTRUN: Final = "shuffle map stage with indeterminate output was failed and retried"
_MISSING: Final = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


class TaskFailed(Exception):
    """An error of ours on its way to the driver."""

    @classmethod
    def of(cls, problem: DpstreamError) -> TaskFailed:
        """In one line, whatever its message is."""
        return cls(json.dumps([type(problem).__name__, str(problem)]))


def is_passing(problem: Exception) -> bool:
    """Did a job fail only because an executor was lost at a bad moment, so that it may run again?

    Spark repeats the tasks of a lost executor, but not once tasks behind them have come to their
    end: it cannot know that ours give the same rows in any order and at any time.
    """
    return _OUTRUN in str(problem)


def translate_error(problem: Exception) -> DpstreamError | None:
    """What a failed job means; None: nothing that we know of.

    What Spark had to say is in the log `dpstream.spark`, for those who look for it.
    """
    found = _meaning(str(problem))
    if found is not None:
        _LOG.debug("a job failed on Spark", exc_info=problem)
    return found


def _meaning(text: str) -> DpstreamError | None:
    told = _TOLD.search(text)
    if told is not None:
        name, message = json.loads(told[1])
        kind = getattr(errors, name, StateError)
        found: DpstreamError = kind(message)
        return found
    missing = _MISSING.search(text)
    if missing is not None:
        how = "install it there, or call ship_code(session) before"
        if missing[1].partition(".")[0] != "dpstream":
            how = "install dpstream's dependencies there"
        return MissingDependency(f"executors have no module {missing[1]!r}; {how}")
    if "spark.driver.maxResultSize" in text:
        return StateError(
            "the releases of one job exceed what the driver takes; nothing of this job was "
            "published; raise spark.driver.maxResultSize (and spark.driver.memory), or lower "
            "steps_at_once"
        )
    return None


Batches = Iterator[pa.RecordBatch]


@dataclass(frozen=True, kw_only=True)
class Keys:
    """What tasks need that nobody else may see.

    They travel sealed in a task's function, from memory to memory, and what opens them as a
    broadcast, which is a file on every machine for a while: neither alone says anything.
    """

    rows: RowKeys
    lent: WindowKeyGrant | None = None

    def halves(self) -> tuple[bytes, bytes]:
        """(what opens them, the sealed keys)."""
        return seal([asdict(self.rows), None if self.lent is None else asdict(self.lent)])

    @classmethod
    def joined(cls, opener: bytes, sealed: bytes) -> Keys:
        """As they were."""
        rows, lent = unseal(opener, sealed)
        return cls(rows=RowKeys(**rows), lent=None if lent is None else WindowKeyGrant(**lent))


@dataclass(frozen=True, kw_only=True)
class Task:
    """What all tasks of a job are told; public."""

    plan: NoisePlan
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
