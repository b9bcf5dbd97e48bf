"""Several queries over one live source: each sees what arrived before its trigger, whoever is slow.

A query in a pipeline must publish the very bytes that it publishes alone. With `ScriptedClock` all
happens in one thread. With `HandClock` there is a reader and a thread for each query, as with the
machine's clock, and the test moves the time when the reader has nothing left to read.
"""

import logging
import os
from dataclasses import replace
from threading import Event

import pytest

import dpstream as dps
from dpstream.connectors.files.sink import DirectorySink
from dpstream.connectors.files.source import GrowingDirectory
from dpstream.connectors.pipes import StandardInput
from dpstream.engines.embedded import step_rows
from dpstream.engines.query_run import EngineOptions
from dpstream.errors import InvalidInput, StateError
from dpstream.rows import parse
from dpstream.session import Feed, Runs
from tests.support.kill_and_replay import BeforeDiskOperation, kill_and_replay
from tests.support.live_runs import (
    DIFFERENT,
    EQUAL,
    HOUR,
    TIMES,
    HandClock,
    Publishing,
    ScriptedClock,
    alone,
    arrivals,
    drop,
    last_releases,
    lines,
    live_through,
    queries,
    rows,
    several_live,
    start_all,
)
from tests.support.long import part_of
from tests.support.processes import until
from tests.support.runs import charges, options, published

SERIES = """SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 1000, privacy_unit = 'w_event',
    w = 1, mechanism = 'uniform', privacy_unit_column = user, time_unit = 'us',
    public_groups = ('/1', '/2'), start = '1970-01-01', end = '1970-01-01 06:00') window_start,
    page, COUNT(*) AS n FROM TUMBLE(clicks, DESCRIPTOR(at), INTERVAL '1' HOUR)
    GROUP BY window_start, page"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What each query publishes by itself, worked out once for each kind of trigger."""
    known = {}

    def of(asked):
        found = {}
        for query in asked:
            kind = (query.name, query.schedule)
            if kind not in known:
                known[kind] = alone(tmp_path_factory.mktemp("alone"), query)
            found |= known[kind]
        return found

    return of


@pytest.mark.parametrize("every", [EQUAL, DIFFERENT], ids=["equal", "different"])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_each_query_publishes_what_it_publishes_alone(tmp_path, expected, count, every):
    """One after another in one thread; the tables come in the order of their triggers."""
    asked = queries(count, every)
    order = []
    for name, table in start_all(tmp_path, asked, ScriptedClock(0, arrivals(tmp_path / "in"))):
        order.append((table["trigger_time"][0].as_py(), name))

    assert published(tmp_path) == expected(asked)
    assert [time for time, _ in order] == sorted(time for time, _ in order)


@pytest.mark.parametrize("every", [EQUAL, DIFFERENT], ids=["equal", "different"])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_with_a_thread_each_they_publish_the_same(tmp_path, expected, count, every):
    """A reader, and a thread for each query."""
    asked, clock = queries(count, every), HandClock()
    publishing = Publishing(start_all(tmp_path, asked, clock))
    live_through(clock, arrivals(tmp_path / "in"), asked)
    publishing.join()

    assert publishing.problem is None
    assert published(tmp_path) == expected(asked)


def test_very_many_queries(tmp_path):
    """Every row is read by each, and the source is read once."""
    end = {"end": "1970-01-01T02:00", "window": dps.Tumble("1 hour")}
    asked, clock = queries(part_of(50, of=2), **end), HandClock()
    (tmp_path / "in").mkdir()
    source = Counting(tmp_path / "in")
    publishing = Publishing(start_all(tmp_path, asked, clock, source=source, live=False))
    live_through(clock, arrivals(tmp_path / "in")[:3], asked)
    publishing.join()
    read = {run.operator.read for run in publishing.runs.runs.values()}

    assert publishing.problem is None
    assert read == {source.rows} == {36}


class Counting(GrowingDirectory):
    """A directory that knows how many rows were read from it."""

    rows = 0

    def read(self, *place, **named):
        batch = super().read(*place, **named)
        self.rows += len(batch.table)
        return batch


