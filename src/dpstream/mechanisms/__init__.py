"""Mechanisms by name. A new one is a file, a test and two lines here."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING

from dpstream.errors import InvalidParameter
from dpstream.mechanisms.base import Mechanism

if TYPE_CHECKING:
    from dpstream.mechanisms.counters.blt import BltCounter as BltCounter
    from dpstream.mechanisms.counters.naive_counter import NaiveCounter as NaiveCounter
    from dpstream.mechanisms.counters.toeplitz import ToeplitzCounter as ToeplitzCounter
    from dpstream.mechanisms.counters.tree_counter import HonakerCounter as HonakerCounter
    from dpstream.mechanisms.counters.tree_counter import SmoothBinaryCounter as SmoothBinaryCounter
    from dpstream.mechanisms.counters.tree_counter import TreeCounter as TreeCounter
    from dpstream.mechanisms.counters.unbounded import UnboundedCounter as UnboundedCounter
    from dpstream.mechanisms.delayed.block_smoother import BlockSmoother as BlockSmoother
    from dpstream.mechanisms.delayed.buc_order import BucOrder as BucOrder
    from dpstream.mechanisms.delayed.comp_order import CompOrder as CompOrder
    from dpstream.mechanisms.delayed.contin_group import ContinGroup as ContinGroup
    from dpstream.mechanisms.delayed.discontin_group import DiscontinGroup as DiscontinGroup
    from dpstream.mechanisms.delayed.naive import Naive as Naive
    from dpstream.mechanisms.delayed.pegasus import Pegasus as Pegasus
    from dpstream.mechanisms.delayed.pegasus import PegasusDelay as PegasusDelay
    from dpstream.mechanisms.delayed.truncation import (
        SensitivityTruncation as SensitivityTruncation,
    )
    from dpstream.mechanisms.infinite.dpi import Dpi as Dpi
    from dpstream.mechanisms.w_event.adapub import AdaPub as AdaPub
    from dpstream.mechanisms.w_event.budget_absorption import BudgetAbsorption as BudgetAbsorption
    from dpstream.mechanisms.w_event.budget_distribution import (
        BudgetDistribution as BudgetDistribution,
    )
    from dpstream.mechanisms.w_event.dsat import Dsat as Dsat
    from dpstream.mechanisms.w_event.dsat import Dsft as Dsft
    from dpstream.mechanisms.w_event.fast import FastW as FastW
    from dpstream.mechanisms.w_event.pacer import Pacer as Pacer
    from dpstream.mechanisms.w_event.pegasus_w import PegasusW as PegasusW
    from dpstream.mechanisms.w_event.rescue_dp import RescueDp as RescueDp
    from dpstream.mechanisms.w_event.sample import Sample as Sample
    from dpstream.mechanisms.w_event.spas import Spas as Spas
    from dpstream.mechanisms.w_event.uniform import Uniform as Uniform

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
    "pegasus_w": "dpstream.mechanisms.w_event.pegasus_w:PegasusW",
    "rescue_dp": "dpstream.mechanisms.w_event.rescue_dp:RescueDp",
    "adapub": "dpstream.mechanisms.w_event.adapub:AdaPub",
    "naive": "dpstream.mechanisms.delayed.naive:Naive",
    "pegasus": "dpstream.mechanisms.delayed.pegasus:Pegasus",
    "pegasus_delay": "dpstream.mechanisms.delayed.pegasus:PegasusDelay",
    "contin_group": "dpstream.mechanisms.delayed.contin_group:ContinGroup",
    "discontin_group": "dpstream.mechanisms.delayed.discontin_group:DiscontinGroup",
    "comp_order": "dpstream.mechanisms.delayed.comp_order:CompOrder",
    "buc_order": "dpstream.mechanisms.delayed.buc_order:BucOrder",
    "sensitivity_truncation": "dpstream.mechanisms.delayed.truncation:SensitivityTruncation",
    "block_smoother": "dpstream.mechanisms.delayed.block_smoother:BlockSmoother",
    "dpi": "dpstream.mechanisms.infinite.dpi:Dpi",
    "naive_counter": "dpstream.mechanisms.counters.naive_counter:NaiveCounter",
    "tree": "dpstream.mechanisms.counters.tree_counter:TreeCounter",
    "honaker": "dpstream.mechanisms.counters.tree_counter:HonakerCounter",
    "smooth_binary": "dpstream.mechanisms.counters.tree_counter:SmoothBinaryCounter",
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
    mechanism: type[Mechanism] = getattr(import_module(module), attribute)
    return mechanism


def name_of(mechanism: Mechanism) -> str:
    """The name a mechanism is registered under."""
    name = getattr(mechanism, "identity", None)
    if name in REGISTRY:
        return str(name)
    raise InvalidParameter(f"{type(mechanism).__name__} is not registered in mechanisms.REGISTRY")


if not TYPE_CHECKING:  # who checks types is told of a name that is not there

    def __getattr__(attribute: str) -> type[Mechanism]:
        """`mechanisms.Sample` without importing every mechanism at start."""
        for name, path in REGISTRY.items():
            if path.endswith(f":{attribute}"):
                return find(name)
        raise AttributeError(f"dpstream.mechanisms has no {attribute!r}")


def __dir__() -> list[str]:
    return [*globals(), *(path.partition(":")[2] for path in REGISTRY.values())]
