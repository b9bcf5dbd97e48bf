"""Queries, sources and sinks brought together into runs, by calls and by pipeline files."""

from dpstream.engines.chunks import OperatorCounts
from dpstream.engines.query_run import Run
from dpstream.session.budget import refuse_early
from dpstream.session.read_rows import read
from dpstream.session.runs import Runs
from dpstream.session.start import Feed, run, run_all
from dpstream.session.whole_tables import Refreshed, with_tables

__all__ = [
    "Feed",
    "OperatorCounts",
    "Refreshed",
    "Run",
    "Runs",
    "read",
    "refuse_early",
    "run",
    "run_all",
    "with_tables",
]
