"""The operator's side: health, metrics, the ledger, dead letters, and rows that are posted.

What is here is not private. Every route asks for the token, the unknown ones too. Analysts have
tokens of their own, which ask for queries and open nothing else.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import struct
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from dpstream.connectors.arrow_size import CELL, check_decoded_size, check_text_size
from dpstream.connectors.encode import simple_column
from dpstream.connectors.files.jsonl import JsonlParser
from dpstream.connectors.files.text import UnreadableRange, empty_strings, rejected_rows
from dpstream.connectors.write_ahead import Inbox
from dpstream.errors import BudgetExceeded, DpstreamError, InvalidInput, StateError
from dpstream.records import Batch, Rejected
from dpstream.serve.access import Token
from dpstream.serve.alerts import Alerts
from dpstream.serve.event_stream import Hub
from dpstream.serve.metrics import (
    CONTENT_TYPE,
    COUNTS,
    Sample,
    book_reports,
    book_samples,
    exposition,
    lag,
    machine_samples,
    query_samples,
)
from dpstream.serve.sides import Endpoint, Given, Parameter, Refusal, Side, json_answer
from dpstream.serve.worker import Supervisor
from dpstream.session.change_plan import ask, withdraw
from dpstream.session.changes import Changes
from dpstream.session.pipeline import Pipeline, PushedTable

_LOG = logging.getLogger("dpstream.serve")
_LETTERS = 1000
_THREADS = 4  # of its own: a flood on the public side takes none of them
_ANALYST = "dpstream.analyst"  # of a request: whose token it has; "": the operator's
_OF_ANALYSTS = ("/ask/", "/asked", "/withdraw/")
_NAME = "^[A-Za-z][A-Za-z0-9_]*$"
_LONGEST_QUERY = 1 << 16
_WELL = ("starting", "running", "finished", "not run")
JSONL = ("application/jsonl", "application/x-ndjson", "application/json-lines", "application/json")
ARROW = "application/vnd.apache.arrow.stream"
MOST_DECODED = 128 << 20
"""Bytes that a post may take when it is decompressed, and its cells have been told apart."""
_BLOCK = 4 << 20  # bytes of JSON lines that are parsed at once; a longer line is no row
_MOST_REJECTED = 10_000  # lines of one post
_TOO_LARGE = "the body is too large, as it is or when it is decoded; send it in parts"
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
    most_decoded: int = MOST_DECODED
    accepted: int = 0
    rejected: int = 0
    requests: int = 0
    _looked: int = field(default=0, init=False)
    _waiting: int = field(default=0, init=False)

    def take(
        self, kind: str, body: bytes, request: str | None, encoding: str = ""
    ) -> dict[str, object]:
        """Keep the rows of a body; what was kept, and how many lines were set aside."""
        if kind not in (*JSONL, ARROW):
            raise Refusal(415, f"a body must be {JSONL[0]} or {ARROW}")
        body = decompressed(body, encoding, self.most_decoded)
        batch = self._arrow(body) if kind == ARROW else self._jsonl(body)
        if self._full(len(body)):
            raise Refusal(503, "too much waits for the pipeline already", {"retry-after": "10"})
        try:
            number, again = self.inbox.put(batch, request=request, body=sha256(body).hexdigest())
        except InvalidInput:
            raise Refusal(
                409, "this Idempotency-Key came with another body before; nothing was kept"
            ) from None
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
        """Block by block: many short lines take many times their size while they are parsed."""
        parser, columns = JsonlParser(self.name), self.pushed.columns
        tables: list[pa.Table] = []
        rejected: list[Rejected] = []
        line, rows = 1, 0
        for block in line_blocks(body, parser.head(body, final=True) or 0):
            bad = [UnreadableRange(start=0, stop=len(block), reason="the line is too long")]
            if len(block) <= _BLOCK:
                parsed = parser.parse(block, final=True, columns=columns)
                bad, rows = parsed.bad, rows + len(parsed.table)
                tables.append(parsed.table)
            if rows * len(columns) * CELL > self.most_decoded:
                raise Refusal(413, _TOO_LARGE)
            if len(rejected) + len(bad) > _MOST_REJECTED:
                raise Refusal(422, f"more than {_MOST_REJECTED} lines are no rows; send none")
            rejected += rejected_rows(f"posted to {self.name}", block, bad, line)
            line += block.count(b"\n")
        table = pa.concat_tables(tables or [empty_strings(columns)])
        return Batch(table=table, position=None, done=True, rejected=rejected)

    def _arrow(self, body: bytes) -> Batch:
        """Columns as text, as JSON lines have them: a run must not meet 5 and "5"."""
        try:
            check_decoded_size(body, len(self.pushed.columns), self.most_decoded)
            table = pa.ipc.open_stream(body).read_all()
            table.validate(full=True)
            wanted = [name for name in table.column_names if name in self.pushed.columns]
            check_text_size([table[name] for name in wanted], self.most_decoded)
        except InvalidInput:
            raise Refusal(413, _TOO_LARGE) from None
        except (pa.ArrowException, OSError, ValueError, struct.error):
            raise Refusal(422, "the body is not a whole Arrow stream") from None
        names = table.column_names
        if len(set(names)) < len(names):
            raise Refusal(422, "the columns of a stream must differ")
        try:
            columns = {
                name: simple_column(table[name]).cast(pa.string())
                if name in names
                else pa.nulls(len(table), pa.string())
                for name in self.pushed.columns
            }
        except (pa.ArrowException, ValueError):
            raise Refusal(422, "a column of the stream is of a kind that has no text") from None
        return Batch(table=pa.table(columns), position=None, done=True)


def line_blocks(body: bytes, at: int) -> Iterator[bytes]:
    """The lines from a place on, as many as a block holds at a time; a longer line comes alone."""
    while at < len(body):
        end = len(body)
        if end - at > _BLOCK:
            end = body.rfind(b"\n", at, at + _BLOCK) + 1 or body.find(b"\n", at) + 1 or end
        yield body[at:end]
        at = end


def decompressed(body: bytes, encoding: str, most: int) -> bytes:
    """The body without its gzip, if it has one; no more of it is made than may be."""
    if encoding in ("", "identity"):
        return body
    if encoding != "gzip":
        raise Refusal(415, "a body may be compressed by gzip, and by nothing else")
    pieces: list[bytes] = []
    left = most
    try:
        while body:  # members, one after another
            member = zlib.decompressobj(zlib.MAX_WBITS | 16)
            pieces.append(member.decompress(body, left + 1))
            left -= len(pieces[-1])
            if left < 0:
                raise Refusal(413, _TOO_LARGE)
            if not member.eof:
                raise zlib.error
            body = member.unused_data
    except zlib.error:
        raise Refusal(422, "the body is not a whole gzip file") from None
    return b"".join(pieces)


async def read_body(pieces: AsyncIterator[bytes], most: int) -> bytes:
    """A body that is not too large; the rest of a larger one is not read."""
    body = bytearray()
    async for piece in pieces:
        body += piece
        if len(body) > most:
            raise Refusal(413, _TOO_LARGE)
    return bytes(body)


@dataclass(kw_only=True)
class OperatorSide(Side):
    """What the operator sees and does."""

    title: ClassVar[str] = "dpstream operator"
    about: ClassVar[str] = (
        "For the operator alone: exact counts and raw rows, which are not private."
    )
    secured: ClassVar[bool] = True
    pipeline: Pipeline
    token: Token
    analysts: Mapping[str, Token] = field(default_factory=dict)
    """Whose tokens ask for queries, and open nothing else."""
    supervisor: Supervisor
    hub: Hub
    alerts: Alerts | None = None
    most_body: int = 16 << 20
    most_decoded: int = MOST_DECODED
    takes_rows: bool = True
    """May rows be posted? They need a run that reads them."""
    intakes: dict[str, Intake] = field(init=False)
    _began: float = field(init=False, default_factory=time.monotonic)
    _pool: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, "operator")
        given = self.pipeline.pushed.items() if self.takes_rows else ()
        self.intakes = {
            name: Intake(
                name=name,
                pushed=pushed,
                inbox=Inbox(pushed.folder),
                most_decoded=max(self.most_body, self.most_decoded),
            )
            for name, pushed in given
        }

    def app(self) -> ASGIApp:
        """As an ASGI application."""
        return self.asgi(
            lambda app: nullcontext(), self._check_token, rate=500, burst=5000, pool=self._pool
        )

    def _check_token(self, scope: Scope) -> None:
        given = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        tokens = {"": self.token, **self.analysts}
        whose = [name for name, fits in [(n, t.fits(given)) for n, t in tokens.items()] if fits]
        if not whose:
            raise Refusal(401, "the operator's token is needed", {"www-authenticate": "Bearer"})
        scope[_ANALYST] = whose[0]
        if whose[0] and not scope["path"].startswith(_OF_ANALYSTS):
            raise Refusal(403, "an analyst's token asks for queries, and opens nothing else")

    def endpoints(self) -> list[Endpoint]:
        """Every route."""
        sources, queries = list(self.pipeline.pushed), list(self.pipeline.folders)
        source = Parameter(
            "source", "The name of a source.", place="path", longest=200, names=sources
        )
        name = Parameter("query", "Only this query.", longest=200, names=queries)
        limit = Parameter(
            "limit", "The most that are given.", kind="integer", least=1, most=_LETTERS, default=100
        )
        named = Parameter(
            "query", "What its releases are called.", place="path", longest=60, pattern=_NAME
        )
        asked = (401, 403, 422, 429)
        return [
            Endpoint("/health", "Does it run?", self._health, refuses=(*asked, 503), quick=True),
            Endpoint(
                "/metrics",
                "Numbers for Prometheus.",
                self._metrics,
                gives={"text/plain": {"type": "string"}},
                refuses=asked,
            ),
            Endpoint("/lag", "How far behind each query is.", self._lag, refuses=asked),
            Endpoint("/ledger", "The books, charge by charge.", self._ledger, refuses=asked),
            Endpoint(
                "/dead-letters",
                "Rows that could not be used, newest first.",
                self._letters,
                parameters=[name, limit],
                refuses=(404, *asked),
            ),
            Endpoint(
                "/ingest/{source}",
                "Hand rows in; they are durable when this answers.",
                self._ingest,
                parameters=[source],
                method="POST",
                takes={
                    JSONL[0]: {"type": "string"},
                    ARROW: {"type": "string", "contentEncoding": "binary"},
                },
                status=202,
                refuses=(404, 409, 413, 415, 503, *asked),
                quick=True,
            ),
            Endpoint(
                "/reload",
                "Take the pipeline file up anew, as on SIGHUP.",
                self._reload,
                method="POST",
                status=202,
                refuses=(409, *asked),
                quick=True,
            ),
            Endpoint(
                "/ask/{query}",
                "Ask for a query, which is charged to the share of the token's analyst.",
                self._ask,
                parameters=[named],
                method="POST",
                takes={"application/sql": {"type": "string"}},
                status=202,
                refuses=(409, 413, *asked),
                quick=True,
            ),
            Endpoint(
                "/withdraw/{query}",
                "End a query that was asked for; what it has spent stays spent.",
                self._withdraw,
                parameters=[named],
                method="POST",
                status=202,
                refuses=(404, 409, *asked),
                quick=True,
            ),
            Endpoint(
                "/asked",
                "The queries that were asked for: an analyst's own, or all for the operator.",
                self._asked,
                refuses=(409, *asked),
                quick=True,
            ),
            Endpoint("/openapi.json", "This document.", lambda _: self.document(), refuses=asked),
        ]

    def _health(self, request: Request, given: Given) -> Response:
        seen = self.supervisor
        healthy = seen.state in _WELL and seen.problem is None and not seen.failed
        content = {
            "healthy": healthy,
            "pipeline": seen.state,
            "restarts": seen.restarts,
            "problem": seen.problem,
            "not_reloaded": seen.not_reloaded,
            "failed_queries": seen.failed,
            "starved_queries": seen.starved,
            "quarantined_files": {
                name: told.get("quarantined", 0)
                for name, told in seen.queries.items()
                if told.get("quarantined")
            },
            "alerts": [] if self.alerts is None else self.alerts.report,
            "clients": self.hub.clients,
            "newest_release": self.hub.reader.horizon,
            "seconds": round(time.monotonic() - self._began, 3),
        }
        return json_answer(request, content, 200 if healthy else 503)

    def _metrics(self, given: Given) -> Response:
        seen = self.supervisor
        samples: list[Sample] = [
            ("up", {}, seen.state in ("running", "finished")),
            ("restarts_total", {}, seen.restarts),
            ("sse_clients", {}, self.hub.clients),
            ("newest_release", {}, self.hub.reader.horizon),
        ]
        samples += query_samples(seen.queries, seen.began)
        samples += book_samples(self.pipeline)
        processes = {"server": os.getpid(), "run": seen.pid}
        samples += machine_samples(self.pipeline.state, processes)
        for name, intake in self.intakes.items():
            posted = ("accepted", "rejected", "requests")
            values = {f"posted_{count}_total": getattr(intake, count) for count in posted}
            values["posted_bytes"] = intake.inbox.waiting
            samples += [(metric, {"source": name}, value) for metric, value in values.items()]
        return Response(exposition(samples), media_type=CONTENT_TYPE)

    def _lag(self, given: Given) -> dict[str, Any]:
        lags = {
            name: {
                "seconds": lag(told),
                "rows_waiting": told.get("rows_waiting"),
                "consumer_lag": told.get("consumer_lag", {}),
                "release_delay_seconds": told.get("release_delay_seconds"),
                "starved": told.get("starved", False),
                "failed": told.get("failed"),
                "triggers_done": told["triggers_done"],
                "triggers": told["triggers"],
                **{count: told[count] for count in COUNTS},
            }
            for name, told in self.supervisor.queries.items()
        }
        return {"queries": lags}

    def _ledger(self, given: Given) -> dict[str, Any]:
        books = [book for _, each in book_reports(self.pipeline) for book in each]
        return {"datasets": books}

    def _letters(self, given: Given) -> dict[str, Any]:
        folders = self.pipeline.folders
        if given["query"] is not None:
            folders = {given["query"]: self.find(folders, given["query"], "query")}
        letters: list[dict[str, Any]] = []
        for name, folder in folders.items():
            letters += [{"query": name} | row for row in dead_letters(folder, given["limit"])]
        return {"dead_letters": letters[: given["limit"]]}

    async def _reload(self, request: Request, given: Given) -> Response:
        problem = await self.supervisor.reload()
        if problem is not None:
            raise Refusal(409, f"what ran goes on: {problem['message']}")
        return json_answer(request, {"reload": str(self.pipeline.path)}, 202)

    async def _ask(self, request: Request, given: Given) -> Response:
        analyst, name = request.scope[_ANALYST], given["query"]
        if not analyst:
            raise Refusal(403, "an analyst's token asks; the operator's queries are in the file")
        body = await read_body(request.stream(), _LONGEST_QUERY)
        try:
            sql = body.decode()
        except UnicodeDecodeError:
            raise Refusal(422, "the body is not a query as UTF-8 text") from None
        await self._change(ask, name=name, sql=sql, analyst=analyst)
        return json_answer(request, {"asked": name, "analyst": analyst}, 202)

    async def _withdraw(self, request: Request, given: Given) -> Response:
        analyst, name = request.scope[_ANALYST], given["query"]
        mine = {one["query"]: one for one in self._asked_for(analyst)}
        self.find(mine, name, "query of yours")
        await self._change(withdraw, name=name, who=analyst or "the operator")
        return json_answer(request, {"withdrawn": name}, 202)

    async def _change(self, change: Callable[..., None], **facts: str) -> None:
        if not self.takes_rows:
            raise Refusal(409, "the pipeline does not run here")
        try:
            await self.supervisor.change(partial(change, self.pipeline.path, **facts))
        except BudgetExceeded as problem:
            raise Refusal(409, f"refused: {problem}") from None
        except (DpstreamError, OSError) as problem:
            raise Refusal(422, f"not taken: {problem}") from None

    def _asked(self, request: Request, given: Given) -> Response:
        return json_answer(request, {"queries": self._asked_for(request.scope[_ANALYST])})

    def _asked_for(self, analyst: str) -> list[dict[str, Any]]:
        """What an analyst has asked for; "": all."""
        try:
            known = Changes.read(self.pipeline.state).asked
        except StateError as problem:
            raise Refusal(409, str(problem)) from None
        return [
            {"query": name, "analyst": table["analyst"], "sql": table["sql"]}
            for name, table in known.items()
            if analyst in ("", table["analyst"])
        ]

    async def _ingest(self, request: Request, given: Given) -> Response:
        over = not self.takes_rows or self.supervisor.state in ("finished", "refused")
        if over and given["source"] in self.pipeline.pushed:
            raise Refusal(
                409, "the pipeline does not run, or has ended; nobody would read the rows"
            )
        intake: Intake = self.find(self.intakes, given["source"], "source that takes rows in")
        body = await read_body(request.stream(), self.most_body)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        request_id = request.headers.get("idempotency-key")
        if request_id is not None and not 1 <= len(request_id) <= 200:
            raise Refusal(422, "an Idempotency-Key must have 1 to 200 characters")
        encoding = request.headers.get("content-encoding", "").strip().lower()
        loop = asyncio.get_running_loop()
        told = await loop.run_in_executor(self._pool, intake.take, kind, body, request_id, encoding)
        return json_answer(request, told, 202)


def dead_letters(folder: Path, limit: int) -> list[dict[str, Any]]:
    """The rows that a query has set aside last; a file that goes meanwhile is passed over."""
    files: list[tuple[float, Path]] = []
    for path in (folder / "dead-letters").glob("*.jsonl"):
        with suppress(FileNotFoundError):
            files.append((path.stat().st_mtime, path))
    letters: list[dict[str, Any]] = []
    for _, path in sorted(files, reverse=True):
        if len(letters) >= limit:
            break
        with suppress(FileNotFoundError):
            letters += [json.loads(line) for line in path.read_bytes().splitlines()[::-1]]
    return letters[:limit]
