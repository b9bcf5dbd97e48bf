"""`dpstream sql`: one query over files, published at once or for as long as it runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dpstream.cli.charges import Books, charged_runs, own_book, tell
from dpstream.cli.exits import INTERRUPTED
from dpstream.cli.kept import Kept
from dpstream.cli.options import BUDGET, Payer, SecretFile, SharedLedger
from dpstream.cli.output import note, print_json
from dpstream.cli.releases import show, zone_of
from dpstream.cli.statements import AsJson, Settings, Text, compiled_from
from dpstream.cli.watch import Stopper, progress, tell_operator, unfinished
from dpstream.engines.memory import keep_freed_memory
from dpstream.errors import InvalidParameter
from dpstream.pipeline.start import refuse_lost_secret
from dpstream.privacy.ledger import Ledger
from dpstream.privacy.state.secret import beside
from dpstream.session import Run, run
from dpstream.session.budget import AnyQuery
from dpstream.sql.plan import Compiled
from dpstream.sql.remarks import remarks


def sql(
    text: Text,
    sources: Annotated[
        list[str],
        typer.Option(
            "--source",
            metavar="TABLE=PATH",
            help="What the table in FROM is: files, a glob, a directory, - for standard input, or "
            "a server such as kafka://HOST:PORT/TOPIC (see `dpstream sources`).",
        ),
    ],
    sink: Annotated[
        list[str] | None,
        typer.Option(help="A directory, database or server for the releases; may be repeated."),
    ] = None,
    settings: Settings = None,
    name: Annotated[str | None, typer.Option(help="What its releases are called.")] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Read a directory that grows, by the clock.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Print every release in full, not only a window's last.")
    ] = False,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Directory that lets this query go on after a stop.", rich_help_panel=BUDGET
        ),
    ] = None,
    secret: SecretFile = None,
    ledger: SharedLedger = None,
    dataset: Payer = "stream",
    as_json: AsJson = False,
) -> None:
    """Publish a query's releases under differential privacy."""
    compiled = compiled_from(text, name, settings or [])
    query = compiled.query
    given = _source(compiled, sources)
    if text == "-" and "-" in given:
        raise InvalidParameter("standard input cannot be the query and its source at once")
    secret_file = secret if secret is not None or state is None else beside(state)
    if secret_file is not None and state is not None:
        refuse_lost_secret(secret_file, [state])
    existed = secret_file is None or secret_file.exists()
    kept = None if sink else Kept.beside(state, query)
    book: Books = ledger or (Ledger() if state is None else own_book(state))
    stopper = Stopper(as_json=as_json)
    keep_freed_memory()
    running = run(
        query,
        source=given[0] if len(given) == 1 else given,
        sink=sink or kept,
        checkpoint_location=state,
        live=live,
        secret=secret,
        ledger=book if isinstance(book, Ledger) else ledger,
        dataset=dataset,
        clock=stopper,
    )
    before = charged_runs(book, dataset)
    _tell_storage(state, ledger)
    for words in remarks(compiled):
        note(words)
    shown = None if sink else query
    count = _published(running, stopper, shown, as_json=as_json, everything=everything)
    if not existed:
        note(f"created the secret {secret_file}; back it up: without it this query cannot go on")
    new = tell([query], before, book, dataset)
    tell_operator([running], {query.name: None if state is None else state / "dead-letters"})
    interrupted = bool(stopper.signals) and unfinished([running])
    if sink and as_json:
        about = {
            "query": query.name,
            "releases": count,
            "sink": sink,
            "dataset": dataset,
            "new_charges": new,
            "finished": not interrupted,
            "operator_only": running.operator.counts(),
        }
        print_json(about)
    elif sink:
        note(f"published {count} releases to {', '.join(sink)}")
    if not count and not interrupted:
        _show_again(kept, query, sink, as_json=as_json, everything=everything)
    if interrupted:
        anew = "without --state it cannot go on: it would begin anew, and be charged anew"
        note(f"stopped; {'the same command again goes on from here' if state else anew}")
        raise typer.Exit(INTERRUPTED)


def _source(compiled: Compiled, sources: Sequence[str]) -> list[str]:
    """The paths that the query's table stands for."""
    found = []
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
        found.append(path)
    return found


def _published(
    running: Run, stopper: Stopper, query: AnyQuery | None, *, as_json: bool, everything: bool
) -> int:
    """Run it to its end, or until it is stopped; how many releases. A `query`'s are shown."""
    count = 0
    with running, stopper.listening(), progress([running], as_json=as_json) as draw:
        for release in running:
            count += 1
            if query is not None:
                show(release, as_lines=as_json, zone=zone_of(query), everything=everything)
            draw()
            if stopper.signals:
                running.stop()
    return count


def _show_again(
    kept: Kept | None,
    query: AnyQuery,
    sink: Sequence[str] | None,
    *,
    as_json: bool,
    everything: bool,
) -> None:
    """What an earlier run has published: showing it again costs nothing."""
    releases = [] if kept is None else kept.releases(query.name)
    if releases:
        note("this was published before; here it is again, the same numbers, at no cost")
        for release in releases:
            show(release, as_lines=as_json, zone=zone_of(query), everything=everything)
    elif sink:
        note(f"this was published before; {', '.join(sink)} has it if that run wrote there")
    else:
        note("this was published before; the run that did has it, in its output or its sink")


def _tell_storage(state: Path | None, ledger: Path | None) -> None:
    if ledger is None:
        where = f"kept in {own_book(state)} and" if state else "forgotten afterwards,"
        note(f"the budget of this query is {where} not shared with others; use --ledger")
    elif state is None:
        note(
            "without --state this query cannot be repeated: if its output is lost, its budget is "
            "spent all the same"
        )
