"""SQL as it is given to a command: text, a file or standard input, and options beside it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dpstream.cli.parameters import literal
from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.sql.plan import Compiled, compile_sql

Text = Annotated[
    str, typer.Argument(metavar="SQL", help="The query, a .sql file, or - for standard input.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="OPTION=VALUE",
        help="An option of the privacy clause, before that of the text; may be repeated.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def compiled_from(text: str, name: str | None, settings: Sequence[str]) -> Compiled:
    """SQL from the command line, a file or standard input, with its options."""
    path = Path(text)
    if text == "-":
        text = sys.stdin.read()
    elif path.suffix == ".toml":
        raise InvalidInput(f"{path} is no SQL; a pipeline is run by: dpstream run {path}")
    elif _is_file(path):
        name = name or path.stem
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise InvalidInput(f"{path} is not UTF-8 text") from None
    return compile_sql(text, name, **_options(settings))


def _is_file(path: Path) -> bool:
    try:
        return path.suffix == ".sql" or path.is_file()
    except OSError:  # longer than any path: it is SQL
        return False


def _options(settings: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for setting in settings:
        option, equals, value = setting.partition("=")
        if not equals or not option:
            raise InvalidParameter(f"--set needs option=value; got {setting!r}")
        if option in found:
            raise InvalidParameter(f"{option} is given twice")
        found[option] = literal(value)
        if option == "public_groups" and not isinstance(found[option], tuple):
            found[option] = (found[option],)
    return found
