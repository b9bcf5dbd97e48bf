"""Releases by Arrow Flight: what the feed gives, to whom the feed gives it, and nothing else."""

import json
import subprocess
import sys
import time
from contextlib import contextmanager

import pyarrow as pa
import pytest
from pyarrow import flight

from dpstream.serve.access import Token
from dpstream.serve.flight import FlightSide
from tests.support.pipelines import PUSHED, TOKEN, public_side, write
from tests.support.processes import until
from tests.support.served import Served, served


@contextmanager
def flights(pipeline, **settings):
    """A client of the releases of a pipeline that was run to its end."""
    side = public_side(pipeline)
    side.hub.reader.look()
    server = FlightSide(("127.0.0.1", 0), queries=side.queries, reader=side.hub.reader, **settings)
    client = flight.connect(f"grpc+tcp://127.0.0.1:{server.port}")
    try:
        yield client
    finally:
        client.close()
        server.leave()
        side.hub.reader.close()


@pytest.fixture(scope="module")
def client(pipeline):
    with flights(pipeline) as one:
        yield one


def read(client, *path, **command):
    """All rows of a path or command."""
    descriptor = flight.FlightDescriptor.for_path(*path)
    if command:
        descriptor = flight.FlightDescriptor.for_command(json.dumps(command))
    info = client.get_flight_info(descriptor)
    table = client.do_get(info.endpoints[0].ticket).read_all()
    assert table.schema.equals(info.schema)
    assert table.schema.equals(client.get_schema(descriptor).schema)
    return table


def test_a_flight_has_the_rows_of_the_download(client, feed):
    """Of every query, of a window, after a release, and the newest values: bit for bit."""

    def downloaded(name, **given):
        asked = {"format": "arrow"} | given
        answer = feed.get(f"/api/queries/{name}/download", params=asked)
        return pa.ipc.open_stream(answer.content).read_all().replace_schema_metadata()

    listed = {info.descriptor.path[0].decode(): info for info in client.list_flights()}
    assert set(listed) == {"pages", "changed", "all", "steps"}
    for name, info in listed.items():
        table = client.do_get(info.endpoints[0].ticket).read_all()
        assert table.num_rows > 0
        assert table.equals(downloaded(name))
    assert read(client, "pages", "1").equals(downloaded("pages", window=1))
    whole = read(client, "pages")
    rows = feed.get("/api/queries/pages/releases?limit=10000").json()["rows"]
    releases = sorted({row["release"] for row in rows})
    later = read(client, query="pages", after=releases[2])
    earlier = read(client, query="pages", upto=releases[2])
    assert pa.concat_tables([earlier, later]).equals(whole)
    newest = read(client, query="changed", latest=True)
    shown = feed.get("/api/queries/changed/latest?limit=200").json()
    assert sorted(newest["clicks"].to_pylist(), reverse=True) == [
        row["values"]["clicks"] for row in shown["rows"]
    ]


