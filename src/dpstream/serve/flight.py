"""Arrow Flight beside the feed: the same releases, to the same clients, as Arrow streams.

A ticket is JSON: `query`, and if wanted `window`, `after` and `upto` (numbers of releases) or
`latest`. A descriptor is the path [query] or [query, window], or such JSON as a command. Whatever a
client sends, and whatever goes wrong here, it is answered with fixed words.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import pyarrow as pa
from pyarrow import flight

from dpstream.connectors.encode import with_numbers
from dpstream.serve.access import Token
from dpstream.serve.public_facts import QueryDescription
from dpstream.serve.release_history import History
from dpstream.serve.release_store import ReleaseReader
from dpstream.serve.sides import LONGEST_URL, Limits, Places, Refusal

_LOG = logging.getLogger("dpstream.serve")
_LEAVING = 3.0  # seconds that open streams have when the server stops
_MOST_STREAMS = (8, 4)  # at the same time, of one address; each has a release in memory
_SQL = b"type.googleapis.com/arrow.flight.protocol.sql."
_PIECE = 1 << 14  # rows that are sent at once
_UNKNOWN = 401, "the token is missing or wrong"
_NOT_HERE = 501, "releases are read here, with list_flights, get_flight_info and do_get alone"
_NO_SQL = 501, "this is no Flight SQL: ask for the flight of a query by its name"
_NO_TICKET = (
    "a ticket or command must be a JSON object of query, and of window, after, upto or latest; a "
    "path must be a query, or a query and the number of a window"
)
_TICKET = 422, _NO_TICKET


@dataclass(frozen=True, kw_only=True)
class FlightTicket:
    """What is asked for: every release of a query, or of a window, with numbers in between."""

    query: str
    window: int | None = None
    after: int = 0
    upto: int | None = None
    latest: bool = False
    """The newest value of every key instead."""

    def __post_init__(self) -> None:
        numbers = (self.window, self.after, self.upto)
        if type(self.query) is not str or type(self.latest) is not bool:
            raise Refusal(*_TICKET)
        for number in [each for each in numbers if each is not None]:
            if type(number) is not int or not 0 <= number < 1 << 53:
                raise Refusal(*_TICKET)
        if self.latest and (self.after or self.upto is not None):
            raise Refusal(*_TICKET)

    @classmethod
    def of_json(cls, content: bytes) -> FlightTicket:
        """Of a ticket or command."""
        if _SQL in content:
            raise Refusal(*_NO_SQL)
        try:
            given = json.loads(content) if len(content) <= LONGEST_URL else None
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, dict) or not {"query"} <= set(given) <= set(cls.__annotations__):
            raise Refusal(*_TICKET)
        return cls(**given)

    @classmethod
    def of_descriptor(cls, descriptor: flight.FlightDescriptor) -> FlightTicket:
        """Of a path or command."""
        if descriptor.descriptor_type == flight.DescriptorType.CMD:
            return cls.of_json(descriptor.command)
        try:
            query, *rest = [part.decode() for part in descriptor.path or ()]
            windows = [int(number) for number in rest]
        except ValueError:
            raise Refusal(*_TICKET) from None
        if len(windows) > 1:
            raise Refusal(*_TICKET)
        return cls(query=query, window=windows[0] if windows else None)

    def json(self) -> bytes:
        """As a ticket says it."""
        return json.dumps({k: v for k, v in vars(self).items() if v not in (None, False)}).encode()


class FlightSide(flight.FlightServerBase):  # type: ignore[misc]
    """Serves releases from its making on; `token`: whoever asks needs it."""

    def __init__(
        self,
        place: tuple[str, int],
        *,
        queries: Mapping[str, QueryDescription],
        reader: ReleaseReader,
        token: Token | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
        rate: float = 200.0,
        burst: int = 1000,
    ) -> None:
        self._queries, self._reader, self._token = queries, reader, token
        self._limits, self._lock = Limits(rate=rate, burst=burst), Lock()
        self._places = Places("streams", most=_MOST_STREAMS[0], per_address=_MOST_STREAMS[1])
        self._leaving = False
        pair = [(certificate.read_bytes(), key.read_bytes())] if certificate and key else None
        address = self.address_of(place, encrypted=pair is not None)
        super().__init__(address, tls_certificates=pair, middleware={"token": _Headers()})

    @staticmethod
    def address_of(place: tuple[str, int], *, encrypted: bool) -> str:
        """Where clients find it.

        >>> FlightSide.address_of(("::1", 8815), encrypted=False)
        'grpc+tcp://[::1]:8815'
        """
        host, port = place
        shown = f"[{host}]" if ":" in host else host
        return f"grpc+{'tls' if encrypted else 'tcp'}://{shown}:{port}"

    def list_flights(self, context: Any, criteria: bytes) -> Iterator[flight.FlightInfo]:
        """Every query, with all its releases."""
        tickets = [FlightTicket(query=name) for name in self._queries]
        return iter(self._answer(context, lambda: [self._info(each) for each in tickets]))

    def get_flight_info(self, context: Any, descriptor: Any) -> flight.FlightInfo:
        """A query's columns, and a ticket for what there is now."""
        return self._answer(
            context, lambda: self._info(FlightTicket.of_descriptor(descriptor), descriptor)
        )

    def get_schema(self, context: Any, descriptor: Any) -> flight.SchemaResult:
        """A query's columns."""
        return self._answer(
            context,
            lambda: flight.SchemaResult(self._schema(FlightTicket.of_descriptor(descriptor))),
        )

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.GeneratorStream:
        """The releases of a ticket."""
        return self._answer(
            context, lambda: self._stream(FlightTicket.of_json(ticket.ticket), _address(context))
        )

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Refused: nothing is written here."""
        self._refuse(context)

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Refused."""
        self._refuse(context)

    def do_action(self, context: Any, action: Any) -> Any:
        """Refused."""
        self._refuse(context)

    def list_actions(self, context: Any) -> list[Any]:
        """There are none."""
        return list(self._answer(context, list))

    def leave(self) -> None:
        """Stop; who does not read for so long is left."""
        self._leaving = True
        thread = Thread(target=self.shutdown, name="flight", daemon=True)
        thread.start()
        thread.join(_LEAVING)

    def _info(self, asked: FlightTicket, descriptor: Any = None) -> flight.FlightInfo:
        if not asked.latest and asked.upto is None:
            asked = FlightTicket(**vars(asked) | {"upto": self._reader.horizon})
        schema = self._schema(asked)
        path = [asked.query, *([] if asked.window is None else [str(asked.window)])]
        descriptor = descriptor or flight.FlightDescriptor.for_path(*path)
        endpoint = flight.FlightEndpoint(asked.json(), [])  # no place: at this server
        return flight.FlightInfo(schema, descriptor, [endpoint], -1, -1)

    def _schema(self, asked: FlightTicket) -> pa.Schema:
        """The columns of the newest release; before it, those that follow from the query."""
        history = self._history(asked)
        newest = self._reader.newest(asked.query)
        with suppress(KeyError):
            if newest is not None:
                table = self._reader.segment(newest).published
                return with_numbers(table, 0, 0).schema.remove_metadata()
        empty = history.description.schema.empty_table()
        return with_numbers(empty, 0, 0).schema.remove_metadata()

    def _history(self, asked: FlightTicket) -> History:
        description = self._queries.get(asked.query)
        if description is None:
            raise Refusal(404, "there is no such query")
        return History(description=description, reader=self._reader)

    def _tables(self, asked: FlightTicket) -> Iterator[pa.Table]:
        history = self._history(asked)
        if asked.latest:
            newest = history.newest(asked.window)
            tables = iter([(newest.window, newest.release, history.newest_values(newest))])
        else:
            tables = history.all(asked.window, after=asked.after, upto=asked.upto)
        for window, release, table in tables:
            yield with_numbers(table, window, release).replace_schema_metadata()

    def _stream(self, asked: FlightTicket, address: str) -> flight.GeneratorStream:
        tables = self._tables(asked)
        first = next(tables, None)  # what is refused is refused before the stream begins
        schema = self._schema(asked) if first is None else first.schema
        with self._lock:
            self._places.check(address)
        batches = self._batches(chain([] if first is None else [first], tables), address)
        return flight.GeneratorStream(schema, batches)

    def _batches(
        self, tables: Iterator[pa.Table], address: str
    ) -> Generator[pa.RecordBatch, None, None]:
        """In pieces, while a place is taken."""
        with ExitStack() as stack:
            with self._lock:
                self._places.addresses[address] += 1
            stack.callback(self._give_back, address)
            try:
                for table in tables:
                    for batch in table.to_batches(max_chunksize=_PIECE):
                        if self._leaving:
                            raise flight.FlightUnavailableError("the server stops; ask again later")
                        yield batch
            except flight.FlightError:
                raise
            except Exception as problem:
                raise _fault(problem) from None

    def _give_back(self, address: str) -> None:
        with self._lock:
            self._places.addresses[address] -= 1
            self._places.addresses += type(self._places.addresses)()  # those without any go

    def _refuse(self, context: Any) -> None:
        def refuse() -> None:
            raise Refusal(*_NOT_HERE)

        self._answer(context, refuse)

    def _answer(self, context: Any, work: Callable[[], Any]) -> Any:
        """What the work gives, to who may ask and does not ask too often."""
        try:
            with self._lock:
                self._limits.check({"client": (_address(context), 0)})
            given = context.get_middleware("token")
            if self._token is not None and not self._token.fits(given and given.authorization):
                raise Refusal(*_UNKNOWN)
            return work()
        except Refusal as refusal:
            raise _ERRORS.get(refusal.status, flight.FlightServerError)(refusal.words) from None
        except Exception as problem:
            raise _fault(problem) from None


_ERRORS: dict[int, Any] = {  # of other errors the library would show the places in the code
    401: flight.FlightUnauthenticatedError,
    429: flight.FlightUnavailableError,
    503: flight.FlightUnavailableError,
}


class _Authorization(flight.ServerMiddleware):  # type: ignore[misc]
    """What a call has said of who it is."""

    def __init__(self, authorization: str | None) -> None:
        self.authorization = authorization


class _Headers(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    def start_call(self, info: Any, headers: Mapping[str, list[str]]) -> _Authorization:
        """Keep the header until the call is answered."""
        given = [values[0] for name, values in headers.items() if name.lower() == "authorization"]
        return _Authorization(given[0] if len(given) == 1 else None)


def _fault(problem: Exception) -> flight.FlightError:
    """What a client is told of a fault; the log has it."""
    _LOG.error("a flight could not be answered", exc_info=problem)
    return flight.FlightInternalError("the server could not answer")


def _address(context: Any) -> str:
    """Who asks: "ipv4:127.0.0.1:5000" without the port."""
    return str(context.peer()).rpartition(":")[0]
