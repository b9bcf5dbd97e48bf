"""Messages of Debezium: the changes of a table, with the rows before and after them.

Debezium sends again what it had sent, when it goes on after a crash. Its messages say where they
stand in the database's own log, and these places rise; a message that stands before one that came
earlier is set aside. A position in the topic carries that place, so a replay sets aside the same.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np

from dpstream.connectors.changes import adds_row
from dpstream.connectors.messages import Decoded, Decoder
from dpstream.records import Columns
from dpstream.rows.column_values import text_of
from dpstream.rows.number_text import number_text

FORMAT = "debezium-json"
_OPERATIONS = {"c": "insert", "r": "insert", "u": "update", "d": "delete", "t": "truncate"}
_NO_ROW = "m"  # a message that was put into the database's log by hand
_STREAMED = (None, False, "false", "incremental")  # `source.snapshot` of what is no first snapshot
_UNKNOWN = "__debezium_unavailable_value"
_ABSENT = (_UNKNOWN, base64.b64encode(_UNKNOWN.encode()).decode())
_ALONE = 3  # numbers of a place that one row has for itself
_EPOCH = datetime(1970, 1, 1)

LogPlace = list[Any]
"""A place in the database's log, and the marks of the messages that came from there."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Changes:
    """The rows of some messages, and the last place in the database's log."""

    decoded: Decoded
    place: LogPlace | None


class DebeziumDecoder:
    """Turns messages of Debezium into rows; `rule`: what becomes of updates and deletions.

    >>> decoder = DebeziumDecoder(Decoder("json"), "inserts")
    >>> payloads = [b'{"op": "c", "before": null, "after": {"a": 1}}', b'{"op": "d"}', None]
    >>> decoder.changes(payloads, None).decoded.table.to_pylist()
    [{'a': '1'}]
    """

    def __init__(self, plain: Decoder, rule: str) -> None:
        self._plain, self._rule = plain, rule

    def changes(
        self,
        payloads: Sequence[bytes | None],
        place: LogPlace | None,
        columns: Columns = None,
    ) -> Changes:
        """The rows of all messages that come after a place in the database's log.

        `UnwantedChange` if there is one at which the rule stops. A tombstone is no row, and none is
        missed by it: it follows a deletion.
        """
        usable: list[int] = []
        rows: list[bytes] = []
        bad: list[tuple[int, str]] = []
        for at, payload in enumerate(payloads):
            if payload is None:
                continue
            try:
                event = self._event(payload)
                if event is None:
                    continue
                reached, (place, before) = place, _follow(place, event)
                if before and reached is not None:
                    raise _BadEvent(
                        f"it came again: it stands at {event.place} in the database's log, which "
                        f"was read up to {reached[0]} before"
                    )
                if adds_row(self._rule, event.operation, at):
                    rows.append(_row(event, columns))
                    usable.append(at)
            except _BadEvent as problem:
                bad.append((at, str(problem)))
        found = self._plain.decode(rows, columns)
        places = np.array(usable, dtype=np.int64)
        bad += [(usable[at], reason) for at, reason in found.bad]
        decoded = Decoded(table=found.table, origin=places[found.origin], bad=sorted(bad))
        return Changes(decoded=decoded, place=place)

    def _event(self, payload: bytes) -> _Event | None:
        """What a message says; None: nothing about a row."""
        if len(payload) > self._plain.max_bytes:
            raise _BadEvent(
                f"it has {len(payload)} bytes, more than max_message_bytes={self._plain.max_bytes}"
            )
        try:
            value = json.loads(payload, parse_float=Decimal, parse_constant=_refuse)
        except (ValueError, RecursionError) as problem:
            raise _BadEvent(f"it is not JSON: {str(problem)[:200]}") from None
        schema = None
        if isinstance(value, dict) and {*value} == {"schema", "payload"}:
            schema, value = value["schema"], value["payload"]
        if value is None:
            return None
        if not isinstance(value, dict):
            raise _BadEvent("it is not a JSON object")
        if "op" not in value:
            if value.get("status") in ("BEGIN", "END") and "id" in value:
                return None  # where a transaction begins and ends
            raise _BadEvent(
                "it has no op, so it is no message of Debezium (if a transform unwraps them, read "
                "them with format=json)"
            )
        if value["op"] == _NO_ROW:
            return None
        operation = _OPERATIONS.get(value["op"]) if isinstance(value["op"], str) else None
        if operation is None:
            raise _BadEvent(f"its op is {str(value['op'])[:20]!r}; there are c, r, u, d, t and m")
        return _Event(operation=operation, body=value, schema=schema)


class _BadEvent(Exception):
    """A message that cannot be used; its text is the reason."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Event:
    """What a message says of a change."""

    operation: str
    body: Mapping[str, Any]
    schema: Any

    @property
    def place(self) -> list[Any] | None:
        """Where it stands in the database's log; None if that is not told, or does not rise."""
        source = self.body.get("source")
        if not isinstance(source, dict) or source.get("snapshot") not in _STREAMED:
            return None
        if self.body["op"] == "r":  # of an incremental snapshot
            return None
        try:
            if source.get("connector") == "postgresql" and source.get("sequence"):
                last_commit, lsn = json.loads(source["sequence"])
                return [int(last_commit or 0), int(lsn)]
            if source.get("connector") in ("mysql", "mariadb") and source.get("file"):
                return [str(source["file"]), int(source["pos"]), int(source.get("row") or 0)]
        except (KeyError, TypeError, ValueError):
            pass
        return None

    @property
    def mark(self) -> str:
        """The same for a message that comes again, another for other changes of its record."""
        change = [self.body.get(name) for name in ("op", "before", "after")]
        return hashlib.blake2b(json.dumps(change, default=str).encode(), digest_size=8).hexdigest()


