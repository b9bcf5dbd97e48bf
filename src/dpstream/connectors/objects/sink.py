"""Releases as objects: one for each query, window and trigger."""

from __future__ import annotations

import pyarrow as pa

from dpstream.connectors.encode import ENCODERS, another_run, run_of
from dpstream.connectors.files.sink import file_name
from dpstream.connectors.objects.client import Bucket
from dpstream.connectors.server_base import ServerAway, ServerOptions, unreachable
from dpstream.connectors.storage import safe_name
from dpstream.errors import InvalidParameter


class ObjectSink:
    """Objects such as `PREFIX/clicks-w000003-t000017.parquet`, made if they are not there.

    An object appears whole or not at all, and only the first writer makes it. `.NAME.run` beside
    them says of which run they are; of two runs that begin at once one makes it, and the other is
    refused.
    """

    concurrent = True

    def __init__(self, options: ServerOptions) -> None:
        self._bucket, self._retry = Bucket(options), options.retry_policy()
        self._bucket.refuse_unfenced("a sink")
        path = self._bucket.path
        self._prefix = path if not path or path.endswith("/") else f"{path}/"
        kind = self._prefix.rstrip("/").rpartition(".")[2]
        if kind in ENCODERS:
            raise InvalidParameter(
                f"{self._bucket.where} is one object, and a sink makes one for each release; name "
                f"a prefix: {self._bucket.scheme}://BUCKET/releases/?format={kind}"
            )
        self._suffix = options.choice("format", [*ENCODERS], "parquet")
        self._runs: dict[str, str] = {}  # by query
        try:
            self._bucket.get(f"{self._prefix}.dpstream")  # the bucket is there, and may be read
        except ServerAway as problem:
            raise unreachable(self._bucket.where, problem) from None

    def write(self, name: str, window: int, trigger: int, table: pa.Table) -> None:
        """Make the object, unless it is there; releases of another run are refused."""
        run = run_of(table)
        if run and name not in self._runs:
            self._create(self._marker(name), run.encode())
            self.fence(name, run)
            self._runs[name] = run
        self.fence(name, run)
        key = self._prefix + file_name(name, window, trigger, self._suffix)
        self._create(key, ENCODERS[self._suffix](table))

    def close(self) -> None:
        """Nothing is held open."""

    def check(self, name: str, schema: pa.Schema) -> None:
        """Refuse columns that the format has not, and a bucket that may not be written."""
        ENCODERS[self._suffix](schema.empty_table())
        try:
            self._bucket.refuse_read_only(f"{self._marker(name)}.probe")
        except ServerAway as problem:
            raise unreachable(self._bucket.where, problem) from None

    def fence(self, name: str, run: str) -> None:
        """Refuse a query whose releases here are from another run."""
        if run and self._runs.get(name) != run:
            marker = self._marker(name)
            there = self._retry.insist(lambda: self._bucket.get(marker))
            if there is not None and there.data != run.encode():
                first = self._prefix + file_name(name, 0, 0, self._suffix)
                objects = f"{first.partition('-w')[0]}-w*.{self._suffix} and {marker}"
                raise another_run(self._bucket.where, name, files=objects)

    def _create(self, key: str, data: bytes) -> None:
        """Make an object; one that is there may be our own, of a try whose answer was lost."""
        self._retry.insist(lambda: self._bucket.create(key, data))

    def _marker(self, query: str) -> str:
        return f"{self._prefix}.{safe_name(query)}.run"


from_options = ObjectSink
