"""Freed memory is kept for the next batch, in a process that asks for it."""

from tests.support.processes import run_python


def test_a_block_that_was_freed_costs_no_page_faults():
    """Three times 20 MB: after the first time the pages are there."""
    code = """
import resource
import numpy as np
from dpstream.engines.embedded.embedded_engine import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

assert keep_freed_memory()
block = np.empty(20 << 20, np.uint8)
block[:] = 1
del block
before = faults()
for _ in range(3):
    block = np.empty(20 << 20, np.uint8)
    block[:] = 1
    del block
print(faults() - before)
"""
    assert int(run_python(code).stdout) < 1000  # three times 5,120 pages if they were given back
