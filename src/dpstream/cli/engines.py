"""Where a pipeline's queries run: in this process, or on Spark."""

from __future__ import annotations

from dataclasses import replace

from dpstream.engines.query_run import Engine
from dpstream.errors import InvalidParameter
from dpstream.pipeline import ENGINES, Pipeline


def with_engine(pipeline: Pipeline, name: str | None) -> Pipeline:
    """The pipeline on the engine that the command line names, if it names one."""
    if name is None or name == pipeline.engine["name"]:
        return pipeline
    if name not in ENGINES:
        raise InvalidParameter(f"--engine must be one of {', '.join(ENGINES)}; got {name!r}")
    return replace(pipeline, engine={"name": name})


def open_engine(pipeline: Pipeline) -> Engine | None:
    """The engine; None is this process.

    Under `spark-submit` the session is the one that was submitted, whatever the file says.
    """
    told = pipeline.engine
    if told["name"] != "spark":
        return None
    from dpstream.engines.spark import SparkEngine, local_session

    session = local_session(told.get("master"))
    return SparkEngine(
        session, buckets=told.get("buckets", 0), state_location=told.get("state_location")
    )
