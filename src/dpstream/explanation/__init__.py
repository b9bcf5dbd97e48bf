"""What a query will do and cost, in words and figures: it follows from the query, not from data."""

from __future__ import annotations

from dpstream.explanation.explain_group_by import explain_group_by
from dpstream.explanation.explain_series import explain_series
from dpstream.explanation.plan_facts import Explanation
from dpstream.query.query import Query
from dpstream.query.series_query import SeriesQuery

__all__ = ["Explanation", "explain"]


def explain(query: Query | SeriesQuery) -> Explanation:
    """Explain a query; one that runs live is taken to begin with its first window."""
    return explain_series(query) if isinstance(query, SeriesQuery) else explain_group_by(query)
