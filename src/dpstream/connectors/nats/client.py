"""A connection to NATS JetStream for callers that are not asynchronous, and reading by batches.

The client library lives on an event loop in a thread of its own. A connection that fails is given
up; the next call makes a new one. `Puller` takes messages of a stream in batches, which
`BatchParser` finds in the bytes that come: the library itself makes an object, an entry of a queue
and a turn of the event loop of every message.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from importlib.util import find_spec
from threading import Thread
from typing import Any, NamedTuple, TypeAlias, TypeVar

import nats
import nats.errors
import nats.js.errors
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.protocol.parser import Parser

from dpstream.connectors.server_base import ServerAway, ServerOptions, unreachable
from dpstream.errors import DpstreamError, InvalidInput, InvalidParameter, MissingDependency

T = TypeVar("T")
TIMEOUT = 10.0
"""Seconds that a server may take for one answer."""


_AWAY = (
    OSError,  # a TimeoutError is one, and those of the library are such
    nats.errors.ConnectionClosedError,
    nats.errors.ConnectionReconnectingError,
    nats.errors.ConnectionDrainingError,
    nats.errors.NoServersError,
    nats.errors.StaleConnectionError,
    nats.errors.OutboundBufferLimitError,
    nats.js.errors.ServiceUnavailableError,
    nats.js.errors.NoStreamResponseError,  # it starts, or has no leader yet
)
_CONSUMER_IDLE = 300.0  # seconds after which the server drops a consumer that nobody asks
_SILENCE = 1.0  # seconds without a message after which a consumer counts as dropped
_NO_MORE = (b"404", b"408")  # nothing more is there, which is no error


class Client:
    """Calls of JetStream, one at a time.

    `refusal` makes the error for a call that the server does not allow.
    """

    def __init__(
        self, options: ServerOptions, *, refusal: Callable[[str], DpstreamError] = InvalidInput
    ) -> None:
        self.where, self._refusal = options.where, refusal
        self._domain = options.text("domain")
        self._settings = _settings(options)
        self._connection: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._broken = asyncio.Event()

    def call(self, work: Callable[[Any], Awaitable[T]], *, seconds: float = TIMEOUT) -> T:
        """Do something with JetStream; `ServerAway` if it does not answer."""
        try:
            result: T = self._wait(self._do(work), seconds)
        except _AWAY as problem:
            self._drop()
            words = str(problem).removeprefix("nats: ") or "no answer in time"
            raise ServerAway(words) from problem
        except nats.errors.Error as problem:
            words = str(problem).removeprefix("nats: ")
            raise self._refusal(f"{self.where} refuses: {words}") from problem
        return result

    def ask(self, work: Callable[[Any], Awaitable[T]]) -> Future[T | None] | None:
        """Do something with JetStream beside the calls, if it is there; nobody waits for it."""

        async def do() -> T | None:
            if self._connection is None or not self._connection.is_connected:
                return None
            return await work(self._connection.jetstream(domain=self._domain, timeout=TIMEOUT))

        return None if self._loop is None else asyncio.run_coroutine_threadsafe(do(), self._loop)

    def first_call(self, work: Callable[[Any], Awaitable[T]]) -> T:
        """The first call of a source or sink; no second try is made."""
        try:
            return self.call(work)
        except ServerAway as problem:
            raise unreachable(self.where, problem) from problem

    def close(self) -> None:
        """Close the connection and end the thread."""
        self._drop()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    async def _do(self, work: Callable[[Any], Awaitable[T]]) -> T:
        if self._connection is None or not self._connection.is_connected:
            self._broken = broken = asyncio.Event()

            async def lost() -> None:
                broken.set()

            self._connection = nats.NATS()
            self._connection._ps = BatchParser(self._connection)  # before anything has come
            await self._connection.connect(disconnected_cb=lost, closed_cb=lost, **self._settings)
        working = asyncio.ensure_future(
            work(self._connection.jetstream(domain=self._domain, timeout=TIMEOUT))
        )
        broken_off = asyncio.ensure_future(self._broken.wait())
        await asyncio.wait({working, broken_off}, return_when=asyncio.FIRST_COMPLETED)
        broken_off.cancel()
        if not working.done():  # the library would wait for an answer that cannot come any more
            working.cancel()
            raise ConnectionResetError("the connection broke")
        return working.result()

    def _wait(self, work: Any, seconds: float) -> Any:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            Thread(target=self._loop.run_forever, name="dpstream-nats", daemon=True).start()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(seconds + TIMEOUT)
        except TimeoutError:
            future.cancel()
            raise

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and not connection.is_closed and self._loop is not None:
            try:
                self._wait(connection.close(), 0)
            except Exception:  # it is given up anyway
                return


def _settings(options: ServerOptions) -> dict[str, Any]:
    servers = [host for host in options.servers.split(",") if host] or ["127.0.0.1:4222"]
    creds, nkey = options.text("creds"), options.text("nkey_seed_file")
    if (creds or nkey) and find_spec("nkeys") is None:
        raise MissingDependency(
            f"{options.where}: creds and nkey_seed_file need the package nkeys: pip install nkeys"
        )
    given = {
        "user": options.user,
        "password": options.secret("password"),
        "token": options.secret("token"),
        "user_credentials": creds,
        "nkeys_seed": nkey,
        "tls": _tls(options),
        "tls_hostname": options.text("tls_hostname"),
    }
    return {name: value for name, value in given.items() if value is not None} | {
        "servers": [f"nats://{host}" for host in servers],
        "name": "dpstream",
        "allow_reconnect": False,  # a new connection is made by who knows where to go on
        "max_reconnect_attempts": 1,
        "reconnect_time_wait": 0.05,
        "connect_timeout": 5,
        "error_cb": _quiet,
    }


def _tls(options: ServerOptions) -> ssl.SSLContext | None:
    """Encryption, if any of its options is given."""
    wanted = options.choice("tls", ("true", "false"), "false") == "true"
    authority, cert, key = (options.text(name) for name in ("tls_ca", "tls_cert", "tls_key"))
    if not (wanted or authority or cert):
        return None
    try:
        context = ssl.create_default_context(cafile=authority)
        if cert is not None:
            context.load_cert_chain(cert, key)
    except OSError as problem:
        raise InvalidParameter(
            f"{options.where}: the files of tls_ca, tls_cert and tls_key cannot be used: {problem}"
        ) from None
    return context


async def _quiet(_: Any) -> None:
    """What goes wrong is raised where it matters; what comes too late is of no use."""


async def none_if_absent(answer: Awaitable[Any]) -> Any:
    """What the server answers; None for a stream or message that it does not have."""
    try:
        return await answer
    except nats.js.errors.NotFoundError:
        return None


class ConsumerDropped(Exception):
    """The server has dropped the consumer, as it does with one that was idle for long."""


class Message(NamedTuple):
    """A message of a stream."""

    sequence: int
    subject: str
    data: bytes


Frame: TypeAlias = tuple[bytes, bytes, bytes, bytes]
"""A message as it comes: subject, reply, header, data.

