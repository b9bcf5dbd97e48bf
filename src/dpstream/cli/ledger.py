"""`dpstream ledger`: what was spent, on what, when, and what is left."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from dpstream.cli.books import dated, print_books, print_history, promised
from dpstream.cli.output import people, print_json
from dpstream.errors import InvalidParameter, LedgerError
from dpstream.pipeline import load_pipeline
from dpstream.privacy.amounts import exact
from dpstream.privacy.charges import Terms
from dpstream.privacy.ledger import Ledger
from dpstream.privacy.promises import promise, rows_of
from dpstream.stages.ticks import duration, in_words


class _ShowByDefault(TyperGroup):
    """`dpstream ledger pipeline.toml` means `dpstream ledger show pipeline.toml`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command; what names none is a file to show."""
        known = args and args[0] in self.commands
        return super().resolve_command(ctx, args if known else ["show", *args])


app = typer.Typer(
    help="Show what was spent, on what, when, and what is left.",
    epilog="`dpstream ledger FILE` shows a ledger, or those that a pipeline.toml names.",
    cls=_ShowByDefault,
)

Place = Annotated[
    Path | None,
    typer.Argument(metavar="FILE", help="A ledger, or a pipeline.toml whose ledgers are meant."),
]
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
    context: typer.Context,
    place: Place = None,
    file: File = None,
    dataset: Dataset = None,
    as_json: AsJson = False,
) -> None:
    """Show every book: its promise, what was spent on what, what is left (the default)."""
    books: list[dict[str, Any]] = []
    paths, wanted = _existing(context, file, place)
    for path in paths:
        book_file = Ledger(path)
        try:
            books += dated(book_file)
        finally:
            book_file.close()
    books = [
        book
        for book in books
        if dataset in (None, book["dataset"]) and (not wanted or book["dataset"] in wanted)
    ]
    if dataset is not None and not books:
        raise LedgerError(f"{', '.join(map(str, paths))} has no book for dataset {dataset!r}")
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
    epsilon: Annotated[
        str, typer.Option(help="What may be spent on one protected unit, in the book's measure.")
    ],
    window: Annotated[
        int | None, typer.Option(help="Steps protected together, for w_event.")
    ] = None,
    measure: Annotated[
        Literal["epsilon", "rho", "mu_squared"],
        typer.Option(help="What the book counts: pure epsilon, zCDP rho, or GDP mu squared."),
    ] = "epsilon",
    change: Annotated[
        str | None, typer.Option(help="How far one event moves the data, as the mechanism says it.")
    ] = None,
    clock: Annotated[
        str, typer.Option(help="What one step is, as a query over windows says it.")
    ] = "steps",
    delta: Annotated[
        str | None,
        typer.Option(help="For user: open the book of an (epsilon, delta) promise to each user."),
    ] = None,
    period: Annotated[
        str, typer.Option(help="For user: rows that are protected together, such as '1 day'.")
    ] = "forever",
    time_zone: Annotated[str, typer.Option(help="For user: where a period begins.")] = "UTC",
    unit_column: Annotated[
        str | None, typer.Option(help="For user: the column that names the protected unit.")
    ] = None,
    time_column: Annotated[
        str | None, typer.Option(help="For user with a period: the column of the event time.")
    ] = None,
    file: File = None,
    as_json: AsJson = False,
) -> None:
    """Open a dataset's book before its first release; opening it again changes nothing."""
    if delta is None:
        terms = Terms(
            unit=unit,
            total=exact(epsilon, measure),
            window=window,
            measure=measure,
            period=period,
            time_zone=time_zone,
            change=change or "a count by 1",
            clock=clock,
        )
    elif unit == "user" and window is None and measure != "rho":
        terms = promise(
            epsilon=epsilon,
            delta=delta,
            period=period if period == "forever" else in_words(duration(period, "--period")),
            time_zone=time_zone,
            change=change or _rows_of(unit_column, time_column, period),
        )
    else:
        raise InvalidParameter("--delta goes with --unit user and mu_squared, and without --window")
    book_file = Ledger(_path(context, file))
    try:
        book_file.open(dataset, terms)
        books = [book for book in book_file.report() if book["dataset"] == dataset]
    finally:
        book_file.close()
    if _wants_json(context, as_json):
        print_json(books)
    else:
        print(f"the book of {dataset!r} is open in {book_file.path}: {promised(terms)}")


