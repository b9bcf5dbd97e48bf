"""Slow clients, and those that take and do not read, leave all others as they are."""

import asyncio
import http.client
import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from dpstream.serve import connections, server
from dpstream.serve.access import bound_socket
from dpstream.serve.connections import Connections, throttled
from dpstream.serve.server import Settings
from dpstream.serve.sides import HANDLERS, LastingResponse, Places, Refusal, SecurityHeaders
from tests.support.long import part_of
from tests.support.pipelines import HEADERS, operator_side, public_side
from tests.support.processes import until


@contextmanager
def listening(app, **settings):
    """The app on a free port of loopback, with the limits of a real server; the port."""
    bound = bound_socket("127.0.0.1", 0, "--port")
    one = server._Quiet(server._config(app, Settings(**settings)))
    thread = threading.Thread(target=lambda: asyncio.run(one.serve(sockets=[bound])))
    thread.start()
    until(lambda: one.started)
    try:
        yield bound.getsockname()[1]
    finally:
        one.should_exit = True
        thread.join()


def connect(port, sent=b"", address="127.0.0.1"):
    """An open connection that has sent something."""
    one = socket.create_connection(("127.0.0.1", port), 60, (address, 0))
    one.sendall(sent)
    return one


def ask(port, path="/api/ledger", method="GET", **more):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, **more)
        return connection.getresponse().status
    finally:
        connection.close()


def is_closed(one):
    """Has the server ended this connection?"""
    one.settimeout(0.01)
    try:
        return one.recv(1 << 16) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def goes_on(one, piece):
    """Send a little more; True when the server has ended the connection."""
    try:
        one.sendall(piece)
    except OSError:
        return True
    return is_closed(one)


