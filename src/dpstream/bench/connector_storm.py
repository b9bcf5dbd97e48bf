"""The storm of kills as a row of `bench connectors`, with servers of its own, and its target."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from dpstream.bench.connector_kills import PARTITIONS, Aftermath, Storm, storm
from dpstream.bench.connector_systems import Kafka, Postgres
from dpstream.bench.harness import Row, target
from dpstream.connectors.kafka_server import KafkaServer
from dpstream.connectors.servers import PostgresServer

STORM: Final = "Kafka to PostgreSQL"
SAME: Final = "a killed run leaves the table of a calm one (1: yes)"


def judged(killed: Row) -> Row:
    """The target."""
    if "identical" not in killed:
        return target(SAME, None, "==", 1.0, reason=str(killed["note"]))
    return target(SAME, float(killed["identical"]), "==", 1.0)


def killed(folder: Path, plan: Storm, told: Callable[[int], None]) -> Row:
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
    return row_of(found, plan)


def row_of(found: Aftermath, plan: Storm) -> Row:
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
