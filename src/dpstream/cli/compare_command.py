"""`dpstream compare`: which mechanism suits a stream that is no secret?"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer
from rich.table import Table

from dpstream.cli.command_options import build_mechanism, describe_parameters
from dpstream.cli.mechanisms_command import complete_mechanism
from dpstream.cli.output import AsJson, note, people, print_json, progress_bar
from dpstream.cli.series_files import SeriesRows, check_target, read_series
from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.mechanisms import REGISTRY, find
from dpstream.mechanisms.base import Mechanism, SeriesMechanism
from dpstream.mechanisms.release import release
from dpstream.optional import optional

WARNING: Final = (
    "THIS COMPARISON IS NOT PRIVATE: its errors, and the choice that they lead to, come from the "
    "true values and spend no budget. Compare on data that are public or already released, and say "
    "so with --public; do not publish these figures otherwise"
)
MIDPOINT: Final = "midpoint"
"""What needs no data and no budget: the middle of the public range, always."""

_TIE: Final = 2.0  # standard errors within which a mechanism is as good as the best


def compare(
    source: Annotated[Path, typer.Argument(metavar="SERIES", help="A .csv or .parquet file.")],
    epsilons: Annotated[
        list[str], typer.Option("--epsilon", help="Budget (per window); may be repeated.")
    ],
    window: Annotated[
        int | None, typer.Option(help="Steps protected together (w): w-event mechanisms.")
    ] = None,
    delay: Annotated[
        str | None, typer.Option(help="Steps to wait: event-level mechanisms, with --lo and --hi.")
    ] = None,
    lo: Annotated[str | None, typer.Option(help="Lowest value (public).")] = None,
    hi: Annotated[str | None, typer.Option(help="Highest value (public).")] = None,
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--mechanism",
            "-m",
            autocompletion=complete_mechanism,
            help="A candidate; may be repeated. By default every one of its kind.",
        ),
    ] = None,
    runs: Annotated[int, typer.Option(min=2, help="Runs of each candidate.")] = 20,
    columns: Annotated[
        list[str] | None,
        typer.Option("--column", help="Compare on this column only; may be repeated."),
    ] = None,
    time_column: Annotated[str | None, typer.Option(help="Column that orders the steps.")] = None,
    public: Annotated[
        bool,
        typer.Option(
            "--public/--not-private",
            help="The data are public or already released; or: they are not, and you know that "
            "this comparison does not protect them.",
        ),
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the errors (.png, .svg).")] = None,
    as_json: AsJson = False,
) -> None:
    """Rank mechanisms on data that are public or already released."""
    if (window is None) == (delay is None):
        raise InvalidParameter(
            "compare needs --window (w-event mechanisms on counts), or --delay with --lo and --hi "
            "(event-level mechanisms on a series in a public range)"
        )
    if window is None:
        _compare_series(
            source, {"delay": delay, "lo": lo, "hi": hi}, epsilons, names or [], runs, columns,
            time_column, public=public, plot=plot, as_json=as_json,
        )  # fmt: skip
        return
    from dpstream.evaluate import trials  # needed by this command alone

    candidates = _candidates(names or [], trials.w_event_mechanisms())
    budgets = list(dict.fromkeys(epsilons))
    check_target(plot, (".png", ".svg", ".pdf"))
    figure = _figure() if plot else None
    rows = read_series(source, columns=columns or [], time_column=time_column)
    block = _counts(candidates[0], budgets, window, rows, source)
    if not public:
        note(WARNING)
    found: list[dict[str, Any]] = []
    with progress_bar("comparing") as progress:
        for budget in budgets:
            tried = []
            for name in candidates:
                tried.append(trials.trials(name, block, epsilon=budget, window=window, runs=runs))
                progress(len(found) * len(candidates) + len(tried), len(budgets) * len(candidates))
            ranking = [*_ranking(tried), _row(trials.zeros(block))]
            chosen = ranking[0]["mechanism"] if ranking[0]["rank"] else None
            command = chosen and _command(chosen, source, window, budget, columns, time_column)
            found.append({"epsilon": budget, "ranking": ranking, "command": command})
    if figure is not None and plot is not None:
        _draw(figure, found)
        figure.savefig(plot)
    if as_json:
        about = {"private": False, "declared_public": public, "window": window, "runs": runs}
        warning = {} if public else {"warning": WARNING}
        shape = {"steps": block.shape[0], "columns": rows.names}
        print_json(about | warning | shape | {"comparisons": found})
        return
    for one in found:
        _show(one, window=window, runs=runs, zeros=trials.ZEROS)


def _compare_series(
    source: Path,
    flags: dict[str, str | None],
    epsilons: list[str],
    names: list[str],
    runs: int,
    columns: list[str] | None,
    time: str | None,
    *,
    public: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Event-level mechanisms."""
    if plot is not None:
        raise InvalidParameter("--plot goes with --window; leave it out with --delay")
    rows = read_series(source, columns=columns or [], time_column=time)
    if not public:
        note(WARNING)
    budgets = list(dict.fromkeys(epsilons))
    found = _series_rankings(rows, source, names=names, epsilons=budgets, flags=flags, runs=runs)
    for one in found:
        one["command"] += _selected(columns, time)
    if as_json:
        about: dict[str, Any] = {"private": False, "declared_public": public, "runs": runs}
        warning = {} if public else {"warning": WARNING}
        shape = {**flags, "steps": len(rows.block), "columns": rows.names}
        print_json(about | warning | shape | {"comparisons": found})
        return
    for one in found:
        _show_series(one, delay=str(flags["delay"]), runs=runs)


