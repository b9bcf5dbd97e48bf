"""Whole runs between real servers: broken off, the server killed, started again: the same releases.

Rows come while the run goes on, by a clock that the test moves. The noise is fixed, so two runs
publish the same tables exactly if every step has read the same rows.
"""

import json
import logging
import os
import re
from functools import partial
from time import sleep

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable

import dpstream as dps
from dpstream.errors import InvalidInput, RowsLost
from dpstream.serve.metrics import exposition, query_samples, report
from dpstream.session.pipeline import load_pipeline
from tests.servers import kafka_tools
from tests.servers.conftest import PASSWORD
from tests.servers.nats_tools import fresh
from tests.support.fixed import SECRET
from tests.support.live_runs import (
    DIFFERENT,
    HOUR,
    QUERY,
    TIMES,
    HandClock,
    Publishing,
    ScriptedClock,
    alone,
    last_releases,
    queries,
    rows,
    seconds_before,
    start_all,
    triggers_of,
)
from tests.support.processes import until
from tests.support.runs import options, published

pytestmark = pytest.mark.servers


class PostgresFeed:
    """Rows through a table, the newest first within a batch; releases in a schema."""

    def end(self):
        return 12

    def __init__(self, server):
        self.server = server
        self.connection = psycopg.connect(server.address, autocommit=True)
        (number,) = self.connection.execute("SELECT count(*) FROM pg_class").fetchone()
        self.name = f"feed_{number}"
        self.connection.execute(
            f'CREATE TABLE {self.name} (id bigserial PRIMARY KEY, "user" text, page text, at int8)'
        )
        self.source = f"{server.address}?table={self.name}&key=id"
        self.sink = f"{server.address}?schema={self.name}_out"

    def put(self, table):
        with psycopg.connect(self.server.address) as connection:
            connection.cursor().executemany(
                f'INSERT INTO {self.name} ("user", page, at) VALUES (%(user)s, %(page)s, %(at)s)',
                table.to_pylist(),
            )

    def published(self):
        with psycopg.connect(self.server.address) as connection:
            found = connection.execute(f"SELECT * FROM {self.name}_out.live ORDER BY 1, 2, 3, 4, 5")
            return found.fetchall()

    def lose(self):
        with psycopg.connect(self.server.address) as connection:
            connection.execute(f"DELETE FROM {self.name}")


class ReplicationFeed(PostgresFeed):
    """Rows through a table, of which the changes are read; half of them as new versions."""

    def __init__(self, server):
        super().__init__(server)
        self.connection.execute(f"CREATE PUBLICATION {self.name} FOR TABLE {self.name}")
        made = "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')"
        self.connection.execute(made, (self.name,))
        self.source = f"{server.address}?table={self.name}&slot={self.name}&changes=versions"

    def end(self):
        return self.connection.execute("SELECT pg_current_wal_lsn()").fetchone()[0]

    def put(self, table):
        with psycopg.connect(self.server.address) as connection:
            for at, row in enumerate(table.to_pylist()):
                change = f'UPDATE {self.name} SET "user" = %(user)s, page = %(page)s, at = %(at)s'
                if at % 2 == 0:
                    connection.execute(f"DELETE FROM {self.name}")
                    change = f"INSERT INTO {self.name} VALUES (DEFAULT, %(user)s, %(page)s, %(at)s)"
                connection.execute(change, row)

    def lose(self):
        asked = "SELECT 1 FROM pg_replication_slots WHERE slot_name = %s AND active"
        until(lambda: self.connection.execute(asked, (self.name,)).fetchone() is None)
        moved = "SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())"
        self.connection.execute(moved, (self.name,))


class NatsFeed:
    """Rows through a stream as JSON; releases in another."""

    def end(self):
        return 12

    def __init__(self, server):
        self.server, self.stream = server, fresh(server)
        self.out = fresh(server)
        self.source, self.sink = self.stream.uri(), self.out.uri()

    def put(self, table):
        self.stream.put(*table.to_pylist())

    def published(self):
        return sorted(
            (subject.partition(".")[2], content)
            for subject, _, content in self.out.messages()
            if not subject.endswith(".run")
        )

    def lose(self):
        self.stream.client.call(lambda js: js.purge_stream(self.stream.name))


