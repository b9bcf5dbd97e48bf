"""A Spark driver that takes jobs: `python -m benchmarks.spark_driver`, one line of JSON each.

The first line describes the cluster; every later one is a job, answered by one line. The process is
the driver, its JVM is its child, and the executors are the JVM's: see `spark_cluster`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks.click_log import FILES
from benchmarks.peer_side.group_by_counts import streaming_count
from benchmarks.recovery_case import QUERY, RUN, SECRET, CheckingSink
from benchmarks.spark_cluster import Cluster
from benchmarks.throughput_run import clicks as clicks_query
from dpstream.engines.query_run import EngineOptions
from dpstream.engines.spark import SparkEngine
from dpstream.session import run

Job = dict[str, Any]


def count(session: Any, job: Job) -> dict[str, Any]:
    """The plain streaming group-by of a click log, or of its distinct users."""
    files, distinct = -(-FILES // job["batches"]), job["distinct"]
    place = job["folder"], files, job["scratch"]
    seconds, keys = streaming_count(session, *place, distinct=distinct)
    return {"seconds": seconds, "keys": keys}


def clicks(session: Any, job: Job) -> dict[str, Any]:
    """The same counts under privacy, published durably."""
    with tempfile.TemporaryDirectory(dir=job["scratch"]) as place:
        began = time.perf_counter()
        keys = 0
        for table in run(
            clicks_query(job["batches"]),
            source=_stream(session, job) if job["stream"] else _files(job),
            sink=Path(place) / "out",
            state=Path(place) / "state",
            engine=SparkEngine(session),
        ):
            keys = table.num_rows
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "keys": keys}


def _files(job: Job) -> str:
    return str(Path(job["folder"]) / "*.parquet")


def _stream(session: Any, job: Job) -> Any:
    """As many micro-batches as releases, read by Spark."""
    files = -(-FILES // job["batches"])
    reader = session.readStream.schema(session.read.parquet(job["folder"]).schema)
    return reader.option("maxFilesPerTrigger", files).parquet(job["folder"])


def publish(session: Any, job: Job) -> dict[str, Any]:
    """The query of the bench of recovery, to its end."""
    folder, began = Path(job["folder"]), time.perf_counter()
    if "word" in job:
        mention(session, job)
    query = replace(QUERY, end=job["end"]) if "end" in job else QUERY
    run(
        query,
        source=job["source"],
        sink=CheckingSink(folder, lambda: None),
        state=folder / "state",
        secret=SECRET,
        engine=SparkEngine(session, buckets=2, steps_at_once=1),
        options=EngineOptions(run_id=RUN),
    ).finish()
    return {"seconds": time.perf_counter() - began}


def mention(session: Any, job: Job) -> dict[str, Any]:
    """A plan with a word in it: what a search of the event log must find."""
    rows = session.range(3).selectExpr("cast(id as string) as id")
    return {"found": rows.where(rows["id"] == job["word"]).count()}


JOBS: Final = {"count": count, "clicks": clicks, "publish": publish, "mention": mention}


def main() -> None:
    """Start the cluster, then take jobs until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what Spark prints must not mix with the answers

    def say(**answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    asked = json.loads(sys.stdin.readline())
    began = time.perf_counter()
    session = Cluster(**asked | {"folder": Path(asked["folder"])}).session()
    say(event="ready", seconds=time.perf_counter() - began)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            say(event="done", **JOBS[job["job"]](session, job))
        except Exception as error:
            traceback.print_exc()
            say(event="failed", error=f"{type(error).__name__}: {error}")
    session.stop()


if __name__ == "__main__":
    main()
