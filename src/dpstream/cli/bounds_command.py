"""`dpstream bounds`: propose how much of each unit to keep, and show the trade-off behind it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from dpstream.bounds_proposal import Proposal
from dpstream.bounds_proposal import bounds as propose
from dpstream.cli.command_options import Asker, BudgetOption, Payer, SharedLedger
from dpstream.cli.output import AsJson, new_table, note, people, print_json, progress_bar

_Target = partial(Option, rich_help_panel="The query that bounds are for")
_Shape = partial(Option, rich_help_panel="Shape of the data")
_BAR = 24  # characters of the longest bar


def bounds(
    data: Annotated[
        list[str], Argument(help="Files, a glob or a directory: Parquet, CSV, JSON lines.")
    ],
    privacy_unit_column: Annotated[
        str, Option(help="Column of the protected unit, such as user_id.")
    ],
    keys: Annotated[list[str] | None, Option(help="Columns to group by; may be repeated.")] = None,
    value: Annotated[str | None, Option(help="Column to sum: clamps are proposed.")] = None,
    public: Annotated[
        bool, Option("--public", help="I declare that these data are public.")
    ] = False,
    epsilon: Annotated[str | None, BudgetOption(help="Pay this much for the proposal.")] = None,
    delta: Annotated[str, BudgetOption(help="And this much.")] = "1e-9",
    ledger: SharedLedger = None,
    dataset: Payer = "stream",
    who: Asker = "",
    query_epsilon: Annotated[float, _Target(help="Its epsilon.")] = 1.0,
    query_delta: Annotated[float, _Target(help="Its delta.")] = 1e-9,
    triggers: Annotated[int, _Target(min=1, help="Tables of a window.")] = 100,
    group_size: Annotated[
        float | None,
        _Target(
            help="Rows of the groups that matter; default: ten times what a group needs to appear."
        ),
    ] = None,
    sample: Annotated[float, _Shape(help="Look at this share of the units.")] = 1.0,
    time_column: Annotated[str | None, _Shape(help="Column of the event time.")] = None,
    time_unit: Annotated[str | None, _Shape(help="Of a numeric time: s, ms, ...")] = None,
    time_origin: Annotated[str | None, _Shape(help="What a numeric time counts from.")] = None,
    window: Annotated[str | None, _Shape(help="Windows, such as '1 day'.")] = None,
    privacy_unit_period: Annotated[str, _Shape(help="A user is one unit in each.")] = "forever",
    start: Annotated[str | None, _Shape(help="Public start of the data.")] = None,
    end: Annotated[str | None, _Shape(help="Public end of the data.")] = None,
    plot: Annotated[Path | None, Option(help="Draw the trade-off in this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Propose bounds: groups and rows of a unit, clamps, and the pre-threshold."""
    with progress_bar("reading") as progress:
        proposal = propose(
            data[0] if len(data) == 1 else data,
            privacy_unit_column=privacy_unit_column,
            keys=keys or (),
            value=value,
            public=public,
            epsilon=epsilon,
            delta=delta,
            query_epsilon=query_epsilon,
            query_delta=query_delta,
            triggers=triggers,
            group_size=group_size,
            sample=sample,
            ledger=ledger,
            dataset=dataset,
            analyst=who,
            time_column=time_column,
            time_unit=time_unit,
            time_origin=time_origin or 0,
            window=window,
            privacy_unit_period=privacy_unit_period,
            start=start,
            end=end,
            progress=progress,
        )
    if plot is not None:
        proposal.plot(plot)
    if public:
        note("exact figures of data that were declared public: do not show them if they are not")
    else:
        place = f"the book {dataset!r} in {ledger}" if ledger else "a book of its own, not kept"
        note(f"charged to {place}: epsilon = {epsilon}, delta = {delta}; once more, once more paid")
    print_json(proposal.to_json()) if as_json else _show(proposal)


def _show(proposal: Proposal) -> None:
    headings = ("groups a unit", "rows left out", "", "noise", "", "needs units", "error")
    title = f"bias against noise, for a group of {proposal.group_size:,.0f} rows, one row each"
    table = new_table(*headings, right=[name for name in headings if name], title=title)
    worst = max(choice.error for choice in proposal.trade_off)
    for choice in proposal.trade_off:
        mine = choice.groups == proposal.max_groups_contributed
        share = choice.noise / proposal.group_size
        table.add_row(
            f"{'> ' if mine else ''}{choice.groups}",
            f"{choice.left_out:.1%}",
            _bar(choice.left_out, worst),
            f"{choice.noise:,.1f}",
            _bar(share, worst),
            f"{choice.threshold:,}",
            f"{choice.error:.1%}",
            style="bold" if mine else "",
        )
    people().print(table)
    print(f"groups a unit: {proposal.max_groups_contributed}")
    print(f"rows a group: {proposal.max_rows_per_group}")
    print(f"pre-threshold: {proposal.pre_threshold}")
    if proposal.value is not None:
        print(f"clamps of {proposal.value}: {proposal.lo:g} to {proposal.hi:g}")
    print(
        f"with these {proposal.left_out:.1%} of the rows are left out, noise is "
        f"{proposal.noise:,.1f}: an error of {proposal.error:.1%} for a group of "
        f"{proposal.group_size:,.0f} rows"
    )
    print(f"\nSQL:\n{proposal.sql()}\n\nPython:\n{proposal.python()}")


def _bar(share: float, largest: float) -> str:
    """A bar in proportion; nothing at all only for nothing.

    >>> _bar(0.5, 1.0), _bar(0.0, 1.0)
    ('████████████', '')
    """
    return "█" * max(round(_BAR * share / largest), int(share > 0)) if largest else ""
