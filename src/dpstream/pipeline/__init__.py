"""Pipeline files: sources, books, state, sinks and named queries, in TOML."""

from dpstream.pipeline.load import ENGINES, Pipeline, load_pipeline

__all__ = ["ENGINES", "Pipeline", "load_pipeline"]
