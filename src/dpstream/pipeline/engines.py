"""Where a pipeline's queries run: in this process, or on Spark."""

from __future__ import annotations

import os
from dataclasses import replace

from dpstream.connectors.pushed import PUSHED
from dpstream.errors import InvalidParameter
from dpstream.pipeline.load import ENGINES, Pipeline


def with_engine(pipeline: Pipeline, name: str | None) -> Pipeline:
    """The pipeline on the engine that the command line names, if it names one."""
    if name is None or name == pipeline.engine["name"]:
        return pipeline
    if name not in ENGINES:
        raise InvalidParameter(f"--engine must be one of {', '.join(ENGINES)}; got {name!r}")
    if name != "embedded" and pipeline.pushed:
        raise InvalidParameter(
            f"{pipeline.path}: rows that are posted ({PUSHED!r}) are read by the embedded engine; "
            f"{name} reads files; leave --engine out"
        )
    return replace(pipeline, engine={"name": name})


def check_engine(pipeline: Pipeline) -> None:
    """Refuse an engine that cannot start here, before anything is begun."""
    if pipeline.engine["name"] != "spark":
        return
    from dpstream.engines.spark.engine import require_java, require_pyspark

    require_pyspark()
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # else a JVM has started us
        require_java()
