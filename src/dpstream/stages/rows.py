"""Rows as the engine needs them: ids, window, period, step and grid values."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.privacy.state import Secret
from dpstream.records import Integers, Rejected, Words
from dpstream.stages.stepwise import is_constant


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Readable rows, sorted by step, window and period; within that in the order they came."""

    units: Words
    groups: Words
    digests: Words
    windows: Integers
    periods: Integers
    steps: Integers
    values: Integers
    keys: pa.Table

    def __len__(self) -> int:
        return len(self.steps)

    @cached_property
    def runs(self) -> list[tuple[int, int, int, int, int]]:
        """(step, window, period, first row, end row) of each run of equal ones."""
        if not len(self):
            return []
        edges = np.zeros(len(self), bool)
        edges[0] = True
        for column in (self.steps, self.windows, self.periods):
            if not is_constant(column):
                edges[1:] |= column[1:] != column[:-1]
        starts = np.flatnonzero(edges)
        ends = [*starts[1:].tolist(), len(self)]
        columns = (self.steps[starts], self.windows[starts], self.periods[starts])
        return list(zip(*(c.tolist() for c in columns), starts.tolist(), ends, strict=True))

    @cached_property
    def bytes(self) -> int:
        """Memory held."""
        ids = (self.units, self.groups, self.digests, self.values)
        places = [c for c in (self.windows, self.periods, self.steps) if not is_constant(c)]
        return sum(a.nbytes for a in (*ids, *places)) + int(self.keys.nbytes)


@dataclass(kw_only=True)
class Setting:
    """Rows that were set aside, for the operator alone."""

    rejected: list[Rejected] = field(default_factory=list)
    outside: int = 0
    late: int = 0
    other_keys: int = 0


@dataclass(frozen=True, kw_only=True)
class RowKeys:
    """The keys that hash units, groups, rows and periods: secret.

    Names of units and groups are hashed under the secret's own keys, so that queries over one
    source hash a text once. Which rows of a unit are kept, and what a unit is called in a period,
    depends on keys of the run.
    """

    units: bytes = field(repr=False)
    groups: bytes = field(repr=False)
    digests: bytes = field(repr=False)
    periods: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: Secret, run: bytes) -> RowKeys:
        """Those of a run."""
        return cls(
            units=secret.key("unit ids")[:16],
            groups=secret.key("group ids")[:16],
            digests=secret.key("row digests", run)[:16],
            periods=secret.key("period ids", run)[:16],
        )


def id_pairs(ids: Words) -> Any:
    """Ids as single items, for set operations."""
    pair = np.dtype([("first", "<u8"), ("second", "<u8")])
    return np.ascontiguousarray(ids, "<u8").view(pair)[:, 0]


def in_order(rows: Rows) -> Rows:
    """Sorted by step, window and period; rows that come so are left alone."""
    if len(rows.runs) == 1 or not len(rows):
        return rows
    firsts = [run[:3] for run in rows.runs]
    if all(one <= two for one, two in pairwise(firsts)):
        return rows
    order = np.lexsort((rows.periods, rows.windows, rows.steps))
    return Rows(
        **{
            name: getattr(rows, name)[order]
            for name in ("units", "groups", "digests", "windows", "periods", "steps", "values")
        },
        keys=rows.keys.take(pa.array(order)),
    )
