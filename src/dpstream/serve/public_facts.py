"""What is public before a row is read: all of it follows from the pipeline file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from threading import BoundedSemaphore, Lock
from typing import Any

import pyarrow as pa

from dpstream.connectors.storage import safe_name
from dpstream.engines.query_run import AnyQuery
from dpstream.errors import InvalidParameter
from dpstream.explanation import explain
from dpstream.explanation.alternatives import alternatives, as_plain, with_changes
from dpstream.explanation.explain_query import measure_name
from dpstream.group_by.cohorts import LAG, CohortRows
from dpstream.group_by.funnel import STEP, STEP_NAME, FunnelRows
from dpstream.group_by.release_table import release_schema, series_schema
from dpstream.mechanisms import name_of
from dpstream.privacy.ledger.charges import Terms
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.state.run_directory import read_about
from dpstream.query.grouping_sets import set_name
from dpstream.query.noise_plan import plan_query
from dpstream.query.quantiles import Histogram, Quantile
from dpstream.query.query import Query
from dpstream.query.row_spec import LooksBack
from dpstream.query.series_query import SeriesQuery
from dpstream.rows.column_values import types_before_rows
from dpstream.serve.sides import Refusal
from dpstream.session.pipeline import Pipeline, PipelineBook
from dpstream.sql_compiler.compile_sql import compile_sql
from dpstream.sql_compiler.published_shares import SHARE

SPREADS = ("stddev", "low", "high", "high_all")
"""What may be published beside a figure."""
_PLACE = ("window_start", "window_end", "trigger_time", "release_index")
_BINS = "histogram"
_OPERATORS = ("memory", "drawing")  # of no use to a reader of the releases
Line = dict[str, Any]
_OF_USERS = ("delta", "max_groups_contributed", "max_rows_per_group")
_ENDS = ("first", "last")  # releases of a window that an error is told for
_ONE_AT_A_TIME = Lock()  # a calibration takes a while, and must not take every thread
_FEW = BoundedSemaphore(2)  # one at work, one that waits for it


@dataclass(frozen=True, kw_only=True)
class QueryDescription:
    """A query as it is shown: its columns, and what is said about it."""

    query: AnyQuery
    text: str | None = None
    title: str | None = None
    """What people call it; its name if nothing is said."""
    description: str | None = None
    ended: bool = False
    """Was it changed or removed? What it has published stays."""

    @property
    def name(self) -> str:
        """Its name in the pipeline."""
        return self.query.name

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of its releases; keys that nothing is known of stand as text."""
        if isinstance(self.query, SeriesQuery):
            return series_schema(self.query, types_before_rows(self.query))
        return release_schema(plan_query(self.query.starting(0)), types_before_rows(self.query))

    @cached_property
    def keys(self) -> list[str]:
        """The columns that tell its rows apart."""
        return [name for name in self.query.label_columns if name in self.schema.names]

    @cached_property
    def measures(self) -> list[str]:
        """What is published of each key: numbers, and lists of numbers that have a picture."""
        names = self.schema.names
        extra = {
            f"{name}{more}" for name in names for more in ("_stddev", "_low", "_high", "_high_all")
        }
        others = {*extra, *self.keys, *_PLACE, "held", "kept_share"}
        return [
            name
            for name, kind in zip(names, self.schema.types, strict=True)
            if name not in others
            and (pa.types.is_floating(kind) or pa.types.is_integer(kind) or name in self.lists)
        ]

    @cached_property
    def figures(self) -> list[str]:
        """Those that are one number of each key; of a list of quantiles its middle one."""
        return [each for each in self.measures if self.lists.get(each, {}).get("kind") != _BINS]

    @cached_property
    def lists(self) -> dict[str, dict[str, Any]]:
        """Columns that are lists: the edges of a histogram's bins, or the shares of quantiles.

        `middle`: the place of the quantile that stands for all of them.
        """
        told: dict[str, dict[str, Any]] = {}
        aggregates = self.query.aggregates if isinstance(self.query, Query) else ()
        for each in aggregates:
            name = each.name
            if name not in self.schema.names or not pa.types.is_list(self.schema.field(name).type):
                continue
            if isinstance(each, Histogram):
                told[name] = {"kind": _BINS, "edges": [float(edge) for edge in each.edges]}
            elif isinstance(each, Quantile):
                shares = [float(share) for share in each.shares]
                middle = min(range(len(shares)), key=lambda place: abs(shares[place] - 0.5))
                told[name] = {"kind": "quantiles", "shares": shares, "middle": middle}
        return told

    @cached_property
    def picture(self) -> dict[str, Any] | None:
        """Is it a funnel, or cohorts that come back? Then which columns say so.

        `order`: the step, or the lag. `by`: what else it groups by. `count`: the units.
        """
        per_unit = self.query.per_unit if isinstance(self.query, Query) else None
        rows = getattr(per_unit, "inner_rows", None)
        order = STEP if isinstance(rows, FunnelRows) else LAG
        counts = [name for name in self.figures if f"{name}{SHARE}" in self.figures]
        if not isinstance(rows, FunnelRows | CohortRows) or order not in self.keys or not counts:
            return None
        by = [name for name in self.keys if name not in (order, STEP_NAME)]
        about = {"order": order, "by": by, "count": counts[0]}
        if isinstance(rows, FunnelRows):
            return {"kind": "funnel", "steps": list(rows.steps)} | about
        return {"kind": "cohorts", "lags": rows.lags} | about

    def spread(self, figure: str, kind: str = "stddev") -> str | None:
        """The column with a figure's standard deviation, or an end of its interval."""
        name = f"{figure}_{kind}"
        return name if name in self.schema.names else None

    @property
    def partial(self) -> bool:
        """Does a release hold only the rows that have changed?"""
        query = self.query
        return isinstance(query, Query) and (query.min_change is not None or query.in_rounds)

    @property
    def looks_back(self) -> bool:
        """Are its figures made of several windows, whose noise they then share?"""
        finish: Any = self.query.finish
        return isinstance(finish, LooksBack) and finish.windows_back > 0

    @property
    def dropped_rows(self) -> str | None:
        """Is it measured what the bounds leave out? None: a mechanism's own matter."""
        if not isinstance(self.query, Query):
            return None
        if self.query.totals:
            return "measured"
        return "not measured" if self.query.may_drop else "none"

    @cached_property
    def public(self) -> dict[str, Any]:
        """As the feed shows it."""
        facts = explain(self.query).to_json()
        budget, schedule = facts["budget"], facts["schedule"]
        mechanism = self.query.mechanism if isinstance(self.query, SeriesQuery) else None
        parts = ("every", "start", "end", "releases_per_window")
        return {
            "name": self.name,
            "title": self.title or self.name,
            "description": self.description,
            "sql": self.text,
            "columns": {
                "keys": self.keys,
                "aggregates": [
                    {"name": name, **{kind: self.spread(name, kind) for kind in SPREADS}}
                    | ({"list": self.lists[name]} if name in self.lists else {})
                    for name in self.measures
                ],
            },
            "picture": self.picture,
            "dropped_rows": self.dropped_rows,
            "looks_back": self.looks_back,
            "unit": self.query.privacy_unit_column,
            "unit_period": None if mechanism is not None else self.query.period_in_words,
            "protected": self.query.protected,
            "epsilon": budget.get("epsilon", budget.get("total")),
            "delta": budget.get("delta"),
            "measure": "epsilon" if mechanism is None else mechanism.terms().measure,
            "windows": {
                "kind": "global" if self.query.window is None else self.query.window.kind,
                "size": schedule["window"],
                **{part: schedule[part] for part in parts},
            },
            "strategy": self.query.strategy if isinstance(self.query, Query) else None,
            "mechanism": None if mechanism is None else name_of(mechanism),
            "margins": getattr(mechanism, "publishes_stddev", True),
            "live": self.query.live,
            "explain": {key: fact for key, fact in facts.items() if key not in _OPERATORS},
        }


