"""The `dpstream` command. Results go to stdout; notes, progress and errors to stderr."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

from typer import Abort

from dpstream.cli.app import app
from dpstream.cli.output import (
    INTERRUPTED,
    UNREAD,
    UsageError,
    code_of,
    note,
    report_error,
    set_json,
    tell_log,
)
from dpstream.errors import DpstreamError, NewBook

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> None:
    """Run one command and leave with a documented exit code."""
    given = list(sys.argv[1:] if args is None else args)
    set_json("--json" in given)
    if "--json" not in given and sys.stderr.isatty():  # somebody waits
        tell_log("dpstream.compiled")
    tell_log("dpstream.sources")
    tell_log("dpstream.ledger")
    with warnings.catch_warnings():
        warnings.simplefilter("always", NewBook)
        warnings.filterwarnings("ignore", "the budget of this", NewBook)  # a note says it
        warnings.showwarning = lambda message, *_, **__: note(str(message))
        try:
            code = app(given, prog_name="dpstream", standalone_mode=False)
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
    sys.exit(code if isinstance(code, int) else 0)
