"""Servers in processes of their own, on free ports of loopback, and who follows them."""

import http.client
import json
import os
import signal
import subprocess
import threading
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from tests.support.processes import Command


class Served:
    """A running `dpstream serve`."""

    command = Command

    def __init__(self, pipeline, *options):
        environment = os.environ | {"DPSTREAM_OPERATOR_TOKEN": "a token for tests alone"}
        words = ("serve", pipeline, "--json", "--port", 0, "--operator-port", 0, "--grid", 0.1)
        self.process = self.command(
            *words,
            *options,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # as under nohup
        )
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read().decode()
        told = json.loads(line)
        self.public, self.operator = told["public"], told["operator"]
        self.flight = told.get("flight")

    def ask(self, path, *, method="GET", body=None, side="public", **headers):
        """Status and body of one request."""
        place = urlsplit(self.public if side == "public" else self.operator)
        if side == "operator":
            headers |= {"authorization": "Bearer a token for tests alone"}
        connection = http.client.HTTPConnection(place.hostname, place.port, timeout=30)
        try:
            connection.request(method, path, body=body, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def health(self):
        return json.loads(self.ask("/health", side="operator")[1])

    def post(self, lines, source="clicks"):
        body = "\n".join(map(json.dumps, lines))
        kind = {"content-type": "application/jsonl"}
        return self.ask(f"/ingest/{source}", method="POST", body=body, side="operator", **kind)

    def kill(self):
        """As kill -9 does; the pipeline's process notices by itself."""
        self.process.kill()
        self.close()

    def stop(self):
        """As Ctrl-C does; how it left, and what it said."""
        self.process.send_signal(signal.SIGINT)
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said.decode()

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()


@contextmanager
def served(pipeline, *options, kind=Served):
    """A server that is gone afterwards, however it ends."""
    one = kind(pipeline, *options)
    try:
        yield one
    finally:
        one.close()


class Follower(threading.Thread):
    """Follows the events until its server goes away; keeps (id, data)."""

    def __init__(self, server, last=None, path="/api/events"):
        super().__init__(daemon=True)
        self.events, self.resets = [], 0
        place = urlsplit(server.public)
        self._connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
        headers = {} if last is None else {"last-event-id": str(last)}
        self._connection.request("GET", path, headers=headers)
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200
        self.start()

    def run(self):
        number, kind = None, None
        with suppress(OSError, http.client.HTTPException, ValueError, AttributeError):
            while line := self._answer.readline():
                name, _, value = line.decode().rstrip("\n").partition(": ")
                if name == "id":
                    number = int(value)
                elif name == "event":
                    kind = value
                elif name == "data" and kind == "release":
                    self.events.append((number, json.loads(value)))
                elif name == "data":
                    self.resets += 1
