"""Releases in a NATS JetStream stream: each has a subject of its own, so it is there once for ever.

The subject of a release is PREFIX.query.window.trigger.part. A message is published on condition
that its subject has none yet, which the server checks; de-duplication by message id, which servers
forget after minutes, is not needed. A release that is too large for a message has several parts,
and its part 0 comes last: who sees that one finds them all.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa

from dpstream.connectors.encode import ENCODERS, another_run, run_of, with_numbers
from dpstream.connectors.nats.client import Away, Client, Refused
from dpstream.connectors.options import ServerOptions
from dpstream.connectors.retry import SECONDS, RetryPolicy
from dpstream.connectors.storage import safe_name
from dpstream.errors import InvalidInput, InvalidParameter, ServerUnreachable, StateError

T = TypeVar("T")
_NEW = {"Nats-Expected-Last-Subject-Sequence": "0"}
_TAKEN = 10071  # the server's number for: the subject has a message
_PARTS, _RUN = "Dpstream-Parts", "Dpstream-Run"
_PART_BYTES = 512 << 10


def from_options(options: ServerOptions) -> NatsSink:
    """The sink that a URI names: nats://host:4222/STREAM."""
    prefix = options.text("subject") or options.path.lower()
    size = options.number("part_bytes", _PART_BYTES, least=1)
    kind = options.choice("format", ("jsonl", "csv", "parquet"), "jsonl")
    retry = RetryPolicy(options.where, seconds=options.number("patience", SECONDS))
    client = Client(options)
    options.finish()
    if not options.path or "/" in options.path:
        raise InvalidParameter(f"{options.where} must name one stream: nats://host:4222/STREAM")
    sink = NatsSink(
        client, stream=options.path, prefix=prefix, kind=kind, part=int(size), retry=retry
    )
    try:
        sink.prepare_stream()
    except Exception:
        client.close()
        raise
    return sink


class NatsSink:
    """One message a release, or several of at most `part` bytes; `kind`: jsonl, csv or parquet."""

    def __init__(
        self,
        client: Client,
        *,
        stream: str,
        prefix: str,
        retry: RetryPolicy,
        kind: str = "jsonl",
        part: int = _PART_BYTES,
    ) -> None:
        self._client, self._stream, self._prefix = client, stream, prefix
        self._encode, self._part, self._retry = ENCODERS[kind], part, retry
        self._runs: dict[str, str] = {}

    def prepare_stream(self) -> None:
        """Make the stream, unless it is there; it must take what will be published."""
        try:
            subjects = self._client.call(self._subjects)
        except Away as problem:
            raise ServerUnreachable(
                f"{self._client.where} does not answer: {problem}; start it, or mend the address"
            ) from problem
        except Refused as problem:
            raise self._refused(problem) from problem
        if f"{self._prefix}.>" not in subjects and ">" not in subjects:
            raise InvalidInput(
                f"the stream {self._stream!r} takes {', '.join(subjects)}; for releases it must "
                f"take {self._prefix}.> too: add that, or give ?subject=..."
            )

    def write(self, name: str, window: int, trigger: int, table: pa.Table) -> None:
        """Publish what the stream does not have; waits for a server that is away."""
        run, table = run_of(table), with_numbers(table, window, trigger)
        self.fence(name, run)
        if self._runs.get(name) != run:
            self._insisting(lambda js: self._publish(js, self._marker(name), run.encode(), {}))
            self.fence(name, run)
            self._runs[name] = run
        subject = f"{self._prefix}.{safe_name(name)}.{window}.{trigger}"
        parts = [*self._parts(table)]
        headers = {_PARTS: str(len(parts)), _RUN: run, **_about(table)}
        for number, payload in reversed([*enumerate(parts)]):
            place = f"{subject}.{number}"
            self._insisting(partial(self._release, subject=place, data=payload, headers=headers))

    def fence(self, name: str, run: str) -> None:
        """Refuse a query that is here with releases of another run."""
        if self._runs.get(name) == run:
            return
        kept = self._insisting(lambda js: self._last(js, self._marker(name)))
        if kept is not None and (kept.data or b"").decode() != run:
            raise another_run(f"the stream {self._stream}", name)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _marker(self, query: str) -> str:
        return f"{self._prefix}.{safe_name(query)}.run"

    def _parts(self, table: pa.Table) -> Iterator[bytes]:
        """The rows in as few messages as they fit into; the same every time."""
        content = self._encode(table)
        if len(content) <= self._part or table.num_rows <= 1:
            yield content
            return
        middle = table.num_rows // 2
        yield from self._parts(table.slice(0, middle))
        yield from self._parts(table.slice(middle))

    async def _subjects(self, js: Any) -> list[str]:
        import nats.js.errors

        try:
            about = await js.stream_info(self._stream)
        except nats.js.errors.NotFoundError:
            about = await js.add_stream(name=self._stream, subjects=[f"{self._prefix}.>"])
        return list(about.config.subjects or [])

    async def _release(self, js: Any, subject: str, data: bytes, headers: dict[str, str]) -> None:
        if await self._publish(js, subject, data, headers):
            return
        there = await self._last(js, subject)
        if there is not None and (there.headers or {}).get(_PARTS) != headers[_PARTS]:
            raise StateError(
                f"{subject} was written with another part_bytes or format; use that one again"
            )

    async def _publish(self, js: Any, subject: str, data: bytes, headers: dict[str, str]) -> bool:
        """Publish the message unless its subject has one; whether it did."""
        import nats.errors
        import nats.js.errors

        try:
            await js.publish(subject, data, stream=self._stream, headers={**_NEW, **headers})
        except nats.js.errors.APIError as problem:
            if problem.err_code == _TAKEN:
                return False
            raise StateError(
                f"the stream {self._stream!r} does not take {subject}: {problem.description}; mend "
                "that and run again: nothing is lost"
            ) from problem
        except nats.errors.MaxPayloadError as problem:
            raise StateError(
                f"the stream {self._stream!r} does not take {subject}, {len(data):,} bytes: "
                f"{problem}; allow larger messages, or begin anew with a smaller part_bytes"
            ) from problem
        return True

    async def _last(self, js: Any, subject: str) -> Any:
        import nats.js.errors

        try:
            return await js.get_last_msg(self._stream, subject)
        except nats.js.errors.NotFoundError:
            return None

    def _insisting(self, work: Callable[[Any], Awaitable[T]]) -> T:
        """Do it; while the server is away, wait and do it again."""
        while True:
            try:
                found = self._client.call(work)
            except Away as problem:
                self._retry.failed(str(problem))
                self._retry.wait()
            except Refused as problem:
                raise self._refused(problem) from problem
            else:
                self._retry.well()
                return found

    def _refused(self, problem: Refused) -> StateError:
        return StateError(
            f"{self._client.where} refuses: {problem}; mend that and run again: nothing is lost"
        )


def _about(table: pa.Table) -> dict[str, str]:
    """What a release says of itself, as headers."""
    told = json.loads((table.schema.metadata or {}).get(b"dpstream", b"{}"))
    names = ("window_start", "window_end", "trigger_time", "release_index", "releases")
    return {
        f"Dpstream-{name.replace('_', '-').title()}": str(told[name])
        for name in names
        if told.get(name) is not None
    }
