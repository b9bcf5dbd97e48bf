"""The bench of the Spark engine without a cluster: whom it kills, what it judges and counts."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from benchmarks import click_log, spark
from benchmarks.click_log import ClickLog
from benchmarks.spark import state_rows, targets
from benchmarks.spark_cluster import (
    DRIVER,
    EXECUTOR,
    Cluster,
    Disturbed,
    compared,
    cpu_seconds,
    descendants,
    drawn,
    executors,
    gone,
    kill,
    peak_mb,
)

SLEEP = "import time; time.sleep(60)"
PARENT = f"""
import subprocess, sys
run = [sys.executable, "-c", {SLEEP!r}]
subprocess.Popen([*run, "CoarseGrainedExecutorBackend"])
subprocess.Popen([*run, "something else"])
import time
while time.process_time() < 0.1:
    pass  # the kernel tells of hundredths of a second alone, and a start may take less
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def family():
    """A process with two children, one of which is called as an executor is."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout.readline()
        below = descendants(parent.pid)
        yield parent.pid, below
        kill(parent.pid, *below)
        gone(*below)


def test_only_executors_of_this_driver_are_found(family):
    """An executor is known by its name, and by whose descendant it is."""
    parent, below = family
    deadline = time.monotonic() + 20
    while not executors(parent) and time.monotonic() < deadline:
        time.sleep(0.01)  # a child has its own name only after exec

    assert len(below) == 2
    assert len(executors(parent)) == 1
    assert executors(below[0]) == executors(below[1]) == []
    assert set(below) <= set(descendants(os.getpid()))


def test_a_killed_process_is_gone(family):
    """Waiting for one that lives gives up; for one that was killed it ends, zombie or not."""
    _, below = family
    assert not gone(*below, seconds=0.05)
    kill(below[0])

    assert gone(below[0], seconds=20)
    assert not gone(below[1], seconds=0.05)
    kill(below[0])  # once more is no error


def test_time_and_memory_are_of_the_whole_family(family):
    """Processor time and peaks are found for processes that are not this one."""
    parent, _ = family

    assert 0 < sum(cpu_seconds(parent).values()) < 60
    assert set(peak_mb(parent)) == {"executor_mb", "worker_mb", "driver_jvm_mb"}
    assert peak_mb(parent)["driver_jvm_mb"] > 1


def test_kills_come_back_from_their_seed():
    """The same kills for the same seed, spread over the run, others for another."""
    kinds = [EXECUTOR, DRIVER] * 3
    one, two, other = (drawn(kinds, 40, np.random.default_rng(seed)) for seed in (1, 1, 2))

    assert one == two != other
    assert [kill.what for kill in one] == kinds
    assert all(0 <= kill.releases < 40 // 7 for kill in one)
    assert sum(kill.releases for kill in one) < 40


def test_a_ratio_above_the_target_is_missed():
    """Only ours with two executors is judged, each case by its own ratio."""
    row = {"library": "dpstream", "executors": 2, "records": 10, "keys": 5, "batches": 1}
    row["times_distinct"] = 0.5
    rows = [row | {"times_slower": 1.4}, row | {"times_slower": 1.6}]
    rows += [row | {"executors": 1, "times_slower": 9.0}]
    rows += [{"library": "spark"}, {"library": "spark, distinct", "times_slower": 9.0}]

    assert [one["reached"] for one in targets(rows, [])] == [True, False, None]


def test_one_changed_release_is_a_missed_target(tmp_path):
    """A killed run that publishes anything else is found."""
    (tmp_path / "out").mkdir()
    found = compared(Disturbed(), tmp_path, {"clicks-w000000-t000001.parquet": "digest"})

    assert "other releases" in found.difference
    judged = targets([], [Disturbed(), found])
    assert (judged[0]["value"], judged[0]["reached"]) == (0.5, False)


def test_rows_say_what_was_measured():
    """A figure is the median over rounds, a ratio that of neighbours."""
    case = spark.Case(executors=2, records=2_000, keys=100, batches=2)
    lane = spark.Lane(case=case, peaks={"worker_mb": 5.0})
    for what, seconds in ((spark.PLAIN, (1, 2, 8)), (spark.STREAM, (2, 4, 4))):
        lane.seen[what] = [{"seconds": s, "cpu_seconds": s, "keys": 7} for s in seconds]
    lane.seen[spark.READER] = lane.seen[spark.DISTINCT] = lane.seen[spark.STREAM]

    plain, stream, _, distinct = spark._rows(lane)
    assert (plain["records_per_second"], stream["records_per_second"]) == (1_000, 500)
    assert stream["times_slower"] == 2
    assert "times_slower" not in plain
    assert (stream["times_distinct"], distinct["times_slower"]) == (1, 2)
    assert "times_distinct" not in distinct


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """Logs of these tests stay with them."""
    monkeypatch.setenv(click_log.VARIABLE, str(tmp_path / "cache"))


@pytest.mark.spark
def test_state_is_what_the_tables_hold():
    """32 bytes for a unit, 16 for a unit in a group; 24 for a group, its noise and its key."""
    log = ClickLog(records=4_000, keys=500, uniform=True)
    rows = {row["state"]: row for row in state_rows(log)}
    about = click_log.about(click_log.files(log))
    units, pairs = about["users"], rows["units"]["entries"] - about["users"]

    assert rows["groups"]["entries"] == about["keys"]
    assert pairs <= log.records
    stored = rows["units"]["bytes_each"] * rows["units"]["entries"]
    assert 0 <= stored - (32 * units + 16 * pairs) < 2_000
    assert 24 + 15 < rows["groups"]["bytes_each"] < 24 + 40 + 41
    assert 72 < rows["records"]["bytes_each"] < 200


def test_uniform_keys_are_uniform():
    """The most frequent key has little more than its share; under Zipf's law it has far more."""
    shares = []
    for uniform in (True, False):
        log = ClickLog(records=20_000, keys=100, uniform=uniform)
        ranks = np.concatenate([ranks for _, _, ranks in click_log.parts(log)])
        shares.append(np.bincount(ranks).max() / len(ranks) * 100)

    assert shares[0] < 1.5 < shares[1] + 0.5
    assert ClickLog(records=5, uniform=True).name != ClickLog(records=5).name


@pytest.mark.spark
def test_a_cluster_stays_in_its_folder(tmp_path):
    """Logs, scratch files and what executors print are below it; nothing listens elsewhere."""
    cluster = Cluster(folder=tmp_path, speculate=True)
    environment, settings = cluster.environment(), cluster.settings()

    assert cluster.printed.is_relative_to(tmp_path)
    assert environment["SPARK_HOME"].startswith(str(tmp_path))
    assert environment["SPARK_LOCAL_DIRS"].startswith(str(tmp_path))
    assert settings["spark.driver.bindAddress"] == environment["SPARK_LOCAL_IP"] == "127.0.0.1"
    assert settings["spark.speculation"] == "true"