class Held:
    """A directory that one query waits for until it is let go, or that fails or refuses it.

    `refuses`: from so many questions on; the first is asked before the run begins, the second
    before it is charged.
    """

    concurrent = True

    def __init__(self, folder, name, *, fails=None, refuses=0):
        self._sink, self.asked = DirectorySink(folder), 0
        self.name, self.go, self.fails, self.refuses = name, Event(), fails, refuses

    def fence(self, name, run):
        self.asked += name == self.name
        if self.refuses and name == self.name and self.asked >= self.refuses:
            raise InvalidInput("this sink does not take that run")

    def write(self, name, window, trigger, table):
        if name == self.name:
            if self.fails is not None:
                raise self.fails
            if not self.refuses:
                assert self.go.wait(60)
        self._sink.write(name, window, trigger, table)

    def close(self):
        pass


@pytest.mark.parametrize("buffer", [1 << 28, 1], ids=["in memory", "read again"])
def test_a_slow_sink_delays_nobody_and_loses_nothing(tmp_path, expected, buffer):
    """All others come to their ends before it writes its first release; then it has every row.

    With a buffer of one byte nothing waits in memory: the slow query reads the source again.
    """
    asked, clock = queries(3, DIFFERENT), HandClock()
    sink = Held(tmp_path / "out", "q1")
    settings = {"sink": sink, "options": replace(options(), buffer=buffer)}
    publishing = Publishing(start_all(tmp_path, asked, clock, **settings))
    live_through(clock, arrivals(tmp_path / "in"), asked)
    runs = publishing.runs.runs
    until(lambda: all(runs[n].steps_done == runs[n].query.schedule.steps for n in ("q0", "q2")))
    shown = sum(name.endswith(".parquet") for name in expected([asked[0], asked[2]]))
    until(lambda: len([*(tmp_path / "out").glob("q*.parquet")]) == shown)
    assert runs["q1"].steps_done <= 1
    assert runs["q1"].operator_facts()["lag_seconds"] > 3600
    assert runs["q1"].operator_facts()["rows_waiting"] > 0
    sink.go.set()
    publishing.join()

    assert published(tmp_path) == expected(asked)


@pytest.mark.parametrize("threads", [True, False])
@pytest.mark.parametrize("how", ["fails", "refused"])
def test_a_query_that_fails_stops_alone(tmp_path, expected, how, threads, caplog):
    """The others go on to their ends; then its error is raised. A second run goes on with it."""
    asked = queries(3)
    sink = Held(tmp_path / "out", "q1", fails=OSError("full"))
    if how == "refused":
        sink = Held(tmp_path / "out", "q1", refuses=2)  # since it began, another run has written
    clock = HandClock() if threads else ScriptedClock(0, arrivals(tmp_path / "in"))
    publishing = Publishing(start_all(tmp_path, asked, clock, sink=sink))
    if threads:
        live_through(clock, arrivals(tmp_path / "in"), asked)
    publishing.join()

    assert isinstance(publishing.problem, InvalidInput if how == "refused" else StateError)
    assert list(publishing.runs.failures) == ["q1"]
    assert published(tmp_path) == expected([asked[0], asked[2]])
    assert "query 'q1' has failed; the others go on" in caplog.text
    assert charges(tmp_path / "book") == (2 if how == "refused" else 3)

    late = ScriptedClock(9 * HOUR)
    if how == "refused":  # it never began, and all its windows would be empty now
        with pytest.raises(InvalidInput, match="'q1' would spend its budget for nothing"):
            start_all(tmp_path, asked, late)
    start_all(tmp_path, asked, late, anyway=["q1"]).finish()
    last = [name for name in expected(asked) if name.endswith("t000004.parquet")]
    found = published(tmp_path)
    if how == "fails":  # its first step was logged
        assert all(found[name] == expected(asked)[name] for name in found if "t000001" in name)
    assert {*last} <= found.keys()


