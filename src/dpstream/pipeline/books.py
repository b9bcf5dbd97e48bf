"""The books of a pipeline: what each dataset promises, and the queries that it pays for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from dpstream.errors import InvalidParameter
from dpstream.privacy.amounts import on_grid
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
