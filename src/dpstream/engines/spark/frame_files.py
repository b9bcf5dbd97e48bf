"""Parquet files of a DataFrame that only projects them: executors read them with our own reader.

Spark's reader makes rows of columns, and columns of rows again for Python; that takes longer than
all that is done with them. A frame is read so where nothing can differ: a projection of whole local
Parquet files without partition columns, whose columns have the names and the types that the frame
declares. Any other frame is read by Spark.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.engines.spark.spark_engine import arrow_schema
from dpstream.errors import InvalidInput
from dpstream.query.column_types import is_text
from dpstream.records import Batch, Columns, Position, Source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_FORMAT = "org.apache.spark.sql.execution.datasources.parquet.ParquetFileFormat"
_PASSED = ("Project", "SubqueryAlias")
_OPTIONS = (
    "latestfirst",
    "maxbytespertrigger",
    "maxcachedfiles",
    "maxfilespertrigger",
    "path",
    "pathglobfilter",
    "recursivefilelookup",
)
"""Which files are read, and how many at once; others may change what their rows are."""
_SETTINGS = (
    "spark.sql.files.ignoreCorruptFiles",
    "spark.sql.files.ignoreMissingFiles",
    "spark.sql.parquet.binaryAsString",
    "spark.sql.parquet.fieldId.read.enabled",
)
"""With these Spark reads otherwise."""
_REBASES = ("spark.sql.parquet.datetimeRebaseModeInRead", "spark.sql.parquet.int96RebaseModeInRead")
_SCAN = "org.apache.spark.sql.execution.datasources.FileScanRDD"
_REBASED = (b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96")
_WRITER = b"org.apache.spark.version"
_MOST = 1000  # files whose footers the driver looks at


@dataclass(frozen=True)
class FrameFiles:
    """Parquet files as a source, in the types that a frame declares."""

    files: Source
    schema: pa.Schema
    bounded = True
    replayable = True

    def partitions(self) -> list[str]:
        """The paths."""
        return self.files.partitions()

    def columns(self, partition: str) -> dict[str, pa.DataType]:
        """The types that the frame declares."""
        return {field.name: field.type for field in self.schema}

    def read(
        self, partition: str, position: Position, *, columns: Columns = None, until: Position = None
    ) -> Batch:
        """One row group or slice."""
        batch = self.files.read(partition, position, columns=columns, until=until)
        for found in batch.table.schema:
            if not _alike(found.type, self.schema.field(found.name).type):
                raise InvalidInput(
                    f"column {found.name!r} of {partition} is {found.type} now; it was "
                    f"{self.schema.field(found.name).type} when the job began"
                )
        return batch

    def close(self) -> None:
        """Close the files."""
        self.files.close()


def frame_files(frame: DataFrame) -> list[str] | None:
    """The paths of a frame's files; None if ours may find other rows in them than Spark."""
    leaf = _leaf(frame)
    if leaf is None or not _is_plain(frame, leaf):
        return None
    paths = list(leaf.relation().location().inputFiles())
    if len(set(paths)) < len(paths):
        return None  # Spark reads a file as often as it is named
    return _read_alike(paths, arrow_schema(frame))


def batch_files(frame: DataFrame) -> list[str] | None:
    """The same for a batch of a stream that `projects_files`."""
    leaf = _leaf(frame)
    paths = [] if leaf is None or _name(leaf) != "LogicalRDD" else _scanned(leaf.rdd())
    return _read_alike(paths, arrow_schema(frame))


def projects_files(frame: DataFrame) -> bool:
    """Does a stream only project files, so that its batches are files, too?"""
    return _without_stream(frame) is not None


def files_now(frame: DataFrame) -> list[str] | None:
    """The files that a stream has by now, if ours may read them in place of Spark."""
    files = _without_stream(frame)
    return None if files is None else frame_files(files)


