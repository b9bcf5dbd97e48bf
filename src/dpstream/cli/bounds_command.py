"""`dpstream bounds`: propose how much of each unit to keep, and show the trade-off behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from dpstream.bounds_proposal import Proposal
from dpstream.bounds_proposal import bounds as propose
from dpstream.cli.command_options import (
    Asker,
    BudgetOption,
    Payer,
    RegistryTables,
    SharedLedger,
    table_paths,
)
from dpstream.cli.output import AsJson, new_table, note, people, print_json, progress_bar
from dpstream.cli.sql_command import Settings, Text, compile_text, source_paths
from dpstream.errors import InvalidParameter
from dpstream.query.query import Query
from dpstream.session import with_tables

_BAR = 24  # characters of the longest bar


def bounds(
    text: Text,
    sources: Annotated[
        list[str],
        Option(
            "--source",
            metavar="TABLE=PATH",
            help="What the table in FROM is: files, a glob or a directory.",
        ),
    ],
    public: Annotated[
        bool, Option("--public", help="I declare that these data are public.")
    ] = False,
    tables: Annotated[
        list[str] | None,
        Option(
            "--public-table",
            metavar="TABLE=PATH",
            help="A table that the query joins or takes its keys from (--public of `sql`).",
        ),
    ] = None,
    registry: RegistryTables = None,
    epsilon: Annotated[
        str | None, BudgetOption(help="Pay this much for the measurement, such as 0.1.")
    ] = None,
    delta: Annotated[str, BudgetOption(help="And this much.")] = "1e-9",
    state: Annotated[
        Path | None,
        BudgetOption(
            help="Directory that keeps what was paid for (default: QUERY.bounds beside the file)."
        ),
    ] = None,
    again: Annotated[
        bool, BudgetOption("--again", help="Pay for another measurement of the same rows.")
    ] = False,
    ledger: SharedLedger = None,
    dataset: Payer = "stream",
    who: Asker = "",
    key_size: Annotated[
        float | None,
        Option(
            help="Rows of the keys that matter, in one window; default: the mean of public groups, "
            "else ten times what a key needs to appear."
        ),
    ] = None,
    sample: Annotated[float, Option(help="Look at this share of the units.")] = 1.0,
    settings: Settings = None,
    plot: Annotated[Path | None, Option(help="Draw the trade-off in this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Propose bounds and clamps for a query; what was paid once answers later questions.

    Bounds and clamps that the query has are not looked at, and may be missing.

    Example: dpstream bounds clicks.sql --source clicks=clicks.csv --epsilon 0.1 --ledger book
    """
    compiled = compile_text(text, None, settings or [], unbounded=True)
    given: Any = None
    if compiled.query.sources:
        given = table_paths("--source", sources)
    else:
        given = source_paths(compiled, sources)
        given = given[0] if len(given) == 1 else given
    public_tables = table_paths("--public-table", tables)
    units = table_paths("--registry", registry)
    for name in compiled.query.table_names:
        if name not in public_tables | units:
            raise InvalidParameter(
                f"the table {name!r} is joined, or has the keys, and it is not declared: if "
                f"everybody may know all of it, say --public-table {name}=FILE; if its rows belong "
                f"to the privacy units and it is joined on the unit, --registry {name}=FILE"
            )
    query = with_tables(compiled.query, public=public_tables, registry=units)
    if not isinstance(query, Query):
        raise InvalidParameter(
            "bounds are for a GROUP BY: a time-series mechanism keeps one row of a unit in each "
            "window, and there is nothing to choose"
        )
    file = Path(text) if text.endswith(".sql") else Path("query.sql")
    kept = state or file.with_suffix(".bounds")
    with progress_bar("reading") as progress:
        proposal = propose(
            query,
            given,
            public=public,
            epsilon=epsilon,
            delta=delta,
            key_size=key_size,
            sample=sample,
            state=None if public else kept,
            again=again,
            ledger=ledger,
            dataset=dataset,
            analyst=who,
            progress=progress,
        )
    if plot is not None:
        proposal.plot(plot)
    if public:
        note("exact figures of data that were declared public: do not show them if they are not")
    elif proposal.measured_before:
        note(
            f"measured before, at epsilon = {proposal.epsilon:g}, and kept in {kept}: nothing was "
            "read or charged; --again pays for another measurement"
        )
    else:
        place = f"the book {dataset!r} in {ledger}" if ledger else f"a book of its own in {kept}"
        note(
            f"charged to {place}: epsilon = {epsilon}, delta = {delta}; kept in {kept}: further "
            "questions about these rows, keys and windows cost nothing"
        )
    print_json(proposal.to_json()) if as_json else _show(proposal)


def _show(proposal: Proposal) -> None:
    headings = ("groups a unit", "rows a group", "rows left out", "", "noise", "needs units")
    title = f"bias against noise, for a key of {proposal.key_size:,.0f} rows in a window"
    table = new_table(*headings, "error", right=[*filter(None, headings), "error"], title=title)
    worst = max(choice.error for choice in proposal.trade_off)
    for choice in proposal.trade_off:
        mine = choice.groups == proposal.max_groups_contributed
        table.add_row(
            f"{'> ' if mine else ''}{choice.groups}",
            f"{choice.rows}",
            f"{choice.left_out:.1%}",
            _bar(choice.error, worst),
            f"{choice.noise:,.1f}",
            f"{choice.threshold:,}",
            f"{choice.error:.1%}",
            style="bold" if mine else "",
        )
    people().print(table)
    title = "what to expect with the proposed bounds, in shares of a key's true value"
    columns = ("rows of a key", "column", "too low by", "noise", "error")
    table = new_table(*columns, right=["rows of a key", *columns[2:]], title=title)
    for each in proposal.expected:
        shares = (f"{share:.1%}" for share in (each.bias, each.noise, each.error))
        table.add_row(f"{each.key_size:,.0f}", each.aggregate, *shares)
    people().print(table)
    print(f"max_groups_contributed: {proposal.max_groups_contributed}")
    print(f"max_rows_per_group: {proposal.max_rows_per_group}")
    for column, (lo, hi) in proposal.clamps.items():
        share = proposal.values_left_out[column]
        print(f"clamps of {column}: {lo:g} to {hi:g}, which cut off {share:.1%} of its values")
    print(
        f"with these about {proposal.left_out:.1%} of the rows are left out; the error of a key of "
        f"{proposal.key_size:,.0f} rows is about {proposal.error:.1%}"
    )
    print(f"\nSQL:\n{proposal.sql()}\n\nPython:\n{proposal.python()}")


def _bar(share: float, largest: float) -> str:
    """A bar in proportion; nothing at all only for nothing.

    >>> _bar(0.5, 1.0), _bar(0.0, 1.0)
    ('████████████', '')
    """
    return "█" * max(round(_BAR * share / largest), int(share > 0)) if largest else ""
