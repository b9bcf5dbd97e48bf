"""The changes of a PostgreSQL table by logical replication, against the real server."""

import signal
from contextlib import closing
from dataclasses import replace
from functools import partial

import psycopg
import pyarrow as pa
import pytest

import dpstream as dps
from benchmarks.recovery_case import CheckingSink
from dpstream.connectors.registry import open_source
from dpstream.connectors.testing import ServerSourceSuite
from dpstream.connectors.testing.suites import Read, drain, replay
from dpstream.errors import InvalidInput, InvalidParameter, RowsLost
from tests.servers.conftest import drop_slots
from tests.support.fixed import SECRET
from tests.support.live_runs import QUERY, TIMES, ScriptedClock, rows, seconds_before
from tests.support.processes import kill_this_process, run_in_fork, until
from tests.support.runs import options, published

pytestmark = pytest.mark.servers


class Table:
    """A table that tests change, with a publication and a slot of its own."""

    def __init__(self, server, connection, columns='"user" text, page text'):
        self.server, self.sql = server, connection.execute
        (number,) = self.sql("SELECT count(*) FROM pg_class").fetchone()
        self.name = f"changed_{number}"
        self.sql(f"CREATE TABLE {self.name} (id serial PRIMARY KEY, {columns})")
        self.sql(f"CREATE PUBLICATION {self.name} FOR TABLE {self.name}")
        self.make_slot()

    def drop_slot(self):
        """Once its reader, which has gone, is gone for the server too."""
        asked = "SELECT 1 FROM pg_replication_slots WHERE slot_name = %s AND active"
        until(lambda: self.sql(asked, (self.name,)).fetchone() is None)
        self.sql("SELECT pg_drop_replication_slot(%s)", (self.name,))

    def make_slot(self):
        self.sql(f"SELECT pg_create_logical_replication_slot('{self.name}', 'pgoutput')")

    def open(self, changes="versions", **options):
        given = {"table": self.name, "slot": self.name, "changes": changes} | options
        return open_source(self.server.address, options=given)

    def put(self, *users, page="/"):
        for user in users:
            self.sql(f'INSERT INTO {self.name} ("user", page) VALUES (%s, %s)', (user, page))

    def log_end(self):
        return self.sql("SELECT pg_current_wal_lsn()").fetchone()[0]

    def kept_from(self):
        asked = "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = %s"
        return self.sql(asked, (self.name,)).fetchone()[0]


@pytest.fixture
def connection(postgres):
    with psycopg.connect(postgres.address, autocommit=True) as connection:
        yield connection
    drop_slots(postgres)


@pytest.fixture
def table(postgres, connection):
    return Table(postgres, connection)


class Narrow:
    """Asks for some columns, and shows those that tests put; a slot has one reader at a time."""

    reading = None

    def __init__(self, source, columns):
        self.source, self.names = source, columns
        self.bounded, self.replayable = source.bounded, True
        self.partitions, self.columns, self.close = source.partitions, source.columns, source.close

    def read(self, partition, position, *, columns=None, until=None):
        if Narrow.reading not in (None, self.source):
            Narrow.reading.close()
        Narrow.reading = self.source
        names = self.names if columns is None else columns
        batch = self.source.read(partition, position, columns=names, until=until)
        shown = [name for name in names if name != "at" or columns is not None]
        return replace(batch, table=batch.table.select(shown))


class TestReplicationSource(ServerSourceSuite):
    """Rows come as inserts and as new versions, in transactions of several."""

    @pytest.fixture(autouse=True)
    def _table(self, postgres, connection):
        self.table = Table(postgres, connection, '"user" text, page text, at timestamptz')

    def open(self, **options):
        return Narrow(self.table.open(**options), ["user", "page", "at"])

    def impatient(self):
        return self.open(patience=0.5)

    def put(self, rows):
        with psycopg.connect(self.table.server.address) as connection:
            for at, row in enumerate(rows):
                if at % 2:
                    changed = f'UPDATE {self.table.name} SET "user" = %(user)s, page = %(page)s '
                    connection.execute(f"{changed} WHERE id = {self.last}", row)
                else:
                    asked = f'INSERT INTO {self.table.name} ("user", page) VALUES (%(user)s, '
                    found = connection.execute(f"{asked} %(page)s) RETURNING id", row)
                    (self.last,) = found.fetchone()
                if at % 5 == 4:
                    connection.execute(f"DELETE FROM {self.table.name} WHERE id < {self.last}")
                    connection.commit()

    def spoil(self):
        self.table.sql(f"INSERT INTO {self.table.name} (at) VALUES ('infinity')")

    def lose(self):
        self.table.sql(
            "SELECT pg_replication_slot_advance(%s, %s)", (self.table.name, self.table.log_end())
        )

    def foreign_positions(self):
        return [17, "x", [1, 2], ["a", 5, [3, 0], 0], {"next": 3}, ["a", 0, [1, 0], 0]]

    def away(self):
        return self.table.server.away()


