"""Releases in PostgreSQL, against the real server."""

import signal
from threading import Event, Thread

import psycopg
import pyarrow as pa
import pytest

from dpstream.connectors.database import DatabaseSink
from dpstream.connectors.registry import open_sink
from dpstream.connectors.shared import tell_keys
from dpstream.connectors.testing import ServerSinkSuite, UpsertSinkSuite
from dpstream.connectors.testing.suites import release, rows_seen
from dpstream.errors import InvalidInput, ServerUnreachable, StateError
from tests.connectors.test_sinks import NOON, RELEASE
from tests.laws.test_published_keys import every_type_of_key
from tests.support.processes import kill_this_process, run_in_new_process, until

pytestmark = pytest.mark.servers


def break_off(uri, query, window, trigger, rows):
    """Write a release; killed when its rows are sent and their transaction is not committed."""
    DatabaseSink.mark_done = kill_this_process
    sink = open_sink(uri)
    tell_keys(sink, query, ["page"])
    sink.write(query, window, trigger, release(query, window, trigger, rows=rows))


@pytest.fixture
def schema(postgres):
    """The name of a schema that is not there yet."""
    with psycopg.connect(postgres.address) as connection:
        (number,) = connection.execute("SELECT count(*) FROM pg_class").fetchone()
    return f"out_{number}"


def rows_of(postgres, table):
    with psycopg.connect(postgres.address) as connection:
        return connection.execute(f"SELECT * FROM {table} ORDER BY 1, 2, 3").fetchall()


class TestPostgresSink(ServerSinkSuite):
    @pytest.fixture(autouse=True)
    def _schema(self, postgres, schema):
        self.postgres, self.schema = postgres, schema
        self.uri = f"{postgres.address}?schema={schema}"

    def open(self):
        return open_sink(self.uri)

    def impatient(self):
        return open_sink(f"{self.uri}&patience=0.5")

    def visible_rows(self, query):
        with psycopg.connect(self.postgres.address) as connection:
            found = connection.execute(f'SELECT page, count FROM {self.schema}."{query}"')
            return sorted(found.fetchall())

    def break_off(self, query, window, trigger, table):
        arguments = (self.uri, query, window, trigger, table.num_rows)
        assert run_in_new_process(break_off, *arguments) == -signal.SIGKILL

    def away(self):
        return self.postgres.away()


class TestPostgresUpserts(UpsertSinkSuite):
    @pytest.fixture(autouse=True)
    def _schema(self, postgres, schema):
        self.postgres, self.schema = postgres, schema

    open = TestPostgresSink.open
    visible_rows = TestPostgresSink.visible_rows
    uri = property(lambda self: f"{self.postgres.address}?schema={self.schema}")

    def test_killed_beside_the_commit(self):
        """The rows before stay until the newer ones are there, all at once."""
        self.publish(release("a", 0, 1, rows=5))
        arguments = (f"upsert:{self.uri}", "a", 0, 2, 2)
        assert run_in_new_process(break_off, *arguments) == -signal.SIGKILL
        assert self.visible_rows("a") == rows_seen(release("a", 0, 1, rows=5))
        self.publish(release("a", 0, 2, rows=2))
        assert self.visible_rows("a") == rows_seen(release("a", 0, 2, rows=2))


def test_two_that_want_to_make_the_schema(postgres, schema):
    """Who comes second waits for the first, finds the schema, and goes on."""
    uri = f"{postgres.address}?schema={schema}"
    with psycopg.connect(postgres.address) as other:
        other.execute(f"CREATE SCHEMA {schema}")  # not committed: others see none yet
        opened = []
        second = Thread(target=lambda: opened.append(open_sink(uri)), daemon=True)
        second.start()
        wanted = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query ~ "
        with psycopg.connect(postgres.address, autocommit=True) as watcher:
            until(lambda: watcher.execute(wanted + f"'SCHEMA.*{schema}'").fetchone() == (1,))
        other.commit()
        second.join(30)

    (sink,) = opened
    sink.write("clicks", 0, 1, RELEASE)
    sink.close()
    assert rows_of(postgres, f"{schema}.clicks")


def test_sinks_that_start_at_once(postgres, schema):
    """Whichever makes schema and books: all can write."""
    uri, sinks = f"{postgres.address}?schema={schema}", []
    starts = [Thread(target=lambda: sinks.append(open_sink(uri)), daemon=True) for _ in range(6)]
    for one in starts:
        one.start()
    for one in starts:
        one.join(30)
    assert len(sinks) == len(starts)
    for number, sink in enumerate(sinks):
        sink.write("clicks", 0, number, RELEASE)
        sink.close()

    assert len(rows_of(postgres, f"{schema}.clicks")) == len(starts) * RELEASE.num_rows


