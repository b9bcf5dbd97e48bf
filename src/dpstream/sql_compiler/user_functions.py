"""Functions in Python for SQL: `region = "mymodule:region"`, called on Arrow columns.

They are trusted code, as a source's driver is: they see rows, and nothing stops them from keeping
or sending what they see. What a row becomes must depend on that row alone, or one unit could change
another's part; on the first batches the results are compared with those of the same rows in another
order, and alone, and a function that fails the comparison stops the run.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.sql_compiler.expressions import known_functions
from dpstream.sql_compiler.sql_values import Value, only_where, source_column
from dpstream.sql_compiler.statement import AGGREGATES

_CHECKED_BATCHES = 3
_ALONE = 16  # rows of a batch that are also looked at one by one
Functions = Mapping[str, Callable[..., Any] | str]
"""Functions by their names in SQL: each itself, or where it is, "module:function"."""


class UserFunction:
    """A function of columns, as an expression calls it."""

    def __init__(
        self, name: str, function: Callable[..., Any], reference: str, folder: str | None = None
    ) -> None:
        self.name, self.reference = name, reference
        self._function, self._folder = function, folder
        self._unchecked = _CHECKED_BATCHES

    def __reduce__(self) -> Any:
        """Another process imports the module anew, or is sent a function that has none."""
        if self._folder is None:
            return UserFunction, (self.name, self._function, self.reference)
        return load, (self.name, self.reference, self._folder)

    @property
    def text(self) -> str:
        """Which code it is."""
        return f"{self.name} = {self.reference}"

    def takes(self, count: int) -> bool:
        """Can it be called with so many columns?"""
        try:
            inspect.signature(self._function).bind(*[None] * count)
        except TypeError:
            return False
        except ValueError:  # written in C: it will say so itself
            return True
        return True

    def __call__(self, zone: str, *values: Value) -> Value:
        """Its results for these columns; constants are repeated for every row."""
        sizes = [len(value) for value in values if not isinstance(value, pa.Scalar)]
        size = sizes[0] if sizes else 1
        columns = [pa.repeat(v, size) if isinstance(v, pa.Scalar) else v for v in values]
        none = [column.slice(0, 0) for column in columns]
        kind = self._result(zone, none).type
        found = self._result(zone, columns, kind)
        if size and self._unchecked:
            self._require_one_row(zone, columns, found)
            self._unchecked -= 1
        return found if sizes else found[0]

    def _result(
        self, zone: str, columns: list[pa.Array], kind: pa.DataType | None = None
    ) -> pa.Array:
        """One value for each row; an error of a row is found by halving, and the row has NULL."""
        size = len(columns[0]) if columns else 1
        try:
            found = self._function(*columns)
        except Exception as error:
            raise pa.ArrowInvalid(f"{self.name}: {type(error).__name__}: {error}") from error
        if not isinstance(found, pa.Array | pa.ChunkedArray):
            try:
                found = pa.array(found)
            except (pa.ArrowException, TypeError) as error:
                raise InvalidInput(
                    f"{self._who} must return an Arrow array; got a {type(found).__name__}"
                ) from error
        if len(found) != size:
            raise InvalidInput(f"{self._who} gave {len(found)} results for {size} rows")
        found = source_column(found, self.name, zone)
        if pa.types.is_list(found.type):
            raise InvalidInput(f"{self._who} gave lists; one value for each row is wanted")
        if pa.types.is_floating(found.type):
            found = only_where(pc.is_finite(found), found)
        if kind is None:  # of no rows: what they would be is text unless it says so
            kind = pa.string() if pa.types.is_null(found.type) else found.type
        return pc.cast(found, kind)

    @property
    def _who(self) -> str:
        return f"the function {self.name} ({self.reference})"

    def _require_one_row(self, zone: str, columns: list[pa.Array], found: pa.Array) -> None:
        size = len(found)
        backwards = np.arange(size)[::-1]
        scattered = np.argsort(np.arange(size) * 2_654_435_761 % (1 << 32), kind="stable")
        alone = np.unique(np.linspace(0, size - 1, min(size, _ALONE)).astype(np.int64))
        for rows in (backwards, scattered, *alone.reshape(-1, 1)):
            places = pa.array(rows)
            again = self._again(zone, [column.take(places) for column in columns], found.type)
            if again is None or not again.equals(found.take(places)):
                raise InvalidInput(
                    f"{self._who} gives a row another result in another order, or alone: what a "
                    "row becomes must depend on that row alone, or one unit could change what is "
                    "published of another; use no totals, counters, clocks or random numbers"
                )

    def _again(self, zone: str, columns: list[pa.Array], kind: pa.DataType) -> pa.Array | None:
        try:
            return self._result(zone, columns, kind)
        except pa.ArrowException:
            return None


def load(name: str, reference: str, folder: str | None = None) -> UserFunction:
    """The function that "module:function" names; modules of `folder` are found, too."""
    module, colon, path = reference.partition(":")
    if not (colon and module and path):
        raise InvalidParameter(
            f"the function {name} must be given as module:function; got {reference!r}"
        )
    with _also_from(folder):
        try:
            found: Any = import_module(module)
        except Exception as error:
            raise InvalidParameter(
                f"the function {name}: {module} cannot be imported: {error}; put it beside the "
                "pipeline file, or install it"
            ) from None
    for part in path.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise InvalidParameter(f"the function {name}: {module} has no function {path}")
    return UserFunction(name, found, reference, folder or "")


@contextmanager
def _also_from(folder: str | None) -> Iterator[None]:
    """Import from a folder, too."""
    if folder:
        sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder:
            sys.path.remove(folder)


def user_functions(given: Functions | None, folder: Path | None = None) -> dict[str, UserFunction]:
    """Functions by their names in capitals; none hides one that there is."""
    found: dict[str, UserFunction] = {}
    for name, function in (given or {}).items():
        key = str(name).upper()
        if not str(name).isidentifier() or key in {*known_functions(), *AGGREGATES, *found}:
            reason = "is there already" if str(name).isidentifier() else "is no name of a function"
            raise InvalidParameter(f"{name!r} {reason}; give the function another name")
        if isinstance(function, str):
            found[key] = load(key, function, None if folder is None else str(folder.resolve()))
        elif callable(function):
            where = f"{function.__module__}:{getattr(function, '__qualname__', type(function))}"
            found[key] = UserFunction(key, function, where)
        else:
            raise InvalidParameter(
                f"the function {name} must be a function of Arrow columns, or 'module:function'; "
                f"got {function!r}"
            )
    return found
