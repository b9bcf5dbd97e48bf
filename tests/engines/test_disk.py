"""A full disk or a forbidden place: a clear error, nothing lost, and on it goes."""

import errno
import os

import pytest

from benchmarks.recovery_child import watched
from dpstream.errors import DpstreamError, LedgerError, StateError
from tests.support.long import is_long
from tests.support.runs import SHORT, charges, published, start, table, whole, write

_TAKES_SPACE = ("pwrite", "fsync", "mkdir", "link", "replace")


class Failing:
    """From the n-th operation that takes space on, the disk refuses."""

    def __init__(self, nth, number):
        self.left, self.number = nth, number

    def __call__(self, operation, phase, argument):
        if operation in _TAKES_SPACE:
            self.left -= 1
            if self.left <= 0:
                raise OSError(self.number, os.strerror(self.number))


def attempt(place):
    """What goes wrong with a run; None: it ends."""
    try:
        start(place, SHORT).finish()
    except (DpstreamError, OSError) as error:
        return error
    return None


@pytest.fixture(
    scope="module",
    params=[(errno.ENOSPC, 2 if is_long() else 7), (errno.EACCES, 9), (errno.EIO, 9)],
    ids=["full", "forbidden", "broken"],
)
def failures(request, tmp_path_factory):
    """Runs on a disk that fails at some operation and is mended: both errors, the same bytes?"""
    number, stride = request.param
    expected = whole(tmp_path_factory.mktemp("whole"), SHORT)
    found, nth, disk = {}, 1, Failing(0, number)
    while disk.left <= 0:
        place, disk = tmp_path_factory.mktemp("failed"), Failing(nth, number)
        write(place, table())
        with watched(disk):
            first = attempt(place)
        second = attempt(place)
        same = second is None and published(place) == expected
        found[nth] = (first, second, same and charges(place / "state" / "ledger") == 1)
        nth += stride
    assert nth > 50
    assert first is None
    return found


def test_a_failing_disk_loses_nothing(failures):
    """Whenever it fails, the next attempt, in the same process too, ends with the same bytes."""
    assert {nth: (one, two) for nth, (one, two, same) in failures.items() if not same} == {}


def test_a_failing_disk_is_named(failures):
    """The error is one of ours and says what is wrong with which file."""
    *errors, _ = [first for first, _, _ in failures.values()]

    assert None not in errors
    assert [error for error in errors if not isinstance(error, StateError | LedgerError)] == []


def test_a_state_directory_that_cannot_be_made(tmp_path):
    """The error names the directory and what is wrong with it."""
    write(tmp_path, table())
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StateError, match="file/state cannot be"):
        start(tmp_path, SHORT, state=tmp_path / "file" / "state").finish()
