"""Reading and making rows are two stages: what waits between them is bounded."""

import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dpstream as dps
from dpstream.connectors.memory import TableSource
from dpstream.engines.chunks import ChunkReader, OperatorCounts
from dpstream.engines.embedded.step_rows import FileInput
from dpstream.privacy.state import Secret
from dpstream.rows.row_reader import RowReader
from tests.support.fixed import RUN, SECRET
from tests.support.runs import query, table

CHUNKS = 30


class Watched(ChunkReader):
    """Makes rows more slowly than it reads, and notes how many chunks are in between."""

    def __init__(self, broken=-1):
        source = TableSource(table(), rows=600 // CHUNKS)
        super().__init__(source, RowReader(query(), Secret(SECRET), RUN), OperatorCounts())
        self.read, self.made, self.most, self._broken = 0, 0, 0, broken

    def batch(self, *place, **named):
        self.read += 1
        if self.read == self._broken:
            raise OSError("the disk is broken")
        return super().batch(*place, **named)

    def rows(self, *place):
        time.sleep(0.005)
        self.most = max(self.most, self.read - self.made)
        self.made += 1
        return super().rows(*place)


def test_a_slow_second_stage_does_not_let_all_files_into_memory():
    """Rows in no order: every chunk is needed at once, and what is read may be wide."""
    chunks = Watched()
    files = FileInput(chunks, memory=1 << 20)
    pieces = files.take(3)
    files.close()

    assert chunks.read == chunks.made == CHUNKS
    assert chunks.most <= 3
    assert {int(rows.steps[first]) for rows, first, _ in pieces} == {3}


@pytest.mark.parametrize("broken", [1, 2, 9, CHUNKS])
def test_an_error_of_the_first_stage_comes_out_and_nobody_waits_for_ever(broken):
    files = FileInput(Watched(broken), memory=1 << 20)
    with pytest.raises(OSError, match="the disk is broken"):
        files.take(3)
    files.close()


def test_a_time_that_python_lacks_costs_its_own_row(tmp_path):
    """A file's statistics are in Python's times; one far row must not stop all the others."""
    times = [*range(0, 8 * 3600, 60), 1_714_521_600_000_000]  # one clock counts microseconds
    rows = pa.table({"user": range(len(times)), "page": ["/"] * len(times), "at": times})
    rows = rows.set_column(2, "at", pa.array(times).cast(pa.timestamp("s")))
    pq.write_table(rows, tmp_path / "far.parquet")
    asked = query(time_unit=None, arrival_column=None, aggregates=(dps.Count("n"),))
    run = dps.run(asked, source=str(tmp_path / "far.parquet"))

    assert len(list(run)) == 12
    assert [one.reason for one in run.operator.latest] == ["unparsable time"]
