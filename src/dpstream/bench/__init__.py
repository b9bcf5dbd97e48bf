"""Measurements against the peers and against the targets: one JSON, one table, one plot each.

>>> BENCHES["noise"]
'exact samples per second on one core, against opendp, diffprivlib and numpy'
"""

from dpstream.bench.collected import collect
from dpstream.bench.harness import BENCHES, Findings, Progress, run, target
from dpstream.bench.page import report
from dpstream.bench.tables import table

__all__ = ["BENCHES", "Findings", "Progress", "collect", "report", "run", "table", "target"]