def read_all(source, rows, reads=None):
    reads = {} if reads is None else reads
    drain(source, reads, rows=rows)
    (read,) = reads.values()
    return read


def users(read):
    return [row["user"] for batch in read.batches for row in batch.table.to_pylist()]


def test_each_change_by_each_rule(table):
    """Also in the order of commits, and without what was rolled back."""
    table.put("a")
    with (
        psycopg.connect(table.server.address) as early,
        psycopg.connect(table.server.address) as late,
    ):
        early.execute(f"INSERT INTO {table.name} (\"user\") VALUES ('early')")
        late.execute(f"INSERT INTO {table.name} (\"user\") VALUES ('gone')")
        late.rollback()
        late.execute(f"INSERT INTO {table.name} (\"user\") VALUES ('late')")
        late.commit()
    table.sql(f"UPDATE {table.name} SET \"user\" = 'b' WHERE \"user\" = 'a'")
    table.sql(f"DELETE FROM {table.name} WHERE \"user\" = 'late'")
    table.sql(f"TRUNCATE {table.name}")
    table.put("c")
    for rule, expected in {"inserts": "a late early c", "versions": "a late early b c"}.items():
        with closing(table.open(rule)) as source:
            assert users(read_all(source, len(expected.split()))) == expected.split()
    with closing(table.open("stop")) as source, pytest.raises(InvalidInput, match="changes a row"):
        read_all(source, 5)
    for change, words in {
        f"DELETE FROM {table.name}": "deletes a row",
        f"TRUNCATE {table.name}": "empties the table",
    }.items():
        table.drop_slot()
        table.make_slot()
        table.put("d")
        table.sql(change)
        with closing(table.open("stop")) as source, pytest.raises(InvalidInput, match=words):
            read_all(source, 5)


def test_types(postgres, connection):
    """They are those of a table that is read by its key; what cannot be held costs its row."""
    columns = (
        "t text, b bool, n numeric, p numeric(10,2), d date, tz timestamptz, f float8, raw bytea, "
        "u uuid, j jsonb, many int[], i2 smallint, twice int GENERATED ALWAYS AS (i2 * 2) STORED"
    )
    table = Table(postgres, connection, columns)
    table.sql(
        f"""INSERT INTO {table.name} (t, b, n, p, d, tz, f, raw, u, j, many, i2) VALUES
        (E'x,"y"\\nz', true, 1.50, 1.50, '2024-02-29', '2024-02-29 12:00:00.123456+02', 'Infinity',
         '\\xdead', 'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11', '{{"k":   [1]}}', '{{1,2}}', 3),
        ('', false, 'NaN', 2, null, null, null, '', null, null, null, null),
        ('bc', null, 100, null, '0044-03-15 BC', null, null, null, null, null, null, null)"""
    )
    with closing(table.open()) as source:
        change = read_all(source, 2)
        while len(change.rejected()) < 1:  # it is the last row
            read_all(source, 2, {source.partitions()[0]: change})
        found = pa.concat_tables([batch.table for batch in change.batches])
    with closing(open_source(f"{postgres.address}?table={table.name}&key=id")) as source:
        by_key = source.read(source.partitions()[0], None, columns=found.column_names)

    assert "twice" not in found.column_names
    assert found.combine_chunks().equals(by_key.table)
    assert [bad.reason for bad in change.rejected()] == [bad.reason for bad in by_key.rejected]
    assert [row["b"] for row in found.to_pylist()] == [True, False]


