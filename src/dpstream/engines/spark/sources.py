"""What a run on Spark may read: DataFrames, streaming or not, and the connectors' sources."""

from __future__ import annotations

from typing import Any

from dpstream.engines.inputs import check_columns
from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.records import FinitePartitions
from dpstream.stages.query import Query


def is_frame(source: Any) -> bool:
    """Is it a DataFrame of Spark?"""
    from pyspark.sql import DataFrame

    return isinstance(source, DataFrame)


def is_stream(source: Any) -> bool:
    """Is it a streaming DataFrame?"""
    return is_frame(source) and bool(source.isStreaming)


def is_bounded(source: Any) -> bool:
    """Has it an end, as a DataFrame that does not stream, or files?"""
    if is_frame(source):
        return not source.isStreaming
    return source is None or bool(source.bounded)


def check_declared(source: Any, query: Query) -> None:
    """Refuse a source that declares other columns before anything is paid for."""
    if not is_frame(source):
        check_columns(source, query)
        return
    for name in query.source_columns:
        if name not in source.columns:
            raise InvalidInput(
                f"the DataFrame has no column {name!r}; it has {', '.join(source.columns)}"
            )


def check_end(source: Any, *, live: bool) -> None:
    """A live run needs a source that goes on; any other one that ends, or a stream of Spark's."""
    grows = isinstance(source, FinitePartitions) and source.partitions_end
    if live and not (is_stream(source) or grows):
        bounded = ", which is bounded" if is_bounded(source) else ""
        raise InvalidParameter(
            "a live run on Spark reads a streaming DataFrame (session.readStream...) or a "
            f"directory that grows; got {type(source).__name__}{bounded}"
        )
    if not live and not is_stream(source) and not is_bounded(source):
        raise InvalidParameter(
            f"{type(source).__name__} has no end; use Spark's own reader for it "
            "(session.readStream...)"
        )
