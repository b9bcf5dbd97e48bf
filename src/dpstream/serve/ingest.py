"""Rows that are posted: parsed, and durable before they are acknowledged."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pyarrow as pa

from dpstream.connectors.encode import simple_column
from dpstream.connectors.files.jsonl import JsonlParser
from dpstream.connectors.files.text import rejected_rows
from dpstream.connectors.write_ahead import Inbox
from dpstream.errors import InvalidInput, StateError
from dpstream.records import Batch
from dpstream.serve.routing import Refusal
from dpstream.session.pipeline import PushedTable

JSONL = ("application/jsonl", "application/x-ndjson", "application/json-lines", "application/json")
ARROW = "application/vnd.apache.arrow.stream"
_LOG = logging.getLogger("dpstream.serve")
MOST_WAITING = 1 << 32
"""Bytes that may wait for the run before more are refused."""


@dataclass(kw_only=True)
class Intake:
    """Takes in the rows of one source."""

    name: str
    pushed: PushedTable
    inbox: Inbox
    """Where they are kept."""
    most_waiting: int = MOST_WAITING
    accepted: int = 0
    rejected: int = 0
    requests: int = 0
    _looked: int = field(default=0, init=False)
    _waiting: int = field(default=0, init=False)

    def take(self, kind: str, body: bytes, request: str | None) -> dict[str, object]:
        """Keep the rows of a body; what was kept, and how many lines were set aside."""
        if kind in JSONL:
            batch = self._jsonl(body)
        elif kind == ARROW:
            batch = self._arrow(body)
        else:
            raise Refusal(415, f"a body must be {JSONL[0]} or {ARROW}")
        if self._full(len(body)):
            raise Refusal(503, "too much waits for the pipeline already", {"retry-after": "10"})
        try:
            number, again = self.inbox.put(batch, request=request)
        except StateError as problem:
            _LOG.error("posted rows cannot be kept: %s", problem)
            raise Refusal(503, "rows cannot be kept just now", {"retry-after": "10"}) from None
        rows, bad = batch.table.num_rows, len(batch.rejected)
        if not again:
            self.accepted, self.rejected = self.accepted + rows, self.rejected + bad
        self.requests += 1
        return {"accepted": rows, "rejected": bad, "segment": number, "repeated": again}

    def _full(self, size: int) -> bool:
        """Does too much wait? The folder is looked through now and then only."""
        self._waiting += size
        if self._looked % 64 == 0 or self._waiting > self.most_waiting:
            self._waiting = self.inbox.waiting + size
        self._looked += 1
        return self._waiting > self.most_waiting

    def _jsonl(self, body: bytes) -> Batch:
        parser = JsonlParser(self.name)
        try:
            head = parser.head(body, final=True) or 0
            parsed = parser.parse(body[head:], final=True, columns=self.pushed.columns)
        except InvalidInput:
            raise Refusal(422, "the body cannot be read as JSON lines") from None
        rejected = rejected_rows(f"posted to {self.name}", body[head:], parsed.bad)
        return Batch(table=parsed.table, position=None, done=True, rejected=rejected)

    def _arrow(self, body: bytes) -> Batch:
        """Columns as text, as JSON lines have them: a run must not meet 5 and "5"."""
        try:
            table = pa.ipc.open_stream(body).read_all()
            table.validate(full=True)
        except (pa.ArrowException, OSError, ValueError):
            raise Refusal(422, "the body is not a whole Arrow stream") from None
        names = table.column_names
        if len(set(names)) < len(names):
            raise Refusal(422, "the columns of a stream must differ")
        rows = table.num_rows
        try:
            columns = [_as_text(table, name, rows) for name in self.pushed.columns]
        except (pa.ArrowException, ValueError):
            raise Refusal(422, "a column of the stream is of a kind that has no text") from None
        return Batch(
            table=pa.table(columns, names=list(self.pushed.columns)), position=None, done=True
        )


def _as_text(table: pa.Table, name: str, rows: int) -> pa.ChunkedArray | pa.Array:
    if name not in table.column_names:
        return pa.nulls(rows, pa.string())
    column = simple_column(table[name])
    return column if pa.types.is_string(column.type) else column.cast(pa.string())


def content_type(header: str | None) -> str:
    """The kind of a body, without its parameters."""
    return (header or "").partition(";")[0].strip().lower()


async def read_body(pieces: AsyncIterator[bytes], most: int) -> bytes:
    """A body that is not too large; the rest of a larger one is not read."""
    kept: list[bytes] = []
    size = 0
    async for piece in pieces:
        size += len(piece)
        if size > most:
            raise Refusal(413, "the body is too large; send it in parts")
        kept.append(piece)
    return b"".join(kept)
