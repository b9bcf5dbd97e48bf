"""Changes of a table as rows: what becomes of updates and deletions of rows that were read before.

A row that was released stays released, so no change takes anything back: a source of changes adds
rows, or stops.
"""

from __future__ import annotations

from dpstream.connectors.server_base import ServerOptions
from dpstream.errors import InvalidInput

STOP, INSERTS, VERSIONS = "stop", "inserts", "versions"
RULES = (STOP, INSERTS, VERSIONS)
"""`stop` at an update or a deletion, take `inserts` alone, or each of a row's `versions` as one."""
OPERATIONS = {"insert": "inserts", "update": "changes", "delete": "deletes", "truncate": "empties"}
"""What an operation does to the table, in words."""


class UnwantedChange(Exception):
    """An operation at which a source stops; `at` is the message it came in."""

    def __init__(self, operation: str, at: int = 0) -> None:
        super().__init__(operation)
        self.operation, self.at = operation, at


def rule_from(options: ServerOptions) -> str:
    """What the option `changes` says."""
    return options.choice("changes", RULES, STOP)


def adds_row(rule: str, operation: str, at: int = 0) -> bool:
    """Is there a row in this operation, by the rule?

    >>> [adds_row("versions", operation) for operation in OPERATIONS]
    [True, True, False, False]
    >>> adds_row("stop", "delete")
    Traceback (most recent call last):
    dpstream.connectors.changes.UnwantedChange: delete
    """
    if operation == "insert":
        return True
    if rule == STOP:
        raise UnwantedChange(operation, at)
    return rule == VERSIONS and operation == "update"


def refusal(where: str, operation: str) -> InvalidInput:
    """The error that stops a run at a change."""
    what = "the table" if operation == "truncate" else "a row"
    return InvalidInput(
        f"{where} {OPERATIONS[operation]} {what}: what was published of it cannot be taken back; "
        "changes=inserts goes on with the rows that are inserted, changes=versions also with each "
        "new version of a row"
    )