def test_a_value_that_was_not_sent(postgres, connection):
    """A long value that an update leaves alone; the old row has it under REPLICA IDENTITY FULL."""
    table = Table(postgres, connection, '"user" text, page text')
    table.sql(f"ALTER TABLE {table.name} ALTER page SET STORAGE EXTERNAL")
    table.put("a", page="x" * 9000)
    change = f'UPDATE {table.name} SET "user" = %s'
    table.sql(change, ("b",))
    table.sql(f"ALTER TABLE {table.name} REPLICA IDENTITY FULL")
    table.sql(change, ("c",))
    with closing(table.open()) as source:
        read = read_all(source, 2)
    assert users(read) == ["a", "c"]
    assert ["'page'" in bad.reason and "FULL" in bad.reason for bad in read.rejected()] == [True]
    with closing(Narrow(table.open(), ["user"])) as source:
        assert users(read_all(source, 3)) == ["a", "b", "c"]


def test_columns_that_change(table):
    """One that is added is null before; another type, or none any more, is refused in words."""
    table.put("a")
    table.sql(f"ALTER TABLE {table.name} ADD place text")
    table.put("b")
    with closing(table.open()) as source:
        read = read_all(source, 2)
        assert [row["place"] for b in read.batches for row in b.table.to_pylist()] == [None, None]
        table.sql(f"ALTER TABLE {table.name} RENAME place TO town")
        table.put("c")
        with pytest.raises(InvalidInput, match="no column 'place' any more"):
            read_all(source, 3)
    table.sql(f"ALTER TABLE {table.name} ALTER page TYPE varchar(9)")
    table.put("d")
    with closing(table.open()) as source, pytest.raises(InvalidInput, match=r"text.*character var"):
        read_all(source, 4)
    with closing(Narrow(table.open(), ["user", "town"])) as source:
        assert users(read_all(source, 4)) == ["a", "b", "c", "d"]


def test_a_transaction_larger_than_a_chunk(table, monkeypatch):
    """It is read in pieces, and from each of them on and up to each of them again."""
    monkeypatch.setattr("dpstream.connectors.postgres.replication._ROWS", 7)
    table.sql(
        f"INSERT INTO {table.name} (\"user\") SELECT 'u' || n FROM generate_series(1, 30) AS n"
    )
    table.put("last")
    with closing(table.open()) as source:
        read = read_all(source, 31)
        assert len(read.batches) >= 5
        for i, start in enumerate(read.positions):
            for j in range(i + 1, len(read.positions)):
                again = replay(source, source.partitions()[0], start, read.positions[j])
                assert again.rows() == read.rows(i, j)
                assert again.positions[-1] == read.positions[j]
    assert users(read) == [*(f"u{n}" for n in range(1, 31)), "last"]


def test_the_slot_goes_on_when_it_is_told(table):
    """It keeps what a recovery needs; what is behind that is gone, and an error that says so."""
    begin = table.kept_from()
    table.put("a")
    with closing(table.open()) as source:
        first = read_all(source, 1)
        table.put("b")
        second = read_all(source, 1, {source.partitions()[0]: Read(positions=first.positions[-1:])})
        assert table.kept_from() == begin
        name = source.partitions()[0]
        source.commit({name: first.positions[-1]})
        replay(source, name, first.positions[-1], second.positions[-1])
        until(lambda: table.kept_from() != begin)
        with pytest.raises(RowsLost, match="goes on at"):
            replay(source, name, None, first.positions[-1])
    table.drop_slot()
    with pytest.raises(InvalidInput, match="pg_create_logical_replication_slot"):
        table.open()
    table.make_slot()
    with closing(table.open()) as source, pytest.raises(RowsLost, match="made again"):
        source.read(name, second.positions[-1])


def test_a_quiet_table_does_not_keep_the_log(table, monkeypatch):
    """The slot moves on with what other tables write, though no row of this one comes."""
    monkeypatch.setattr("dpstream.connectors.postgres.replication._QUIET", 10_000)
    table.put("a")
    with closing(table.open()) as source:
        read = read_all(source, 1)
        table.sql(f"CREATE TABLE {table.name}_other AS SELECT generate_series(1, 9000) AS n")
        end = table.log_end()
        name = source.partitions()[0]

        def moved_on():
            batch = source.read(name, read.positions[-1])
            return batch.position if batch.position != read.positions[-1] else None

        at = until(moved_on)
        table.put("b")
        reads = {name: Read(positions=[at])}
        assert users(read_all(source, 1, reads)) == ["b"]
        assert users(replay(source, name, read.positions[-1], at)) == []
        source.commit({name: at})
        moved = "SELECT %s::pg_lsn - 10000 <= %s::pg_lsn"
        until(lambda: table.sql(moved, (end, table.kept_from())).fetchone()[0])


