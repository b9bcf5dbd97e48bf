"""Releases as DataFrames: to any format that Spark writes, or to a function of yours."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import quote

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_OF_FILES = ("parquet", "orc", "json", "csv", "avro", "text", "xml")


@dataclass(frozen=True, kw_only=True)
class ReleaseName:
    """Which release a DataFrame is: (query, window, trigger) names it within its run."""

    query: str
    window: int
    trigger: int
    run: str


Write = Callable[["DataFrame", ReleaseName], None]
"""Called once or more for a release, always with the same rows: it must not write them twice."""


@dataclass(frozen=True, kw_only=True)
class SparkSink:
    """A format that Spark writes, such as parquet, delta, jdbc or kafka, with its options.

    Formats of files get a folder for each release, which is written anew if it comes again. Other
    formats are appended to; Delta Lake tells a release that comes again by the options `txnAppId`
    and `txnVersion`, which are set; with others a kill may leave a release twice: their readers
    tell it by its columns.
    """

    format: str = "parquet"
    path: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, frame: DataFrame, release: ReleaseName) -> None:
        """Write a release."""
        writer = frame.write.format(self.format).options(**self.options)
        if self.format in _OF_FILES and self.path is not None:
            folder = f"query={quote(release.query, safe='')}/run={release.run}"
            place = f"{self.path}/{folder}/window={release.window}/trigger={release.trigger}"
            writer.mode("overwrite").save(place)
            return
        if self.format == "delta":
            application = f"dpstream {release.run} {release.query} {release.window}"
            writer = writer.option("txnAppId", application).option("txnVersion", release.trigger)
        writer = writer.mode("append")
        writer.save() if self.path is None else writer.save(self.path)


@dataclass(frozen=True, kw_only=True)
class FrameSink:
    """Hands each release to a function as a DataFrame."""

    session: SparkSession
    function: Write

    def write(self, query: str, window: int, trigger: int, table: pa.Table) -> None:
        """Idempotent if the function is."""
        about = json.loads((table.schema.metadata or {}).get(b"dpstream", b"{}"))
        name = ReleaseName(query=query, window=window, trigger=trigger, run=about.get("run", ""))
        plain = table.replace_schema_metadata(None)
        self.function(self.session.createDataFrame(plain), name)

    def close(self) -> None:
        """Nothing is held open."""
