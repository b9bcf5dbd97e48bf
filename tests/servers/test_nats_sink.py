"""Releases in a NATS JetStream stream, against the real server."""

import json
import signal
from threading import Event, Thread

import pytest

from dpstream.connectors.nats.sink import NatsSink
from dpstream.connectors.registry import open_sink
from dpstream.connectors.testing import ServerSinkSuite
from dpstream.connectors.testing.suites import release, rows_seen
from dpstream.errors import InvalidInput, ServerUnreachable, StateError
from tests.connectors.test_sinks import RELEASE, ROWS
from tests.servers.nats_tools import fresh
from tests.support.processes import kill_this_process, run_in_new_process

pytestmark = pytest.mark.servers


def break_off(uri, query, window, trigger, rows):
    """Write a release; the process is killed after the second part of it."""
    send, sent = NatsSink._release, []

    async def counted(self, *args, **named):
        await send(self, *args, **named)
        sent.append(1)
        if len(sent) == 2:
            kill_this_process()

    NatsSink._release = counted
    open_sink(uri).write(query, window, trigger, release(query, window, trigger, rows=rows))


@pytest.fixture
def stream(nats):
    made = fresh(nats)
    yield made
    made.client.close()


def whole(stream, query):
    """The rows of the releases that a reader finds complete: their part 0 is there."""
    releases = {}
    for subject, headers, content in stream.messages():
        _, name, *place = subject.split(".")
        if name == query and place != ["run"]:
            window, trigger, part = map(int, place)
            parts = releases.setdefault((window, trigger), {})
            assert part not in parts, f"{subject} is there twice"
            parts[part] = (int(headers["Dpstream-Parts"]), content)
    found = []
    for parts in releases.values():
        if 0 in parts:
            assert sorted(parts) == list(range(parts[0][0]))
            found += [json.loads(line) for n in sorted(parts) for line in parts[n][1].splitlines()]
    return found


class TestNatsSink(ServerSinkSuite):
    @pytest.fixture(autouse=True)
    def _stream(self, stream):
        self.stream = stream
        self.uri = stream.uri("&part_bytes=700")

    def open(self):
        return open_sink(self.uri)

    def impatient(self):
        return open_sink(f"{self.uri}&patience=0.5")

    def visible_rows(self, query):
        return sorted((row["page"], row["count"]) for row in whole(self.stream, query))

    def break_off(self, query, window, trigger, table):
        arguments = (self.uri, query, window, trigger, table.num_rows)
        assert run_in_new_process(break_off, *arguments) == -signal.SIGKILL
        assert len(self.stream.messages()) == 4  # the mark, a release, and two parts

    def away(self):
        return self.stream.server.away()


def test_a_release_is_a_message_with_its_numbers(nats):
    """The stream is made if it is not there; what a release says of itself stands in headers."""
    stream = fresh(nats, make=False)
    sink = open_sink(stream.uri())
    sink.write("my clicks", 3, 17, RELEASE)
    sink.close()
    (_, (subject, headers, content)) = stream.messages()

    assert subject == f"{stream.subject}.my%20clicks.3.17.0"
    assert headers["Dpstream-Release-Index"] == "4"
    numbers = {"window": 3, "release": 4}
    assert [json.loads(line) for line in content.splitlines()] == [numbers | r for r in ROWS]
    stream.client.close()


def test_killed_again_and_again(stream):
    """A server that dies at any moment has every release once in the end."""
    sink, stop = open_sink(stream.uri("&part_bytes=700")), Event()

    def kill():
        while not stop.wait(0.1):
            stream.server.restart()

    killer = Thread(target=kill)
    killer.start()
    try:
        for trigger in range(30):
            sink.write("a", 0, trigger, release("a", 0, trigger, rows=40))
    finally:
        stop.set()
        killer.join()
    sink.close()

    found = sorted((row["page"], row["count"]) for row in whole(stream, "a"))
    assert found == rows_seen(*(release("a", 0, t, rows=40) for t in range(30)))


def test_parts_of_another_size_are_not_mixed(stream):
    """A release that was begun with other parts cannot be completed."""
    sink = open_sink(stream.uri("&part_bytes=700"))
    sink.write("a", 0, 1, release("a", 0, 1, rows=40))
    sink.close()
    sink = open_sink(stream.uri())
    with pytest.raises(StateError, match="written with another part_bytes"):
        sink.write("a", 0, 1, release("a", 0, 1, rows=40))
    sink.close()


def test_what_the_stream_does_not_take(nats, stream):
    """Other subjects, messages that are too large, and servers that are not there."""
    with pytest.raises(InvalidInput, match=r"must take releases\.> too"):
        open_sink(stream.uri("&subject=releases"))
    small = fresh(nats, max_msg_size=300)
    sink = open_sink(small.uri())
    with pytest.raises(StateError, match=r"does not take .*exceeds"):
        sink.write("a", 0, 1, release("a", 0, 1, rows=100))
    sink.close()
    small.client.close()
    with pytest.raises(ServerUnreachable, match="does not answer"):
        open_sink("nats://127.0.0.1:9/S")
