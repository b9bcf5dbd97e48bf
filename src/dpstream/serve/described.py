"""What is public about a query before a row is read: all of it follows from the pipeline file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from dpstream.errors import InvalidParameter
from dpstream.mechanisms import name_of
from dpstream.pipeline import Pipeline
from dpstream.session.budget import AnyQuery
from dpstream.sql.explain import explain
from dpstream.stages.plan import planned
from dpstream.stages.query import Query
from dpstream.stages.query_types import types_before_rows
from dpstream.stages.release_table import release_schema
from dpstream.stages.series_query import SeriesQuery
from dpstream.stages.series_table import series_schema

_PLACE = ("window_start", "window_end", "trigger_time", "release_index")
_OPERATORS = ("memory", "drawing")  # of no use to who reads the releases


@dataclass(frozen=True, kw_only=True)
class Described:
    """A query as it is shown: its columns, and what is said about it."""

    query: AnyQuery
    text: str | None = None

    @property
    def name(self) -> str:
        """Its name in the pipeline."""
        return self.query.name

    @cached_property
    def rows(self) -> Query:
        """The query, or the rows that a mechanism reads."""
        return self.query.rows if isinstance(self.query, SeriesQuery) else self.query

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of its releases; keys that nothing is known of stand as text."""
        if isinstance(self.query, SeriesQuery):
            return series_schema(self.query, types_before_rows(self.rows))
        return release_schema(planned(self.rows.starting(0)), types_before_rows(self.rows))

    @cached_property
    def keys(self) -> list[str]:
        """The columns that tell its rows apart."""
        return [name for name in self.rows.keys if name in self.schema.names]

    @cached_property
    def figures(self) -> list[str]:
        """The published numbers."""
        names = self.schema.names
        extra = {f"{name}{more}" for name in names for more in ("_stddev", "_low", "_high")}
        return [
            name
            for name in names
            if name not in extra
            and name not in (*self.keys, *_PLACE, "held")
            and self._number(name)
        ]

    def _number(self, name: str) -> bool:
        kind = self.schema.field(name).type
        return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))

    def spread(self, figure: str, kind: str = "stddev") -> str | None:
        """The column with a figure's standard deviation, or an end of its interval."""
        name = f"{figure}_{kind}"
        return name if name in self.schema.names else None

    @property
    def holds(self) -> bool:
        """Does a release say which values repeat earlier ones?"""
        return "held" in self.schema.names

    @property
    def partial(self) -> bool:
        """Does a release hold only the rows that have changed?"""
        query = self.query
        return isinstance(query, Query) and (query.min_change is not None or query.in_rounds)

    @cached_property
    def public(self) -> dict[str, Any]:
        """As the feed shows it."""
        facts = explain(self.query).to_json()
        budget = facts["budget"]
        series = isinstance(self.query, SeriesQuery)
        terms = self.query.mechanism.terms() if isinstance(self.query, SeriesQuery) else None
        return {
            "name": self.name,
            "sql": self.text,
            "columns": {
                "keys": self.keys,
                "aggregates": [
                    {"name": name, **{k: self.spread(name, k) for k in ("stddev", "low", "high")}}
                    for name in self.figures
                ],
            },
            "unit": self.rows.unit,
            "unit_period": None if series else self.rows.period_in_words,
            "protected": self.query.protected,
            "epsilon": budget.get("epsilon", budget.get("total")),
            "delta": budget.get("delta"),
            "measure": "epsilon" if terms is None else terms.measure,
            "windows": self._windows(facts["schedule"]),
            "strategy": None if series else self.rows.strategy,
            "mechanism": (
                name_of(self.query.mechanism) if isinstance(self.query, SeriesQuery) else None
            ),
            "live": self.query.live,
            "explain": {key: fact for key, fact in facts.items() if key not in _OPERATORS},
        }

    def _windows(self, schedule: dict[str, Any]) -> dict[str, Any]:
        window = self.rows.window
        return {
            "kind": "global" if window is None else window.kind,
            "size": schedule["window"],
            "every": schedule["every"],
            "start": schedule["start"],
            "end": schedule["end"],
            "releases_per_window": schedule["releases_per_window"],
        }


def describe(pipeline: Pipeline) -> dict[str, Described]:
    """The queries of a pipeline, by name, which is a part of an address."""
    for query in pipeline.queries:
        if "/" in query.name or query.name in (".", ".."):
            raise InvalidParameter(
                f"the name {query.name!r} of a query cannot be a part of an address; rename it"
            )
    return {
        query.name: Described(query=query, text=pipeline.texts.get(query.name))
        for query in pipeline.queries
    }
