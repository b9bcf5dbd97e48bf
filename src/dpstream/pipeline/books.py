"""The books of a pipeline: what each dataset promises, and the queries that it pays for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from dpstream.connectors.pushed import PUSHED
from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.pipeline.places import listed, placed
from dpstream.privacy.amounts import on_grid, positive
from dpstream.privacy.calibration import mu_squared_for, rho_for
from dpstream.privacy.charges import Terms
from dpstream.session.budget import AnyQuery
from dpstream.stages.query import Query


@dataclass(frozen=True, kw_only=True)
class Book:
    """A dataset's book: epsilon (and delta) for all queries on it."""

    where: str
    dataset: str
    epsilon: Fraction
    delta: Fraction | None
    ledger: Path
    queries: tuple[AnyQuery, ...]

    def terms(self) -> Terms:
        """The terms of the book; every query must protect the same rows."""
        first = self.queries[0]
        wanted = self._terms_of(first)
        for query in self.queries[1:]:
            other = self._terms_of(query)
            if other != wanted:
                raise InvalidParameter(
                    f"{self.where}: queries that share a book must protect the same unit: "
                    f"{first.name!r} protects {_protects(wanted)}, {query.name!r} protects "
                    f"{_protects(other)}; make them agree, or use two pipelines"
                )
        return wanted

    def _terms_of(self, query: AnyQuery) -> Terms:
        if isinstance(query, Query):
            if self.delta is None:
                raise InvalidParameter(
                    f"{self.where} has no delta, which {query.name!r} needs; add delta = 1e-8"
                )
            return query.promise(epsilon=self.epsilon, delta=self.delta)
        if query.rows.start is None:
            raise InvalidParameter(
                f"{self.where}: {query.name!r} has no start, and its book counts steps from there; "
                "add start = TIMESTAMP '...' to its OPTIONS"
            )
        terms = query.terms()
        return replace(terms, total=self._total(query.name, terms))

    def _total(self, name: str, terms: Terms) -> Fraction:
        """What the book may spend, as its queries count it."""
        if terms.measure == "epsilon":
            return self.epsilon
        if self.delta is None:
            raise InvalidParameter(
                f"{self.where} has no delta, which {name!r} needs; add delta = 1e-8"
            )
        convert = {"rho": rho_for, "mu_squared": mu_squared_for}[terms.measure]
        return on_grid(convert(epsilon=self.epsilon, delta=self.delta))


def _protects(terms: Terms) -> str:
    if terms.unit == "user":
        return f"{terms.change} (period {terms.period}, time zone {terms.time_zone})"
    window = "" if terms.window is None else f" within {terms.window} steps"
    return f"{terms.unit} {terms.change}{window} ({terms.clock})"


def books_of(
    path: Path,
    tables: Mapping[str, Any],
    queries: Sequence[AnyQuery],
    of_query: Mapping[str, str],
    folder: Path,
) -> tuple[Book, ...]:
    """One book for all, or one for each source."""
    budgets, sources, found = tables["budget"], tables["source"], []
    if "" not in budgets and set(budgets) != set(sources):
        other = sorted(set(budgets) ^ set(sources))[0]
        raise InvalidInput(
            f"{path}: with [budget.NAME] every source has its own; {other or 'the source'!r} has "
            "only one of [source.NAME] and [budget.NAME]"
        )
    if "" not in budgets:
        _refuse_one_place_twice(path, sources)
    for name, table in budgets.items():
        where = f"{path}, [budget{'.' if name else ''}{name}]"
        mine = tuple(query for query in queries if not name or of_query[query.name] == name)
        if not mine:
            continue  # a source that no query reads yet
        ledger = Path(placed(path.parent, table["ledger"])) if "ledger" in table else None
        found.append(
            Book(
                where=where,
                dataset=table["dataset"],
                epsilon=positive(table["epsilon"], f"{where}: epsilon"),
                delta=positive(table["delta"], f"{where}: delta") if "delta" in table else None,
                ledger=ledger or folder / "ledger",
                queries=mine,
            )
        )
    names = [(book.ledger, book.dataset) for book in found]
    if len(set(names)) < len(names):
        raise InvalidInput(f"{path}: two budgets name one dataset; use one [budget] for both")
    return tuple(found)


def _refuse_one_place_twice(path: Path, sources: Mapping[str, Any]) -> None:
    """Two books for the same rows would promise each of them what their sum spends."""
    seen: dict[str, str] = {}
    for name, table in sources.items():
        if table["path"] == PUSHED:  # each source has rows of its own
            continue
        for place in {placed(path.parent, each) for each in listed(table["path"])}:
            if seen.setdefault(place, name) != name:
                raise InvalidInput(
                    f"{path}: [source.{seen[place]}] and [source.{name}] read the same rows, which "
                    "two books would promise their budgets each; use one [budget] for both"
                )
