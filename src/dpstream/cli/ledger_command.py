"""`dpstream ledger`: what was spent, on what, when, and what is left; changes of a book."""

from __future__ import annotations

import getpass
import math
from collections.abc import Iterable, Iterator
from contextlib import closing
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from typer import Argument, Option
from typer.core import TyperGroup

from dpstream.cli.ledger_plan import plan_pipeline, print_plan
from dpstream.cli.output import AsJson, new_table, note, people, print_json, print_whole, wants_json
from dpstream.errors import InvalidParameter, LedgerError
from dpstream.privacy.accounting.curves import gdp_delta, gdp_epsilon
from dpstream.privacy.accounting.promises import promise, rows_of, same_promise
from dpstream.privacy.amounts import exact, show
from dpstream.privacy.ledger.charges import Terms, is_about_run
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.ledger.refusals import (
    amount_in_words,
    as_epsilon,
    promise_in_words,
    spent_and_left,
)
from dpstream.privacy.ledger.store import LedgerAddress, LedgerPlace, as_ledger_place
from dpstream.query.book_periods import book_ticks, held_places, loss_over
from dpstream.query.windows import duration, in_words, iso
from dpstream.session.pipeline import load_pipeline

_HELP = "a file, postgresql://user@host/database or s3://bucket/books/clicks"
Place = Annotated[
    LedgerPlace | None,
    Argument(
        metavar="LEDGER",
        help=f"A ledger ({_HELP}), or a pipeline.toml whose ledgers are meant.",
        parser=as_ledger_place,
    ),
]
File = Annotated[
    LedgerPlace | None,
    Option(
        "--ledger",
        envvar="DPSTREAM_LEDGER",
        help=f"The ledger: {_HELP}.",
        parser=as_ledger_place,
        metavar="LEDGER",
    ),
]
Dataset = Annotated[str | None, Option(help="Only this dataset.")]
Ledgers = Annotated[
    LedgerPlace,
    Argument(
        metavar="BOOK",
        help="A ledger, or a pipeline.toml whose ledger is meant.",
        parser=as_ledger_place,
    ),
]
Whose = Annotated[str | None, Option(help="Which book, if the ledger has several.")]
Because = Annotated[str, Option(metavar="TEXT", help="Why; it is written into the ledger.")]
Who = Annotated[str | None, Option(help="Who says so (default: the login name).")]
_BAR = 24  # characters
_PROGRESS = ("amount", "reached", "minted", "begun")  # what a run writes as it goes on
_SAME = ("dataset", "query", "purpose", "amount", "kind")
_ALLOWANCES = {"tail": "of delta to find keys", "drift": "to round noise"}


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


@app.callback(invoke_without_command=True)
def ledger(context: typer.Context, file: File = None, as_json: AsJson = False) -> None:
    """Show what was spent, on what, when, and what is left."""
    if context.invoked_subcommand is None:
        show_books(context, file=file)


@app.command("show")
def show_books(
    context: typer.Context,
    place: Place = None,
    file: File = None,
    dataset: Dataset = None,
    as_json: AsJson = False,
) -> None:
    """Show every book: its promise, what was spent on what, what is left (the default)."""
    paths, wanted = _existing(context, file, place)
    books = [
        book
        for book_file in _opened(paths)
        for book in books_with_dates(book_file)
        if dataset in (None, book["dataset"]) and (not wanted or book["dataset"] in wanted)
    ]
    if dataset is not None and not books:
        raise LedgerError(f"{', '.join(map(str, paths))} has no book for dataset {dataset!r}")
    if wants_json():
        print_json(books)
    else:
        print_books(people(), books)


