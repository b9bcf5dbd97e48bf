"""Live sources: rows belong to the trigger before which they came, also across restarts.

The noise of public groups does not depend on the data, so the last releases of two runs are equal
exactly if their windows hold the same rows in the end.
"""

import json
import os
from dataclasses import replace
from threading import Event, Thread

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dpstream as dps
from dpstream.engines.embedded import step_rows
from dpstream.errors import InvalidInput
from dpstream.rows.row_reader import RowReader
from tests.support.kill_and_replay import AfterReleases, BeforeDiskOperation, kill_and_replay
from tests.support.live_runs import (
    HOUR,
    QUERY,
    TIMES,
    Pipe,
    ScriptedClock,
    arrivals,
    drop,
    last,
    lines,
    live,
    rows,
    seconds_before,
    start_live,
    whole_live,
)
from tests.support.runs import LOOKING_BACK, options, published


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What an unbroken run publishes."""
    return whole_live(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("releases", range(1, 8))
def test_a_restart_reads_what_the_steps_have_read(tmp_path, expected, releases):
    """Broken off and started again at the same time by the clock: the same bytes."""
    clock = ScriptedClock(0, arrivals(tmp_path / "in"))
    kind = replace(live(), start=lambda place: start_live(place, clock))

    assert kill_and_replay(kind, tmp_path, AfterReleases(releases)).published == expected


def test_killed_at_many_moments(tmp_path, expected):
    """No row is lost or counted twice, and a release that comes again has the bytes it had."""
    for nth in range(3, 140, 12):
        after = kill_and_replay(live(), tmp_path / str(nth), BeforeDiskOperation(nth))

        assert after.published.keys() == expected.keys()
        assert last(after.published) == last(expected), f"operation {nth}"
        assert after.charges == 1


def test_earlier_windows_are_known_after_a_restart(tmp_path):
    """A difference of windows goes on from what was published live."""
    asked = QUERY | {"aggregates": (dps.Count("clicks"),), "finish": LOOKING_BACK.finish}
    whole = tmp_path / "whole"
    start_live(whole, ScriptedClock(0, arrivals(whole / "in")), asked).finish()
    clock = ScriptedClock(0, arrivals(tmp_path / "in"))
    running = iter(start_live(tmp_path, clock, asked))
    tables = [next(running) for _ in range(4)]
    running.close()
    tables += start_live(tmp_path, clock, asked)

    assert published(tmp_path) == published(whole)
    assert tables[-1]["change"].null_count == 0


def test_triggers_missed_while_down_are_made_up_for(tmp_path, expected):
    """They publish what had come before; what came meanwhile counts at the next trigger."""
    clock = ScriptedClock(0, arrivals(tmp_path / "in"))
    running = iter(start_live(tmp_path, clock))
    next(running)
    running.close()
    asleep = ScriptedClock(clock.time, clock.events)
    while asleep.time < 5 * HOUR // 2 + 1:
        asleep.wait(5 * HOUR // 2 + 1, Event())
    start_live(tmp_path, asleep).finish()
    found = published(tmp_path)

    assert found.keys() == expected.keys()
    assert last(found) == last(expected)
    assert found["live-w000000-t000002.parquet"] != expected["live-w000000-t000002.parquet"]


def test_late_rows_are_counted_for_the_operator_alone(tmp_path, expected):
    """A row after the last trigger of its window changes nothing."""
    late = (9 * HOUR // 2, lambda: drop(tmp_path / "in", "late.parquet", rows([5, 6, 7], "late")))
    run = start_live(tmp_path, ScriptedClock(0, [*arrivals(tmp_path / "in"), late])).finish()

    assert run.operator.late == 3
    assert published(tmp_path) == expected


def test_rows_ahead_of_the_clock(tmp_path):
    """Up to `max_ahead` they wait for their window, restarts or not; beyond, they are set aside."""
    early, far = 4 * HOUR + 5, 30 * HOUR
    asked = QUERY | {"max_ahead": "6 hours"}

    def come(place, at):
        both = [(at, lambda: drop(place / "in", "early.parquet", rows([early, far])))]
        return ScriptedClock(0, [*arrivals(place / "in"), *both])

    on_time = start_live(tmp_path / "a", come(tmp_path / "a", early), asked).finish()
    clock = come(tmp_path / "b", 10)
    running = iter(start_live(tmp_path / "b", clock, asked))
    for _ in range(3):
        next(running)
    running.close()
    start_live(tmp_path / "b", clock, asked).finish()
    letters = [path.read_text() for path in (tmp_path / "b" / "state" / "dead-letters").iterdir()]

    assert on_time.operator.rejected_rows == 1
    assert last(published(tmp_path / "a")) == last(published(tmp_path / "b"))
    assert [json.loads(text)["reason"] for text in letters] == ["time too far ahead of the clock"]


@pytest.mark.parametrize("change", ["removed", "another value"])
def test_rows_that_changed_since_publish_nothing(tmp_path, change):
    """A file that a logged step has read must be as it was."""
    clock = ScriptedClock(0, arrivals(tmp_path / "in"))
    running = iter(start_live(tmp_path, clock, options=options(every=100)))
    for _ in range(3):
        next(running)
    running.close()
    before = published(tmp_path)
    path = tmp_path / "in" / "8.parquet"
    other = pq.read_table(path).to_pydict()
    other["page"].reverse()
    path.unlink()
    if change == "another value":
        drop(tmp_path / "in", "8.parquet", pa.table(other))
    with pytest.raises((dps.NoiseReuse, InvalidInput)):
        start_live(tmp_path, clock).finish()

    assert published(tmp_path) == before


def test_a_graceful_stop_is_no_break(tmp_path, expected):
    """Stopped between two triggers and resumed at once, a run publishes the same bytes."""
    runs = []
    clock = ScriptedClock(0, arrivals(tmp_path / "in"))
    clock.events.insert(2, (3 * HOUR // 2, lambda: runs[0].stop()))
    clock.events.sort(key=lambda one: one[0])
    runs.append(start_live(tmp_path, clock))
    released = list(runs[0])
    assert 0 < len(released) < len(expected)
    assert list((tmp_path / "state").glob("manifest-*.dps"))
    start_live(tmp_path, clock).finish()

    assert published(tmp_path) == expected


def test_an_endless_query_keeps_its_start(tmp_path):
    """The first start fixes where windows begin; a restart months later does not move them."""
    asked = {name: value for name, value in QUERY.items() if name not in ("start", "end")}
    runs = []
    for now, stop in ((HOUR, 5 * HOUR + 1), (5 * HOUR + 1, 10 * HOUR + 1)):
        clock = ScriptedClock(now, [(stop, lambda: runs[-1].stop())])
        runs.append(start_live(tmp_path, clock, asked))
        runs[-1].finish()

    assert runs[0].query.start == runs[1].query.start == 0
    assert "live-w000002-t000004.parquet" in published(tmp_path)


def test_history_beside_a_live_source(tmp_path):
    """Old files are read by event time, new rows by the clock; a restart keeps both."""
    old = rows([HOUR // 4 + n for n in range(20)], "old")

    def history(place):
        drop(place / "old", "history.parquet", old)
        return place / "old"

    unbroken = whole_live(tmp_path / "a", history=history(tmp_path / "a"))
    without = whole_live(tmp_path / "c")
    clock = ScriptedClock(0, arrivals(tmp_path / "b" / "in"))
    running = iter(start_live(tmp_path / "b", clock, history=history(tmp_path / "b")))
    for _ in range(3):
        next(running)
    running.close()
    start_live(tmp_path / "b", clock, history=tmp_path / "b" / "old").finish()

    assert published(tmp_path / "b") == unbroken
    assert last(unbroken) != last(without)


def read_from_pipes(place, every, between=lambda: None):
    """A run that is broken off three times; each process has a pipe of its own."""
    now = 0
    for releases in (1, 2, 3, 100):
        pipe = Pipe()
        # just before a trigger: what a process has not read yet when it ends, its pipe loses
        events = [(t - 1, lambda t=t, pipe=pipe: pipe.feed(lines(t))) for t in TIMES]
        clock = ScriptedClock(now, events)
        run = start_live(place, clock, source=pipe.source, live=False, options=options(every=every))
        running = iter(run)
        for _ in zip(range(releases), running, strict=False):
            pass
        running.close()
        pipe.close()
        now = clock.time
        between()


@pytest.mark.parametrize("every", [1, 2, 100])
def test_standard_input_survives_restarts(tmp_path, expected, every):
    """A pipe gives its rows once; what was taken from it is kept until no recovery needs it."""
    read_from_pipes(tmp_path, every)

    assert last(published(tmp_path)) == last(expected)
    assert len(list((tmp_path / "state" / "arrived").iterdir())) <= 1


@pytest.mark.filterwarnings("ignore::dpstream.engines.embedded.snapshots.DamagedSnapshot")
def test_standard_input_survives_a_damaged_snapshot(tmp_path, expected):
    """The rows since the snapshot before it are still there."""

    def damage_newest():
        manifests = sorted((tmp_path / "state").glob("manifest-*.dps"))
        if len(manifests) == 2:
            os.truncate(manifests[-1], 40)

    read_from_pipes(tmp_path, 1, damage_newest)

    assert last(published(tmp_path)) == last(expected)


def test_the_operator_may_look_while_a_query_waits(tmp_path):
    """Whoever asks from another thread is answered, also while a clock of one's own holds time."""
    answered = []

    class AskedClock(ScriptedClock):
        def wait(self, until, stop):
            asking = Thread(target=lambda: answered.append(run.operator_facts()), daemon=True)
            asking.start()
            asking.join(60)
            assert not asking.is_alive(), "the waiting query holds a lock"
            super().wait(until, stop)

    run = start_live(tmp_path, AskedClock(0, arrivals(tmp_path / "in")))
    run.finish()

    assert answered[-1]["read"] > 0


