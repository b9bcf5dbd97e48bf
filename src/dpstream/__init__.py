"""dpstream: statistics from live streams under differential privacy, for as long as they run."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpstream import errors, mechanisms
    from dpstream.errors import BudgetExceeded, DpstreamError, NoiseReuse
    from dpstream.mechanisms.counter import Counter
    from dpstream.mechanisms.release import release
    from dpstream.mechanisms.runner import Runner
    from dpstream.mechanisms.series import Series
    from dpstream.privacy.charges import Terms
    from dpstream.privacy.ledger import Ledger
    from dpstream.records import Release

__version__ = version("dpstream")

__all__ = [
    "BudgetExceeded",
    "Counter",
    "DpstreamError",
    "Ledger",
    "NoiseReuse",
    "Release",
    "Runner",
    "Series",
    "Terms",
    "__version__",
    "errors",
    "mechanisms",
    "release",
]

# Public names are imported on first use: the command line and the ledger start without Numba.
_HOMES = {
    "BudgetExceeded": "dpstream.errors",
    "Counter": "dpstream.mechanisms.counter",
    "DpstreamError": "dpstream.errors",
    "Ledger": "dpstream.privacy.ledger",
    "NoiseReuse": "dpstream.errors",
    "Release": "dpstream.records",
    "Runner": "dpstream.mechanisms.runner",
    "Series": "dpstream.mechanisms.series",
    "Terms": "dpstream.privacy.charges",
    "release": "dpstream.mechanisms.release",
}


def __getattr__(name: str) -> Any:
    if name in ("errors", "mechanisms"):
        return import_module(f"dpstream.{name}")
    if name not in _HOMES:
        raise AttributeError(f"dpstream has no {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
