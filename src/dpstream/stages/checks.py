"""Names, keys, weights and answers of a query: understood and checked, each by itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from dpstream.errors import InvalidParameter
from dpstream.privacy.amounts import positive
from dpstream.stages.aggregates import Aggregate, Count, Sum

_RESERVED = ("window_start", "window_end", "trigger_time", "release_index")


def checked_keys(given: Iterable[str]) -> tuple[str, ...]:
    """Different names of columns."""
    names = (given,) if isinstance(given, str) else tuple(given)
    if len(set(names)) < len(names) or not all(names):
        raise InvalidParameter(f"keys must be different column names; got {names!r}")
    return names


def check_names(
    name: str,
    unit: str,
    keys: Sequence[str],
    aggregates: Sequence[Aggregate],
    confidence: float | None,
) -> None:
    """Refuse what would make a release ambiguous, or each group one unit."""
    if not aggregates or not all(isinstance(a, Count | Sum) for a in aggregates):
        raise InvalidParameter(
            "aggregates must be such as Count, CountUnits, Sum(...) or Avg(...); got "
            f"{aggregates!r}"
        )
    if unit in keys:
        raise InvalidParameter(
            f"the unit {unit!r} must not be a key: each group would be one unit; group by other "
            "columns"
        )
    added = ("", "_stddev") if confidence is None else ("", "_stddev", "_low", "_high")
    outputs = [f"{a.name}{more}" for a in aggregates for more in added]
    outputs += [*keys, *_RESERVED]
    twice = {output for output in outputs if outputs.count(output) > 1}
    if twice:
        raise InvalidParameter(
            f"a release cannot have two columns named {sorted(twice)}; rename an aggregate"
        )
    if not name or len(name.encode()) > 60:
        raise InvalidParameter(f"name must have 1 to 60 bytes; got {name!r}")


def checked_public_keys(
    keys: Sequence[str], given: Sequence[Any] | None
) -> tuple[tuple[Any, ...], ...] | None:
    """One tuple for each public group; without key columns all rows are one group, known to all."""
    if not keys and given in (None, ((),)):
        return ((),)
    if given is None:
        return None
    rows = tuple(tuple(row) if isinstance(row, tuple | list) else (row,) for row in given)
    if not rows or not keys or any(len(row) != len(keys) for row in rows):
        raise InvalidParameter(
            f"public_keys must list one value for each of the key columns {list(keys)}; got "
            f"{list(given)[:3]!r}"
        )
    as_text = {tuple(None if item is None else str(item) for item in row) for row in rows}
    if len(as_text) < len(rows):  # in a column of text, 1 and "1" are one key
        raise InvalidParameter("public_keys must not list a key twice")
    return rows


def checked_weights(
    given: Mapping[str, Any] | Sequence[tuple[str, Any]], aggregates: Sequence[Aggregate]
) -> tuple[tuple[str, Fraction], ...]:
    """Names and exact weights, in the order of the names: part of what fixes the releases."""
    known = {*(a.name for a in aggregates), "selection", "debias"}
    weights = dict(given)
    if not weights.keys() <= known:
        raise InvalidParameter(
            "weights must name aggregates of the query or 'selection'; got "
            f"{sorted(weights.keys() - known)}, known are {sorted(known)}"
        )
    return tuple((n, positive(w, f"the weight of {n}")) for n, w in sorted(weights.items()))


def check_answers(
    min_change: float | None,
    confidence: float | None,
    debias: str | None,
    debias_rows: int | None,
) -> None:
    """How answers are to be shown."""
    if min_change is not None and not min_change > 0:
        raise InvalidParameter(f"min_change must be above 0; got {min_change}")
    if confidence is not None and not 0 < confidence < 1:
        raise InvalidParameter(
            f"confidence must lie between 0 and 1, such as 0.95; got {confidence}"
        )
    if debias not in (None, "global"):
        raise InvalidParameter(f"debias must be 'global' or None; got {debias!r}")
    if debias_rows is not None and debias is None:
        raise InvalidParameter("debias_rows needs debias='global'")


def check_strategy(strategy: str, min_change: float | None) -> None:
    """How keys are found, and when they are published again."""
    if strategy not in ("latched", "sqlp"):
        raise InvalidParameter(f"strategy must be 'latched' or 'sqlp'; got {strategy!r}")
    if strategy == "sqlp" and min_change is not None:
        raise InvalidParameter(
            "min_change is for the strategy 'latched': 'sqlp' publishes a group only when "
            "enough units have come to it anyway"
        )


def check_read(what: str, named: Iterable[str], columns: Sequence[str]) -> None:
    """Columns that are named must be among those that the query reads."""
    for name in named:
        if name not in columns:
            raise InvalidParameter(
                f"{what} names {name!r}, and the query reads {', '.join(columns)}; leave it out"
            )
