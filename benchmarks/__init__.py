"""Measurements against the peers and against the targets: one JSON, one table, one plot each.

>>> BENCHES["noise"]
'exact samples per second on one core, against opendp, diffprivlib and numpy'
"""

from benchmarks.harness import BENCHES, Findings, Progress, run, target
from benchmarks.report_page import collect, report, table

__all__ = ["BENCHES", "Findings", "Progress", "collect", "report", "run", "table", "target"]
