"""Run a query with and without one unit and compare everything it computes before noise.

The promise of a query rests on facts that hold for each pair of neighbours, not on average: a unit
moves no other unit's rows, no other group, no table and no draw, and its own groups by no more than
the plan's sensitivities.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.audit.query_recording import Group, Recording, record_query
from dpstream.connectors.sources.table import ROWS
from dpstream.records import Integers
from dpstream.stages.plan import Plan


@dataclass(frozen=True, kw_only=True, eq=False)
class QueryReplay:
    """What one unit changed.

    `violations`: what no unit may change. `used`: the part of each measure's sensitivity that this
    unit took.
    """

    violations: list[str]
    used: tuple[float, ...]


def replay_query(
    plan: Plan,
    table: pa.Table,
    unit: Sequence[bool],
    *,
    secret: bytes = bytes(32),
    run: bytes = bytes(16),
    buckets: int = 1,
    chunk: int = ROWS,
) -> QueryReplay:
    """Compare a run over `table` with one without the rows marked in `unit`.

    Those must be all rows of one unit: of one user, within one period if the query has periods.
    The same pair of runs shows what adding the unit does. `chunk`: rows per read of the source.
    """
    without = table.filter(pa.array([not gone for gone in unit], pa.bool_()))
    facts: dict[str, Any] = {"secret": secret, "run": run, "buckets": buckets, "chunk": chunk}
    less = record_query(plan, without, **facts)
    more = record_query(plan, table, **facts, frozen=less.ends if plan.query.in_rounds else None)
    return compare(plan, more, less)


def compare(plan: Plan, more: Recording, less: Recording) -> QueryReplay:
    """What the unit that only `more` has changed; every answer but those of its groups is equal."""
    units = more.units() - less.units()
    touched = more.groups_of(units)
    found = [f"{len(units)} units are gone, not one"] if len(units) > 1 else []
    for name, one, two in (
        ("window or step", more.rows, less.rows),
        ("kept rows", more.kept, less.kept),
    ):
        others = Counter({row: count for row, count in one.items() if row[0] not in units})
        moved = (others - two) + (two - others)
        if moved:
            found.append(f"{name} of other units: {moved.total()} rows differ")
    if more.tables != less.tables:
        found.append(f"tables differ: {len(more.tables)} with the unit, {len(less.tables)} without")
    moved = (more.draws - less.draws) + (less.draws - more.draws)
    found += [f"draw of another group: {_words(d)}" for d in moved if (d[0], d[1]) not in touched]
    found += [f"drawn {n} times: {_words(d)}" for d, n in more.draws.items() if n > 1]
    found += _published(more, less, touched)
    used, beyond = _changes(plan, more, less, touched)
    return QueryReplay(violations=found + beyond, used=used)


def _published(more: Recording, less: Recording, touched: set[Group]) -> list[str]:
    """Groups that the unit is not in are published alike, and the keys of all groups."""
    found = [
        f"window {it[0]}: a group reads {sorted(more.keys[it])} or {sorted(less.keys[it])}"
        for it in more.keys.keys() & less.keys.keys()
        if more.keys[it] != less.keys[it]
    ]
    for place in more.published.keys() | less.published.keys():
        one, two = more.published.get(place, {}), less.published.get(place, {})
        others = {g for g in one.keys() | two.keys() if (place[0], g) not in touched}
        if any(one.get(group) != two.get(group) for group in others):
            found.append(f"window {place[0]}, release {place[1]}: other groups differ")
    return found


def _changes(
    plan: Plan, more: Recording, less: Recording, touched: set[Group]
) -> tuple[tuple[float, ...], list[str]]:
    """Per measure: L2 over groups of the sum over steps of what changed, against the plan."""
    found, squares = [], [0] * len(plan.sensitivities)
    count = len(plan.query.measures)
    for group in more.sums.keys() | less.sums.keys():
        moved = _moved(more.sums.get(group, {}), less.sums.get(group, {}), count)
        if moved.any() and group[:2] not in touched:
            found.append(f"window {group[0]}: the sums of another group move by {moved.tolist()}")
        squares[:count] = (s + int(by) ** 2 for s, by in zip(squares, moved, strict=False))
    for window in more.totals.keys() | less.totals.keys():
        totals = more.totals.get(window, {}), less.totals.get(window, {})
        moved = _moved(*totals, len(plan.query.totals))
        squares[count:] = (s + int(by) ** 2 for s, by in zip(squares[count:], moved, strict=True))
    for measure, square, bound in zip(plan.columns, squares, plan.sensitivities, strict=True):
        if square > bound**2:
            found.append(f"{measure.name!r} moves by {square**0.5}, its sensitivity is {bound}")
    used = (s**0.5 / float(b) for s, b in zip(squares, plan.sensitivities, strict=True))
    return tuple(used), found


def _moved(one: dict[int, Integers], two: dict[int, Integers], count: int) -> Integers:
    """By measure: the sum over steps of what changed."""
    zero = np.zeros(count, np.int64)
    return sum((abs(one.get(s, zero) - two.get(s, zero)) for s in {*one, *two}), zero)


def _words(draw: tuple[Any, ...]) -> str:
    window, _, column, release, purpose, each = draw
    return f"window {window}, column {column!r}, release {release}, {purpose!r}, {each} normals"
