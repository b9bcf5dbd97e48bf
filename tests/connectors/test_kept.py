import errno
import json
import os
import time
from datetime import timedelta

import pyarrow as pa
import pytest

from dpstream.connectors.dead_letters import DeadLetters
from dpstream.connectors.files.source import open_directory
from dpstream.connectors.storage import old_files
from dpstream.connectors.testing import Abort, Aborted, ListSink, ListSource
from dpstream.connectors.write_ahead import WriteAhead
from dpstream.errors import StateError
from dpstream.records import Batch, Rejected, Sink, Source
from tests.support.reading import read_all, rows

BAD = Rejected(where="a.csv, line 2", reason='it is "broken"', row="1,2,3\x00ü")


class Once(ListSource):
    """A source that gives each chunk once."""

    replayable = False

    def __init__(self, script):
        super().__init__(script, bounded=False)
        self.given = 0

    def read(self, partition, position, *, columns=None, until=None):
        assert (position or 0) == self.given
        batch = super().read(partition, position, columns=columns)
        self.given = batch.position
        return batch


def pass_days(monkeypatch, days) -> None:
    """The clocks go on by so many days."""
    for clock in (time.time, time.monotonic):
        now = clock() + days * 86400
        monkeypatch.setattr(time, clock.__name__, lambda now=now: now)


def script() -> list:
    rejected = Batch(
        table=pa.table({"a": [3], "b": ["z"]}), position=None, done=False, rejected=[BAD]
    )
    return [[{"a": 1, "b": "x"}], [{"a": 2, "b": "y"}], rejected]


def test_what_was_delivered_is_delivered_again(tmp_path):
    """By a new process, from every position, with the rejected rows; then new chunks follow."""
    first = read_all(WriteAhead(Once(script()), tmp_path))
    recovered = WriteAhead(Once([[{"a": 4, "b": "new"}]]), tmp_path)

    assert recovered.replayable
    assert not recovered.bounded
    positions = [None, *(batch.position for batch in first)]
    for position, before in zip(positions, first, strict=False):
        again = recovered.read("list", position)
        assert again.table == before.table
        assert again.position == before.position
        assert again.rejected == before.rejected
    assert again.rejected == [BAD]
    live = recovered.read("list", positions[-1])
    assert rows([live]) == [{"a": 4, "b": "new"}]
    assert live.position == positions[-1] + 1


def test_nothing_new_keeps_nothing(tmp_path):
    """A poll without rows moves no position and writes no file."""
    source = WriteAhead(Once([]), tmp_path)

    batch = source.read("list", None)

    assert (batch.position, batch.done, batch.table.num_rows) == (None, True, 0)
    assert list(tmp_path.iterdir()) == []


def test_chunks_that_no_recovery_needs_are_forgotten(tmp_path):
    """The later ones stay; a position that was forgotten is refused."""
    source = WriteAhead(Once(script()), tmp_path)
    read_all(source)
    source.commit({"list": 2, "other": 5})

    assert len(list(tmp_path.iterdir())) == 1
    assert rows([source.read("list", 2)]) == [{"a": 3, "b": "z"}]
    with pytest.raises(StateError, match="keeps the chunks 2 to 2 of 'list', but chunk 0"):
        source.read("list", None)
    source.commit({"list": 3})
    anew = WriteAhead(Once([[{"a": 9}]]), tmp_path)
    assert rows([anew.read("list", 3)]) == [{"a": 9}]


def test_chunks_that_are_freed_may_stay_for_a_time(tmp_path, monkeypatch):
    """Beside the others, where no recovery looks; they go when they are old."""
    source = WriteAhead(Once(script()), tmp_path, keep=timedelta(days=2))
    read_all(source)
    source.commit({"list": 2})
    kept = sorted((tmp_path / "kept").iterdir())

    assert len(kept) == 2
    assert len(list(tmp_path.glob("*.segment"))) == 1
    with pytest.raises(StateError, match="keeps the chunks 2 to 2 of 'list', but chunk 0"):
        source.read("list", None)
    later = WriteAhead(Once([[{"a": 9}]]), tmp_path, keep=timedelta(days=2))
    assert rows([later.read("list", 2), later.read("list", 3)])[1] == {"a": 9}
    pass_days(monkeypatch, 3)
    later.commit({"list": 3})
    assert list((tmp_path / "kept").iterdir()) == []


def test_files_that_are_done_may_go_when_they_are_old(tmp_path, monkeypatch):
    """Their time in done/ counts, not when they were written; by default they stay."""
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("x\n1\n")
        os.utime(tmp_path / name, (1, 1))
    source = open_directory(tmp_path, "move", keep=timedelta(days=2))
    ends = {name: source.read(name, None).position for name in source.partitions()}
    source.commit({"a.csv": ends["a.csv"]})

    assert (tmp_path / "done" / "a.csv").exists()
    assert old_files(tmp_path / "done", timedelta(days=2)) == []
    pass_days(monkeypatch, 3)
    source.commit({"b.csv": ends["b.csv"]})
    assert not list((tmp_path / "done").iterdir())
    source.close()