@app.command("open")
def open_book(
    context: typer.Context,
    dataset: Annotated[str, Option(help="What the book is for.")],
    privacy_unit: Annotated[
        Literal["event", "w_event", "user"], Option(help="What one promise protects.")
    ],
    epsilon: Annotated[
        str, Option(help="What may be spent on one protected unit, in the book's measure.")
    ],
    window: Annotated[int | None, Option(help="Steps protected together, for w_event.")] = None,
    measure: Annotated[
        Literal["epsilon", "rho", "mu_squared"],
        Option(help="What the book counts: pure epsilon, zCDP rho, or GDP mu squared."),
    ] = "epsilon",
    change: Annotated[
        str | None, Option(help="How far one event moves the data, as the mechanism says it.")
    ] = None,
    clock: Annotated[
        str, Option(help="What one step is, as a query over windows says it.")
    ] = "steps",
    delta: Annotated[
        str | None,
        Option(help="For user: open the book of an (epsilon, delta) promise to each user."),
    ] = None,
    privacy_unit_period: Annotated[
        str, Option(help="For user: rows that are protected together, such as '1 day'.")
    ] = "forever",
    time_zone: Annotated[str, Option(help="For user: where a period begins.")] = "UTC",
    privacy_unit_column: Annotated[
        str | None, Option(help="For user: the column that names the protected unit.")
    ] = None,
    time_column: Annotated[
        str | None, Option(help="For user with a period: the column of the event time.")
    ] = None,
    file: File = None,
    as_json: AsJson = False,
) -> None:
    """Open a dataset's book before its first release; opening it again changes nothing."""
    if delta is None:
        terms = Terms(
            unit=privacy_unit,
            total=exact(epsilon, measure),
            window=window,
            measure=measure,
            period=privacy_unit_period,
            time_zone=time_zone,
            change=change or "a count by 1",
            clock=clock,
        )
    elif privacy_unit == "user" and window is None and measure != "rho":
        period = privacy_unit_period
        if period != "forever":
            period = in_words(duration(period, "--privacy-unit-period", calendar=True))
        terms = promise(
            epsilon=epsilon,
            delta=delta,
            privacy_unit_period=period,
            time_zone=time_zone,
            change=change or _rows_of(privacy_unit_column, time_column, period),
        )
    else:
        raise InvalidParameter(
            "--delta goes with --privacy-unit user and mu_squared, and without --window"
        )
    with closing(Ledger(_path(context, file))) as book_file:
        book_file.open(dataset, terms, say=False)
        books = [book for book in book_file.report() if book["dataset"] == dataset]
    if wants_json():
        print_json(books)
    else:
        print(f"the book of {dataset!r} is open in {book_file.path}: {promise_in_words(terms)}")


@app.command("history")
def history(
    context: typer.Context,
    place: Place = None,
    file: File = None,
    dataset: Dataset = None,
    as_json: AsJson = False,
) -> None:
    """List every entry, oldest first."""
    paths, wanted = _existing(context, file, place)
    records = [
        record
        for book_file in _opened(paths)
        for record in book_file.history(dataset)
        if not wanted or record.get("dataset", record.get("book", "")) in {"", *wanted}
    ]
    if wants_json():
        print_json(records)
    else:
        print_history(people(), records)


@app.command("repair")
def repair(
    place: Annotated[
        LedgerPlace,
        Argument(metavar="LEDGER", help=f"The ledger: {_HELP}.", parser=as_ledger_place),
    ],
    because: Annotated[str, Option(help="Why; it is written into the ledger.")],
) -> None:
    """Take a ledger as it is, although its head is lost or says that it held more.

    Charges that it lacks are not counted any more. A record that does not match its checksum is
    refused all the same.
    """
    if not place.is_file():
        raise LedgerError(f"there is no ledger at {place}; restore it, then repair it")
    with closing(Ledger(place)) as book_file:
        book_file.repair(because=because)
        records = len(list(book_file.history()))
    print(f"{place} is taken as it is, with {records} records; the last one says why")


