"""A query on its way from SQL to `Query`: what the rules know of it so far."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sqlglot import exp

from dpstream.errors import InvalidParameter
from dpstream.query.aggregates import Avg, Stddev, Sum, Variance
from dpstream.sql_compiler.dialect import PrivacyClause, WindowTable
from dpstream.sql_compiler.statement import Statement

BOUNDED_AGGREGATES: dict[str, type[Sum]] = {
    "SUM": Sum,
    "AVG": Avg,
    "VARIANCE": Variance,
    "VAR_POP": Variance,
    "STDDEV": Stddev,
    "STDDEV_POP": Stddev,
}
"""Aggregates of values, each clamped to bounds; a new one is a class and a line here."""
AGGREGATES = ("COUNT", "COUNTIF", *BOUNDED_AGGREGATES)
WINDOW_COLUMNS = ("window_start", "window_end")
RELEASE_COLUMNS = ("trigger_time", "release_index")


@dataclass(kw_only=True)
class Relation:
    """What FROM gives: a table of the source, filtered, with columns made of its columns."""

    table: str
    columns: dict[str, exp.Expr] = field(default_factory=dict)
    """Expressions of the table's columns, by name."""
    open: bool = True
    """Are other columns of the table there too, as they are?"""
    where: list[exp.Expr] = field(default_factory=list)
    window: WindowTable | None = None
    names: set[str] = field(default_factory=set)
    """What columns may be qualified with."""


@dataclass(kw_only=True)
class Draft:
    """A statement and what the rules know of it; each rule reads it and adds to it."""

    statement: Statement
    overrides: dict[str, Any]
    name: str = "query"
    parameters: dict[str, Any] = field(default_factory=dict)
    """Of the query, by their names in `Query`."""
    relation: Relation = field(default_factory=lambda: Relation(table=""))
    keys: dict[str, exp.Expr] = field(default_factory=dict)
    """Expressions of the source's columns to group by, by the name they are published under."""
    aggregates: dict[str, exp.Expr] = field(default_factory=dict)
    """Calls as they are written, by the name they are published under."""
    hidden: set[str] = field(default_factory=set)
    """Aggregates that only computed columns need: they are not shown themselves."""
    computed: dict[str, exp.Expr] = field(default_factory=dict)
    """Expressions of published columns, by the name they are published under."""
    outputs: list[str] = field(default_factory=list)
    """The columns of SELECT, in order."""
    windowed: bool = False
    """Is window_start or window_end grouped by?"""
    series: bool = False
    """Is it published through a time-series mechanism?"""

    @property
    def select(self) -> exp.Expr:
        """The outer SELECT."""
        return self.statement.tree

    @property
    def clause(self) -> PrivacyClause:
        """The privacy clause."""
        clause = self.select.args["hint"]
        assert isinstance(clause, PrivacyClause)
        return clause

    def refusal(self, node: exp.Expr | None, reason: str, fix: str) -> InvalidParameter:
        """What is wrong, where, and what to do."""
        return self.statement.refusal(node, reason, fix)


def call_name(node: exp.Expr) -> str:
    """The name of a call in capitals; empty if it is none."""
    return node.name.upper() if isinstance(node, exp.Anonymous) else ""


def find_calls(node: exp.Expr, names: tuple[str, ...] | frozenset[str]) -> Iterator[exp.Expr]:
    """Every call of these functions within a node."""
    return (each for each in node.find_all(exp.Anonymous) if call_name(each) in names)


def present_args(node: exp.Expr) -> set[str]:
    """The arguments of a node that are there, such as the clauses of a SELECT."""
    return {name for name, value in node.args.items() if value}


def other_clauses(select: exp.Expr, allowed: set[str]) -> Iterator[tuple[str, exp.Expr]]:
    """The name in capitals and the node of each clause that is not among the allowed ones."""
    for name in sorted(present_args(select) - allowed):
        value = select.args[name]
        node = value[0] if isinstance(value, list) else value
        yield name.rstrip("_").upper(), node if isinstance(node, exp.Expr) else select
