"""A growing table of PostgreSQL, against the real server."""

import time
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from threading import Event, Thread

import psycopg
import pyarrow as pa
import pytest

from dpstream.connectors.postgres.source import Horizon
from dpstream.connectors.registry import open_source
from dpstream.connectors.testing import ServerSourceSuite
from dpstream.errors import InvalidInput, InvalidParameter, RowsLost, ServerUnreachable
from tests.support.reading import read_users

pytestmark = pytest.mark.servers


class WithoutTimes:
    """Asks for the time too, which may be unreadable, and shows the rest."""

    def __init__(self, source):
        self.source, self.bounded, self.replayable = source, False, True
        self.partitions, self.columns, self.close = source.partitions, source.columns, source.close

    def read(self, partition, position, *, columns=None, until=None):
        if columns is not None:
            return self.source.read(partition, position, columns=columns, until=until)
        batch = self.source.read(partition, position, columns=["user", "page", "at"], until=until)
        return replace(batch, table=batch.table.drop_columns(["at"]))


@pytest.fixture
def table(postgres):
    """A table of its own, and a connection."""
    with psycopg.connect(postgres.address, autocommit=True) as connection:
        (number,) = connection.execute("SELECT count(*) FROM pg_class").fetchone()
        name = f"clicks_{number}"
        connection.execute(
            f'CREATE TABLE {name} (id bigserial PRIMARY KEY, "user" text, page text, '
            "at timestamptz)"
        )
        yield Clicks(postgres, name, connection)


class Clicks:
    """A table that tests fill."""

    def __init__(self, server, name, connection):
        self.server, self.name, self.connection = server, name, connection
        self.partition = f"public.{name}"

    def open(self, more=""):
        return open_source(f"{self.server.address}?table={self.name}&key=id{more}")

    def put(self, *users, connection=None):
        for user in users:
            (connection or self.connection).execute(
                f'INSERT INTO {self.name} ("user", page) VALUES (%s, %s)', (user, "/")
            )

    def session(self):
        return psycopg.connect(self.server.address)


class TestPostgresSource(ServerSourceSuite):
    @pytest.fixture(autouse=True)
    def _table(self, table):
        self.table = table

    def open(self, more=""):
        return WithoutTimes(self.table.open(more))

    def impatient(self):
        return self.open("&patience=0.5")

    def put(self, rows):
        with psycopg.connect(self.table.server.address) as connection:
            for row in rows:
                connection.execute(
                    f'INSERT INTO {self.table.name} ("user", page) VALUES (%(user)s, %(page)s)', row
                )

    def spoil(self):
        self.table.connection.execute(
            f"INSERT INTO {self.table.name} (\"user\", at) VALUES ('bad', 'infinity')"
        )

    def lose(self):
        self.table.connection.execute(f"DELETE FROM {self.table.name}")

    def foreign_positions(self):
        return [17, "x", [1, 2], ["a", "b", "c"], {"next": 3}, [None, 900, 5]]

    def away(self):
        return self.table.server.away()


def test_types_become_those_of_arrow(table):
    """NULL is null, '' is text, and what Arrow cannot hold costs its row."""
    name = f"{table.name}_types"
    table.connection.execute("DROP TYPE IF EXISTS pair; DROP DOMAIN IF EXISTS age")
    table.connection.execute("CREATE DOMAIN age AS int; CREATE TYPE pair AS (a int, b text)")
    table.connection.execute(
        f"CREATE TABLE {name} (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, t text, b bool, "
        "n numeric, p numeric(10,2), d date, at timestamp, tz timestamptz, f float8, r real, "
        "raw bytea, a age, c pair, j jsonb, many int[], i2 smallint)"
    )
    table.connection.execute(
        f"""INSERT INTO {name} (t, b, n, p, d, at, tz, f, r, raw, a, c, j, many, i2) VALUES
        (E'x,"y"\\nz', true, 1.50, 1.50, '2024-02-29', '2024-02-29 12:00:00.5',
         '2024-02-29 12:00:00.123456+02', 'Infinity', 1.5, '\\xdead', 33, row(1, 'q'),
         '{{"k": [1]}}', '{{1,2}}', 3),
        ('', null, 'NaN', 2, null, null, null, null, null, null, null, null, null, null, null),
        ('bc', null, 1, null, '0044-03-15 BC', null, null, null, null, null, null, null, null,
         null, null),
        ('nan', null, 1, 'NaN', null, null, null, null, null, null, null, null, null, null, null),
        (null, false, 1e40, null, null, null, '-infinity', null, null, null, null, null, null,
         null, null)"""
    )
    source = open_source(f"{table.server.address}?table={name}&key=id")
    batch = source.read(f"public.{name}", None)
    few = source.read(f"public.{name}", None, columns=["t"])
    source.close()

    noon = datetime(2024, 2, 29, 12, 0, 0, 500000)
    first, second = batch.table.to_pylist()
    assert first == {
        "id": 1, "t": 'x,"y"\nz', "b": True, "n": "1.5", "p": Decimal("1.50"),
        "d": date(2024, 2, 29), "at": noon,
        "tz": datetime(2024, 2, 29, 10, 0, 0, 123456, tzinfo=UTC), "f": float("inf"), "r": 1.5,
        "raw": b"\xde\xad", "a": 33, "c": "(1,q)", "j": '{"k": [1]}', "many": "{1,2}", "i2": 3,
    }  # fmt: skip
    assert (second["t"], second["n"], second["p"]) == ("", "NaN", Decimal("2.00"))
    assert {name for name, value in second.items() if value is None} == {
        "b", "d", "at", "tz", "f", "r", "raw", "a", "c", "j", "many", "i2",
    }  # fmt: skip
    reasons = [one.reason for one in batch.rejected]
    assert [why.partition(",")[0] for why in reasons] == [
        "d is 0044-03-15 BC", "p is NaN", "tz is -infinity",
    ]  # fmt: skip
    assert [one.where.rpartition(", ")[2] for one in batch.rejected] == [
        f"id = {n}" for n in (3, 4, 5)
    ]
    assert few.table["t"].to_pylist() == ['x,"y"\nz', "", "bc", "nan", None]
    assert source.columns("")["tz"] == pa.timestamp("us", "UTC")


