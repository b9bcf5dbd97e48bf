"""Messages of a JetStream stream in batches: about three times the client's own fetch."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

_IDLE = 300.0  # seconds after which the server drops a consumer that nobody asks
_PATIENCE = 1.0  # seconds without a message
_GONE = ("404", "408")  # nothing more is there, which is no error


class Ended(Exception):
    """The server has dropped the consumer, as it does with one that was idle for long."""


class Message(NamedTuple):
    """One message."""

    sequence: int
    subject: str
    data: bytes


class Puller:
    """A consumer without a name and without acknowledgements, at one place of a stream."""

    def __init__(self, api: str, inbox: str, subscription: Any, first: int) -> None:
        self.next = first
        """The sequence from which the next pull goes on."""
        self._api, self._inbox, self._subscription = api, inbox, subscription
        self._arrived: list[Any] = []
        self._wanted, self._enough = 0, asyncio.Event()

    @classmethod
    async def begin(cls, js: Any, stream: str, first: int) -> Puller:
        """A consumer that begins with the message `first`."""
        from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

        connection = js._nc  # the client has no public way from JetStream to its connection
        inbox = connection.new_inbox()
        config = ConsumerConfig(
            name=inbox.rpartition(".")[2],
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=first,
            ack_policy=AckPolicy.NONE,
            inactive_threshold=_IDLE,
            mem_storage=True,
        )
        about = await js.add_consumer(stream, config)
        puller = cls(f"{js._prefix}.CONSUMER.MSG.NEXT.{stream}.{about.name}", inbox, None, first)
        puller._subscription = await connection.subscribe(
            inbox, cb=puller._arrive, pending_msgs_limit=-1, pending_bytes_limit=-1
        )
        return puller

    async def pull(self, js: Any, most: int) -> list[Message]:
        """Up to `most` messages that are there now."""
        self._arrived, self._wanted = [], most
        self._enough.clear()
        ask = json.dumps({"batch": most, "no_wait": True}).encode()
        await js._nc.publish(self._api, ask, reply=self._inbox)
        while not self._enough.is_set():
            known = len(self._arrived)
            try:
                await asyncio.wait_for(self._enough.wait(), _PATIENCE)
            except TimeoutError:
                if len(self._arrived) == known:  # a server says nothing of a consumer it dropped
                    raise Ended from None
        status = None if self._arrived[-1].reply else self._arrived.pop()
        if status is not None and (status.headers or {}).get("Status") not in _GONE:
            raise Ended
        found = [_message(one) for one in self._arrived]
        self._arrived = []
        if found:
            self.next = found[-1].sequence + 1
        return found

    async def _arrive(self, message: Any) -> None:
        self._arrived.append(message)
        if len(self._arrived) >= self._wanted or not message.reply:
            self._enough.set()


def _message(one: Any) -> Message:
    words = one.reply.split(".")  # $JS.ACK[.domain.account].stream.consumer.delivered.sequence...
    return Message(int(words[5] if len(words) == 9 else words[7]), one.subject, one.data)
