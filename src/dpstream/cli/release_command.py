"""`dpstream release`: publish a series from a file."""

from __future__ import annotations

import dataclasses
import sys
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from dpstream.cli.command_options import (
    Asker,
    BudgetOption,
    Payer,
    SecretFile,
    SharedLedger,
    build_mechanism,
    tell_storage,
)
from dpstream.cli.mechanisms_command import complete_mechanism
from dpstream.cli.output import AsJson, note, print_json, progress_bar
from dpstream.cli.series_files import (
    SeriesRows,
    as_csv,
    check_target,
    hold_gaps,
    read_series,
    records,
    write_series,
)
from dpstream.errors import InvalidParameter
from dpstream.mechanisms import name_of
from dpstream.mechanisms.release import Series
from dpstream.mechanisms.runner import Runner
from dpstream.optional import optional
from dpstream.privacy.amounts import show
from dpstream.privacy.state.secret import secret_path

_Parameter = partial(Option, rich_help_panel="Parameters of the mechanism")
_DEFAULT = "pacer"  # the w-event mechanism that is nowhere far from the best
_DELAYED = "block_smoother"  # the same for series that may be late


def release(
    source: Annotated[Path, Argument(metavar="SERIES", help="A .csv or .parquet file.")],
    mechanism: Annotated[
        str | None,
        Option(
            "--mechanism",
            "-m",
            autocompletion=complete_mechanism,
            help=f"One of those that `dpstream mechanisms` lists; with --window, {_DEFAULT}; "
            f"with --delay, {_DELAYED}.",
        ),
    ] = None,
    epsilon: Annotated[str | None, _Parameter()] = None,
    window: Annotated[str | None, _Parameter(help="Steps protected together (w).")] = None,
    delay: Annotated[str | None, _Parameter(help="Steps to wait.")] = None,
    lo: Annotated[str | None, _Parameter(help="Lowest value (public).")] = None,
    hi: Annotated[str | None, _Parameter(help="Highest value (public).")] = None,
    quantum: Annotated[str | None, _Parameter(help="Grid of the values.")] = None,
    settings: Annotated[
        list[str] | None,
        _Parameter("--set", metavar="NAME=VALUE", help="Any other parameter; may be repeated."),
    ] = None,
    columns: Annotated[
        list[str] | None, Option("--column", help="Publish only this column; may be repeated.")
    ] = None,
    time_column: Annotated[str | None, Option(help="Column that orders the steps.")] = None,
    fill: Annotated[
        str | None,
        Option(
            metavar="0|hold",
            help="Steps that are missing: count 0, or hold what was published before them.",
        ),
    ] = None,
    out: Annotated[
        Path | None, Option(help="A .csv, .parquet or .jsonl file instead of stdout.")
    ] = None,
    plot: Annotated[
        Path | None, Option(help="Draw the first column with its error band (.png, .svg).")
    ] = None,
    state: Annotated[
        Path | None, BudgetOption(help="Directory that lets this release be repeated and extended.")
    ] = None,
    final: Annotated[
        bool,
        BudgetOption(
            "--final",
            help="The series has ended: publish what a delay still holds back. Without --state "
            "that is always so.",
        ),
    ] = False,
    secret: SecretFile = None,
    ledger: SharedLedger = None,
    dataset: Payer = "stream",
    who: Asker = "",
    as_json: AsJson = False,
) -> None:
    """Publish a series under differential privacy, one row a step."""
    flags = {"epsilon": epsilon, "window": window, "delay": delay}
    flags |= {"lo": lo, "hi": hi, "quantum": quantum}
    chosen = build_mechanism(mechanism or _default(window, delay), flags, settings or [])
    check_target(out)
    check_target(plot, (".png", ".svg", ".pdf"))
    if plot is not None:
        optional("matplotlib.pyplot", extra="plot", who="--plot")
    rows = read_series(source, columns=columns or [], time_column=time_column, fill=fill)
    rows.check(chosen)  # before a state directory, a book or a secret is made for them
    secret_file = secret if secret is not None or state is None else secret_path(state)
    existed = secret_file is None or secret_file.exists()
    runner = Runner(
        chosen,
        state=state,
        secret=secret,
        ledger=ledger,
        dataset=dataset,
        name=name_of(chosen),
        analyst=who,
        replay=state is not None,
    )
    tell_storage("release", state, ledger)
    if not existed:
        note(f"created the secret {secret_file}; back it up: without it nothing can be repeated")
    try:
        before = _charges(runner)
        series = _publish(runner, rows, final=final or state is None)
        if state is not None and (final or runner.ended):
            runner.save()
        new_charges = _charges(runner) - before
        book = next(b for b in runner.ledger.report() if b["dataset"] == dataset)
    finally:
        runner.close()
    waiting = len(rows.block) - len(series)
    series = hold_gaps(series, rows)
    if out is not None:
        write_series(series, out)
    if plot is not None:
        stamps = None if rows.stamps is None else rows.stamps[: len(series)]
        dataclasses.replace(series, times=stamps).plot(path=str(plot))
    if as_json:
        fields = dataclasses.fields(chosen)  # type: ignore[arg-type]
        facts = {
            "mechanism": name_of(chosen),
            "parameters": {field.name: str(getattr(chosen, field.name)) for field in fields},
            "run": series.run,
            "dataset": book["dataset"],
            "promise": book["promise"],
            "left_next_step": book["left_next_step"],
            "steps": len(series),
            "paid_steps": sum(series.paid),
            "columns": list(series.names),
            "new_charges": new_charges,
            "waiting": waiting,
        }
        print_json(facts | ({"out": str(out)} if out else {"rows": [*records(series)]}))
        return
    if out is None:
        sys.stdout.write(as_csv(series))
        sys.stdout.flush()
    where = f" to {out}" if out else ""
    note(
        f"published {len(series)} steps{where}, {new_charges or 'no'} new "
        f"charge{'s' * (new_charges != 1)}; the book "
        f"{dataset!r} promises {book['promise']}; {show(Fraction(book['left_next_step']))} is "
        "left at the next step"
    )
    if waiting:
        note(
            f"{waiting} step{'s' * (waiting != 1)} at the end wait for their delay; --final "
            "publishes them, and closes the series"
        )


def _default(window: str | None, delay: str | None) -> str:
    """The mechanism when none is named: a window asks for w-event privacy, a delay for a series."""
    if (window is None) == (delay is None):
        raise InvalidParameter(
            "release needs --mechanism (`dpstream mechanisms` lists them), or --window: then it "
            f"uses {_DEFAULT}; or --delay, with --lo and --hi: then it uses {_DELAYED}"
        )
    flag, chosen = ("--delay", _DELAYED) if window is None else ("--window", _DEFAULT)
    note(f"--mechanism is not given: with {flag} it is {chosen}")
    return chosen


def _charges(runner: Runner) -> int:
    """How often the ledger has charged this run so far."""
    lines = (line for book in runner.ledger.report() for line in book["spent_on"])
    return sum(line["charges"] for line in lines if line["run"] == runner.run_id.hex())


def _publish(runner: Runner, rows: SeriesRows, *, final: bool) -> Series:
    releases = []
    with progress_bar("publishing") as progress:
        for done, batch in enumerate(runner.feed(rows.block), start=1):
            releases += batch
            progress(done, len(rows.block))
        if final or runner.ended:
            releases += runner.finish()
    return Series.of(releases, run=runner.run_id.hex(), names=rows.names, times=rows.times)
