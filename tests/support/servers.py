"""Real servers for tests and benchmarks: in a folder of their own, on loopback ports.

They are the programs of the system's packages. A server can be killed at any moment and started
again on what it left; `stop` ends it, and its folder is the caller's to remove.

Kafka is one process in KRaft mode with a small heap. Its jars are put into .cache/kafka by
`.ci/servers`; DPSTREAM_KAFKA_JARS names another place.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import itertools
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dpstream.errors import MissingDependency, StateError

_PATIENCE = 120.0  # seconds for a start: a broker on a busy machine takes long


class Server:
    """One server process and its children; `port` stays the same over restarts."""

    name = "server"
    user: str | None = None
    """Whom it runs as, if that is not who starts it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.prepare()

    @staticmethod
    def absent() -> str | None:
        """Why it cannot be started here; None if it can."""
        raise AssertionError("a server says what it needs")

    def prepare(self) -> None:
        """Make what the server needs before its first start."""

    def command(self) -> Sequence[str | Path]:
        """What runs the server in the foreground."""
        raise AssertionError("a server says how")

    def answers(self) -> bool:
        """Is it ready for work?"""
        return listens(self.port)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        end = time.monotonic() + _PATIENCE
        while True:
            with (self.folder / "server.log").open("ab") as log:
                self._process = subprocess.Popen(
                    [os.fspath(word) for word in self.command()],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True, cwd=self.folder, **self._as_user(),
                )  # fmt: skip
            while self._process.poll() is None and time.monotonic() < end:
                if self.answers():
                    return
                time.sleep(0.02)
            self.kill()  # a predecessor that was killed may still hold its memory: once more
            if time.monotonic() > end:
                raise StateError(f"{self.name} does not start: {self.log()[-2000:]}")
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL to it and all its children."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Kill it and start it again on what it has."""
        self.kill()
        self.start()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Killed; it is back after the `with`."""
        self.kill()
        try:
            yield
        finally:
            self.start()

    def stop(self) -> None:
        """End it."""
        self._end(signal.SIGKILL)

    def log(self) -> str:
        """What it has written."""
        path = self.folder / "server.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _end(self, number: int) -> None:
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        self._process.wait()
        self._process = None

    def _as_user(self) -> dict[str, Any]:
        if self.user is None or os.geteuid() != 0:
            return {}
        return {"user": self.user, "group": pwd.getpwnam(self.user).pw_gid, "extra_groups": []}


class PostgresServer(Server):
    """PostgreSQL with the user `dpstream`, its password in `pgpass`, and the database `postgres`.

    `durable`: a commit is on the disk before it is answered. Without, it survives the death of the
    server but not that of the machine.
    """

    name, user = "PostgreSQL", "postgres"

    def __init__(self, folder: Path, *, password: str, durable: bool = False) -> None:
        self._password, self._durable = password, durable
        super().__init__(folder)

    @staticmethod
    def absent() -> str | None:
        """It needs the programs of a PostgreSQL package."""
        return None if _postgres("postgres") else "no program postgres; install PostgreSQL"

    @property
    def passfile(self) -> Path:
        """The file that PGPASSFILE is to name."""
        return self.folder / "pgpass"

    @property
    def address(self) -> str:
        """Its URI, without the password."""
        return f"postgres://dpstream@127.0.0.1:{self.port}/postgres"

    def prepare(self) -> None:
        """Make a cluster whose users need their password."""
        given = self.folder / "password"
        given.write_text(self._password + "\n")
        self.passfile.write_text(f"127.0.0.1:*:*:dpstream:{self._password}\n")
        self.passfile.chmod(0o600)
        if self._as_user():
            owner = pwd.getpwnam("postgres")
            for path in (self.folder, given):
                os.chown(path, owner.pw_uid, owner.pw_gid)
        flags = ["--auth=scram-sha-256", "--username=dpstream", f"--pwfile={given}", "--no-sync"]
        done = subprocess.run(
            [_found("initdb"), *flags, "--encoding=UTF8", "--locale=C.UTF-8",
             f"--pgdata={self.folder / 'data'}"],
            capture_output=True, text=True, cwd=self.folder, **self._as_user(),
        )  # fmt: skip
        given.unlink()
        if done.returncode:
            raise StateError(f"initdb failed: {done.stderr[-2000:]}")

    def command(self) -> Sequence[str | Path]:
        """On loopback alone."""
        settings = ["listen_addresses=127.0.0.1", f"unix_socket_directories={self.folder}",
                    f"fsync={'on' if self._durable else 'off'}", "max_connections=40",
                    "shared_buffers=64MB", "max_prepared_transactions=4", "wal_level=logical",
                    "max_replication_slots=40", "max_wal_senders=40"]  # fmt: skip
        words = [word for setting in settings for word in ("-c", setting)]
        return [_found("postgres"), "-D", self.folder / "data", "-p", str(self.port), *words]

    def answers(self) -> bool:
        """Does it take connections?"""
        words = [_found("pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        return listens(self.port) and subprocess.run(words).returncode == 0


class NatsServer(Server):
    """NATS with JetStream and the user `dpstream`, whose password is in the file `password`.

    `config`: further lines of its configuration.
    """

    name = "NATS"

    def __init__(self, folder: Path, *, password: str, config: str = "") -> None:
        self._password, self._config = password, config
        super().__init__(folder)

    @staticmethod
    def absent() -> str | None:
        """It needs one program."""
        return None if _program("nats-server") else "no program nats-server; install it"

    @property
    def password_file(self) -> Path:
        """The password alone."""
        return self.folder / "password"

    @property
    def address(self) -> str:
        """Its URI, without the password."""
        return f"nats://dpstream@127.0.0.1:{self.port}"

    def prepare(self) -> None:
        """Write its configuration."""
        self.password_file.write_text(self._password + "\n")
        self.password_file.chmod(0o600)
        (self.folder / "nats.conf").write_text(
            f'listen: "127.0.0.1:{self.port}"\n'
            f'jetstream {{ store_dir: "{self.folder / "store"}" }}\n'
            f'authorization {{ user: dpstream, password: "{self._password}" }}\n'
            f"{self._config}\n"
        )

    def command(self) -> Sequence[str | Path]:
        """On loopback alone."""
        return [_program("nats-server") or "nats-server", "-c", self.folder / "nats.conf"]


class ObjectServer(Server):
    """Versity's S3 gateway over a folder, with the key `dpstream`, its secret in `secret_key`.

    Folders in `buckets` are its buckets. `environment` is what clients look for.
    """

    name = "versitygw"

    def __init__(self, folder: Path, *, password: str) -> None:
        self._password = password
        super().__init__(folder)

    @staticmethod
    def absent() -> str | None:
        """It is built from its source."""
        return None if _gateway().exists() else f"no {_gateway()}; run .ci/servers"

    @property
    def address(self) -> str:
        """Its endpoint."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables that name it and its key."""
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": "dpstream",
            "AWS_SECRET_ACCESS_KEY": self._password,
            "AWS_REGION": "us-east-1",
        }

    @property
    def secret_key(self) -> Path:
        """The secret alone."""
        return self.folder / "secret_key"

    def bucket(self, name: str) -> Path:
        """A new bucket, which is a folder."""
        place = self.folder / "buckets" / name
        place.mkdir(parents=True)
        return place

    def prepare(self) -> None:
        """Write the secret."""
        (self.folder / "buckets").mkdir(exist_ok=True)
        self.secret_key.write_text(self._password + "\n")
        self.secret_key.chmod(0o600)
        (self.folder / "users").mkdir(exist_ok=True)
        reader: dict[str, Any] = {"access": "reader", "secret": self._password, "role": "user"}
        reader |= dict.fromkeys(("userID", "groupID", "projectID"), 0)
        users = json.dumps({"accessAccounts": {"reader": reader}})
        (self.folder / "users" / "users.json").write_text(users)

    def let_read(self, bucket: Path) -> None:
        """Give the key `reader`, which has the same secret, leave to list and read a bucket."""
        where = [f"arn:aws:s3:::{bucket.name}", f"arn:aws:s3:::{bucket.name}/*"]
        may = {"Action": ["s3:GetObject", "s3:ListBucket"], "Resource": where}
        one = {"Effect": "Allow", "Principal": {"AWS": ["reader"]}} | may
        policy = {"Version": "2012-10-17", "Statement": [one]}
        os.setxattr(bucket, "user.policy", json.dumps(policy).encode())

    def command(self) -> Sequence[str | Path]:
        """On loopback alone; the key is in the environment of the shell, not among its words."""
        run = 'ROOT_ACCESS_KEY=dpstream ROOT_SECRET_KEY="$(cat secret_key)" exec "$@"'
        where = ["--port", f"127.0.0.1:{self.port}", "--quiet"]
        where += ["--iam-dir", str((self.folder / "users").resolve()), "posix", "buckets"]
        return ["bash", "-c", run, "bash", _gateway(), *where]


