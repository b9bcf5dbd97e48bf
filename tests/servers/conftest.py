"""Real servers, one of each for all tests; every test has a name of its own on them."""

import json
import tempfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import psycopg
import pytest

from tests.support.processes import until
from tests.support.servers import (
    AzureServer,
    Collector,
    GoogleServer,
    IcebergServer,
    KafkaServer,
    NatsServer,
    ObjectServer,
    PostgresServer,
    RegistryServer,
)

PASSWORD = "planted-Xk7qv9-password"


@pytest.fixture(scope="session")
def place():
    """A folder that other users may enter: PostgreSQL does not run as root."""
    with tempfile.TemporaryDirectory(prefix="dpstream-servers-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def running(server):
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def postgres_server(place):
    yield from running(PostgresServer(place / "postgres", password=PASSWORD))


@pytest.fixture(scope="session")
def nats_server(place):
    yield from running(NatsServer(place / "nats", password=PASSWORD))


@pytest.fixture(scope="session")
def kafka_server(place):
    yield from running(KafkaServer(place / "kafka", password=PASSWORD))


@pytest.fixture(scope="session")
def registry(place):
    yield from running(RegistryServer(place / "registry"))


@pytest.fixture(scope="session")
def object_server(place):
    yield from running(ObjectServer(place / "objects", password=PASSWORD))


@pytest.fixture(scope="session")
def iceberg_server(place):
    yield from running(IcebergServer(place / "iceberg"))


@pytest.fixture(scope="session")
def azure_server(place):
    yield from running(AzureServer(place / "azure"))


@pytest.fixture(scope="session")
def google_server(place):
    yield from running(GoogleServer(place / "google"))


@pytest.fixture
def objects(object_server, monkeypatch):
    """An S3 gateway, running, with its key where clients look for it."""
    for name, value in object_server.environment.items():
        monkeypatch.setenv(name, value)
    if not object_server.answers():
        object_server.restart()
    return object_server


@pytest.fixture
def kafka(kafka_server):
    """Kafka, running."""
    if not kafka_server.answers():
        kafka_server.start()
    return kafka_server


@pytest.fixture
def postgres(postgres_server, monkeypatch):
    """PostgreSQL, running, with its password where libpq looks for it."""
    monkeypatch.setenv("PGPASSFILE", str(postgres_server.passfile))
    if not postgres_server.answers():
        postgres_server.restart()
    return postgres_server


@pytest.fixture
def nats(nats_server):
    """NATS, running."""
    if not nats_server.answers():
        nats_server.restart()
    return nats_server


@pytest.fixture
def iceberg(iceberg_server):
    """Iceberg's REST catalog, running."""
    if not iceberg_server.answers():
        iceberg_server.restart()
    return iceberg_server


class Receiver(BaseHTTPRequestHandler):
    """Keeps what the collector hands on."""

    def do_POST(self):
        content = self.rfile.read(int(self.headers["content-length"]))
        self.server.kept.append((self.path, json.loads(content)))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def collector(place):
    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as behind:
        behind.kept = []
        thread = Thread(target=behind.serve_forever)
        thread.start()
        server = Collector(place / "otelcol", to=f"http://127.0.0.1:{behind.server_port}")
        server.start()
        server.kept = behind.kept
        try:
            yield server
        finally:
            server.stop()
            behind.shutdown()
            thread.join()


def drop_slots(postgres):
    """Those that nobody reads keep the server's log for ever."""
    with psycopg.connect(postgres.address, autocommit=True) as connection:
        active = "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active"
        until(lambda: not connection.execute(active).fetchall())
        for (name,) in connection.execute("SELECT slot_name FROM pg_replication_slots").fetchall():
            connection.execute("SELECT pg_drop_replication_slot(%s)", (name,))