@app.command("move", epilog="Example: dpstream ledger move book postgresql://ana@db/books ...")
def move(
    place: Annotated[
        LedgerPlace, Argument(metavar="FROM", help="The ledger.", parser=as_ledger_place)
    ],
    to: Annotated[
        LedgerPlace,
        Argument(
            metavar="TO", help=f"Where it will be: {_HELP}; one of both.", parser=as_ledger_place
        ),
    ],
    because: Because,
    who: Who = None,
    as_json: AsJson = False,
) -> None:
    """Move a ledger file to PostgreSQL, or back; the old one is not charged any more.

    Every record comes along, so runs go on at no new charge once the pipeline file, or --ledger,
    names the new place. Killed half-way nothing can be charged; the same command goes on.
    """
    if isinstance(to, LedgerAddress) == isinstance(place, LedgerAddress):
        both = "two servers" if isinstance(to, LedgerAddress) else "two files"
        raise InvalidParameter(
            f"one of FROM and TO must be a server, postgresql://user@host/database; got {both}; a "
            "file is moved with mv, together with its .head, and dpstream state adopt; from one "
            "server to another a ledger goes by way of a file"
        )
    if not place.is_file():
        raise LedgerError(f"there is no ledger at {place}")
    with closing(Ledger(place)) as book_file:
        book_file.move_to(to, because=because, who=who or getpass.getuser())
    with closing(Ledger(to)) as moved:
        books = [book["dataset"] for book in moved.report()]
    if wants_json():
        print_json({"moved": str(place), "to": str(to), "datasets": books})
        return
    print(f"{place} is now {to}, with the books of {', '.join(books) or 'nobody'}")
    note(f"name {to} in the pipeline file ([budget] ledger) and with --ledger; keep the old one")


@app.command("grow", epilog="Example: dpstream ledger grow book --epsilon 4 --because 'agreed'")
def grow(
    place: Ledgers,
    epsilon: Annotated[str, Option(help="The new total, as the book was opened with one.")],
    because: Because,
    delta: Annotated[str | None, Option(help="The new delta (default: the book's).")] = None,
    dataset: Whose = None,
    who: Who = None,
    as_json: AsJson = False,
) -> None:
    """Give a book another budget, larger or smaller, for all that share it.

    Less than what is spent is refused. Whoever uses the book sees the new budget at the next
    charge; pipeline files that say the old one are refused until they say the new one.
    """
    with closing(Ledger(_one_ledger(place))) as book_file:
        name, old = _one_book(book_file, dataset)
        new = same_promise(old, epsilon=epsilon, delta=delta)
        changed = book_file.grow(name, new, because=because, who=who or getpass.getuser())
        books = _books_of(book_file, name)
    if wants_json():
        print_json(books)
        return
    had = f"had {promise_in_words(old)}" if changed else "had it already"
    print(f"the book {name!r} has {promise_in_words(new)}; it {had}")
    print(spent_and_left(books[0]))
    note("a pipeline file of this book must say the same budget: write it into its [budget]")


@app.command("allow", epilog="Example: dpstream ledger allow book --analyst ana --share 0.5 ...")
def allow(
    place: Ledgers,
    analyst: Annotated[str, Option(help="Whose share this is.")],
    because: Because,
    share: Annotated[str, Option(help="The part of the book that is theirs, 1 at most.")] = "1",
    largest: Annotated[
        str | None, Option(help="The largest epsilon of one query, at the book's delta.")
    ] = None,
    dataset: Whose = None,
    who: Who = None,
    as_json: AsJson = False,
) -> None:
    """Give an analyst a share of a book, and a largest epsilon for one query.

    From the first one on the book takes new queries from those that it names alone. Names that
    `--who` or a pipeline file gives are bookkeeping: whoever can write the ledger can give any.
    """
    with closing(Ledger(_one_ledger(place))) as book_file:
        name, _ = _one_book(book_file, dataset)
        said = {"because": because, "who": who or getpass.getuser()}
        book_file.allow(name, analyst, share=share, largest=largest, **said)
        books = _books_of(book_file, name)
    if wants_json():
        print_json(books)
    else:
        print_books(people(), books)


