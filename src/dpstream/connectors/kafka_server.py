"""A real Kafka broker for tests, examples and benches: one process, KRaft mode, small heap.

Its jars are put into .cache/kafka by `.ci/servers`; DPSTREAM_KAFKA_JARS names another place.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from dpstream.connectors.servers import Server, free_port
from dpstream.errors import MissingDependency, StateError

_JAVA = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m", "-Xms64m")
_LOG = ("-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",)
_CLUSTER = "ZHBzdHJlYW0tdGVzdHMtMA"  # any 16 bytes
_SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "auto.create.topics.enable": "false",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "1",
    # quick to start again after a kill, and to remove what is over its time
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "200",
    "controller.quorum.election.timeout.ms": "300",
    "controller.quorum.fetch.timeout.ms": "600",
    "log.initial.task.delay.ms": "500",
    "log.retention.check.interval.ms": "300",
    "log.segment.delete.delay.ms": "100",
    # small
    "log.cleaner.dedupe.buffer.size": "4194304",
    "num.network.threads": "2",
    "num.io.threads": "2",
}


class KafkaServer(Server):
    """A broker and controller in one; `settings` are further properties of the server."""

    name = "Kafka"

    def __init__(self, folder: Path, *, settings: Mapping[str, str] | None = None) -> None:
        self._settings = settings or {}
        super().__init__(folder)

    @staticmethod
    def absent() -> str | None:
        """It needs Java and its jars."""
        if shutil.which("java") is None:
            return "no program java on PATH; install a Java 17"
        if not list(_jars().glob("kafka_*.jar")):
            return f"no Kafka server in {_jars()}; run .ci/servers"
        return None

    @property
    def address(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self.port}"

    def prepare(self) -> None:
        """Write its properties and format its storage."""
        reason = self.absent()
        if reason is not None:
            raise MissingDependency(f"no Kafka broker can be started: {reason}")
        controller = f"127.0.0.1:{free_port()}"
        properties = {
            "controller.quorum.voters": f"1@{controller}",
            "listeners": f"PLAINTEXT://{self.address},CONTROLLER://{controller}",
            "log.dirs": str(self.folder / "data"),
            **_SETTINGS,
            **self._settings,
        }
        lines = [f"{name}={value}" for name, value in properties.items()]
        (self.folder / "server.properties").write_text("\n".join([*lines, ""]))
        words = self._java("kafka.tools.StorageTool", "format", "-t", _CLUSTER, "-c")
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            raise StateError(f"Kafka's storage cannot be formatted: {done.stderr[-2000:]}")

    def command(self) -> Sequence[str | Path]:
        """On loopback alone."""
        return self._java("kafka.Kafka")

    def shut_down(self) -> None:
        """End it in an orderly way, as an operator does."""
        self._end(signal.SIGTERM)

    def _java(self, *words: str) -> list[str]:
        properties = str(self.folder / "server.properties")
        return ["java", *_JAVA, *_LOG, "-cp", f"{_jars()}/*", *words, properties]


def _jars() -> Path:
    return Path(os.environ.get("DPSTREAM_KAFKA_JARS", ".cache/kafka")).resolve()
