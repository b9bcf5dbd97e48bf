"""The Spark engine: the same queries, noise and ledger on an existing cluster.

`driver.py` runs a query, `jobs.py` has its Spark jobs, `tasks.py` what executors do in them, and
`bucket_files.py` the files that both share. PySpark is imported when an engine is made, and nowhere
else in dpstream.
"""

from dpstream.engines.spark.spark_engine import (
    ReleaseName,
    SparkEngine,
    SparkSink,
    local_session,
    ship_code,
)

__all__ = ["ReleaseName", "SparkEngine", "SparkSink", "local_session", "ship_code"]