def _candidates(asked: Sequence[str], known: Sequence[str]) -> list[str]:
    for name in asked:
        if name not in known:
            raise InvalidParameter(
                f"{name!r} is no w-event mechanism; choose among {', '.join(known)}"
            )
    return list(dict.fromkeys(asked)) or list(known)


def _counts(name: str, budgets: Sequence[str], window: int, rows: SeriesRows, source: Path) -> Any:
    """The steps as whole counts; parameters and data are checked before any run."""
    checked = [
        build_mechanism(name, {"epsilon": one, "window": str(window)}, []) for one in budgets
    ]
    try:
        return checked[0].check(rows.block)
    except InvalidInput as problem:
        raise InvalidInput(f"{rows.where(source)}: {problem}") from None


def _ranking(tried: Sequence[Any]) -> list[dict[str, Any]]:
    """Best mean relative error first; refused mechanisms last, without a rank."""
    rows = [_row(one) for one in tried]
    ranked = sorted((r for r in rows if not r["refused"]), key=lambda r: (r["mre"], r["mae"]))
    for rank, row in enumerate(ranked, start=1):
        distance = _TIE * math.hypot(row["mre_se"], ranked[0]["mre_se"])
        row |= {"rank": rank, "tied": rank > 1 and row["mre"] - ranked[0]["mre"] <= distance}
    return [*ranked, *(row for row in rows if row["refused"])]


def _row(one: Any) -> dict[str, Any]:
    (mre, mre_se), (mae, mae_se) = one.mean("relative"), one.mean("absolute")
    figures = {"mre": mre, "mre_se": mre_se, "mae": mae, "mae_se": mae_se}
    plain = {key: None if math.isnan(value) else value for key, value in figures.items()}
    paid = one.mean("paid")[0] if one.scores and not one.refusals else None
    row = {"rank": None, "mechanism": one.mechanism} | plain | {"paid_share": paid, "tied": False}
    return row | {"refused": "".join(one.refusals[:1])}


def _command(
    name: str, source: Path, window: int, epsilon: str, columns: list[str] | None, time: str | None
) -> str:
    """How to publish with the winner."""
    words = ["dpstream", "release", str(source), "--mechanism", name]
    words += ["--window", str(window), "--epsilon", epsilon]
    return shlex.join(words) + _selected(columns, time)


