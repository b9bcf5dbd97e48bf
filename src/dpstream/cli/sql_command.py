"""`dpstream sql`: one query, published at once or for as long as it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
import typer
from typer import Argument, Option

from dpstream.cli.command_options import (
    Anyway,
    Asker,
    BudgetOption,
    LogFormat,
    LogLevel,
    Payer,
    PublicTables,
    RefreshTables,
    RegistryTables,
    SecretFile,
    SharedLedger,
    TakeOver,
    literal,
    read_settings,
    state_place,
    table_paths,
    tell_storage,
)
from dpstream.cli.output import INTERRUPTED, AsJson, note, print_json, use_log
from dpstream.cli.print_releases import ReleasePrinter, about
from dpstream.cli.watch import (
    Books,
    Stopper,
    charged_runs,
    is_unfinished,
    progress,
    tell_beginnings,
    tell_charges,
    tell_operator,
)
from dpstream.connectors.files.sink import DirectorySink
from dpstream.connectors.storage import safe_name
from dpstream.engines.embedded.process_memory import keep_freed_memory
from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.state.secret import secret_path
from dpstream.session import Refreshed, Run, run, with_tables
from dpstream.session.budget import AnyQuery
from dpstream.session.start import UnionAll, open_state
from dpstream.session.start_pipeline import refuse_lost_secret
from dpstream.session.union_run import UnionRun
from dpstream.sql_compiler.compile_sql import Compiled, compile_all, compile_sql, remarks
from dpstream.sql_compiler.parameters import read_param

Text = Annotated[
    str, Argument(metavar="SQL", help="The query, a .sql file, or - for standard input.")
]
Settings = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="OPTION=VALUE",
        help="An option of the privacy clause, before that of the text; may be repeated.",
    ),
]


Params = Annotated[
    list[str] | None,
    Option(
        "--param",
        metavar="NAME=VALUE",
        help="A value of @NAME or :NAME in the SQL (1=VALUE for the first ?); may be repeated.",
    ),
]
Functions = Annotated[
    list[str] | None,
    Option(
        "--function",
        metavar="NAME=MODULE:FUNCTION",
        help="A Python function of Arrow columns that the SQL calls: trusted code, of one row "
        "alone; may be repeated.",
    ),
]


def compile_text(
    text: str,
    name: str | None,
    settings: Sequence[str],
    params: Sequence[str] | None = None,
    functions: Sequence[str] | None = None,
    *,
    unbounded: bool = False,
) -> Compiled:
    """SQL from the command line, a file or standard input, with its options."""
    text, name, given = _read_text(text, name, settings, params, functions)
    return compile_sql(text, name, unbounded=unbounded, **given)


def _read_text(
    text: str,
    name: str | None,
    settings: Sequence[str],
    params: Sequence[str] | None,
    functions: Sequence[str] | None,
) -> tuple[str, str | None, dict[str, Any]]:
    """The SQL, its name, and what is given beside it."""
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
    options = {key: literal(value) for key, value in read_settings(settings, word="option").items()}
    groups = options.get("public_groups", ())
    if not isinstance(groups, tuple):
        options["public_groups"] = (groups,)
    values = read_settings(params or [], flag="--param")
    named = read_settings(functions or [], flag="--function")
    beside = {
        "params": {each: read_param(value) for each, value in values.items()},
        "functions": named,
        "folder": Path.cwd(),
    }
    return text, name, beside | options


def _is_file(path: Path) -> bool:
    try:
        return path.suffix == ".sql" or path.is_file()
    except OSError:  # longer than any path: it is SQL
        return False


class PrintedReleases:
    """A sink beside the terminal; its folder is made by the first release, in a state that is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sink: DirectorySink | None = None

    def write(self, name: str, window: int, trigger: int, table: pa.Table) -> None:
        """Keep a release, unless it is there."""
        if self._sink is None:
            self._sink = DirectorySink(self._folder)
        self._sink.write(name, window, trigger, table)

    def close(self) -> None:
        """Nothing is held open."""

    def releases(self, query: str) -> list[pa.Table]:
        """What is there, in the order in which it was published."""
        paths = self._folder.glob(f"{safe_name(query)}-w*.parquet")
        return sorted(map(pq.read_table, paths), key=_trigger_and_window)


