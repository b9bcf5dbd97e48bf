"""GROUPING SETS: several sets of keys by which one query groups the same rows.

What is kept of a unit is decided once, by all keys together; then each row that is kept counts in
one group of every set. Each set has a share of the budget.
Proof: `docs/soundness/grouping_sets.md`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pyarrow as pa

from dpstream.errors import InvalidParameter
from dpstream.privacy.amounts import positive
from dpstream.query.public_tables import KeyTable

GROUPING_ID = "grouping_id"
"""The column that says which keys a row's set leaves out: a bit for each, the last key's is 1."""
NOT_SHOWN = "not_shown"
"""The column that marks a row of the groups which are not shown, where keys are private."""
MOST_SETS = 64

Sets = tuple[tuple[str, ...], ...]


def grouping_id(keys: Sequence[str], names: Sequence[str]) -> int:
    """The number of a set of keys.

    >>> [grouping_id(["a", "b"], names) for names in (["a", "b"], ["a"], ["b"], [])]
    [0, 1, 2, 3]
    """
    return sum(1 << len(keys) - 1 - at for at, key in enumerate(keys) if key not in names)


def checked_sets(keys: Sequence[str], given: Iterable[Iterable[str]]) -> Sets:
    """The sets in their order, the keys of each in the order of the query's."""
    sets = []
    for names in given:
        listed = [names] if isinstance(names, str) else list(names)
        unknown = [name for name in listed if name not in keys]
        if unknown:
            raise InvalidParameter(
                f"grouping_sets must be made of the keys {list(keys)}; got {unknown[0]!r}"
            )
        sets.append(tuple(name for name in keys if name in listed))
    if len(set(sets)) < len(sets) or len(sets) > MOST_SETS:
        raise InvalidParameter(
            f"grouping_sets must be at most {MOST_SETS} different sets of keys; got {sets}"
        )
    unused = [key for key in keys if sets and not any(key in names for names in sets)]
    if unused:
        raise InvalidParameter(
            f"each key must be in one of the grouping_sets; {unused[0]!r} is in none"
        )
    return tuple(sets)


def checked_weights(sets: Sets, given: Sequence[Any]) -> tuple[Fraction, ...]:
    """How the sets share the budget; alike where nothing is said."""
    weights = list(given) if given else [1] * len(sets)
    if len(weights) != len(sets):
        raise InvalidParameter(
            f"grouping_set_weights must have a number for each of the {len(sets)} grouping sets "
            f"({', '.join(map(set_name, sets)) or 'there are none'}); got {len(weights)}"
        )
    return tuple(
        positive(weight, f"the weight of {set_name(names)}")
        for names, weight in zip(sets, weights, strict=True)
    )


def set_name(names: Sequence[str]) -> str:
    """A set of keys in words.

    >>> set_name(["a", "b"]), set_name([])
    ('(a, b)', '()')
    """
    return f"({', '.join(names)})"


def parents(sets: Sets) -> list[int | None]:
    """For each set the largest other one whose keys it has too, the first of several.

    >>> parents((("a", "b"), ("a",), ("b",), ()))
    [1, 3, 3, None]
    """
    found: list[int | None] = []
    for names in sets:
        within = [at for at, other in enumerate(sets) if set(other) < set(names)]
        found.append(max(within, key=lambda at: len(sets[at]), default=None))
    return found


def is_chain(sets: Sets) -> bool:
    """Does each set have all keys of every smaller one, as with ROLLUP?"""
    ordered = sorted(sets, key=len)
    return all({*one} < {*two} for one, two in pairwise(ordered))


def count_groups(
    keys: Sequence[str], groups: Sequence[tuple[Any, ...]], names: Sequence[str]
) -> int:
    """How many groups of a set there are among public ones, at most.

    Values are told apart by their texts: types that are not known yet can only make fewer of them.
    """
    places = [keys.index(name) for name in names]
    if not places:
        return 1
    if isinstance(groups, KeyTable):
        columns = {name: groups.columns[at] for name, at in zip(names, places, strict=True)}
        return int(pa.table(columns).group_by(list(names)).aggregate([]).num_rows)
    return len(
        {tuple(None if row[at] is None else str(row[at]) for at in places) for row in groups}
    )


def is_product(keys: Sequence[str], groups: Sequence[tuple[Any, ...]]) -> bool:
    """Are the public groups all combinations of some values of each key?"""
    size = 1
    for name in keys:
        size *= count_groups(keys, groups, [name])
    return size == len(groups)
