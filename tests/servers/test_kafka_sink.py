"""The Kafka sink against a real broker; readers read committed messages."""

import json
import signal
from contextlib import closing

import pytest
from confluent_kafka import Producer

from dpstream.connectors.encode import release_facts
from dpstream.connectors.kafka.sink import KafkaSink
from dpstream.connectors.registry import open_sink
from dpstream.connectors.shared import UpsertSink, tell_keys
from dpstream.connectors.testing import ServerSinkSuite, UpsertSinkSuite
from dpstream.connectors.testing.suites import release, rows_seen
from dpstream.errors import InvalidInput, StateError
from tests.servers import kafka_tools as tools
from tests.support.processes import kill_this_process, run_in_new_process

pytestmark = pytest.mark.servers


def break_off(uri, query, window, trigger, rows):
    """Write a release; killed when its rows are sent and the transaction is not committed."""
    send = KafkaSink._send

    def sent(self, producer, topic, key, value, headers):
        send(self, producer, topic, key, value, headers)
        if topic.endswith(".releases"):
            producer.flush(30)
            kill_this_process()

    KafkaSink._send = sent
    sink = open_sink(uri)
    tell_keys(sink, query, ["page"])
    sink.write(query, window, trigger, release(query, window, trigger, rows=rows))


class TestKafkaSink(ServerSinkSuite):
    @pytest.fixture(autouse=True)
    def _topic(self, kafka):
        self.kafka = kafka
        self.topic = tools.make_topic(kafka, 2)
        self.uri = f"kafka://{kafka.address}/{self.topic}"

    def open(self):
        return open_sink(self.uri)

    def impatient(self):
        return open_sink(f"{self.uri}?patience=0.5")

    def visible_rows(self, query):
        found = tools.committed(self.kafka, self.topic)
        rows = [json.loads(value) for key, value, _ in found if key == query.encode()]
        return sorted((row["page"], row["count"]) for row in rows)

    def break_off(self, query, window, trigger, table):
        arguments = (self.uri, query, window, trigger, len(table))
        assert run_in_new_process(break_off, *arguments) == -signal.SIGKILL
        assert len(table) not in {len(self.visible_rows(query)) - n for n in (0, 3)}

    def away(self):
        return self.kafka.away()


def as_table(kafka, topic):
    """What a compacted topic says to who reads it to its end: the newest value of each key."""
    rows = {key: value for key, value, _ in tools.committed(kafka, topic)}
    return {
        query: [json.loads(v) for k, v in rows.items() if v and json.loads(k)["query"] == query]
        for query in {json.loads(key)["query"] for key in rows}
    }


class TestKafkaUpserts(UpsertSinkSuite):
    @pytest.fixture(autouse=True)
    def _topic(self, kafka):
        self.kafka = kafka
        self.topic = tools.make_topic(kafka, 2, **{"cleanup.policy": "compact"})
        self.uri = f"kafka://{kafka.address}/{self.topic}"

    def open(self):
        return open_sink(self.uri)

    def visible_rows(self, query):
        rows = as_table(self.kafka, self.topic)[query]
        return sorted((row["page"], row["count"]) for row in rows)

    def test_killed_in_a_transaction(self):
        """Tombstones and rows come together; the next process deletes what is still there."""
        self.publish(release("a", 0, 1, rows=5))
        arguments = (f"upsert:{self.uri}", "a", 0, 2, 2)
        assert run_in_new_process(break_off, *arguments) == -signal.SIGKILL
        assert self.visible_rows("a") == rows_seen(release("a", 0, 1, rows=5))
        self.publish(release("a", 0, 2, rows=2), release("a", 0, 3, rows=1))
        assert self.visible_rows("a") == rows_seen(release("a", 0, 3, rows=1))
        sent = tools.committed(self.kafka, self.topic)
        assert sum(value is None for _, value, _ in sent) == 3 + 1

    def test_windows_that_are_over_take_no_memory(self):
        """Another process holds the keys of the open ones alone, and deletes them as ever."""
        last = release("a", 0, 2, rows=4)
        facts = release_facts(last) | {"releases": 2}
        last = last.replace_schema_metadata({"dpstream": json.dumps(facts)})
        self.publish(release("a", 0, 1, rows=5), last, release("a", 1, 1, rows=5))
        with closing(UpsertSink(self.open())) as sink:
            sink.tell_keys("a", ["page"])
            for table in (last, release("a", 1, 2, rows=2)):
                facts = release_facts(table)
                sink.write("a", facts["window"], facts["release_index"], table)
            assert {w: len(keys) for w, keys in sink._sink._shown["a"].items()} == {1: 2}
        assert self.visible_rows("a") == rows_seen(last, release("a", 1, 2, rows=2))

    def test_a_topic_that_keeps_every_message(self):
        """It would never forget what was replaced; retention would remove what was not."""
        self.topic = tools.make_topic(self.kafka, 1)
        self.uri = f"kafka://{self.kafka.address}/{self.topic}"
        with pytest.raises(InvalidInput, match=r"cleanup\.policy=delete; set it to compact"):
            self.publish(release("a", 0, 1))