def test_types_are_those_of_the_release(postgres, schema):
    """Beside the numbers of window and release; text that PostgreSQL cannot hold is changed."""
    odd = pa.table({"key": ["a\0b", None], "raw": pa.array([b"\0\xff", None], pa.binary())})
    sink = open_sink(f"{postgres.address}?schema={schema}")
    sink.write('my "clicks"', 3, 17, RELEASE)
    sink.write("odd", 0, 1, odd)
    sink.close()

    found = rows_of(postgres, f'{schema}."my ""clicks"""')
    assert found[0][:6] == (3, 4, '/a"b', NOON, 1, 0.5)
    assert str(found[1][5]) == "nan"
    assert found[0][6] == 2**64 - 1
    assert [row[7] for row in found] == [True, False, None]
    assert rows_of(postgres, f"{schema}.odd") == [
        (0, 1, "a\ufffdb", b"\0\xff"),
        (0, 1, None, None),
    ]
    assert rows_of(postgres, f"{schema}.dpstream_releases") == [
        ('my "clicks"', 3, 17),
        ("odd", 0, 1),
    ]


def test_names_that_would_be_cut_are_refused(postgres, schema):
    """PostgreSQL would cut them to 63 bytes, and two could become one."""
    sink = open_sink(f"{postgres.address}?schema={schema}")
    with pytest.raises(InvalidInput, match="at most 63 bytes"):
        sink.write("q" * 64, 0, 1, RELEASE)
    for refused in (
        lambda table: sink.write("q", 0, 1, table),
        lambda table: sink.check("q", table.schema),
    ):
        with pytest.raises(InvalidInput, match="at most 63 bytes"):
            refused(pa.table({"ü" * 32: [1]}))
    sink.write("r", 0, 1, RELEASE)
    with pytest.raises(StateError, match="has the columns"):
        sink.write("r", 0, 2, RELEASE.drop_columns(["url"]))
    sink.close()


class LosesItsAnswer:
    """A connection on which the answer to COMMIT never comes, the first time."""

    def __init__(self, connection):
        self._connection, self.left = connection, 1

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def execute(self, statement, *parameters):
        found = self._connection.execute(statement, *parameters)
        if statement == "COMMIT" and self.left:
            self.left = 0
            self._connection.close()
            raise psycopg.OperationalError("server closed the connection unexpectedly")
        return found


def test_a_commit_without_an_answer_is_looked_up(postgres, schema):
    """It may have happened or not; the release is there once."""
    sink = open_sink(f"{postgres.address}?schema={schema}")
    sink.write("a", 0, 1, release("a", 0, 1))
    sink.connection = lost = LosesItsAnswer(sink.connection)
    sink.write("a", 0, 2, release("a", 0, 2))
    sink.close()

    assert lost.left == 0
    assert len(rows_of(postgres, f"{schema}.a")) == 6


def test_killed_again_and_again(postgres, schema):
    """A server that dies at any moment has every release once in the end."""
    sink, stop = open_sink(f"{postgres.address}?schema={schema}"), Event()

    def kill():
        while not stop.wait(0.15):
            postgres.restart()

    killer = Thread(target=kill)
    killer.start()
    try:
        for trigger in range(30):
            sink.write("a", 0, trigger, release("a", 0, trigger, rows=200))
    finally:
        stop.set()
        killer.join()
    sink.close()

    found = sorted(row[2:] for row in rows_of(postgres, f"{schema}.a"))
    assert found == rows_seen(*(release("a", 0, t, rows=200) for t in range(30)))


def test_two_writers_of_one_release(postgres, schema):
    """Two processes, say an old one that is thought dead: what they write is there once."""
    uri = f"{postgres.address}?schema={schema}"

    def write():
        sink = open_sink(uri)
        for trigger in range(10):
            sink.write("a", 0, trigger, release("a", 0, trigger))
        sink.close()

    writers = [Thread(target=write) for _ in range(3)]
    for one in writers:
        one.start()
    for one in writers:
        one.join()

    assert len(rows_of(postgres, f"{schema}.a")) == 30


def test_who_may_not_write_is_told(postgres, schema):
    """What the server refuses is no outage, and is not tried again."""
    with psycopg.connect(postgres.address, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {schema} LOGIN PASSWORD 'x'")
    path = postgres.folder / f"{schema}.password"
    path.write_text("x")
    uri = f"postgres://{schema}@127.0.0.1:{postgres.port}/postgres?password_file={path}"
    with pytest.raises(StateError, match=r"permission denied.*grant what is missing"):
        open_sink(f"{uri}&schema={schema}")
    path.write_text("wrong")
    with pytest.raises(StateError, match="password authentication failed"):
        open_sink(uri)
    with pytest.raises(ServerUnreachable, match=r"does not answer.*refused"):
        open_sink("postgres://me@127.0.0.1:9/x")


def test_every_type_that_a_key_has_is_written(postgres, schema):
    """An empty table first, then rows: no type that is accepted stops a run after its charge."""
    rows = every_type_of_key()
    sink = open_sink(f"{postgres.address}?schema={schema}")
    sink.write("q", 0, 1, rows.slice(0, 0))
    sink.write("q", 0, 2, rows)
    sink.close()

    with psycopg.connect(postgres.address) as connection:
        assert connection.execute(f"SELECT count(*) FROM {schema}.q").fetchone() == (2,)
