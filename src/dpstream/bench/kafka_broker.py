"""A real Kafka broker on loopback, for tests and benches: one process, KRaft mode, small heap.

Its jars are put into .cache/kafka by `.ci/servers`; DPSTREAM_KAFKA_JARS names another place.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from dpstream.errors import MissingDependency, StateError

_JAVA = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m", "-Xms64m")
_LOG = ("-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",)
_CLUSTER = "ZHBzdHJlYW0tdGVzdHMtMA"  # any 16 bytes
_ANSWERS_WITHIN = 60.0


def jars() -> Path:
    """The folder of the server's jars."""
    return Path(os.environ.get("DPSTREAM_KAFKA_JARS", ".cache/kafka")).resolve()


def absence() -> str | None:
    """Why no broker can be started here; None if one can."""
    if shutil.which("java") is None:
        return "no program java on PATH"
    if not list(jars().glob("kafka_*.jar")):
        return f"no Kafka server in {jars()}; run .ci/servers"
    return None


class KafkaBroker:
    """A broker that keeps its data and its port when it is stopped and started again.

    `settings`: further server properties. `listeners` may replace the plain one, for TLS.
    """

    def __init__(self, folder: Path, *, settings: dict[str, str] | None = None) -> None:
        reason = absence()
        if reason is not None:
            raise MissingDependency(f"no Kafka broker can be started: {reason}")
        self._folder = folder
        self._port, controller = _free_ports(2)
        self.address = f"127.0.0.1:{self._port}"
        folder.mkdir(parents=True, exist_ok=True)
        properties = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "listeners": f"PLAINTEXT://{self.address},CONTROLLER://127.0.0.1:{controller}",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": str(folder / "data"),
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "1",
            "auto.create.topics.enable": "false",
            "num.network.threads": "2",
            "num.io.threads": "2",
            "broker.session.timeout.ms": "2000",  # a killed one may register again after this
            "broker.heartbeat.interval.ms": "200",
            "controller.quorum.election.timeout.ms": "300",
            "controller.quorum.fetch.timeout.ms": "600",
            "log.cleaner.dedupe.buffer.size": "4194304",
            "log.retention.check.interval.ms": "500",
            "log.segment.delete.delay.ms": "100",
            "log.initial.task.delay.ms": "500",
        } | (settings or {})
        lines = [f"{name}={value}" for name, value in properties.items()]
        self._config = folder / "server.properties"
        self._config.write_text("\n".join([*lines, ""]))
        self._process: subprocess.Popen[bytes] | None = None
        self._java("kafka.tools.StorageTool", "format", "-t", _CLUSTER, "-c").wait()

    def start(self) -> KafkaBroker:
        """Start it; return when it answers."""
        self._process = self._java("kafka.Kafka")
        deadline = time.monotonic() + _ANSWERS_WITHIN
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = (self._folder / "server.log").read_text(errors="replace")[-2000:]
                self.kill()
                raise StateError(f"the Kafka broker did not start: {tail}")
            time.sleep(0.05)
        return self

    def stop(self) -> None:
        """Stop it in an orderly way."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def kill(self) -> None:
        """Stop it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> KafkaBroker:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
        except OSError:
            return False
        return True

    def _java(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = ["java", *_JAVA, *_LOG, "-cp", f"{jars()}/*", *arguments, str(self._config)]
        with (self._folder / "server.log").open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder
            )


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
