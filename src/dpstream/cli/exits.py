"""Exit codes: what a script may rely on."""

from __future__ import annotations

import typer

from dpstream import errors

CODES = {
    0: "ok",
    1: "unexpected: please report it",
    2: "bad usage or input",
    3: "budget exceeded: nothing was published",
    4: "noise reuse, or a problem with state, ledger or secret: nothing was published",
    5: "an optional dependency is missing",
    6: "a server does not answer: with --state, the same command again goes on",
    130: "interrupted: with --state, the same command again goes on",
    141: "the reader of the output has gone away: with --state, the same command again goes on",
}
INTERRUPTED = 130
UNREAD = 141

# Typer exports only this leaf of its usage errors; its parent is what all of them share.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

_BY_ERROR: tuple[tuple[type[BaseException], int], ...] = (
    (errors.InvalidParameter, 2),
    (errors.InvalidInput, 2),
    (errors.BudgetExceeded, 3),
    (errors.LedgerError, 4),
    (errors.NoiseReuse, 4),
    (errors.NoiseExhausted, 4),
    (errors.StateError, 4),
    (errors.SecretError, 4),
    (errors.MissingDependency, 5),
    (errors.ServerUnreachable, 6),
    (UsageError, 2),
    (OSError, 2),
)


def code_of(problem: BaseException) -> int:
    """The exit code that stands for an error."""
    return next((code for kind, code in _BY_ERROR if isinstance(problem, kind)), 1)


def epilog() -> str:
    """The codes as they stand below `dpstream --help`."""
    return "Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning in CODES.items()) + "."
