"""`SparkEngine`, to hand to `dps.run(..., engine=...)`, and the sinks that only Spark has."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from urllib.parse import quote

import pyarrow as pa

from dpstream.engines.collected import release_facts
from dpstream.errors import InvalidParameter, MissingDependency
from dpstream.records import Batch, Columns, Sink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dpstream.engines.spark.driver import SparkRun

_OF_FILES = ("parquet", "orc", "json", "csv", "avro", "text", "xml")


@runtime_checkable
class MessageReader(Protocol):
    """What Spark's reader of a server is told, and how the messages become rows."""

    where: str
    format: str
    bounded: bool
    options: Mapping[str, str]
    columns: tuple[str, ...]
    """Of a message."""

    def batch(self, read: pa.Table, columns: Columns) -> Batch:
        """The rows of some messages, and what is none; called in tasks."""


@dataclass(frozen=True)
class SparkEngine:
    """Runs queries on a Spark session (4.1 or newer), which stays the caller's own.

    `buckets`: hash buckets of units and of groups (default: twice the cores of the cluster); fixed
    when a run begins. `state_location`: where driver and executors share files: a path that is
    mounted everywhere, or an address such as `s3://bucket/folder`; default: in the run's state
    directory. `steps_at_once`: triggers of a bounded input that one job publishes. `batch_every`:
    how often a live stream is asked for rows.

    >>> import dpstream as dps
    >>> engine = dps.SparkEngine(dps.local_session())  # doctest: +SKIP
    >>> dps.run(query, source="clicks/*.parquet", engine=engine)  # doctest: +SKIP
    """

    session: SparkSession
    buckets: int = 0
    state_location: str | None = None
    steps_at_once: int = 32
    batch_every: str = "1 second"

    def __post_init__(self) -> None:
        require_pyspark()
        if not hasattr(self.session, "_jsparkSession"):
            raise InvalidParameter(
                "the Spark engine needs a classic session (SparkSession.builder.getOrCreate() in "
                "the driver's process): Spark Connect has no broadcasts, by which keys travel; got "
                f"{type(self.session).__module__}.{type(self.session).__name__}"
            )

    def start(self, **facts: Any) -> SparkRun:
        """A run; `dps.run` calls this."""
        from dpstream.engines.spark.driver import SparkRun

        source = facts["source"]
        if isinstance(source, FrameSource) and source.messages is not None and not source.bounded:
            facts["by_clock"] = True  # as everywhere: an address that has no end is read live
        return SparkRun(spark=self, **facts)

    def source(self, spec: Any) -> Any:
        """DataFrames and topics are read by Spark itself.

        A pipe has only one end, and it is not on an executor.
        """
        from pyspark.sql import DataFrame

        if isinstance(spec, DataFrame):
            return FrameSource(spec)
        if isinstance(spec, str) and spec == "-":
            raise InvalidParameter(
                "standard input cannot be read by executors; write it to files, or use the "
                "embedded engine"
            )
        return self._messages(spec) if isinstance(spec, MessageReader) else None

    def _messages(self, spec: MessageReader) -> FrameSource:
        """A server's messages, as Spark's own connector reads them."""
        from pyspark.errors import AnalysisException

        reader: Any = self.session.read if spec.bounded else self.session.readStream
        try:
            frame = reader.format(spec.format).options(**spec.options).load()
        except AnalysisException as problem:
            if "DATA_SOURCE" not in str(problem) and "Failed to find" not in str(problem):
                raise
            raise MissingDependency(
                f"{spec.where}: this Spark session has no connector to {spec.format}; name it when "
                "the session is made: spark.jars.packages=org.apache.spark:"
                f"spark-sql-kafka-0-10_2.13:{self.session.version} (docs/howto/kafka-on-spark.md)"
            ) from None
        return FrameSource(frame.select(*spec.columns), messages=spec)

    def sink(self, spec: Any) -> Any:
        """A function of a DataFrame and its release, such as a `SparkSink`, is Spark's own."""
        if not callable(spec) or isinstance(spec, Sink):
            return None
        return FrameSink(session=self.session, function=spec)


@dataclass(frozen=True)
class FrameSource:
    """A DataFrame as a run's source, with one partition; its rows are read by Spark."""

    frame: DataFrame
    of_files: bool = False
    """Is it a batch of a stream that only projects files?"""
    messages: MessageReader | None = None
    """How its rows, which are messages, become those of the source."""

    @property
    def bounded(self) -> bool:
        """Has it an end?"""
        return not self.frame.isStreaming

    def partitions(self) -> list[str]:
        """The name is for errors."""
        return ["the DataFrame"]

    def columns(self, partition: str) -> dict[str, pa.DataType] | None:
        """The types of the frame's columns; messages declare none."""
        if self.messages is not None:
            return None
        return {column.name: column.type for column in arrow_schema(self.frame)}

    def first_rows(self, columns: Sequence[str], most: int) -> pa.Table | None:
        """Some rows, for a look before anything is charged; None of a stream and of messages."""
        if self.messages is not None:
            return None
        names = ["`{}`".format(name.replace("`", "``")) for name in columns]
        return self.frame.select(*names).limit(most).toArrow() if self.bounded else None

    def wanted(self, columns: Sequence[str]) -> DataFrame:
        """What is read for these columns."""
        return self.frame if self.messages is not None else self.frame.select(*columns)

    def close(self) -> None:
        """Nothing is held open."""


