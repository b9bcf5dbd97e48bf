"""Mechanisms by name. A new one is a file, a test and a line here."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import Any

from dpstream.errors import InvalidParameter
from dpstream.mechanisms.base import Mechanism

REGISTRY = {
    "uniform": "dpstream.mechanisms.w_event.uniform:Uniform",
    "sample": "dpstream.mechanisms.w_event.sample:Sample",
    "budget_distribution": ("dpstream.mechanisms.w_event.budget_distribution:BudgetDistribution"),
    "budget_absorption": "dpstream.mechanisms.w_event.budget_absorption:BudgetAbsorption",
    "spas": "dpstream.mechanisms.w_event.spas:Spas",
    "pacer": "dpstream.mechanisms.w_event.pacer:Pacer",
    "fast_w": "dpstream.mechanisms.w_event.fast:FastW",
    "dsat": "dpstream.mechanisms.w_event.dsat:Dsat",
    "dsft": "dpstream.mechanisms.w_event.dsat:Dsft",
    "pegasus_w": "dpstream.mechanisms.w_event.pegasus:PegasusW",
    "adapub": "dpstream.mechanisms.w_event.adapub:AdaPub",
    "naive": "dpstream.mechanisms.delayed.naive:Naive",
    "pegasus": "dpstream.mechanisms.delayed.pegasus:Pegasus",
    "pegasus_delay": "dpstream.mechanisms.delayed.pegasus_delay:PegasusDelay",
    "contin_group": "dpstream.mechanisms.delayed.contin_group:ContinGroup",
    "discontin_group": "dpstream.mechanisms.delayed.discontin_group:DiscontinGroup",
    "comp_order": "dpstream.mechanisms.delayed.comp_order:CompOrder",
    "buc_order": "dpstream.mechanisms.delayed.buc_order:BucOrder",
    "sensitivity_truncation": "dpstream.mechanisms.delayed.truncation:SensitivityTruncation",
    "block_smoother": "dpstream.mechanisms.delayed.block_smoother:BlockSmoother",
    "dpi": "dpstream.mechanisms.infinite.dpi:Dpi",
    "naive_counter": "dpstream.mechanisms.counters.naive:NaiveCounter",
    "tree": "dpstream.mechanisms.counters.tree:TreeCounter",
    "honaker": "dpstream.mechanisms.counters.honaker:HonakerCounter",
    "smooth_binary": "dpstream.mechanisms.counters.smooth_binary:SmoothBinaryCounter",
    "toeplitz": "dpstream.mechanisms.counters.toeplitz:ToeplitzCounter",
    "blt": "dpstream.mechanisms.counters.blt:BltCounter",
    "unbounded_counter": "dpstream.mechanisms.counters.unbounded:UnboundedCounter",
}


def find(name: str) -> type[Mechanism]:
    """The class registered under `name`."""
    if name not in REGISTRY:
        near = get_close_matches(name, REGISTRY, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InvalidParameter(
            f"there is no mechanism {name!r}; {hint}choose one of {', '.join(sorted(REGISTRY))}"
        )
    module, _, attribute = REGISTRY[name].partition(":")
    found: type[Mechanism] = getattr(import_module(module), attribute)
    return found


def name_of(mechanism: Mechanism) -> str:
    """The name a mechanism is registered under."""
    name = getattr(mechanism, "identity", None)
    if name in REGISTRY:
        return str(name)
    raise InvalidParameter(f"{type(mechanism).__name__} is not registered in mechanisms.REGISTRY")


def __getattr__(attribute: str) -> Any:
    """`mechanisms.Sample` without importing every mechanism at start."""
    for name, path in REGISTRY.items():
        if path.endswith(f":{attribute}"):
            return find(name)
    raise AttributeError(f"dpstream.mechanisms has no {attribute!r}")


def __dir__() -> list[str]:
    return [*globals(), *(path.partition(":")[2] for path in REGISTRY.values())]
