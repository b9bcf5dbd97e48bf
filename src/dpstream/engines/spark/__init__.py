"""The Spark engine: the same queries, noise and ledger on an existing cluster.

PySpark is imported when an engine is made, and nowhere else in dpstream.
"""

from dpstream.engines.spark.engine import SparkEngine, local_session

__all__ = ["SparkEngine", "local_session"]
