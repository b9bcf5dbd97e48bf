"""What is sent to the runs that are killed: messages by step, and where each step ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from dpstream.bench.connector_child import HOUR

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