def test_an_end(table):
    """What was committed before a place in the log, though it is read later."""
    table.put("a", "b")
    table.sql(f"CREATE TABLE {table.name}_other AS SELECT 1 AS n")  # the log goes on without rows
    end = table.log_end()
    table.put("c")
    with closing(table.open(until=end)) as source:
        assert source.bounded
        read = read_all(source, 2)
        assert users(read) == ["a", "b"]
        assert users(replay(source, source.partitions()[0], None, read.positions[-1])) == ["a", "b"]
    with pytest.raises(InvalidInput, match="ends at"):
        table.open(until="FFFF/0")
    with pytest.raises(InvalidParameter, match="pg_current_wal_lsn"):
        table.open(until="17")


def test_what_must_be_set_up_first(table):
    """Each refusal says what to run."""
    quoted = table.name
    refusals = {
        f"ALTER PUBLICATION {quoted} SET (publish = 'insert')": "leaves out changes",
        f"ALTER PUBLICATION {quoted} SET (publish = 'insert,update')": None,
        f"ALTER PUBLICATION {quoted} SET TABLE {quoted} WHERE (id > 5)": "row filter",
        f'ALTER PUBLICATION {quoted} SET TABLE {quoted} (id, "user")': "list of columns",
        f"ALTER PUBLICATION {quoted} DROP TABLE {quoted}": "CREATE PUBLICATION",
    }
    for statement, words in refusals.items():
        table.sql(statement)
        if words is None:
            table.open().close()
            continue
        with pytest.raises(InvalidInput, match=words):
            table.open()
    table.sql(f"ALTER PUBLICATION {quoted} SET TABLE {quoted}")
    with pytest.raises(InvalidInput, match="leaves out changes"):
        table.open("stop")
    table.sql("SELECT pg_create_logical_replication_slot('of_another_kind', 'test_decoding')")
    with pytest.raises(InvalidInput, match="of the plugin pgoutput"):
        table.open(slot="of_another_kind", publication=quoted)
    with pytest.raises(InvalidInput, match="no table 'nowhere'"):
        table.open(table="nowhere")
    with pytest.raises(InvalidParameter, match="no option 'key'"):
        table.open(key="id")


