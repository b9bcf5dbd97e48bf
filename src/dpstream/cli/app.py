"""The command tree."""

from __future__ import annotations

from typing import Annotated, ClassVar

import typer

import dpstream
from dpstream.cli.exits import epilog
from dpstream.cli.lazy import LazyGroup


class Commands(LazyGroup):
    """Every command; its line here is the first of its docstring."""

    homes: ClassVar = {
        "init": (
            "dpstream.cli.init:init",
            "Write a commented pipeline.toml and made-up data for it: a file, or a live feed.",
        ),
        "run": (
            "dpstream.cli.run:run",
            "Run a pipeline's queries; started again, they go on where they stopped.",
        ),
        "serve": (
            "dpstream.cli.serve:serve",
            "Run a pipeline and serve its releases: a page, a feed, and a side for the operator.",
        ),
        "sql": (
            "dpstream.cli.sql:sql",
            "Publish a query's releases under differential privacy.",
        ),
        "explain": (
            "dpstream.cli.explain:explain",
            "Explain a query: plan, sensitivity, noise, keys, budget, memory, what it leaves open.",
        ),
        "bounds": (
            "dpstream.cli.bounds:bounds",
            "Propose bounds: groups and rows of a unit, clamps, and the pre-threshold.",
        ),
        "release": (
            "dpstream.cli.release:release",
            "Publish a series under differential privacy, one row a step.",
        ),
        "compare": (
            "dpstream.cli.compare:compare",
            "Rank mechanisms on data that are public or already released.",
        ),
        "mechanisms": (
            "dpstream.cli.mechanisms:mechanisms",
            "List the mechanisms with their guarantee, protected unit and delay.",
        ),
        "sources": (
            "dpstream.cli.sources:sources",
            "List sources and sinks, what is installed, and which extra to install.",
        ),
        "ledger": (
            "dpstream.cli.ledger:app",
            "Show what was spent, on what, when, and what is left.",
        ),
        "state": (
            "dpstream.cli.state:app",
            "Look after state directories.",
        ),
        "demo": (
            "dpstream.cli.demo:demo",
            "Take a tour: a live private query that survives a kill, a series, and the ledger.",
        ),
        "audit": (
            "dpstream.cli.audit:audit",
            "Attack what dpstream ships, and show that the attacks catch what is broken.",
        ),
        "bench": (
            "dpstream.cli.bench:bench",
            "Measure dpstream, against its peers where they are installed.",
        ),
    }


app = typer.Typer(
    name="dpstream",
    cls=Commands,
    help="Publish statistics from live streams under differential privacy.",
    epilog=epilog(),
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def start(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Publish statistics from live streams under differential privacy."""
    if version:
        print(f"dpstream {dpstream.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
