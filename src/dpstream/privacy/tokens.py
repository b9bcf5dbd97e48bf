"""What a run has paid for and may draw under later: kept in a mechanism's state.

Each is tied to the run that paid; a copied state pays again.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from dpstream.privacy.state.serial import storable


@storable("interval")
@dataclass(frozen=True, kw_only=True)
class Interval:
    """A test that stays open over several steps, charged once to every window it overlaps."""

    purpose: str
    start: int
    amount: Fraction = Fraction(0)
    run: str = ""


@storable("paid")
@dataclass(frozen=True, kw_only=True)
class Paid:
    """Values that were paid for when they came, with all that later draws will read of them.

    Draws under it must be such that, however many of the values change, all draws together cost at
    most what was paid for the changed ones.
    """

    purpose: str
    run: str = ""


@storable("cover")
@dataclass(frozen=True, kw_only=True)
class Cover:
    """One charge for all Gaussian noise of a mechanism over steps `first` to `last`.

    Noise drawn under it must be such that, whatever one event changes, the squared changes of all
    values together, each over its own noise, cost at most `amount`.
    """

    purpose: str
    first: int
    last: int
    amount: Fraction
    run: str = ""