def _selected(columns: list[str] | None, time: str | None) -> str:
    """The part of a command that says what is published."""
    words = [word for column in columns or [] for word in ("--column", column)]
    words += ["--time-column", time] if time else []
    return "".join(f" {shlex.quote(word)}" for word in words)


def _show(one: dict[str, Any], *, window: int, runs: int, zeros: str) -> None:
    table = Table(
        title=f"epsilon = {one['epsilon']}, window = {window}; mean of {runs} runs ± its error",
        title_justify="left",
    )
    for heading in ("rank", "mechanism", "relative error", "absolute error", "steps paid", ""):
        table.add_column(heading, justify="left" if heading in ("mechanism", "") else "right")
    for row in one["ranking"]:
        remark = "as good as the first" if row["tied"] else ""
        if row["mechanism"] == zeros:
            remark = "needs no data"
        if row["refused"]:
            remark = f"refused by the ledger: {row['refused']}"
        table.add_row(
            str(row["rank"] or "–"),
            row["mechanism"],
            _figure_text(row["mre"], row["mre_se"]),
            _figure_text(row["mae"], row["mae_se"]),
            "–" if row["paid_share"] is None else f"{row['paid_share']:.1%}",
            remark,
        )
    people().print(table)
    print(f"publish with the first: {one['command']}\n" if one["command"] else "")


def _figure_text(mean: float | None, error: float | None) -> str:
    if mean is None:
        return "–"
    return f"{mean:.4g}" if error is None else f"{mean:.4g} ± {error:.2g}"


def _figure() -> Any:
    drawing = optional("matplotlib.figure", extra="plot", who="--plot")
    return drawing.Figure(figsize=(9, 4), dpi=144, layout="constrained")


def _draw(figure: Any, found: Sequence[dict[str, Any]]) -> None:
    """One panel per epsilon: the relative error of each candidate, with its error bar."""
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    for panel, one in zip(panels, found, strict=True):
        for place, row in enumerate(row for row in one["ranking"] if row["mre"] is not None):
            colour = "#0b6e99" if row["rank"] == 1 else "#5d6675"
            spread = 2 * (row["mre_se"] or 0)
            panel.errorbar(row["mre"], place, xerr=spread, fmt="o", capsize=3, color=colour)
            label = f"{row['mechanism']}  {row['mre']:.3g}"
            panel.annotate(label, (row["mre"], place), (0, 6), textcoords="offset points",
                           ha="center", fontsize=8, color=colour)  # fmt: skip
        panel.set(xscale="log", title=f"epsilon = {one['epsilon']}", yticks=[])
        panel.set_xlabel("mean relative error, ± 2 standard errors")
        panel.tick_params(axis="x", which="minor", labelbottom=False)
        panel.margins(x=0.25, y=0.15)
        panel.invert_yaxis()
        panel.spines[["top", "right", "left"]].set_visible(False)


def series_mechanisms() -> list[str]:
    """Every registered mechanism over numbers in a range, in the order of the registry."""
    return [name for name in REGISTRY if issubclass(find(name), SeriesMechanism)]


