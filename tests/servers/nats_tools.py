"""Streams for tests, made and filled with the client itself."""

import asyncio
import json

from dpstream.connectors.nats.client import Client
from dpstream.connectors.server_base import ServerOptions


class Stream:
    """A stream of its own on a running server."""

    def __init__(self, server, name, **config):
        self.server, self.name = server, name
        self.subject = name.lower()
        self.client = Client(ServerOptions(self.uri()))
        if config.pop("make", True):
            config = {"name": name, "subjects": [f"{self.subject}.>"]} | config
            self.client.call(lambda js: js.add_stream(**config))

    def uri(self, more=""):
        return f"{self.server.address}/{self.name}?password_file={self.server.password_file}{more}"

    def put(self, *payloads, subject="a"):
        """Messages, all of them stored when this returns; dicts as JSON."""
        content = [p if isinstance(p, bytes) else json.dumps(p).encode() for p in payloads]

        async def publish(js):
            place = f"{self.subject}.{subject}"
            await asyncio.gather(*[await js.publish_async(place, one) for one in content])

        self.client.call(publish)

    def info(self):
        return self.client.call(lambda js: js.stream_info(self.name))

    def messages(self):
        """Everything in the stream: (subject, headers, content)."""

        async def fetch(js):
            about = await js.stream_info(self.name)
            found = []
            for sequence in range(about.state.first_seq, about.state.last_seq + 1):
                one = await js.get_msg(self.name, sequence)
                found.append((one.subject, one.headers or {}, one.data or b""))
            return found

        return self.client.call(fetch)


def fresh(server, **config):
    """A stream with a name that is not taken."""
    probe = Stream(server, "PROBE", make=False)
    number = len(probe.client.call(lambda js: js.streams_info()))
    probe.client.close()
    return Stream(server, f"S{number}", **config)
