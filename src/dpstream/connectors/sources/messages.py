"""Messages as rows: JSON objects, CSV records or Arrow streams; one that cannot be read costs only
itself.

Every column is text, as from files of JSON lines and CSV, so that messages of one topic may differ
in the types they declare. Messages are parsed together where none can reach into the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa

from dpstream.connectors.sources.csv import CsvParser
from dpstream.connectors.sources.jsonl import JsonlParser
from dpstream.connectors.sources.text import SHOWN
from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.records import Integers, Rejected
from dpstream.stages.column_values import canonical
from dpstream.stages.number_text import one_number_spelling
from dpstream.stages.parse import whole_column

FORMATS = ("json", "csv", "arrow")
MAX_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Decoded:
    """The rows of some messages: `origin` is each row's message, `bad` what is no row, and why."""

    table: pa.Table
    origin: Integers
    bad: list[tuple[int, str]]

    def rejected(self, payloads: Sequence[bytes | None], where: Sequence[str]) -> list[Rejected]:
        """What could not be read, with its place and as much of its text as is kept."""
        texts = ((payloads[i] or b"")[: 4 * SHOWN].decode(errors="replace") for i, _ in self.bad)
        return [
            Rejected(where=where[i], reason=reason, row=text[:SHOWN])
            for (i, reason), text in zip(self.bad, texts, strict=True)
        ]


class Format(Protocol):
    """How one kind of payload is read."""

    def parts(self, payloads: Sequence[bytes]) -> Iterator[range]:
        """Runs of messages that may be parsed together."""
        ...

    def parse(
        self, payloads: Sequence[bytes], columns: Sequence[str] | None
    ) -> tuple[pa.Table, Integers, list[tuple[int, str]]]:
        """Rows of one run, each row's message, and what is no row; InvalidInput if none is."""
        ...


def messages_of(kind: str, *, header: Sequence[str] | None = None) -> Decoder:
    """A decoder of `json`, `csv` or `arrow`; `header`: the columns of CSV messages without one."""
    formats: dict[str, Format] = {"json": _Json(), "csv": _Csv(header), "arrow": _Arrow()}
    if kind not in formats:
        raise InvalidParameter(f"format must be one of {', '.join(FORMATS)}; got {kind!r}")
    if header is not None and kind != "csv":
        raise InvalidParameter(f"header names the columns of CSV messages; the format is {kind}")
    return Decoder(formats[kind], header=header)


class Decoder:
    """Turns payloads into one table.

    >>> found = messages_of("json").decode([b'{"a": 1}', b"oops", None], ["a"])
    >>> found.table.to_pylist(), found.origin.tolist(), [at for at, _ in found.bad]
    ([{'a': '1'}], [0], [1, 2])
    """

    def __init__(
        self, kind: Format, *, header: Sequence[str] | None = None, max_bytes: int = MAX_BYTES
    ) -> None:
        self._kind, self._header, self.max_bytes = kind, header, max_bytes

    def decode(
        self, payloads: Sequence[bytes | None], columns: Sequence[str] | None = None
    ) -> Decoded:
        """The rows of all payloads; None is a message without a value."""
        self._check(columns)
        tables, origins = [_empty(columns)], [np.zeros(0, np.int64)]
        bad: list[tuple[int, str]] = []
        usable: list[int] = []
        content: list[bytes] = []
        for at, payload in enumerate(payloads):
            reason = self._refused(payload)
            if reason is None:
                usable.append(at)
                content.append(payload or b"")
            else:
                bad.append((at, reason))
        places = np.array(usable, dtype=np.int64)
        for run in self._kind.parts(content):
            part = content[run.start : run.stop]
            try:
                table, origin, wrong = self._kind.parse(part, columns)
            except InvalidInput as problem:
                bad += [(usable[at], str(problem)) for at in run]
                continue
            tables.append(table)
            origins.append(places[origin + run.start])
            bad += [(usable[at + run.start], reason) for at, reason in wrong]
        whole = pa.concat_tables(tables, promote_options="default")
        return Decoded(table=whole, origin=np.concatenate(origins), bad=sorted(bad))

    def _check(self, columns: Sequence[str] | None) -> None:
        """A column that the header does not have is nobody's message's fault."""
        for name in columns or ():
            if self._header is not None and name not in self._header:
                found = ", ".join(self._header)
                raise InvalidInput(f"the messages have no column {name!r}; header names {found}")

    def _refused(self, payload: bytes | None) -> str | None:
        if payload is None:
            return "it has no value (a tombstone)"
        if len(payload) > self.max_bytes:
            return f"it has {len(payload)} bytes, more than max_message_bytes={self.max_bytes}"
        return None if payload and not payload.isspace() else "it is empty"


