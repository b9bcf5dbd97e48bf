"""What a query will do and cost, in words and figures: it follows from the query, not from data."""

from dpstream.explanation.explain_query import explain
from dpstream.explanation.plan_facts import Explanation

__all__ = ["Explanation", "explain"]
