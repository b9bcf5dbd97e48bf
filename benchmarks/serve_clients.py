"""Clients of a server's events in a process of their own: each must see every event, once.

Told on standard input where to connect; a line there asks them to stop when they have seen the
event of that number. What they have seen goes to standard output, as one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

_PATIENCE = 30.0  # seconds that clients wait for the last event


@dataclass(kw_only=True)
class Client:
    """One that follows the events, and breaks off now and then to go on by its last id."""

    host: str
    port: int
    breaks: int
    """Break the connection after so many events; 0: never."""
    ids: list[int] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)
    connections: int = 0

    async def follow(self, until: asyncio.Future[int]) -> None:
        """Follow until the event that `until` comes to name was seen."""
        while not self._over(until):
            try:
                await self._once(until)
            except (OSError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.1)

    def _over(self, until: asyncio.Future[int]) -> bool:
        return until.done() and bool(self.ids) and self.ids[-1] >= until.result()

    async def _once(self, until: asyncio.Future[int]) -> None:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        self.connections += 1
        last = f"Last-Event-ID: {self.ids[-1]}\r\n" if self.ids else ""
        request = f"GET /api/events HTTP/1.1\r\nHost: {self.host}\r\n{last}\r\n"
        writer.write(request.encode())
        await writer.drain()
        seen = 0
        try:
            while not self._over(until):
                line = await reader.readline()
                if not line:
                    return
                if line.startswith(b"data: "):
                    self._take(json.loads(line[6:]))
                    seen += 1
                    if self.breaks and seen >= self.breaks:
                        return
        finally:
            writer.close()

    def _take(self, event: dict[str, Any]) -> None:
        self.ids.append(event["id"])
        due = datetime.fromisoformat(event["time"]).timestamp()
        self.delays.append(time.time() - due)


async def _run(host: str, port: int, count: int, breaking: int) -> dict[str, Any]:
    """Follow with so many clients; every `breaking`-th breaks off after each five events."""
    until: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    clients = [
        Client(host=host, port=port, breaks=5 if breaking and n % breaking == 0 else 0)
        for n in range(count)
    ]
    tasks = [asyncio.create_task(one.follow(until)) for one in clients]
    last = await asyncio.to_thread(sys.stdin.readline)
    until.set_result(int(last))
    await asyncio.wait(tasks, timeout=_PATIENCE)
    return {
        "clients": [
            {"ids": one.ids, "connections": one.connections, "delays": one.delays}
            for one in clients
        ]
    }


def main(args: Sequence[str]) -> None:
    """Host, port, clients, which of them break off, and the core to stay on."""
    host, port, count, breaking, core = args
    if int(core) >= 0:
        os.sched_setaffinity(0, {int(core)})
    found = asyncio.run(_run(host, int(port), int(count), int(breaking)))
    sys.stdout.write(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # who is still waiting has lost an event, and must not hold this up


if __name__ == "__main__":
    main(sys.argv[1:])