def describe_queries(pipeline: Pipeline) -> dict[str, QueryDescription]:
    """The queries of a pipeline, by name, which is a part of an address."""
    for query in pipeline.queries:
        if "/" in query.name or query.name in (".", ".."):
            raise InvalidParameter(
                f"the name {query.name!r} of a query cannot be a part of an address; rename it"
            )
    said = {name: _said(table) for name, table in pipeline.tables.items()}
    return {
        query.name: QueryDescription(
            query=query, text=pipeline.texts.get(query.name), **said.get(query.name, {})
        )
        for query in pipeline.queries
    }


def _said(table: Mapping[str, Any]) -> dict[str, Any]:
    """The title and the description of a pipeline's [[query]], where it has them."""
    return {word: table[word].strip() for word in ("title", "description") if word in table}


def describe_ended(pipeline: Pipeline) -> dict[str, QueryDescription]:
    """Queries that the pipeline ran before it was changed, by name."""
    known = {query.name for query in pipeline.queries}
    gone = {n: table for n, table in pipeline.changes.texts.items() if n not in known}
    made = {
        name: compile_sql(
            table["sql"],
            name,
            params=table.get("params"),
            functions=pipeline.functions,
            folder=pipeline.path.parent,
        )
        for name, table in gone.items()
    }
    return {
        name: QueryDescription(query=one.query, text=one.text, ended=True, **_said(gone[name]))
        for name, one in made.items()
    }


