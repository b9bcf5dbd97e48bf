"""NATS JetStream as a source: one stream is one partition, read by sequence number.

The server keeps nothing about who has read what: a consumer lives for as long as reads follow each
other, and a read from elsewhere makes a new one. A position is [when the stream was made, the
sequence before the first message, the last sequence read, how many messages that were]: a stream
that was made anew is seen, and so is a message that a replay needs and that is gone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpstream.connectors.messages import FORMATS, MAX_BYTES, Decoder, messages_of
from dpstream.connectors.nats.client import Away, Client, Ended, Message, Puller, Refused
from dpstream.connectors.options import ServerOptions
from dpstream.connectors.retry import SECONDS, RetryPolicy
from dpstream.errors import InvalidInput, InvalidParameter, RowsLost, ServerUnreachable
from dpstream.records import Batch, Position

# A JetStream stream as it must be to be read, and places in it.


@dataclass(frozen=True, kw_only=True)
class StreamPosition:
    """A position in a stream."""

    created: str
    begin: int
    sequence: int
    count: int

    def position(self) -> Position:
        """As it is kept."""
        return [self.created, self.begin, self.sequence, self.count]


def placed(position: Position) -> StreamPosition | None:
    """The place that a position tells; None is the beginning."""
    if position is None:
        return None
    try:
        created, begin, sequence, count = position
        return StreamPosition(
            created=str(created), begin=int(begin), sequence=int(sequence), count=int(count)
        )
    except (TypeError, ValueError):
        raise InvalidInput(
            f"{position!r} is no position of a NATS stream; the state belongs to another source"
        ) from None


def refuse_stream(about: Any, stream: str, where: str, end: int | None) -> None:
    """Refuse a stream that is not there, or that drops messages from its middle."""
    if about is None:
        raise InvalidInput(f"{where}: there is no stream {stream!r}; create it first")
    kind, each = str(about.config.retention), about.config.max_msgs_per_subject or 0
    if kind.endswith(("interest", "workqueue")) or each > 0:
        what = f"the last {each} messages of each subject" if each > 0 else f"by {kind}"
        raise InvalidInput(
            f"the stream {stream!r} keeps messages {what}, so rows would go before they are read; "
            "use a stream with limits of age or size alone, such as a mirror of it"
        )
    if end is not None and about.state.last_seq < end:
        raise InvalidInput(
            f"the stream {stream!r} ends at {about.state.last_seq}, before until={end}; wait, or "
            "name an earlier end"
        )


async def stream_info(js: Any, stream: str) -> Any:
    """What the server says of a stream; None if it has none."""
    import nats.js.errors

    try:
        return await js.stream_info(stream)
    except nats.js.errors.NotFoundError:
        return None


def pattern(subject: str) -> re.Pattern[str]:
    """The subjects that a subject with * and > stands for."""
    words = [
        r"[^.]+" if word == "*" else r".+" if word == ">" else re.escape(word)
        for word in subject.split(".")
    ]
    return re.compile(r"\.".join(words), re.DOTALL)


_CHUNK = 5000


def from_options(options: ServerOptions) -> NatsSource:
    """The source that a URI names: nats://host:4222/STREAM."""
    kind, header = options.choice("format", FORMATS, "json"), options.text("header")
    decoder = messages_of(kind, header=None if header is None else header.split(","))
    decoder.max_bytes = int(options.number("max_message_bytes", MAX_BYTES, least=1))
    start = options.choice("start", ("earliest", "latest"), "earliest")
    subject, until = options.text("subject", ">"), options.number("until", 0)
    retry = RetryPolicy(options.where, seconds=options.number("patience", SECONDS))
    client = Client(options)
    options.finish()
    if not options.path or "/" in options.path:
        raise InvalidParameter(f"{options.where} must name one stream: nats://host:4222/STREAM")
    source = NatsSource(
        client,
        stream=options.path,
        subject=subject or ">",
        decoder=decoder,
        retry=retry,
        latest=start == "latest",
        end=int(until) or None,
    )
    try:
        source.check()
    except Exception:
        client.close()
        raise
    return source


