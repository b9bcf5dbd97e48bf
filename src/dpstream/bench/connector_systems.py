"""The systems that `bench connectors` measures: each is started, filled, and names its URIs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from dpstream.connectors.kafka_server import KafkaServer
from dpstream.connectors.nats import Client
from dpstream.connectors.options import Options
from dpstream.connectors.servers import NatsServer, PostgresServer
from dpstream.connectors.sinks.encode import jsonl

_PASSWORD: Final = "bench"  # of servers on loopback that end with the bench
_ARROW_ROWS: Final = 1000


class System:
    """Where rows come from and releases go."""

    name: str
    package: str | None = None

    def absent(self) -> str | None:
        """Why it cannot be measured here."""
        missing = self.package is not None and find_spec(self.package) is None
        return f"the package {self.package} is not installed" if missing else None

    def start(self, folder: Path) -> None:
        """Start what is needed, in a folder of its own."""

    def fill(self, rows: pa.Table) -> dict[str, Any]:
        """Put the rows there; what `open_source` takes, by the words for it."""
        return {}

    def sinks(self) -> dict[str, Any]:
        """What `open_sink` takes, by the words for it."""
        return {}

    def stop(self) -> None:
        """End what was started."""


class FilesOnDisk(System):
    """Files, and databases in files: what the others are measured against."""

    name = "files"

    def start(self, folder: Path) -> None:
        """A folder for all."""
        self._folder = folder

    def fill(self, rows: pa.Table) -> dict[str, Any]:
        """One file of each format."""
        (self._folder / "rows.jsonl").write_bytes(jsonl(rows))
        pyarrow.csv.write_csv(rows, self._folder / "rows.csv")
        pq.write_table(rows, self._folder / "rows.parquet")
        words = {"jsonl": "JSON lines", "csv": "CSV", "parquet": "Parquet"}
        return {word: self._folder / f"rows.{suffix}" for suffix, word in words.items()}

    def sinks(self) -> dict[str, Any]:
        """Those that need no server."""
        found = {"Parquet": self._folder / "out", "SQLite": self._folder / "out.sqlite"}
        if find_spec("duckdb") is not None:
            found["DuckDB"] = self._folder / "out.duckdb"
        return found


class DeltaLake(System):
    """Tables in a folder."""

    name, package = "Delta Lake", "deltalake"

    def start(self, folder: Path) -> None:
        """A folder."""
        self._folder = folder

    def sinks(self) -> dict[str, Any]:
        """One table."""
        return {"one commit each": f"delta:{self._folder}"}


class Postgres(System):
    """A server that has a commit on its disk before it answers."""

    name, package = "PostgreSQL", "psycopg"

    def absent(self) -> str | None:
        """The package, or the server."""
        return super().absent() or PostgresServer.absent()

    def start(self, folder: Path) -> None:
        """Start it."""
        self._server = PostgresServer(folder, password=_PASSWORD, durable=True)
        self._server.start()
        self._before = os.environ.get("PGPASSFILE")
        os.environ["PGPASSFILE"] = str(self._server.passfile)

    def fill(self, rows: pa.Table) -> dict[str, Any]:
        """A table, by COPY."""
        import psycopg

        with psycopg.connect(self._server.address) as connection:
            connection.execute(
                'CREATE TABLE clicks (id bigserial PRIMARY KEY, "user" text, page text, at int8)'
            )
            columns = ", ".join(f'"{name}"' for name in rows.column_names)
            with connection.cursor().copy(
                f"COPY clicks ({columns}) FROM STDIN (FORMAT csv, HEADER true)"
            ) as copy:
                file = pa.BufferOutputStream()
                pyarrow.csv.write_csv(rows, file)
                copy.write(file.getvalue().to_pybytes())
        return {"a table": f"{self._server.address}?table=clicks&key=id"}

    def sinks(self) -> dict[str, Any]:
        """A schema."""
        return {"one transaction each": f"{self._server.address}?schema=out"}

    def stop(self) -> None:
        """End it."""
        self._server.stop()
        if self._before is None:
            del os.environ["PGPASSFILE"]
        else:
            os.environ["PGPASSFILE"] = self._before


class Nats(System):
    """JetStream on the disk; it syncs every two minutes, as its own default is."""

    name, package = "NATS", "nats"

    def absent(self) -> str | None:
        """The package, or the server."""
        return super().absent() or NatsServer.absent()

    def start(self, folder: Path) -> None:
        """Start it."""
        self._server = NatsServer(folder, password=_PASSWORD)
        self._server.start()

    def fill(self, rows: pa.Table) -> dict[str, Any]:
        """A stream of JSON, a row a message, and one of Arrow."""
        found = {}
        for stream, (word, kind, messages) in zip("AB", payloads(rows), strict=True):
            client = Client(Options(self._uri(stream)))

            async def publish(js: Any, name: str = stream, payload: Any = messages) -> None:
                await js.add_stream(name=name, subjects=[name])
                waiting = []
                for one in payload:
                    waiting.append(await js.publish_async(name, one))
                    if len(waiting) == 1000:
                        await asyncio.gather(*waiting)
                        waiting = []
                await asyncio.gather(*waiting)

            client.call(publish, seconds=600)
            client.close()
            found[word] = f"{self._uri(stream)}&format={kind}"
        return found

    def sinks(self) -> dict[str, Any]:
        """A stream."""
        return {"one message each": self._uri("OUT")}

    def stop(self) -> None:
        """End it."""
        self._server.stop()

    def _uri(self, stream: str) -> str:
        return f"{self._server.address}/{stream}?password_file={self._server.password_file}"


class Kafka(System):
    """One broker, topics of one partition."""

    name, package = "Kafka", "confluent_kafka"

    def absent(self) -> str | None:
        """The package, or the server."""
        return super().absent() or KafkaServer.absent()

    def start(self, folder: Path) -> None:
        """Start it."""
        self._server = KafkaServer(folder)
        self._server.start()

    def fill(self, rows: pa.Table) -> dict[str, Any]:
        """A topic of JSON, a row a message, and one of Arrow."""
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self._server.address, "linger.ms": 50})
        found = {}
        for word, kind, messages in payloads(rows):
            self._topic(kind)
            for one in messages:
                while True:
                    try:
                        producer.produce(kind, one)
                        break
                    except BufferError:
                        producer.poll(0.1)
            producer.flush(60)
            found[word] = f"kafka://{self._server.address}/{kind}?format={kind}"
        return found

    def sinks(self) -> dict[str, Any]:
        """A topic."""
        self._topic("out")
        return {"one transaction each": f"kafka://{self._server.address}/out"}

    def stop(self) -> None:
        """End it."""
        self._server.stop()

    def _topic(self, name: str) -> None:
        from confluent_kafka.admin import AdminClient, NewTopic

        admin = AdminClient({"bootstrap.servers": self._server.address})
        admin.create_topics([NewTopic(name, 1)])[name].result(30)


def payloads(rows: pa.Table) -> Iterator[tuple[str, str, list[bytes]]]:
    """The rows as messages: (words, format, content)."""
    yield "JSON, a row a message", "json", jsonl(rows).splitlines()
    tables = [rows.slice(at, _ARROW_ROWS) for at in range(0, rows.num_rows, _ARROW_ROWS)]
    yield f"Arrow, {_ARROW_ROWS:,} rows a message", "arrow", [_stream(one) for one in tables]


def _stream(table: pa.Table) -> bytes:
    file = pa.BufferOutputStream()
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    content: bytes = file.getvalue().to_pybytes()
    return content


SYSTEMS: Final[tuple[type[System], ...]] = (FilesOnDisk, DeltaLake, Postgres, Nats, Kafka)
