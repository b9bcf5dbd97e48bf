"""What another epsilon, or other bounds, would do to the error: from public quantities alone."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from threading import BoundedSemaphore, Lock
from typing import Any

from dpstream.errors import InvalidParameter
from dpstream.serve.described import Described
from dpstream.serve.parameters import Refusal
from dpstream.sql.explain import explain
from dpstream.stages.query import Query
from dpstream.stages.series_query import SeriesQuery

_FIELDS = ("epsilon", "delta", "max_groups_contributed", "max_rows_per_group")
_ONE_AT_A_TIME = Lock()  # a calibration takes a while, and must not take every thread
_FEW = BoundedSemaphore(2)  # one at work, one that waits for it


def what_if(described: Described, changes: dict[str, Any]) -> dict[str, Any]:
    """Error and thresholds as they are, and as they would be."""
    given = {name: value for name, value in changes.items() if value is not None}
    if not _FEW.acquire(blocking=False):
        raise Refusal(503, "too many ask this at the same time", {"retry-after": "1"})
    try:
        with _ONE_AT_A_TIME:
            then = _expected(described, tuple(sorted(given.items())))
            now = _expected(described, ())
    except InvalidParameter:
        raise Refusal(422, "the query cannot be run with these parameters together") from None
    finally:
        _FEW.release()
    return {"query": described.name, "now": now, "then": then}


@lru_cache(maxsize=512)
def _expected(described: Described, changes: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    query = described.query
    if isinstance(query, SeriesQuery):
        return _of_series(query, dict(changes))
    changed = replace(query, **_with_rows(query, dict(changes)))
    facts = explain(changed)
    return {
        "epsilon": float(changed.epsilon),
        "delta": float(changed.delta),
        "max_groups_contributed": changed.max_groups_contributed,
        "max_rows_per_group": changed.max_rows_per_group,
        "columns": facts.columns,
        "keys": facts.keys,
    }


def _with_rows(query: Query, changes: dict[str, Any]) -> dict[str, Any]:
    """A limit on all rows that nobody chose follows from the other two."""
    follows = query.max_rows_contributed == query.max_groups_contributed * query.max_rows_per_group
    return changes | {"max_rows_contributed": None} if changes and follows else changes


def _of_series(query: SeriesQuery, changes: dict[str, Any]) -> dict[str, Any]:
    for name in _FIELDS[1:]:
        if name in changes:
            raise Refusal(409, f"{name} does not apply to a query through a time-series mechanism")
    if "epsilon" in changes and query.mechanism.epsilon is None:
        raise Refusal(409, "the mechanism of this query has no epsilon")
    mechanism: Any = query.mechanism
    if changes:
        mechanism = replace(mechanism, **changes)
    facts = explain(replace(query, mechanism=mechanism))
    tried = [column.get("tried") or {} for column in facts.columns]
    return {
        "epsilon": float(mechanism.epsilon or facts.budget["total"]),
        "delta": None,
        "max_groups_contributed": 1,
        "max_rows_per_group": 1,
        "columns": [
            {
                "column": column["column"],
                "first": column["first"] if column["first"] is not None else told.get("first"),
                "last": column["last"] if column["last"] is not None else told.get("last"),
                "note": column["note"],
            }
            for column, told in zip(facts.columns, tried, strict=True)
        ],
        "keys": facts.keys,
    }
