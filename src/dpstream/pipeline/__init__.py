"""Pipeline files: sources, books, state, sinks and named queries, in TOML."""

from dpstream.pipeline.load import Pipeline, load_pipeline

__all__ = ["Pipeline", "load_pipeline"]
