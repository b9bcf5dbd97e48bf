"""dpstream: statistics from live streams under differential privacy, for as long as they run."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpstream import errors, mechanisms
    from dpstream.choosing import bounds
    from dpstream.errors import BudgetExceeded, DpstreamError, NoiseReuse
    from dpstream.mechanisms.counter import Counter
    from dpstream.mechanisms.release import release
    from dpstream.mechanisms.runner import Runner
    from dpstream.mechanisms.series import Series
    from dpstream.privacy.charges import Terms
    from dpstream.privacy.ledger import Ledger
    from dpstream.records import Release
    from dpstream.session import run, run_all
    from dpstream.sql import sql
    from dpstream.sql.explain import explain
    from dpstream.stages.aggregates import Avg, Count, CountUnits, Stddev, Sum, Variance
    from dpstream.stages.query import Query
    from dpstream.stages.series_query import SeriesQuery
    from dpstream.stages.windows import Cumulate, Hop, Tumble

__version__ = version("dpstream")

__all__ = [
    "Avg",
    "BudgetExceeded",
    "Count",
    "CountUnits",
    "Counter",
    "Cumulate",
    "DpstreamError",
    "Hop",
    "Ledger",
    "NoiseReuse",
    "Query",
    "Release",
    "Runner",
    "Series",
    "SeriesQuery",
    "Stddev",
    "Sum",
    "Terms",
    "Tumble",
    "Variance",
    "__version__",
    "bounds",
    "errors",
    "explain",
    "mechanisms",
    "release",
    "run",
    "run_all",
    "sql",
]

# Public names are imported on first use: the command line and the ledger start without Numba.
_HOMES = {
    "Avg": "dpstream.stages.aggregates",
    "BudgetExceeded": "dpstream.errors",
    "Count": "dpstream.stages.aggregates",
    "CountUnits": "dpstream.stages.aggregates",
    "Counter": "dpstream.mechanisms.counter",
    "Cumulate": "dpstream.stages.windows",
    "DpstreamError": "dpstream.errors",
    "Hop": "dpstream.stages.windows",
    "Ledger": "dpstream.privacy.ledger",
    "NoiseReuse": "dpstream.errors",
    "Query": "dpstream.stages.query",
    "Release": "dpstream.records",
    "Runner": "dpstream.mechanisms.runner",
    "Series": "dpstream.mechanisms.series",
    "SeriesQuery": "dpstream.stages.series_query",
    "Stddev": "dpstream.stages.aggregates",
    "Sum": "dpstream.stages.aggregates",
    "Terms": "dpstream.privacy.charges",
    "Tumble": "dpstream.stages.windows",
    "Variance": "dpstream.stages.aggregates",
    "bounds": "dpstream.choosing",
    "explain": "dpstream.sql.explain",
    "release": "dpstream.mechanisms.release",
    "run": "dpstream.session",
    "run_all": "dpstream.session",
    "sql": "dpstream.sql",
}


if not TYPE_CHECKING:  # who checks types is told of a name that is not there

    def __getattr__(name: str) -> object:
        if name in ("errors", "mechanisms"):
            return import_module(f"dpstream.{name}")
        if name not in _HOMES:
            raise AttributeError(f"dpstream has no {name!r}")
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value


def __dir__() -> list[str]:
    return __all__
