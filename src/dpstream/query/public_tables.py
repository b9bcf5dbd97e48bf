"""Tables that a query joins its rows to, or takes its keys from: read whole, known by a digest.

A public table is the same for everybody, whoever is in the stream. A registry has rows of units:
one that leaves the stream takes its rows of the registry along. What is private in a table (its
digest, how many rows it has) is shown of public tables alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from dpstream.errors import InvalidParameter


@dataclass(frozen=True, kw_only=True)
class WholeTable:
    """A table and its digest; `registry`: its rows belong to units, and are private."""

    name: str
    digest: str
    registry: bool = False
    refresh: int | None = None
    """A live run reads it anew at these intervals, in microseconds; None: at its start alone."""
    read: Callable[[], pa.Table] | None = field(default=None, compare=False, repr=False)
    """What is there now, for a table that is read anew."""
    table: pa.Table = field(compare=False, repr=False)


Tables = Mapping[str, WholeTable]


@runtime_checkable
class NeedsTables(Protocol):
    """A part of a query that is complete only with tables."""

    @property
    def table_names(self) -> Sequence[str]:
        """The tables that it needs, by the names that the SQL has."""

    def with_tables(self, tables: Tables) -> Any:
        """The same part, with these tables."""


@runtime_checkable
class Joining(NeedsTables, Protocol):
    """A `Prepare` that joins tables."""

    @property
    def plain_times(self) -> bool:
        """Are the time columns those of the source?"""

    @property
    def joins_in_words(self) -> Sequence[str]:
        """A sentence for each join, for those who may see the releases."""

    @property
    def rows_text(self) -> str:
        """What is done to joined rows, in SQL."""

    @property
    def tables(self) -> Sequence[WholeTable]:
        """The tables of its joins, in their order; none yet if they are still to be given."""

    @property
    def public_tables(self) -> Sequence[str]:
        """The tables that it joins and that everybody may know."""

    @property
    def registries(self) -> Sequence[str]:
        """The tables that it joins whose rows belong to units."""


class KeyTable(Sequence[tuple[Any, ...]]):
    """Public groups in columns: a million of them take seconds, not minutes.

    `digest`: of all of them; it stands for them in what fixes a run.
    """

    def __init__(self, columns: Sequence[pa.Array], digest: str) -> None:
        self.columns, self.digest = list(columns), digest

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [*zip(*(column[at].to_pylist() for column in self.columns), strict=True)]
        return tuple(column[at].as_py() for column in self.columns)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return zip(*(column.to_pylist() for column in self.columns), strict=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeyTable) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"{len(self)} keys with SHA-256 {self.digest}"


def missing_table(name: str, why: str = "is joined") -> InvalidParameter:
    """The query needs a table that nobody has given."""
    return InvalidParameter(
        f"the table {name!r} {why}, and it is not declared: if everybody may know all of it, say "
        f"--public {name}=FILE (public={{{name!r}: ...}} in Python, [[public]] in a pipeline); if "
        f"its rows belong to the privacy units and it is joined on the unit, --registry {name}=FILE"
        f" (registry=..., [[registry]]); rows of two streams are never joined, for a unit's rows "
        "would meet another's: read both with UNION ALL"
    )
