"""Every error dpstream raises on purpose, in one tree.

    DpstreamError
    |- InvalidParameter      a parameter cannot be used (also a ValueError)
    |- InvalidInput          the data cannot be used (also a ValueError)
    |  |- RowsLost           rows that are needed are gone from the source for good
    |  `- UnusableFile       one file is damaged, or lacks a column that is asked for
    |- ServerUnreachable     a server did not answer for as long as was allowed (also an OSError)
    |- BudgetExceeded        the ledger refuses: the charge does not fit
    |- LedgerError           the ledger file is damaged, foreign, or contradicts a charge
    |- NoiseReuse            the same noise would meet other data, or be drawn twice
    |- NoiseExhausted        a draw used up its counter range
    |- StateError            a state directory or file is damaged, foreign, or in use
    |- SecretError           a secret file is missing, malformed, or readable by others
    `- MissingDependency     an optional package is needed (also an ImportError)

Warnings, all of the kind DpstreamWarning: NewBook, UnexpectedResult.

Messages say what was asked, what was found and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path

SHOWN_PLACES: dict[str, str] = {}
"""What users call working directories of dpstream, by their paths, in errors and warnings."""


def shown(text: str) -> str:
    """A text for users: working directories have the names that users know.

    >>> SHOWN_PLACES["/tmp/state-x3/pages"] = "s3://bucket/states/pages"
    >>> shown("/tmp/state-x3/pages/ledger is missing")
    's3://bucket/states/pages/ledger is missing'
    >>> SHOWN_PLACES.clear()
    """
    for path, place in SHOWN_PLACES.items():
        text = text.replace(path, place)
    return text


class _Told(Exception):
    """An error or a warning that names places as users do."""

    def __str__(self) -> str:
        return shown(super().__str__())


class DpstreamError(_Told):
    """The root: catch this to catch everything dpstream raises on purpose.

    >>> import dpstream as dps
    >>> try:
    ...     dps.sql("SELECT 1")
    ... except dps.DpstreamError as problem:
    ...     print(type(problem).__name__)
    InvalidParameter
    """


class InvalidParameter(DpstreamError, ValueError):
    """A parameter cannot be used."""


class InvalidInput(DpstreamError, ValueError):
    """The data cannot be used."""


class RowsLost(InvalidInput):
    """Rows that a run has read, or has to read next, are gone from the source for good."""


class UnusableFile(InvalidInput):
    """One file of a source is damaged or lacks a column: set aside alone, or refused, as asked."""


class ServerUnreachable(DpstreamError, ConnectionError):
    """A server did not answer for as long as was allowed; the same run goes on when it is back."""


class BudgetExceeded(DpstreamError):
    """The ledger refuses a charge that does not fit; nothing was drawn.

    >>> import dpstream as dps
    >>> query = dps.Query(privacy_unit_column="user", epsilon=2, delta=1e-6,
    ...                   max_groups_contributed=1)
    >>> book, rows = dps.Ledger(), [{"user": "u"}]
    >>> book.open("clicks", query.promise(epsilon=1, delta=1e-6))
    >>> try:
    ...     dps.run(query, source=rows, ledger=book, dataset="clicks")
    ... except BudgetExceeded:
    ...     print("the book has less than that left")
    the book has less than that left
    """


class LedgerError(DpstreamError):
    """The ledger file is damaged, foreign, or contradicts a charge."""


class NoiseReuse(DpstreamError):
    """The same noise would meet other data, or be drawn twice; nothing was published.

    >>> import tempfile
    >>> import dpstream as dps
    >>> folder, sample = tempfile.mkdtemp() + "/state", dps.mechanisms.Sample(epsilon=1, window=2)
    >>> series = dps.release(sample, [5, 7], state=folder)
    >>> try:
    ...     dps.release(sample, [5, 8], state=folder)
    ... except NoiseReuse:
    ...     print("other data: nothing was published")
    other data: nothing was published
    """


class NoiseExhausted(DpstreamError):
    """A draw used up its counter range (its probability is negligible; the run must stop)."""


class StateError(DpstreamError):
    """A state directory or file is damaged, foreign, or in use by another process."""


class SecretError(DpstreamError):
    """A secret file is missing, malformed, or readable by others."""


class MissingDependency(DpstreamError, ImportError):
    """An optional package is needed for what was asked."""


class DpstreamWarning(_Told, UserWarning):
    """What goes on, and may not be what was meant; every warning of dpstream is one."""


class UnexpectedResult(DpstreamWarning):
    """A query is right as it stands, and its answer may not be the one its author expects."""


class NewBook(DpstreamWarning):
    """A budget begins that nothing else counts: there is no ledger, or its file was removed."""


def refuse_unwritable(name: str, value: object) -> None:
    r"""Refuse a parameter that holds, however deep, text that UTF-8 lacks.

    >>> refuse_unwritable("keys", ("page", "x\ud800"))
    Traceback (most recent call last):
    dpstream.errors.InvalidParameter: keys must be Unicode text; got 'x\ud800', whose character 2 is
    half of one
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as problem:
            raise InvalidParameter(
                f"{name} must be Unicode text; got {value!r:.200}, whose character "
                f"{problem.start + 1} is half of one"
            ) from None
    elif isinstance(value, tuple | list):
        for each in value:
            refuse_unwritable(name, each)
    elif isinstance(value, Mapping):
        refuse_unwritable(name, [*value, *value.values()])
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            refuse_unwritable(part.name, getattr(value, part.name))


_NO_COLUMN = " has no column "


def no_column(place: str, name: str, known: Sequence[str]) -> UnusableFile:
    """What to say of a column that is not there.

    >>> print(no_column("log.csv", "amuont", ["user", "amount"]))
    log.csv has no column 'amuont'; did you mean 'amount'? its columns are user, amount
    >>> print(no_column("log.csv", "x", ["user"]))
    log.csv has no column 'x'; its columns are user
    """
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UnusableFile(f"{place}{_NO_COLUMN}{name!r}; {hint}its columns are {', '.join(known)}")


def lacks_column(reason: str) -> bool:
    """Was a file set aside for a column that it does not have, and not for damage?"""
    return _NO_COLUMN in reason


def unreadable(path: Path, problem: Exception, *, kind: str = "") -> InvalidInput:
    """What to say of a file that cannot be opened or read, or not as its `kind`.

    A disk or a server that fails says nothing of the file: then it is no `UnusableFile`.
    """
    if isinstance(problem, FileNotFoundError):
        return InvalidInput(f"there is no file {path}; put it back, or leave it out of the source")
    if isinstance(problem, PermissionError):
        return UnusableFile(f"{path} may not be read by this user; grant read permission")
    number = problem.errno if isinstance(problem, OSError) else None
    error = UnusableFile if number is None else InvalidInput
    if kind:
        reason = str(problem).partition("\n")[0]
        smaller = " in smaller row groups" if isinstance(problem, MemoryError) else ""
        return error(f"{path} cannot be read as {kind}: {reason}; write the file again{smaller}")
    return error(f"{path} cannot be read: {problem}")
