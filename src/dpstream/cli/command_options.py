"""Options that several commands share, and a mechanism that is built from flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

from typer import Option

from dpstream.cli.output import note
from dpstream.connectors.server_base import is_object_uri
from dpstream.errors import InvalidParameter
from dpstream.mechanisms import find
from dpstream.mechanisms.base import Mechanism
from dpstream.operator_log import FORMAT, LEVEL, LEVELS
from dpstream.privacy.ledger.store import LedgerPlace, as_ledger_place

BudgetOption = partial(Option, rich_help_panel="Budget and repetition")

SecretFile = Annotated[
    Path | None,
    BudgetOption(envvar="DPSTREAM_SECRET_FILE", help="Secret file, created on first use."),
]
SharedLedger = Annotated[
    LedgerPlace | None,
    BudgetOption(
        envvar="DPSTREAM_LEDGER",
        help="Ledger that others share: a file, postgresql://user@host/database or s3://....",
        parser=as_ledger_place,
        metavar="LEDGER",
    ),
]
Payer = Annotated[str, BudgetOption(help="Whose book in the ledger pays.")]
Asker = Annotated[
    str,
    BudgetOption(
        "--who", help="The analyst who asks, where the book gives shares; a note, not a lock."
    ),
]
TakeOver = Annotated[
    bool,
    BudgetOption(
        "--take-over",
        help="The state of an earlier run is lost, or the query has changed: end that run for "
        "good, and begin with the next period of its units, at no further cost.",
    ),
]
TokenFile = Annotated[
    Path | None,
    Option(
        rich_help_panel="Operator side",
        help="The operator's token, made on first use (default: in the state directory; "
        "DPSTREAM_OPERATOR_TOKEN goes before it).",
    ),
]
LogFormat = Annotated[
    str | None,
    Option(
        envvar=FORMAT,
        metavar="text|json",
        rich_help_panel="Log",
        help="Log lines instead of notes on standard error: text, or a JSON object a line.",
    ),
]
LogLevel = Annotated[
    str | None,
    Option(
        envvar=LEVEL,
        metavar="|".join(LEVELS),
        rich_help_panel="Log",
        help="The least that is logged (info); exact numbers of rows are at debug alone.",
    ),
]
Collector = Annotated[
    str | None,
    Option(
        "--otel",
        envvar="DPSTREAM_OTEL",
        metavar="URL",
        rich_help_panel="Log",
        help="Send metrics and spans to an OpenTelemetry collector (OTLP over HTTP), as in "
        "http://127.0.0.1:4318; for the operator alone, not private.",
    ),
]
PublicTables = Annotated[
    list[str] | None,
    Option(
        "--public",
        metavar="TABLE=PATH",
        help="A table that the query joins or takes its keys from, and that everybody may know: "
        "a file, names.duckdb, delta:FOLDER, postgres://...; may be repeated.",
    ),
]
RefreshTables = Annotated[
    list[str] | None,
    Option(
        "--refresh",
        metavar="TABLE=INTERVAL",
        help="A live run reads this public table anew at intervals: pages='1 day'.",
    ),
]
RegistryTables = Annotated[
    list[str] | None,
    Option(
        "--registry",
        metavar="TABLE=PATH",
        help="A table whose rows belong to the privacy units, which the query joins on the unit.",
    ),
]
Anyway = Annotated[
    bool,
    BudgetOption("--anyway", help="Begin, and pay, though none of the first rows can be used."),
]
FLAGS = ("epsilon", "window", "delay", "lo", "hi", "quantum")


def table_paths(option: str, given: Sequence[str] | None) -> dict[str, str]:
    """`--public pages=pages.csv` as a dict; no table twice."""
    paths: dict[str, str] = {}
    for each in given or ():
        name, equals, path = each.partition("=")
        if not equals or not name or not path:
            raise InvalidParameter(f"{option} needs table=path; got {each!r}")
        if name in paths:
            raise InvalidParameter(f"{option} names the table {name!r} twice")
        paths[name] = path
    return paths


def tell_storage(what: str, state: Path | None, ledger: LedgerPlace | None) -> None:
    """Say what is lost with this process: a budget that nobody shares, or the way to repeat it."""
    if ledger is None:
        where = f"kept in {state / 'ledger'} and" if state else "forgotten afterwards,"
        note(f"the budget of this {what} is {where} not shared with others; use --ledger")
    elif state is None:
        note(
            f"without --state this {what} cannot be repeated: if its output is lost, its budget is "
            "spent all the same"
        )


def build_mechanism(
    name: str, flags: Mapping[str, str | None], settings: Sequence[str]
) -> Mechanism:
    """The mechanism `name` with the given flags and `name=value` settings."""
    cls = find(name)
    given = {key: text for key, text in flags.items() if text is not None}
    given |= read_settings(settings, given)
    fields = {field["name"]: field for field in describe_parameters(cls)}
    for key in given:
        if key not in fields:
            raise InvalidParameter(f"{name} has no parameter {key!r}; {_listing(name, fields)}")
    missing = [key for key, field in fields.items() if field["required"] and key not in given]
    if missing:
        wanted = " and ".join(_flag(key) for key in missing)
        raise InvalidParameter(f"{name} needs {wanted}; {_listing(name, fields)}")
    hints = get_type_hints(cls)
    values = {key: text if hints[key] is str else literal(text) for key, text in given.items()}
    return cast("Any", cls)(**values)  # type: ignore[no-any-return]


def read_settings(
    settings: Sequence[str], taken: Collection[str] = (), *, word: str = "name", flag: str = "--set"
) -> dict[str, str]:
    """`--set name=value` as a dict; no name twice, and none that is `taken`."""
    given: dict[str, str] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name:
            raise InvalidParameter(f"{flag} needs {word}=value; got {setting!r}")
        if name in given or name in taken:
            raise InvalidParameter(f"{name} is given twice")
        given[name] = text
    return given


def describe_parameters(cls: type[Mechanism]) -> list[dict[str, Any]]:
    """The keyword fields of a mechanism: name, required, default."""
    parameters = []
    for field in dataclasses.fields(cast("Any", cls)):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        required = default is dataclasses.MISSING
        if required:
            default = None
        elif not isinstance(default, bool | int | float | str | None):
            default = str(default)
        if field.init:
            parameters.append({"name": field.name, "required": required, "default": default})
    return parameters


def _listing(name: str, fields: Mapping[str, dict[str, Any]]) -> str:
    shown = (
        f"{_flag(key)} (required)" if field["required"] else f"{_flag(key)} ({field['default']})"
        for key, field in fields.items()
    )
    return f"the parameters of {name} are: {', '.join(shown)}"


def _flag(key: str) -> str:
    return f"--{key}" if key in FLAGS else f"--set {key}=..."


def literal(text: str) -> Any:
    """A number, a truth value, several of them with commas between, or the text itself.

    >>> literal("12"), literal("0.5"), literal("1/3"), literal("true"), literal("1,2")
    (12, 0.5, '1/3', True, (1, 2))
    """
    if "," in text:
        return tuple(literal(part) for part in text.split(",") if part)
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


def state_place(text: str) -> Path | str:
    """A directory, or a name in a bucket.

    >>> state_place("s3://bucket/states/pages")
    's3://bucket/states/pages'
    """
    return text if is_object_uri(text) else Path(text)
