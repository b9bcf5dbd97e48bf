"""A Kafka topic, read by Spark's own connector from a real broker."""

import doctest
import json
import signal
from dataclasses import replace

import pytest

from dpstream.engines.spark import SparkEngine
from dpstream.errors import InvalidInput, InvalidParameter
from tests.cli.test_docs import LOOSE, ROOT
from tests.servers import kafka_tools as tools
from tests.support.kill_and_replay import FailAtCall, kill_and_replay, make_folder
from tests.support.runs import SHORT, group_by, published, start, table
from tests.support.servers import KafkaServer

pytestmark = [pytest.mark.spark, pytest.mark.kafka_on_spark, pytest.mark.timeout(600)]

PARTITIONS = 2
SCHEMA = "user STRING, page STRING, at LONG, came LONG, seconds LONG"


@pytest.fixture(scope="module")
def kafka(tmp_path_factory):
    server = KafkaServer(tmp_path_factory.mktemp("kafka"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def topic(kafka):
    """The rows of the other tests as JSON, with messages among them that are none."""
    name = tools.make_topic(kafka, PARTITIONS)
    rows = table().to_pylist()
    for number in range(PARTITIONS):
        mine = rows[number::PARTITIONS]
        half = len(mine) // 2
        tools.send(kafka, name, [*mine[:half], b'{"user": "half a', *mine[half:]], partition=number)
    return name


@pytest.fixture
def engine(session):
    return SparkEngine(session, buckets=2, steps_at_once=3)


def stream(session, kafka, topic, at_once=400):
    """The topic's rows, so many messages in a batch."""
    messages = (
        session.readStream.format("kafka")
        .option("kafka.bootstrap.servers", kafka.address)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", at_once)
        .load()
    )
    parsed = messages.selectExpr(f"from_json(CAST(value AS STRING), '{SCHEMA}') AS row")
    return parsed.select("row.*")


def embedded(place, kafka, topic):
    """What the embedded engine publishes from the same topic, with its own connector."""
    ends = ",".join(f"{n}:{len(table()) // PARTITIONS + 1}" for n in range(PARTITIONS))
    start(place, SHORT, source=f"kafka://{kafka.address}/{topic}?until={ends}").finish()
    return published(place)


def letters(place):
    paths = sorted((place / "state" / "dead-letters").iterdir())
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def runs(session, engine, kafka, topic):
    """Runs on Spark over the topic."""
    return replace(
        group_by(SHORT),
        prepare=make_folder,
        start=lambda place: start(
            place, SHORT, source=stream(session, kafka, topic), engine=engine
        ),
    )


def test_a_topic_gives_the_releases_of_the_embedded_engine(session, engine, kafka, topic, tmp_path):
    """Broken off before Spark knows that a batch is taken in; the broker is restarted as well."""
    from dpstream.engines.spark.bucket_files import DriverProgress

    expected = embedded(tmp_path / "embedded", kafka, topic)
    after = kill_and_replay(
        runs(session, engine, kafka, topic),
        tmp_path / "spark",
        FailAtCall(DriverProgress, "save", after=True),
        damage=lambda place: kafka.restart(),
    )

    assert len(expected) > 5
    assert after.statuses == [-signal.SIGKILL]
    assert after.published == expected
    assert after.charges == 1
    assert len(letters(after.place)) == len(letters(tmp_path / "embedded")) == PARTITIONS


def test_messages_that_retention_took_are_an_error(session, engine, kafka, topic, tmp_path):
    """Spark's connector finds out, and nothing is published from what is left."""
    from dpstream.engines.spark.bucket_files import DriverProgress

    kind, kill = runs(session, engine, kafka, topic), FailAtCall(DriverProgress, "save", after=True)
    assert kill.strike(kind, tmp_path)
    tools.remove_all(kafka, topic)

    with pytest.raises(Exception, match=r"(?i)data ?loss|out of range|offset"):
        kind.finish(tmp_path)
    assert not list((tmp_path / "out").glob("*.parquet"))


def address(kafka, topic, more=""):
    ends = ",".join(f"{n}:{len(table()) // PARTITIONS + 1}" for n in range(PARTITIONS))
    return f"kafka://{kafka.address}/{topic}?until={ends}{more}"


def by_address(engine, kafka, topic):
    """Runs on Spark over the topic's address."""
    source = address(kafka, topic)
    return replace(
        group_by(SHORT),
        prepare=make_folder,
        start=lambda place: start(place, SHORT, source=source, engine=engine),
    )


def test_an_address_gives_the_releases_of_the_embedded_engine(engine, kafka, topic, tmp_path):
    """Killed before Spark knows that the topic is read; poison has its place in the letters."""
    from dpstream.engines.spark.bucket_files import DriverProgress

    expected = embedded(tmp_path / "embedded", kafka, topic)
    after = kill_and_replay(
        by_address(engine, kafka, topic),
        tmp_path / "spark",
        FailAtCall(DriverProgress, "save"),
        damage=lambda place: kafka.restart(),
    )

    assert len(expected) > 5
    assert after.statuses == [-signal.SIGKILL]
    assert after.published == expected
    assert after.charges == 1
    shown = [[(each["where"], each["reason"]) for each in letters(place)] for place in
             (after.place, tmp_path / "embedded")]  # fmt: skip
    assert sorted(shown[0]) == sorted(shown[1])
    assert len(shown[0]) == PARTITIONS


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("&registry=http://127.0.0.1:9", "registry is for the embedded engine; on Spark the form"),
        ("&format=debezium-json", "format=debezium-json is for the embedded engine"),
        ("&start=latest", "start=latest and until leave nothing to read on Spark"),
        ("&untill=3", "did you mean 'until'"),
    ],
)
def test_what_an_address_cannot_say_on_spark(engine, kafka, topic, tmp_path, more, words):
    """Each is refused before anything is charged."""
    with pytest.raises(InvalidParameter, match=words):
        start(tmp_path, SHORT, source=address(kafka, topic, more), engine=engine)
    assert not (tmp_path / "state").exists()


def test_an_end_that_has_not_come_is_refused(engine, kafka, topic, tmp_path):
    """Spark would wait for it, and fail."""
    with pytest.raises(InvalidInput, match=r"ends at offset .*, before until=99999"):
        start(tmp_path, SHORT, source=f"kafka://{kafka.address}/{topic}?until=99999", engine=engine)


def test_the_page_shows_what_happens(session, kafka, tmp_path, monkeypatch):
    """Every `>>>` of the how-to, in an empty folder, with the address of this broker."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "howto" / "kafka-on-spark.md").read_text()
    text = page.replace("127.0.0.1:9092", kafka.address)
    runner = doctest.DocTestRunner(optionflags=LOOSE)
    found = runner.run(doctest.DocTestParser().get_doctest(text, {}, "page", None, 0))

    assert (found.failed, found.attempted) == (0, page.count(">>> "))