def _series_rankings(
    rows: SeriesRows,
    source: Path,
    *,
    names: Sequence[str],
    epsilons: Sequence[str],
    flags: Mapping[str, str | None],
    runs: int,
) -> list[dict[str, Any]]:
    """One ranking by absolute error for each epsilon; parameters and data are checked first."""
    known = series_mechanisms()
    for name in names:
        if name not in known:
            raise InvalidParameter(
                f"{name!r} is no event-level mechanism; choose among {', '.join(known)}"
            )
    candidates = list(dict.fromkeys(names)) or known
    plan = [(one, [_build(name, one, flags) for name in candidates]) for one in epsilons]
    try:
        plan[0][1][0].check(rows.block)
    except InvalidInput as problem:
        raise InvalidInput(f"{rows.where(source)}: {problem}") from None
    rankings: list[dict[str, Any]] = []
    with progress_bar("comparing") as progress:
        for epsilon, mechanisms in plan:
            errors = []
            for mechanism in mechanisms:
                errors.append([_error(mechanism, rows.block) for _ in range(runs)])
                done = len(rankings) * len(candidates) + len(errors)
                progress(done, len(plan) * len(candidates))
            ranking = _ranked(candidates, errors)
            middle = float(np.abs(rows.block - _middle(mechanisms[0])).mean())
            baseline = {"mechanism": MIDPOINT, "mae": middle, "mae_se": None, "tied": False}
            command = _series_command(ranking[0]["mechanism"], source, epsilon, flags)
            rankings.append(
                {
                    "epsilon": epsilon,
                    "ranking": [*ranking, {"rank": None} | baseline],
                    "command": command,
                }
            )
    return rankings


def _show_series(one: Mapping[str, Any], *, delay: str, runs: int) -> None:
    """One ranking as a table, and the command that publishes with the first."""
    table = Table(
        title=f"epsilon = {one['epsilon']}, delay = {delay}; mean of {runs} runs ± its error",
        title_justify="left",
    )
    for heading in ("rank", "mechanism", "absolute error", ""):
        table.add_column(heading, justify="left" if heading in ("mechanism", "") else "right")
    middle = one["ranking"][-1]["mae"]
    for row in one["ranking"]:
        remark = "as good as the first" if row["tied"] else ""
        if row["mechanism"] == MIDPOINT:
            remark = "needs no data"
        elif row["mae"] >= middle:
            remark = "no better than the middle of the range"
        error = "" if row["mae_se"] is None else f" ± {row['mae_se']:.2g}"
        table.add_row(str(row["rank"] or "–"), row["mechanism"], f"{row['mae']:.4g}{error}", remark)
    people().print(table)
    print(f"publish with the first: {one['command']}\n")


def _build(name: str, epsilon: str, flags: Mapping[str, str | None]) -> Mechanism:
    fields = {field["name"] for field in describe_parameters(find(name))}
    given = {key: value for key, value in flags.items() if key in fields}
    return build_mechanism(name, given | {"epsilon": epsilon}, [])


def _error(mechanism: Mechanism, block: Any) -> float:
    """Mean absolute error of one release, each column a series of its own."""
    columns = (release(mechanism, column).values[:, 0] - column for column in block.T)
    return float(np.mean([np.abs(column).mean() for column in columns]))


def _middle(mechanism: Mechanism) -> float:
    lo, hi, _ = mechanism.range  # type: ignore[attr-defined]
    return float(lo + hi) / 2


def _ranked(names: Sequence[str], errors: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"mechanism": name, "mae": float(np.mean(found)), "mae_se": _standard_error(found)}
        for name, found in zip(names, errors, strict=True)
    ]
    rows.sort(key=lambda row: row["mae"])
    first = rows[0]
    return [
        {"rank": rank, **row}
        | {
            "tied": rank > 1
            and row["mae"] - first["mae"] <= _TIE * math.hypot(row["mae_se"], first["mae_se"])
        }
        for rank, row in enumerate(rows, start=1)
    ]


def _standard_error(found: Sequence[float]) -> float:
    return float(np.std(found, ddof=1) / math.sqrt(len(found)))


def _series_command(name: str, source: Path, epsilon: str, flags: Mapping[str, str | None]) -> str:
    """How to publish with the winner."""
    fields = {field["name"] for field in describe_parameters(find(name))}
    words = ["dpstream", "release", str(source), "--mechanism", name, "--epsilon", epsilon]
    for key, value in flags.items():
        if value is not None and key in fields:
            words += [f"--{key}", value]
    return shlex.join(words)
