"""Subqueries per unit: what a unit's rows of a window become, once the window is over.

A row waits until its window closes. Then the rows of each unit become inner rows, which look at
nothing else, and these are bounded and aggregated as rows are (docs/soundness/unit_rows.md). Inner
rows that more rows cannot take away leave as soon as they are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import pyarrow as pa

from dpstream.records import Integers, Words

ROW = "$row"
"""The column that says which inner row a row is made of."""
Span = tuple[int | None, int | None]
"""From when to when a window reaches."""


class HeldRows(Protocol):
    """Rows of one window, or some of them, that wait."""

    @property
    def units(self) -> Words:
        """Whose they are."""

    @property
    def groups(self) -> Words:
        """The ids of the columns `own_keys`."""

    @property
    def digests(self) -> Words:
        """The order of rows of one time."""

    @property
    def values(self) -> Integers:
        """The event time, in the only column."""

    @property
    def steps(self) -> Integers:
        """The step of the run at which each came."""

    @property
    def keys(self) -> pa.Table:
        """The columns that are held."""


def _nobody() -> Words:
    return np.zeros((0, 2), np.uint64)


@dataclass(frozen=True, kw_only=True)
class NoRows:
    """No rows, with the columns that rows would have: they tell the types of inner rows."""

    keys: pa.Table
    units: Words = field(default_factory=_nobody)
    groups: Words = field(default_factory=_nobody)
    digests: Words = field(default_factory=_nobody)
    values: Integers = field(default_factory=lambda: np.zeros((0, 1), np.int64))
    steps: Integers = field(default_factory=lambda: np.zeros(0, np.int64))


@runtime_checkable
class PerUnit(Protocol):
    """A `Prepare` whose rows wait, and become inner rows of their unit."""

    @property
    def held(self) -> Sequence[str]:
        """The columns of a row that wait with it."""

    @property
    def numbers(self) -> Sequence[str]:
        """Those of them that must hold numbers."""

    @property
    def own_keys(self) -> Sequence[str]:
        """Those of them that inner rows are grouped by, besides the unit."""

    @property
    def at_most_one(self) -> bool:
        """Has a unit at most one inner row in a window?"""

    @property
    def most(self) -> int | None:
        """How many inner rows has a unit in all windows together at most; None: nobody knows."""

    @property
    def grows(self) -> bool:
        """Can more rows of a unit only add inner rows? Then these need not wait for the close."""

    @property
    def across_windows(self) -> bool:
        """Is something of a unit carried from each window to the next one?"""

    @property
    def in_words(self) -> str:
        """What becomes of a unit's rows."""

    def inner(self, rows: HeldRows, span: Span, step: int | None) -> tuple[Words, pa.Table]:
        """The inner rows of a window: whose they are, and their columns.

        If they grow and there is a `step`, those that rows of earlier steps have not made.
        """

    def carried(self, rows: HeldRows) -> tuple[Integers, pa.Table]:
        """Places of rows that go on to the next window, and what is held with them there."""

    def finish(self, inner: pa.Table) -> pa.Table:
        """The inner rows that are wanted, with the query's keys and values, and `ROW`."""
