"""The `dpstream` command. Results go to stdout; notes, progress and errors to stderr."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import dpstream

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> None:
    """Run one command and leave with a documented exit code."""
    given = list(sys.argv[1:] if args is None else args)
    if given == ["--version"]:  # scripts ask: without what other commands load
        print(f"dpstream {dpstream.__version__}")
        sys.exit(0)
    sys.exit(import_module("dpstream.cli.app").run_command(given))
