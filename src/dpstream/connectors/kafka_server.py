"""A real Kafka broker for tests, examples and benches: one process, KRaft mode, small heap.

Its jars are put into .cache/kafka by `.ci/servers`; DPSTREAM_KAFKA_JARS names another place.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dpstream.connectors.servers import Server, free_port
from dpstream.errors import MissingDependency, StateError

_JAVA = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m", "-Xms64m")
_LOG = ("-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",)
_CLASSES = "classes.jsa"  # loaded classes, kept beside the jars by keep_classes
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
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "300",
    "log.initial.task.delay.ms": "500",
    "log.retention.check.interval.ms": "300",
    "log.segment.delete.delay.ms": "100",
    # small
    "log.cleaner.dedupe.buffer.size": "4194304",
    "num.network.threads": "2",
    "num.io.threads": "2",
}


class KafkaServer(Server):
    """A broker and controller in one.

    With `password` it also listens with TLS, at `secure_address`, for the user `dpstream`; its
    certificate and that password are in the files `certificate` and `password`.
    """

    name = "Kafka"

    def __init__(self, folder: Path, *, password: str | None = None) -> None:
        self._password = password
        self.secure_address = f"127.0.0.1:{free_port()}"
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
        }
        if self._password is not None:
            properties["listeners"] += f",SECURE://{self.secure_address}"
            properties |= self._secured(self._password)
        lines = [f"{name}={value}" for name, value in properties.items()]
        path = self.folder / "server.properties"
        path.write_text("\n".join([*lines, ""]))
        path.chmod(0o600)
        words = self._java("kafka.tools.StorageTool", "format", "-t", _CLUSTER, "-c")
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            raise StateError(f"Kafka's storage cannot be formatted: {done.stderr[-2000:]}")

    def command(self) -> Sequence[str | Path]:
        """On loopback alone."""
        return self._java("kafka.Kafka")

    @property
    def certificate(self) -> Path:
        """What a client has to trust."""
        return self.folder / "certificate"

    @property
    def password_file(self) -> Path:
        """The password alone."""
        return self.folder / "password"

    def _secured(self, password: str) -> dict[str, str]:
        """The properties of the second listener."""
        key, certificate = _self_signed()
        self.certificate.write_text(certificate)
        self.password_file.write_text(f"{password}\n")
        self.password_file.chmod(0o600)
        login = "org.apache.kafka.common.security.plain.PlainLoginModule"
        protocols = "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURE:SASL_SSL"
        own = {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.key": key.replace("\n", "\\n"),
            "ssl.keystore.certificate.chain": certificate.replace("\n", "\\n"),
            "sasl.enabled.mechanisms": "PLAIN",
            "plain.sasl.jaas.config": f'{login} required user_dpstream="{password}";',
        }
        named = {f"listener.name.secure.{name}": value for name, value in own.items()}
        return {"listener.security.protocol.map": protocols, **named}

    def _java(self, *words: str) -> list[str]:
        properties = str(self.folder / "server.properties")
        return ["java", *_JAVA, *self._sharing(), *_LOG, "-cp", f"{_jars()}/*", *words, properties]

    def _sharing(self) -> list[str]:
        """Java passes over an archive that is not of these very jars."""
        kept = _jars() / _CLASSES
        return [f"-XX:SharedArchiveFile={kept}"] if kept.exists() else []


class _Learning(KafkaServer):
    """Writes the classes that it has loaded when it ends."""

    def command(self) -> Sequence[str | Path]:
        """As ever, with one word more."""
        first, *rest = super().command()
        return [first, f"-XX:ArchiveClassesAtExit={_jars() / _CLASSES}.new", *rest]

    def stop(self) -> None:
        """End it in an orderly way, and wait until all is written."""
        self._end(signal.SIGTERM)


def keep_classes() -> None:
    """Start a broker once and keep what Java has loaded: later starts take half the time."""
    kept = _jars() / _CLASSES
    if kept.exists():
        return
    with tempfile.TemporaryDirectory(prefix="dpstream-kafka-") as folder:
        server = _Learning(Path(folder) / "kafka")
        server.start()
        server.stop()
    kept.with_name(f"{_CLASSES}.new").replace(kept)


def _self_signed() -> tuple[str, str]:
    """A key and a certificate of 127.0.0.1, as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    address = x509.IPAddress(ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=7))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    kept = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return kept.decode(), certificate.public_bytes(serialization.Encoding.PEM).decode()


def _jars() -> Path:
    return Path(os.environ.get("DPSTREAM_KAFKA_JARS", ".cache/kafka")).resolve()
