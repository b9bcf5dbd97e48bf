"""Messages as rows: JSON objects, CSV records or Arrow streams; one that cannot be read costs only
itself.

Every column is text, as from files of JSON lines and CSV, so that messages of one topic may differ
in the types they declare. Messages are parsed together where none can reach into the next.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.connectors.arrow_size import check_decoded_size, check_text_size
from dpstream.connectors.files.csv import CsvParser
from dpstream.connectors.files.jsonl import JsonlParser
from dpstream.connectors.files.text import SHOWN, Parsed, empty_strings
from dpstream.connectors.server_base import ServerOptions
from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.records import Columns, Integers, Rejected, select_columns
from dpstream.rows.column_values import canonical
from dpstream.rows.number_text import one_number_spelling
from dpstream.rows.parse import whole_column

FORMATS = ("json", "csv", "arrow")
MAX_BYTES = 16 << 20
MAX_UNPACKED = 128 << 20
"""Bytes that an Arrow message may take when it is decompressed, and told apart into cells."""
_ARROW_FILE = b"ARROW1\0\0"
_REACHES = (b"\n", b"\r", b'"')
_NO_LINES = bytes.maketrans(b"\r\n", b"\t\t")


@dataclass(frozen=True, kw_only=True, eq=False)
class Decoded:
    """The rows of some messages: `origin` is each row's message, `bad` what is no row, and why."""

    table: pa.Table
    origin: Integers
    bad: list[tuple[int, str]]

    def rejected(
        self, payloads: Sequence[bytes | None], where: Callable[[int], str]
    ) -> list[Rejected]:
        """What could not be read, with its place and as much of its text as is kept."""
        texts = ((payloads[i] or b"")[: 4 * SHOWN].decode(errors="replace") for i, _ in self.bad)
        return [
            Rejected(where=where(i), reason=reason, row=text[:SHOWN])
            for (i, reason), text in zip(self.bad, texts, strict=True)
        ]


ParsedRun = tuple[pa.Table, Integers, list[tuple[int, str]]]
"""The rows of some messages, each row's message, and (message, reason) of what is no row.

A format is a function that parses messages together; InvalidInput if none of them can be read.
"""


def decoder_from(options: ServerOptions, *, kind: str | None = None) -> Decoder:
    """The decoder that a server's options about messages ask for; `kind`: of this format."""
    kind = options.choice("format", FORMATS, "json") if kind is None else kind
    header = options.text("header")
    decoder = Decoder(kind, header=None if header is None else header.split(","))
    decoder.max_bytes = int(options.number("max_message_bytes", MAX_BYTES, least=1))
    decoder.max_unpacked = int(options.number("max_unpacked_bytes", MAX_UNPACKED, least=1))
    return decoder


class Decoder:
    """Turns payloads of `json`, `csv` or `arrow` into one table.

    `header`: the columns of CSV messages without one.

    >>> decoded = Decoder("json").decode([b'{"a": 1}', b"oops", None], ["a"])
    >>> decoded.table.to_pylist(), decoded.origin.tolist(), [at for at, _ in decoded.bad]
    ([{'a': '1'}], [0], [1, 2])
    """

    def __init__(self, kind: str, *, header: Sequence[str] | None = None) -> None:
        if kind not in FORMATS:
            raise InvalidParameter(f"format must be one of {', '.join(FORMATS)}; got {kind!r}")
        if header is not None and kind != "csv":
            raise InvalidParameter(
                f"header names the columns of CSV messages; the format is {kind}"
            )
        self._kind, self._header = kind, header
        self.max_bytes, self.max_unpacked = MAX_BYTES, MAX_UNPACKED
        formats: dict[str, Callable[[Sequence[bytes], Columns], ParsedRun]] = {
            "json": _parse_json,
            "csv": partial(_parse_csv, header),
            "arrow": lambda some, columns: _parse_arrow(some, columns, self.max_unpacked),
        }
        self._parse = formats[kind]

    def decode(self, payloads: Sequence[bytes | None], columns: Columns = None) -> Decoded:
        """The rows of all payloads; None is a message without a value."""
        for name in columns or ():  # no message can mend a header without the column
            if self._header is not None and name not in self._header:
                known = ", ".join(self._header)
                raise InvalidInput(f"the messages have no column {name!r}; header names {known}")
        tables, origins = [empty_strings(columns)], [np.zeros(0, np.int64)]
        bad: list[tuple[int, str]] = []
        usable: list[int] = []
        content: list[bytes] = []
        if self._all_usable(payloads):
            usable, content = list(range(len(payloads))), list(payloads)  # type: ignore[arg-type]
            payloads = ()
        for at, payload in enumerate(payloads):
            reason = self._why_unusable(payload)
            if reason is None:
                usable.append(at)
                content.append(payload or b"")
            else:
                bad.append((at, reason))
        places = np.array(usable, dtype=np.int64)
        alone = []
        if self._kind != "json" and not self._all_lines(content):
            alone = [at for at, payload in enumerate(content) if self._stands_alone(payload)]
        edges = sorted({0, len(content), *alone, *(at + 1 for at in alone)})
        for start, stop in pairwise(edges):
            try:
                table, origin, wrong = self._parse(content[start:stop], columns)
            except InvalidInput as problem:
                bad += [(at, str(problem)) for at in usable[start:stop]]
                continue
            tables.append(table)
            origins.append(places[origin + start])
            bad += [(usable[at + start], reason) for at, reason in wrong]
        table = pa.concat_tables(tables, promote_options="default")
        return Decoded(table=table, origin=np.concatenate(origins), bad=sorted(bad))

    def _all_usable(self, payloads: Sequence[bytes | None]) -> bool:
        """Is there nothing to say of any of them? Asked of all at once: most are so."""
        if not payloads or None in payloads:
            return False
        values: Sequence[Any] = payloads
        sizes = [*map(len, values)]
        whole = min(sizes) > 0 and max(sizes) <= self.max_bytes
        return whole and not any(map(bytes.isspace, values))

    def _why_unusable(self, payload: bytes | None) -> str | None:
        if payload is None:
            return "it has no value (a tombstone)"
        if len(payload) > self.max_bytes:
            return f"it has {len(payload)} bytes, more than max_message_bytes={self.max_bytes}"
        return None if payload and not payload.isspace() else "it is empty"

    def _all_lines(self, content: Sequence[bytes]) -> bool:
        """Is each a line of CSV that cannot reach into the next? Asked of all at once, too."""
        if self._kind == "arrow" or self._header is None:
            return False
        text = b"".join(content)
        return not any(sign in text for sign in _REACHES)

    def _stands_alone(self, payload: bytes) -> bool:
        """Could it reach into the next message, if they were parsed together?"""
        if self._kind == "arrow" or self._header is None:
            return True
        return any(sign in payload for sign in _REACHES)


