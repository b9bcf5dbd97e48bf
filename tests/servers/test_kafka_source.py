"""The Kafka source against a real broker."""

import json
import time

import pyarrow as pa
import pytest

import dpstream as dps
from benchmarks.connector_child import RUN, SECRET
from dpstream.connectors.registry import open_source
from dpstream.connectors.testing import ServerSourceSuite
from dpstream.connectors.testing.suites import Read, all_rows, drain, replay
from dpstream.engines.query_run import EngineOptions
from dpstream.errors import InvalidInput, InvalidParameter, RowsLost
from tests.servers import kafka_tools as tools
from tests.support import processes

pytestmark = pytest.mark.servers


class TestKafkaSource(ServerSourceSuite):
    @pytest.fixture(autouse=True)
    def _topic(self, kafka):
        self.kafka = kafka
        self.topic = tools.make_topic(kafka, 3)

    def open(self, **options):
        return open_source(f"kafka://{self.kafka.address}/{self.topic}", options=options)

    def impatient(self):
        return self.open(patience=0.5)

    def put(self, rows):
        for number in range(3):
            tools.send(self.kafka, self.topic, rows[number::3], partition=number)

    def spoil(self):
        tools.send(self.kafka, self.topic, [b"{oops"], partition=1)

    def lose(self):
        tools.remove_all(self.kafka, self.topic)

    def foreign_positions(self):
        topic = self.open()
        topic.partitions()
        known = topic._topic.id
        topic.close()
        return [17, [known, 0], [known, 5, 2], ["AAAAAAAAAAAAAAAAAAAAAA", 0, 1], {"next": 3}]

    def away(self):
        return self.kafka.away()


@pytest.fixture
def topic(kafka):
    return tools.make_topic(kafka, 1)


def opened(kafka, topic, **options):
    return open_source(f"kafka://{kafka.address}/{topic}", options=options)


def everything(source, count):
    found = {}
    drain(source, found, rows=count)
    return found


def test_gaps_in_the_offsets(kafka, topic):
    """Aborted transactions are never seen; committed ones, with their markers, lose nothing."""
    tools.send(kafka, topic, [{"user": "a"}], commit=True)
    tools.send(kafka, topic, [{"user": "gone"}] * 5, commit=False)
    tools.send(kafka, topic, [{"user": "b"}, {"user": "c"}], commit=True)
    source = opened(kafka, topic)
    read = everything(source, 3)[f"{topic}/0"]
    again = replay(source, f"{topic}/0", None, read.positions[-1])
    source.close()

    assert sorted(json.loads(row)["user"] for row in read.rows()) == ["a", "b", "c"]
    assert again.rows() == read.rows()
    assert read.positions[-1][2] > 3  # a marker and an aborted batch lie between


def where_it_begins(source):
    """What a source that starts at the end has read, once a broker has told it where that is."""
    found = everything(source, 0)
    return found if found and all(read.positions[-1] for read in found.values()) else None


def test_partitions_that_are_added(kafka, topic, monkeypatch):
    """They are found while the stream runs, and read from their first message."""
    monkeypatch.setattr("dpstream.connectors.kafka.client._LOOK_EVERY", 0.2)
    tools.send(kafka, topic, [{"user": "before"}], partition=0)
    source = opened(kafka, topic, start="latest")
    found = processes.until(lambda: where_it_begins(source))
    tools.send(kafka, topic, [{"user": "old place"}], partition=0)
    tools.add_partitions(kafka, topic, 3)
    for number in (1, 2):
        tools.send(kafka, topic, [{"user": f"new place {number}"}], partition=number)
    drain(source, found, rows=3)
    source.close()

    users = sorted(json.loads(row)["user"] for row in all_rows(found))
    assert users == ["new place 1", "new place 2", "old place"]


