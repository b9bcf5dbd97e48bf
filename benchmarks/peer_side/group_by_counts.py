"""Count the rows of every key of a click log with the peers, timed where they run.

All read the same Parquet files, each in its fastest form that keeps its promise.
opendp finds its noise and threshold before the clock starts (some 4 s at any size), and keeps each
user's first keys, since its sampled choice fails on a single key column. pipeline-dp counts in
Python, on one core: its local backend. polars promises nothing and keeps no state.
Spark promises nothing; its streaming group-by stores its state at every micro-batch, in the state
store that is its default (about twice as fast as RocksDB here). Its JVM has run a query before.
"""

from __future__ import annotations

import importlib
import os
import resource
import tempfile
import time
import warnings
from functools import cache
from pathlib import Path
from typing import Any

PACKAGES = ("opendp", "pipeline-dp", "polars", "pyspark")

Counted = tuple[float, int]
"""Seconds, and the number of keys that came out."""


def polars(request: dict[str, Any]) -> Counted:
    """The plain group-by, on all cores."""
    pl: Any = importlib.import_module("polars")
    began = time.perf_counter()
    counts = pl.scan_parquet(_pattern(request)).group_by("url").len().collect(engine="streaming")
    return time.perf_counter() - began, len(counts)


def distinct(request: dict[str, Any]) -> Counted:
    """The users of each key, by polars: our work without privacy, durability or state."""
    pl: Any = importlib.import_module("polars")
    began = time.perf_counter()
    pairs = pl.scan_parquet(_pattern(request)).select("user_id", "url").unique()
    counts = pairs.group_by("url").len().collect(engine="streaming")
    return time.perf_counter() - began, len(counts)


def opendp(request: dict[str, Any]) -> Counted:
    """User-level counts of unknown keys, with Laplace noise and a threshold."""
    dp: Any = importlib.import_module("opendp.prelude")
    pl: Any = importlib.import_module("polars")
    dp.enable_features("contrib", "honest-but-curious")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it finds epsilon = 6 large
        context = dp.Context.compositor(
            data=pl.scan_parquet(_pattern(request)),
            privacy_unit=dp.unit_of(contributions=1, identifier=pl.col("user_id")),
            privacy_loss=dp.loss_of(epsilon=request["epsilon"], delta=request["delta"]),
            split_evenly_over=1,
            margins=[dp.polars.Margin(by=(), max_length=request["records"])],
        )
        query = (
            context.query()
            .truncate_per_group(1, by=["url"], keep="first")
            .truncate_num_groups(request["groups"], by=["url"], keep="first")
            .group_by("url")
            .agg(dp.len())
        )
        release = query.release()
        began = time.perf_counter()
        counts = release.collect()
    return time.perf_counter() - began, len(counts)


def pipeline_dp(request: dict[str, Any]) -> Counted:
    """User-level counts of unknown keys, with Laplace noise and private selection of keys."""
    pdp: Any = importlib.import_module("pipeline_dp")
    pq: Any = importlib.import_module("pyarrow.parquet")
    began = time.perf_counter()
    table = pq.read_table(request["folder"], columns=["user_id", "url"])
    rows = list(zip(*(column.to_pylist() for column in table.columns), strict=True))
    budget = pdp.NaiveBudgetAccountant(
        total_epsilon=request["epsilon"], total_delta=request["delta"]
    )
    counts = pdp.DPEngine(budget, pdp.LocalBackend()).aggregate(
        rows,
        pdp.AggregateParams(
            metrics=[pdp.Metrics.COUNT],
            noise_kind=pdp.NoiseKind.LAPLACE,
            max_partitions_contributed=request["groups"],
            max_contributions_per_partition=1,
        ),
        pdp.DataExtractors(
            privacy_id_extractor=lambda row: row[0],
            partition_extractor=lambda row: row[1],
            value_extractor=lambda row: 1,
        ),
    )
    budget.compute_budgets()
    found = list(counts)
    return time.perf_counter() - began, len(found)


@cache
def session(cores: int) -> Any:
    """One JVM for this process; as many shuffle partitions as cores, where the default is 200."""
    sql: Any = importlib.import_module("pyspark.sql")
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "6g",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": str(cores),
    }
    found = sql.SparkSession.builder.master(f"local[{cores}]").config(map=settings).getOrCreate()
    found.sparkContext.setLogLevel("ERROR")
    return found


def spark(request: dict[str, Any]) -> Counted:
    """The plain streaming group-by in one JVM."""
    cores = len(os.sched_getaffinity(0))
    return streaming_count(session(cores), request["folder"], request["files"], request["scratch"])


def streaming_count(
    sql: Any, folder: str, files: int, scratch: str, *, distinct: bool = False
) -> Counted:
    """Count by key with a streaming query: `files` of a log per micro-batch, updates to nowhere.

    `distinct`: every user once in each key, as we do.
    """
    schema = sql.read.parquet(folder).schema
    with tempfile.TemporaryDirectory(dir=scratch) as state:
        began = time.perf_counter()
        rows = sql.readStream.schema(schema).option("maxFilesPerTrigger", files).parquet(folder)
        if distinct:
            rows = rows.dropDuplicates(["user_id", "url"])
        running = (
            rows.groupBy("url")
            .count()
            .writeStream.outputMode("update")
            .format("noop")
            .option("checkpointLocation", state)
            .trigger(availableNow=True)
            .start()
        )
        running.awaitTermination()
        seconds = time.perf_counter() - began
        operators = running.lastProgress["stateOperators"]
        keys = next(
            one["numRowsTotal"] for one in operators if one["operatorName"] == "stateStoreSave"
        )
    return seconds, keys


LIBRARIES = {
    "polars": polars,
    "polars, distinct": distinct,
    "opendp": opendp,
    "pipeline-dp": pipeline_dp,
    "spark": spark,
}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Count once; the peak is that of this process so far, or of the JVM."""
    seconds, keys = LIBRARIES[request["library"]](request)
    return {"seconds": seconds, "keys": keys, "peak_mb": _peak_mb(request["library"])}


def _pattern(request: dict[str, Any]) -> str:
    return str(Path(request["folder"]) / "*.parquet")


def _peak_mb(library: str) -> float | None:
    if library != "spark":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    jvm = session(len(os.sched_getaffinity(0)))._jvm.java.lang.ProcessHandle.current().pid()
    try:
        status = Path(f"/proc/{jvm}/status").read_text(encoding="utf-8")
    except OSError:
        return None
    return int(status.split("VmHWM:")[1].split()[0]) / 1024
