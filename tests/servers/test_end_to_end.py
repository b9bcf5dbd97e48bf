"""Producer -> Kafka -> dpstream -> PostgreSQL, killed again and again: the table of a calm run."""

import json
import os
import signal
import subprocess
import sys
import time
from threading import Event, Thread

import numpy as np
import psycopg
import pytest

from tests.servers import kafka_tools as tools
from tests.servers.live_child import HOUR, STEPS

pytestmark = [pytest.mark.servers, pytest.mark.timeout(180)]

KILLS = 6
PARTITIONS = 3
DEADLINE = 150.0


class Children:
    """Forks of a process that has imported everything."""

    def __init__(self):
        command = [sys.executable, "-m", "tests.servers.live_child"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout.readline() == "ready\n"
        self._started = []

    def start(self, job):
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        self._started.append(int(self._process.stdout.readline()))
        return self._started[-1]

    def close(self):
        for pid in self._started:  # none was waited for, so none of the numbers is another's
            os.kill(pid, signal.SIGKILL)
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()


@pytest.fixture
def children():
    found = Children()
    yield found
    found.close()


def messages(step):
    """A step's messages by partition: late rows, busy users, and some that are no rows."""
    rng = np.random.default_rng(step)
    found = {}
    for partition in range(PARTITIONS):
        times = step * HOUR + rng.integers(0, HOUR, 100) - rng.integers(0, 2, 100) * (HOUR // 2)
        rows = [
            {
                "user": f"user {rng.integers(0, 60)}",
                "page": f"/{min(rng.zipf(1.7), 8)}",
                "at": int(max(at, 0)),
                "seconds": int(rng.integers(0, 70)),
            }
            for at in times
        ]
        found[partition] = [*rows, b'{"user": "half a mess']
    return found


def produce(kafka, topic, ends, clocks, stop):
    """The producer's thread; that it ended early is to be seen where the runs are."""
    try:
        send_steps(kafka, topic, ends, clocks, stop)
    except BaseException as problem:
        (clocks[0].parent / "failed").write_text(f"the producer: {problem!r}")
        raise


def send_steps(kafka, topic, ends, clocks, stop):
    """Send a step's messages once every run has come to it; then say where they end."""
    at = dict.fromkeys(range(PARTITIONS), 0)
    for step in range(STEPS):
        while not all(_time(clock) >= step * HOUR for clock in clocks):
            if stop.wait(0.02):
                return
        for partition, values in messages(step).items():
            tools.send(kafka, topic, values, partition=partition)
            at[partition] += len(values)
        with ends.open("a") as file:
            file.write(json.dumps({f"{topic}/{n}": end for n, end in at.items()}) + "\n")


def _time(clock):
    return int(clock.read_text()) if clock.exists() else 0


def table(postgres, schema):
    with psycopg.connect(postgres.address) as connection:
        cursor = connection.execute(f"SELECT * FROM {schema}.clicks ORDER BY 1, 2, 3, 4, 5")
        return [column.name for column in cursor.description], cursor.fetchall()


def letters(place):
    found = sorted((place / "state" / "dead-letters").iterdir())
    return sorted(
        json.loads(line)["where"] for path in found for line in path.read_text().splitlines()
    )


def wait_for(done, place):
    deadline = time.monotonic() + DEADLINE
    while not done():
        assert time.monotonic() < deadline, _logs(place)
        failed = [path.read_text() for path in place.glob("*/failed")]
        assert not failed, failed
        time.sleep(0.05)


def test_the_table_of_a_calm_run(kafka, postgres, children, tmp_path):
    """Killed at random moments, the broker restarted once: every release is the same, once."""
    rng = np.random.default_rng(13)
    topic, out = (tools.make_topic(kafka, n) for n in (PARTITIONS, 1))
    uri = f"kafka://{kafka.address}/{topic}"
    jobs = {}
    for name in ("calm", "killed"):
        place = tmp_path / name
        place.mkdir()
        sinks = [f"{postgres.address}?schema={name}_{topic.replace('-', '_')}"]
        sinks += [f"kafka://{kafka.address}/{out}"] if name == "killed" else []
        ends = tmp_path / "ends"
        jobs[name] = {"place": str(place), "source": uri, "sinks": sinks, "ends": str(ends)}
    stop = Event()
    clocks = [tmp_path / name / "clock" for name in jobs]
    producer = Thread(target=produce, args=(kafka, topic, ends, clocks, stop), daemon=True)
    producer.start()
    running = {name: children.start(job) for name, job in jobs.items()}
    kills = 0
    while kills < KILLS and not (tmp_path / "killed" / "done").exists():
        before = _time(clocks[1])
        wait_for(lambda: _time(clocks[1]) > before, tmp_path)  # noqa: B023
        time.sleep(rng.uniform(0.0, 0.5))
        os.kill(running["killed"], signal.SIGKILL)
        kills += 1
        if kills == KILLS // 2:
            kafka.restart()
        running["killed"] = children.start(jobs["killed"])
    wait_for(lambda: all((tmp_path / name / "done").exists() for name in jobs), tmp_path)
    stop.set()
    producer.join()

    assert kills == KILLS
    names, calm = table(postgres, f"calm_{topic.replace('-', '_')}")
    _, killed = table(postgres, f"killed_{topic.replace('-', '_')}")
    assert len({(row[0], row[1]) for row in calm}) == 15  # releases: 4 + 4 + 4 + 3, by window
    assert killed == calm
    sent = [json.loads(value) for _, value, _ in tools.committed(kafka, out)]
    assert len(sent) == len(calm)
    place = names.index("clicks")
    assert sorted(row["clicks"] for row in sent) == sorted(row[place] for row in calm)
    assert letters(tmp_path / "killed") == letters(tmp_path / "calm")
    assert len(set(letters(tmp_path / "calm"))) == STEPS * PARTITIONS


def _logs(place):
    return {name: (place / name / "log").read_text()[-3000:] for name in ("calm", "killed")}