@pytest.mark.parametrize(
    ("path", "command", "words"),
    [
        (["nothing"], {}, "there is no such query"),
        (["pages", "99"], {"query": "pages", "window": 99, "latest": True}, "no such window"),
        (["pages", "x"], {}, "a ticket or command must be"),
        (["pages", "1", "2"], {}, "a ticket or command must be"),
        ([], {}, "a ticket or command must be"),
        ([], {"query": 5}, "a ticket or command must be"),
        ([], {"query": "pages", "window": -1}, "a ticket or command must be"),
        ([], {"query": "pages", "window": True}, "a ticket or command must be"),
        ([], {"query": "pages", "sql": "SELECT 1"}, "a ticket or command must be"),
        ([], {"window": 1}, "a ticket or command must be"),
        ([], {"query": "pages", "latest": True, "after": 3}, "a ticket or command must be"),
    ],
)
def test_what_is_not_there_is_refused_in_fixed_words(client, path, command, words):
    """Nothing of the request, and no place in the code, comes back."""
    with pytest.raises(flight.FlightServerError, match=words) as error:
        read(client, *path, **command)
    assert "Traceback" not in str(error.value)
    assert "SELECT" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff" * 40, b"[" * 9000, b"null"])
def test_a_ticket_of_somebody_else_is_refused(client, content):
    """Whatever its bytes are."""
    with pytest.raises(flight.FlightServerError, match="a ticket or command must be"):
        client.do_get(flight.Ticket(content)).read_all()


def test_nothing_is_written_or_done_here(client):
    """Flight SQL, puts, exchanges and actions have an answer that says so."""
    sql = b"\n@type.googleapis.com/arrow.flight.protocol.sql.CommandStatementQuery\x12\x00"
    with pytest.raises(flight.FlightServerError, match="no Flight SQL"):
        client.get_flight_info(flight.FlightDescriptor.for_command(sql))
    for work in (
        lambda: list(client.do_action(flight.Action("drop", b""))),
        lambda: put(client),
        lambda: client.do_exchange(flight.FlightDescriptor.for_path("pages"))[1].read_all(),
    ):
        with pytest.raises(flight.FlightServerError, match="releases are read here"):
            work()
    assert list(client.list_actions()) == []


def put(client):
    schema = pa.schema({"page": pa.string()})
    writer, _ = client.do_put(flight.FlightDescriptor.for_path("pages"), schema)
    writer.close()


def test_who_lacks_the_token_sees_nothing(pipeline):
    """Where one is asked for: not which queries there are, and not that one is not there."""
    right = flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {TOKEN}".encode())])
    wrong = flight.FlightCallOptions(headers=[(b"authorization", b"Bearer of bad news, 16")])
    missing = flight.FlightDescriptor.for_path("nothing")
    with flights(pipeline, token=Token(TOKEN, source="a test")) as client:
        for options in (flight.FlightCallOptions(), wrong):
            for work in (
                lambda options=options: list(client.list_flights(options=options)),
                lambda options=options: client.get_flight_info(missing, options),
                lambda options=options: client.do_get(flight.Ticket(b""), options).read_all(),
                lambda options=options: list(client.list_actions(options)),
            ):
                with pytest.raises(flight.FlightUnauthenticatedError, match="missing or wrong"):
                    work()
        assert len(list(client.list_flights(options=right))) == 4


def test_places_are_freed_and_clients_are_slowed_down(pipeline):
    """Four streams of an address at once, however they end; too many requests are refused."""
    with flights(pipeline) as client:
        ticket = flight.Ticket(b'{"query": "pages"}')
        for _ in range(9):
            client.do_get(ticket).read_all()
        for _ in range(9):
            client.do_get(ticket).cancel()
        client.do_get(ticket).read_all()
    with flights(pipeline, rate=0.001, burst=3) as client:
        for _ in range(3):
            list(client.list_actions())
        with pytest.raises(flight.FlightUnavailableError, match="too many requests"):
            list(client.list_actions())


def test_a_fault_inside_is_not_shown(pipeline, caplog, monkeypatch):
    """The log has it; the client has fixed words."""
    with flights(pipeline) as client:
        monkeypatch.setattr(FlightSide, "_info", lambda *_: 1 // 0)
        with pytest.raises(flight.FlightInternalError, match="could not answer") as error:
            list(client.list_flights())
    assert "division" not in str(error.value)
    assert "ZeroDivisionError" in caplog.text


class Interpreter(subprocess.Popen):
    """`dpstream` in an interpreter of its own: gRPC does not live on in a fork."""

    def __init__(self, *words, **options):
        super().__init__([sys.executable, "-m", "dpstream", *map(str, words)], **options)


class ServedFlights(Served):
    """A running server with flights."""

    command = Interpreter

    def __init__(self, pipeline, *options):
        super().__init__(pipeline, "--flight", 0, *options)

    def client(self):
        return flight.connect(self.flight)


@pytest.mark.timeout(300)
def test_flights_of_a_live_pipeline_that_is_killed(tmp_path):
    """While it runs each has what was published by then; after a restart the same, and more."""
    path = write(tmp_path / "p", [], PUSHED)
    token = tmp_path / "flight.token"
    with served(path, "--flight-token-file", token, kind=ServedFlights) as server:
        options = flight.FlightCallOptions(
            headers=[(b"authorization", f"Bearer {token.read_text().strip()}".encode())]
        )
        with server.client() as client, pytest.raises(flight.FlightUnauthenticatedError):
            list(client.list_flights())
        now = time.time()
        rows = [{"user": f"u{n}", "page": "home", "at": now} for n in range(300)]
        assert server.post(rows)[0] == 202

        def seen(server):
            with server.client() as client:
                [info] = client.list_flights(options=options)
                assert info.descriptor.path == [b"pages"]
                return client.do_get(info.endpoints[0].ticket, options).read_all()

        until(lambda: max(seen(server)["clicks"].to_pylist(), default=0) > 200)
        before = seen(server)
        server.kill()
    with served(path, "--flight-token-file", token, kind=ServedFlights) as server:
        until(lambda: seen(server).num_rows > before.num_rows)
        after = seen(server)
        assert after.slice(0, before.num_rows).equals(before)
        reader = server.client()
        ticket = flight.Ticket(b'{"query": "pages"}')
        reader.do_get(ticket, options)  # a client that does not read holds nothing up
        assert server.stop()[0] == 0
