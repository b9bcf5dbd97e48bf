"""Bounds that are chosen for each period: which there are, and which one a period has.

A query says "auto" for its groups, its rows per group or the clamps of a sum. Each of these is
fixed anew for every period, to one of a few candidates that everybody knows. How they are chosen:
`group_by/chosen_bounds.py`. Proof: `docs/soundness/chosen_bounds.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

AUTO: Final = "auto"
"""In the place of a bound: each period has one that is chosen for it."""
HALF_OCTAVES = (1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256)
"""Candidates for groups and for rows."""
MOST_ROWS = 64
"""Rows of a unit in a group, at most, where they are chosen."""
FIRST_GROUPS, FIRST_ROWS = 8, 4
"""In the first period, of which nothing is known."""
_MANTISSAS = (Fraction(1), Fraction(3, 2), Fraction(2), Fraction(3), Fraction(5), Fraction(7))
CLAMPS = tuple(part * Fraction(10) ** power for power in range(-1, 7) for part in _MANTISSAS)
"""Candidates for the largest absolute value of a row: 0.1 to 7 million."""
FIRST_CLAMP = Fraction(10)
FINEST = Fraction(1, 100_000)
"""The grid on which values wait for their clamps."""
STEPS = 1000
"""Grid steps of a value at its clamp, whichever that is: its noise is the same in steps."""


@dataclass(frozen=True, kw_only=True)
class PeriodBounds:
    """The bounds of one period; those that the query gives are as it gives them."""

    groups: int
    rows: int = 1
    clamps: tuple[Fraction, ...] = ()
    """By clamp that is chosen: the largest absolute value of a row."""

    def save(self) -> list[Any]:
        """As plain values, for `restore`."""
        return [self.groups, self.rows, [str(clamp) for clamp in self.clamps]]

    @classmethod
    def restore(cls, saved: Sequence[Any]) -> PeriodBounds:
        """What `save` gave.

        >>> bounds = PeriodBounds(groups=8, rows=2, clamps=(Fraction(3, 2),))
        >>> PeriodBounds.restore(bounds.save()) == bounds
        True
        """
        groups, rows, clamps = saved
        return cls(groups=groups, rows=rows, clamps=tuple(map(Fraction, clamps)))


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """One of the bounds that are chosen, and what it may be; units are counted by it.

    `kind`: "groups", "rows" of a unit in one of its groups, or the value of one of its "rows of"
    a column. `first` holds in periods before which nothing was published.
    """

    kind: str
    edges: tuple[Fraction | int, ...]
    first: Fraction | int
    clamp: int = 0
    """Which of the clamps, where it is one."""

    def of(self, bounds: PeriodBounds) -> Fraction | int:
        """What a period has."""
        return {"groups": bounds.groups, "rows": bounds.rows}.get(self.kind) or (
            bounds.clamps[self.clamp]
        )

    def put(self, bounds: PeriodBounds, edge: Fraction | int) -> PeriodBounds:
        """The same bounds with another one of these."""
        groups, rows, clamps = bounds.groups, bounds.rows, list(bounds.clamps)
        if self.kind == "groups":
            groups = int(edge)
        elif self.kind == "rows":
            rows = int(edge)
        else:
            clamps[self.clamp] = Fraction(edge)
        return PeriodBounds(groups=groups, rows=rows, clamps=tuple(clamps))

    @property
    def bins(self) -> list[str]:
        """What the columns of its histogram are called: one for each candidate, and one beyond."""
        name = self.kind if self.kind in ("groups", "rows") else f"value {self.clamp}"
        return [f"units by {name}, bin {number}" for number in range(len(self.edges) + 1)]


def is_auto(given: Any) -> bool:
    """Are these bounds of rows to be chosen: "auto", or (0, "auto")?

    >>> is_auto("auto"), is_auto((0, "auto")), is_auto((0, 5)), is_auto(("auto", 5))
    (True, True, False, False)
    """
    if isinstance(given, str):
        return given == AUTO
    return isinstance(given, tuple | list) and len(given) == 2 and bool(given[1] == AUTO)


def cut(candidates: Sequence[int], most: int) -> tuple[int, ...]:
    """Those below the largest one, and that."""
    return (*(each for each in candidates if each < most), most)
