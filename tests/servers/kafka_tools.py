"""What tests do to a Kafka broker: topics, messages, and what a consumer sees."""

import functools
import itertools
import json

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from tests.support.processes import until

_NAMES = itertools.count()


@functools.cache
def admin(kafka):
    """Kept: answers do not outlive their client. Of a broker that was killed it says nothing."""
    return AdminClient({"bootstrap.servers": kafka.address, "log_level": 0})


def make_topic(kafka, partitions=2, **config):
    """A topic that no other test has."""
    name = f"topic-{next(_NAMES)}"
    admin(kafka).create_topics([NewTopic(name, partitions, config=config)])[name].result(30)
    until(lambda: name in admin(kafka).list_topics(timeout=30).topics)  # a broker learns it later
    return name


def add_partitions(kafka, topic, total):
    admin(kafka).create_partitions([NewPartitions(topic, total)])[topic].result(30)


def delete_topic(kafka, topic):
    admin(kafka).delete_topics([topic])[topic].result(30)


def remove_all(kafka, topic):
    """What retention does: the first offset moves to the end."""
    about = admin(kafka).list_topics(topic, timeout=30).topics[topic]
    places = [TopicPartition(topic, number, -1) for number in about.partitions]
    for told in admin(kafka).delete_records(places).values():
        told.result(30)


def send(kafka, topic, values, *, partition=None, key=None, commit=None, timestamp=0):
    """Messages; `commit`: in a transaction that is committed, or aborted."""
    settings = {"bootstrap.servers": kafka.address}
    settings["message.timeout.ms"] = 100_000 if commit is None else 30_000
    if commit is not None:
        settings["transactional.id"] = f"test-{topic}-{next(_NAMES)}"
    producer, problems = Producer(settings), []
    if commit is not None:
        producer.init_transactions(30)
        producer.begin_transaction()
    for number, value in enumerate(values):
        value = json.dumps(value) if isinstance(value, dict) else value
        place = number if partition is None else partition
        producer.produce(
            topic,
            value,
            key,
            partition=place if partition is not None else -1,
            timestamp=timestamp,
            on_delivery=lambda error, _: problems.append(error) if error else None,
        )
    if commit is None:
        assert producer.flush(100) == 0
    elif commit:
        producer.commit_transaction(30)
    else:
        producer.flush(30)
        producer.abort_transaction(30)
    assert not problems, problems


def committed(kafka, topic):
    """Every message that a consumer of committed messages sees: (key, value, headers)."""
    consumer = Consumer(
        {
            "bootstrap.servers": kafka.address,
            "group.id": "reader",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
        }
    )
    numbers = consumer.list_topics(topic, timeout=30).topics[topic].partitions
    consumer.assign([TopicPartition(topic, number, 0) for number in numbers])
    found, left = [], set(numbers)
    while left:
        for message in consumer.consume(1000, 0.2):
            if message.error() is None:
                found.append((message.key(), message.value(), dict(message.headers() or [])))
            elif message.error().code() == KafkaError._PARTITION_EOF:
                left.discard(message.partition())
    consumer.close()
    return found