def test_partitions_are_one_table(postgres, connection):
    """Published as the table that they are of."""
    name = "parts_of_changes"
    connection.execute(f'CREATE TABLE {name} (id int, "user" text) PARTITION BY RANGE (id)')
    connection.execute(f"CREATE TABLE {name}_1 PARTITION OF {name} FOR VALUES FROM (0) TO (10)")
    connection.execute(f"CREATE TABLE {name}_2 PARTITION OF {name} FOR VALUES FROM (10) TO (20)")
    connection.execute(f"CREATE PUBLICATION {name} FOR TABLE {name}")
    connection.execute(f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")
    place = f"{postgres.address}?table={name}&slot={name}"
    with pytest.raises(InvalidInput, match="publish_via_partition_root"):
        open_source(place)
    connection.execute(f"ALTER PUBLICATION {name} SET (publish_via_partition_root = true)")
    connection.execute(f"INSERT INTO {name} VALUES (1, 'a'), (11, 'b')")
    with closing(open_source(place)) as source:
        assert users(read_all(source, 2)) == ["a", "b"]


def test_a_user_that_may_do_little_else(table, monkeypatch):
    """REPLICATION is enough; without it the server says so, and no password is told."""
    monkeypatch.setenv("READER_PASSWORD", "planted-reader-password")
    made = f"CREATE ROLE {table.name}_reader LOGIN PASSWORD 'planted-reader-password'"
    table.sql(made)
    table.put("a")
    place = table.server.address.replace("dpstream@", f"{table.name}_reader@")
    where = f"{place}?table={table.name}&slot={table.name}&password_env=READER_PASSWORD"
    with closing(open_source(where)) as source:
        with pytest.raises(InvalidInput, match=r"refuses: .*[Rr][Ee][Pp][Ll][Ii][Cc]") as refused:
            read_all(source, 1)
        assert "planted" not in str(refused.value)
        table.sql(f"ALTER ROLE {table.name}_reader REPLICATION")
        assert users(read_all(source, 1)) == ["a"]


def test_queries_at_two_places(table, monkeypatch):
    """A query that begins later reads what an earlier one has read, and then both read as one."""
    table.put("a", "b")
    with closing(table.open()) as source:
        name = source.partitions()[0]
        early = read_all(source, 2)
        begin = early.positions[-1]
        late = {name: Read(positions=[[*begin[:1], begin[2][0], begin[2], 0]])}
        opened = []
        open_stream = source._open_stream
        monkeypatch.setattr(source, "_open_stream", lambda *a: opened.append(1) or open_stream(*a))
        for at in range(5):
            table.put(f"c{at}")
            read_all(source, 3 + at, {name: early})
            read_all(source, 1 + at, late)
    assert users(early) == ["a", "b", *(f"c{at}" for at in range(5))]
    assert users(late[name]) == [f"c{at}" for at in range(5)]
    assert late[name].positions[-1][3] == 5
    assert len(opened) <= 1


def run(table, place, *, kill_at=None):
    """A live run to its end, or until this process is killed with its nth new release."""
    keep = place / "clock"
    now = int(keep.read_text()) if keep.exists() else 0
    left = iter(range(99 if kill_at is None else kill_at))

    def arrive(time):
        with psycopg.connect(table.server.address) as connection:
            came = connection.execute(f"SELECT 1 FROM {table.name}_came WHERE time = {time}")
            if came.fetchone() is None:  # it has not, before a kill
                connection.execute(f"INSERT INTO {table.name}_came VALUES ({time})")
                put = f"INSERT INTO {table.name} VALUES (DEFAULT, %(user)s, %(page)s, %(at)s)"
                connection.cursor().executemany(put, rows(seconds_before(time)).to_pylist())
                connection.execute(f"UPDATE {table.name} SET page = '/1' WHERE page = '/2'")
                connection.execute(f"DELETE FROM {table.name}")

    dps.run(
        dps.Query(**QUERY),
        source=f"{table.server.address}?table={table.name}&slot={table.name}&changes=versions",
        sink=CheckingSink(place, lambda: next(left, None) is None and kill_this_process()),
        secret=SECRET,
        state=place / "state",
        clock=ScriptedClock(now, [(time, lambda t=time: arrive(t)) for time in TIMES], keep),
        options=options(2),
    ).finish()


def test_kill_minus_nine_of_either_side(postgres, connection, tmp_path):
    """The releases are those of an undisturbed run, byte for byte, and the slot has gone on."""
    found = []
    for kills in ((), (1, 3, 2)):
        table = Table(postgres, connection, '"user" text, page text, at int8')
        table.sql(f"CREATE TABLE {table.name}_came (time int8)")
        begin, place = table.kept_from(), tmp_path / str(len(kills))
        place.mkdir()
        for kill_at in kills:
            assert run_in_fork(partial(run, table, place, kill_at=kill_at)) == -signal.SIGKILL
            if kill_at == 3:  # not always: a server that is killed forgets how far a slot has gone
                postgres.restart()
                table.sql = psycopg.connect(postgres.address, autocommit=True).execute
        assert run_in_fork(partial(run, table, place)) == 0
        assert table.kept_from() != begin
        found.append(published(place))

    assert len(found[0]) >= 8
    assert found[1] == found[0]


def test_a_stream_that_nobody_has_read_for_long(table):
    """The server ends it, and the next read goes on where the last one was."""
    table.sql("ALTER ROLE dpstream IN DATABASE postgres SET wal_sender_timeout = '200ms'")
    try:
        table.put("a")
        with closing(table.open()) as source:
            read = read_all(source, 1)
            asked = "SELECT 1 FROM pg_replication_slots WHERE slot_name = %s AND active"
            until(lambda: table.sql(asked, (table.name,)).fetchone() is None)
            table.put("b")
            assert users(read_all(source, 2, {source.partitions()[0]: read})) == ["a", "b"]
    finally:
        table.sql("ALTER ROLE dpstream IN DATABASE postgres RESET wal_sender_timeout")
