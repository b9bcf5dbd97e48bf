"""The mechanisms of the delay bench by name: sound ones, published forms, what needs no data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dpstream.bench.delayed_published import (
    BucOrderPublished,
    CompOrderPublished,
    ContinGroupPublished,
    DiscontinGroupPublished,
    PegasusPublished,
)
from dpstream.bench.delayed_streams import Series
from dpstream.mechanisms import find
from dpstream.mechanisms.base import Mechanism, SeriesMechanism
from dpstream.mechanisms.w_event.adapub import AdaPub
from dpstream.privacy.amounts import exact

MIDPOINT: Final = "midpoint"
"""What needs no data and no budget: the middle of the public range, always."""

AS_PUBLISHED: Final = " as published"
EVENT_ADAPUB: Final = "adapub, one event"

# Name -> class and the options that make the form; sound classes are found in the registry.
_PUBLISHED: Final[Mapping[str, tuple[Any, dict[str, Any]]]] = {
    "pegasus": (PegasusPublished, {}),
    "pegasus_delay": (ContinGroupPublished, {"noise": "pp"}),
    "contin_group": (ContinGroupPublished, {}),
    "contin_group pp": (ContinGroupPublished, {"noise": "pp"}),
    "discontin_group": (DiscontinGroupPublished, {}),
    "discontin_group pp": (DiscontinGroupPublished, {"noise": "pp"}),
    "comp_order": (CompOrderPublished, {}),
    "comp_order, both ends": (CompOrderPublished, {"bounds": "ends"}),
    "buc_order": (BucOrderPublished, {}),
}
_WITHOUT_DELAY: Final = ("naive", "pegasus")

SOUND: Final = (
    "naive", "pegasus", "pegasus_delay", "contin_group", "discontin_group", "discontin_group pp",
    "comp_order", "buc_order", "block_smoother",
)  # fmt: skip
PUBLISHED: Final = tuple(name + AS_PUBLISHED for name in _PUBLISHED if name != "contin_group pp")


@dataclass(frozen=True, kw_only=True)
class Method:
    """A mechanism, whether a book may hold it to epsilon, and whether bins are runs."""

    mechanism: Mechanism
    limited: bool = True
    apart: bool = False


def method(name: str, series: Series, *, epsilon: float, delay: int, **options: Any) -> Method:
    """The mechanism `name` for a series; `options` are those of its class."""
    basic: dict[str, Any] = {"epsilon": epsilon, "lo": series.lo, "hi": series.hi}
    if name == EVENT_ADAPUB:
        # One value moves by hi - lo, which is as many events of 1: by group privacy the
        # mechanism for counts promises epsilon with that much less.
        share = exact(epsilon) / (series.hi - series.lo)
        return Method(mechanism=AdaPub(epsilon=share, window=1), apart=True)
    plain = name.removesuffix(AS_PUBLISHED)
    if plain not in _WITHOUT_DELAY:
        basic["delay"] = delay
    if plain != name:
        build, form = _PUBLISHED[plain]
        if build is BucOrderPublished:
            form = {"width": series.bucket, **form}
        apart = bool(options.get("truncate_every"))
        return Method(mechanism=build(**basic, **{**form, **options}), limited=False, apart=apart)
    # It chooses one block length for all bins: as bins of one release, runs would learn together.
    return Method(mechanism=_sound(plain, basic, options), apart=plain == "block_smoother")


def truncated(name: str, series: Series, *, epsilon: float, delay: int) -> Method:
    """The same with truncation, renewed every five batches: the sound wrapper, or the paper's."""
    if name.endswith(AS_PUBLISHED):
        return method(name, series, epsilon=epsilon, delay=delay, truncate_every=5)
    inside = method(name, series, epsilon=epsilon, delay=delay).mechanism
    assert isinstance(inside, SeriesMechanism)
    wrapper: Any = find("sensitivity_truncation")
    around = {} if hasattr(inside, "delay") else {"delay": delay}
    return Method(mechanism=wrapper.of(inside, every=5, **around), apart=True)


def _sound(name: str, basic: dict[str, Any], options: Mapping[str, Any]) -> Mechanism:
    registered, _, how = name.partition(" ")
    build: Any = find(registered)
    also = {"publish": how} if how else {}
    mechanism: Mechanism = build(**basic, **also, **options)
    return mechanism