class AzureServer(Server):
    """Azurite: Azure's blobs in a folder, with the account and the key that every emulator has."""

    name, account = "Azurite", "devstoreaccount1"
    KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
    _VERSION = "2021-08-06"

    @staticmethod
    def absent() -> str | None:
        """It is a program for Node.js."""
        if shutil.which("node") is None:
            return "no program node on PATH; run .ci/servers"
        return None if _azurite().exists() else f"no {_azurite()}; run .ci/servers"

    @property
    def address(self) -> str:
        """Its endpoint."""
        return f"http://127.0.0.1:{self.port}/{self.account}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables that name it and its key."""
        return {
            "AZURE_STORAGE_ENDPOINT": self.address,
            "AZURE_STORAGE_ACCOUNT_NAME": self.account,
            "AZURE_STORAGE_ACCOUNT_KEY": self.KEY,
        }

    def make_bucket(self, name: str) -> None:
        """Make a container, by a request that is signed with the key."""
        date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        asked = f"x-ms-date:{date}\nx-ms-version:{self._VERSION}\n"
        asked += f"/{self.account}/{self.account}/{name}\nrestype:container"
        key = base64.b64decode(self.KEY)
        signed = hmac.new(key, f"PUT{chr(10) * 12}{asked}".encode(), hashlib.sha256).digest()
        headers = {
            "x-ms-date": date,
            "x-ms-version": self._VERSION,
            "Authorization": f"SharedKey {self.account}:{base64.b64encode(signed).decode()}",
        }
        url = f"{self.address}/{name}?restype=container"
        urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)).close()

    def command(self) -> Sequence[str | Path]:
        """On loopback alone, and it tells nobody."""
        where = ["--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--location", "."]
        quiet = ["--silent", "--skipApiVersionCheck", "--disableTelemetry"]
        return ["node", _azurite(), *where, *quiet]

    def kill(self) -> None:
        """In good order: it writes what it has acknowledged now and then only."""
        self._end(signal.SIGTERM)


