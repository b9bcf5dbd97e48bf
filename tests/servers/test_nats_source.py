"""NATS JetStream as a source, against the real server."""

import asyncio

import pyarrow as pa
import pytest
from nats.protocol.parser import Parser

from dpstream.connectors.nats.client import BatchParser, Client, Puller
from dpstream.connectors.registry import open_source
from dpstream.connectors.server_base import ServerOptions
from dpstream.connectors.testing import ServerSourceSuite
from dpstream.errors import InvalidInput, InvalidParameter, RowsLost, ServerUnreachable
from tests.servers.nats_tools import fresh
from tests.support.reading import read_users

pytestmark = pytest.mark.servers


@pytest.fixture
def stream(nats):
    made = fresh(nats)
    yield made
    made.client.close()


def opened(stream, more=""):
    return open_source(stream.uri(more))


class TestNatsSource(ServerSourceSuite):
    @pytest.fixture(autouse=True)
    def _stream(self, stream):
        self.stream = stream

    def open(self, more=""):
        return opened(self.stream, more)

    def impatient(self):
        return self.open("&patience=0.5")

    def put(self, rows):
        self.stream.put(*rows)

    def spoil(self):
        self.stream.put(b"{oops")

    def lose(self):
        self.stream.client.call(lambda js: js.purge_stream(self.stream.name))

    def foreign_positions(self):
        made = self.stream.info().created.isoformat()
        return [17, [made, 0], ["1999", 0, 1, 1], [made, 0, 900, 900], {"next": 3}, "x"]

    def away(self):
        return self.stream.server.away()


def test_a_stream_that_was_made_again(stream):
    """Its sequence numbers mean other messages."""
    stream.put({"user": "a"}, {"user": "b"})
    source = opened(stream)
    _, position = read_users(source, stream.name)
    stream.client.call(lambda js: js.delete_stream(stream.name))
    with pytest.raises(RowsLost, match="is gone"):
        read_users(source, stream.name, position)
    stream.client.call(lambda js: js.add_stream(name=stream.name, subjects=[f"{stream.subject}.>"]))
    stream.put(*[{"user": "c"}] * 9)

    for until in (None, position):
        with pytest.raises(RowsLost, match="another one has its name"):
            source.read(stream.name, None if until else position, until=until)
    source.close()


def test_a_message_deleted_by_hand(stream):
    """One that nobody has read is no row; one that a replay needs is missed."""
    stream.put(*({"user": user} for user in "abcde"))
    source = opened(stream)
    stream.client.call(lambda js: js.delete_msg(stream.name, 2))
    users, position = read_users(source, stream.name)
    again = source.read(stream.name, None, columns=["user"], until=position)
    assert users == again.table["user"].to_pylist() == ["a", "c", "d", "e"]
    stream.client.call(lambda js: js.delete_msg(stream.name, 4))

    with pytest.raises(RowsLost, match=r"has read 4 messages of .* and 3 of them are left"):
        source.read(stream.name, None, until=position)
    source.close()


def test_messages_that_expire_unread(nats):
    """A limit that drops them before they are read is an error, at once or when it is noticed."""
    stream = fresh(nats, max_msgs=5)
    stream.put(*({"user": user} for user in "abc"))
    source = opened(stream)
    users, position = read_users(source, stream.name)
    stream.put(*({"user": user} for user in "defghijk"))

    assert users == ["a", "b", "c"]
    with pytest.raises(RowsLost, match="dropped the messages 4 to 6 before they were read"):
        read_users(source, stream.name, position)
    source.close()
    stream.client.close()


def test_messages_that_expire_while_they_are_asked_for(stream, monkeypatch):
    """Between the look at the stream and the answer."""
    stream.put(*({"user": user} for user in "abc"))
    source = opened(stream)
    _, position = read_users(source, stream.name)
    stream.put(*({"user": user} for user in "defg"))

    async def late(self, js, most, pull=Puller.pull):
        await js.purge_stream(stream.name, seq=6)
        return await pull(self, js, most)

    monkeypatch.setattr(Puller, "pull", late)
    with pytest.raises(RowsLost, match="dropped the messages 4 to 5 before they were read"):
        read_users(source, stream.name, position)
    source.close()


def test_a_consumer_that_the_server_dropped(stream):
    """As it does with one that was idle for long: the next read makes another."""
    stream.put({"user": "a"})
    source = opened(stream)
    _, position = read_users(source, stream.name)

    async def drop(js):
        for one in await js.consumers_info(stream.name):
            await js.delete_consumer(stream.name, one.name)

    stream.client.call(drop)
    stream.put({"user": "b"})

    assert read_users(source, stream.name, position)[0] == ["b"]
    source.close()


def test_the_server_remembers_nothing(stream):
    """No durable consumer, no acknowledgement that could move a position."""
    stream.put(*({"user": user} for user in "abc"))
    source = opened(stream)
    read_users(source, stream.name)
    (about,) = stream.client.call(lambda js: js.consumers_info(stream.name))

    assert about.config.durable_name is None
    assert about.config.ack_policy == "none"
    source.close()


def test_some_subjects(stream):
    """Those that fit are rows; positions count all messages."""
    stream.put({"user": "a"}, subject="web.home")
    stream.put({"user": "b"}, subject="app.home")
    stream.put({"user": "c"}, subject="web.news.today")
    for pattern, users in (("web.>", ["a", "c"]), ("*.home", ["a", "b"]), (">", ["a", "b", "c"])):
        source = opened(stream, f"&subject={stream.subject}.{pattern}")
        assert read_users(source, stream.name)[0] == users
        source.close()