@app.command("history")
def history(
    context: typer.Context,
    place: Place = None,
    file: File = None,
    dataset: Dataset = None,
    as_json: AsJson = False,
) -> None:
    """List every entry, oldest first."""
    records: list[dict[str, Any]] = []
    paths, wanted = _existing(context, file, place)
    for path in paths:
        book_file = Ledger(path)
        try:
            records += [
                record
                for record in book_file.history(dataset)
                if not wanted
                or "repaired" in record
                or record.get("dataset", record.get("book")) in wanted
            ]
        finally:
            book_file.close()
    if _wants_json(context, as_json):
        print_json(records)
    else:
        print_history(people(), records)


@app.command("repair")
def repair(
    place: Annotated[Path, typer.Argument(metavar="FILE", help="The ledger.")],
    because: Annotated[str, typer.Option(help="Why; it is written into the ledger.")],
) -> None:
    """Take a ledger as it is, although its head is lost or says that it held more.

    Charges that it lacks are not counted any more. A record that does not match its checksum is
    refused all the same.
    """
    if not place.is_file():
        raise LedgerError(f"there is no ledger at {place}; restore it, then repair it")
    book_file = Ledger(place)
    try:
        book_file.repair(because=because)
        records = len(list(book_file.history()))
    finally:
        book_file.close()
    print(f"{place} is taken as it is, with {records} records; the last one says why")


def _rows_of(unit_column: str | None, time_column: str | None, period: str) -> str:
    """What one unit changes, as its queries say it."""
    if unit_column is None or (time_column is None) != (period == "forever"):
        raise InvalidParameter(
            "a book of users needs --unit-column, the column that names them, and with --period "
            "also --time-column, the column whose periods are meant; all its queries must use them"
        )
    return rows_of(unit_column, time=time_column)


def _path(context: typer.Context, file: Path | None) -> Path:
    """`--ledger` of the subcommand, else that of `dpstream ledger` itself."""
    outer = context.parent.params.get("file") if context.parent else None
    path = file or outer
    if path is None:
        raise InvalidParameter(
            "name the ledger: dpstream ledger FILE, a ledger or a pipeline.toml; or --ledger FILE, "
            "or DPSTREAM_LEDGER"
        )
    return Path(path)


def _existing(
    context: typer.Context, file: Path | None, place: Path | None
) -> tuple[list[Path], set[str]]:
    """The ledgers that are meant, and which datasets of them (none: all)."""
    if place is not None and place.suffix == ".toml":
        pipeline = load_pipeline(place)
        paths = list(dict.fromkeys(book.ledger for book in pipeline.books))
        found = [path for path in paths if path.exists()]
        if not found:
            raise LedgerError(
                f"nothing was spent yet: there is no ledger at {', '.join(map(str, paths))}, which "
                f"{place} names; dpstream run or serve creates it"
            )
        return found, {book.dataset for book in pipeline.books}
    path = place or _path(context, file)
    if path.is_dir():
        inside = path / "ledger"
        hint = f"; did you mean {inside}?" if inside.is_file() else ""
        raise LedgerError(f"{path} is a directory, not a ledger{hint}")
    if not path.exists():
        commands = "" if place is None else " (the commands are show, open, history and repair)"
        raise LedgerError(
            f"there is no ledger at {path}{commands}; a release with --ledger creates it, "
            "as does `dpstream ledger open`"
        )
    return [path], set()


def _wants_json(context: typer.Context, as_json: bool) -> bool:
    return as_json or bool(context.parent and context.parent.params.get("as_json"))
