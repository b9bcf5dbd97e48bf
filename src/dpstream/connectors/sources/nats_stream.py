"""A JetStream stream as it must be to be read, and places in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from dpstream.errors import InvalidInput
from dpstream.records import Position


@dataclass(frozen=True, kw_only=True)
class Place:
    """A position in a stream."""

    created: str
    begin: int
    sequence: int
    count: int

    def position(self) -> Position:
        """As it is kept."""
        return [self.created, self.begin, self.sequence, self.count]


def placed(position: Position) -> Place | None:
    """The place that a position tells; None is the beginning."""
    if position is None:
        return None
    try:
        created, begin, sequence, count = position
        return Place(
            created=str(created), begin=int(begin), sequence=int(sequence), count=int(count)
        )
    except (TypeError, ValueError):
        raise InvalidInput(
            f"{position!r} is no position of a NATS stream; the checkpoint belongs to another "
            "source"
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
