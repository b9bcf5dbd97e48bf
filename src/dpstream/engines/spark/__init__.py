"""The Spark engine: the same queries, noise and ledger on an existing cluster.

PySpark is imported when an engine is made, and nowhere else in dpstream.
"""

from dpstream.engines.spark.engine import SparkEngine, local_session, ship_code
from dpstream.engines.spark.sinks import ReleaseName, SparkSink

__all__ = ["ReleaseName", "SparkEngine", "SparkSink", "local_session", "ship_code"]
