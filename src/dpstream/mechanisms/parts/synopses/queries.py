"""Queries that boosting weighs: public groupings of the bins, each a coarser histogram.

The answer to one is the distribution over its groups. Summing bins makes no L1 distance larger,
so one user moves every answer by no more than the distribution itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dpstream.errors import InvalidParameter
from dpstream.mechanisms.base import whole
from dpstream.records import Integers

Grouping = int | tuple[int, ...]
"""So many equal runs of successive bins, or the group number of every bin."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The group of every bin, 0 to count - 1."""

    of: tuple[int, ...]

    @classmethod
    def equal(cls, bins: int, count: int) -> Groups:
        """`count` runs of successive bins, as equal as can be.

        >>> Groups.equal(5, 2).of
        (0, 0, 0, 1, 1)
        """
        return cls(of=tuple(int(i) for i in np.arange(bins) * count // bins))

    @cached_property
    def single(self) -> bool:
        """Does every bin stand for itself? (If so they may be left in their order.)"""
        return max(self.of) + 1 == len(self.of)

    @cached_property
    def _order(self) -> tuple[Integers, Integers]:
        """The bins group by group, and where each group starts."""
        labels = np.array(self.of)
        return np.argsort(labels, kind="stable"), np.unique(np.sort(labels), return_index=True)[1]

    def sum(self, values: Any) -> Integers:
        """Values of bins to values of groups."""
        order, starts = self._order
        total: Integers = np.add.reduceat(values.astype(np.int64)[order], starts)
        return total


def checked(queries: Any) -> tuple[Grouping, ...]:
    """Groupings as they are stored; a single number of groups is one of them."""
    if isinstance(queries, int):
        queries = (queries,)
    if isinstance(queries, str) or not isinstance(queries, Sequence):
        raise InvalidParameter(
            f"queries must be numbers of groups, such as (100, 16), or group numbers of all bins; "
            f"got {queries!r}"
        )
    return tuple(
        tuple(whole(label, "a group number", at_least=0) for label in query)
        if isinstance(query, Sequence)
        else whole(query, "the number of groups of a query", at_least=2)
        for query in queries
    )


def groups_of(queries: Sequence[Grouping], bins: int) -> tuple[Groups, ...]:
    """The groupings of a domain; without any, every bin by itself."""
    found = []
    for query in queries or (bins,):
        if isinstance(query, int):
            if query > bins:
                raise InvalidParameter(
                    f"a query has {query} groups, but there are {bins} bins; ask for at most {bins}"
                )
            found.append(Groups.equal(bins, query))
            continue
        if len(query) != bins or sorted(set(query)) != list(range(max(query) + 1)):
            raise InvalidParameter(
                f"a query names the group of each of the {bins} bins, as numbers from 0 on without "
                f"gaps; got {len(query)} numbers, {sorted(set(query))[:9]}"
            )
        found.append(Groups(of=query))
    return tuple(found)
