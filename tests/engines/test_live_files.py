"""Files of a live directory: read once, finished, and moved or deleted when nobody needs them."""

import os
import re
from dataclasses import replace

import pytest

import dpstream as dps
from dpstream.connectors.files import source as files
from dpstream.connectors.files.source import EmptiedDirectory, GrowingDirectory, open_directory
from dpstream.engines.embedded.finished_log import FinishedLog
from dpstream.errors import InvalidInput, InvalidParameter, StateError
from dpstream.privacy.state import read_packed
from tests.support.fixed import SECRET
from tests.support.kill_and_replay import AfterReleases, BeforeDiskOperation, kill_and_replay
from tests.support.live_runs import (
    HOUR,
    HandClock,
    Publishing,
    ScriptedClock,
    arrivals,
    drop,
    kept_clock,
    last,
    live,
    live_through,
    queries,
    rows,
    start_all,
    start_live,
    whole_live,
)
from tests.support.processes import until
from tests.support.runs import options, published

ALL = {f"{9 - n}.parquet" for n in range(5)}


def names(folder):
    return {path.name for path in folder.iterdir() if path.is_file()} if folder.exists() else set()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What an unbroken run publishes that keeps its files."""
    return whole_live(tmp_path_factory.mktemp("whole"))


def emptying(on_done, start=None):
    """Live runs that move or delete what is done."""

    def begin(place):
        clock = kept_clock(place) if start is None else start
        return start_live(place, clock, on_done=on_done)

    return replace(live(), start=begin)


@pytest.mark.parametrize("on_done", ["move", "delete"])
def test_done_files_go_and_the_bytes_are_the_same(tmp_path, expected, on_done):
    """At the end of the query nothing is needed any more."""
    found = whole_live(tmp_path, on_done=on_done)

    assert found == expected
    assert names(tmp_path / "in") == set()
    assert names(tmp_path / "in" / "done") == (ALL if on_done == "move" else set())


def test_a_file_stays_while_a_snapshot_may_need_it(tmp_path):
    """Every second step has a snapshot; two of them are kept, the newest may be damaged."""
    clock = ScriptedClock(0, arrivals(tmp_path / "in"))
    running = start_live(tmp_path, clock, on_done="delete")
    there = {}
    for _ in running:
        there[running.steps_done] = names(tmp_path / "in")

    assert "9.parquet" in there[4]  # of the first step, behind the snapshot of step 2
    assert "9.parquet" not in there[6]


@pytest.mark.parametrize("on_done", ["move", "delete"])
def test_killed_at_many_moments(tmp_path, expected, on_done):
    """No file is lost or read twice, whatever the moment."""
    for nth in range(9, 160, 25):
        place = tmp_path / str(nth)
        after = kill_and_replay(emptying(on_done), place, BeforeDiskOperation(nth))

        assert after.published.keys() == expected.keys()
        assert last(after.published) == last(expected), f"operation {nth}"
        assert after.charges == 1
        assert names(place / "in") | names(place / "in" / "done") <= ALL


@pytest.mark.parametrize("call", ["unlink", "link", "sync_directory"])
def test_killed_around_the_removal(tmp_path, expected, call, monkeypatch):
    """The next start finishes what was begun, and a moved file has one name."""

    class Killed(BaseException):
        pass

    calls = []

    def die(*_, **__):
        calls.append(call)
        raise Killed

    owner = {"unlink": files.Path, "link": files.os, "sync_directory": files}[call]
    real = getattr(owner, call)

    def strike(*place, **named):
        if str(place[0]).startswith(str(tmp_path / "in")):
            die()
        return real(*place, **named)

    clock = ScriptedClock(0, arrivals(tmp_path / "in"))
    with monkeypatch.context() as broken:
        broken.setattr(owner, call, strike)
        with pytest.raises(Killed):
            start_live(tmp_path, clock, on_done="move").finish()
    assert calls
    start_live(tmp_path, ScriptedClock(clock.time, clock.events), on_done="move").finish()

    assert last(published(tmp_path)) == last(expected)
    assert names(tmp_path / "in") == set()
    assert names(tmp_path / "in" / "done") == ALL


def test_files_wait_for_the_slowest_query(tmp_path):
    """Two queries over one directory: a file goes when both are beyond it."""
    asked, clock = queries(2), HandClock()
    asked = [asked[0], replace(asked[1], every="3 hours")]  # two steps: it settles at its end
    publishing = Publishing(start_all(tmp_path, asked, clock, on_done="delete"))
    events = arrivals(tmp_path / "in")
    live_through(clock, events, [])
    clock.move(5 * HOUR)
    runs = publishing.runs.runs
    until(lambda: runs["q0"].steps_done == 5)
    assert "9.parquet" in names(tmp_path / "in")
    clock.move(9 * HOUR)
    publishing.join()

    assert publishing.problem is None
    assert names(tmp_path / "in") == set()


@pytest.mark.parametrize("restart", [False, True])
def test_a_name_that_is_free_again_is_a_new_file(tmp_path, restart):
    """Its rows count once; those of the file before it are not counted again."""
    place = tmp_path / "in"
    events = [
        (HOUR // 2, lambda: drop(place, "a.parquet", rows([HOUR // 2] * 3, user="first"))),
        (11 * HOUR // 2, lambda: drop(place, "a.parquet", rows([11 * HOUR // 2] * 4, user="new"))),
    ]
    clock = ScriptedClock(0, events)
    running = start_live(tmp_path, clock, on_done="delete", options=options(every=1))
    read = 0
    if restart:
        for _ in running:
            if running.steps_done == 5:
                break
        running.close()
        read = running.operator.read
        running = start_live(tmp_path, clock, on_done="delete", options=options(every=1))
    running.finish()

    assert read + running.operator.read == 7
    assert names(place) == set()


def test_a_new_file_under_a_name_that_a_killed_run_had_finished(tmp_path):
    """The state knows the file that it has finished from another one of its name."""
    source = EmptiedDirectory(tmp_path, "delete")
    (tmp_path / "a.csv").write_text("n\n1\n")
    end = source.read("a.csv", None).position
    log = FinishedLog()
    log.resume(source)
    log.add("a.csv", end, source.stamp("a.csv"))
    log.resume(EmptiedDirectory(tmp_path, "delete"))
    assert "a.csv" in log.ends
    (tmp_path / ".a.csv").write_text("n\n2\n")
    os.rename(tmp_path / ".a.csv", tmp_path / "a.csv")
    log.resume(EmptiedDirectory(tmp_path, "delete"))

    assert "a.csv" not in log.ends


def test_moved_files_overwrite_nothing(tmp_path):
    """A second file of a name gets a number."""
    for number in range(3):
        source = EmptiedDirectory(tmp_path, "move")
        (tmp_path / "a.csv.gz").write_bytes(b"")
        (tmp_path / "a.csv").write_text(f"n\n{number}\n")
        source.partitions()
        source.commit({"a.csv": source.read("a.csv", None).position, "b.csv": 7})
        assert source.removed() == ["a.csv"]
        assert source.partitions() == ["a.csv.gz"]

    assert names(tmp_path / "done") == {"a.csv", "a.2.csv", "a.3.csv"}
    assert (tmp_path / "done" / "a.2.csv").read_text() == "n\n1\n"


def test_what_is_not_read_to_its_end_or_was_changed_stays(tmp_path, caplog):
    """Half a file is needed; one that was written to since is told and left to the operator."""
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("n\n1\n")
    source = EmptiedDirectory(tmp_path, "delete")
    end = source.read("a.csv", None).position
    source.commit({"a.csv": end - 2, "b.csv": end})
    assert names(tmp_path) == {"a.csv", "b.csv"}
    (tmp_path / "a.csv").write_text("n\n1\n2\n")
    for _ in range(3):
        source.commit({"a.csv": end})
        source.partitions()

    assert names(tmp_path) == {"a.csv", "b.csv"}
    assert caplog.text.count("a.csv was written to after it was read") == 1


def test_nobody_else_reads_a_directory_that_is_emptied(tmp_path):
    """Two readers that keep their files may share it."""
    keeping = [open_directory(tmp_path), open_directory(tmp_path)]
    with pytest.raises(InvalidInput, match="read by another run or source, and one of the two has"):
        open_directory(tmp_path, "move")
    for each in keeping:
        each.close()
    emptied = open_directory(tmp_path, "move")
    with pytest.raises(InvalidInput, match="give each a directory of its own"):
        open_directory(tmp_path)
    emptied.close()
    open_directory(tmp_path).close()


def test_on_done_is_refused_where_it_cannot_be(tmp_path):
    """Without a state, without a live directory, or with another word."""
    (tmp_path / "a.csv").write_text("n\n1\n")
    for changes, words in (
        ({"state": None}, "without a state directory"),
        ({"live": False}, "only a live directory has such files"),
        ({"on_done": "burn"}, "on_done must be one of keep, move, delete; got 'burn'"),
    ):
        with pytest.raises(InvalidParameter, match=re.escape(words)):
            start_live(tmp_path, ScriptedClock(), **{"on_done": "move"} | changes)


def test_a_snapshot_does_not_hold_what_is_finished(tmp_path, expected):
    """Nor does a start open those files again."""
    clock = ScriptedClock(0, arrivals(tmp_path / "in"))
    running = start_live(tmp_path, clock)
    for _ in running:
        if running.steps_done == 4:
            break
    running.close()
    (newest,) = sorted((tmp_path / "state").glob("manifest-*.dps"))[-1:]
    facts = read_packed(newest, kind="manifest")["facts"]
    assert (facts["positions"], facts["finished"][0]) == ({}, 1)
    opened = []

    class Noting(GrowingDirectory):
        def read(self, partition, *place, **named):
            opened.append(partition)
            return super().read(partition, *place, **named)

    noting = Noting(tmp_path / "in")
    start_live(tmp_path, clock, source=noting, live=False).finish()
    assert published(tmp_path) == expected
    assert "9.parquet" not in opened


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_lost_log_of_finished_files_is_refused(tmp_path, damage):
    """Else the files would be read and counted a second time."""
    clock = ScriptedClock(0, arrivals(tmp_path / "in"))
    AfterReleases(5).strike(replace(live(), start=lambda place: start_live(place, clock)), tmp_path)
    path = tmp_path / "state" / "finished-1.log"
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(StateError, match=r"finished-1\.log has lost its end, or is gone"):
        start_live(tmp_path, clock).finish()


def test_the_log_of_finished_files_goes_back_with_its_snapshot(tmp_path):
    """A run that goes on from an older snapshot has what was finished then, and writes over."""
    log = FinishedLog(tmp_path, b"run")
    log.add("a", 1)
    first = log.save()
    log.add("b", [2, 0])
    second = log.save()
    log.close()
    assert FinishedLog(tmp_path, b"run", second).ends == {"a": 1, "b": [2, 0]}
    older = FinishedLog(tmp_path, b"run", first)
    assert older.ends == {"a": 1}
    older.add("c", 3)
    third = older.save()
    older.close()

    assert FinishedLog(tmp_path, b"run", third).ends == {"a": 1, "c": 3}
    with pytest.raises(StateError, match="belongs to another run"):
        FinishedLog(tmp_path, b"other", third)


def test_a_log_of_which_little_is_left_is_written_anew(tmp_path):
    """The old one goes when no snapshot needs it; marks tell what may be removed."""
    (tmp_path / "in").mkdir()
    log = FinishedLog(tmp_path, b"run")
    log.resume(EmptiedDirectory(tmp_path / "in", "delete"))
    marks = []
    for number in range(1500):
        log.add(f"{number}.csv", 9, ["file", 9, number])
        log.forget(f"{number - 1}.csv")
        marks.append(log.save())
    assert marks[-1][0] > 1
    assert log.before(marks[-2]) == {}
    assert log.before(marks[-1]) == {"1499.csv": 9}
    log.close()

    assert len([*tmp_path.glob("finished-*.log")]) == 1
    assert FinishedLog(tmp_path, b"run", marks[-1]).ends == {"1499.csv": 9}


class Times:
    """Moves the clock by which listings are counted."""

    def __init__(self, monkeypatch):
        self.now, self.listings = 100.0, 0
        monkeypatch.setattr(files.time, "monotonic", lambda: self.now)
        real = os.listdir

        def listdir(folder):
            self.listings += 1
            return real(folder)

        monkeypatch.setattr(files.os, "listdir", listdir)


def test_a_directory_that_stands_still_is_not_listed(tmp_path, monkeypatch):
    """While its time is fresh it is: two files may have come within the grain of that time."""
    times = Times(monkeypatch)
    (tmp_path / "a.csv").write_text("n\n")
    os.utime(tmp_path, ns=(0, 10**18))
    source = GrowingDirectory(tmp_path)
    assert source.partitions() == ["a.csv"]
    (tmp_path / "b.csv").write_text("n\n")
    os.utime(tmp_path, ns=(0, 10**18))  # a clock that is too coarse to tell
    times.now += 2
    assert source.partitions() == ["a.csv", "b.csv"]
    times.now += 1
    first = source.partitions()
    assert times.listings == 3
    assert source.partitions() is first
    assert times.listings == 3
    (tmp_path / "c.csv").write_text("n\n")

    assert source.partitions() == ["a.csv", "b.csv", "c.csv"]


def test_a_large_directory_is_listed_with_pauses(tmp_path, monkeypatch):
    """While its time is fresh twice a second; but at once when that has changed."""
    times = Times(monkeypatch)
    monkeypatch.setattr(files, "_MANY", 0)
    (tmp_path / "a.csv").write_text("n\n")
    os.utime(tmp_path, ns=(0, 10**18))
    source = GrowingDirectory(tmp_path)
    for _ in range(8):
        source.partitions()
        times.now += 0.125
    assert times.listings == 2
    (tmp_path / "b.csv").write_text("n\n")

    assert source.partitions() == ["a.csv", "b.csv"]


def test_a_file_system_that_does_not_date_directories(tmp_path, monkeypatch):
    """Then a file is found when the directory is listed nevertheless, and from then on at once."""
    times = Times(monkeypatch)
    source = GrowingDirectory(tmp_path)
    for _ in range(2):
        source.partitions()
        times.now += 3
    for name, wait in (("a.csv", 11), ("b.csv", 0)):
        before = os.stat(tmp_path).st_mtime_ns
        (tmp_path / name).write_text("n\n")
        os.utime(tmp_path, ns=(0, before))
        times.now += wait
        assert name in source.partitions()


def test_a_file_that_grows_while_it_is_read_stops_nothing(tmp_path, monkeypatch, caplog):
    """It is read to where it ends then, and the operator is told once."""
    monkeypatch.setattr("dpstream.connectors.files.text.BLOCK", 8)
    monkeypatch.setattr(files.TextFile.__init__, "__kwdefaults__", {"block": 8})
    path = tmp_path / "a.csv"
    path.write_text("n\n" + "1\n" * 9)
    source = GrowingDirectory(tmp_path)
    source.partitions()
    batch = source.read("a.csv", None, columns=["n"])
    count = len(batch.table)
    with path.open("a") as file:
        file.write("2\n")
    while not batch.done:
        batch = source.read("a.csv", batch.position, columns=["n"])
        count += len(batch.table)
    for _ in range(3):
        source.partitions()

    assert count == 10
    assert caplog.text.count("a.csv was written to while it was read (20 bytes then, 22 now)") == 1
    assert len(caplog.records) == 1


def test_a_file_that_changes_after_a_restart_is_told(tmp_path, caplog):
    """The state knows how it was when it was read; what is added is not counted then either."""
    clock = ScriptedClock(0, arrivals(tmp_path / "in"))
    running = start_live(tmp_path, clock)
    for _ in running:
        if running.steps_done == 4:
            break
    running.close()
    with (tmp_path / "in" / "9.parquet").open("ab") as file:
        file.write(b"more")
    start_live(tmp_path, clock).finish()

    assert caplog.text.count("9.parquet was written to after it was read") == 1


def test_a_series_empties_its_directory_too(tmp_path):
    """By its own snapshots, of which two are kept; killed and begun again it publishes the same."""
    asked = dps.SeriesQuery(
        mechanism=dps.mechanisms.Uniform(epsilon=1, window=1),
        name="series",
        privacy_unit_column="user",
        keys=("page",),
        public_groups=["/1", "/2"],
        time_column="at",
        time_unit="us",
        start="1970-01-01",
        end="1970-01-01T06:00",
        window=dps.Tumble("1 hour"),
    )
    found = []
    for place, releases in ((tmp_path / "whole", 9), (tmp_path / "broken", 4)):
        clock = ScriptedClock(0, arrivals(place / "in"))
        (place / "in").mkdir(parents=True)
        for _ in range(2):
            running = dps.run(
                asked, source=place / "in", live=True, sink=place / "out", state=place / "state",
                secret=SECRET, options=options(), clock=clock, on_done="delete",
            )  # fmt: skip
            for _ in zip(range(releases), running, strict=False):
                pass
            running.close()
        found.append(published(place))
        assert not {"9.parquet", "8.parquet"} & names(place / "in")

    assert found[0] == found[1]
