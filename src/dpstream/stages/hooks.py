"""What a query may do to rows before everything else, and to releases after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import pyarrow as pa


class Prepare(Protocol):
    """Makes the query's columns out of the source's: filters and expressions, row by row.

    It never raises for a row: what cannot be computed is NULL.
    """

    @property
    def text(self) -> str:
        """Says all that it does; it is part of what fixes the releases, so it never changes."""

    @property
    def columns(self) -> Sequence[str]:
        """The columns of the source that it reads."""

    def columns_of(self, name: str) -> Sequence[str]:
        """The columns of the source that one of the query's columns is, or is computed from."""

    def __call__(self, table: pa.Table) -> pa.Table:
        """The rows that are wanted, with the query's columns."""


class Finish(Protocol):
    """Chooses and orders rows of a release by their noisy values."""

    @property
    def text(self) -> str:
        """Says all that it does; it is part of what fixes the releases, so it never changes."""

    @property
    def computed(self) -> Mapping[str, bool]:
        """The columns that it computes from noisy ones, and whether each has an error bar."""

    def __call__(self, release: pa.Table) -> pa.Table:
        """What is published of a release."""
