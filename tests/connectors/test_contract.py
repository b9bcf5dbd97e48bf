"""Sources and sinks of the core keep the contract, and it catches those that do not."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.connectors.files.source import GrowingDirectory
from dpstream.connectors.memory import TableSource
from dpstream.connectors.registry import open_sink, open_source
from dpstream.connectors.testing import ListSource, check_sink, check_source
from dpstream.records import Batch

ROWS = pa.table({"user": ["a", "b", "c", "d"], "page": ["x", "y", "x", "z"]})
RELEASE = pa.table({"page": ["x"], "visitors": [3], "visitors_stddev": [1.5]})
COLUMNS = ["user", "page"]


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("growing", [False, True])
def test_files(tmp_path, suffix, growing):
    """Read as files, and as a directory that grows."""
    path = tmp_path / f"log.{suffix}"
    if suffix == "parquet":
        pq.write_table(ROWS, path, row_group_size=2)
    elif suffix == "csv":
        path.write_text(
            "user,page\n" + "".join(f"{r['user']},{r['page']}\n" for r in ROWS.to_pylist())
        )
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS.to_pylist()))

    opened = (lambda: GrowingDirectory(tmp_path)) if growing else (lambda: open_source(str(path)))

    assert check_source(opened, columns=COLUMNS) == 4


def test_lists():
    """The scripted source of the tests."""
    assert check_source(lambda: ListSource([ROWS, ROWS.slice(1)]), columns=COLUMNS) == 7


class Forgetful(TableSource):
    """Reads on from where it was, whatever position it is asked for."""

    at = 0

    def read(self, partition, position, *, columns=None, until=None):
        batch = super().read(partition, Forgetful.at, columns=columns)
        Forgetful.at = batch.position
        return batch


class Overrunning(TableSource):
    """Does not stop where it is told to."""

    def read(self, partition, position, *, columns=None, until=None):
        return super().read(partition, position, columns=columns)


class WithoutJson(TableSource):
    """Gives positions that no log can keep."""

    def read(self, partition, position, *, columns=None, until=None):
        at = None if position is None else int(position.decode())
        batch = super().read(partition, at, columns=columns)
        return Batch(table=batch.table, position=str(batch.position).encode(), done=batch.done)


@pytest.mark.parametrize(
    ("broken", "problem"),
    [(Forgetful, AssertionError), (Overrunning, AssertionError), (WithoutJson, TypeError)],
)
def test_a_source_that_breaks_the_contract_is_caught(broken, problem):
    """Each of them would lose or repeat rows after a crash."""
    with pytest.raises(problem):
        check_source(lambda: broken(ROWS, rows=3), columns=COLUMNS)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*")}


@pytest.mark.parametrize("spec", ["out/", "csv:out/", "jsonl:out/"])
def test_sinks(tmp_path, monkeypatch, spec):
    """Directories of files."""
    monkeypatch.chdir(tmp_path)

    check_sink(lambda: open_sink(spec), lambda: contents(tmp_path), RELEASE)


def test_a_sink_that_appends_is_caught(tmp_path):
    """What it has, it must not write again."""

    class Appending:
        def write(self, name, window, trigger, table):
            with (tmp_path / "log").open("a") as file:
                file.write(f"{name} {window} {trigger}\n")

        def close(self):
            pass

    with pytest.raises(AssertionError, match="second write"):
        check_sink(Appending, lambda: (tmp_path / "log").read_text(), RELEASE)
