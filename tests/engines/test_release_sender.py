"""Tables reach a sink in order, whatever takes how long; after a failure nothing follows."""

import threading
import time
from itertools import chain

import pyarrow as pa
import pytest

from dpstream.engines.release_sender import Sender
from dpstream.errors import StateError
from dpstream.group_by.flow import Publication
from dpstream.query.schedule import DueRelease


class Divided:
    """A sink whose first tables take longest to prepare."""

    def __init__(self, fails=None):
        self.fails, self.shown, self.most, self._now = fails, [], 0, 0
        self._lock = threading.Lock()

    def prepare(self, name, window, trigger, table):
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(0.03 if trigger % 3 == 1 else 0.001)
        with self._lock:
            self._now -= 1
        if trigger == self.fails:
            raise OSError("no space")
        return trigger

    def publish(self, prepared):
        self.shown += prepared

    def write(self, name, window, trigger, table):
        raise AssertionError("a sink with two phases is used in two phases")

    def close(self):
        pass


class Plain:
    """A sink that takes one table after another."""

    def __init__(self, fails=None):
        self.fails, self.shown = fails, []

    def write(self, name, window, trigger, table):
        time.sleep(0.01 if trigger % 3 == 1 else 0)
        if trigger == self.fails:
            raise OSError("no space")
        self.shown.append(trigger)

    def close(self):
        pass


def tables(number):
    return [Publication(due=DueRelease(0, number, 99), table=pa.table({"n": [number]}))]


@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize("kind", [Divided, Plain])
def test_tables_come_out_in_order(kind, here):
    """What is given back is in the sink by then, and at most a few steps are behind."""
    sink, found = kind(), []
    sender = Sender(sink, "q", here=here)
    for number in range(1, 21):
        sender.send(tables(number))
        found += chain.from_iterable(sender.arrived(all_of_them=False))
        assert len(found) >= number - 6
        assert sink.shown[: len(found)] == list(range(1, len(found) + 1))
    found += chain.from_iterable(sender.arrived(all_of_them=True))
    sender.close()

    assert sink.shown == list(range(1, 21))
    assert [table["n"][0].as_py() for table in found] == sink.shown
    if kind is Divided:
        assert sink.most > 1


@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize("kind", [Divided, Plain])
def test_nothing_follows_a_table_that_failed(kind, here):
    """The error says that nothing is lost; later tables stay out."""
    sink = kind(fails=5)
    sender = Sender(sink, "q", here=here)
    for number in range(1, 7):
        sender.send(tables(number))
    with pytest.raises(StateError, match=r"the sink cannot be written: no space.*nothing is lost"):
        sender.arrived(all_of_them=True)
    sender.send(tables(7))
    sender.close()

    assert sink.shown == [1, 2, 3, 4]


def test_without_a_sink_tables_come_back():
    """Who iterates is the only reader."""
    sender = Sender(None, "q")
    sender.send(tables(1))
    assert len(sender.arrived(all_of_them=True)) == 1
    sender.close()