@pytest.mark.parametrize(
    ("sent", "piece"),
    [
        (b"", b""),
        (b"GET / HTTP/1.1\r\n", b"x: y\r\n"),
        (b"POST /api/ledger HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n", b"x"),
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b""),
    ],
    ids=["says nothing", "never ends its head", "never ends its body", "says nothing more"],
)
@pytest.mark.parametrize("side", ["public", "operator"])
def test_a_connection_has_so_much_time_for_a_request(pipeline, monkeypatch, side, sent, piece):
    """Though something comes now and then; an event stream goes on."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(connections, "STALLED_SECONDS", 0.3)
    public = public_side(pipeline)
    app = public.app() if side == "public" else operator_side(pipeline).app()
    with listening(app) as port, ExitStack() as stack:
        if side == "public":
            events = connect(port, b"GET /api/events?last_id=0 HTTP/1.1\r\nhost: x\r\n\r\n")
            stack.enter_context(events)
        slow = stack.enter_context(connect(port, sent))
        until(lambda: goes_on(slow, piece))
        if side == "public":
            assert public.hub.clients == 1


def test_a_post_that_comes_slowly_but_comes_is_taken(pipeline, monkeypatch):
    """Its time goes on with what has come."""
    monkeypatch.setattr(connections, "STALLED_SECONDS", 2)
    monkeypatch.setattr(connections, "LEAST_BYTES", 10)
    taken = []

    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            return
        while (message := await receive()).get("more_body"):
            taken.append(message["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    with listening(app) as port:
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 40\r\n\r\n"
        with connect(port, head) as slow:
            pause = threading.Event()
            for _ in range(4):
                pause.wait(1.05)  # the whole takes more than twice what a part may
                slow.sendall(b"x" * 10)
            assert slow.recv(1000).startswith(b"HTTP/1.1 200")
    assert b"".join(taken).startswith(b"x" * 30)


@pytest.mark.parametrize("side", ["public", "operator"])
def test_slow_clients_leave_others_unaffected(pipeline, side):
    """Of the same address, too: who waits longest makes room for who comes.

    1,000 of them with DPSTREAM_LONG=1.
    """
    slow_ones = part_of(1000, of=4)
    app = (public_side if side == "public" else operator_side)(pipeline).app()
    asked = {"path": "/api/ledger"} if side == "public" else {"path": "/health", "headers": HEADERS}
    with listening(app, clients_per_address=10) as port, ExitStack() as stack:
        slow = [stack.enter_context(connect(port, b"GET / HTTP/1.1\r\n")) for _ in range(slow_ones)]
        answers = [ask(port, **asked) for _ in range(20)]
        stay = sum(not is_closed(one) for one in slow)
    assert answers == [200] * 20
    assert stay <= 110


def test_connections_of_one_address_and_of_all_are_counted():
    """The oldest that waits makes room; where none waits the newcomer is refused."""

    class Connection:
        """One that only notes how it ends."""

        def __init__(self, address):
            self.address, self.dropped = address, False

        def drop(self):
            """As the real one does."""
            self.dropped = True
            limits.leave(self)

    limits = Connections(most=4, per_address=3)
    first, second, third, fourth, fifth = (Connection("a") for _ in range(5))
    assert all(limits.enter(one) for one in (first, second, third))
    limits.answer(first)
    assert limits.enter(fourth)
    assert [one.dropped for one in (first, second, third, fourth)] == [False, True, False, False]
    for one in (third, fourth):
        limits.answer(one)
    assert not limits.enter(fifth)  # it would be told so
    limits.leave(fifth)
    others = [Connection("b"), Connection("c")]
    assert limits.enter(others[0])
    assert limits.enter(others[1])
    assert others[0].dropped
    limits.wait(first)  # its answer is out
    for one in (first, third, fourth, others[1]):
        limits.leave(one)
    assert not limits.open
    assert not limits._waiting
    assert not limits._waiting_at


def endless(places):
    """An app that streams without end, to as many as there are places for."""

    def pieces():
        while True:
            yield b"x" * 1_000_000

    async def answer(request):
        return LastingResponse(pieces(), places)

    app = Starlette(routes=[Route("/", answer)], exception_handlers=HANDLERS)
    return SecurityHeaders(app)


def test_who_does_not_read_is_dropped_and_frees_the_place(monkeypatch):
    """Who reads goes on; what is unsent is small, however much was asked for."""
    monkeypatch.setattr(connections, "STALLED_SECONDS", 1.0)
    unsent, paused = [], connections.LimitedConnection.pause_writing

    def note(one):
        unsent.append(one.transport.get_write_buffer_size())
        paused(one)

    monkeypatch.setattr(connections.LimitedConnection, "pause_writing", note)
    places = Places("streams", most=10, per_address=10)
    request = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    with listening(endless(places)) as port, connect(port, request) as reads, ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(connect(port, request))
        until(lambda: places.addresses.total() == 6)

        def only_one_left():
            reads.recv(1 << 20)
            return places.addresses.total() == 1

        until(only_one_left)
        assert reads.recv(1 << 20)
    assert max(unsent) < 1 << 18


def test_places_are_counted_when_they_are_taken():
    """However many ask at the same moment, no more are let in."""
    places = Places("streams", most=5, per_address=3)
    begun, refused, free = [], [], asyncio.Event()

    async def slow_pieces():
        begun.append(1)
        await free.wait()
        yield b""

    async def one(address):
        async def receive():
            await free.wait()
            await asyncio.sleep(10)

        async def send(message):
            await asyncio.sleep(0)

        scope = {"type": "http", "method": "GET", "client": (address, 5), "asgi": {}}
        try:
            await LastingResponse(slow_pieces(), places)(scope, receive, send)
        except Refusal as refusal:
            refused.append(refusal.status)

    async def all_at_once():
        tasks = [asyncio.create_task(one(address)) for address in "aaaaaaaabbbbbbbb"]
        while len(begun) < 5:
            await asyncio.sleep(0)
        free.set()
        await asyncio.gather(*tasks)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, all_at_once()).result()

    assert len(begun) == 5
    assert sorted(refused) == [429] * 5 + [503] * 6
    assert not places.addresses


def test_a_download_that_is_only_asked_about_takes_no_place(pipeline):
    """As often as it is; afterwards all of them are free."""
    public = public_side(pipeline, rate=1e6, burst=10**6)
    path = "/api/queries/pages/download?format=csv"
    with TestClient(public.app()) as client:
        heads = [client.head(path) for _ in range(30)]
        whole = client.get(path)

    assert {(one.status_code, one.headers["content-type"], one.content) for one in heads} == {
        (200, "text/csv; charset=utf-8", b"")
    }
    assert whole.status_code == 200
    assert not public._downloads.addresses


def test_lines_about_bad_requests_are_throttled(pipeline, caplog, monkeypatch):
    """A client cannot fill the operator's log; how many were left out is said later."""
    now = [0.0]
    monkeypatch.setattr(connections.time, "monotonic", lambda: now[0])
    log = logging.getLogger("dpstream.test-of-throttle")
    with throttled(log.name):
        for number in range(100):
            log.warning("a bad request, %d", number)
        log.warning("another kind")
        now[0] = 61.0
        log.warning("a bad request, %d", 100)
    log.warning("a bad request, %d", 101)

    said = [record.getMessage() for record in caplog.records]
    assert said == [
        *(f"a bad request, {number}" for number in range(5)),
        "another kind",
        "a bad request, 100 (95 more like it were left out)",
        "a bad request, 101",
    ]
