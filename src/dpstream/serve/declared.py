"""The public side of the books: what was promised, and what each query was declared to take.

All amounts follow from the pipeline file. What a mechanism has really spent step by step, when, and
how far a run has come, is in the ledger file, for the operator.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from dpstream.connectors.storage import safe_name
from dpstream.mechanisms import name_of
from dpstream.pipeline import Pipeline
from dpstream.pipeline.books import Book
from dpstream.privacy.charges import Terms
from dpstream.privacy.ledger import Ledger
from dpstream.privacy.run_directory import read_about
from dpstream.sql.explain_users import measure_name
from dpstream.stages.plan import planned
from dpstream.stages.series_query import SeriesQuery

Line = dict[str, Any]


def declared_books(pipeline: Pipeline) -> list[dict[str, Any]]:
    """One entry per dataset, for everybody."""
    return [_book(book, pipeline) for book in pipeline.books]


def _book(book: Book, pipeline: Pipeline) -> dict[str, Any]:
    terms = book.terms()
    lines: list[Line] = []
    for query in book.queries:
        if isinstance(query, SeriesQuery):
            lines.append(_of_series(query, terms))
        else:
            lines += _of_users(query)
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


def _of_users(query: Any) -> list[Line]:
    """The one charge of a run, by what its noise is put on."""
    plan = planned(query.starting(0))
    return [
        {
            "query": query.name,
            "purpose": measure_name(measure),
            "exact": share,
            "charges": 1,
            "epsilon": float(query.epsilon),
            "delta": float(query.delta),
        }
        for measure, share in zip(plan.columns, plan.shares, strict=True)
    ]


def _of_series(query: SeriesQuery, book: Terms) -> Line:
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


def _others(book: Book, terms: Terms, pipeline: Pipeline) -> list[Line]:
    """What other runs of users have been charged to the same book, in one line.

    Each of their charges was fixed before its first row, too. Mechanisms that spend as they go are
    left out: how much they have spent by now is the operator's to know.
    """
    if terms.unit != "user" or not book.ledger.exists():
        return []
    ledger = Ledger(book.ledger)
    try:
        known = next((each for each in ledger.report() if each["dataset"] == book.dataset), None)
    finally:
        ledger.close()
    begun = [read_about(pipeline.state / safe_name(query.name)) for query in book.queries]
    mine = {about["run"].hex() for about in begun if about is not None}
    lines = [] if known is None else known["spent_on"]
    found = [line for line in lines if line["run"] not in mine]
    if not found:
        return []
    total = sum((Fraction(line["amount"]) for line in found), Fraction(0))
    words = "other runs on this dataset"
    return [{"query": None, "purpose": words, "exact": total, "charges": len(found)}]