class NatsSource:
    """Messages of a stream, and of them those whose subject fits `subject`.

    `end`: a sequence number; with it the source is bounded and ends there.
    """

    replayable = True

    def __init__(
        self,
        client: Client,
        *,
        stream: str,
        subject: str,
        decoder: Decoder,
        retry: RetryPolicy,
        latest: bool = False,
        end: int | None = None,
    ) -> None:
        self._client, self._stream, self._decoder = client, stream, decoder
        self._fits = pattern(subject)
        self._retry, self._latest, self._end = retry, latest, end
        self.bounded = end is not None
        self._name = stream if end is None else f"{stream} up to {end}"
        self._puller: Puller | None = None

    def check(self) -> None:
        """Refuse a server that does not answer, and a stream that cannot be read."""
        try:
            about = self._client.call(lambda js: stream_info(js, self._stream))
        except Away as problem:
            raise ServerUnreachable(
                f"{self._client.where} does not answer: {problem}; start it, or mend the address"
            ) from problem
        except Refused as problem:
            raise self._refused(problem) from problem
        refuse_stream(about, self._stream, self._client.where, self._end)

    def partitions(self) -> list[str]:
        """The stream."""
        return [self._name]

    def start_offset(self, position: Position) -> Position:
        """Where reading started in a position's partition: stream and first sequence."""
        return None if position is None else position[:2]

    def columns(self, partition: str) -> None:
        """Messages declare no types."""

    def read(
        self,
        partition: str,
        position: Position,
        *,
        columns: Sequence[str] | None = None,
        until: Position = None,
    ) -> Batch:
        """The next messages; a chunk is a request to the server."""
        if partition != self._name:
            raise InvalidInput(f"the source reads {self._name!r} now, not {partition!r}")
        at, goal = placed(position), placed(until)
        if goal is not None and at is not None and at.sequence >= goal.sequence:
            return self._batch([], at, columns, done=True)
        while self.bounded and self._retry.too_early:
            self._retry.wait()
        if self._retry.too_early:
            return self._batch([], at, columns, done=until is None)
        try:
            found, after, done = self._client.call(lambda js: self._next(js, at, goal))
        except Away as problem:
            self._puller = None
            self._retry.failed(str(problem))
            return self._batch([], at, columns, done=until is None and not self.bounded)
        except Refused as problem:
            raise self._refused(problem) from problem
        self._retry.well()
        return self._batch(found, after, columns, done=done)

    def close(self) -> None:
        """Leave the server; a consumer without a reader ends by itself."""
        self._client.close()

    async def _next(
        self, js: Any, at: StreamPosition | None, goal: StreamPosition | None
    ) -> tuple[list[Message], StreamPosition, bool]:
        about = await stream_info(js, self._stream)
        at = self._checked(about, at, goal)
        last = about.state.last_seq
        stop = goal.sequence if goal is not None else min(last, self._end or last)
        if at.sequence >= stop:
            return [], at, True
        pulled = await self._pulled(js, at.sequence + 1, min(_CHUNK, stop - at.sequence))
        found = [one for one in pulled if one.sequence <= stop]
        if goal is None:
            await self._refuse_gaps(js, at.sequence, found)
        reached = found[-1].sequence if found else at.sequence
        if len(found) < len(pulled) or not found:
            reached = stop if goal is not None or self.bounded else reached
        after = replace(at, sequence=reached, count=at.count + len(found))
        if goal is not None and reached >= goal.sequence and after != goal:
            raise RowsLost(
                f"a step has read {goal.count - at.count} messages of {self._stream!r} after "
                f"{at.sequence} up to {goal.sequence}, and {len(found)} of them are left; restore "
                "the stream, or start anew with another state directory"
            )
        return found, after, reached >= stop or not found

    async def _pulled(self, js: Any, first: int, most: int) -> list[Message]:
        if self._puller is not None and self._puller.next == first:
            try:
                return await self._puller.pull(js, most)
            except Ended:
                self._puller = None
        self._puller = await Puller.begin(js, self._stream, first)
        try:
            return await self._puller.pull(js, most)
        except Ended:
            raise TimeoutError("no messages come, though they are there") from None

    def _checked(
        self, about: Any, at: StreamPosition | None, goal: StreamPosition | None
    ) -> StreamPosition:
        """The place in the stream that is there now."""
        known = at or goal
        if about is None or (known is not None and known.created != about.created.isoformat()):
            raise RowsLost(
                f"the stream {self._stream!r} that was read before is gone"
                f"{'' if about is None else ', and another one has its name'}; restore it, or "
                "start anew with another state directory"
            )
        state = about.state
        if at is None:
            begin = state.last_seq if self._latest else max(state.first_seq - 1, 0)
            begin = begin if goal is None else goal.begin
            created = about.created.isoformat()
            at = StreamPosition(created=created, begin=begin, sequence=begin, count=0)
        reached = at.sequence if goal is None else goal.sequence
        if reached > state.last_seq:
            raise RowsLost(
                f"the stream {self._stream!r} ends at {state.last_seq} now, and was read up to "
                f"{reached}; restore it, or start anew with another state directory"
            )
        if goal is None and state.first_seq > at.sequence + 1:
            raise self._expired(at.sequence + 1, state.first_seq)
        return at

    async def _refuse_gaps(self, js: Any, before: int, found: list[Message]) -> None:
        """A message that somebody deleted by its number is no row; one that expired was one."""
        for one in found:
            if one.sequence != before + 1:
                about = await stream_info(js, self._stream)
                if about is None or about.state.first_seq > before + 1:
                    raise self._expired(before + 1, one.sequence)
            before = one.sequence

    def _expired(self, first: int, left: int) -> RowsLost:
        return RowsLost(
            f"the stream {self._stream!r} has dropped the messages {first} to {left - 1} before "
            "they were read: its limits of age or size are too small for how long this was down; "
            "restore them, or start anew with another state directory"
        )

    def _batch(
        self,
        found: list[Message],
        at: StreamPosition | None,
        columns: Sequence[str] | None,
        *,
        done: bool,
    ) -> Batch:
        mine = [one for one in found if self._fits.fullmatch(one.subject)]
        content = [one.data for one in mine]
        decoded = self._decoder.decode(content, columns)
        places = [f"{self._stream}, message {one.sequence}" for one in mine] if decoded.bad else []
        return Batch(
            table=decoded.table,
            position=None if at is None else at.position(),
            done=done,
            rejected=decoded.rejected(content, places),
            where=f"{self._stream} from message {found[0].sequence}" if found else None,
        )

    def _refused(self, problem: Refused) -> InvalidInput:
        return InvalidInput(f"{self._client.where} refuses: {problem}")