class _Json:
    """One object a message."""

    def __init__(self) -> None:
        self._parser = JsonlParser("a message")

    def parts(self, payloads: Sequence[bytes]) -> Iterator[range]:
        yield range(len(payloads))

    def parse(
        self, payloads: Sequence[bytes], columns: Sequence[str] | None
    ) -> tuple[pa.Table, Integers, list[tuple[int, str]]]:
        # Between the tokens of JSON a tab is as good as a line end, and in its strings as bad.
        lines = [p.translate(_NO_LINES) if b"\n" in p or b"\r" in p else p for p in payloads]
        starts = np.cumsum([0, *(len(line) + 1 for line in lines)])
        parsed = self._parser.parse(b"\n".join(lines), final=True, columns=columns)
        wrong = np.searchsorted(starts, [b.start for b in parsed.bad], side="right") - 1
        origin = np.setdiff1d(np.arange(len(lines)), wrong)
        reasons = [one.reason for one in parsed.bad]
        return parsed.table, origin, list(zip(wrong.tolist(), reasons, strict=True))


class _Csv:
    """Records of the columns in `header`, or below a header line of the message's own."""

    def __init__(self, header: Sequence[str] | None) -> None:
        self._header = None if header is None else (",".join(header) + "\n").encode()

    def parts(self, payloads: Sequence[bytes]) -> Iterator[range]:
        """One by one where a line end or a quote stands; the rest in runs."""
        start = 0
        for at, payload in enumerate(payloads):
            alone = self._header is None or b"\n" in payload or b"\r" in payload or b'"' in payload
            if alone:
                if start < at:
                    yield range(start, at)
                yield range(at, at + 1)
                start = at + 1
        if start < len(payloads):
            yield range(start, len(payloads))

    def parse(
        self, payloads: Sequence[bytes], columns: Sequence[str] | None
    ) -> tuple[pa.Table, Integers, list[tuple[int, str]]]:
        parser = CsvParser("the message")
        text = (self._header or b"") + b"\n".join(payloads)
        used = parser.head(text, final=True) or 0
        body = text[used:]
        parsed = parser.parse(body, final=True, columns=columns)
        reasons = [one.reason for one in parsed.bad]
        if len(payloads) == 1:
            origin = np.zeros(len(parsed.table), np.int64)
            return parsed.table, origin, [(0, reason) for reason in reasons]
        starts = np.cumsum([0, *(len(payload) + 1 for payload in payloads)])
        wrong = np.searchsorted(starts, [b.start for b in parsed.bad], side="right") - 1
        origin = np.setdiff1d(np.arange(len(payloads)), wrong)
        return parsed.table, origin, list(zip(wrong.tolist(), reasons, strict=True))


class _Arrow:
    """An Arrow stream or file a message, with any number of rows."""

    def parts(self, payloads: Sequence[bytes]) -> Iterator[range]:
        for at in range(len(payloads)):
            yield range(at, at + 1)

    def parse(
        self, payloads: Sequence[bytes], columns: Sequence[str] | None
    ) -> tuple[pa.Table, Integers, list[tuple[int, str]]]:
        payload = payloads[0]
        try:
            is_file = payload.startswith(b"ARROW1")
            reader = pa.ipc.open_file(payload) if is_file else pa.ipc.open_stream(payload)
            table = reader.read_all()
            table.validate(full=True)
        except (pa.ArrowException, OSError, ValueError, EOFError) as problem:
            reason = str(problem).partition("\n")[0]
            raise InvalidInput(f"it is no Arrow stream: {reason}") from None
        names = table.column_names
        missing = [name for name in columns or () if name not in names]
        if missing or len(set(names)) < len(names):
            found = ", ".join(names)
            raise InvalidInput(
                f"it has no column {missing[0]!r}; its columns are {found}"
                if missing
                else f"its column names must differ; got {found}"
            )
        wanted = names if columns is None else [name for name in names if name in columns]
        texts = {name: _as_text(name, table[name]) for name in wanted}
        return pa.table(texts), np.zeros(len(table), np.int64), []


def _as_text(name: str, column: pa.ChunkedArray) -> pa.Array:
    """Numbers in their one spelling, instants in ISO 8601 down to the microsecond."""
    try:
        array = canonical(whole_column(column))
        kind = array.type
        if pa.types.is_timestamp(kind):
            array = array.cast(pa.timestamp("us", "UTC" if kind.tz else None), safe=False)
        text = array.cast(pa.string())
    except (InvalidInput, pa.ArrowException, ValueError):
        raise InvalidInput(
            f"the values of {name!r} are {column.type}; a column holds numbers or strings"
        ) from None
    numeric = pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    return one_number_spelling(text) if numeric else text


def _empty(columns: Sequence[str] | None) -> pa.Table:
    return pa.table({name: pa.array([], pa.string()) for name in columns or ()})


_NO_LINES = bytes.maketrans(b"\r\n", b"\t\t")
