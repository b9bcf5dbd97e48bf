"""Windows of event time, by the words that stream users know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from dpstream.errors import InvalidParameter
from dpstream.privacy.state.identity import Identified
from dpstream.stages.ticks import DAY, duration, in_words, keeps_its_offset


@dataclass(frozen=True)
class Tumble(Identified, identity="tumble", keys="size"):
    """Windows of one size, side by side, from the query's start on.

    Whole days follow the calendar of the query's time zone.
    """

    size: Any
    kind: ClassVar[Literal["tumble", "hop", "cumulate"]] = "tumble"

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", duration(self.size, "the window's size"))

    @property
    def cell(self) -> int:
        """From one edge to the next."""
        return int(self.size)

    @property
    def cells(self) -> int:
        """How many cells a whole window has; at most that many windows share a row."""
        return int(self.size) // self.cell

    def check(self, zone: str) -> None:
        """Refuse what has no meaning in a time zone."""
        if self.size % DAY == 0 and self.cell % DAY and not keeps_its_offset(zone):
            raise InvalidParameter(
                f"a day of {zone} has 23 or 25 hours when clocks change, so windows of "
                f"{in_words(self.size)} cannot be made of parts of {in_words(self.cell)}; use a "
                "zone without clock changes, such as UTC, or parts of whole days"
            )

    def _whole_parts(self, name: str, part: Any) -> None:
        length = duration(part, f"the window's {name}")
        object.__setattr__(self, name, length)
        if self.size % length or self.size == length:
            raise InvalidParameter(
                f"the window's size must be a multiple of its {name}, and more than one; got "
                f"size={in_words(self.size)}, {name}={in_words(length)}"
            )


@dataclass(frozen=True)
class Hop(Tumble, identity="hop", keys="slide"):
    """Windows of one size, one every `slide`; a row is in size/slide of them.

    The first begins at the query's start, the last one holds its end: no window reaches beyond.
    """

    slide: Any = field(kw_only=True)
    kind = "hop"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._whole_parts("slide", self.slide)

    @property
    def cell(self) -> int:
        """The slide."""
        return int(self.slide)


@dataclass(frozen=True)
class Cumulate(Tumble, identity="cumulate", keys="step"):
    """Windows that grow by `step` up to `size`, then begin anew; a row is in those that follow it.

    Each is published from the end of the one before it on.
    """

    step: Any = field(kw_only=True)
    kind = "cumulate"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._whole_parts("step", self.step)

    @property
    def cell(self) -> int:
        """The step."""
        return int(self.step)
