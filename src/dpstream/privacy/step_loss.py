"""What one step has lost, bin by bin: a unit touches one bin of it, so the largest loss counts."""

from __future__ import annotations

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of bins."""


class StepLoss:
    """What was charged to one step: everywhere, and to some bins on top."""

    __slots__ = ("everywhere", "pieces", "top")

    def __init__(self) -> None:
        self.everywhere = self.top = 0
        self.pieces: list[tuple[Ranges, int]] | None = None  # most steps have none

    def with_charge(self, amount: int, bins: Ranges | None) -> int:
        """The largest loss of any bin if `amount` were charged to `bins` too."""
        if bins is None:
            return self.top + amount
        return self.everywhere + _highest([*(self.pieces or ()), (bins, amount)])

    def add(self, amount: int, bins: Ranges | None) -> None:
        """Charge `amount` to `bins`."""
        if bins is None:
            self.everywhere += amount
            self.top += amount
        else:
            self.top = self.with_charge(amount, bins)
            self.pieces = [*(self.pieces or ()), (bins, amount)]


def _highest(pieces: list[tuple[Ranges, int]]) -> int:
    """Maximum of a sum of step functions over bins."""
    edges: dict[int, int] = {}
    for ranges, amount in pieces:
        for start, stop in ranges:
            edges[start] = edges.get(start, 0) + amount
            edges[stop] = edges.get(stop, 0) - amount
    height = highest = 0
    for edge in sorted(edges):
        height += edges[edge]
        highest = max(highest, height)
    return highest