def test_latest_is_where_the_run_began(stream):
    """Also for a replay, long after."""
    stream.put({"user": "old"})
    source = opened(stream, "&start=latest")
    begun = source.read(stream.name, None).position
    stream.put({"user": "new"})
    users, position = read_users(source, stream.name, begun)
    source.close()
    stream.put({"user": "newest"})
    source = opened(stream, "&start=latest")
    again = source.read(stream.name, None, columns=["user"], until=position)

    assert users == again.table["user"].to_pylist() == ["new"]
    source.close()


def test_until_makes_it_bounded(stream):
    """A part of the stream that is complete."""
    stream.put(*({"user": user} for user in "abc"))
    source = opened(stream, "&until=2")
    (name,) = source.partitions()

    assert source.bounded
    assert read_users(source, name)[0] == ["a", "b"]
    source.close()
    with pytest.raises(InvalidInput, match="ends at 3, before until=9"):
        opened(stream, "&until=9")


def test_csv_and_arrow(nats):
    """Formats are those of all brokers."""
    out = pa.BufferOutputStream()
    table = pa.table({"user": ["a", "b"], "n": [1, 2]})
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    for more, payloads in (
        ("&format=csv&header=user,n", [b"a,1", b'b,"2']),
        ("&format=arrow", [out.getvalue().to_pybytes(), b"no arrow"]),
    ):
        stream = fresh(nats)
        stream.put(*payloads)
        source = opened(stream, more)
        batch = source.read(stream.name, None)

        assert batch.table["user"].to_pylist()[0] == "a"
        assert [one.where for one in batch.rejected] == [f"{stream.name}, message 2"]
        source.close()
        stream.client.close()


def test_what_is_not_there(nats, stream):
    """A clear error, at once."""
    with pytest.raises(InvalidInput, match="no stream 'NOWHERE'"):
        open_source(stream.uri().replace(f"/{stream.name}?", "/NOWHERE?"))
    with pytest.raises(InvalidParameter, match="must name one stream"):
        open_source(nats.address)
    with pytest.raises(InvalidParameter, match="did you mean 'subject'"):
        opened(stream, "&subjct=x")
    with pytest.raises(ServerUnreachable, match=r"127.0.0.1:9/S does not answer.*start it"):
        open_source("nats://127.0.0.1:9/S")
    with pytest.raises(InvalidInput, match=r"refuses.*Authorization Violation"):
        open_source(f"{nats.address}/{stream.name}")
    work = fresh(nats, retention="workqueue")
    with pytest.raises(InvalidInput, match="would go before they are read"):
        opened(work)
    last = fresh(nats, max_msgs_per_subject=1)
    with pytest.raises(InvalidInput, match="the last 1 messages of each subject"):
        opened(last)
    for one in (work, last):
        one.client.close()


def test_tls_options_are_taken(tmp_path):
    """A certificate that cannot be read is named; without one the system's are used."""
    with pytest.raises(InvalidParameter, match=r"tls_ca.* cannot be used"):
        Client(ServerOptions(f"nats://127.0.0.1:9/S?tls_ca={tmp_path / 'none.pem'}"))
    client = Client(ServerOptions("nats://127.0.0.1:9/S?tls=true&tls_hostname=example"))
    assert client._settings["tls"].check_hostname
    assert client._settings["tls_hostname"] == "example"


SENT = (
    b"MSG s.a 7 $JS.ACK.S.c.1.3.3.0.0 5\r\n{\r\n}\xff\r\n"
    b"PING\r\n"
    b"MSG other 1 0\r\n\r\n"
    b"HMSG s.b 7 $JS.ACK.S.c.1.4.4.0.0 14 16\r\nNATS/1.0\r\nA: bxy\r\n"
    b"MSG s.c 7 $JS.ACK.S.c.1.9.5.0.0 0\r\n\r\n"
    b"HMSG in.box 7 28 28\r\nNATS/1.0 404 No Messages\r\n\r\n\r\n"
)
FRAMES = [
    (b"s.a", b"$JS.ACK.S.c.1.3.3.0.0", b"", b"{\r\n}\xff"),
    (b"s.b", b"$JS.ACK.S.c.1.4.4.0.0", b"NATS/1.0\r\nA: b", b"xy"),
    (b"s.c", b"$JS.ACK.S.c.1.9.5.0.0", b"", b""),
    (b"in.box", b"", b"NATS/1.0 404 No Messages\r\n\r\n", b""),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 30, 1000])
def test_messages_are_found_however_they_are_cut(monkeypatch, size):
    """What is not for the reader goes to the library, whole and in order."""
    left, frames = [], []

    async def library(self, data=b""):
        left.append(data)

    monkeypatch.setattr(Parser, "parse", library)
    parser = BatchParser(None)
    parser.puller = Puller("api", "in.box", 3)
    parser.puller.subscription = b"7"
    monkeypatch.setattr(parser.puller, "arrive", frames.append)
    for at in range(0, len(SENT), size):
        asyncio.run(parser.parse(SENT[at : at + size]))

    assert frames == FRAMES
    assert left == [b"PING\r\n", b"MSG other 1 0\r\n\r\n"]


def test_messages_with_headers_and_of_any_size(stream):
    """Larger than what comes at once, empty, with ends of lines, with headers."""
    users = ["x" * 300_000, "y", "z" * 40_000]
    stream.put({"user": users[0]}, b'{\r\n"user": "y"}', b"")

    async def publish(js):
        await js.publish(
            f"{stream.subject}.a", b'{"user": "%s"}' % users[2].encode(), headers={"A": "b"}
        )

    stream.client.call(publish)
    source = opened(stream)
    batch = source.read(stream.name, None, columns=["user"])

    assert batch.table["user"].to_pylist() == users
    assert [one.where for one in batch.rejected] == [f"{stream.name}, message 3"]
    source.close()