def _follow(last: LogPlace | None, event: _Event) -> tuple[LogPlace | None, bool]:
    """The place in the log after a message, and whether the message has come before.

    One record of PostgreSQL's log may hold several rows (COPY makes such), which share a place: a
    message of them has come before if the same one has. So nothing that one unit has in the log
    decides about a row of another.
    """
    place = event.place
    if place is None:
        return last, False
    marks = [] if len(place) == _ALONE else [event.mark]
    if last is None or len(last[0]) != len(place) or _rank(place) > _rank(last[0]):
        return [place, marks], False
    reached, known = last
    if _rank(place) < _rank(reached) or not marks or marks[0] in known:
        return last, True
    return [reached, known + marks], False


def _rank(place: list[Any]) -> list[Any]:
    """What places are compared by: MySQL's files are numbered, and ...1000000 follows ...999999."""
    file, *rest = place
    if not isinstance(file, str):
        return place
    stem, _, number = file.rpartition(".")
    return [stem, int(number), *rest] if number.isdecimal() else [file, 0, *rest]


def _row(event: _Event, columns: Columns) -> bytes:
    """The row after a change as JSON, all values as text."""
    after, before = event.body.get("after"), event.body.get("before")
    if not isinstance(after, dict):
        raise _BadEvent(f"its op is {event.body['op']!r}, and it has no row after that")
    types = _column_types(event.schema)
    row = {}
    for name, value in after.items():
        if columns is not None and name not in columns:
            continue
        if isinstance(value, str) and value in _ABSENT:
            value = before.get(name, value) if isinstance(before, dict) else value
            if value in _ABSENT:
                raise _BadEvent(
                    f"the value of {name!r}, which has not changed, was not sent; set REPLICA "
                    "IDENTITY FULL for the table"
                )
        try:
            row[name] = _text(value, types.get(name))
        except (ValueError, TypeError, KeyError, ArithmeticError):
            raise _BadEvent(f"the value of {name!r} is not of its type {types[name][0]}") from None
    return json.dumps(row).encode()


def _column_types(schema: Any) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """The types that a message's schema gives columns whose JSON does not show them."""
    try:
        (after,) = (each for each in schema["fields"] if each["field"] == "after")
        return {
            each["field"]: (each["name"], each.get("parameters") or {})
            for each in after["fields"]
            if each.get("name") in _READERS
        }
    except (TypeError, KeyError, ValueError, AttributeError):
        return {}


def _text(value: Any, kind: tuple[str, Mapping[str, Any]] | None) -> str | None:
    if value is None:
        return None
    if kind is not None:
        return _READERS[kind[0]](value, kind[1])
    if isinstance(value, dict | list):
        return json.dumps(value, default=float, ensure_ascii=False)
    return text_of(value)


def _time(unit: int) -> Callable[[Any, Mapping[str, Any]], str]:
    """Reads an instant in so many parts of a second; what is finer than a microsecond is cut."""

    def read(value: Any, _: Mapping[str, Any]) -> str:
        instant = _EPOCH + timedelta(microseconds=int(value) * 1_000_000 // unit)
        return instant.isoformat(sep=" ", timespec="microseconds")

    return read


def _day(value: Any, _: Mapping[str, Any]) -> str:
    return str((_EPOCH + timedelta(days=int(value))).date())


def _zoned(value: Any, _: Mapping[str, Any]) -> str:
    """An instant in its one spelling: `2024-05-01T12:00:00Z` and `...00.000Z` are one."""
    return datetime.fromisoformat(value).astimezone(UTC).isoformat(timespec="microseconds")


def _decimal(value: Any, parameters: Mapping[str, Any]) -> str:
    unscaled = int.from_bytes(base64.b64decode(value, validate=True), "big", signed=True)
    return number_text(f"{unscaled}e{-int(parameters['scale'])}")


def _scaled_decimal(value: Any, _: Mapping[str, Any]) -> str:
    return _decimal(value["value"], value)


_READERS: dict[str, Callable[[Any, Mapping[str, Any]], str]] = {
    "io.debezium.time.Date": _day,
    "io.debezium.time.Timestamp": _time(1_000),
    "io.debezium.time.MicroTimestamp": _time(1_000_000),
    "io.debezium.time.NanoTimestamp": _time(1_000_000_000),
    "io.debezium.time.ZonedTimestamp": _zoned,
    "io.debezium.data.VariableScaleDecimal": _scaled_decimal,
    "org.apache.kafka.connect.data.Date": _day,
    "org.apache.kafka.connect.data.Decimal": _decimal,
    "org.apache.kafka.connect.data.Timestamp": _time(1_000),
}
"""By the names that Kafka Connect gives types."""


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no JSON value")
