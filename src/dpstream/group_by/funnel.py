"""How far each unit gets in a funnel: steps that follow each other in time.

A unit has an inner row for each step that it has reached in a window. More rows never take a step
away, late ones neither, so a step may be published as soon as it is reached (`grows`). A `strict`
funnel allows no other row in between; there more rows can take a step away, and it is published
once, when the window closes.

Proof: `docs/soundness/unit_rows.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from dpstream.compiled import compiled
from dpstream.group_by.hash_tables import HashTable
from dpstream.group_by.inner_rows import OF_ROW, first_places, numbered_pairs, times_of_window
from dpstream.query.per_unit import HeldRows, Span
from dpstream.query.windows import in_words
from dpstream.records import Integers, Words
from dpstream.rows.parse import whole_column

STEP, STEP_NAME = "step", "step_name"
MOST_STEPS = 30
_NEVER = -(2**62)
_EVER = 2**62


@dataclass(frozen=True, kw_only=True)
class FunnelRows:
    """The steps that each unit has reached, by `keys`.

    `steps`: their names, in order. `column`: which steps a row is, a bit for each. `within`: how
    long after its first step a unit must reach a later one (None: in the same window). Rows of one
    time are taken in the order of steps.
    """

    steps: tuple[str, ...]
    column: str
    keys: tuple[str, ...] = ()
    within: int | None = None
    strict: bool = False
    gap: ClassVar[None] = None
    at_most_one: ClassVar[bool] = False
    most: ClassVar[None] = None
    across_windows: ClassVar[bool] = False

    @property
    def grows(self) -> bool:
        """Can more rows of a unit only add inner rows?"""
        return not self.strict

    @property
    def text(self) -> str:
        """All of it: part of what fixes a query's releases, so it never changes."""
        strict = " STRICT" if self.strict else ""
        return (
            f"FUNNEL OF {self.column!r} STEPS {self.steps!r} BY {self.keys!r} WITHIN "
            f"{self.within}{strict}"
        )

    @property
    def in_words(self) -> str:
        """The same for people."""
        keys = ", ".join(name.removesuffix(OF_ROW) for name in self.keys)
        time = "" if self.within is None else f" within {in_words(self.within)} of the first"
        strict = ", with no other row in between" if self.strict else ""
        of = f" for each {keys}" if keys else ""
        return f"one row for each step reached{of} of {', '.join(self.steps)}{time}{strict}"

    @property
    def made_of(self) -> dict[str, tuple[str, ...]]:
        """The columns that wait behind each column of inner rows."""
        return {STEP: (self.column,), STEP_NAME: (self.column,)}

    def __call__(
        self, rows: HeldRows, span: Span, step: int | None = None
    ) -> tuple[Words, pa.Table]:
        """Inner rows of steps that are reached, at this `step` of the run if it is given."""
        units = HashTable().rows(np.ascontiguousarray(rows.units))
        groups = units
        if self.keys:
            groups = numbered_pairs(units, HashTable().rows(np.ascontiguousarray(rows.groups)))
        first = first_places(groups)
        counted = np.arange(len(groups))
        if step is not None and self.grows:  # the others have what they had
            moved = np.zeros(len(first), bool)
            moved[groups[rows.steps == step]] = True
            counted = np.flatnonzero(moved[groups])
        times = rows.values[counted, 0]
        which = np.asarray(whole_column(rows.keys[self.column]).fill_null(0), np.int64)[counted]
        order = np.lexsort((which, times, groups[counted]))
        path = [groups[counted][order], times[order], which[order]]
        reached, before = self._levels(path, len(first)), np.zeros(len(first), np.int64)
        if step is not None and self.grows:
            known = rows.steps[counted][order] < step
            before = self._levels([column[known] for column in path], len(first))
        new = reached - before
        group = np.repeat(np.arange(len(new)), new)
        level = np.arange(len(group)) - np.repeat(np.cumsum(new) - new, new) + before[group] + 1
        first = first[group]
        columns: dict[str, Any] = {
            STEP: pa.array(level, pa.int64()),
            STEP_NAME: pa.array(self.steps, pa.string()).take(pa.array(level - 1)),
        }
        taken = pa.array(first)
        columns |= {name: whole_column(rows.keys[name]).take(taken) for name in self.keys}
        columns |= times_of_window(span, len(first))
        return rows.units[first], pa.table(columns)

    def _levels(self, path: list[Integers], size: int) -> Integers:
        """By group: the step reached with rows in the order of groups and times: these, and what
        the rows are."""
        groups, times, which = path
        within = _EVER if self.within is None else self.within
        reached: Integers = np.zeros(size, np.int64)
        return _reach(groups, times, which, len(self.steps), within, self.strict, reached)


@compiled
def _reach(
    groups: Integers,
    times: Integers,
    which: Integers,
    steps: int,
    within: int,
    strict: bool,
    reached: Integers,
) -> Integers:
    """The step that each group has reached; rows are sorted by group and time.

    `began`: for each step the latest time at which a way that has come so far began. A later
    beginning leaves more time for what is to come, so no other way need be known.
    """
    began = np.full(steps, _NEVER)
    group = -1
    for row in range(len(groups)):
        if groups[row] != group:
            group = groups[row]
            began[:] = _NEVER
        time = times[row]
        for at in range(steps - 1, -1, -1):  # a row is one step of a way
            if which[row] >> at & 1:
                begin = time if at == 0 else began[at - 1]
                if begin != _NEVER and time - begin <= within:
                    began[at] = begin  # of a way no earlier than the one known: rows come in time
                    reached[group] = max(reached[group], at + 1)
                    continue
            if strict:
                began[at] = _NEVER
    return reached