@pytest.fixture(params=[PostgresFeed, ReplicationFeed, NatsFeed])
def feeds(request):
    """Makes feeds on one server, each with rows and releases of its own."""
    kind = request.param
    server = request.getfixturevalue(SERVERS[kind])
    made = []

    def make():
        made.append(kind(server))
        return made[-1]

    yield make
    for one in made:
        getattr(one, "connection", getattr(one, "stream", None) and one.stream.client).close()


class KafkaFeed:
    """Rows through a topic as JSON."""

    def __init__(self, server):
        self.server, self.topic = server, kafka_tools.make_topic(server)
        self.source = f"kafka://{server.address}/{self.topic}?start=earliest"

    def put(self, table):
        kafka_tools.send(self.server, self.topic, table.to_pylist())


def clock(feed, events=()):
    """Rows arrive between the triggers."""
    come = [(time, lambda t=time: feed.put(rows(seconds_before(t)))) for time in TIMES]
    return ScriptedClock(0, [*come, *events])


def start(feed, place, ticking, every=2):
    return dps.run(
        dps.Query(**QUERY), source=feed.source, sink=feed.sink, secret=SECRET,
        state=place / "state", clock=ticking, options=options(every),
    )  # fmt: skip


class DebeziumFeed(KafkaFeed):
    """Rows through a topic, as Debezium writes them: inserts, versions, deletions, tombstones."""

    def __init__(self, server):
        super().__init__(server)
        self.source += "&format=debezium-json&changes=versions"
        self.sent = 0

    def put(self, table):
        messages = []
        for at, row in enumerate(table.to_pylist()):
            self.sent += 1
            source = {"connector": "postgresql", "sequence": f'["1", "{self.sent}"]'}
            events = [{"op": "cu"[at % 2], "after": row}, {"op": "d", "after": None}]
            messages += [json.dumps(event | {"source": source}) for event in events]
            messages.append(None)
        kafka_tools.send(self.server, self.topic, messages, partition=0)


SERVERS = {
    PostgresFeed: "postgres", ReplicationFeed: "postgres", NatsFeed: "nats", KafkaFeed: "kafka",
    DebeziumFeed: "kafka",
}  # fmt: skip


@pytest.mark.parametrize("kind", SERVERS)
def test_three_live_queries(kind, tmp_path, request):
    """Each has the rows that arrived before its triggers, and is there again after a restart."""
    feed = kind(request.getfixturevalue(SERVERS[kind]))
    asked, hand, moments = queries(3, DIFFERENT), HandClock(), [*TIMES]
    begun = {"source": feed.source, "live": False}
    triggers = sorted({time for query in asked for time in triggers_of(query)})
    publishing = Publishing(start_all(tmp_path, asked, hand, **begun))
    reads = dict.fromkeys(("q0", "q1", "q2"), 0)
    for number, time in enumerate(moments):
        for moment in [*(t for t in triggers if hand.time < t <= time), time]:
            hand.move(moment)
        feed.put(rows(seconds_before(time)))
        reads = {name: count + 12 for name, count in reads.items()}
        runs = publishing.runs.runs
        until(lambda runs=runs, r=reads: {n: one.operator.read for n, one in runs.items()} == r)
        if number == 2:  # at half past two: what came since its last trigger each reads again
            publishing.runs.stop()
            publishing.join()
            reads = {"q0": 12, "q1": 12, "q2": 36}
            hand = HandClock(hand.time)
            publishing = Publishing(start_all(tmp_path, asked, hand, **begun))
    hand.time = 9 * HOUR
    publishing.join()
    found = published(tmp_path)

    assert publishing.problem is None
    for query in asked:
        whole = alone(tmp_path / query.name, query)
        assert all(found[name] == whole[name] for name in last_releases(query))


