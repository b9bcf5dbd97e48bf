"""What a release says of itself: its run, and its numbers as columns."""

from __future__ import annotations

import json

import pyarrow as pa

from dpstream.errors import InvalidInput, StateError


def run_of(table: pa.Table) -> str:
    """The tag of the run that published a release; "" if it does not say."""
    told = json.loads((table.schema.metadata or {}).get(b"dpstream", b"{}"))
    return str(told.get("run", ""))


def another_run(place: object, query: str) -> StateError:
    """A sink that holds another run's releases would take the new ones for old, and lose them."""
    return StateError(
        f"{place} holds releases of {query!r} from another run; use another sink, or remove them"
    )


def with_numbers(table: pa.Table, window: int, trigger: int) -> pa.Table:
    """The table behind the columns `window` and `release`.

    `release` counts the releases of a window from 1, where the table's metadata tells; otherwise
    it is the trigger's number. A name that the table has itself becomes `window_number` or
    `release_number`.
    """
    told = json.loads((table.schema.metadata or {}).get(b"dpstream", b"{}"))
    numbers = {"window": window, "release": told.get("release_index") or trigger}
    for i, (name, number) in enumerate(numbers.items()):
        if name in table.column_names:
            name = f"{name}_number"
        if name in table.column_names:
            raise InvalidInput(f"the sink has its own column {name!r}; rename that of the query")
        column = pa.array([number], pa.int64()).take(pa.array([0] * table.num_rows, pa.int32()))
        table = table.add_column(i, name, column)
    return table
