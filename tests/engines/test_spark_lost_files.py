"""What a run on Spark has lost is noticed, too: the law of `test_lost_files.py` over there."""

import itertools
import shutil
from collections import Counter

import pytest

from dpstream.engines.spark import SparkEngine
from dpstream.privacy.state.backup import Restoration, back_up
from tests.support.long import is_long
from tests.support.lost_files import STEPS, Grouped, find_problems, some

pytestmark = pytest.mark.spark

TRIED = {"spark.dps": 3, "inputs.log": 2, "run.dps": 1, "windows": 1}
"""Of these so many losses each, and of every file that executors share one; all of them if
DPSTREAM_LONG is set."""


@pytest.fixture
def engine(session):
    return SparkEngine(session, buckets=1, steps_at_once=1)


def test_a_backup_is_put_back(engine, tmp_path):
    """The same releases; the window whose key is lost is given up."""
    kind, book = Grouped(engine), tmp_path / "book"
    running = kind.start(tmp_path / "state", book, 0)
    shown = [kind.shown(one) for one in itertools.islice(running, 1)]
    back_up(tmp_path / "state", tmp_path / "backup")
    shown += [kind.shown(one) for one in itertools.islice(running, 3)]
    running.close()
    shutil.rmtree(tmp_path / "state")
    restoration = Restoration(folder=tmp_path / "new", because="a test", who="ann")
    (restored,) = restoration.restore(tmp_path / "backup").values()
    assert (*restored.final, *restored.lost) == (0, 1)
    assert some(kind, tmp_path / "new", book, STEPS) == {}


def test_a_backup_of_an_open_window_is_put_back(engine, tmp_path):
    """Its key is in the backup: what was published comes again, and the rest follows."""
    kind, book = Grouped(engine), tmp_path / "book"
    running = kind.start(tmp_path / "state", book, 0)
    shown = dict(kind.shown(one) for one in itertools.islice(running, 4))
    back_up(tmp_path / "state", tmp_path / "backup")
    shown |= dict(kind.shown(one) for one in itertools.islice(running, 1))
    running.close()
    shutil.rmtree(tmp_path / "state")
    restoration = Restoration(folder=tmp_path / "new", because="a test", who="ann")
    (restored,) = restoration.restore(tmp_path / "backup").values()
    after = some(kind, tmp_path / "new", book, STEPS)

    assert not restored.lost
    assert all(after[key] == shown[key] for key in after.keys() & shown.keys())
    assert len(shown | after) == STEPS


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