def _azurite() -> Path:
    return Path(".cache/azurite/node_modules/azurite/dist/src/blob/main.js").resolve()


class GoogleServer(Server):
    """fake-gcs-server: Google's storage over a folder; it asks for no key."""

    name = "fake-gcs-server"

    @staticmethod
    def absent() -> str | None:
        """It is built from its source."""
        return None if _fake_gcs().exists() else f"no {_fake_gcs()}; run .ci/servers"

    @property
    def address(self) -> str:
        """Its endpoint."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables that name it."""
        return {"GOOGLE_BASE_URL": self.address, "GOOGLE_BEARER_TOKEN": "any"}

    def make_bucket(self, name: str) -> None:
        """Make a bucket."""
        body = json.dumps({"name": name}).encode()
        url, headers = f"{self.address}/storage/v1/b", {"Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(url, data=body, headers=headers)).close()

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Put an object there by the JSON interface, the only one that it takes writes by."""
        name = urllib.parse.quote(key, safe="")
        url = f"{self.address}/upload/storage/v1/b/{bucket}/o?uploadType=media&name={name}"
        urllib.request.urlopen(urllib.request.Request(url, data=data, method="POST")).close()

    def command(self) -> Sequence[str | Path]:
        """On loopback alone."""
        where = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(self.port)]
        named = ["-public-host", f"127.0.0.1:{self.port}", "-external-url", self.address]
        return [_fake_gcs(), *where, *named, "-filesystem-root", "buckets", "-log-level", "error"]


def _fake_gcs() -> Path:
    return Path(".cache/fake-gcs/fake-gcs-server").resolve()


def _gateway() -> Path:
    return Path(".cache/versitygw/versitygw").resolve()


class RegistryServer(Server):
    """Apicurio's registry of schemas, in memory, with Confluent's interface."""

    name = "Apicurio Registry"

    @staticmethod
    def absent() -> str | None:
        """It needs Java and its jars."""
        if shutil.which("java") is None:
            return "no program java on PATH; install a Java 17"
        found = _registry_jar() is not None
        return None if found else "no Apicurio Registry in .cache/apicurio; run .ci/servers"

    @property
    def address(self) -> str:
        """Where clients of Confluent's registry find it."""
        return f"http://127.0.0.1:{self.port}/apis/ccompat/v7"

    def answers(self) -> bool:
        """It listens before it is ready."""
        try:
            with urllib.request.urlopen(f"{self.address}/subjects", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def command(self) -> Sequence[str | Path]:
        """On loopback alone."""
        where = ("-Dquarkus.http.host=127.0.0.1", f"-Dquarkus.http.port={self.port}")
        return ["java", *_JAVA, *where, "-jar", _registry_jar() or "registry.jar"]


class IcebergServer(Server):
    """The REST catalog of Iceberg's own tests, in SQLite, with its tables on this machine."""

    name = "Iceberg REST catalog"

    @staticmethod
    def absent() -> str | None:
        """It needs Java, with the compiler, and its jar."""
        if shutil.which("javac") is None:
            return "no program javac on PATH; run .ci/servers"
        found = _catalog_jar() is not None
        return None if found else "no Iceberg catalog in .cache/iceberg; run .ci/servers"

    @property
    def address(self) -> str:
        """Where clients find it."""
        return f"http://127.0.0.1:{self.port}"

    def prepare(self) -> None:
        """Nothing; but where its jar is missing a start would wait in vain."""
        if reason := self.absent():
            raise MissingDependency(reason)

    def answers(self) -> bool:
        """It has a catalog."""
        try:
            with urllib.request.urlopen(f"{self.address}/v1/config", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def command(self) -> Sequence[str | Path]:
        """On loopback alone; the catalog's own main would listen everywhere."""
        settings = {
            "uri": f"jdbc:sqlite:file:{self.folder / 'catalog.db'}",
            "warehouse": str(self.folder / "warehouse"),
            "jdbc.schema-version": "V1",
            "clients": "1",  # two connections to one SQLite file lock each other out
            "catalog-impl": "org.apache.iceberg.jdbc.JdbcCatalog",
            "io-impl": "org.apache.iceberg.hadoop.HadoopFileIO",
        }
        words = [f"{name}={value}" for name, value in settings.items()]
        jar, main = _catalog_jar() or "catalog.jar", Path(".ci/iceberg/LoopbackCatalog.java")
        return ["java", *_JAVA, "-cp", jar, main.resolve(), str(self.port), *words]


class ConnectServer(Server):
    """Kafka Connect in one process, with one connector; its jars are in .cache/debezium."""

    name = "Kafka Connect"

    def __init__(self, folder: Path, *, kafka: KafkaServer) -> None:
        self._kafka, self._connector = kafka, ""
        super().__init__(folder)

    @staticmethod
    def absent() -> str | None:
        """It needs Java and its jars."""
        if shutil.which("java") is None:
            return "no program java on PATH; install a Java 17"
        found = list(_CONNECT.resolve().glob("debezium-connector-postgres-*.jar"))
        return None if found else "no Debezium in .cache/debezium; run .ci/servers"

    def prepare(self) -> None:
        """Write its properties."""
        converter = "org.apache.kafka.connect.json.JsonConverter"
        self._write("worker.properties", {
            "bootstrap.servers": self._kafka.address,
            "listeners": f"http://127.0.0.1:{self.port}",
            "offset.storage.file.filename": self.offsets,
            "offset.flush.interval.ms": 200,
            "key.converter": converter,
            "value.converter": converter,
        })  # fmt: skip

    @property
    def offsets(self) -> Path:
        """Where it keeps how far it is."""
        return self.folder / "offsets"

    def kept_place(self) -> bytes | None:
        """What it keeps, once that is behind its first snapshot."""
        kept = self.offsets.read_bytes() if self.offsets.exists() else b""
        return kept if b'"lsn_proc"' in kept else None

    @contextmanager
    def running(self, settings: dict[str, Any]) -> Iterator[None]:
        """Run with a connector of these settings."""
        self._connector = settings["name"]
        self._write("connector.properties", settings)
        self.start()
        try:
            yield
        finally:
            self.stop()

    def answers(self) -> bool:
        """Does the connector run?"""
        about = f"http://127.0.0.1:{self.port}/connectors/{self._connector}/status"
        try:
            with urllib.request.urlopen(about, timeout=5) as answer:
                tasks = json.load(answer)["tasks"]
        except OSError:
            return False
        return [task["state"] for task in tasks] == ["RUNNING"]

    def command(self) -> Sequence[str | Path]:
        """On loopback alone."""
        files = [self.folder / name for name in ("worker.properties", "connector.properties")]
        run = "org.apache.kafka.connect.cli.ConnectStandalone"
        return ["java", *_JAVA, *_LOG, "-cp", f"{_CONNECT.resolve()}/*", run, *files]

    def _write(self, name: str, properties: dict[str, Any]) -> None:
        path = self.folder / name
        path.write_text("".join(f"{key}={value}\n" for key, value in properties.items()))
        path.chmod(0o600)


class Collector(Server):
    """An OpenTelemetry collector, which hands all that it is sent on to `to` as JSON."""

    name = "OpenTelemetry collector"

    def __init__(self, folder: Path, *, to: str) -> None:
        self._to = to
        super().__init__(folder)

    @staticmethod
    def absent() -> str | None:
        """It is built."""
        found = _COLLECTOR.exists()
        return None if found else "no collector in .cache/otelcol; run .ci/servers"

    @property
    def address(self) -> str:
        """Where it takes OTLP over HTTP."""
        return f"http://127.0.0.1:{self.port}"

    def prepare(self) -> None:
        """Write its configuration."""
        way = {"receivers": ["otlp"], "exporters": ["otlp_http"]}
        there = {"endpoint": self._to, "encoding": "json", "compression": "none"}
        http = {"endpoint": f"127.0.0.1:{self.port}"}
        content = {
            "receivers": {"otlp": {"protocols": {"http": http}}},
            "exporters": {"otlp_http": there},
            "service": {
                "telemetry": {"metrics": {"level": "none"}},
                "pipelines": {"traces": way, "metrics": way},
            },
        }
        (self.folder / "otelcol.yaml").write_text(json.dumps(content))  # which is YAML

    def command(self) -> Sequence[str | Path]:
        """On loopback alone."""
        return [_COLLECTOR, "--config", f"file:{self.folder / 'otelcol.yaml'}"]


_COLLECTOR = Path(".cache/otelcol/otelcol").resolve()


def _registry_jar() -> Path | None:
    return next(Path(".cache/apicurio").resolve().glob("*-runner.jar"), None)


def _catalog_jar() -> Path | None:
    return next(Path(".cache/iceberg").resolve().glob("*.jar"), None)


def free_port() -> int:
    """A loopback port that nobody listens on, below those that connections are given meanwhile."""
    first, count = 20_000, 12_000
    for number in itertools.count(os.getpid() * 97 + next(_asked)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", first + number % count))
            return first + number % count
    raise AssertionError("a count has no end")


_asked = itertools.count()


def listens(port: int) -> bool:
    """Does somebody listen on this loopback port?"""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")


def _postgres(name: str) -> str | None:
    """A program of PostgreSQL: on PATH, or the newest where Debian puts them."""
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda p: p.parts[-3])
    return shutil.which(name) or (str(places[-1]) if places else None)


def _found(name: str) -> str:
    found = _postgres(name)
    if found is None:
        raise MissingDependency(f"there is no program {name}; install PostgreSQL")
    return found


_JAVA = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m", "-Xms64m")
_CONNECT = Path(".cache/debezium")
_LOG = ("-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",)
_CLASSES = "classes.jsa"  # loaded classes, kept beside the jars by keep_classes
_SCRAM = "SCRAM-SHA-512"
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
        users = [] if self._password is None else ["--add-scram", self._scram_user(self._password)]
        words = self._java("kafka.tools.StorageTool", "format", "-t", _CLUSTER, *users, "-c")
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

    def _scram_user(self, password: str) -> str:
        """A user that the broker knows from its first start on, without the password itself."""
        return f"{_SCRAM}=[name=dpstream,password={password}]"

    def _secured(self, password: str) -> dict[str, str]:
        """The properties of the second listener."""
        key, certificate = _self_signed()
        self.certificate.write_text(certificate)
        self.password_file.write_text(f"{password}\n")
        self.password_file.chmod(0o600)
        modules = "org.apache.kafka.common.security"
        plain, scram = f"{modules}.plain.PlainLoginModule", f"{modules}.scram.ScramLoginModule"
        protocols = "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURE:SASL_SSL"
        own = {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.key": key.replace("\n", "\\n"),
            "ssl.keystore.certificate.chain": certificate.replace("\n", "\\n"),
            "sasl.enabled.mechanisms": f"PLAIN,{_SCRAM}",
            "plain.sasl.jaas.config": f'{plain} required user_dpstream="{password}";',
            f"{_SCRAM.lower()}.sasl.jaas.config": f"{scram} required;",
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