def declared_books(pipeline: Pipeline) -> list[dict[str, Any]]:
    """The budget of each dataset: what was promised, and what each query was declared to take.

    All amounts follow from the pipeline file. What a mechanism has really spent step by step, when,
    and how far a run has come, is in the ledger file, for the operator.
    """
    return [_book(book, pipeline) for book in pipeline.books]


def _book(book: PipelineBook, pipeline: Pipeline) -> dict[str, Any]:
    terms = book.terms()
    lines: list[Line] = []
    for query in book.queries:
        if isinstance(query, SeriesQuery):
            lines.append(_series_charge(query, terms))
        else:
            lines += _user_charges(query, terms)
    lines += _others(book, terms, pipeline)
    spent = sum((line["exact"] for line in lines), Fraction(0))
    for line in lines:
        line["amount"] = float(line.pop("exact"))
        line["share"] = line["amount"] / float(terms.total)
    return {
        "dataset": book.dataset,
        "promise": terms.describe(),
        "unit": terms.unit,
        "protects": terms.change,
        "period": terms.period if terms.unit == "user" else None,
        "window": terms.window,
        "measure": terms.measure,
        "total": float(terms.total),
        "spent": float(spent),
        "left": float(terms.total - spent),
        "epsilon": float(book.epsilon),
        "delta": None if book.delta is None else float(book.delta),
        "spent_on": lines,
    }


def _user_charges(query: Any, book: Terms) -> list[Line]:
    """The one charge of a run, by what its noise is put on."""
    plan = plan_query(query.starting(0))
    purposes = [
        measure_name(measure) + ("" if names is None else f" by {set_name(names)}")
        for measure, names in zip(plan.columns, plan.sets, strict=True)
    ]
    purposes += [f"histogram by which {each.kind} are chosen" for each in plan.query.candidates]
    return [
        {
            "query": query.name,
            "purpose": purpose,
            "exact": charge,
            "charges": 1,
            "epsilon": float(query.epsilon),
            "delta": float(query.delta),
        }
        for purpose, charge in zip(purposes, plan.charges(book), strict=True)
    ]