def _trigger_and_window(release: pa.Table) -> tuple[str, int]:
    facts = about(release)
    return facts["trigger_time"] or "", facts["window"]


def public_tables(public: Sequence[str] | None, refresh: Sequence[str] | None) -> dict[str, Any]:
    """The tables of `--public`; those that `--refresh` names are read anew."""
    tables: dict[str, Any] = {**table_paths("--public", public)}
    for name, every in table_paths("--refresh", refresh).items():
        if name not in tables:
            raise InvalidParameter(
                f"--refresh names {name!r}, and there is no --public {name}=PATH; add it"
            )
        tables[name] = Refreshed(tables[name], every=every)
    return tables


def sql(
    text: Text,
    sources: Annotated[
        list[str],
        Option(
            "--source",
            metavar="TABLE=PATH",
            help="What the table in FROM is: files, a glob, a directory, - for standard input, or "
            "a server such as kafka://HOST:PORT/TOPIC (see `dpstream sources`).",
        ),
    ],
    sink: Annotated[
        list[str] | None,
        Option(help="A directory, database or server for the releases; may be repeated."),
    ] = None,
    output: Annotated[
        str,
        Option(help="append every release to the sink, or upsert: the newest of each window."),
    ] = "append",
    public: PublicTables = None,
    refresh: RefreshTables = None,
    registry: RegistryTables = None,
    settings: Settings = None,
    params: Params = None,
    functions: Functions = None,
    name: Annotated[str | None, Option(help="What its releases are called.")] = None,
    live: Annotated[
        bool, Option("--live", help="Read a directory that grows, by the clock.")
    ] = False,
    on_damage: Annotated[
        str, Option(help="A file that cannot be read: quarantine it and go on, or stop.")
    ] = "quarantine",
    on_done: Annotated[
        str,
        Option(
            help="With --live and --state: move (to done/) or delete files that no recovery needs."
        ),
    ] = "keep",
    everything: Annotated[
        bool, Option("--all", help="Print every release in full, not only a window's last.")
    ] = False,
    state: Annotated[
        Any,
        BudgetOption(
            help="Directory that lets this query go on after a stop; or s3://bucket/states/name.",
            parser=state_place,
            metavar="STATE",
        ),
    ] = None,
    secret: SecretFile = None,
    ledger: SharedLedger = None,
    dataset: Payer = "stream",
    who: Asker = "",
    take_over: TakeOver = False,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
    anyway: Anyway = False,
    as_json: AsJson = False,
) -> None:
    """Publish a query's releases under differential privacy."""
    use_log(log_format, log_level)
    asked, called, beside = _read_text(text, name, settings or [], params, functions)
    several = compile_all(asked, called, **beside)
    given: Any = None
    if several[0].query.sources or len({each.table for each in several}) > 1:
        given = table_paths("--source", sources)
    else:
        given = source_paths(several[0], sources)
    tables = {
        "public": public_tables(public, refresh),
        "registry": table_paths("--registry", registry),
    }
    state, ledger = open_state(state, secret=secret, ledger=ledger)
    several = [replace(one, query=with_tables(one.query, state=state, **tables)) for one in several]
    query, first = UnionAll.of(several), several[0].query
    if text == "-" and "-" in (given.values() if isinstance(given, dict) else given):
        raise InvalidParameter("standard input cannot be the query and its source at once")
    secret_file = secret if secret is not None or state is None else secret_path(state)
    if secret_file is not None and state is not None:
        refuse_lost_secret(secret_file, [state])
    existed = secret_file is None or secret_file.exists()
    kept = None
    if not sink and state is not None and first.schedule.steps is not None:  # it ends some day
        kept = PrintedReleases(state / "released")
    book: Books = ledger or (Ledger() if state is None else state / "ledger")
    stopper = Stopper()
    keep_freed_memory()
    running = run(
        query,
        source=given[0] if isinstance(given, list) and len(given) == 1 else given,
        sink=sink or kept,
        output=output,
        state=state,
        live=live,
        on_damage=on_damage,
        on_done=on_done,
        secret=secret,
        ledger=book if isinstance(book, Ledger) else ledger,
        dataset=dataset,
        analyst=who,
        clock=stopper,
        anyway=anyway,
        take_over=take_over,
    )
    before = charged_runs(book, dataset)
    runs = [*running.parts.runs.values()] if isinstance(running, UnionRun) else [running]
    tell_beginnings(runs)
    tell_storage("query", state, ledger)
    for words in [words for one in several for words in remarks(one)]:
        note(words)
    shown = None if sink else first
    fills = first.every is not None or first.triggers is not None
    if running.live and fills and not (sink or everything or as_json):
        note("a window's last release is shown in full, those before it in a line; --all shows all")
    count = _publish(running, stopper, shown, everything=everything)
    if not existed:
        note(f"created the secret {secret_file}; back it up: without it this query cannot go on")
    new = tell_charges([one.query for one in several], before, book, dataset)
    letters: dict[str, Path | None] = {}
    for part in runs:
        folder = state if len(runs) == 1 or state is None else state / safe_name(part.query.name)
        letters[part.query.name] = folder and folder / "dead-letters"
    tell_operator(runs, letters)
    interrupted = bool(stopper.signals) and is_unfinished(runs)
    if sink and as_json:
        facts = {
            "query": query.name,
            "releases": count,
            "sink": sink,
            "dataset": dataset,
            "new_charges": new,
            "finished": not interrupted,
            "operator_only": running.operator.counts(),
        }
        print_json(facts)
    elif sink:
        note(f"published {count} releases to {', '.join(sink)}")
    if not count and not interrupted:
        shown_again = [_show_again(kept, one.query, sink, everything=everything) for one in several]
        if sink:
            note(f"this was published before; {', '.join(sink)} has it if that run wrote there")
        elif any(shown_again):
            note("this was published before; here it is again, the same numbers, at no cost")
        else:
            note("this was published before; the run that did has it, in its output or its sink")
    if interrupted:
        anew = "without --state it cannot go on: it would begin anew, and be charged anew"
        note(f"stopped; {'the same command again goes on from here' if state else anew}")
        raise typer.Exit(INTERRUPTED)


