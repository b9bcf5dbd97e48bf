"""w-event mechanisms on real and synthetic streams: relative and absolute error, budget, time.

Every registered mechanism over counts runs with its default parameters. Noise is fixed by name, so
a run gives the same errors again; times differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from dpstream.bench import w_event_figures as figures
from dpstream.bench import w_event_published as published
from dpstream.bench import w_event_speed as speed
from dpstream.bench.harness import Findings, Progress, Row
from dpstream.bench.metrics import delta_mre
from dpstream.bench.streams import ROME, VARIABLE, Stream, rome, streams
from dpstream.bench.trials import (
    NOT_JUDGED,
    PUBLISHED,
    Trials,
    trials,
    w_event_mechanisms,
    zeros,
)
from dpstream.bench.w_event_findings import findings
from dpstream.bench.w_event_plot import Curves, draw
from dpstream.bench.w_event_targets import SHOWN, summaries, targets
from dpstream.records import Integers

OLDER: Final = ("uniform", "sample", "budget_distribution", "budget_absorption")
_TICKS: Final = 1_000  # of the progress bar
_ROME_WINDOW, _ROME_EPSILON = 120, 1.0

# What the roads do: median level, and daily swing as a share of it. The first is judged.
REGIMES: Final[dict[str, tuple[float, float]]] = {
    "swing ~ w/eps": (148, 0.9),
    "swing << w/eps": (33, 0.3),
    "swing >> w/eps": (1_808, 0.9),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    epsilons: Sequence[float]
    windows: Sequence[int]
    runs: int
    steps: int | None
    rome_bins: int  # in the regime that is judged
    other_bins: int  # in the others
    figures: figures.Size
    published_runs: int


FULL: Final = Plan(
    epsilons=(0.1, 0.3, 0.5, 0.7, 0.9),
    windows=(80, 120, 200),
    runs=20,
    steps=None,
    rome_bins=ROME[1],
    other_bins=5_000,
    figures=figures.Size(),
    published_runs=5,
)
QUICK: Final = Plan(
    epsilons=(0.1, 0.5, 0.9),
    windows=(120,),
    runs=3,
    steps=240,
    rome_bins=500,
    other_bins=500,
    figures=figures.SMALL,
    published_runs=1,
)


def measure(*, quick: bool, progress: Progress) -> Findings:
    """Every mechanism on every stream at every epsilon and window; then the other figures."""
    plan = QUICK if quick else FULL
    names = [*w_event_mechanisms(), *PUBLISHED]
    found = streams(steps=plan.steps)
    present = [one for one in found if one.block is not None]
    cells = [
        (one, window, eps) for one in present for window in plan.windows for eps in plan.epsilons
    ]
    tick = _ticker(progress, sum(len(_block(one)) for one, _, _ in cells) * len(names))
    rows: list[Row] = [_absent(one) for one in found if one.block is None]
    curves: Curves = {}
    for stream, window, epsilon in cells:
        block = _block(stream)
        all_trials = []
        for name in names:
            tick(0, f"{name} on {stream.name}, epsilon {epsilon}, w {window}")
            what = f"{stream.name}, epsilon {epsilon}, w {window}, {name}"
            all_trials.append(
                trials(name, block, epsilon=epsilon, window=window, runs=plan.runs, fixed=what)
            )
            tick(len(block), "")
        rows += cell_rows(stream, epsilon, window, [*all_trials, zeros(block)])
        if (epsilon, window) == SHOWN:
            curves[stream.name] = {one.mechanism: one.by_step() for one in all_trials if one.scores}
    wide = _wide(plan, names, progress)

    def last(what: str) -> None:
        progress(_TICKS - 1, _TICKS, what)

    mechanisms = [name for name in names if name not in PUBLISHED]
    more = figures.measure(present, mechanisms, plan.figures, last)
    epsilon, window = SHOWN
    forms = published.measure(
        present, epsilon=epsilon, window=window, runs=plan.published_runs, tick=last
    )
    last("steps per second")
    speeds = speed.measure(mechanisms)
    progress(_TICKS, _TICKS, "done")
    sound = [row for row in forms if row["form"] == "sound"]
    others = [*(row for part in wide[1:] for row in part), *more, *sound]
    return Findings(
        rows=[*rows, *(row for part in wide for row in part), *more, *forms, *speeds],
        targets=[*targets(rows, wide[0], others), *speed.targets(speeds)],
        notes=[*_notes(plan, found), *summaries(rows), *findings(rows, more, forms)],
        draw=lambda figure: draw(figure, rows, curves, more),
    )


def cell_rows(stream: Stream, epsilon: float, window: int, all_trials: list[Trials]) -> list[Row]:
    """One row per mechanism of a cell; what is not judged is shown, and not in the minimum."""
    means = {one.mechanism: one.mean("relative") for one in all_trials}
    errors = {name: mean for name, (mean, _) in means.items()}
    deltas = delta_mre(errors, among=[name for name in errors if name not in NOT_JUDGED])
    return [
        {"stream": stream.name, "epsilon": epsilon, "window": window, "mechanism": one.mechanism}
        | {"delta_mre": deltas[one.mechanism]}
        | _figures(one, note="" if stream.source == VARIABLE else stream.source)
        for one in all_trials
    ]


def _figures(one: Trials, *, note: str) -> Row:
    (mre, mre_se), (mae, mae_se) = one.mean("relative"), one.mean("absolute")
    refusal = f"the ledger refused {len(one.refusals)} runs: " + "".join(one.refusals[:1])
    return {
        "mre": mre,
        "mre_se": mre_se,
        "mae": mae,
        "mae_se": mae_se,
        "clamped": one.mean("clamped")[0],
        "range": one.mean("range_error")[0],
        "paid": one.mean("paid")[0],
        "seconds": one.mean("seconds")[0],
        "refused": len(one.refusals) or None,
        "note": refusal if one.refusals else note,
    }


def _wide(plan: Plan, names: Sequence[str], progress: Progress) -> list[list[Row]]:
    """The four older mechanisms on streams of the Rome shape, one run each; judged rows first."""
    parts = []
    for number, (regime, (level, swing)) in enumerate(REGIMES.items()):
        bins = plan.other_bins if number else plan.rome_bins
        progress(_TICKS - 1, _TICKS, f"{bins:,} roads, {regime}")
        block = rome(bins=bins, level=level, swing=swing)
        rows: list[Row] = []
        for name in (name for name in OLDER if name in names):
            one = trials(
                name, block, epsilon=_ROME_EPSILON, window=_ROME_WINDOW, runs=1, fixed=regime
            )
            rows.append(
                {"stream": f"rome {len(block):,} x {bins:,}", "epsilon": _ROME_EPSILON}
                | {"window": _ROME_WINDOW, "mechanism": name}
                | _figures(one, note=regime)
            )
        parts.append(rows)
    return parts


def _absent(stream: Stream) -> Row:
    return {"stream": stream.name, "note": stream.absence}


def _block(stream: Stream) -> Integers:
    assert stream.block is not None
    return stream.block


def _ticker(progress: Progress, total: int) -> Callable[[int, str], None]:
    """A progress callback that counts steps, so that long streams count for more."""
    done, shown = 0, ""

    def tick(steps: int, what: str) -> None:
        nonlocal done, shown
        done, shown = done + steps, what or shown
        progress(min((_TICKS - 1) * done // max(total, 1), _TICKS - 1), _TICKS, shown)

    return tick


def _notes(plan: Plan, found: Sequence[Stream]) -> list[str]:
    notes = []
    if plan.steps is not None:
        notes.append(f"a short run: {plan.steps} steps, {plan.runs} runs each; judge by a full one")
    if absent := [one.name for one in found if one.block is None]:
        notes.append(f"absent streams: {', '.join(absent)}; {found[1].absence}")
    notes.append(
        "rome shape: budget absorption is ahead only where the daily swing is of the order of "
        "w / epsilon; choosing that stream is choosing the result: the rows show other regimes too"
    )
    return notes