@pytest.mark.parametrize("end", ["commit", "rollback", "prepare"])
def test_a_smaller_key_that_commits_later_is_not_lost(table, end):
    """Rows wait for whoever could still put one before them, a prepared transaction too."""
    source, slow = table.open(), table.session()
    table.put("before")
    assert read_users(source, table.partition)[0] == ["before"]
    table.put("slow", connection=slow)
    table.put("fast")
    users, position = read_users(source, table.partition)
    assert users == ["before"]
    if end == "prepare":
        slow.execute(f"PREPARE TRANSACTION '{table.name}'")
        slow.close()
        assert read_users(source, table.partition, position)[0] == []
        table.connection.execute(f"COMMIT PREPARED '{table.name}'")
    else:
        getattr(slow, end)()
        slow.close()

    found = read_users(source, table.partition, position)[0]
    assert found == (["fast"] if end == "rollback" else ["slow", "fast"])
    source.close()


def test_without_the_horizon_the_row_would_be_lost(table, monkeypatch):
    """The control: who does not look for writers passes the row, and is told when it comes."""
    monkeypatch.setattr(Horizon, "_holders", lambda *_: set())
    source, slow = table.open(), table.session()
    table.put("slow", connection=slow)
    table.put("fast")
    users, position = read_users(source, table.partition)
    slow.commit()

    assert users == ["fast"]
    with pytest.raises(InvalidInput, match="a row came with a id up to 2"):
        read_users(source, table.partition, position)
    source.close()


def test_keys_that_are_taken_before_the_insert(table):
    """The lock on the table comes too late for them: all transactions are waited for."""
    source = table.open("&settle=transactions")
    slow = table.session()
    (key,) = slow.execute(f"SELECT nextval('{table.name}_id_seq')").fetchone()
    table.put("fast")
    users, position = read_users(source, table.partition)
    assert users == []
    slow.execute(f'INSERT INTO {table.name} (id, "user") VALUES ({key}, %s)', ("slow",))
    slow.commit()
    slow.close()

    assert read_users(source, table.partition, position)[0] == ["slow", "fast"]
    source.close()


def test_many_writers_at_once(table):
    """Every row is read once, while four sessions commit in any order and some roll back."""
    stop, kept = Event(), []

    def write(number):
        with table.session() as session:
            turn = 0
            while not stop.is_set():
                turn += 1
                users = [f"{number}-{turn}-{n}" for n in range(turn % 3 + 1)]
                table.put(*users, connection=session)
                time.sleep(0.002 * ((number * 7 + turn * 3) % 5))  # others commit meanwhile
                if (number + turn) % 7:
                    session.commit()
                    kept.extend(users)
                else:
                    session.rollback()

    source, position, found, reads = table.open(), None, [], 0
    writers = [Thread(target=write, args=(number,)) for number in range(4)]
    for one in writers:
        one.start()
    try:
        while reads < 30:
            users, position = read_users(source, table.partition, position)
            found += users
            reads += bool(users)
    finally:
        stop.set()
        for one in writers:
            one.join()
    found += read_users(source, table.partition, position)[0]
    source.close()

    assert len(kept) > 60
    assert sorted(found) == sorted(kept)


def test_a_lag_stays_behind(table):
    """For keys that come in no order at all."""
    source = table.open("&lag=2")
    table.put("a", "b", "c")
    users, position = read_users(source, table.partition)
    table.put("d")

    assert users == ["a"]
    assert read_users(source, table.partition, position)[0] == ["b"]
    source.close()


