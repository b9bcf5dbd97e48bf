"""Rows of several sources in one query: UNION ALL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

TABLE = "$table"
"""The column that says which source a row is of."""


@runtime_checkable
class Unites(Protocol):
    """A `Prepare` of rows of several sources, whose columns are called `source.column`."""

    @property
    def sources(self) -> Sequence[str]:
        """The names that the SQL has for them."""