def test_latest_is_where_the_run_began(kafka, topic):
    """Also for a replay, long after; and a partition added while nobody looked is read whole."""
    tools.send(kafka, topic, [{"user": "before"}] * 3)
    first = opened(kafka, topic, start="latest")
    found = everything(first, 0)
    tools.send(kafka, topic, [{"user": "after"}] * 2)
    drain(first, found, rows=2)
    first.close()
    tools.send(kafka, topic, [{"user": "later"}] * 4)
    tools.add_partitions(kafka, topic, 2)
    tools.send(kafka, topic, [{"user": "new"}], partition=1)
    read = found[f"{topic}/0"]
    second = opened(kafka, topic, start="latest")
    again = replay(second, f"{topic}/0", None, read.positions[-1])
    going_on = {f"{topic}/0": Read(positions=[again.positions[-1]])}
    drain(second, going_on, rows=5)
    second.close()

    assert [json.loads(row)["user"] for row in again.rows().elements()] == ["after"] * 2
    users = sorted(json.loads(row)["user"] for row in all_rows(going_on).elements())
    assert users == ["later"] * 4 + ["new"]


def test_a_topic_that_was_made_again(kafka, topic):
    """Its offsets mean other messages."""
    tools.send(kafka, topic, [{"user": "a"}] * 5)
    source = opened(kafka, topic)
    read = everything(source, 5)[f"{topic}/0"]
    source.close()
    tools.delete_topic(kafka, topic)
    _make_again(kafka, topic)
    tools.send(kafka, topic, [{"user": "b"}] * 9)
    source = opened(kafka, topic)

    for until in (None, read.positions[-1]):
        with pytest.raises(RowsLost, match="made again"):
            source.read(f"{topic}/0", read.positions[1], until=until)
    source.close()


def _make_again(kafka, topic):
    deadline = time.monotonic() + 30
    while True:
        try:
            tools.admin(kafka).create_topics([tools.NewTopic(topic, 1)])[topic].result(30)
            return
        except Exception:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_compaction_that_ate_needed_rows(kafka):
    """A replay looks for the message before its position."""
    topic = tools.make_topic(
        kafka,
        1,
        **{
            "cleanup.policy": "compact",
            "segment.ms": "100",
            "min.cleanable.dirty.ratio": "0.01",
            "min.compaction.lag.ms": "0",
            "delete.retention.ms": "0",
        },
    )
    tools.send(kafka, topic, [{"user": "a"}] * 5, key="k")
    source = opened(kafka, topic)
    read = everything(source, 5)[f"{topic}/0"]
    source.close()
    deadline, words = time.monotonic() + 40, ""
    while not words:  # the cleaner leaves the active segment alone, so it gets new ones
        assert time.monotonic() < deadline, "the broker does not compact"
        time.sleep(0.3)
        tools.send(kafka, topic, [{"user": "b"}], key="k")
        source = opened(kafka, topic)
        try:
            replay(source, f"{topic}/0", None, read.positions[-1])
        except RowsLost as error:
            words = str(error)
        source.close()

    assert "compacted" in words


def test_messages_that_were_gone_before_the_first_read(kafka, topic, caplog):
    """The operator is told how many, once; a run that goes on, or begins at the end, is not."""
    tools.send(kafka, topic, [{"user": "a"}] * 5)
    for start in ("earliest", "latest"):
        source = opened(kafka, topic, start=start)
        source.partitions()
        source.read(f"{topic}/0", None)
        source.close()
    assert caplog.messages == []
    tools.remove_all(kafka, topic)
    tools.send(kafka, topic, [{"user": "b"}])
    source = opened(kafka, topic)
    read = everything(source, 1)[f"{topic}/0"]
    assert not source.read(f"{topic}/0", read.positions[-1]).table.num_rows
    source.close()

    (words,) = caplog.messages
    assert words.startswith(f"kafka://{kafka.address}/{topic}, partition 0 begins at offset 5: ")
    assert "what was at the 5 offsets before was removed" in words


def test_marks_of_transactions_are_not_unread_messages(kafka, topic):
    """At its end nothing is left, though offsets follow; what is aborted is none either."""
    tools.send(kafka, topic, [{"user": "a"}] * 3, commit=True)
    source = opened(kafka, topic)
    read = everything(source, 3)[f"{topic}/0"]
    places = [{f"{topic}/0": at} for at in (read.positions[-1], [*read.positions[-1][:2], 1])]
    processes.until(lambda: source.behind(places[0]) == {f"{topic}/0": 0})
    assert source.behind(places[1]) == {f"{topic}/0": 3}  # two messages and the mark
    assert source.behind({f"{topic}/0": None}) == {}
    source.close()