@pytest.fixture
def topic(kafka):
    return tools.make_topic(kafka, 1)


def test_messages_say_what_they_are(kafka, topic):
    """Rows are JSON with their window and release; the index has an entry with their number."""
    sink = open_sink(f"kafka://{kafka.address}/{topic}")
    sink.write("a", 4, 2, release("a", 4, 2))
    sink.close()
    rows = tools.committed(kafka, topic)
    index = tools.committed(kafka, f"{topic}.releases")

    assert json.loads(rows[0][1]) == {"window": 4, "release": 2, "page": "/0", "count": 4020.0}
    told = {"query": b"a", "window": b"4", "trigger": b"2", "run": b"run 1"}
    assert rows[0][2] == {f"dpstream-{name}": value for name, value in told.items()}
    assert [json.loads(value)["rows"] for _, value, _ in index] == [3]


def test_the_first_of_two_writers_is_shut_out(kafka, topic):
    """Two processes that publish one query would both take the other's releases for missing."""
    uri = f"kafka://{kafka.address}/{topic}"
    first, second = open_sink(uri), open_sink(uri)
    first.write("a", 0, 1, release("a", 0, 1))
    second.write("a", 0, 2, release("a", 0, 2))
    with pytest.raises(StateError, match="another process"):
        first.write("a", 0, 3, release("a", 0, 3))
    first.close()
    second.close()
    values = [json.loads(value) for _, value, _ in tools.committed(kafka, topic)]

    seen = sorted((row["page"], row["count"]) for row in values)
    assert seen == rows_seen(release("a", 0, 1), release("a", 0, 2))


def test_an_open_transaction_of_another_query_hides_nothing(kafka, topic):
    """The index is read behind it, not only up to it: what stands there must not be sent again."""
    uri = f"kafka://{kafka.address}/{topic}"
    sink = open_sink(uri)
    sink.write("a", 0, 1, release("a", 0, 1))
    other = Producer(
        {
            "bootstrap.servers": kafka.address,
            "transactional.id": f"open-{topic}",
            "transaction.timeout.ms": 2000,
            "log_level": 0,
        }
    )
    other.init_transactions(30)
    other.begin_transaction()
    other.produce(f"{topic}.releases", b"{}", b'["other", 0, 1]')
    other.flush(30)
    sink.write("a", 0, 2, release("a", 0, 2))
    sink.close()
    again = open_sink(uri)
    for trigger in (1, 2):
        again.write("a", 0, trigger, release("a", 0, trigger))
    again.close()

    assert len(tools.committed(kafka, topic)) == 6


def test_a_topic_that_is_missing(kafka):
    """A clear error; topics are not made behind the operator's back, but for the index."""
    with pytest.raises(InvalidInput, match="no topic 'nowhere'; create it"):
        open_sink(f"kafka://{kafka.address}/nowhere").fence("a", "run")
    with pytest.raises(InvalidInput, match="no topic 'nowhere'; create it"):
        open_sink(f"kafka://{kafka.address}/nowhere").check("a", release("a", 0, 1).schema)
