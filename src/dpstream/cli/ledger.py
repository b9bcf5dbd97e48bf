"""`dpstream ledger`: what was spent, on what, when, and what is left."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table

from dpstream.cli.output import people, print_json
from dpstream.errors import InvalidParameter, LedgerError
from dpstream.privacy.amounts import exact, show
from dpstream.privacy.charges import Terms
from dpstream.privacy.ledger import Ledger

app = typer.Typer(help="Show what was spent, on what, when, and what is left.")

File = Annotated[
    Path | None, typer.Option("--ledger", envvar="DPSTREAM_LEDGER", help="The ledger file.")
]
Dataset = Annotated[str | None, typer.Option(help="Only this dataset.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback(invoke_without_command=True)
def ledger(context: typer.Context, file: File = None, as_json: AsJson = False) -> None:
    """Show what was spent, on what, when, and what is left."""
    if context.invoked_subcommand is None:
        show_books(context, file=file, as_json=as_json)


@app.command("show")
def show_books(
    context: typer.Context, file: File = None, dataset: Dataset = None, as_json: AsJson = False
) -> None:
    """Show every book: its promise, what was spent on what, what is left (the default)."""
    book_file = _existing(context, file)
    try:
        books = dated(book_file)
    finally:
        book_file.close()
    books = [book for book in books if dataset in (None, book["dataset"])]
    if dataset is not None and not books:
        raise LedgerError(f"{book_file.path} has no book for dataset {dataset!r}")
    if _wants_json(context, as_json):
        print_json(books)
    else:
        print_books(people(), books)


@app.command("open")
def open_book(
    context: typer.Context,
    dataset: Annotated[str, typer.Option(help="What the book is for.")],
    unit: Annotated[
        Literal["event", "w_event", "user"], typer.Option(help="What one promise protects.")
    ],
    epsilon: Annotated[str, typer.Option(help="What may be spent on one protected unit.")],
    window: Annotated[
        int | None, typer.Option(help="Steps protected together, for w_event.")
    ] = None,
    file: File = None,
    as_json: AsJson = False,
) -> None:
    """Open a dataset's book before its first release; opening it again changes nothing."""
    terms = Terms(unit=unit, total=exact(epsilon, "epsilon"), window=window)
    book_file = Ledger(_path(context, file))
    try:
        book_file.open(dataset, terms)
        books = [book for book in book_file.report() if book["dataset"] == dataset]
    finally:
        book_file.close()
    if _wants_json(context, as_json):
        print_json(books)
    else:
        print(f"the book of {dataset!r} is open in {book_file.path}: {terms.describe()}")


@app.command("history")
def history(
    context: typer.Context, file: File = None, dataset: Dataset = None, as_json: AsJson = False
) -> None:
    """List every entry, oldest first."""
    book_file = _existing(context, file)
    try:
        records = list(book_file.history(dataset))
    finally:
        book_file.close()
    if _wants_json(context, as_json):
        print_json(records)
        return
    table = Table(box=None, pad_edge=False)
    for title in ("when", "dataset", "what", "amount", "steps"):
        table.add_column(title)
    for record in records:
        table.add_row(*_entry(record))
    people().print(table, highlight=False, markup=False)


def dated(book_file: Ledger) -> list[dict[str, Any]]:
    """The ledger's report, with the first and the last time that each line was charged."""
    books = book_file.report()
    times: dict[tuple[str, ...], list[str]] = {}
    for record in book_file.history():
        if "purpose" in record:
            key = (record["dataset"], record["run"], record["query"], record["purpose"])
            times.setdefault(key, []).append(record["at"])
    for book in books:
        for line in book["spent_on"]:
            at = times.get((book["dataset"], line["run"], line["query"], line["purpose"]), [""])
            line["first_at"], line["last_at"] = at[0], at[-1]
    return books


def print_books(console: Console, books: list[dict[str, Any]]) -> None:
    """A bar and a table per book."""
    if not books:
        console.print("no book is open yet")
    for book in books:
        terms = book["terms"]
        total, left = Fraction(terms["total"]), Fraction(book["left"])
        where = {
            "event": "on the newest step",
            "w_event": f"in the last {terms['window']} steps",
            "user": "in all",
        }[terms["unit"]]
        console.print(f"{book['dataset']}: {book['promise']}", style="bold", highlight=False)
        bar = ProgressBar(total=1.0, completed=float((total - left) / total), width=40)
        line = Table.grid(padding=(0, 1))
        line.add_row(
            bar,
            f"{show(total - left)} of {show(total)} spent {where}, "
            f"{show(Fraction(book['left_next_step']))} left at the next step",
        )
        console.print(line, highlight=False)
        if book["spent_on"]:
            console.print(_spent_on(book["spent_on"]), highlight=False, markup=False)
        console.print()


def _spent_on(lines: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("run", "query", "purpose", "steps"):
        table.add_column(title)
    for title in ("charges", "each"):
        table.add_column(title, justify="right")
    table.add_column("last charged")
    for line in lines:
        each = Fraction(line["amount"]) / max(line["charges"], 1)
        table.add_row(
            line["run"][:8],
            line["query"] or "-",
            line["purpose"],
            f"{line['first_step']}..{line['last_step']}",
            str(line["charges"]),
            show(each),
            line.get("last_at", "")[:19].replace("T", " ") or "-",
        )
    return table


def _entry(record: dict[str, Any]) -> tuple[str, str, str, str, str]:
    at = record["at"][:19].replace("T", " ")
    if "book" in record:
        return at, record["book"], f"opened: {Terms.from_json(record['terms']).describe()}", "", ""
    dataset = record["dataset"]
    if "fingerprint" in record:
        return at, dataset, f"run {record['run'][:8]} started", "", ""
    if "settled_before" in record:
        return at, dataset, "older steps settled", "", f"..{record['settled_before'] - 1}"
    what = f"{record['query'] or 'run'} {record['run'][:8]}: {record['purpose']}"
    if record.get("kind", "cells") != "cells":
        what += f" ({record['kind']})"
    last = record["step"] + record.get("repeat", 1) - 1
    steps = f"{record['step']}..{last}" if last > record["step"] else str(last)
    each = " each" if last > record["step"] else ""
    return at, dataset, what, show(Fraction(record["amount"])) + each, steps


def _path(context: typer.Context, file: Path | None) -> Path:
    """`--ledger` of the subcommand, else that of `dpstream ledger` itself."""
    outer = context.parent.params.get("file") if context.parent else None
    path = file or outer
    if path is None:
        raise InvalidParameter("name the ledger with --ledger FILE or DPSTREAM_LEDGER")
    return Path(path)


def _existing(context: typer.Context, file: Path | None) -> Ledger:
    path = _path(context, file)
    if not path.exists():
        raise LedgerError(
            f"there is no ledger at {path}; a release with --ledger creates it, "
            "as does `dpstream ledger open`"
        )
    return Ledger(path)


def _wants_json(context: typer.Context, as_json: bool) -> bool:
    return as_json or bool(context.parent and context.parent.params.get("as_json"))