def _parse_json(payloads: Sequence[bytes], columns: Columns) -> ParsedRun:
    """One object a message."""
    # Between the tokens of JSON a tab is as good as a line end, and in its strings as bad.
    lines, text = payloads, b"\n".join(payloads)
    if text.count(b"\n") >= len(payloads) or b"\r" in text:
        lines = [p.translate(_NO_LINES) for p in payloads]
        text = b"\n".join(lines)
    parsed = JsonlParser("a message").parse(text, final=True, columns=columns)
    return _one_row_a_message(parsed, lines)


def _parse_csv(
    header: Sequence[str] | None, payloads: Sequence[bytes], columns: Columns
) -> ParsedRun:
    """Records of the columns in `header`, or below a header line of the message's own."""
    parser = CsvParser("the message")
    text = b"\n".join(payloads if header is None else [",".join(header).encode(), *payloads])
    used = parser.head(text, final=True) or 0
    parsed = parser.parse(text[used:], final=True, columns=columns)
    if len(payloads) == 1:
        origin = np.zeros(len(parsed.table), np.int64)
        return parsed.table, origin, [(0, bad.reason) for bad in parsed.bad]
    return _one_row_a_message(parsed, payloads)


def _one_row_a_message(parsed: Parsed, lines: Sequence[bytes]) -> ParsedRun:
    """What was parsed of messages that each were one line of a text."""
    if not parsed.bad:
        return parsed.table, np.arange(len(lines)), []
    starts = np.cumsum([0, *(len(line) + 1 for line in lines)])
    wrong = np.searchsorted(starts, [bad.start for bad in parsed.bad], side="right") - 1
    reasons = [bad.reason for bad in parsed.bad]
    origin = np.setdiff1d(np.arange(len(lines)), wrong)
    return parsed.table, origin, list(zip(wrong.tolist(), reasons, strict=True))


def _parse_arrow(payloads: Sequence[bytes], columns: Columns, most: int) -> ParsedRun:
    """An Arrow stream or file, with any number of rows that take at most so many bytes."""
    # a file is a stream too, behind eight bytes; what its end says might name one batch many times
    payload = payloads[0].removeprefix(_ARROW_FILE)
    try:
        reader = pa.ipc.open_stream(payload)
        check_decoded_size(payload, len(columns or reader.schema.names), most)
        table = reader.read_all()
        table.validate(full=True)
    except InvalidInput:
        raise
    except (pa.ArrowException, OSError, ValueError, EOFError, struct.error) as problem:
        reason = str(problem).partition("\n")[0]
        raise InvalidInput(f"it is no Arrow stream: {reason}") from None
    names = table.column_names
    wanted = select_columns("it", names, columns)
    if len(set(names)) < len(names):
        raise InvalidInput(f"its column names must differ; got {', '.join(names)}")
    check_text_size([table[name] for name in wanted], most)
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
