"""The bench of recovery: what it kills, what it judges, and that it can fail."""

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks import recovery
from benchmarks.recovery import Kind, Outcome
from benchmarks.recovery_case import CheckingSink, damage, difference, left_behind, published
from benchmarks.recovery_child import go, killer, tear, watched, write_source


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An unbroken run of the bench's query, and how often it changed the disk."""
    folder = tmp_path_factory.mktemp("run")
    source = write_source(folder / "source")[1]
    seen = []
    with watched(lambda operation, phase, _: seen.append((operation, phase))):
        go({"folder": str(folder), "source": str(source), "fixed": True}, lambda: None)
    return folder, seen


def test_every_change_of_the_disk_is_seen(run):
    """Kills can be placed before and inside snapshots, and before all that the sink does."""
    folder, seen = run

    assert {operation for operation, _ in seen} >= {"fsync", "replace", "link", "unlink", "save"}
    assert {phase for _, phase in seen} == {"", "save", "snapshot"}
    assert os.fsync.__module__ == "posix"
    assert len(list((folder / "out").glob("*.parquet"))) > 40
    assert left_behind(folder / "state") == ""


def test_a_difference_is_found(run):
    """Another byte, a release less, a row of the database: each is named."""
    folder, _ = run
    expected = published(folder)
    name = "clicks-w000001-t000003.parquet"
    path = folder / "out" / name
    content = path.read_bytes()
    assert difference(folder, expected, same_keys=True) == ""
    path.write_bytes(content + b"!")
    assert name in difference(folder, expected, same_keys=True)
    path.unlink()
    assert name in difference(folder, expected, same_keys=False)
    path.write_bytes(content)
    assert "sqlite" in difference(folder, expected | {"sqlite clicks": "0"}, same_keys=True)


def test_a_release_drawn_twice_is_found(run):
    """A release that comes again with other bytes stops the run: noise was drawn twice."""
    folder, _ = run
    sink = CheckingSink(folder, lambda: None)
    table = pq.read_table(folder / "out" / "clicks-w000001-t000008.parquet")
    assert table.num_rows
    sink.write("clicks", 1, 8, table)
    with pytest.raises(AssertionError, match="came again with other bytes"):
        sink.write("clicks", 1, 8, table.slice(1))
    sink.close()


def test_one_run_that_differs_misses_the_target():
    """The control of the targets: 199 good runs do not make up for a bad one."""
    kind = Kind(name="any")
    outcomes = [Outcome(kind=kind, source="a", kills=1) for _ in range(199)]
    bad = Outcome(kind=kind, source="a", kills=1, difference="other bytes")
    plan = recovery.Plan(kills=200, cold=0)

    assert [row["reached"] for row in recovery.targets([*outcomes, bad], plan)] == [
        False,
        True,
        True,
    ]
    assert [row["reached"] for row in recovery.targets(outcomes, plan)] == [True, True, False]


def test_half_of_what_was_not_synced_is_torn(tmp_path):
    """A new file loses its second half, a log half of its last line, a folder nothing."""
    for name, before, after in (
        (".a.new", b"0123456789", b"01234"),
        ("inputs.log", b"one\ntwo\nthree\n", b"one\ntwo\nthr"),
        ("out.sqlite", b"0123456789", b"0123456789"),
    ):
        path = tmp_path / name
        path.write_bytes(before)
        with path.open("r+b") as file:
            assert tear(file.fileno()) == (before != after)
        assert path.read_bytes() == after


def test_damage_spares_what_has_no_second_copy(tmp_path):
    """Only the newest of two snapshots is spoilt, and no record but the log's last."""
    rng = np.random.default_rng(1)
    (tmp_path / "segments").mkdir()
    (tmp_path / "run.dps").write_bytes(b"run")
    log = b'header\nrun\n"step" 0\n"step" 1\n'
    (tmp_path / "inputs.log").write_bytes(log)
    (tmp_path / "manifest-9.dps").write_bytes(b"old" * 9)
    damage(tmp_path, "snapshot", rng)
    assert (tmp_path / "manifest-9.dps").read_bytes() == b"old" * 9
    (tmp_path / "manifest-10.dps").write_bytes(b"new" * 9)
    damage(tmp_path, "snapshot", rng)
    damage(tmp_path, "log", rng)

    assert (tmp_path / "manifest-9.dps").read_bytes() == b"old" * 9
    assert len((tmp_path / "manifest-10.dps").read_bytes()) < 27
    left = (tmp_path / "inputs.log").read_bytes()
    assert log.startswith(left)
    assert left.startswith(b'header\nrun\n"step" 0\n')


def test_a_killer_counts_by_phase(monkeypatch):
    """It strikes at the n-th operation of the phase it was told, and not before."""
    struck = []
    monkeypatch.setattr(os, "kill", lambda pid, number: struck.append(number))
    counts = Counter()
    job = {"kill": {"where": "snapshot", "nth": 2, "torn": False}}
    each = killer(job, counts)
    for phase in ("", "snapshot", ""):
        each("replace", phase, None)
    assert not struck
    each("replace", "snapshot", None)

    assert struck == [9]
    assert counts == {"any": 4, "step": 2, "replace": 4, "snapshot": 2}


@pytest.mark.bench
def test_the_shortest_bench(monkeypatch):
    """Two kinds, three kills, a child that forks: identical bytes, and restarts are timed."""
    monkeypatch.setattr(recovery, "QUICK", recovery.Plan(kills=3, cold=0))
    monkeypatch.setattr(recovery, "KINDS", recovery.KINDS[:1])
    steps = []
    found = recovery.measure(quick=True, progress=lambda *step: steps.append(step))

    assert [row["reached"] for row in found.targets][0::2] == [True, True]
    assert found.rows[0]["kills"] >= 3
    assert 0 < found.rows[0]["restart_seconds"] < 60
    assert steps[-1][:2] == (3, 3)
    assert str(Path.home()) not in " ".join(found.notes)
