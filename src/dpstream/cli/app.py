"""The command tree; a command is imported when it runs, so that `--help` needs no Numba."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

import dpstream
from dpstream.cli.output import epilog


class LazyGroup(TyperGroup):
    """Knows its commands by name and by one line; `load` imports the real one."""

    homes: ClassVar[Mapping[str, tuple[str, str]]]
    """Name -> where the command is ("module:function" or "module:app"), and what it does."""

    def __init__(self, **settings: Any) -> None:
        lines = {name: line for name, (_, line) in self.homes.items()}
        outlines = {name: TyperCommand(name=name, help=line) for name, line in lines.items()}
        super().__init__(**settings | {"commands": outlines})
        _plain_flags(self)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is about to run, or to complete its options, in full."""
        name, outline, rest = super().resolve_command(ctx, args)
        return name, outline and self.load(str(name)), rest

    def load(self, name: str) -> Any:
        """Import the command `name`."""
        module, _, member = self.homes[name][0].partition(":")
        found = getattr(import_module(module), member)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False)
            alone.command(name)(found)
            found = alone
        found._add_completion = False  # the whole tree has it once
        return _plain_flags(get_command(found))


def _plain_flags(command: Any) -> Any:
    """Help shows `--json`, not `--json <bool>`: a flag takes no value."""
    for each in (command, *getattr(command, "commands", {}).values()):
        for option in each.params:
            if getattr(option, "is_flag", False):
                option.metavar = ""
        each.get_help_option = partial(_plain_help, each.get_help_option)
    return command


def _plain_help(made: Callable[[Any], Any], context: Any) -> Any:
    option = made(context)
    if option is not None:
        option.metavar = ""
    return option


class Commands(LazyGroup):
    """Every command; its line here is the first of its docstring."""

    homes: ClassVar = {
        "init": (
            "dpstream.cli.init_command:init",
            "Write a commented pipeline.toml and made-up data for it: a file, or a live feed.",
        ),
        "run": (
            "dpstream.cli.run_command:run",
            "Run a pipeline's queries; started again, they go on where they stopped.",
        ),
        "serve": (
            "dpstream.cli.serve_command:serve",
            "Run a pipeline and serve its releases: a page, a feed, and a side for the operator.",
        ),
        "sql": (
            "dpstream.cli.sql_commands:sql",
            "Publish a query's releases under differential privacy.",
        ),
        "explain": (
            "dpstream.cli.sql_commands:explain",
            "Explain a query: plan, sensitivity, noise, keys, budget, memory, what it leaves open.",
        ),
        "bounds": (
            "dpstream.cli.bounds_command:bounds",
            "Propose bounds: groups and rows of a unit, clamps, and the pre-threshold.",
        ),
        "release": (
            "dpstream.cli.release_command:release",
            "Publish a series under differential privacy, one row a step.",
        ),
        "compare": (
            "dpstream.cli.compare_command:compare",
            "Rank mechanisms on data that are public or already released.",
        ),
        "mechanisms": (
            "dpstream.cli.mechanisms_command:mechanisms",
            "List the mechanisms with their guarantee, protected unit and delay.",
        ),
        "sources": (
            "dpstream.cli.sources_command:sources",
            "List sources and sinks, what is installed, and which extra to install.",
        ),
        "ledger": (
            "dpstream.cli.ledger_command:app",
            "Show what was spent, on what, when, and what is left.",
        ),
        "state": (
            "dpstream.cli.state_command:app",
            "Look after state directories.",
        ),
        "demo": (
            "dpstream.cli.demo_command:demo",
            "Take a tour: a live private query that survives a kill, a series, and the ledger.",
        ),
        "audit": (
            "dpstream.cli.audit_command:audit",
            "Attack what dpstream ships, and show that the attacks catch what is broken.",
        ),
        "bench": (
            "dpstream.cli.bench_command:bench",
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
