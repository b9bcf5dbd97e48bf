"""Changes of a table, as Debezium writes them to Kafka."""

import json
from collections import Counter

import psycopg
import pytest

from dpstream.connectors.registry import open_source
from dpstream.connectors.testing import ServerSourceSuite
from dpstream.connectors.testing.suites import all_rows, drain
from dpstream.errors import InvalidInput, InvalidParameter
from tests.servers import kafka_tools as tools
from tests.servers.conftest import PASSWORD, drop_slots
from tests.support.processes import until
from tests.support.servers import ConnectServer

pytestmark = pytest.mark.servers


def event(op, after, lsn, commit=0):
    source = {"connector": "postgresql", "snapshot": "false", "lsn": lsn}
    source["sequence"] = json.dumps([str(commit), str(lsn)])
    return json.dumps({"op": op, "before": None, "after": after, "source": source})


def opened(kafka, topic, **options):
    given = {"format": "debezium-json"} | options
    return open_source(f"kafka://{kafka.address}/{topic}", options=given)


def users(source, rows):
    """Of the rows that come, with how often each does."""
    reads = {}
    drain(source, reads, rows=rows)
    found = Counter(json.loads(row)["user"] for row in all_rows(reads).elements())
    return found, [bad for read in reads.values() for bad in read.rejected()]


class TestChanges(ServerSourceSuite):
    """Inserts and new versions are rows; deletions and tombstones between them are none."""

    @pytest.fixture(autouse=True)
    def _topic(self, kafka):
        self.kafka, self.place = kafka, 0
        self.topic = tools.make_topic(kafka, 2)

    def open(self, **options):
        return opened(self.kafka, self.topic, changes="versions", **options)

    def impatient(self):
        return self.open(patience=0.5)

    def put(self, rows):
        for number in range(2):
            mine = []
            for at, row in enumerate(rows[number::2]):
                self.place += 1
                mine += [event("cu"[at % 2], row, self.place), event("d", None, self.place), None]
            tools.send(self.kafka, self.topic, mine, partition=number)

    def spoil(self):
        tools.send(self.kafka, self.topic, [event("x", None, self.place)], partition=1)

    def lose(self):
        tools.remove_all(self.kafka, self.topic)

    def foreign_positions(self):
        source = self.open()
        source.partitions()
        known = source._topic.id
        source.close()
        return [17, [known, 5, 2], [known, 0, 1, [[5, 6]]], ["AAAAAAAAAAAAAAAAAAAAAA", 0, 1]]

    def away(self):
        return self.kafka.away()


def test_a_change_stops_the_run_unless_told_otherwise(kafka):
    """With the place, and what to write to go on; what is sent again is set aside."""
    topic = tools.make_topic(kafka, 1)
    log = [event("c", {"user": "a"}, 10), event("u", {"user": "b"}, 11), None, event("d", None, 12)]
    tools.send(kafka, topic, [*log, *log, event("c", {"user": "c"}, 20)], partition=0)
    source = opened(kafka, topic)
    with pytest.raises(InvalidInput, match=r"offset 1 of .* changes a row.* changes=inserts"):
        users(source, 1)
    source.close()
    for rule, expected in (("inserts", "ac"), ("versions", "abc")):
        source = opened(kafka, topic, changes=rule)
        found, bad = users(source, len(expected))
        source.close()
        assert found == Counter(expected)
        assert len(bad) == 3
        assert all("came again" in one.reason for one in bad)

    with pytest.raises(InvalidParameter, match="stop, inserts, versions"):
        opened(kafka, topic, changes="ignore")
    with pytest.raises(InvalidParameter, match="no option 'changes'"):
        opened(kafka, topic, format="json", changes="stop")


@pytest.fixture
def table(postgres):
    """A table of its own, and a connection."""
    with psycopg.connect(postgres.address, autocommit=True) as connection:
        (number,) = connection.execute("SELECT count(*) FROM pg_class").fetchone()
        name = f"followed_{number}"
        connection.execute(
            f'CREATE TABLE {name} (id serial PRIMARY KEY, "user" text, price numeric(8,2), '
            "at timestamptz, story text, raw bytea)"
        )
        connection.execute(f"ALTER TABLE {name} ALTER story SET STORAGE EXTERNAL")
        connection.name = name
        yield connection
    drop_slots(postgres)


def settings(kafka, postgres, name, *, schemas):
    """A connector of Debezium that follows one table."""
    return {
        "name": name,
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "database.hostname": "127.0.0.1",
        "database.port": postgres.port,
        "database.user": "dpstream",
        "database.password": PASSWORD,
        "database.dbname": "postgres",
        "plugin.name": "pgoutput",
        "slot.name": name,
        "publication.name": name,
        "publication.autocreate.mode": "filtered",
        "table.include.list": f"public.{name}",
        "lsn.flush.mode": "manual",  # so that PostgreSQL keeps what it may send again
        "topic.prefix": "db",
        "topic.creation.default.replication.factor": 1,
        "topic.creation.default.partitions": 1,
        "key.converter": "org.apache.kafka.connect.json.JsonConverter",
        "value.converter": "org.apache.kafka.connect.json.JsonConverter",
        "value.converter.schemas.enable": str(schemas).lower(),
    }


def test_debezium_itself_killed(kafka, postgres, table, place):
    """Snapshot, inserts, COPY, updates, deletions; killed, it sends again, and each counts once."""
    put = f'INSERT INTO {table.name} ("user", price, at, story, raw) VALUES (%s, 1.50, %s, %s, %s)'
    noon = "2024-05-01 12:00:00.5+00"
    table.execute(put, ("before", noon, "x" * 9000, b"\xde\xad"))
    connect = ConnectServer(place / "connect", kafka=kafka)
    given = settings(kafka, postgres, table.name, schemas=True)
    topic = f"db.public.{table.name}"
    with connect.running(given):
        until(lambda: topic in tools.admin(kafka).list_topics(timeout=30).topics)
        source = opened(kafka, topic, changes="versions")
        reads = {}
        drain(source, reads, rows=1)
        table.execute(put, ("first", noon, None, None))
        drain(source, reads, rows=2)
        kept = until(connect.kept_place)
        with table.cursor().copy(f'COPY {table.name} ("user") FROM STDIN') as copy:
            for n in range(50):
                copy.write_row([f"copied {n}"])
        table.execute(put, ("after", noon, "y", None))
        table.execute(f"UPDATE {table.name} SET price = 2 WHERE \"user\" = 'before'")
        table.execute(f"DELETE FROM {table.name} WHERE \"user\" = 'after'")
        drain(source, reads, rows=53)
        connect.kill()
        connect.offsets.write_bytes(kept)  # as if it had been killed before it kept more
        connect.start()
        table.execute(put, ("later", noon, None, None))
        drain(source, reads, rows=54)
        source.close()
    found = Counter(json.loads(row)["user"] for row in all_rows(reads).elements())
    bad = [one for read in reads.values() for one in read.rejected()]

    assert found == Counter(
        ["before", "first", "after", "later", *(f"copied {n}" for n in range(50))]
    )
    first = next(json.loads(row) for row in all_rows(reads) if "before" in row)
    assert (first["price"], first["at"]) == ("1.5", "2024-05-01T12:00:00.500000+00:00")
    again = [one for one in bad if "came again" in one.reason]
    assert len(again) == 53
    assert ["'story'" in one.reason for one in bad if one not in again] == [True]