@pytest.mark.parametrize("kind", [NatsFeed, KafkaFeed])
def test_the_operator_is_told_how_much_of_the_log_is_unread(kind, tmp_path, request):
    """While the reader is held up it grows; when all was read it is nothing, and stays told."""
    feed = kind(request.getfixturevalue(kind.__name__.removesuffix("Feed").lower()))
    publishing = Publishing(
        start_all(tmp_path, queries(2), HandClock(), source=feed.source, live=False)
    )
    runs = publishing.runs
    feed.put(rows(seconds_before(TIMES[0])))
    until(lambda: [run.operator.read for run in runs.runs.values()] == [12, 12])

    def unread():
        told = report(runs)["queries"]
        lags = [sum(one["consumer_lag"].values()) for one in told.values() if one["consumer_lag"]]
        return lags, query_samples(told, 0)

    until(lambda: unread()[0] == [0, 0])
    with runs.runs["q0"].arrivals.lock:  # nobody reads meanwhile
        feed.put(rows(seconds_before(TIMES[1])))
        until(lambda: unread()[0] == [12, 12])
        text = exposition(unread()[1])
    name = feed.stream.name if kind is NatsFeed else f"{feed.topic}/0"
    assert f'dpstream_consumer_lag{{query="q1",partition="{name}"}} ' in text
    until(lambda: unread()[0] == [0, 0])
    with feed.server.away():
        assert unread()[0] == [0, 0]
    publishing.runs.stop()
    publishing.join()
    assert publishing.problem is None


