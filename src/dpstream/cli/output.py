"""What the commands write: results to stdout, notes and errors to stderr, and an exit code."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Annotated, Any

import typer
from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text
from typer import Option

from dpstream import errors
from dpstream.operator_log import LineFormatter, log_to_stderr

CODES = {
    0: "ok",
    1: "unexpected: please report it",
    2: "bad usage or input",
    3: "budget exceeded: nothing was published",
    4: "noise reuse, or a problem with state, ledger or secret: nothing was published",
    5: "an optional dependency is missing",
    6: "a server does not answer: with --state, the same command again goes on",
    7: "check has found problems: nothing was charged",
    130: "interrupted: with --state, the same command again goes on",
    141: "the reader of the output has gone away: with --state, the same command again goes on",
}
PROBLEMS = 7
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
_EVERY = 256  # steps between two updates of the progress bar
_FEW = 4096  # below it every one is drawn
_PIPE_WIDTH = 160
_WIDEST = 10_000
AsJson = Annotated[bool, Option("--json", help="Print JSON.")]
_as_json = False
_LOG = logging.getLogger("dpstream.cli")
_lines: LineFormatter | None = None  # of log lines; None: notes for people


def code_of(problem: BaseException) -> int:
    """The exit code that stands for an error."""
    return next((code for kind, code in _BY_ERROR if isinstance(problem, kind)), 1)


def epilog() -> str:
    """The codes as they stand below `dpstream --help`."""
    return "Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning in CODES.items()) + "."


def set_json(wanted: bool) -> None:
    """Remember whether a program reads along; then stderr carries JSON lines too."""
    global _as_json
    _as_json = wanted


def wants_json() -> bool:
    """Does a program read along?"""
    return _as_json


def logs_lines() -> bool:
    """Are log lines written, which tell of every release?"""
    return _lines is not None and _LOG.isEnabledFor(logging.INFO)


def counted(number: int, what: str) -> str:
    """A number of things.

    >>> counted(1, "step"), counted(1200, "file")
    ('1 step', '1,200 files')
    """
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def people() -> Console:
    """Where tables for people go; a pipe gets lines that do not wrap at 80 columns."""
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_WIDTH
    return console


def new_table(*headings: str, right: Collection[str] = (), title: str | None = None) -> Table:
    """A table with a frame and a title, or without both; the columns `right` are of figures."""
    frame = None if title is None else HEAVY_HEAD
    table = Table(box=frame, pad_edge=frame is not None, title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left")
    return table


def print_whole(console: Console, table: Table) -> None:
    """A table of figures is cut nowhere: a screen that is too narrow wraps its lines."""
    width = console.width
    whole = Measurement.get(console, console.options.update_width(_WIDEST), table).maximum
    console.width = max(width, whole)
    console.print(table)
    console.width = width


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2, allow_nan=False))


def note(message: str, *, level: int = logging.INFO) -> None:
    """Tell the operator something that is not a result; `level`: where the log is asked for."""
    message = errors.shown(message)
    if _lines is not None:
        _LOG.log(level, message)
    else:
        _to_stderr({"note": message}, "note: ", "yellow", message)


note_counts = partial(note, level=logging.DEBUG)
"""Tell the operator exact numbers of rows, which the log has at its lowest level only."""


def note_line(message: str) -> bytes:
    """A note as `note` writes it, for a handler of signals, which must not wait for a lock."""
    text = f"note: {message}"
    if _lines is not None:
        about = {"name": _LOG.name, "msg": message, "levelno": 30, "levelname": "WARNING"}
        text = _lines.format(logging.makeLogRecord(about))
    elif _as_json:
        text = json.dumps({"note": message})
    return f"{text}\n".encode()


class _Notes(logging.Handler):
    """Log records as notes."""

    def emit(self, record: logging.LogRecord) -> None:
        """One line."""
        note(record.getMessage())


@contextmanager
def logs_as_notes() -> Iterator[None]:
    """Warnings of every log of this process are notes, unless log lines are asked for."""
    log, compiled, handler = logging.getLogger(), logging.getLogger("dpstream.compiled"), _Notes()
    ledgers, before = logging.getLogger("dpstream.ledger"), compiled.level
    ledgers.setLevel(logging.INFO)  # whatever opens a book says so
    if not _as_json and sys.stderr.isatty():  # somebody waits
        compiled.setLevel(logging.INFO)
    log.addHandler(handler)
    handler.addFilter(lambda record: _lines is None)
    try:
        yield
    finally:
        log.removeHandler(handler)
        compiled.setLevel(before)
        ledgers.setLevel(logging.NOTSET)


_open = ExitStack()


def use_log(style: str | None, level: str | None) -> None:
    """Write log lines instead of notes until the command is over, if either is given."""
    global _lines
    _lines = _open.enter_context(log_to_stderr(style, level, export=True))


def end_log() -> None:
    """Back to notes."""
    global _lines
    _lines = None
    _open.close()


def report_error(problem: BaseException) -> None:
    """One line that says what went wrong."""
    message = _message(problem)
    about = {"error": type(problem).__name__, "message": message, "exit_code": code_of(problem)}
    if _lines is not None:
        facts = {name: about[name] for name in ("error", "exit_code")}
        _LOG.error(message, extra={"facts": facts})
    else:
        _to_stderr(about, "error: ", "bold red", message)


def report_unexpected(problem: BaseException) -> bool:
    """Log an error that nobody foresaw; False if there is no log, and Python is to show it."""
    if _lines is not None:
        _LOG.critical("unexpected, please report it", exc_info=problem)
    return _lines is not None


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A callback (done, total) that draws a bar, where somebody watches."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with terminal_progress(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task(label, total=None)

        def update(done: int, total: int) -> None:
            if done % _EVERY == 0 or done == total or total < _FEW:
                bar.update(task, completed=done, total=total)

        yield update


def terminal_progress(*columns: ProgressColumn) -> Progress:
    """Bars that are drawn only where somebody watches; what is printed goes above them."""
    console = Console(stderr=True)
    console.quiet = _as_json or _lines is not None or not console.is_terminal
    inside = sys.stdout.isatty()  # what goes elsewhere stays there
    return Progress(
        *columns, console=console, transient=True, redirect_stdout=inside, disable=console.quiet
    )


def _to_stderr(record: dict[str, Any], label: str, style: str, message: str) -> None:
    if _as_json:
        print(json.dumps(record), file=sys.stderr)
    else:
        text = Text.assemble((label, style), message)
        Console(stderr=True, highlight=False).print(text, soft_wrap=True)


def _message(problem: BaseException) -> str:
    if hasattr(problem, "format_message"):  # a usage error
        context = getattr(problem, "ctx", None)
        command = context.command_path if context else "dpstream"
        return f"{problem.format_message()} (see {command} --help)"
    if isinstance(problem, OSError) and problem.strerror:
        return f"{problem.strerror}: {problem.filename}" if problem.filename else problem.strerror
    return str(problem)
