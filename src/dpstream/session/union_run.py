"""UNION ALL of private queries: several queries of one book, whose releases come together.

Each branch is a query of its own, with its own charge, noise and state; its releases are in the
sink under its own name. What is put together here is published already.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import pyarrow as pa

from dpstream.engines.collected import release_facts
from dpstream.engines.query_run import AnyQuery, Run
from dpstream.errors import InvalidParameter
from dpstream.privacy.accounting.accountant import FloatError
from dpstream.privacy.accounting.promises import own_terms, with_lost_mass
from dpstream.privacy.ledger.charges import Terms
from dpstream.query.noise_plan import plan_query
from dpstream.query.query import Query
from dpstream.query.series_query import SeriesQuery
from dpstream.session.runs import Runs

_KEPT_SHARE = "kept_share"
_PLACE = ("window_start", "window_end", "trigger_time", "release_index")


def book_of_all(queries: Sequence[AnyQuery], now: int) -> Terms:
    """The terms of a book for all of these queries: what they are charged adds up."""
    first = queries[0]
    for query in queries[1:]:
        if _protected(query) != _protected(first):
            raise InvalidParameter(
                f"the queries would share one book; {query.name!r} protects "
                f"{_protected(query)}, and {first.name!r} {_protected(first)}: give them the same "
                "unit, period and time zone"
            )
    if any(isinstance(query, SeriesQuery) for query in queries):
        terms = [query.terms() for query in queries if isinstance(query, SeriesQuery)]
        return replace(terms[0], total=sum((each.total for each in terms), Fraction(0)))
    plans = [plan_query(query.starting(now)) for query in queries if isinstance(query, Query)]
    noisy = [plan for plan in plans if not plan.query.pure]
    pure = [plan.terms() for plan in plans if plan.query.pure]
    if not noisy:
        return replace(pure[0], total=sum((each.total for each in pure), Fraction(0)))
    epsilon = sum((Fraction(plan.query.epsilon) for plan in plans), Fraction(0))
    book = own_terms(
        epsilon=epsilon,
        mu_squared=sum((plan.calibrated.mu_squared for plan in noisy), Fraction(0)),
        delta_slack=Fraction(0),
        error=FloatError(xi=sum((p.error.xi for p in noisy), Fraction(0)), tau=Fraction(0)),
        period=noisy[0].query.period_in_words,
        time_zone=noisy[0].query.time_zone,
        change=noisy[0].query.protected,
    )
    more = (plan.terms(book).total for plan in plans if plan.query.pure)
    slack = (with_lost_mass(book, delta_slack=p.delta_slack, error=p.error) for p in noisy)
    return replace(
        book, total=book.total + sum(more, Fraction(0)), delta_slack=sum(slack, Fraction(0))
    )


def _protected(query: AnyQuery) -> str:
    return f"{query.protected} in {query.time_zone}"


def refuse_other_times(queries: Sequence[AnyQuery]) -> None:
    """The branches publish the same windows at the same times."""
    first = queries[0]
    for query in queries:
        if (query.window, query.every, query.start, query.end, query.allowed_lateness) != (
            *(first.window, first.every, first.start, first.end, first.allowed_lateness),
        ):
            raise InvalidParameter(
                "the branches of UNION ALL publish at different times: give them the same windows, "
                f"start, end and EMIT; {query.name!r} differs from {first.name!r}"
            )


@dataclass(kw_only=True, repr=False, eq=False)
class UnionRun(Run):
    """Queries side by side, as one run: each release has the rows of all of them.

    `query` is the first one.
    """

    parts: Runs
    name: str
    together: pa.Schema | None = field(init=False, default=None)

    def _releases(self) -> Generator[Any, None, None]:
        """The rows of all branches, once all of them have published a window at a trigger."""
        try:
            self.parts.open()
            _ = self.schema  # refuses other columns, before anything is charged
            yield None
            waiting: dict[tuple[Any, Any], dict[str, pa.Table]] = {}
            for name, table in self.parts:
                facts = release_facts(table)
                at = facts["window"], facts["trigger_time"]
                waiting.setdefault(at, {})[name] = table
                if len(waiting[at]) == len(self.parts.runs):
                    mine = waiting.pop(at)
                    self._count()
                    yield self._united([mine[each] for each in self.parts.runs])
                if self.stopped.is_set() or self.parts.failures:  # no release is whole without all
                    self.parts.stop()
        finally:
            self.parts.close()

    def _count(self) -> None:
        """What became of the rows of all branches, for the operator."""
        runs = self.parts.runs.values()
        self.steps_done = min(run.steps_done for run in runs)
        for name in ("read", "rejected_rows", "outside", "late", "other_keys"):
            setattr(self.operator, name, sum(getattr(run.operator, name) for run in runs))

    @property
    def schema(self) -> pa.Schema:
        """The columns of all branches: the same ones, in one order."""
        schemas = {name: run.schema for name, run in self.parts.runs.items()}
        (first, wanted), *others = schemas.items()
        for name, schema in others:
            mine, theirs = _shown(schema), _shown(wanted)
            if mine != theirs:
                raise InvalidParameter(
                    "the branches of UNION ALL must publish the same columns, in one order; "
                    f"{first!r} has {', '.join(theirs)}, and {name!r} has {', '.join(mine)}; name "
                    "them alike with AS"
                )
        try:
            return pa.unify_schemas(list(schemas.values()), promote_options="permissive")
        except pa.ArrowException as problem:
            raise InvalidParameter(
                f"a column of UNION ALL has types that do not meet: {problem}; CAST one of them"
            ) from None

    def _united(self, tables: Sequence[pa.Table]) -> pa.Table:
        facts = release_facts(tables[0])
        for name in ("bias", _KEPT_SHARE):  # of one branch alone
            facts.pop(name, None)
        facts["query"] = self.name
        plain = [table.replace_schema_metadata(None) for table in tables]
        united = pa.concat_tables(plain, promote_options="permissive")
        return united.replace_schema_metadata({b"dpstream": json.dumps(facts).encode()})

    @property
    def live(self) -> bool:
        """Does any branch go by the clock?"""
        return any(run.live for run in self.parts.runs.values())

    def stop(self) -> None:
        """End all branches at the next occasion, durably."""
        super().stop()
        self.parts.stop()

    def erase_unit(self, unit: Any) -> int:
        """Erase a unit from all branches."""
        return sum(run.erase_unit(unit) for run in self.parts.runs.values())


def _shown(schema: pa.Schema) -> list[str]:
    return [name for name in schema.names if name != _KEPT_SHARE]
