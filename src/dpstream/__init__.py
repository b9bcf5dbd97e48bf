"""dpstream: statistics from live streams under differential privacy, for as long as they run."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpstream import errors, ext, mechanisms
    from dpstream.bounds_proposal import bounds
    from dpstream.engines.query_run import EngineOptions
    from dpstream.engines.spark import SparkEngine, SparkSink, local_session
    from dpstream.errors import BudgetExceeded, DpstreamError, NoiseReuse
    from dpstream.explanation.explain_query import explain
    from dpstream.mechanisms.counter import Counter
    from dpstream.mechanisms.release import Series, bounded_counts, release
    from dpstream.mechanisms.runner import Runner
    from dpstream.privacy.accounting.promises import promise
    from dpstream.privacy.ledger.charges import Terms
    from dpstream.privacy.ledger.ledger import Ledger
    from dpstream.query.aggregates import Avg, Count, CountUnits, Stddev, Sum, Variance
    from dpstream.query.query import Query
    from dpstream.query.series_query import SeriesQuery
    from dpstream.query.windows import Cumulate, Hop, Tumble
    from dpstream.records import Release
    from dpstream.session import Feed, Run, Runs, run, run_all
    from dpstream.sql_compiler import sql

__version__ = version("dpstream")

__all__ = [
    "Avg",
    "BudgetExceeded",
    "Count",
    "CountUnits",
    "Counter",
    "Cumulate",
    "DpstreamError",
    "EngineOptions",
    "Feed",
    "Hop",
    "Ledger",
    "NoiseReuse",
    "Query",
    "Release",
    "Run",
    "Runner",
    "Runs",
    "Series",
    "SeriesQuery",
    "SparkEngine",
    "SparkSink",
    "Stddev",
    "Sum",
    "Terms",
    "Tumble",
    "Variance",
    "__version__",
    "bounded_counts",
    "bounds",
    "errors",
    "explain",
    "ext",
    "local_session",
    "mechanisms",
    "promise",
    "release",
    "run",
    "run_all",
    "sql",
]

# Public names are imported on first use: the command line and the ledger start without Numba.
_HOMES = {
    "Avg": "dpstream.query.aggregates",
    "BudgetExceeded": "dpstream.errors",
    "Count": "dpstream.query.aggregates",
    "CountUnits": "dpstream.query.aggregates",
    "Counter": "dpstream.mechanisms.counter",
    "Cumulate": "dpstream.query.windows",
    "DpstreamError": "dpstream.errors",
    "EngineOptions": "dpstream.engines.query_run",
    "Feed": "dpstream.session",
    "Hop": "dpstream.query.windows",
    "Ledger": "dpstream.privacy.ledger.ledger",
    "NoiseReuse": "dpstream.errors",
    "Query": "dpstream.query.query",
    "Release": "dpstream.records",
    "Run": "dpstream.session",
    "Runner": "dpstream.mechanisms.runner",
    "Runs": "dpstream.session",
    "Series": "dpstream.mechanisms.release",
    "SeriesQuery": "dpstream.query.series_query",
    "SparkEngine": "dpstream.engines.spark",
    "SparkSink": "dpstream.engines.spark",
    "Stddev": "dpstream.query.aggregates",
    "Sum": "dpstream.query.aggregates",
    "Terms": "dpstream.privacy.ledger.charges",
    "Tumble": "dpstream.query.windows",
    "Variance": "dpstream.query.aggregates",
    "bounded_counts": "dpstream.mechanisms.release",
    "bounds": "dpstream.bounds_proposal",
    "explain": "dpstream.explanation.explain_query",
    "local_session": "dpstream.engines.spark",
    "promise": "dpstream.privacy.accounting.promises",
    "release": "dpstream.mechanisms.release",
    "run": "dpstream.session",
    "run_all": "dpstream.session",
    "sql": "dpstream.sql_compiler",
}


if not TYPE_CHECKING:  # who checks types is told of a name that is not there

    def __getattr__(name: str) -> object:
        if name in ("errors", "ext", "mechanisms"):
            return import_module(f"dpstream.{name}")
        if name not in _HOMES:
            raise AttributeError(f"dpstream has no {name!r}")
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value


def __dir__() -> list[str]:
    return __all__