def test_a_query_whose_sink_refuses_it_at_once_begins_nothing(tmp_path):
    """What can be known before anything is charged or published is said then."""
    sink = Held(tmp_path / "out", "q1", refuses=1)
    with pytest.raises(InvalidInput, match="does not take that run"):
        start_all(tmp_path, queries(3), ScriptedClock(0), sink=sink)

    assert charges(tmp_path / "book") == 0
    assert published(tmp_path) == {}


def test_a_query_that_is_tried_again_has_its_rows(tmp_path, expected):
    """What came and went while it was down it reads from the source."""
    asked, clock = queries(3), HandClock()
    sink = Held(tmp_path / "out", "q1", fails=OSError("full"))
    sink.go.set()
    runs = start_all(tmp_path, asked, clock, sink=sink)
    again = Event()
    runs.retry_delay = lambda problem, tries: 0.0 if not tries and again.wait(60) else None
    publishing = Publishing(runs)
    events = arrivals(tmp_path / "in")
    live_through(clock, events[:3], [])
    clock.move(5 * HOUR // 2)
    until(lambda: "q1" in runs.failures)
    until(lambda: {runs.runs[name].operator.read for name in ("q0", "q2")} == {36})
    sink.fails = None
    again.set()
    until(lambda: not runs.failures)
    until(lambda: runs.runs["q1"].operator.read == 36)
    live_through(clock, events[3:], asked)
    publishing.join()
    found, whole = published(tmp_path), expected(asked)

    assert publishing.problem is None
    assert found.keys() == whole.keys()
    for name in (name for query in asked for name in last_releases(query)):
        assert found[name] == whole[name], name


def test_one_query_ends_before_the_others(tmp_path, expected):
    """The others have all their rows."""
    asked = [*queries(2), *queries(3, end="1970-01-01T03:00")[2:]]
    clock = HandClock()
    publishing = Publishing(start_all(tmp_path, asked, clock))
    live_through(clock, arrivals(tmp_path / "in"), asked)
    publishing.join()

    assert publishing.problem is None
    assert published(tmp_path) == expected(asked)


def test_a_publication_that_overruns_the_next_trigger(tmp_path, expected):
    """One query by itself: what came while it was busy belongs to the triggers that it missed."""
    asked, clock = queries(1), HandClock()
    sink = Held(tmp_path / "out", "q0")
    publishing = Publishing(start_all(tmp_path, asked, clock, sink=sink))
    live_through(clock, arrivals(tmp_path / "in"), asked)
    sink.go.set()
    publishing.join()

    assert published(tmp_path) == expected(asked)


def test_what_comes_between_two_looks_counts_at_the_trigger(tmp_path):
    """The reader looks again when the trigger is there: a row from just before it is in it."""
    asked, clock = queries(2, end="1970-01-01T01:00", window=dps.Tumble("1 hour"))[:2], HandClock()
    publishing = Publishing(start_all(tmp_path, asked, clock))
    clock.settle()
    asleep, awake = Event(), Event()

    def sleep(until, stop):
        asleep.set()
        assert awake.wait(60)

    clock.wait = sleep
    assert asleep.wait(60)
    drop(tmp_path / "in", "1.parquet", rows([HOUR - 1] * 12))
    clock.time = 9 * HOUR
    awake.set()
    publishing.join()

    assert [run.operator.read for run in publishing.runs.runs.values()] == [12, 12]
    assert [run.operator.late for run in publishing.runs.runs.values()] == [0, 0]


@pytest.mark.parametrize("releases", [1, 4, 9])
def test_broken_off_and_started_again(tmp_path, expected, releases):
    """Each query goes on from where it was; what it had not logged counts as arrived now."""
    asked = queries(3, DIFFERENT)
    clock = ScriptedClock(0, arrivals(tmp_path / "in"))
    runs = start_all(tmp_path, asked, clock)
    for _ in zip(range(releases), runs, strict=False):
        pass
    runs.close()
    before = published(tmp_path)
    start_all(tmp_path, asked, clock).finish()
    found, whole = published(tmp_path), expected(asked)
    last = [name for query in asked for name in last_releases(query)]

    assert before.items() <= found.items()
    assert found.keys() == whole.keys()
    assert {name: found[name] for name in last} == {name: whole[name] for name in last}


@pytest.mark.parametrize("later", [1, 2])
def test_stopped_with_threads_and_started_again(tmp_path, expected, later):
    """A stop ends each query at its own last trigger; nothing is lost or counted twice."""
    asked, clock = queries(3, DIFFERENT), HandClock()
    events = arrivals(tmp_path / "in")
    publishing = Publishing(start_all(tmp_path, asked, clock))
    first = [one for one in events if one[0] <= later * HOUR]
    live_through(clock, first, [])
    publishing.runs.stop()
    publishing.join()
    again = HandClock(clock.time)
    publishing = Publishing(start_all(tmp_path, asked, again))
    live_through(again, [one for one in events if one not in first], asked)
    publishing.join()
    found, whole = published(tmp_path), expected(asked)
    last = {name for query in asked for name in last_releases(query)}

    assert found.keys() == whole.keys()
    assert {name: found[name] for name in last} == {name: whole[name] for name in last}


def test_killed_at_many_moments(tmp_path, expected):
    """A release that comes again has the bytes it had, and each query has every row in the end."""
    asked = queries(3, DIFFERENT)
    whole = expected(asked)
    last = [name for query in asked for name in last_releases(query)]
    for nth in range(20, 320, 75):
        started = []
        after = kill_and_replay(
            several_live(asked, started), tmp_path / str(nth), BeforeDiskOperation(nth)
        )
        found = after.published
        # killed at its window's last trigger, before that was logged: the rows come again, too late
        late = [name for name, run in started[-1].runs.items() if run.operator.late]

        assert found.keys() == whole.keys()
        assert len(late) < 3
        for name in last:
            assert found[name] == whole[name] or name.partition("-")[0] in late, f"{nth}: {name}"
        assert after.charges == 3


def test_a_series_beside_a_group_by_with_history(tmp_path):
    """Both read every live row, and old files by event time."""
    old = rows([HOUR // 4 + n for n in range(20)], "old")
    drop(tmp_path / "old", "history.parquet", old)
    asked, clock = queries(1), HandClock()
    series = dps.sql(SERIES, name="series")
    book = dps.Ledger()
    book.open("stream", asked[0].promise(epsilon=20, delta=1e-2))
    (tmp_path / "in").mkdir()
    settings = {
        "live": True,
        "source": {
            name: Feed(source=tmp_path / "in", live=True, history=tmp_path / "old")
            for name in ("q0", "series")
        },
        "clock": clock,
    }
    both = [
        dps.run_all([query], dataset=name, ledger=book, **settings)
        for query, name, book in ((asked[0], "stream", book), (series, "other", dps.Ledger()))
    ]
    publishing = Publishing(Runs.together(both))
    until(lambda: len(clock.by_reader) == 2)  # each has looked at its history
    live_through(clock, arrivals(tmp_path / "in"), [asked[0], series])
    publishing.join()
    counted = sum(
        sum(table["n"].to_pylist()) for name, table in publishing.found if name == "series"
    )

    assert publishing.problem is None
    assert {run.operator.read for run in publishing.runs.runs.values()} == {80}
    # 11 rows of an hour come at its very end, twice, and the series waits for none
    assert publishing.runs.runs["series"].operator.late == 22
    assert counted == pytest.approx(80 - 22, abs=1)


class Pipe:
    """Standard input, written to by the test."""

    def __init__(self):
        self._out, self._in = os.pipe()
        self.source, self._fed = StandardInput(self._out), 0

    def feed(self, text):
        self._fed += os.write(self._in, text.encode())
        until(lambda: self.source._at == self._fed)

    def end(self):
        os.close(self._in)


@pytest.mark.parametrize("kept", [True, False])
def test_standard_input_for_three_queries_until_it_ends(tmp_path, kept, caplog):
    """With a state directory or without, each reads every row; when it ends, all of them end."""
    asked, clock, pipe = queries(3, DIFFERENT), HandClock(), Pipe()
    named = {"source": pipe.source, "live": False}
    if not kept:
        book = dps.Ledger()
        book.open("stream", asked[0].promise(epsilon=20, delta=1e-2))
        named |= {"state": None, "ledger": book}
        named["options"] = EngineOptions(buckets=2, threads=1)
    publishing = Publishing(start_all(tmp_path, asked, clock, **named))
    heads = ("user,page,at\n", "", "")
    events = [
        (time, lambda t=time, head=head: pipe.feed(head + lines(t)))
        for time, head in zip(TIMES, heads, strict=False)
    ]
    live_through(clock, events, [])
    pipe.end()
    clock.settle()
    clock.move(9 * HOUR)
    publishing.join()

    assert publishing.problem is None
    assert [run.operator.read for run in publishing.runs.runs.values()] == [36, 36, 36]
    assert all(run.steps_done for run in publishing.runs.runs.values())
    assert publishing.runs.runs["q0"].steps_done < 7
    assert "the source has ended" in caplog.text


def test_a_query_that_catches_up_is_not_told_of_at_once(tmp_path, caplog):
    """Started behind its trigger it has read nothing yet while another one has: no fault so far."""
    clock = HandClock(3 * HOUR)
    with start_all(tmp_path, queries(2), clock) as runs:
        runs.runs["q0"].operator.read = 12
        assert runs.warn_starved() == []
        clock.time += 4_999_999
        assert runs.warn_starved() == []
        clock.time += 1

        assert runs.warn_starved() == ["q1"]


def test_a_query_that_reads_nothing_is_told_of(tmp_path, caplog):
    """In the log, once, when another query over the same source has read rows."""
    caplog.set_level(logging.WARNING)
    asked, clock = queries(2), HandClock()
    runs = start_all(tmp_path, asked, clock)
    publishing = Publishing(runs)
    live_through(clock, arrivals(tmp_path / "in")[:1], [])
    assert runs.warn_starved() == []
    until(lambda: runs.runs["q1"].operator.read == 12)
    runs.runs["q1"].operator.read = 0
    clock.move(HOUR + 2_000_000)
    until(lambda: runs.runs["q0"].steps_done)

    assert runs.warn_starved() == runs.warn_starved() == ["q1"]
    until(lambda: "has read nothing" in caplog.text)  # by the thread that has noticed it
    assert caplog.text.count("query 'q1' has read nothing since this start") == 1
    runs.stop()
    publishing.join()


def test_lag_is_told_to_the_operator(tmp_path):
    """From a trigger to its release, by the run's clock; a replayed step does not count."""
    asked, clock = queries(1), HandClock()
    sink = Held(tmp_path / "out", "q0")
    runs = start_all(tmp_path, asked, clock, sink=sink)
    publishing = Publishing(runs)
    clock.move(HOUR)
    until(lambda: hasattr(runs.runs["q0"], "_flow"))
    clock.move(HOUR + 5_000_000)
    sink.go.set()
    until(lambda: runs.runs["q0"].operator.lag_seconds)
    assert runs.runs["q0"].operator_facts()["release_delay_seconds"] == 5
    runs.stop()
    publishing.join()

    again = start_all(tmp_path, asked, HandClock(clock.time))
    again.stop()
    again.finish()
    assert again.runs["q0"].operator.worst_lag_seconds == 0


def test_shared_columns_are_parsed_once_and_alike(tmp_path, monkeypatch):
    """Times and numbers of a chunk are parsed once for all queries that read them alike.

    Small chunks are parsed together instead, by each query alone.
    """
    monkeypatch.setattr(step_rows, "_SMALL", 0)
    count = {"times": 0}
    real = parse.times

    def times(*given, **named):
        count["times"] += 1
        return real(*given, **named)

    monkeypatch.setattr(parse, "times", times)
    asked = queries(5)
    start_all(tmp_path, asked, ScriptedClock(0, arrivals(tmp_path / "in"))).finish()

    assert count["times"] == 15  # 5 files of 12 rows, in groups of 5
