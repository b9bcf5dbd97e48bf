"""NATS JetStream as a source: one stream is one partition, read by sequence number.

The server keeps nothing about who has read what: a consumer lives for as long as reads follow each
other, and a read from elsewhere makes a new one. A position is [when the stream was made, the
sequence before the first message, the last sequence read, how many messages that were]: a stream
that was made anew is seen, and so is a message that a replay needs and that is gone.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from dpstream.connectors.messages import decoder_from
from dpstream.connectors.nats.client import Client, ConsumerDropped, Message, Puller, none_if_absent
from dpstream.connectors.server_base import ServerAway, ServerLog, ServerOptions
from dpstream.errors import InvalidInput, RowsLost
from dpstream.records import Batch, Columns, Position

_CHUNK = 5000  # messages of one request
_ASK_EVERY = 2.0  # seconds between two questions for how much is unread


class StreamPosition(NamedTuple):
    """A position in a stream."""

    created: str
    begin: int
    sequence: int
    messages: int


class NatsSource(ServerLog[StreamPosition]):
    """The source of nats://host:4222/STREAM?...: messages whose subject fits `subject`.

    With `until`, a sequence number, it is bounded and ends there.
    """

    position_kind = "a NATS stream"

    def __init__(self, options: ServerOptions) -> None:
        self._decoder, self._latest = decoder_from(options), options.starts_latest()
        self._subject = _subject_pattern(options.text("subject") or ">")
        end = int(options.number("until", 0)) or None
        retry, self._client = options.retry_policy(), Client(options)
        options.finish()
        self._stream = options.path_name("stream", "nats://host:4222/STREAM")
        self._puller: Puller | None = None
        self._told: Any = None  # about the stream, for `behind`
        self._asked: Future[Any] | None = None
        self._next_ask = 0.0
        super().__init__(self._stream, end=end, retry=retry)
        try:
            self._refuse_stream()
        except Exception:
            self._client.close()
            raise

    def behind(self, positions: Mapping[str, Position]) -> dict[str, int]:
        """Messages that the stream has after these positions, of all subjects."""
        if self._asked is not None and self._asked.done():
            answered = None if self._asked.exception() else self._asked.result()
            self._told, self._asked = answered or self._told, None
        if self._asked is None and time.monotonic() >= self._next_ask:
            self._next_ask = time.monotonic() + _ASK_EVERY
            self._asked = self._client.ask(lambda js: js.stream_info(self._stream))
        if self._told is None:
            return {}
        last = self._told.state.last_seq
        at = {name: self._parse(position) for name, position in positions.items()}
        return {name: max(0, last - one.sequence) for name, one in at.items() if one is not None}

    def until_now(self) -> str:
        """The sequence number of the last message, as `until` takes it."""
        about = self._client.first_call(lambda js: none_if_absent(js.stream_info(self._stream)))
        return str(about.state.last_seq) if about is not None and about.state.last_seq else ""

    def columns(self, partition: str) -> None:
        """Messages declare no types."""

    def close(self) -> None:
        """Leave the server; a consumer without a reader ends by itself."""
        self._client.close()

    def parse_position(self, position: Position) -> StreamPosition:
        """The four items of a position."""
        created, begin, sequence, messages = position
        return StreamPosition(str(created), int(begin), int(sequence), int(messages))

    def no_rows(self, position: Position, columns: Columns, *, done: bool) -> Batch:
        """No messages."""
        return self._batch([], position, columns, done=done)

    def read_next(
        self, at: StreamPosition | None, goal: StreamPosition | None, columns: Columns
    ) -> Batch:
        """The next messages; a chunk is a request to the server."""
        try:
            messages, after, done = self._client.call(lambda js: self._fetch(js, at, goal))
        except ServerAway:
            self._puller = None
            raise
        return self._batch(messages, list(after), columns, done=done)

    def _refuse_stream(self) -> None:
        """Refuse a stream that is not there, ends too early, or drops messages from its middle."""
        about = self._client.first_call(lambda js: none_if_absent(js.stream_info(self._stream)))
        if about is None:
            raise InvalidInput(
                f"{self._client.where}: there is no stream {self._stream!r}; create it first"
            )
        kind, each = str(about.config.retention), about.config.max_msgs_per_subject or 0
        if kind.endswith(("interest", "workqueue")) or each > 0:
            what = f"the last {each} messages of each subject" if each > 0 else f"by {kind}"
            raise InvalidInput(
                f"the stream {self._stream!r} keeps messages {what}, so rows would go before they "
                "are read; use a stream with limits of age or size alone, such as a mirror of it"
            )
        if self._end is not None and about.state.last_seq < self._end:
            raise InvalidInput(
                f"the stream {self._stream!r} ends at {about.state.last_seq}, before "
                f"until={self._end}; wait, or name an earlier end"
            )

    async def _fetch(
        self, js: Any, at: StreamPosition | None, goal: StreamPosition | None
    ) -> tuple[list[Message], StreamPosition, bool]:
        """The next messages, the position after them, and whether nothing follows."""
        about = await none_if_absent(js.stream_info(self._stream))
        at = self._place_in(about, at, goal)
        last = about.state.last_seq
        stop = goal.sequence if goal is not None else min(last, self._end or last)
        if at.sequence >= stop:
            return [], at, True
        pulled = await self._pull(js, at.sequence + 1, min(_CHUNK, stop - at.sequence))
        messages = [message for message in pulled if message.sequence <= stop]
        if goal is None:
            await self._refuse_gaps(js, at.sequence, messages)
        reached = messages[-1].sequence if messages else at.sequence
        if len(messages) < len(pulled) or not messages:
            reached = stop if goal is not None or self.bounded else reached
        after = at._replace(sequence=reached, messages=at.messages + len(messages))
        if goal is not None and reached >= goal.sequence and after != goal:
            raise RowsLost(
                f"a step has read {goal.messages - at.messages} messages of {self._stream!r} after "
                f"{at.sequence} up to {goal.sequence}, and {len(messages)} of them are left; "
                "restore the stream, or start anew with another state directory"
            )
        return messages, after, reached >= stop or not messages

    async def _pull(self, js: Any, first: int, most: int) -> list[Message]:
        """Messages from `first` on, by the consumer that stands there or by a new one."""
        if self._puller is not None and self._puller.next == first:
            try:
                return await self._puller.pull(js, most)
            except ConsumerDropped:
                self._puller = None
        self._puller = await Puller.begin(js, self._stream, first)
        try:
            return await self._puller.pull(js, most)
        except ConsumerDropped:
            raise TimeoutError("no messages come, though they are there") from None

    def _place_in(
        self, about: Any, at: StreamPosition | None, goal: StreamPosition | None
    ) -> StreamPosition:
        """Where to read on in the stream that is there now; refuse one that is not as it was."""
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
            at = StreamPosition(about.created.isoformat(), begin, begin, 0)
        reached = at.sequence if goal is None else goal.sequence
        if reached > state.last_seq:
            raise RowsLost(
                f"the stream {self._stream!r} ends at {state.last_seq} now, and was read up to "
                f"{reached}; restore it, or start anew with another state directory"
            )
        if goal is None and state.first_seq > at.sequence + 1:
            raise self._expired(at.sequence + 1, state.first_seq)
        return at

    async def _refuse_gaps(self, js: Any, before: int, messages: list[Message]) -> None:
        """A message that somebody deleted by its number is no row; one that expired was one."""
        for message in messages:
            if message.sequence != before + 1:
                about = await none_if_absent(js.stream_info(self._stream))
                if about is None or about.state.first_seq > before + 1:
                    raise self._expired(before + 1, message.sequence)
            before = message.sequence

    def _expired(self, first: int, left: int) -> RowsLost:
        return RowsLost(
            f"the stream {self._stream!r} has dropped the messages {first} to {left - 1} before "
            "they were read: its limits of age or size are too small for how long this was down; "
            "restore them, or start anew with another state directory"
        )

    def _batch(
        self, messages: list[Message], position: Position, columns: Columns, *, done: bool
    ) -> Batch:
        """The rows of the messages whose subject fits."""
        fitting = [message for message in messages if self._subject.fullmatch(message.subject)]
        payloads = [message.data for message in fitting]
        decoded = self._decoder.decode(payloads, columns)
        return Batch(
            table=decoded.table,
            position=position,
            done=done,
            rejected=decoded.rejected(
                payloads, lambda at: f"{self._stream}, message {fitting[at].sequence}"
            ),
            where=f"{self._stream} from message {messages[0].sequence}" if messages else None,
        )


def _subject_pattern(subject: str) -> re.Pattern[str]:
    """The subjects that a subject with * and > stands for."""
    words = [
        r"[^.]+" if word == "*" else r".+" if word == ">" else re.escape(word)
        for word in subject.split(".")
    ]
    return re.compile(r"\.".join(words), re.DOTALL)


from_options = NatsSource