def test_messages_of_every_format(kafka):
    """JSON, CSV and Arrow give the same rows; tombstones and oversize messages are set aside."""
    rows = [{"user": "a", "n": "1"}, {"user": 'b, "x"', "n": "2.5"}]
    stream = pa.BufferOutputStream()
    table = pa.table({"user": ["a", 'b, "x"'], "n": [1.0, 2.5]})
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    payloads = {
        "json": [json.dumps(row) for row in rows],
        "csv": ["a,1", '"b, ""x""",2.5'],
        "arrow": [stream.getvalue().to_pybytes()],
    }
    for kind, values in payloads.items():
        topic = tools.make_topic(kafka, 1)
        tools.send(kafka, topic, [*values, None, b"x" * 3000])
        options = {"format": kind, "max_message_bytes": 2000}
        options |= {"header": "user,n"} if kind == "csv" else {}
        source = opened(kafka, topic, **options)
        read = everything(source, 2)[f"{topic}/0"]
        source.close()

        assert sorted(json.loads(row)["user"] for row in read.rows()) == ["a", 'b, "x"']
        reasons = [one.reason for one in read.rejected()]
        assert reasons == [
            "it has no value (a tombstone)",
            "it has 3000 bytes, more than max_message_bytes=2000",
        ]
        assert [one.where for one in read.rejected()] == [
            f"{topic}/0, offset {len(values) + i}" for i in (0, 1)
        ]


def test_time_and_key_of_a_message(kafka):
    """As columns, if they are asked for."""
    topic = tools.make_topic(kafka, 1, **{"retention.ms": "-1"})  # the messages are old
    tools.send(kafka, topic, [{"user": "a"}, b"oops", {"user": "b"}], key="k", timestamp=1234)
    source = opened(kafka, topic, timestamp_column="sent", key_column="key")
    read = everything(source, 2)[f"{topic}/0"]
    few = source.read(f"{topic}/0", None, columns=["key"], until=read.positions[-1])
    source.close()

    rows = [row for batch in read.batches for row in batch.table.to_pylist()]
    sent = "1970-01-01 00:00:01.234Z"
    assert rows == [{"user": user, "sent": sent, "key": "k"} for user in "ab"]
    assert few.table.column_names == ["key"]


def test_what_is_not_there(kafka, topic):
    """A clear error, at once."""
    with pytest.raises(InvalidInput, match="no topic 'nowhere'"):
        opened(kafka, "nowhere").partitions()
    source = opened(kafka, topic)
    with pytest.raises(InvalidInput, match="has no partition"):
        source.read(f"{topic}/7", None)
    source.close()
    with pytest.raises(InvalidParameter, match="did you mean 'format'"):
        opened(kafka, topic, formt="csv")
    with pytest.raises(InvalidParameter, match="header names the columns of CSV"):
        opened(kafka, topic, format="json", header="a,b")


def test_until_an_offset(kafka):
    """A bounded source: it ends there, also behind a gap, and is read by event time like a file."""
    topic = tools.make_topic(kafka, 2)
    for partition, count in ((0, 70), (1, 40)):
        rows = [{"user": f"{partition} {n}", "page": "/"} for n in range(count)]
        tools.send(kafka, topic, rows, partition=partition, commit=True)
    query = dps.Query(
        privacy_unit_column="user",
        keys=["page"],
        public_groups=["/"],
        epsilon=20,
        delta=1e-9,
        max_groups_contributed=1,
    )
    more, counts = [{"user": f"{n}", "page": "/"} for n in range(30)], {}
    for until in ("60", "0:71,1:41", "1:30"):
        uri = f"kafka://{kafka.address}/{topic}?until={until}"
        if until == "60":  # partition 1 does not come that far: wait for it
            tools.send(kafka, topic, more, partition=1)
        (release,) = dps.run(query, source=uri, secret=SECRET, options=EngineOptions(run_id=RUN))
        counts[until] = round(release["count"][0].as_py())

    assert [abs(counts["60"] - 119) < 5, abs(counts["0:71,1:41"] - 110) < 5] == [True, True]
    assert abs(counts["1:30"] - 30) < 5
    with pytest.raises(InvalidParameter, match="until must be an offset"):
        opened(kafka, topic, until="x:3")