def test_rows_put_behind_a_replay_are_refused(table):
    """The same noise must not meet other rows."""
    table.put("a", "b", "c")
    table.connection.execute(f"DELETE FROM {table.name} WHERE id = 2")
    source = table.open()
    users, position = read_users(source, table.partition)
    table.connection.execute(f"INSERT INTO {table.name} (id) VALUES (2)")

    assert users == ["a", "c"]
    with pytest.raises(InvalidInput, match=r"2 rows of .* there are 3 now"):
        source.read(table.partition, None, until=position)
    source.close()


@pytest.mark.parametrize(
    "change",
    [
        "TRUNCATE {0} RESTART IDENTITY",
        "DELETE FROM {0} WHERE id > 2; SELECT setval('{0}_id_seq', 2)",
        "DELETE FROM {0} WHERE id > 2; SELECT setval('{0}_id_seq', 7)",
    ],
)
def test_a_table_that_came_back_shorter(table, change):
    """It is not the one that was read; new rows would have old keys."""
    table.put("a", "b", "c", "d")
    source = table.open()
    _, position = read_users(source, table.partition)
    source.close()
    table.connection.execute(change.format(table.name))
    source = table.open()

    with pytest.raises(RowsLost, match="was read up to id 4, and that row is gone"):
        read_users(source, table.partition, position)
    source.close()


def test_rows_that_were_read_may_go(table):
    """All of them, if no key was handed out since."""
    table.put("a", "b")
    source = table.open()
    _, position = read_users(source, table.partition)
    source.close()
    table.connection.execute(f"DELETE FROM {table.name}")
    source = table.open()
    assert read_users(source, table.partition, position) == ([], position)
    table.put("c")

    assert read_users(source, table.partition, position)[0] == ["c"]
    source.close()


def test_latest_is_where_the_run_began(table):
    """Also for a replay, long after."""
    table.put("old", "older")
    source = table.open("&start=latest")
    begun = source.read(table.partition, None).position
    table.put("new")
    users, position = read_users(source, table.partition, begun)
    source.close()
    table.put("newest")
    source = table.open("&start=latest")
    again = source.read(table.partition, None, columns=["user"], until=position)

    assert users == again.table["user"].to_pylist() == ["new"]
    assert again.position == position
    source.close()


def test_until_makes_it_bounded(table):
    """A part of the table that is complete, by event time or at once."""
    table.put("a", "b", "c")
    source = table.open("&until=2")
    (name,) = source.partitions()

    assert source.bounded
    assert name == f"{table.partition} up to 2"
    assert read_users(source, name)[0] == ["a", "b"]
    source.close()
    source = table.open("&until=9")
    with pytest.raises(InvalidInput, match="ends at id 3 before until=9"):
        read_users(source, source.partitions()[0])
    source.close()


def test_what_cannot_be_read_in_order_is_refused(table):
    """With what to do about it."""
    make = table.connection.execute
    make(f"CREATE VIEW {table.name}_view AS SELECT * FROM {table.name}")
    make(f"CREATE TABLE {table.name}_free (id int PRIMARY KEY)")
    make(f"CREATE TABLE {table.name}_blocks (id bigserial PRIMARY KEY)")
    make(f"ALTER SEQUENCE {table.name}_blocks_id_seq CACHE 20")
    cases = {
        "?table=nowhere&key=id": "no table 'nowhere'",
        f"?table={table.name}&key=page": "must be whole numbers.*it is text",
        f"?table={table.name}&key=none": "no column 'none' for a key",
        f"?table={table.name}_view&key=id": "not a view",
        f"?table={table.name}_free&key=id": "settle=transactions if a key is taken",
        f"?table={table.name}_blocks&key=id": "in blocks of 20.*CACHE 1",
    }
    for more, words in cases.items():
        with pytest.raises(InvalidInput, match=words):
            open_source(table.server.address + more)
    with pytest.raises(InvalidParameter, match=r"needs \?table=NAME&key=COLUMN"):
        open_source(table.server.address)
    with pytest.raises(InvalidParameter, match="settle must be one of"):
        open_source(f"{table.server.address}?table={table.name}&key=id&settle=never")
    open_source(f"{table.server.address}?table={table.name}_free&key=id&lag=100").close()


def test_nobody_listens():
    """A clear error, at once."""
    with pytest.raises(ServerUnreachable, match=r"127.0.0.1:9/x does not answer.*start it"):
        open_source("postgres://me@127.0.0.1:9/x?table=t&key=id")


def test_latest_of_an_empty_table_is_its_beginning(table):
    """What comes after the first look is new, however it comes."""
    source = table.open("&start=latest")
    name = source.partitions()[0]
    users, position = read_users(source, name)
    assert users == []
    table.put("u1", "u2")

    assert read_users(source, name, position)[0] == ["u1", "u2"]


def test_a_long_value_stops_nobody(table):
    """A text of megabytes is a row like others."""
    long = "u" * (3 << 20)
    table.put("u1", long, "u2")
    source = table.open()

    assert read_users(source, source.partitions()[0])[0] == ["u1", long, "u2"]
