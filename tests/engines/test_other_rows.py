"""A replay that finds other rows publishes nothing: old noise never meets new data."""

import pyarrow as pa
import pytest

import dpstream as dps
from dpstream.errors import InvalidInput
from tests.support.runs import HOUR, break_off, published, start, table, whole, write

ROWS = table().sort_by("came")
COME = ROWS["came"].to_pylist()
FIRST = 40
FIFTH = next(n for n, came in enumerate(COME) if came > 4 * HOUR and ROWS["at"][n].as_py() > HOUR)
"""Rows of the first step and of the fifth."""


def with_value(row, column, value):
    rows = ROWS.to_pydict()
    rows[column][row] = value
    return pa.table(rows, schema=ROWS.schema)


CHANGES = {
    "a row more": lambda row: pa.concat_tables([ROWS, ROWS.slice(row, 1)]),
    "a row less": lambda row: pa.concat_tables([ROWS.slice(0, row), ROWS.slice(row + 1)]),
    "another value": lambda row: with_value(row, "seconds", 59),
    "another unit": lambda row: with_value(row, "user", "somebody else"),
    "another key": lambda row: with_value(row, "page", "/elsewhere"),
    "another time": lambda row: with_value(row, "at", ROWS["at"][row].as_py() - 1),
    "a later step": lambda row: with_value(row, "came", COME[row] + HOUR),
    "no row at all": lambda row: ROWS.slice(0, 0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("row", [FIRST, FIFTH], ids=["no snapshot", "after a snapshot"])
def test_other_rows_publish_nothing(tmp_path, change, row):
    """Whatever changed in a step that is replayed, the run stops before its noise is drawn."""
    write(tmp_path, ROWS)
    break_off(tmp_path, 3 if row == FIRST else 6, every=4)
    before = published(tmp_path)
    write(tmp_path, CHANGES[change](row))
    for _ in range(2):
        with pytest.raises(dps.NoiseReuse, match="nothing was published"):
            start(tmp_path).finish()

    assert published(tmp_path) == before


def test_the_order_of_rows_is_no_change(tmp_path):
    """Files written anew with the same rows in another order replay as they were."""
    unbroken = whole(tmp_path / "whole", rows=ROWS)
    write(tmp_path / "run", ROWS)
    break_off(tmp_path / "run", 5, every=100)
    write(tmp_path / "run", ROWS.take(list(reversed(range(len(ROWS))))))
    start(tmp_path / "run").finish()

    assert published(tmp_path / "run") == unbroken


def test_rows_of_steps_to_come_may_still_change(tmp_path):
    """Nothing was drawn for them; what was published stays."""
    write(tmp_path, ROWS)
    break_off(tmp_path, 3)
    before = published(tmp_path)
    rows = ROWS.to_pydict()
    rows["seconds"][-1] = (rows["seconds"][-1] + 7) % 50
    write(tmp_path, pa.table(rows, schema=ROWS.schema))
    start(tmp_path).finish()

    assert before.items() <= published(tmp_path).items()


def test_another_set_of_files_is_refused(tmp_path):
    """A run over files reads the files it began with."""
    write(tmp_path, ROWS)
    break_off(tmp_path, 3)
    (tmp_path / "more.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes())
    with pytest.raises(InvalidInput, match="had 1 files when this run began and has 2 now"):
        start(tmp_path, source=str(tmp_path / "*.parquet")).finish()
