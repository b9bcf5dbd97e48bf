"""A registry of schemas that is slow, or sends elsewhere, and schemas that would do harm."""

import json
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from dpstream.connectors.kafka.registry import message_decoder
from dpstream.connectors.server_base import ServerOptions
from dpstream.errors import InvalidParameter, ServerUnreachable

pytest.importorskip("fastavro")


@contextmanager
def registry(answer):
    """Its address, and the requests that it gets; `answer(path, n)`: the n-th code and its body."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            code, body = answer(self.path, len(asked))
            asked.append((self.path, self.headers.get("Authorization")))
            self.send_response(code)
            if 300 <= code < 400:
                self.send_header("Location", body)
            text = json.dumps(body).encode()
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def decode(address, payloads, patience=30.0, **more):
    """What is read of messages of schema 7."""
    options = ServerOptions("kafka://127.0.0.1:9/t", {"registry": address, **more})
    framed = [b"\0\0\0\0\7" + one for one in payloads]
    return message_decoder(options, patience).decode(framed)


def record(*kinds):
    fields = [{"name": f"f{n}", "type": each} for n, each in enumerate(kinds)]
    return {"type": "record", "name": "A", "namespace": "n", "fields": fields}


def schema(*kinds):
    return {"schema": json.dumps(record(*kinds))}


def array(of):
    return {"type": "array", "items": of}


EMPTY = {"type": "record", "name": "E", "fields": []}
NOTHING = {"type": "fixed", "name": "F", "size": 0}
NULLS = record("null", "null") | {"name": "N"}


def doubled(times):
    """A record of 2 ** times nulls."""
    inside = {"type": "record", "name": "D0", "fields": [{"name": "x", "type": "null"}]}
    for n in range(times):
        twice = [{"name": "x", "type": inside}, {"name": "y", "type": f"n.D{n}"}]
        inside = {"type": "record", "name": f"D{n + 1}", "fields": twice}
    return inside


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ((["null", "A"],), "inside itself"),
        ((array("A"),), "inside itself"),
        (({"type": "map", "values": ["null", "n.A"]},), "inside itself"),
        ((array({"type": "null"}),), "no bytes"),
        ((array(NULLS),), "no bytes"),
        ((array(NOTHING),), "no bytes"),
        ((EMPTY, array("E")), "no bytes"),
        ((EMPTY, {"type": "map", "values": array("n.E")}), "no bytes"),
        ((array(record("string", doubled(9)) | {"name": "B"}),), "almost none"),
        ((doubled(40),), "no bytes"),
    ],
)
def test_schemas_that_would_do_harm(kinds, words):
    """Their messages are set aside unread: a short one may ask for more than there is."""
    with registry(lambda path, n: (200, schema(*kinds))) as (address, _):
        found = decode(address, [b"\2" * 90, b"\0"])
    assert [at for at, _ in found.bad] == [0, 1]
    for _, reason in found.bad:
        assert "schema 7 cannot be used" in reason
        assert words in reason


def test_schemas_that_use_a_type_twice():
    """Lists of what takes a byte, names that come again and many columns of null are well."""
    pair = record("int", "null") | {"name": "P"}
    counts = {"type": "map", "values": "null"}
    kinds = (pair, array("n.P"), ["null", "n.P"], counts, doubled(5), "string")
    with registry(lambda path, n: (200, schema(*kinds))) as (address, _):
        found = decode(address, [b"\2\2\4\0\2\2\2\2a\0\6ann"])
    assert not found.bad
    assert found.table["f1"].to_pylist() == ['[{"f0": 2, "f1": null}]']
    assert found.table["f5"].to_pylist() == ["ann"]


def test_the_password_goes_to_the_registry_alone(tmp_path):
    """Within the server a redirect is followed, to another one it is refused."""
    (tmp_path / "password").write_text("open sesame")
    user = {"registry_user": "ann", "registry_password_file": str(tmp_path / "password")}
    with ExitStack() as servers:
        other, seen = servers.enter_context(registry(lambda path, n: (200, schema("string"))))
        near = lambda path, n: (200, schema("string")) if n else (307, "/there")  # noqa: E731
        address, asked = servers.enter_context(registry(near))
        far, _ = servers.enter_context(registry(lambda path, n: (302, f"{other}{path}")))
        assert decode(address, [b"\6ann"], **user).table["f0"].to_pylist() == ["ann"]
        assert [path for path, _ in asked] == ["/schemas/ids/7", "/there"]
        with pytest.raises(InvalidParameter, match="another server"):
            decode(far, [b"\6ann"], **user)
    assert not seen


@pytest.mark.parametrize("code", [404, 408, 429, 503])
def test_what_is_not_there_yet_is_waited_for(code):
    """A registry that is busy, or has no such schema: later, or the run stops; no dead letter."""
    with registry(lambda path, n: (200, schema("string")) if n else (code, "")) as (address, _):
        assert decode(address, [b"\6ann"]).table["f0"].to_pylist() == ["ann"]
    with (
        registry(lambda path, n: (code, "")) as (address, _),
        pytest.raises(ServerUnreachable, match="no schema 7" if code == 404 else str(code)),
    ):
        decode(address, [b"\6ann"], patience=0.0)
