"""What a run on Spark has lost is noticed, too: the law of `test_lost_files.py` over there."""

from collections import Counter

import pytest

from dpstream.engines.spark import SparkEngine
from tests.support.long import is_long
from tests.support.lost_files import Grouped, find_problems

pytestmark = pytest.mark.spark

TRIED = {"spark.dps": 3, "inputs.log": 2, "run.dps": 1, "windows": 1}
"""Of these so many losses each, and of every file that executors share one; all of them if
DPSTREAM_LONG is set."""


@pytest.fixture
def engine(session):
    return SparkEngine(session, buckets=1, steps_at_once=1)


def test_what_is_lost_is_never_made_up(engine, tmp_path):
    """Identical releases, or a refusal that says what to do."""
    book, tried = tmp_path / "books" / "book", Counter()
    book.parent.mkdir()

    def is_tried(number, name):
        tried[name] += 1
        most = TRIED.get(str(name), 1 if name.parts[0] == "shared" else 0)
        return is_long() or tried[name] <= most

    found, _ = find_problems(
        Grouped(engine), tmp_path, book, (1, 1), is_tried, extras=(1,), releases=3
    )

    assert found == []
    assert len(tried) > len(TRIED)