def _series_charge(query: SeriesQuery, book: Terms) -> Line:
    """What a mechanism may spend on any unit of its book."""
    terms = query.mechanism.terms()
    width, own = book.width or 1, terms.width or 1
    return {
        "query": query.name,
        "purpose": f"{name_of(query.mechanism)}, within any {width} windows",
        "exact": terms.total * math.ceil(Fraction(width, own)),
        "charges": 1,
        "epsilon": float(terms.total) if terms.measure == "epsilon" else None,
        "delta": None,
    }


def _others(book: PipelineBook, terms: Terms, pipeline: Pipeline) -> list[Line]:
    """What other runs of users have been charged to the same book, in one line.

    Each of their charges was fixed before its first row, too. Mechanisms that spend as they go are
    left out: how much they have spent by now is the operator's to know.
    """
    if terms.unit != "user" or not book.ledger.exists():
        return []
    with closing(Ledger(book.ledger)) as ledger:
        known = next((each for each in ledger.report() if each["dataset"] == book.dataset), None)
    begun = [read_about(pipeline.state / safe_name(query.name)) for query in book.queries]
    mine = {about["run"].hex() for about in begun if about is not None}
    lines = [] if known is None else known["spent_on"]
    over = {line["run"] for line in lines if line.get("ended")}  # other periods have paid for them
    others = [line for line in lines if line["run"] not in mine | over]
    if not others:
        return []
    total = sum((Fraction(line["amount"]) for line in others), Fraction(0))
    words = "other runs on this dataset"
    return [{"query": None, "purpose": words, "exact": total, "charges": len(others)}]


def what_if(description: QueryDescription, changes: dict[str, Any]) -> dict[str, Any]:
    """Error and thresholds as they are, and as they would be."""
    given = {name: value for name, value in changes.items() if value is not None}
    if not _FEW.acquire(blocking=False):
        raise Refusal(503, "too many ask this at the same time", {"retry-after": "1"})
    try:
        with _ONE_AT_A_TIME:
            then = _expected(description, tuple(sorted(given.items())))
            now = _expected(description, ())
    except InvalidParameter:
        raise Refusal(422, "the query cannot be run with these parameters together") from None
    finally:
        _FEW.release()
    return {"query": description.name, "now": now, "then": then}


@lru_cache(maxsize=512)
def _expected(
    description: QueryDescription, changes: tuple[tuple[str, Any], ...]
) -> dict[str, Any]:
    query, given = description.query, dict(changes)
    if isinstance(query, SeriesQuery):
        return _expected_of_series(query, given)
    changed = with_changes(query, given)
    facts = explain(changed)
    return {
        "epsilon": float(changed.epsilon),
        "delta": float(changed.delta),
        "max_groups_contributed": changed.max_groups_contributed,
        "max_rows_per_group": changed.max_rows_per_group,
        "columns": facts.columns,
        "keys": facts.keys,
        "alternatives": [] if given else as_plain(alternatives(query)),
    }


def _expected_of_series(query: SeriesQuery, changes: dict[str, Any]) -> dict[str, Any]:
    for name in _OF_USERS:
        if name in changes:
            raise Refusal(409, f"{name} does not apply to a query through a time-series mechanism")
    if "epsilon" in changes and query.mechanism.epsilon is None:
        raise Refusal(409, "the mechanism of this query has no epsilon")
    mechanism: Any = query.mechanism
    if changes:
        mechanism = replace(mechanism, **changes)
    facts = explain(replace(query, mechanism=mechanism))
    columns = []
    for column in facts.columns:
        tried = column.get("tried") or {}
        ends = {end: tried.get(end) if column[end] is None else column[end] for end in _ENDS}
        columns.append({"column": column["column"], **ends, "note": column["note"]})
    return {
        "epsilon": float(mechanism.epsilon or facts.budget["total"]),
        "delta": None,
        "max_groups_contributed": 1,
        "max_rows_per_group": 1,
        "columns": columns,
        "keys": facts.keys,
    }
