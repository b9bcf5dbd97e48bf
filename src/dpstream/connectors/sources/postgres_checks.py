"""Signs that a table is not what was read before, and that rows were missed."""

from __future__ import annotations

from typing import Any

from dpstream.connectors.sources.postgres_table import Table
from dpstream.errors import InvalidInput, RowsLost


class Checks:
    """What a source remembers of its table, to notice that it changed behind it."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self.seen = False
        """The row of the position was there, for who is connected now."""
        self.passed: tuple[int | None, int, int] | None = None
        """The last chunk: after which key, up to which, and how many rows."""

    def long_enough(self, largest: int | None, lag: int, end: int) -> None:
        """A bounded source must have its end."""
        if largest is None or largest - lag < end:
            behind = f", {lag} of which are left alone," if lag else ""
            raise InvalidInput(
                f"{self._table.place} ends at {self._table.key} {largest}{behind} before until="
                f"{end}; wait, or name an earlier end"
            )

    def same_table(self, connection: Any, key: int | None, largest: int | None) -> None:
        """The last row that was read must be there, or no key was handed out after it.

        Otherwise rows that nobody has read may be gone too. Who has seen the row, and looks again
        and again, need not look for it any more.
        """
        if key is None or (self.seen and (largest is None or largest >= key)):
            return
        there = self._table.count(connection, key - 1, key, 1)
        last = largest if there else self._table.last_of_sequence(connection)
        if last is None or last < key or (not there and last != key):
            raise RowsLost(
                f"{self._table.place} was read up to {self._table.key} {key}, and that row is gone"
                f"{f', while the last key is {last}' if last is not None else ''}: rows that were "
                "not read may be gone too; restore them, or start anew with another checkpoint "
                "location"
            )
        self.seen = True

    def no_straggler(self, connection: Any, key: int | None) -> None:
        """Count the last chunk again: a row that came behind it would never be read."""
        if self.passed is None or self.passed[1] != key:
            return
        (after, upto, rows), self.passed = self.passed, None
        if self._table.count(connection, after, upto, rows + 1) > rows:
            raise InvalidInput(
                f"{self._table.place}: a row came with a {self._table.key} up to {upto}, after all "
                "rows up to there were read; say settle=transactions if keys are taken before the "
                "INSERT, or lag=N to stay N keys behind the largest"
            )

    def other_rows(self, were: int, rows: int, after: int | None, key: int | None) -> InvalidInput:
        """A replay found another number of rows."""
        span = f"with {self._table.key} after {after} up to {key}"
        if rows < were:
            return RowsLost(
                f"a step has read {were} rows of {self._table.place} {span}, and {rows} of them "
                "are left; restore them, or start anew with another checkpoint location"
            )
        return InvalidInput(
            f"a step has read {were} rows of {self._table.place} {span}, and there are {rows} now: "
            "rows were put in behind it, and the same noise must not meet other rows; remove them"
        )
