"""Producer, Kafka, dpstream, PostgreSQL: one run is left alone, one is killed again and again.

Both read the same topic while it is filled. Kills come at random moments, some of them while a run
recovers from the last one; the broker is killed and started again now and then. In the end both
tables of releases must be the same, row for row, and so must the dead letters.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final

import numpy as np

from benchmarks.connector_child import HOUR
from benchmarks.harness import child_environment
from dpstream.errors import StateError
from tests.support.servers import KafkaServer, PostgresServer

PARTITIONS: Final = 3
_STALLED: Final = 240.0  # seconds without any progress
_NAMES: Final = ("calm", "killed")


@dataclass(frozen=True, kw_only=True)
class Storm:
    """How often runs are killed, and how much they read."""

    kills: int
    restarts: int
    """Of the broker."""
    rows: int
    """Of a step and partition."""
    longest: float = 0.5
    """Seconds from a kill's turn to the kill, at most."""
    seed: int = 13

    @property
    def steps(self) -> int:
        """Two for a kill, and two: however quick the machine is, all kills find a run at work."""
        return 2 * self.kills + 2

    @property
    def broker_kills(self) -> set[int]:
        """After so many kills the broker is killed, too."""
        return {self.kills * (n + 1) // (self.restarts + 1) for n in range(self.restarts)}

    @property
    def sent(self) -> int:
        """Messages that are rows."""
        return self.steps * PARTITIONS * self.rows


@dataclass(kw_only=True)
class Aftermath:
    """What both runs have left."""

    seconds: float
    kills: int
    tables: dict[str, list[tuple[Any, ...]]] = field(repr=False)
    columns: list[str]
    letters: dict[str, list[str]] = field(repr=False)

    @property
    def identical(self) -> bool:
        """Is nothing missing, twice or different?"""
        calm, killed = _NAMES
        same = self.letters[calm] == self.letters[killed]
        return same and bool(self.tables[calm]) and self.tables[calm] == self.tables[killed]

    @property
    def releases(self) -> int:
        """Of the calm run."""
        return len({row[:2] for row in self.tables[_NAMES[0]]})


def storm(
    folder: Path,
    kafka: KafkaServer,
    postgres: PostgresServer,
    topic: str,
    plan: Storm,
    *,
    more_sinks: Sequence[str] = (),
    told: Callable[[int], None] = lambda kills: None,
) -> Aftermath:
    """Fill `topic`, which is empty, and publish it twice; `more_sinks` are of the killed run."""
    from confluent_kafka import KafkaException

    rng, began, over = np.random.default_rng(plan.seed), time.monotonic(), Event()
    jobs = {name: _job(folder, name, kafka, postgres, topic, plan) for name in _NAMES}
    jobs["killed"]["sinks"] += more_sinks
    clocks = [folder / name / "clock" for name in _NAMES]
    kills: list[int] = []

    def may(step: int) -> bool:
        if over.is_set():
            raise StateError("the runs are over")
        all_there = all(_time(clock) >= step * HOUR for clock in clocks)
        return all_there and step <= 2 * len(kills) + 1

    def produce() -> None:
        try:
            sender = StepsSender(kafka.address, topic, partitions=PARTITIONS, rows=plan.rows)
            sender.send(plan.steps, folder / "ends", may)
        except (StateError, RuntimeError, KafkaException) as problem:
            (folder / "killed" / "failed").write_text(f"the producer: {problem!r}")

    producer, children = Thread(target=produce, daemon=True), Children()
    producer.start()
    try:
        running = {name: children.start(job) for name, job in jobs.items()}
        while len(kills) < plan.kills:
            if not kills or rng.random() < 2 / 3:  # the others hit a run that recovers
                _wait(lambda: _time(clocks[1]) > (2 * len(kills) - 1) * HOUR, folder)
            time.sleep(rng.uniform(0.0, plan.longest))
            os.kill(running["killed"], signal.SIGKILL)
            kills.append(_time(clocks[1]))
            told(len(kills))
            if len(kills) in plan.broker_kills:
                kafka.restart()
            running["killed"] = children.start(jobs["killed"])
        _wait(lambda: all((folder / name / "done").exists() for name in _NAMES), folder)
        producer.join(_STALLED)
    finally:
        over.set()
        children.close()
    columns, calm = table(postgres, jobs["calm"]["schema"])
    _, killed = table(postgres, jobs["killed"]["schema"])
    return Aftermath(
        seconds=time.monotonic() - began,
        kills=len(kills),
        tables={"calm": calm, "killed": killed},
        columns=columns,
        letters={name: _letters(folder / name) for name in _NAMES},
    )


class Children:
    """Forks of a process that has imported everything."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.connector_child"]
        self._process = subprocess.Popen(
            command,
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._started: list[int] = []
        if self._heard() != "ready\n":
            raise StateError("the process that runs are forked from did not start")

    def start(self, job: dict[str, Any]) -> int:
        """The pid of a new run."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        self._started.append(int(self._heard()))
        return self._started[-1]

    def close(self) -> None:
        """End all that were started."""
        for pid in self._started:  # none was waited for, so none of the numbers is another's
            os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.communicate()

    def _heard(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def table(postgres: PostgresServer, schema: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Names of the columns, and every row of every release."""
    import psycopg

    with psycopg.connect(postgres.address, passfile=str(postgres.passfile)) as connection:
        cursor = connection.execute(f"SELECT * FROM {schema}.clicks ORDER BY 1, 2, 3, 4, 5")
        return [column.name for column in cursor.description or ()], cursor.fetchall()


def _job(
    folder: Path,
    name: str,
    kafka: KafkaServer,
    postgres: PostgresServer,
    topic: str,
    plan: Storm,
) -> dict[str, Any]:
    (folder / name).mkdir()
    schema = f"{name}_{topic.replace('-', '_')}"
    return {
        "place": str(folder / name),
        "source": f"kafka://{kafka.address}/{topic}",
        "schema": schema,
        "sinks": [f"{postgres.address}?schema={schema}&passfile={postgres.passfile}"],
        "ends": str(folder / "ends"),
        "steps": plan.steps,
    }


def _time(clock: Path) -> int:
    return int(clock.read_text()) if clock.exists() else 0


def _wait(done: Callable[[], bool], folder: Path) -> None:
    """Poll; a run that has failed, or none that moves, is told with the ends of the logs."""
    seen, since = [0, 0], time.monotonic()
    while not done():
        failed = [path.read_text() for path in folder.glob("*/failed")]
        if failed:
            raise StateError(f"the runs did not come to their end: {failed}; {_logs(folder)}")
        times = [_time(folder / name / "clock") for name in _NAMES]
        if times != seen:
            seen, since = times, time.monotonic()
        if time.monotonic() - since > _STALLED:
            raise StateError(f"nothing has moved for {_STALLED:g} s; {_logs(folder)}")
        time.sleep(0.05)


def _letters(place: Path) -> list[str]:
    """Where the dead letters came from."""
    found = sorted((place / "state" / "dead-letters").iterdir())
    lines = (line for path in found for line in path.read_text().splitlines())
    return sorted(json.loads(line)["where"] for line in lines)


def _logs(folder: Path) -> dict[str, str]:
    logs = {name: folder / name / "log" for name in _NAMES}
    return {name: path.read_text()[-2000:] for name, path in logs.items() if path.exists()}


POISON: Final = b'{"user": "half a mess'
_LOOK: Final = 0.02


def messages(step: int, partition: int, rows: int) -> list[bytes]:
    """Late rows, busy users, and one that is no row."""
    rng = np.random.default_rng([step, partition])
    late = rng.integers(0, 2, rows) * (HOUR // 2)
    columns = {
        "user": [f"user {n}" for n in rng.integers(0, max(rows * 3 // 5, 1), rows).tolist()],
        "page": [f"/{n}" for n in np.minimum(rng.zipf(1.7, rows), 8).tolist()],
        "at": np.maximum(step * HOUR + rng.integers(0, HOUR, rows) - late, 0).tolist(),
        "seconds": rng.integers(0, 70, rows).tolist(),
    }
    each = zip(*columns.values(), strict=True)
    return [*(json.dumps(dict(zip(columns, row, strict=True))).encode() for row in each), POISON]


class StepsSender:
    """Sends one step after the other, each message once, also to a broker that is restarted."""

    def __init__(self, address: str, topic: str, *, partitions: int, rows: int) -> None:
        from confluent_kafka import Producer

        self._topic, self._partitions, self._rows = topic, partitions, rows
        self._ends = dict.fromkeys((f"{topic}/{n}" for n in range(partitions)), 0)
        self._problems: list[Any] = []
        self._producer = Producer(
            {
                "bootstrap.servers": address,
                "enable.idempotence": True,
                "message.timeout.ms": 300_000,
                "linger.ms": 5,
            }
        )

    def send(self, steps: int, ends: Path, may: Callable[[int], bool]) -> None:
        """Every step as soon as it `may` be sent; a line of `ends` says how far it goes."""
        for step in range(steps):
            while not may(step):
                time.sleep(_LOOK)
            self._one(step)
            with ends.open("a") as file:
                file.write(json.dumps(self._ends) + "\n")

    def _one(self, step: int) -> None:
        for partition in range(self._partitions):
            for value in messages(step, partition, self._rows):
                while True:
                    try:
                        self._producer.produce(
                            self._topic, value, partition=partition, on_delivery=self._sent
                        )
                        break
                    except BufferError:
                        self._producer.poll(0.1)
        left = self._producer.flush(300)
        if left or self._problems:
            raise RuntimeError(f"{left} messages were not sent: {self._problems[:3]}")

    def _sent(self, problem: Any, message: Any) -> None:
        if problem is not None:
            self._problems.append(problem)
            return
        place = f"{self._topic}/{message.partition()}"
        self._ends[place] = max(self._ends[place], message.offset() + 1)