def arrow_schema(frame: DataFrame) -> pa.Schema:
    """The types that a frame declares."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(frame.schema, timezone="UTC")  # instants, whatever the session shows


@dataclass(frozen=True, kw_only=True)
class ReleaseName:
    """Which release a DataFrame is: the query's name, window and trigger, and its run."""

    name: str
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

    >>> SparkSink(format="delta", path="s3://bucket/releases").format
    'delta'
    """

    format: str = "parquet"
    path: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, frame: DataFrame, release: ReleaseName) -> None:
        """Write a release."""
        writer = frame.write.format(self.format).options(**self.options)
        if self.format in _OF_FILES and self.path is not None:
            folder = f"query={quote(release.name, safe='')}/run={release.run}"
            place = f"{self.path}/{folder}/window={release.window}/trigger={release.trigger}"
            writer.mode("overwrite").save(place)
            return
        if self.format == "delta":
            application = f"dpstream {release.run} {release.name} {release.window}"
            writer = writer.option("txnAppId", application).option("txnVersion", release.trigger)
        writer = writer.mode("append")
        writer.save() if self.path is None else writer.save(self.path)


@dataclass(frozen=True, kw_only=True)
class FrameSink:
    """Hands each release to a function as a DataFrame."""

    session: SparkSession
    function: Write

    def write(self, name: str, window: int, trigger: int, table: pa.Table) -> None:
        """Idempotent if the function is."""
        run = release_facts(table).get("run", "")
        release = ReleaseName(name=name, window=window, trigger=trigger, run=run)
        plain = pa.schema([(field.name, _spark_type(field.type)) for field in table.schema])
        self.function(self.session.createDataFrame(table.cast(plain, safe=False)), release)

    def close(self) -> None:
        """Nothing is held open."""


def _spark_type(kind: pa.DataType) -> pa.DataType:
    """A type that Spark has, for each that a key has; what is finer than microseconds goes."""
    if pa.types.is_uint64(kind):
        return pa.decimal128(20, 0)
    if pa.types.is_time(kind) or pa.types.is_decimal256(kind):
        return pa.string()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    return pa.duration("us") if pa.types.is_duration(kind) else kind


def require_pyspark() -> None:
    """Refuse with words when PySpark, or a Java for it, is missing."""
    try:
        import pyspark
    except ImportError:
        raise MissingDependency(
            "the Spark engine needs PySpark; install it with: pip install 'dpstream[spark]'"
        ) from None
    version = tuple(int(part) for part in pyspark.__version__.split(".")[:2])
    if version < (4, 1):
        raise MissingDependency(
            f"the Spark engine needs PySpark 4.1 or newer; found {pyspark.__version__}; install it "
            "with: pip install 'dpstream[spark]'"
        )


def require_java() -> None:
    """Refuse with words when there is no Java."""
    home = os.environ.get("JAVA_HOME")
    if shutil.which("java" if home is None else str(Path(home) / "bin" / "java")) is None:
        place = "on PATH" if home is None else f"in JAVA_HOME={home}"
        raise MissingDependency(
            f"Spark needs Java 17 or 21, and there is no java {place}; install one, such as "
            "Debian's openjdk-17-jre-headless, or set JAVA_HOME"
        )


def local_session(master: str | None = None, **settings: str) -> SparkSession:
    """The session of this process; if there is none, one at `master` (default: all cores here).

    Under `spark-submit` the master is the one that was submitted to. Executors use this Python.

    >>> import dpstream as dps
    >>> session = dps.local_session("local[2]")  # doctest: +SKIP
    """
    require_pyspark()
    require_java()
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName("dpstream")
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # else spark-submit has started us
        builder = builder.master(master or "local[*]")
    usual = {"spark.ui.showConsoleProgress": "false", "spark.sql.session.timeZone": "UTC"}
    for name, value in (usual | settings).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def ship_code(session: SparkSession) -> None:
    """Send this dpstream to executors that have not installed it; they need its dependencies."""
    package = Path(__file__).parents[2]
    folder = tempfile.mkdtemp(prefix="dpstream-code-")
    archive = shutil.make_archive(f"{folder}/dpstream", "zip", package.parent, package.name)
    session.sparkContext.addPyFile(archive)