@app.command("void", epilog="Example: dpstream ledger void 3f2a9c1d book --because 'wrong query'")
def void(
    context: typer.Context,
    run: Annotated[str, Argument(metavar="RUN", help="The run, as `ledger show` names it.")],
    because: Because,
    place: Place = None,
    file: File = None,
    dataset: Whose = None,
    who: Who = None,
    as_json: AsJson = False,
) -> None:
    """Give back the charge of a run that has begun no step; the run is ended for good.

    The ledger itself must show that nothing was drawn: the run has a state directory, and the
    ledger knows of none of its steps.
    """
    with closing(Ledger(_one_ledger(place or _path(context, file)))) as book_file:
        name, _ = _one_book(book_file, dataset)
        whole = _one_run(book_file, name, run)
        book_file.void(name, whole, because=because, who=who or getpass.getuser())
        books = _books_of(book_file, name)
    if wants_json():
        print_json(books)
        return
    print(f"the charge of run {run[:8]} is given back, and the run is ended for good")
    print(spent_and_left(books[0]))


@app.command("end", epilog="Example: dpstream ledger end 3f2a9c1d book --because 'its disk died'")
def end(
    context: typer.Context,
    run: Annotated[str, Argument(metavar="RUN", help="The run, as `ledger show` names it.")],
    because: Because,
    place: Place = None,
    file: File = None,
    dataset: Whose = None,
    who: Who = None,
    as_json: AsJson = False,
) -> None:
    """End a run for good whose state is lost, and that nothing takes over from.

    Its charge stays, but for periods that it has not begun: these are free for others. Whatever
    state of it turns up is refused at its next step; nothing takes that back.
    """
    with closing(Ledger(_one_ledger(place or _path(context, file)))) as book_file:
        name, _ = _one_book(book_file, dataset)
        whole = _one_run(book_file, name, run)
        known = book_file.known(whole).ended
        if known is not None:
            raise LedgerError(
                f"run {whole[:8]} was ended for good before, by {known[1]}: {known[0]}"
            )
        book_file.end(name, whole, because=because, who=who or getpass.getuser())
        books = _books_of(book_file, name)
    if wants_json():
        print_json(books)
        return
    print(f"run {whole[:8]} is ended for good; what it has begun stays spent")
    print(spent_and_left(books[0]))


def _one_run(book_file: Ledger, dataset: str, run: str) -> str:
    """The run of a book whose id begins so."""
    (book,) = _books_of(book_file, dataset)
    runs = {line["run"] for line in book["spent_on"] if line["run"].startswith(run)}
    if len(runs) != 1 or not run:
        known = sorted({line["run"][:8] for line in book["spent_on"]})
        raise LedgerError(
            f"{run!r} names {len(runs)} runs that were charged to the book {dataset!r}; "
            f"its runs are {', '.join(known) or 'none'}"
        )
    return str(*runs)