Without a reply it is the server's own, and the header says what.
"""


class BatchParser(Parser):  # type: ignore[misc]
    """Takes apart what the server sends: messages for `puller` go to it, the library has the rest.

    What the library gets is whole, so that its own parser never waits in the middle of a message.
    """

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self.puller: Puller | None = None

    def reset(self) -> None:
        """Forget what has come."""
        super().reset()
        self._come, self._needed = bytearray(), 0

    async def parse(self, data: bytes = b"") -> None:
        """Hand on all that is whole; what is not waits for the rest of it."""
        self._come += data
        if len(self._come) < self._needed:
            return
        self._needed, at, content = 0, 0, bytes(self._come)
        while (stop := content.find(b"\r\n", at)) >= 0:
            first, words = stop + 2, content[at:stop].split()
            if len(words) < 4 or words[0] not in (b"MSG", b"HMSG") or not words[-1].isdigit():
                await super().parse(content[at:first])
                at = first
                continue
            end = first + int(words[-1])
            if len(content) < end + 2:
                self._needed = end + 2 - at
                break
            if self.puller is None or words[2] != self.puller.subscription:
                await super().parse(content[at : end + 2])
            else:
                begin, optional = first, words[3:-1]
                if words[0] == b"HMSG":
                    begin += int(optional.pop())
                reply = optional[0] if optional else b""
                self.puller.arrive((words[1], reply, content[first:begin], content[begin:end]))
            at = end + 2
        self._come = bytearray(content[at:])


class Puller:
    """A consumer without a name and without acknowledgements, at one place of a stream."""

    def __init__(self, api: str, inbox: str, first: int) -> None:
        self.next = first
        """The sequence from which the next pull goes on."""
        self.subscription = b""
        """The number by which the server names it."""
        self._api, self._inbox = api, inbox
        self._arrived: list[Frame] = []
        self._wanted, self._enough = 0, asyncio.Event()

    @classmethod
    async def begin(cls, js: Any, stream: str, first: int) -> Puller:
        """A consumer that begins with the message `first`."""
        connection = js._nc  # the client has no public way from JetStream to its connection
        inbox = connection.new_inbox()
        config = ConsumerConfig(
            name=inbox.rpartition(".")[2],
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=first,
            ack_policy=AckPolicy.NONE,
            inactive_threshold=_CONSUMER_IDLE,
            mem_storage=True,
        )
        about = await js.add_consumer(stream, config)
        puller = cls(f"{js._prefix}.CONSUMER.MSG.NEXT.{stream}.{about.name}", inbox, first)
        subscription = await connection.subscribe(inbox, cb=_quiet)
        puller.subscription = str(subscription._id).encode()
        connection._ps.puller = puller
        return puller

    async def pull(self, js: Any, most: int) -> list[Message]:
        """Up to `most` messages that are there now."""
        self._arrived, self._wanted = [], most
        self._enough.clear()
        ask = json.dumps({"batch": most, "no_wait": True}).encode()
        await js._nc.publish(self._api, ask, reply=self._inbox)
        while not self._enough.is_set():
            known = len(self._arrived)
            try:
                await asyncio.wait_for(self._enough.wait(), _SILENCE)
            except TimeoutError:
                if len(self._arrived) == known:  # a server says nothing of a consumer it dropped
                    raise ConsumerDropped from None
        _, reply, header, _ = self._arrived[-1]
        if not reply:
            self._arrived.pop()
            if header[9:12] not in _NO_MORE:  # NATS/1.0 404 No Messages
                raise ConsumerDropped
        messages = []
        for subject, reply, _, data in self._arrived:
            words = reply.split(b".")  # $JS.ACK[.domain.account].stream.consumer.delivered.sequence
            sequence = int(words[5] if len(words) == 9 else words[7])
            messages.append(Message(sequence, subject.decode(), data))
        self._arrived = []
        if messages:
            self.next = messages[-1].sequence + 1
        return messages

    def arrive(self, frame: Frame) -> None:
        """Take a message that has come."""
        self._arrived.append(frame)
        if len(self._arrived) >= self._wanted or not frame[1]:
            self._enough.set()
