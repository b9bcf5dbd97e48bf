"""SQL on logs of real shapes, from the command and from Python."""

import os

import pytest

from benchmarks import queries
from benchmarks.asked_queries import ALL, COMPUTED, JOINED, LISTINGS, QUICK, REALISTIC, UNITED
from benchmarks.queries import log_file
from dpstream.cli import main
from dpstream.cli import sql_command as command
from dpstream.engines.query_run import EngineOptions
from dpstream.privacy.state import Secret
from tests.support.long import is_long

SOME = (*LISTINGS, *REALISTIC, JOINED[0], JOINED[8], UNITED[2], COMPUTED[0])
ASKED = ALL if is_long() else SOME


def test_there_are_forty_queries():
    """Each with a name of its own; the quick ones are some of them."""
    assert (len(LISTINGS), len(ALL)) == (3, 40)
    assert len({one.name for one in ALL}) == 40
    assert set(QUICK) < set(ALL)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """One folder for the logs."""
    folder = tmp_path_factory.mktemp("logs")
    Secret.create(folder / "secret", value=bytes(range(32)))
    return folder


@pytest.mark.parametrize("asked", ASKED, ids=lambda one: one.name)
def test_the_command_and_python_publish_the_same(asked, place, monkeypatch):
    """Byte for byte, on a small log of the same shape."""
    monkeypatch.delenv("DPSTREAM_DATA", raising=False)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # thousands of them, and nothing is killed
    source, real = log_file(asked.log, place, rows=6_000)
    begin, fixed = command.run, EngineOptions(run_id=queries.RUN)
    monkeypatch.setattr(command, "run", lambda *a, **k: begin(*a, **k | {"options": fixed}))

    def here(arguments):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 0

    row = queries.all_ways(asked, source, place, command=here)

    assert not real
    assert row["identical"]
    assert row["releases"] > 0
    assert row["rows_published"] > 0 or asked.table == "orders"  # 300 customers are few


def test_another_run_publishes_other_noise(place, monkeypatch):
    """The control: without the common run id the files differ."""
    monkeypatch.delenv("DPSTREAM_DATA", raising=False)
    asked = LISTINGS[0]
    source, _ = log_file(asked.log, place, rows=6_001)

    def here(arguments):
        with pytest.raises(SystemExit):
            main(arguments)

    assert not queries.all_ways(asked, source, place / "..", command=here)["identical"]
