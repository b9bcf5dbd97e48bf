"""dpstream: statistics from live streams under differential privacy, for as long as they run."""

from importlib.metadata import version

from dpstream import errors, mechanisms
from dpstream.errors import BudgetExceeded, DpstreamError, NoiseReuse
from dpstream.mechanisms.release import release
from dpstream.mechanisms.runner import Runner
from dpstream.mechanisms.series import Series
from dpstream.privacy.ledger import Ledger
from dpstream.records import Release

__version__ = version("dpstream")

__all__ = [
    "BudgetExceeded",
    "DpstreamError",
    "Ledger",
    "NoiseReuse",
    "Release",
    "Runner",
    "Series",
    "__version__",
    "errors",
    "mechanisms",
    "release",
]
