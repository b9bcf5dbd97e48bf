"""`dpstream compare`: which mechanism suits a stream that is no secret?"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from typer import Argument, Option

from dpstream.cli.command_options import build_mechanism, describe_parameters
from dpstream.cli.mechanisms_command import complete_mechanism
from dpstream.cli.output import AsJson, new_table, note, people, print_json, progress_bar
from dpstream.cli.series_files import check_target, read_series
from dpstream.errors import InvalidParameter
from dpstream.evaluate.trials import Character, Trials, mean_and_error, trials, zeros
from dpstream.mechanisms import REGISTRY, find
from dpstream.mechanisms.base import HistogramMechanism, Mechanism, SeriesMechanism
from dpstream.mechanisms.release import release
from dpstream.optional import optional
from dpstream.records import Reals

WARNING: Final = (
    "THIS COMPARISON IS NOT PRIVATE: its errors, and the choice that they lead to, come from the "
    "true values and spend no budget. Compare on data that are public or already released, and say "
    "so with --public; do not publish these figures otherwise"
)
MIDPOINT: Final = "midpoint"
"""What needs no data and no budget: the middle of the public range, always."""

_TIE: Final = 2.0  # standard errors within which a mechanism is as good as the best


def compare(
    source: Annotated[Path, Argument(metavar="SERIES", help="A .csv or .parquet file.")],
    epsilons: Annotated[
        list[str], Option("--epsilon", help="Budget (per window); may be repeated.")
    ],
    window: Annotated[
        int | None, Option(help="Steps protected together (w): w-event mechanisms.")
    ] = None,
    delay: Annotated[
        str | None, Option(help="Steps to wait: event-level mechanisms, with --lo and --hi.")
    ] = None,
    lo: Annotated[str | None, Option(help="Lowest value (public).")] = None,
    hi: Annotated[str | None, Option(help="Highest value (public).")] = None,
    names: Annotated[
        list[str] | None,
        Option(
            "--mechanism",
            "-m",
            autocompletion=complete_mechanism,
            help="A candidate; may be repeated. By default every one of its kind.",
        ),
    ] = None,
    runs: Annotated[int, Option(min=2, help="Runs of each candidate.")] = 20,
    columns: Annotated[
        list[str] | None, Option("--column", help="Compare on this column only; may be repeated.")
    ] = None,
    time_column: Annotated[str | None, Option(help="Column that orders the steps.")] = None,
    public: Annotated[
        bool,
        Option(
            "--public/--not-private",
            help="The data are public or already released; or: they are not, and you know that "
            "this comparison does not protect them.",
        ),
    ] = False,
    plot: Annotated[Path | None, Option(help="Draw the errors (.png, .svg).")] = None,
    as_json: AsJson = False,
) -> None:
    """Rank mechanisms on data that are public or already released."""
    if (window is None) == (delay is None):
        raise InvalidParameter(
            "compare needs --window (w-event mechanisms on counts), or --delay with --lo and --hi "
            "(event-level mechanisms on a series in a public range)"
        )
    flags: dict[str, Any] = {"epsilon": "", "delay": delay, "lo": lo, "hi": hi}
    kind: type[SeriesMechanism | HistogramMechanism] = SeriesMechanism
    if window is None and plot is not None:
        raise InvalidParameter("--plot goes with --window; leave it out with --delay")
    if window is not None:
        flags, kind = {"window": str(window), "epsilon": ""}, HistogramMechanism
    candidates = _candidates(names or [], kind)
    check_target(plot, (".png", ".svg", ".pdf"))
    drawing = optional("matplotlib.figure", extra="plot", who="--plot") if plot else None
    rows = read_series(source, columns=columns or [], time_column=time_column)
    budgets = list(dict.fromkeys(epsilons))
    built = [[_build(name, budget, flags) for name in candidates] for budget in budgets]
    block = rows.check(built[0][0])  # parameters and data are checked before any run
    if not public:
        note(WARNING)
    comparisons: list[dict[str, Any]] = []
    with progress_bar("comparing") as progress:
        for budget, mechanisms in zip(budgets, built, strict=True):
            tried = []
            for name, mechanism in zip(candidates, mechanisms, strict=True):
                if window is None:
                    tried.append(_try_series(name, mechanism, rows.block, runs))
                else:
                    scores = trials(name, block, epsilon=budget, window=window, runs=runs)
                    tried.append(_counts_row(scores))
                done = len(comparisons) * len(candidates) + len(tried)
                progress(done, len(budgets) * len(candidates))
            if window is None:
                ranking = [*_rank(tried, "mae"), _midpoint_row(mechanisms[0], rows.block)]
            else:
                ranking = [*_rank(tried, "mre"), _counts_row(zeros(block))]
            command = None
            if ranking[0]["rank"]:
                chosen = flags | {"epsilon": budget}
                command = _command(ranking[0]["mechanism"], source, chosen, columns, time_column)
            comparison: dict[str, Any] = {"epsilon": budget, "ranking": ranking}
            comparison["command"] = command
            if window is not None:
                character = Character.of(block, epsilon=budget, window=window)
                comparison["character"] = asdict(character) | {"words": character.words()}
            comparisons.append(comparison)
    if drawing is not None:
        figure = drawing.Figure(figsize=(9, 4), dpi=144, layout="constrained")
        _draw(figure, comparisons)
        figure.savefig(plot)
    if as_json:
        about = {"private": False, "declared_public": public, "runs": runs}
        warning = {} if public else {"warning": WARNING}
        asked = {"delay": delay, "lo": lo, "hi": hi} if window is None else {"window": window}
        shape = {"steps": len(rows.block), "columns": rows.names, "comparisons": comparisons}
        print_json(about | warning | asked | shape)
        return
    asked_for = f"delay = {delay}" if window is None else f"window = {window}"
    for comparison in comparisons:
        _show(comparison, f"{asked_for}; mean of {runs} runs ± its error")


def _candidates(
    asked: Sequence[str], kind: type[SeriesMechanism | HistogramMechanism]
) -> list[str]:
    """The mechanisms asked for, which must be of a kind; or every registered one of it."""
    known = [name for name in REGISTRY if issubclass(find(name), kind)]
    for name in asked:
        if name not in known:
            level = "w-event" if kind is HistogramMechanism else "event-level"
            raise InvalidParameter(
                f"{name!r} is no {level} mechanism; choose among {', '.join(known)}"
            )
    return list(dict.fromkeys(asked)) or known


def _build(name: str, epsilon: str, flags: Mapping[str, str | None]) -> Mechanism:
    fields = {field["name"] for field in describe_parameters(find(name))}
    given = {key: value for key, value in flags.items() if key in fields}
    return build_mechanism(name, given | {"epsilon": epsilon}, [])


def _rank(rows: Sequence[dict[str, Any]], figure: str) -> list[dict[str, Any]]:
    """The least `figure` first; refused mechanisms last, without a rank."""
    ranked = [row for row in rows if row[figure] is not None]
    ranked.sort(key=lambda row: (row[figure], row["mae"]))
    for rank, row in enumerate(ranked, start=1):
        distance = _TIE * math.hypot(row[f"{figure}_se"], ranked[0][f"{figure}_se"])
        row |= {"rank": rank, "tied": rank > 1 and row[figure] - ranked[0][figure] <= distance}
    return [*ranked, *(row for row in rows if row[figure] is None)]


def _counts_row(scores: Trials) -> dict[str, Any]:
    (mre, mre_se), (mae, mae_se) = scores.mean("relative"), scores.mean("absolute")
    figures = {"mre": mre, "mre_se": mre_se, "mae": mae, "mae_se": mae_se}
    plain = {key: None if math.isnan(value) else value for key, value in figures.items()}
    paid = scores.mean("paid")[0] if scores.scores and not scores.refusals else None
    row = {"rank": None, "mechanism": scores.mechanism} | plain
    return row | {"paid_share": paid, "tied": False, "refused": "".join(scores.refusals[:1])}


def _try_series(name: str, mechanism: Mechanism, block: Reals, runs: int) -> dict[str, Any]:
    """Mean absolute error over some releases, each column a series of its own."""
    errors = []
    for _ in range(runs):
        columns = (release(mechanism, column).values[:, 0] - column for column in block.T)
        errors.append(float(np.mean([np.abs(column).mean() for column in columns])))
    mean, standard_error = mean_and_error(errors)
    figures = {"mae": mean, "mae_se": standard_error}
    return {"rank": None, "mechanism": name, **figures, "tied": False}


def _midpoint_row(mechanism: Any, block: Reals) -> dict[str, Any]:
    lo, hi, _ = mechanism.range
    mean = float(np.abs(block - float(lo + hi) / 2).mean())
    return {"rank": None, "mechanism": MIDPOINT, "mae": mean, "mae_se": None, "tied": False}


def _command(
    name: str,
    source: Path,
    flags: Mapping[str, str | None],
    columns: Sequence[str] | None,
    time: str | None,
) -> str:
    """How to publish with the winner."""
    fields = {field["name"] for field in describe_parameters(find(name))}
    words = ["dpstream", "release", str(source), "--mechanism", name]
    for key, value in flags.items():
        if value is not None and key in fields:
            words += [f"--{key}", value]
    for column in columns or ():
        words += ["--column", column]
    return shlex.join([*words, "--time-column", time] if time else words)


def _show(comparison: Mapping[str, Any], conditions: str) -> None:
    """One ranking as a table, and the command that publishes with the first."""
    ranking, command = comparison["ranking"], comparison["command"]
    figures = {"absolute error": "mae"}
    if "mre" in ranking[-1]:
        figures = {"relative error": "mre", "absolute error": "mae", "steps paid": "paid_share"}
    table = new_table(
        "rank", "mechanism", *figures, "", right=("rank", *figures),
        title=f"epsilon = {comparison['epsilon']}, {conditions}",
    )  # fmt: skip
    for row in ranking:
        shown = [_figure_text(row, figure) for figure in figures.values()]
        rank = str(row["rank"] or "–")
        table.add_row(rank, row["mechanism"], *shown, _remark(row, ranking[-1]))
    people().print(table)
    if (character := comparison.get("character")) is not None:
        people().print(
            f"the stream is {character['words']}; a count moves by {character['step']:.2g} of the "
            f"noise of publishing every step, and by {character['window']:.2g} within a window",
            highlight=False,
        )
    print(f"publish with the first: {command}\n" if command else "")


def _figure_text(row: Mapping[str, Any], figure: str) -> str:
    if row[figure] is None:
        return "–"
    if figure == "paid_share":
        return f"{row[figure]:.1%}"
    error = row[f"{figure}_se"]
    return f"{row[figure]:.4g}" if error is None else f"{row[figure]:.4g} ± {error:.2g}"


def _remark(row: Mapping[str, Any], baseline: Mapping[str, Any]) -> str:
    if row is baseline:
        return "needs no data"
    if row.get("refused"):
        return f"refused by the ledger: {row['refused']}"
    if baseline["mechanism"] == MIDPOINT and row["mae"] >= baseline["mae"]:
        return "no better than the middle of the range"
    return "as good as the first" if row["tied"] else ""


def _draw(figure: Any, comparisons: Sequence[dict[str, Any]]) -> None:
    """One panel per epsilon: the relative error of each candidate, with its error bar."""
    panels = figure.subplots(1, len(comparisons), squeeze=False)[0]
    for panel, comparison in zip(panels, comparisons, strict=True):
        for place, row in enumerate(row for row in comparison["ranking"] if row["mre"] is not None):
            colour = "#0b6e99" if row["rank"] == 1 else "#5d6675"
            spread = 2 * (row["mre_se"] or 0)
            panel.errorbar(row["mre"], place, xerr=spread, fmt="o", capsize=3, color=colour)
            label = f"{row['mechanism']}  {row['mre']:.3g}"
            panel.annotate(label, (row["mre"], place), (0, 6), textcoords="offset points",
                           ha="center", fontsize=8, color=colour)  # fmt: skip
        panel.set(xscale="log", title=f"epsilon = {comparison['epsilon']}", yticks=[])
        panel.set_xlabel("mean relative error, ± 2 standard errors")
        panel.tick_params(axis="x", which="minor", labelbottom=False)
        panel.margins(x=0.25, y=0.15)
        panel.invert_yaxis()
        panel.spines[["top", "right", "left"]].set_visible(False)