def source_paths(compiled: Compiled, sources: Sequence[str]) -> list[str]:
    """The paths that the query's table stands for."""
    paths = []
    for source in sources:
        table, equals, path = source.partition("=")
        if not equals or not table or not path:
            raise InvalidParameter(
                f"--source needs table=path; got {source!r}; write --source {compiled.table}=PATH"
            )
        if table != compiled.table:
            raise InvalidParameter(
                f"the query reads {compiled.table!r}, but --source names {table!r}; write "
                f"--source {compiled.table}={path}"
            )
        paths.append(path)
    return paths


def _publish(running: Run, stopper: Stopper, query: AnyQuery | None, *, everything: bool) -> int:
    """Run it to its end, or until it is stopped; how many releases. A `query`'s are shown."""
    count = 0
    zone, together = "UTC" if query is None else query.time_zone, not running.live
    printer = ReleasePrinter(zone=zone, everything=everything, together=together)
    with running, stopper.stop_on_signals(), progress([running]) as draw, printer:
        for release in running:
            count += 1
            if query is not None:
                printer.show(release)
            draw()
            if stopper.signals:
                running.stop()
    return count


def _show_again(
    kept: PrintedReleases | None,
    query: AnyQuery,
    sink: Sequence[str] | None,
    *,
    everything: bool,
) -> bool:
    """Print what an earlier run has published, if it was kept: that costs nothing."""
    releases = [] if kept is None or sink else kept.releases(query.name)
    with ReleasePrinter(zone=query.time_zone, everything=everything) as printer:
        for release in releases:
            printer.show(release)
    return bool(releases)
