"""Releases in a NATS JetStream stream: each has a subject of its own, so it is there once for ever.

The subject of a release is PREFIX.query.window.trigger.part. A message is published on condition
that its subject has none yet, which the server checks; de-duplication by message id, which servers
forget after minutes, is not needed. A release that is too large for a message has several parts,
and its part 0 comes last: who sees that one finds them all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import nats.errors
import nats.js.errors
import pyarrow as pa

from dpstream.connectors.encode import ENCODERS, another_run, release_facts, run_of, with_numbers
from dpstream.connectors.nats.client import Client, none_if_absent
from dpstream.connectors.server_base import ServerOptions
from dpstream.connectors.storage import safe_name
from dpstream.errors import InvalidInput, StateError

T = TypeVar("T")
_NEW = {"Nats-Expected-Last-Subject-Sequence": "0"}
_TAKEN = 10071  # the server's number for: the subject has a message
_PARTS, _RUN = "Dpstream-Parts", "Dpstream-Run"
_PART_BYTES = 512 << 10


class NatsSink:
    """The sink of nats://host:4222/STREAM?...; the stream is made if it is not there.

    A release is one message, or several of at most `part_bytes`; `format`: jsonl, csv or parquet.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._prefix = options.text("subject") or options.path.lower()
        self._part = int(options.number("part_bytes", _PART_BYTES, least=1))
        self._encode = ENCODERS[options.choice("format", ("jsonl", "csv", "parquet"), "jsonl")]
        self._retry, self._client = options.retry_policy(), Client(options, refusal=_refusal)
        options.finish()
        self._stream = options.path_name("stream", "nats://host:4222/STREAM")
        self._runs: dict[str, str] = {}
        try:
            subjects = self._client.first_call(self._subjects)
            if f"{self._prefix}.>" not in subjects and ">" not in subjects:
                raise InvalidInput(
                    f"the stream {self._stream!r} takes {', '.join(subjects)}; for releases it "
                    f"must take {self._prefix}.> too: add that, or give ?subject=..."
                )
        except Exception:
            self._client.close()
            raise

    def write(self, name: str, window: int, trigger: int, table: pa.Table) -> None:
        """Publish what the stream does not have; waits for a server that is away."""
        run, table = run_of(table), with_numbers(table, window, trigger)
        self.fence(name, run)
        if self._runs.get(name) != run:
            self._insist(lambda js: self._publish(js, self._run_subject(name), run.encode(), {}))
            self.fence(name, run)
            self._runs[name] = run
        subject = f"{self._prefix}.{safe_name(name)}.{window}.{trigger}"
        parts = [*self._parts(table)]
        headers = {_PARTS: str(len(parts)), _RUN: run, **_about(table)}
        for number, payload in reversed([*enumerate(parts)]):
            place = f"{subject}.{number}"
            self._insist(partial(self._release, subject=place, data=payload, headers=headers))

    def fence(self, name: str, run: str) -> None:
        """Refuse a query that is here with releases of another run."""
        if self._runs.get(name) == run:
            return
        subject = self._run_subject(name)
        known = self._insist(lambda js: none_if_absent(js.get_last_msg(self._stream, subject)))
        if known is not None and (known.data or b"").decode() != run:
            raise another_run(f"the stream {self._stream}", name)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _run_subject(self, query: str) -> str:
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
        about = await none_if_absent(js.stream_info(self._stream))
        if about is None:
            about = await js.add_stream(name=self._stream, subjects=[f"{self._prefix}.>"])
        return list(about.config.subjects or [])

    async def _release(self, js: Any, subject: str, data: bytes, headers: dict[str, str]) -> None:
        if await self._publish(js, subject, data, headers):
            return
        there = await none_if_absent(js.get_last_msg(self._stream, subject))
        if there is not None and (there.headers or {}).get(_PARTS) != headers[_PARTS]:
            raise StateError(
                f"{subject} was written with another part_bytes or format; use that one again"
            )

    async def _publish(self, js: Any, subject: str, data: bytes, headers: dict[str, str]) -> bool:
        """Publish the message unless its subject has one; whether it did."""
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

    def _insist(self, work: Callable[[Any], Awaitable[T]]) -> T:
        """Do it; while the server is away, wait and do it again."""
        return self._retry.insist(lambda: self._client.call(work))


def _refusal(text: str) -> StateError:
    return StateError(f"{text}; mend that and run again: nothing is lost")


def _about(table: pa.Table) -> dict[str, str]:
    """What a release says of itself, as headers."""
    facts = release_facts(table)
    names = ("window_start", "window_end", "trigger_time", "release_index", "releases")
    return {
        f"Dpstream-{name.replace('_', '-').title()}": str(facts[name])
        for name in names
        if facts.get(name) is not None
    }


from_options = NatsSink
