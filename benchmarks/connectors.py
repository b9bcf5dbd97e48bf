"""How fast rows come from each source and releases go into each sink, beside files.

Servers are started here, on loopback, from the system's packages; one that is absent has a row that
says so. A source is read to its end by the same calls that the engine makes, without the engine. A
sink gets one release after another, each durable before the next. A ledger is charged by one
writer, and by four at once, each charge durable before the writer's next. Last, a topic is
published into PostgreSQL by a run that is killed again and again, beside one that is not.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Final
from urllib.parse import urlencode

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from benchmarks.connector_kills import PARTITIONS, Aftermath, Storm, storm
from benchmarks.harness import Findings, Progress, Row, target
from dpstream.connectors.encode import jsonl
from dpstream.connectors.registry import open_sink, open_source
from dpstream.connectors.server_base import ServerOptions
from dpstream.privacy.ledger.charges import Cells, Charge, Terms
from dpstream.privacy.ledger.ledger import Ledger
from tests.support.servers import KafkaServer, NatsServer, ObjectServer, PostgresServer

_SEED: Final = 13
_BASE: Final = {"source": "JSON lines", "sink": "Parquet", "ledger": "one writer"}
_WRITERS: Final = {"one writer": 1, "four writers": 4}
_DEADLINE: Final = 300.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    rows: int
    releases: int
    release_rows: int
    charges: int
    times: int
    storm: Storm


FULL: Final = Plan(
    rows=500_000,
    releases=50,
    release_rows=10_000,
    charges=2_000,
    times=3,
    storm=Storm(kills=30, restarts=2, rows=1_000, longest=1.5),
)
QUICK: Final = Plan(
    rows=20_000,
    releases=5,
    release_rows=2_000,
    charges=200,
    times=1,
    storm=Storm(kills=4, restarts=1, rows=200),
)


def measure(*, quick: bool, progress: Progress) -> Findings:
    """Each system in turn: sources, then sinks, then ledgers."""
    plan = QUICK if quick else FULL
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="dpstream-connectors-") as folder:
        place = Path(folder)
        place.chmod(0o755)  # PostgreSQL does not run as root, and must get in
        for number, kind in enumerate(SYSTEMS):
            system = kind()
            progress(number, len(SYSTEMS), system.name)
            rows += _rows(system, place / str(number), plan)
        row = run_storm(place / "storm", plan.storm, partial(_told, progress, plan.storm))
    progress(len(SYSTEMS), len(SYSTEMS), "done")
    return Findings(
        rows=[*_compared(rows), row],
        targets=[storm_target(row)],
        notes=_notes(plan),
    )


def _told(progress: Progress, plan: Storm, kills: int) -> None:
    progress(len(SYSTEMS) - 1, len(SYSTEMS), f"{STORM}, killed {kills} of {plan.kills} times")


def _notes(plan: Plan) -> list[str]:
    sources = (
        f"sources: {plan.rows:,} rows of three columns, read to the end; the median of "
        f"{plan.times} after one that is not counted"
    )
    sinks = (
        f"sinks: {plan.releases} releases of {plan.release_rows:,} rows, each there for good "
        "before the next"
    )
    ledgers = f"ledgers: {plan.charges:,} charges in all, of one book"
    storm = (
        f"Kafka to PostgreSQL: {plan.storm.sent:,} messages; both tables of releases and the dead "
        "letters are compared whole"
    )
    files = (
        "times files: JSON lines from a file for sources, Parquet files for sinks, one writer to a "
        "file for ledgers"
    )
    return [sources, sinks, ledgers, files, storm]


def clicks(rows: int) -> pa.Table:
    """Who looked at what, and when."""
    rng = np.random.default_rng(_SEED)
    users = rng.integers(0, max(rows // 10, 1), rows)
    return pa.table(
        {
            "user": [f"user-{number}" for number in users.tolist()],
            "page": [f"/page/{number}" for number in (rng.zipf(1.5, rows) % 1000).tolist()],
            "at": pa.array(1_700_000_000 + np.arange(rows), pa.int64()),
        }
    )


def _rows(system: System, folder: Path, plan: Plan) -> Iterator[Row]:
    reason = system.absent()
    if reason is not None:
        yield {"system": system.name, "note": f"left out: {reason}"}
        return
    folder.mkdir()
    folder.chmod(0o755)
    system.start(folder / "data" if system.package else folder)
    try:
        for word, source in system.fill(clicks(plan.rows)).items():
            taken = [_read(source, plan.rows) for _ in range(plan.times + 1)][1:]
            row = _row(system, "source", word, plan.rows, median(took for took, _ in taken), 0)
            yield row | {"cpu_us_each": min(cpu for _, cpu in taken) / plan.rows * 1e6}
        for word, sink in system.sinks().items():
            total = plan.releases * plan.release_rows
            yield _row(system, "sink", word, total, _written(sink, plan), plan.releases)
        place = system.ledger()
        for word, writers in _WRITERS.items() if place is not None else ():
            yield _row(system, "ledger", word, plan.charges, _charged(place, writers, plan), 0)
    finally:
        system.stop()


def _row(system: System, role: str, word: str, rows: int, seconds: float, releases: int) -> Row:
    return {
        "system": system.name,
        "role": role,
        "how": word,
        "records_per_second": rows / seconds,
        "releases_per_second": releases / seconds if releases else None,
    }


def _read(spec: Any, rows: int) -> tuple[float, float]:
    """Seconds from the first read to the last row, and processor seconds of this process."""
    source = open_source(spec)
    try:
        partitions, positions, count = source.partitions(), dict[str, Any](), 0
        began, used = time.perf_counter(), time.process_time()
        while count < rows:
            for name in partitions:
                batch = source.read(name, positions.get(name), columns=["user", "page", "at"])
                positions[name] = batch.position
                count += batch.table.num_rows
            if time.perf_counter() - began > _DEADLINE:
                raise TimeoutError(f"{spec} gave {count} of {rows} rows in {_DEADLINE} s")
        return time.perf_counter() - began, time.process_time() - used
    finally:
        source.close()


def _written(spec: Any, plan: Plan) -> float:
    """Seconds for all releases, after one that makes tables and the like."""
    rng = np.random.default_rng(_SEED)
    sink = open_sink(spec)
    assert sink is not None
    try:
        began = 0.0
        for number in range(plan.releases + 1):
            sink.write("bench", 0, number, _release(number, plan.release_rows, rng))
            began = began or time.perf_counter()
        return time.perf_counter() - began
    finally:
        sink.close()


def _charged(place: Any, writers: int, plan: Plan) -> float:
    """Seconds until all charges are in the ledger, of writers that know nothing of each other."""
    ledgers = [Ledger(place) for _ in range(writers)]
    dataset = f"{writers} writers"
    ledgers[0].open(dataset, Terms(unit="user", total=Fraction(1)))

    def charge(number: int) -> None:
        for step in range(plan.charges // writers):
            one = Cells(first=step, last=step)
            facts: dict[str, Any] = {"run": f"{number:032x}", "query": "bench", "purpose": "p"}
            ledgers[number].charge(
                dataset, Charge(**facts, step=step, cells=one, amount=Fraction(1, 2 * plan.charges))
            )

    began = time.perf_counter()
    with ThreadPoolExecutor(writers) as threads:
        list(threads.map(charge, range(writers)))
    seconds = time.perf_counter() - began
    for ledger in ledgers:
        ledger.close()
    return seconds


def _release(number: int, rows: int, rng: np.random.Generator) -> pa.Table:
    about = {"query": "bench", "run": "bench", "window": 0, "release_index": number}
    table = pa.table(
        {
            "page": [f"/page/{key}" for key in range(rows)],
            "clicks": rng.normal(size=rows),
            "clicks_stddev": np.full(rows, 1.5),
        }
    )
    return table.replace_schema_metadata({"dpstream": json.dumps(about)})


def _compared(rows: list[Row]) -> list[Row]:
    """Each row with how often its figure is that of files."""
    base = {
        role: next(
            row["records_per_second"]
            for row in rows
            if (row.get("role"), row.get("how")) == (role, how)
        )
        for role, how in _BASE.items()
    }
    return [
        row | {"times_files": row["records_per_second"] / base[row["role"]]}
        if "role" in row
        else row
        for row in rows
    ]


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

    def ledger(self) -> Any:
        """What `Ledger` takes; None if it has none."""
        return None

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

    def ledger(self) -> Any:
        """A file."""
        return self._folder / "ledger"


class Iceberg(System):
    """Tables in a folder, with a catalog in SQLite."""

    name, package = "Iceberg", "pyiceberg"

    def start(self, folder: Path) -> None:
        """A folder."""
        folder.mkdir()
        self._options = {"uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"{folder}/tables"}

    def fill(self, rows: pa.Table) -> dict[str, Any]:
        """A table of ten snapshots."""
        catalog = import_module("pyiceberg.catalog").load_catalog("local", **self._options)
        catalog.create_namespace("logs")
        table = catalog.create_table("logs.clicks", rows.schema)
        for part in _versions(rows):
            table.append(part)
        catalog.close()
        return {"ten snapshots": self._uri("logs/clicks")}

    def sinks(self) -> dict[str, Any]:
        """One table."""
        return {"one commit each": self._uri("out")}

    def _uri(self, path: str) -> str:
        return f"iceberg://local/{path}?{urlencode(self._options, safe='/:')}"


def _versions(rows: pa.Table) -> list[pa.Table]:
    """The rows in ten parts."""
    return [
        rows.slice(at, rows.num_rows // 10) for at in range(0, rows.num_rows, rows.num_rows // 10)
    ]


class DeltaLake(System):
    """Tables in a folder."""

    name, package = "Delta Lake", "deltalake"

    def start(self, folder: Path) -> None:
        """A folder."""
        self._folder = folder

    def fill(self, rows: pa.Table) -> dict[str, Any]:
        """A table of ten versions, whose changes can be read."""
        place = self._folder.parent / f"{self._folder.name}-clicks"
        feed = {"delta.enableChangeDataFeed": "true"}
        write = import_module("deltalake").write_deltalake
        for part in _versions(rows):
            write(place, part, mode="append", configuration=feed)
        return {"ten versions": f"delta:{place}/"}

    def sinks(self) -> dict[str, Any]:
        """One table."""
        return {"one commit each": f"delta:{self._folder}"}


class ObjectStore(System):
    """A bucket of an S3 gateway over a folder, without keys of its own in addresses."""

    name, package = "object store", "obstore"

    def absent(self) -> str | None:
        """The package, or the server."""
        return super().absent() or ObjectServer.absent()

    def start(self, folder: Path) -> None:
        """Start it, with its key where clients look."""
        self._server = ObjectServer(folder, password=_PASSWORD)
        self._server.start()
        self._before = {name: os.environ.get(name) for name in self._server.environment}
        os.environ.update(self._server.environment)
        self._bucket = self._server.bucket("bench")

    def fill(self, rows: pa.Table) -> dict[str, Any]:
        """One object of each format."""
        (self._bucket / "rows.jsonl").write_bytes(jsonl(rows))
        pq.write_table(rows, self._bucket / "rows.parquet")
        words = {"jsonl": "JSON lines", "parquet": "Parquet"}
        return {word: f"s3://bench/rows.{suffix}" for suffix, word in words.items()}

    def sinks(self) -> dict[str, Any]:
        """A prefix."""
        return {"one object each": "s3://bench/out/"}

    def ledger(self) -> Any:
        """A name of its own."""
        return "s3://bench/book"

    def stop(self) -> None:
        """End it."""
        self._server.stop()
        for name, value in self._before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


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
            connection.execute("CREATE PUBLICATION clicks FOR TABLE clicks")
            connection.commit()  # a slot is made outside of what writes
            connection.execute("SELECT pg_create_logical_replication_slot('clicks', 'pgoutput')")
            connection.commit()
            columns = ", ".join(f'"{name}"' for name in rows.column_names)
            with connection.cursor().copy(
                f"COPY clicks ({columns}) FROM STDIN (FORMAT csv, HEADER true)"
            ) as copy:
                file = pa.BufferOutputStream()
                pyarrow.csv.write_csv(rows, file)
                copy.write(file.getvalue().to_pybytes())
        place = f"{self._server.address}?table=clicks"
        return {"a table": f"{place}&key=id", "its changes": f"{place}&slot=clicks"}

    def sinks(self) -> dict[str, Any]:
        """A schema."""
        return {"one transaction each": f"{self._server.address}?schema=out"}

    def ledger(self) -> Any:
        """A schema of its own."""
        return self._server.address

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
        """Streams of JSON and CSV, a row a message, and one of Arrow."""
        from dpstream.connectors.nats.client import Client  # needs the package nats

        found = {}
        for stream, (word, kind, messages) in zip("ABC", payloads(rows), strict=True):
            client = Client(ServerOptions(self._uri(stream)))

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
            found[word] = f"{self._uri(stream)}&format={_options(kind)}"
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
        """Topics of JSON and CSV, a row a message, and one of Arrow."""
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self._server.address, "linger.ms": 50})
        found = {}
        for word, kind, messages in (*payloads(rows), _changes(rows)):
            self._topic(kind)
            for one in messages:
                while True:
                    try:
                        producer.produce(kind, one)
                        break
                    except BufferError:
                        producer.poll(0.1)
            producer.flush(60)
            found[word] = f"kafka://{self._server.address}/{kind}?format={_options(kind)}"
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
    lines = (f"{row['user']},{row['page']},{row['at']}".encode() for row in rows.to_pylist())
    yield "CSV, a row a message", "csv", list(lines)
    tables = [rows.slice(at, _ARROW_ROWS) for at in range(0, rows.num_rows, _ARROW_ROWS)]
    yield f"Arrow, {_ARROW_ROWS:,} rows a message", "arrow", [_stream(one) for one in tables]


def _changes(rows: pa.Table) -> tuple[str, str, list[bytes]]:
    """The rows as inserts, as Debezium writes them without their schema."""
    messages = []
    for number, row in enumerate(jsonl(rows).splitlines()):
        source = {"connector": "postgresql", "lsn": number, "sequence": f'["0", "{number}"]'}
        messages.append(
            b'{"before":null,"after":%s,"source":%s,"op":"c","ts_ms":1}'
            % (row, json.dumps(source).encode())
        )
    return "changes by Debezium", "debezium-json", messages


def _options(kind: str) -> str:
    """A format with what it needs."""
    return f"{kind}&header=user,page,at" if kind == "csv" else kind


def _stream(table: pa.Table) -> bytes:
    file = pa.BufferOutputStream()
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    content: bytes = file.getvalue().to_pybytes()
    return content


SYSTEMS: Final[tuple[type[System], ...]] = (
    FilesOnDisk,
    DeltaLake,
    Iceberg,
    ObjectStore,
    Postgres,
    Nats,
    Kafka,
)


STORM: Final = "Kafka to PostgreSQL"
SAME: Final = "a killed run leaves the table of a calm one (1: yes)"


def storm_target(killed: Row) -> Row:
    """The target."""
    if "identical" not in killed:
        return target(SAME, None, "==", 1.0, reason=str(killed["note"]))
    return target(SAME, float(killed["identical"]), "==", 1.0)


def run_storm(folder: Path, plan: Storm, told: Callable[[int], None]) -> Row:
    """Both servers, a topic, a run in peace and a run that is killed."""
    reason = Kafka().absent() or Postgres().absent()
    if reason is not None:
        return {"system": STORM, "note": f"left out: {reason}"}
    from confluent_kafka.admin import AdminClient, NewTopic

    folder.mkdir()
    folder.chmod(0o755)
    with ExitStack() as undo:
        kafka = KafkaServer(folder / "kafka")
        postgres = PostgresServer(folder / "postgres", password="bench")
        for server in (kafka, postgres):
            server.start()
            undo.callback(server.stop)
        admin = AdminClient({"bootstrap.servers": kafka.address})
        admin.create_topics([NewTopic("storm", PARTITIONS)])["storm"].result(60)
        found = storm(folder, kafka, postgres, "storm", plan, told=told)
    return storm_row(found, plan)


def storm_row(found: Aftermath, plan: Storm) -> Row:
    """What is told of it."""
    return {
        "system": STORM,
        "how": "one run killed, one not",
        "rows": plan.sent,
        "kills": found.kills,
        "broker_kills": plan.restarts,
        "releases": found.releases,
        "release_rows": len(found.tables["calm"]),
        "seconds": found.seconds,
        "identical": found.identical,
    }
