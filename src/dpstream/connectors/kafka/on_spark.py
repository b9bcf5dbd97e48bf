"""A Kafka topic as `kafka://...` names it, read by Spark's own connector.

Spark reads the messages, by offsets in its own checkpoint; a task makes rows of them as the
connector of the embedded engine does, so both publish the same, and both set the same messages
aside.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dpstream.connectors.messages import FORMATS, Decoder, decoder_from
from dpstream.connectors.server_base import ServerOptions
from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.records import Batch, Columns

_COLUMNS = ("value", "partition", "offset", "timestamp", "timestampType", "key")
_REFUSED = ("registry", "changes", "config_file", "cert_file", "key_file")
_LOGIN = {"PLAIN": "plain.PlainLoginModule"}
_SCRAM = "scram.ScramLoginModule"
_LATER = "it waits for no messages; leave until out, or name offsets that are there"


@dataclass(frozen=True, kw_only=True)
class TopicOnSpark:
    """What Spark reads of a topic, and how its messages become rows: as `KafkaSource` does it."""

    where: str
    topic: str
    bounded: bool
    options: Mapping[str, str] = field(repr=False)
    """For Spark's reader."""
    decoder: Decoder = field(repr=False)
    added: Mapping[str, str]
    """Columns that are a message's own time or key, by name."""
    format: str = "kafka"
    columns: tuple[str, ...] = _COLUMNS
    """Of a message, that are read."""

    def batch(self, read: pa.Table, columns: Columns) -> Batch:
        """The rows of some messages, and what is none."""
        payloads = read["value"].to_pylist()
        inside = None if columns is None else [name for name in columns if name not in self.added]
        decoded = self.decoder.decode(payloads, inside)
        arrays = {name: decoded.table[name] for name in decoded.table.column_names}
        for name, kind in self.added.items():
            if columns is not None and name not in columns:
                continue
            if name in arrays:
                raise InvalidParameter(
                    f"the messages of {self.topic} have a column {name!r} of their own; choose "
                    f"another {kind}_column"
                )
            arrays[name] = _own_column(read, kind).take(pa.array(decoded.origin))
        table = pa.table(arrays)
        partitions, offsets = read["partition"].to_pylist(), read["offset"].to_pylist()
        return Batch(
            table=table if columns is None else table.select(list(columns)),
            position=None,
            done=True,
            rejected=decoded.rejected(
                payloads, lambda at: f"{self.topic}/{partitions[at]}, offset {offsets[at]}"
            ),
        )


def _own_column(read: pa.Table, kind: str) -> pa.ChunkedArray:
    """Each message's own time or key, as text; null if it has none."""
    if kind == "timestamp":
        known = pc.greater_equal(read["timestampType"], 0)
        times = pc.if_else(known, read["timestamp"], pa.scalar(None, read["timestamp"].type))
        return times.cast(pa.timestamp("ms", "UTC")).cast(pa.string())
    keys = read["key"].to_pylist()
    texts = [None if key is None else key.decode(errors="replace") for key in keys]
    return pa.chunked_array([pa.array(texts, pa.string())])


def topic_on_spark(address: str) -> TopicOnSpark:
    """What Spark reads for kafka://HOST:PORT/TOPIC?...; with `until` it is bounded, else a stream.

    The connector of the embedded engine opens the topic once, to check the options, the topic and
    the credentials.
    """
    from dpstream.connectors.kafka.client import client_settings
    from dpstream.connectors.kafka.source import KafkaSource

    _refuse_what_needs_one_process(ServerOptions(address))
    options, again = ServerOptions(address), ServerOptions(address)
    source = KafkaSource(options)
    try:
        options.finish()
        source.partitions()
        ends = source.ends()
    finally:
        source.close()
    settings = java_settings(client_settings(again), again.where)
    latest = again.starts_latest()
    places = {"subscribe": again.path, "startingOffsets": "latest" if latest else "earliest"}
    if source.bounded:
        places = _places(again, ends, latest=latest)
    added = {again.text(f"{kind}_column"): kind for kind in ("timestamp", "key")}
    return TopicOnSpark(
        where=again.where,
        topic=again.path,
        bounded=source.bounded,
        options={f"kafka.{name}": value for name, value in settings.items()} | places,
        decoder=decoder_from(again),
        added={name: kind for name, kind in added.items() if name is not None},
    )


def _places(
    options: ServerOptions, ends: Mapping[int, tuple[int, int]], *, latest: bool
) -> dict[str, str]:
    """The partitions of a bounded source, and the offsets between which they are read."""
    if latest:
        raise InvalidParameter(
            f"{options.where}: start=latest and until leave nothing to read on Spark; {_LATER}"
        )
    for number, (end, there) in ends.items():
        if there < end:
            raise InvalidInput(
                f"{options.where}, partition {number} ends at offset {there}, before until={end}; "
                f"on Spark {_LATER}"
            )
    of_partitions = {str(number): end for number, (end, _) in ends.items()}
    return {
        "assign": json.dumps({options.path: sorted(ends)}),
        "startingOffsets": "earliest",
        "endingOffsets": json.dumps({options.path: of_partitions}),
    }


def _refuse_what_needs_one_process(options: ServerOptions) -> None:
    """What a task cannot do alone: ask a registry, or know which changes came before."""
    refused = [name for name in _REFUSED if name in options.names]
    kind = options.text("format", "json")
    if refused or kind not in FORMATS:
        raise InvalidParameter(
            f"{options.where}: {', '.join(refused) or f'format={kind}'} is for the embedded "
            f"engine; on Spark the format is {', '.join(FORMATS)}; or give the engine a stream of "
            "its own (docs/howto/kafka-on-spark.md)"
        )


def java_settings(settings: Mapping[str, Any], where: str) -> dict[str, str]:
    """Settings of librdkafka as those of Kafka's Java client; only committed messages are read.

    >>> given = {"bootstrap.servers": "h:9092", "security.protocol": "sasl_plaintext"}
    >>> given |= {"sasl.mechanism": "PLAIN", "sasl.username": "ana", "sasl.password": "word"}
    >>> java = java_settings(given, "kafka://h:9092/clicks")
    >>> java["security.protocol"], java["sasl.jaas.config"].partition(" ")[2]
    ('SASL_PLAINTEXT', 'required username="ana" password="word";')
    """
    java = {
        "bootstrap.servers": settings["bootstrap.servers"],
        "isolation.level": "read_committed",
        "security.protocol": str(settings["security.protocol"]).upper(),
    }
    mechanism = settings.get("sasl.mechanism")
    if mechanism is not None:
        user, password = (
            _quoted(settings.get(f"sasl.{name}", "")) for name in ("username", "password")
        )
        module = _LOGIN.get(mechanism, _SCRAM)
        java["sasl.mechanism"] = mechanism
        java["sasl.jaas.config"] = (
            f"org.apache.kafka.common.security.{module} required username={user} "
            f"password={password};"
        )
    if (trusted := settings.get("ssl.ca.location")) is not None:
        java["ssl.truststore.type"] = "PEM"
        java["ssl.truststore.certificates"] = ServerOptions(where).file(trusted, "ca_file")
    return java


def _quoted(text: str) -> str:
    """A value of JAAS's configuration."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