def _without_stream(frame: DataFrame) -> DataFrame | None:
    """The files of a stream as a frame that has an end."""
    leaf = _leaf(frame)
    if leaf is None or _name(leaf) != "StreamingRelation":
        return None
    origin = leaf.dataSource()
    options = {pair._1(): pair._2() for pair in _each(origin.options())}
    if origin.className() not in ("parquet", _FORMAT) or not _are_known(options):
        return None
    declared = type(frame.schema).fromJson(json.loads(leaf.schema().json()))
    reader = frame.sparkSession.read.format("parquet").schema(declared).options(**options)
    names = ["`{}`".format(name.replace("`", "``")) for name in frame.columns]
    files = reader.load().select(*names)
    found = _leaf(files)
    return files if found is not None and _is_plain(files, found) else None


def _leaf(frame: DataFrame) -> Any:
    """What a frame projects: its columns as they are, and nothing else; None if it does more."""
    plan = frame._jdf.queryExecution().analyzed()
    while _name(plan) in _PASSED:
        if _name(plan) == "Project":
            kinds = {_name(column) for column in _each(plan.projectList())}
            if kinds != {"AttributeReference"}:
                return None
        plan = next(_each(plan.children()))
    return plan if next(_each(plan.children()), None) is None else None


def _is_plain(frame: DataFrame, leaf: Any) -> bool:
    """Is it Parquet, without columns that paths tell, read as it is by default?"""
    if _name(leaf) != "LogicalRelation" or _name(leaf.relation()) != "HadoopFsRelation":
        return False
    relation, settings = leaf.relation(), frame.sparkSession.conf
    return (
        relation.fileFormat().getClass().getName() == _FORMAT
        and not relation.partitionSchema().size()
        and all(settings.get(name, "false") == "false" for name in _SETTINGS)
        and all(settings.get(name, "CORRECTED") == "CORRECTED" for name in _REBASES)
        and _are_known({pair._1(): pair._2() for pair in _each(relation.options())})
    )


def _are_known(options: Mapping[str, str]) -> bool:
    return all(name.lower() in _OPTIONS for name in options)


def _scanned(rdd: Any) -> list[str]:
    """The files of a batch, which has come through nothing but a projection."""
    while rdd.getClass().getName() != _SCAN:
        parents = list(_each(rdd.dependencies()))
        if len(parents) != 1:
            return []
        rdd = parents[0].rdd()
    parts = (file for part in _each(rdd.filePartitions()) for file in part.files())
    return list(dict.fromkeys(file.toPath().toUri().toString() for file in parts))


def _read_alike(uris: list[str], declared: pa.Schema) -> list[str] | None:
    """Files whose columns are what a frame declares, to the letter; None for any others."""
    paths = [_local(uri) for uri in uris]
    if not 0 < len(paths) <= _MOST or None in paths:
        return None
    if len({name.lower() for name in declared.names}) < len(declared):
        return None
    for path in paths:
        try:
            file = pq.ParquetFile(path)
        except (OSError, pa.ArrowException):
            return None  # what becomes of it is Spark's to say
        with file:
            found, told = file.schema_arrow, file.metadata.metadata or {}
        if any(name in told for name in _REBASED) or told.get(_WRITER, b"").startswith(b"2"):
            return None
        names = [name.lower() for name in found.names]
        for field in declared:
            if field.name not in found.names or names.count(field.name.lower()) > 1:
                return None
            if not _alike(found.field(field.name).type, field.type):
                return None
    return [path for path in paths if path is not None]


def _local(uri: str) -> str | None:
    """The path of a file of this file system."""
    parts = urlsplit(uri)
    return unquote(parts.path) if parts.scheme == "file" and not parts.netloc else None


def _alike(found: pa.DataType, declared: pa.DataType) -> bool:
    """Is a column of a file what a frame says? Text may be stored by dictionary."""
    if pa.types.is_dictionary(found):
        found = found.value_type
    return found.equals(declared) or (is_text(found) and is_text(declared))


def _name(thing: Any) -> str:
    name: str = thing.getClass().getSimpleName()
    return name


def _each(sequence: Any) -> Iterator[Any]:
    """The items of a Scala collection."""
    items = sequence.iterator()
    while items.hasNext():
        yield items.next()
