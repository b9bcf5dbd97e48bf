"""The command tree; a command is imported when it runs, so that `--help` needs no Numba."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import Annotated, Any

import typer
from typer import Abort
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

import dpstream
from dpstream.cli.output import (
    INTERRUPTED,
    UNREAD,
    UsageError,
    code_of,
    end_log,
    epilog,
    logs_as_notes,
    note,
    report_error,
    report_unexpected,
    set_json,
)
from dpstream.errors import DpstreamError, NewBook, UnexpectedResult

COMMANDS = {
    "init": "Write a commented pipeline.toml and made-up data for it: a file, or a live feed.",
    "run": "Run a pipeline's queries; started again, they go on where they stopped.",
    "apply": "Show what a changed pipeline file means and costs, and carry it out.",
    "serve": "Run a pipeline and serve its releases: a page, a feed, and a side for the operator.",
    "sql": "Publish a query's releases under differential privacy.",
    "explain": "Explain a query: plan, sensitivity, noise, keys, budget, memory, "
    "what it leaves open.",
    "check": "Look at some rows and the book before a query costs anything: operator only.",
    "bounds": "Propose bounds and clamps for a query; what was paid once answers later questions.",
    "release": "Publish a series under differential privacy, one row a step.",
    "compare": "Rank mechanisms on data that are public or already released.",
    "mechanisms": "List the mechanisms with their guarantee, protected unit and delay.",
    "sources": "List sources and sinks, what is installed, and which extra to install.",
    "ledger": "Show what was spent, on what, when, and what is left.",
    "state": "Look after state directories.",
    "demo": "Take a tour: a live private query that survives a kill, a series, and the ledger.",
    "audit": "Attack what dpstream ships, and show that the attacks catch what is broken.",
    "bench": "Measure dpstream, against its peers where they are installed.",
}
"""Name -> what it does, the first line of its docstring. Each is in `NAME_command.py`."""


class Commands(TyperGroup):
    """Knows every command by name and by one line; `load` imports the real one."""

    def __init__(self, **settings: Any) -> None:
        outlines = {name: TyperCommand(name=name, help=line) for name, line in COMMANDS.items()}
        super().__init__(**settings | {"commands": outlines})
        _plain_flags(self)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is about to run, or to complete its options, in full."""
        name, outline, rest = super().resolve_command(ctx, args)
        return name, outline and self.load(str(name)), rest

    def load(self, name: str) -> Any:
        """Import the command `name`: an `app` of several, or the function of that name."""
        module = import_module(f"dpstream.cli.{name}_command")
        tree = getattr(module, "app", None)
        if tree is None:
            tree = typer.Typer()
            tree.command(name)(getattr(module, name))
        tree._add_completion = False  # the whole tree has it once
        return _plain_flags(get_command(tree))


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


def run_command(given: Sequence[str]) -> int:
    """Run one command; the exit code that stands for how it ended."""
    set_json("--json" in given)
    with warnings.catch_warnings(), logs_as_notes(), ExitStack() as stack:
        stack.callback(end_log)
        warnings.simplefilter("always", NewBook)
        warnings.filterwarnings("ignore", "the budget of this", NewBook)  # a note says it
        said = (  # and these
            ".*(operator only|takes over from run|has no room for|the first trigger of|"
            "without (a )?state|protects nobody|the promise fails)"
        )
        warnings.filterwarnings("ignore", said, UnexpectedResult)
        warnings.showwarning = lambda message, *_, **__: note(str(message), level=logging.WARNING)
        try:
            code: Any = app([*given], prog_name="dpstream", standalone_mode=False)
        except (DpstreamError, OSError, UsageError) as problem:
            report_error(problem)
            code = code_of(problem)
        except SystemExit as leaving:  # Typer's way to leave when standard output is a closed pipe
            if not isinstance(leaving.__context__, BrokenPipeError):
                raise
            code = UNREAD
        except (KeyboardInterrupt, Abort):
            note(
                "interrupted; what was charged stays charged: with --state, the same command "
                "again goes on where this one stopped"
            )
            code = INTERRUPTED
        except Exception as problem:
            if not report_unexpected(problem):
                raise
            code = 1
    return code if isinstance(code, int) else 0
