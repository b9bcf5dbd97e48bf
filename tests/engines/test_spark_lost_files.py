"""What a run on Spark has lost is noticed, too: the law of `test_lost_files.py` over there."""

import itertools
import os
import shutil

import pytest

import dpstream as dps
from dpstream.engines.spark import SparkEngine
from dpstream.errors import DpstreamError
from tests.engines.test_lost_files import SECRET, WAYS_OUT, Grouped, Kept, losses, rows

pytestmark = pytest.mark.spark

TRIED = {"spark.dps": 3, "inputs.log": 2, "run.dps": 1, "windows": 1}
"""Of these so many losses each, and of every file that executors share one; all of them if
DPSTREAM_LONG is set."""


@pytest.fixture
def engine(session):
    return SparkEngine(session, buckets=1, steps_at_once=1)


def some(engine, state, ledger, many, extra=0):
    """The first releases of a start; then it is broken off."""
    shown = Grouped()
    run = dps.run(Grouped.query, source=rows(extra), state=state, secret=SECRET,
                  ledger=ledger, engine=engine)  # fmt: skip
    running = iter(run)
    try:
        return dict(shown.shown(one) for one in itertools.islice(running, many))
    finally:
        running.close()


def test_what_is_lost_is_never_made_up(engine, tmp_path):
    """Identical releases, or a refusal that says what to do."""
    state, book = tmp_path / "state", tmp_path / "books" / "book"
    book.parent.mkdir()
    shown = some(engine, state, book, 1)
    shutil.copytree(state, tmp_path / "old")
    shown |= some(engine, state, book, 1)
    for _ in range(2):
        some(engine, tmp_path / "other", tmp_path / "other.book", 1)
    kept, tried, found = Kept(state, book.parent), {}, []
    for name, how, lose, undo in losses(state, tmp_path / "old", tmp_path / "other"):
        most = TRIED.get(str(name), 1 if name.parts[0] == "shared" else 0)
        most = 100 if "DPSTREAM_LONG" in os.environ else most
        tried[name] = tried.get(name, 0) + 1
        if tried[name] > most:
            continue
        lose()
        try:
            again = some(engine, state, book, 3, extra=1)
            if any(again[key] != shown[key] for key in shown if key in again):
                found.append(f"{name} {how}: other values")
        except DpstreamError as refusal:
            if not any(word in str(refusal) for word in WAYS_OUT):
                found.append(f"{name} {how}: {refusal}")
        finally:
            undo()
            kept.put_back()

    assert found == []
    assert len(tried) > len(TRIED)
    rest = some(engine, state, book, 6)
    assert len(shown | rest) == 6
