"""Up to which key a table can be read: below it no transaction can still put a row.

Keys are handed out in order but committed in any: a row with a smaller key may come to light after
one with a larger key was read, and would be lost. So a look at the largest key is followed by a
look at who could still write a smaller one, and rows are read when all of those are done.

`writers`: transactions that hold a lock for writing to the table. Enough where the key is filled in
by the INSERT itself from a sequence: the lock is taken before the sequence is asked and kept until
the row is visible or rolled back, and the sequence never goes back. `transactions`: every
transaction of the database, for keys that are taken earlier in the transaction that inserts.
Neither helps with keys that are handed out in blocks or by applications; `lag` stays behind them.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from dpstream.errors import InvalidInput

SETTLE = ("writers", "transactions")
_LONG = 60.0  # seconds of waiting after which the operator is told
_log = logging.getLogger("dpstream")

_WRITERS = """
SELECT DISTINCT virtualtransaction, pid FROM pg_locks
WHERE locktype = 'relation' AND mode = 'RowExclusiveLock' AND granted
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND (relation = %(table)s OR relation IN (SELECT relid FROM pg_partition_tree(%(table)s)))
"""
_TRANSACTIONS = """
SELECT virtualtransaction, l.pid FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
WHERE locktype = 'virtualxid' AND mode = 'ExclusiveLock' AND granted
  AND l.pid IS DISTINCT FROM pg_backend_pid()
  AND (a.datname IS NULL OR a.datname = current_database())
UNION SELECT 'prepared ' || gid, NULL FROM pg_prepared_xacts WHERE database = current_database()
"""

_SEQUENCE = """
SELECT s.seqrelid::regclass::text, s.seqcache, s.seqincrement, s.seqcycle
FROM pg_sequence s JOIN pg_depend d
  ON d.refclassid = 'pg_class'::regclass AND d.refobjid = s.seqrelid
JOIN pg_attrdef f ON d.classid = 'pg_attrdef'::regclass AND d.objid = f.oid
WHERE f.adrelid = %(table)s AND f.adnum = %(column)s
UNION
SELECT s.seqrelid::regclass::text, s.seqcache, s.seqincrement, s.seqcycle
FROM pg_sequence s JOIN pg_depend d
  ON d.classid = 'pg_class'::regclass AND d.objid = s.seqrelid AND d.deptype = 'i'
WHERE d.refobjid = %(table)s AND d.refobjsubid = %(column)s
"""


class Horizon:
    """The largest key that is settled; it never goes back."""

    def __init__(self, *, table: int, largest: str, settle: str, lag: int, place: str) -> None:
        self._table, self._largest, self._lag, self._place = table, largest, lag, place
        self._asked = _WRITERS if settle == "writers" else _TRANSACTIONS
        self.settled: int | None = None
        self._coming: tuple[int, set[str]] | None = None  # a largest key, and who is waited for
        self._since = 0.0

    def look(self, connection: Any) -> int | None:
        """Look again; the largest key there is, settled or not."""
        if self._coming is not None:
            self._settle(*self._coming, self._holders(connection))
        (largest,) = connection.execute(self._largest).fetchone()
        found: int | None = largest
        known = self.settled
        if self._coming is None and found is not None and (known is None or found > known):
            holders, self._since = self._holders(connection), time.monotonic()
            self._settle(found, holders, holders)
        return found

    def _settle(self, key: int, waited_for: set[str], holders: set[str]) -> None:
        """The key is settled when none of those is left that could put a smaller one."""
        left = waited_for & holders
        if left:
            self._coming = (key, left)
            return
        self._coming = None
        below = key - self._lag
        self.settled = below if self.settled is None else max(below, self.settled)

    def _holders(self, connection: Any) -> set[str]:
        found = connection.execute(self._asked, {"table": self._table}).fetchall()
        if found and time.monotonic() - self._since > _LONG and self._coming is not None:
            who = ", ".join(str(pid) for _, pid in found if pid is not None) or "prepared ones"
            _log.warning(
                "%s: rows wait for transactions that were begun before them (process %s of the "
                "server)", self._place, who,
            )  # fmt: skip
            self._since = time.monotonic()
        return {name for name, _ in found}


def refuse_unsettled(
    connection: Any, *, table: int, column: int, place: str, settle: str | None, lag: int
) -> str:
    """How the keys settle; refused where that is not known."""
    given = {"table": table, "column": column}
    sequences = connection.execute(_SEQUENCE, given).fetchall()
    for name, cache, step, cycle in sequences:
        if step < 0 or cycle:
            raise InvalidInput(f"{place}: the sequence {name} must count up, without a cycle")
        if cache > 1 and not lag:
            raise InvalidInput(
                f"{place}: the sequence {name} hands out keys in blocks of {cache}, so they come "
                f"in no order and rows would be missed; run ALTER SEQUENCE {name} CACHE 1, or say "
                "how many keys to stay behind with lag="
            )
    if settle is None and not sequences and not lag:
        raise InvalidInput(
            f"{place}: the key is not filled in by a sequence of its own, so it is not known when "
            "all smaller keys are there; say settle=transactions if a key is taken in the "
            "transaction that inserts its row, or lag=N to stay N keys behind the largest"
        )
    return settle or ("writers" if sequences else "transactions")