def test_the_segments_are_for_this_user_alone(tmp_path):
    """They hold raw data."""
    read_all(WriteAhead(Once(script()), tmp_path / "wal"))

    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "wal").iterdir()} == {0o600}


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:-1] + b"?", lambda b: b""])
def test_a_damaged_segment_is_refused(tmp_path, damage):
    """Its checksum tells."""
    read_all(WriteAhead(Once(script()), tmp_path))
    path = sorted(tmp_path.iterdir())[1]
    path.write_bytes(damage(path.read_bytes()))

    with pytest.raises(StateError, match="is damaged; restore it"):
        WriteAhead(Once([]), tmp_path).read("list", 1)


def test_a_segment_of_another_format_is_refused(tmp_path):
    """It is not damaged: another version of dpstream wrote it."""
    read_all(WriteAhead(Once(script()), tmp_path))
    path = sorted(tmp_path.iterdir())[1]
    path.write_bytes(path.read_bytes().replace(b"write-ahead-1", b"write-ahead-2", 1))

    with pytest.raises(StateError, match="has another format than this version of dpstream reads"):
        WriteAhead(Once([]), tmp_path).read("list", 1)


def test_a_replay_may_ask_for_fewer_columns(tmp_path):
    """Not for those that were not kept."""
    WriteAhead(Once(script()), tmp_path).read("list", None, columns=["a", "b"])
    again = WriteAhead(Once([]), tmp_path)

    assert rows([again.read("list", None, columns=["b"])]) == [{"b": "x"}]
    with pytest.raises(StateError, match="was kept without the column 'c'"):
        again.read("list", None, columns=["c"])


def test_a_full_disk_loses_no_chunk(tmp_path, monkeypatch):
    """What a pipe will not repeat is kept in memory until it can be written."""
    source = WriteAhead(Once(script()), tmp_path)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("dpstream.privacy.state.durable_files.os.fsync", full)
        with pytest.raises(StateError, match="no space left"):
            source.read("list", None)
    assert list(tmp_path.iterdir()) == []
    assert rows([source.read("list", None)]) == [{"a": 1, "b": "x"}]


def test_dead_letters_are_replaced_by_a_replay(tmp_path):
    """One file per name; nothing for no rows; a new process counts them too."""
    letters = DeadLetters(tmp_path / "bad")
    letters.write("none", [])
    assert not (tmp_path / "bad").exists()
    for _ in range(2):
        letters.write("clicks/a.csv 0", [BAD, BAD])
    table = pa.table({"row": ["r"], "where": ["w"], "reason": ["why"]})
    letters.write("b", table)

    paths = sorted((tmp_path / "bad").iterdir())
    assert [path.name for path in paths] == ["b.jsonl", "clicks%2Fa%2Ecsv%200.jsonl"]
    assert letters.count() == DeadLetters(tmp_path / "bad").count() == 3
    first = json.loads(paths[1].read_text().splitlines()[0])
    assert first == {"where": BAD.where, "reason": BAD.reason, "row": BAD.row}
    assert paths[0].read_text() == '{"where": "w", "reason": "why", "row": "r"}\n'
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}


@pytest.mark.parametrize("there", [False, True], ids=["made", "was there"])
@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_dead_letters_are_for_this_user_alone(tmp_path, umask, there):
    """They are raw rows: folder and files, whatever the umask, also where the folder was there."""
    folder = tmp_path / "state" / "dead-letters"
    before = os.umask(umask)
    try:
        if there:
            folder.mkdir(parents=True)
            folder.chmod(0o755)
            DeadLetters(folder)
            assert folder.stat().st_mode & 0o777 == 0o700
            folder.chmod(0o755)
        DeadLetters(folder).write("a", [BAD])
    finally:
        os.umask(before)

    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600]
    assert folder.parent.stat().st_mode & 0o777 == 0o777 & ~umask


def test_a_script_aborts_once():
    """And goes on where it was."""
    source = ListSource([[{"a": 1}], Abort(), [{"a": 2}]])
    first = source.read("list", None)
    with pytest.raises(Aborted):
        source.read("list", first.position)
    second = source.read("list", first.position, columns=["a"])

    assert rows([first, second]) == [{"a": 1}, {"a": 2}]
    assert (first.done, second.done) == (False, True)
    assert source.read("list", second.position).done
    assert isinstance(source, Source)
    assert isinstance(ListSink(), Sink)