def spoilt(place):
    """A source of small chunks, of which two have a row without a user."""

    def drop_spoilt():
        table = rows(seconds_before(TIMES[2]), user="v").to_pylist()
        table[7]["user"] = table[11]["user"] = ""
        drop(place / "in", "spoilt.parquet", pa.Table.from_pylist(table))

    return ScriptedClock(0, [*arrivals(place / "in"), (TIMES[2], drop_spoilt)])


def test_small_chunks_are_parsed_together(tmp_path, monkeypatch):
    """In fewer calls, with the bytes and the dead letters that each chunk alone has."""
    calls, read = [], RowReader.read
    monkeypatch.setattr(RowReader, "read", lambda *a, **k: calls.append(a) or read(*a, **k))
    found = {}
    for name, small in (("together", 4096), ("alone", 0)):
        monkeypatch.setattr(step_rows, "_SMALL", small)
        calls.clear()
        run = start_live(tmp_path / name, spoilt(tmp_path / name)).finish()
        letters = sorted((tmp_path / name / "state" / "dead-letters").iterdir())
        told = [path.read_text().replace(name, "") for path in letters]
        found[name] = published(tmp_path / name), told, run.operator.counts(), len(calls)

    assert found["together"][:3] == found["alone"][:3]
    assert sum(text.count("missing unit") for text in found["alone"][1]) == 2
    assert found["together"][3] < found["alone"][3]