def test_a_query_that_is_added_later_begins_at_its_own_place(nats, tmp_path):
    """It has not the rows from before it, which may be gone; the older one goes on where it was."""
    feed, asked, hand = NatsFeed(nats), queries(2), HandClock()
    begun = {"source": f"{feed.source}&start=latest", "live": False}
    publishing = Publishing(start_all(tmp_path, asked[:1], hand, **begun))
    hand.settle()
    feed.put(rows(seconds_before(HOUR // 3)))
    until(lambda: publishing.runs.runs["q0"].operator.read == 12)
    hand.move(HOUR)
    until(lambda: publishing.runs.runs["q0"].steps_done == 1)
    publishing.runs.stop()
    publishing.join()
    hand = HandClock(hand.time)
    publishing = Publishing(start_all(tmp_path, asked, hand, **begun))
    runs = publishing.runs.runs
    until(lambda: len(runs["q0"].arrivals.tails) == 2)
    until(lambda: len(hand.by_reader) == 2)  # `settle` waits for readers that have begun
    hand.settle()
    feed.put(rows(seconds_before(3 * HOUR // 2)))
    until(lambda: [run.operator.read for run in runs.values()] == [12, 12])
    hand.time = 9 * HOUR
    publishing.join()

    assert publishing.problem is None
    assert [run.operator.read for run in runs.values()] == [12, 12]


@pytest.mark.parametrize("kind", [KafkaFeed, NatsFeed])
def test_a_range_that_is_over_is_refused_with_the_line_that_reads_it(kind, request):
    """Live it would publish empty windows and be charged; up to `until` it has all rows."""
    feed, book = kind(request.getfixturevalue(SERVERS[kind])), dps.Ledger()
    feed.put(rows(seconds_before(HOUR)))
    asked = dps.Query(**QUERY)
    with pytest.raises(InvalidInput, match="nothing was charged") as refused:
        dps.run(asked, source=feed.source, ledger=book)
    assert not book.report()
    option = re.search(r"until=[0-9:,]+", str(refused.value)).group()
    source = f"{feed.source}{'&' if '?' in feed.source else '?'}{option}"
    running = dps.run(asked, source=source, ledger=book).finish()

    assert running.operator.read == 12
    assert running.operator.late == 0
    assert len(book.report()[0]["spent_on"]) == 1


def test_broken_off_and_the_server_killed(feeds, tmp_path):
    """The run is left three times, and the server dies while it is read and written."""
    feed = feeds()
    start(feed, tmp_path / "whole", clock(feed)).finish()
    expected = feed.published()
    assert len(expected) >= 8

    feed = feeds()
    deaths = [(time + 1, feed.server.restart) for time in TIMES[1::2]]
    # the clock of the test stands still meanwhile, so that the rows come to the same trigger
    naps = [(time + n, partial(sleep, 0.1)) for time in TIMES[1::2] for n in range(2, 6)]
    ticking = clock(feed, deaths + naps)
    for releases in (1, 3, 2):
        running = iter(start(feed, tmp_path / "broken", ticking, every=3))
        for _ in range(releases):
            next(running)
        running.close()
        feed.server.restart()
    start(feed, tmp_path / "broken", ticking, every=3).finish()

    assert feed.published() == expected


def test_rows_that_a_recovery_needs_are_gone(feeds, tmp_path):
    """Nothing is published from what is left, and the error says what is missing."""
    feed = feeds()
    ticking = clock(feed)
    running = iter(start(feed, tmp_path, ticking, every=100))
    for _ in range(3):
        next(running)
    running.close()
    before = feed.published()
    feed.lose()

    with pytest.raises(RowsLost, match="restore"):
        start(feed, tmp_path, ticking, every=100).finish()
    assert feed.published() == before


def test_a_delta_table_of_a_run_that_was_broken_off(postgres, tmp_path):
    """PostgreSQL to Delta Lake: the rows of an undisturbed run, each once."""

    def tables(place, breaks):
        feed = PostgresFeed(postgres)
        feed.sink = f"delta:{place / 'out'}"
        ticking = clock(feed)
        for releases in breaks:
            running = iter(start(feed, place, ticking))
            for _ in range(releases):
                next(running)
            running.close()
        start(feed, place, ticking).finish()
        feed.connection.close()
        found = DeltaTable(str(place / "out" / "live")).to_pyarrow_table()
        return found.sort_by([(name, "ascending") for name in ("window", "release", "page")])

    assert tables(tmp_path / "a", ()).equals(tables(tmp_path / "b", (1, 4, 2)))


def test_no_password_is_left_anywhere(feeds, tmp_path, caplog, capfd):
    """Not in state, logs, output, tables or errors, also when the server is gone."""
    caplog.set_level(logging.DEBUG)
    feed = feeds()
    run = start(feed, tmp_path, clock(feed, [(TIMES[1] + 1, feed.server.restart)]))
    shown = [repr(run), *map(str, run)]
    feed.server.kill()
    with pytest.raises(dps.DpstreamError) as error:
        start(feed, tmp_path / "again", clock(feed))
    feed.server.start()
    chain, problem = [], error.value
    while problem is not None:
        chain += [str(problem), repr(problem)]
        problem = problem.__cause__ or problem.__context__
    shown += [*chain, caplog.text, *capfd.readouterr()]

    assert not any(PASSWORD in text for text in shown)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 3
    assert not any(PASSWORD.encode() in path.read_bytes() for path in files)


def test_a_password_in_an_address_is_refused_and_not_repeated():
    """Neither in a source nor in a sink."""
    for text in (
        f"postgres://me:{PASSWORD}@127.0.0.1:9/x?table=t&key=id",
        f"nats://me:{PASSWORD}@127.0.0.1:9/S",
        f"postgres://me@127.0.0.1:9/x?table=t&key=id&password={PASSWORD}",
        f"nats://127.0.0.1:9/S?token={PASSWORD}",
    ):
        for run in (
            lambda text=text: dps.run(dps.Query(**QUERY), source=text),
            lambda text=text: dps.run(
                dps.Query(**QUERY), source=pa.table({"user": ["a"], "page": ["b"], "at": [1]}),
                sink=text,
            ),
        ):  # fmt: skip
            with pytest.raises(dps.DpstreamError, match=r"must not") as error:
                run()
            assert PASSWORD not in str(error.value)


def test_a_pipeline_file_names_servers(feeds, tmp_path, monkeypatch):
    """URIs stand where paths do."""
    feed = feeds()
    feed.put(rows(seconds_before(TIMES[0])))
    monkeypatch.chdir(tmp_path)
    sql = """SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 2, delta = 1e-9,
        privacy_unit_column = user, max_groups_contributed = 1, public_groups = ('/1', '/2'))
        page, COUNT(*) AS n FROM clicks GROUP BY page"""
    (tmp_path / "p.toml").write_text(
        f'[source]\npath = "{feed.source}&until={feed.end()}"\n'
        '[budget]\ndataset = "d"\nepsilon = 3\n'
        f'delta = 1e-8\n[state]\npath = "state/"\n[sink]\nto = ["{feed.sink}", "delta:out/"]\n'
        f'[[query]]\nname = "live"\nsql = """{sql}"""\n'
    )
    pipeline = load_pipeline("p.toml")
    assert pipeline.sinks[0] == feed.sink
    with pytest.raises(SystemExit) as left:
        dps_main(["run", "p.toml"])

    assert left.value.code == 0
    assert len(feed.published()) >= 1
    assert os.path.isdir("out/live/_delta_log")


def dps_main(words):
    from dpstream.cli import main

    main(words)
