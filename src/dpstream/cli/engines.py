"""Where a pipeline's queries run: in this process, or on Spark."""

from __future__ import annotations

from dataclasses import replace

from dpstream.errors import InvalidParameter
from dpstream.pipeline import ENGINES, Pipeline


def with_engine(pipeline: Pipeline, name: str | None) -> Pipeline:
    """The pipeline on the engine that the command line names, if it names one."""
    if name is None or name == pipeline.engine["name"]:
        return pipeline
    if name not in ENGINES:
        raise InvalidParameter(f"--engine must be one of {', '.join(ENGINES)}; got {name!r}")
    return replace(pipeline, engine={"name": name})