@app.command("plan", epilog="Example: dpstream ledger plan pipeline.toml --for '1 year'")
def plan(
    place: Annotated[Path, Argument(metavar="PIPELINE", help="A pipeline.toml file.")],
    queries: Annotated[
        list[str] | None, Option("--query", help="Only this query; may be repeated.")
    ] = None,
    length: Annotated[str, Option("--for", help="How far to look ahead.")] = "1 year",
    further: Annotated[
        list[str] | None,
        Option(metavar="EPSILON", help="How many more queries of this epsilon fit? Repeatable."),
    ] = None,
    every: Annotated[
        str | None, Option(help="One more such query each '1 month': when does the book run out?")
    ] = None,
    settings: Annotated[
        list[str] | None,
        Option("--set", metavar="QUERY=EPSILON", help="Plan with another epsilon of a query."),
    ] = None,
    plot: Annotated[Path | None, Option(help="Draw the spend over time in this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a pipeline would spend, before anything is spent: what fits, and until when.

    Nothing is read and nothing is written. What is in the book already counts.
    """
    planned = plan_pipeline(
        load_pipeline(place),
        only=queries or [],
        length=length,
        further=further or [],
        every=every,
        settings=settings or [],
    )
    if plot is not None:
        planned.plot(plot)
    if wants_json():
        print_json(planned.to_json())
    else:
        print_plan(people(), planned)


def _one_ledger(place: LedgerPlace) -> LedgerPlace:
    """The ledger that is meant; it must be there."""
    paths = [place]
    if isinstance(place, Path) and place.suffix == ".toml":
        paths = list(dict.fromkeys(book.ledger for book in load_pipeline(place).books))
    if len(paths) > 1:
        listed = ", ".join(map(str, paths))
        raise InvalidParameter(f"{place} has several ledgers; name one of {listed}")
    if not paths[0].is_file():
        raise LedgerError(f"there is no ledger at {paths[0]}; dpstream ledger open makes one")
    return paths[0]


def _one_book(book_file: Ledger, dataset: str | None) -> tuple[str, Terms]:
    """The dataset that is meant, and the terms of its book."""
    names = [book["dataset"] for book in book_file.report()]
    if dataset is None and len(names) == 1:
        dataset = names[0]
    if dataset not in names or dataset is None:
        asked = "which book is meant?" if dataset is None else f"there is no book for {dataset!r};"
        raise LedgerError(
            f"{asked} name it: --dataset; {book_file.path} has {', '.join(names) or 'none'}"
        )
    terms = book_file.terms(dataset)
    assert terms is not None
    return dataset, terms


def _books_of(book_file: Ledger, dataset: str) -> list[dict[str, Any]]:
    """The book of one dataset, as `ledger show` has it."""
    return [book for book in books_with_dates(book_file) if book["dataset"] == dataset]


def _rows_of(unit_column: str | None, time_column: str | None, period: str) -> str:
    """What one unit changes, as its queries say it."""
    if unit_column is None or (time_column is None) != (period == "forever"):
        raise InvalidParameter(
            "a book of users needs --privacy-unit-column, the column that names them, and with "
            "--privacy-unit-period also --time-column, the column whose periods are meant; all its "
            "queries must use them"
        )
    return rows_of(unit_column, time=time_column)


def _path(context: typer.Context, file: LedgerPlace | None) -> LedgerPlace:
    """`--ledger` of the subcommand, else that of `dpstream ledger` itself."""
    outer = context.parent.params.get("file") if context.parent else None
    path = file or outer
    if path is None:
        raise InvalidParameter(
            "name the ledger: dpstream ledger FILE, a ledger or a pipeline.toml; or --ledger FILE, "
            "or DPSTREAM_LEDGER"
        )
    return as_ledger_place(path)


def _existing(
    context: typer.Context, file: LedgerPlace | None, place: LedgerPlace | None
) -> tuple[list[LedgerPlace], set[str]]:
    """The ledgers that are meant, and which datasets of them (none: all)."""
    if isinstance(place, Path) and place.suffix == ".toml":
        pipeline = load_pipeline(place)
        paths = list(dict.fromkeys(book.ledger for book in pipeline.books))
        existing = [path for path in paths if path.exists()]
        if not existing:
            raise LedgerError(
                f"nothing was spent yet: there is no ledger at {', '.join(map(str, paths))}, which "
                f"{place} names; dpstream run or serve creates it"
            )
        return existing, {book.dataset for book in pipeline.books}
    path = place or _path(context, file)
    if isinstance(path, Path) and path.is_dir():
        inside = path / "ledger"
        hint = f"; did you mean {inside}?" if inside.is_file() else ""
        raise LedgerError(f"{path} is a directory, not a ledger{hint}")
    if not path.exists():
        commands = (
            ""
            if place is None
            else " (the commands are show, open, plan, grow, allow, end, void, move, history and "
            "repair)"
        )
        raise LedgerError(
            f"there is no ledger at {path}{commands}; a release with --ledger creates it, "
            "as does `dpstream ledger open`"
        )
    return [path], set()


def _opened(paths: Iterable[LedgerPlace]) -> Iterator[Ledger]:
    """Each ledger, open while it is looked at."""
    for path in paths:
        with closing(Ledger(path)) as book_file:
            yield book_file


def books_with_dates(book_file: Ledger) -> list[dict[str, Any]]:
    """The ledger's report in epsilon too, with the first and last time each line was charged."""
    books = book_file.report()
    times: dict[tuple[str, ...], list[str]] = {}
    changes: dict[str, list[str]] = {}
    for record in book_file.history():
        if "grown" in record:
            changes.setdefault(record["dataset"], []).append(_change(record))
        if "purpose" in record:
            key = (record["dataset"], record["run"], record["query"], record["purpose"])
            times.setdefault(key, []).append(record["at"])
    for book in books:
        terms = Terms.from_json(book["terms"])
        left = Fraction(book["left"])
        book["promise"] = promise_in_words(terms)
        if book["dataset"] in changes:
            book["changes"] = changes[book["dataset"]]
        book["epsilon"] = {
            "total": as_epsilon(terms, terms.total),
            "spent": as_epsilon(terms, terms.total - left),
            "left": as_epsilon(terms, left),
        }
        if people := _people(book, terms):
            book["people"] = people
        held = held_places(book)
        for line in book["spent_on"]:
            if line["run"] in held:
                line["begins"] = iso(held[line["run"]])
            at = times.get((book["dataset"], line["run"], line["query"], line["purpose"]), [""])
            line["first_at"], line["last_at"] = at[0], at[-1]
            ended = book_file.known(line["run"]).ended
            line["ended"] = ended is not None
            if ended is not None:
                line["ended_because"] = ended[0]
    return books


def _people(book: dict[str, Any], terms: Terms) -> list[dict[str, Any]]:
    """What any one person has lost over a day, a week and a year, where units are of a period."""
    if terms.period == "forever" or terms.epsilon is None or not book["spent_on"]:
        return []
    slack = 2 * terms.rounding_slack
    delta = gdp_delta(mu=math.sqrt(terms.total), epsilon=terms.epsilon - slack)
    lines = []
    for days in (1, 7, 365):
        loss = loss_over(book, days)
        if loss is not None and 0 < delta < 1:
            epsilon = gdp_epsilon(mu=math.sqrt(loss), delta=delta) if loss else 0.0
            within = {1: "a day", 7: "7 days", 365: "365 days"}[days]
            line = {"within": within, "mu_squared": float(loss), "epsilon": epsilon}
            lines.append(line | {"delta": delta})
    return lines


def print_books(console: Console, books: list[dict[str, Any]]) -> None:
    """A bar and a table per book."""
    if not books:
        console.print("no book is open yet")
    for book in books:
        terms = Terms.from_json(book["terms"])
        left = Fraction(book["left"])
        full = math.ceil((1 - left / terms.total) * _BAR)
        bar = "█" * full + "░" * (_BAR - full)
        console.print(f"{book['dataset']}: {promise_in_words(terms)}", style="bold")
        console.print(f"{bar} {spent_and_left(book)}", soft_wrap=True)
        if terms.measure != "epsilon":
            console.print(f"counted as {_parts(book, terms.total, left)}", soft_wrap=True)
        if "people" in book:
            parts = (f"{line['epsilon']:.3g} within {line['within']}" for line in book["people"])
            console.print(
                f"any one user, by the noise alone: at most epsilon = {', '.join(parts)}",
                soft_wrap=True,
            )
        for change in book.get("changes", ()):
            console.print(change, soft_wrap=True)
        if book.get("principals"):
            print_whole(console, _principals(book, terms))
        if book["spent_on"]:
            print_whole(console, _spent_on(book["spent_on"]))
        for line in book["spent_on"]:
            if "begins" in line:
                words = f"the place of {line['query']!r} ({line['run'][:8]}) is held: it begins "
                console.print(f"{words}{line['begins']}", soft_wrap=True)
        console.print()


def _opening(terms: Terms) -> str:
    """The promise, and the amounts that it is counted in if those are others."""
    counted = terms.describe()
    shown = promise_in_words(terms)
    return shown if shown == counted else f"{shown} ({counted.partition(' for ')[0]})"


def _parts(book: dict[str, Any], total: Fraction, left: Fraction) -> str:
    """What a book counts instead of epsilon, and what it allows for besides noise."""
    parts = [f"{book['terms']['measure']} {show(total - left)} of {show(total)}"]
    for name, what in _ALLOWANCES.items():
        if name in book:
            spent, rest = Fraction(book[name]["spent"]), Fraction(book[name]["left"])
            parts.append(f"{show(spent)} of {show(spent + rest)} {what} ({name})")
    return ", ".join(parts)


def print_history(console: Console, records: Iterable[dict[str, Any]]) -> None:
    """One line per entry, oldest first."""
    table = new_table("when (UTC)", "dataset", "what", "amount", "steps")
    terms: dict[str, Terms] = {}
    for first, last, count in _folded(records):
        if "book" in first:
            terms[first["book"]] = Terms.from_json(first["terms"])
        at, dataset, what, amount, steps = _entry(last, terms)
        if count > 1:
            at = _clock(first["at"])
            what += f" ({count:,} entries, the last {_clock(last['at'])})"
            begun = _entry(first, terms)[4].partition("..")[0]
            steps = f"{begun}..{steps.rpartition('..')[2]}" if steps else ""
        table.add_row(at, dataset, what, amount, steps)
    console.print(table)


def _folded(records: Iterable[dict[str, Any]]) -> list[list[Any]]:
    """First record, last one, and how many: steps of a run are one entry until something happens.

    They stand where the first of them does.
    """
    entries: list[list[Any]] = []
    going_on: dict[tuple[Any, ...], list[Any]] = {}
    for record in records:
        kind = next((fact for fact in _PROGRESS if fact in record), None)
        key = (record.get("run"), kind, *(record.get(name) for name in _SAME))
        if kind is None:
            for each in [each for each in going_on if each[0] == record.get("run")]:
                del going_on[each]
        elif key in going_on:
            going_on[key][1:] = [record, going_on[key][2] + 1]
            continue
        entries.append([record, record, 1])
        if kind is not None:
            going_on[key] = entries[-1]
    return entries


def _change(record: dict[str, Any]) -> str:
    """A change of a book's budget, in words."""
    who = f" by {record['who']}" if record["who"] else ""
    terms = Terms.from_json(record["grown"])
    budget = promise_in_words(terms).partition(" for ")[0]
    return f"{_clock(record['at'])} UTC{who}: {budget} from now on ({record['because']})"


def _principals(book: dict[str, Any], terms: Terms) -> Table:
    """Whose share is how large, and how much of it is left."""
    headings = ("analyst", "share", "largest query", "spent", "left of it")
    table = new_table(*headings, right=headings[1:])
    for name, allowed in book["principals"].items():
        share, spent = Fraction(allowed["share"]), Fraction(allowed["spent"])
        left = max(share * terms.total - spent, Fraction(0))
        largest = f"epsilon = {show(Fraction(allowed['largest']))}" if "largest" in allowed else "-"
        amounts = [amount_in_words(terms, amount) for amount in (spent, left)]
        table.add_row(name, show(share), largest, *amounts)
    return table


def _spent_on(lines: list[dict[str, Any]]) -> Table:
    headings = ["run", "query", "purpose", "steps", "charges", "each"]
    analysts = any("analyst" in line for line in lines)
    headings[2:2] = ["analyst"] if analysts else []
    when, ended = (any(line.get(key) for line in lines) for key in ("last_at", "ended_because"))
    headings += ["last charged (UTC)"] if when else []
    headings += ["ended for good"] if ended else []
    table = new_table(*headings, right=("charges", "each"))
    for line in lines:
        each = Fraction(line["amount"]) / max(line["charges"], 1)
        cells = [line["run"][:8], line["query"] or "-", line["purpose"]]
        cells[2:2] = [line.get("analyst", "-")] if analysts else []
        cells += [f"{line['first_step']}..{line['last_step']}", str(line["charges"]), show(each)]
        cells += [_clock(line["last_at"])] if when else []
        cells += [line.get("ended_because", "-")] if ended else []
        table.add_row(*cells)
    return table


def _about_run(record: dict[str, Any], terms: Terms | None) -> tuple[str, str]:
    """What a record says of a run, and of which step."""
    if "ended" in record:
        return f"was ended for good by {record['who']}: {record['ended']}", ""
    if "begun" in record:
        ticks = None if terms is None else book_ticks(terms)
        which = record["begun"] if ticks is None else f"of {iso(ticks.at(record['begun']))}"
        return f"draws for units up to the period {which}", ""
    if "epoch" in record:
        return "was started, or goes on", ""
    if "reached" in record:
        return "has come so far", str(record["reached"])
    if "minted" in record:
        return f"has had {record['minted']} window keys; {record['final']} are erased", ""
    if "until" in record:
        ticks, last = None if terms is None else book_ticks(terms), record["until"]
        which = last if ticks is None or last is None else f"of {iso(ticks.at(last))}"
        words = "is to end with no period" if last is None else f"is to end with the period {which}"
        return f"{words}, by {record['who']}: {record['because']}", ""
    if "voided" in record:
        return f"had its charge given back by {record.get('who')}: {record['voided']}", ""
    if "erasure" in record:
        return "had a unit erased", f"..{record['erasure'] - 1}"
    if "restored" in record:
        lost = f"; {len(record['lost'])} windows are lost" if record["lost"] else ""
        return f"was restored by {record['who']}: {record['restored']}{lost}", ""
    return f"was adopted by {record['who']}: {record['adopted']}", ""


def _entry(record: dict[str, Any], terms: dict[str, Terms]) -> tuple[str, str, str, str, str]:
    at = _clock(record["at"])
    if "book" in record:
        until = " (until somebody sets its budget)" if "provisional" in record else ""
        what = f"opened: {_opening(Terms.from_json(record['terms']))}{until}"
        return at, record["book"], what, "", ""
    if "repaired" in record:
        return at, "", f"taken as it is: {record['repaired']}", "", ""
    if "moved_from" in record:
        said = f"{record['who']}: {record['because']}"
        return at, "", f"moved here from {record['moved_from']} by {said}", "", ""
    if "compacted" in record:
        return at, "", f"what is from before {_clock(record['compacted'])} was folded", "", ""
    dataset = record["dataset"]
    if "grown" in record:
        what = f"{_opening(Terms.from_json(record['grown']))} from now on"
        by = f" by {record['who']}" if record["who"] else ""
        return at, dataset, f"{what}{by}: {record['because']}", "", ""
    if "allowed" in record:
        facts = ", ".join(f"{key} {show(Fraction(v))}" for key, v in record["allowed"].items())
        by = f" by {record['who']}: {record['because']}" if "who" in record else ""
        return at, dataset, f"{record['analyst']} is allowed {facts}{by}", "", ""
    if "learned" in record:
        run = record["learned"]["run"][:8]
        return at, dataset, f"run {run} has told what floats may lose", "", ""
    if "fingerprint" in record:
        by = f" by {record['analyst']}" if "analyst" in record else ""
        held = record["fingerprint"].startswith("holds the place")
        did = record["fingerprint"] if held else "started"
        return at, dataset, f"run {record['run'][:8]} {did}{by}", "", ""
    if is_about_run(record):
        what, steps = _about_run(record, terms.get(dataset))
        return at, dataset, f"run {record['run'][:8]} {what}", "", steps
    if "peak" in record:
        return at, dataset, "moved here from memory", "", ""
    what = f"{record['query'] or 'run'} {record['run'][:8]}: {record['purpose']}"
    if "instead_of" in record:
        what += f" (instead of run {record['instead_of'][:8]}, whose place it held)"
    if record.get("kind", "cells") != "cells":
        what += f" ({record['kind']})"
    last = record["step"] + record.get("repeat", 1) - 1
    steps = f"{record['step']}..{last}" if last > record["step"] else str(last)
    each = " each" if last > record["step"] else ""
    return at, dataset, what, show(Fraction(record["amount"])) + each, steps


def _clock(at: str) -> str:
    return at[:19].replace("T", " ")
