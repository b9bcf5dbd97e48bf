"""dpstream: statistics from live streams under differential privacy, for as long as they run."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
    from dpstream import errors as errors
    from dpstream import ext as ext
    from dpstream import mechanisms as mechanisms
    from dpstream.bounds_proposal import bounds as bounds
    from dpstream.engines.query_run import EngineOptions as EngineOptions
    from dpstream.engines.spark import SparkEngine as SparkEngine
    from dpstream.engines.spark import SparkSink as SparkSink
    from dpstream.engines.spark import local_session as local_session
    from dpstream.errors import BudgetExceeded as BudgetExceeded
    from dpstream.errors import DpstreamError as DpstreamError
    from dpstream.errors import NoiseReuse as NoiseReuse
    from dpstream.explanation import explain as explain
    from dpstream.mechanisms.counter import Counter as Counter
    from dpstream.mechanisms.pan_private import PanPrivateRunner as PanPrivateRunner
    from dpstream.mechanisms.release import Series as Series
    from dpstream.mechanisms.release import bounded_counts as bounded_counts
    from dpstream.mechanisms.release import release as release
    from dpstream.mechanisms.runner import Runner as Runner
    from dpstream.privacy.accounting.promises import promise as promise
    from dpstream.privacy.ledger.charges import Terms as Terms
    from dpstream.privacy.ledger.ledger import Ledger as Ledger
    from dpstream.query.aggregates import ApproxCountDistinct as ApproxCountDistinct
    from dpstream.query.aggregates import Avg as Avg
    from dpstream.query.aggregates import AvgOfValues as AvgOfValues
    from dpstream.query.aggregates import Count as Count
    from dpstream.query.aggregates import CountDistinct as CountDistinct
    from dpstream.query.aggregates import CountUnits as CountUnits
    from dpstream.query.aggregates import Stddev as Stddev
    from dpstream.query.aggregates import Sum as Sum
    from dpstream.query.aggregates import Variance as Variance
    from dpstream.query.quantiles import Histogram as Histogram
    from dpstream.query.quantiles import Quantile as Quantile
    from dpstream.query.query import Query as Query
    from dpstream.query.second_moments import Correlation as Correlation
    from dpstream.query.second_moments import Covariance as Covariance
    from dpstream.query.second_moments import Slope as Slope
    from dpstream.query.series_query import SeriesQuery as SeriesQuery
    from dpstream.query.windows import Cumulate as Cumulate
    from dpstream.query.windows import Hop as Hop
    from dpstream.query.windows import Tumble as Tumble
    from dpstream.records import Release as Release
    from dpstream.session import Feed as Feed
    from dpstream.session import Refreshed as Refreshed
    from dpstream.session import Run as Run
    from dpstream.session import Runs as Runs
    from dpstream.session import read as read
    from dpstream.session import run as run
    from dpstream.session import run_all as run_all
    from dpstream.session import with_tables as with_tables
    from dpstream.sql_compiler import funnel as funnel
    from dpstream.sql_compiler import retention as retention
    from dpstream.sql_compiler import sessions as sessions
    from dpstream.sql_compiler import sql as sql

# Public names are imported on first use: the command line and the ledger start without Numba.
_NAMES_BY_HOME = {
    "bounds_proposal": "bounds",
    "engines.query_run": "EngineOptions",
    "engines.spark": "SparkEngine SparkSink local_session",
    "errors": "BudgetExceeded DpstreamError NoiseReuse",
    "explanation": "explain",
    "mechanisms.counter": "Counter",
    "mechanisms.pan_private": "PanPrivateRunner",
    "mechanisms.release": "Series bounded_counts release",
    "mechanisms.runner": "Runner",
    "privacy.accounting.promises": "promise",
    "privacy.ledger.charges": "Terms",
    "privacy.ledger.ledger": "Ledger",
    "query.aggregates": "ApproxCountDistinct Avg AvgOfValues Count CountDistinct "
    "CountUnits Stddev Sum Variance",
    "query.quantiles": "Histogram Quantile",
    "query.query": "Query",
    "query.second_moments": "Correlation Covariance Slope",
    "query.series_query": "SeriesQuery",
    "query.windows": "Cumulate Hop Tumble",
    "records": "Release",
    "session": "Feed Refreshed Run Runs read run run_all with_tables",
    "sql_compiler": "funnel retention sessions sql",
}
_HOMES = {name: home for home, names in _NAMES_BY_HOME.items() for name in names.split()}
__all__ = sorted(["__version__", "errors", "ext", "mechanisms", *_HOMES])


if not TYPE_CHECKING:  # who checks types is told of a name that is not there

    def __getattr__(name: str) -> object:
        if name in ("errors", "ext", "mechanisms"):
            return import_module(f"dpstream.{name}")
        if name == "__version__":
            value = globals()[name] = import_module("importlib.metadata").version("dpstream")
            return value
        if name not in _HOMES:
            raise AttributeError(f"dpstream has no {name!r}")
        value = globals()[name] = getattr(import_module(f"dpstream.{_HOMES[name]}"), name)
        return value


def __dir__() -> list[str]:
    return __all__
