"""w-event mechanisms on real and synthetic streams: relative and absolute error, budget, time.

Every registered mechanism over counts runs with its default parameters. Noise is fixed by name, so
a run gives the same errors again; times differ.

Steps per second include the ledger, digests and exact noise. They are taken by the processor time
of this process, since the clock on the wall would measure what else the machine does. Shared caches
still slow a processor down, so the same run is made several times, and the best time of each
stretch of steps is taken.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from benchmarks import w_event_figures as figures
from benchmarks.harness import Findings, Progress, Row, target
from benchmarks.streams import ROME, VARIABLE, Stream, rome, streams, synthetic_2
from benchmarks.w_event_figures import PUBLISHED
from benchmarks.w_event_findings import NOT_JUDGED, SHOWN, cells_of, findings, summaries, targets
from dpstream.evaluate.trials import Trials, trials, w_event_mechanisms, zeros
from dpstream.mechanisms import find
from dpstream.mechanisms.runner import Runner
from dpstream.records import Integers, Reals

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
            one = trials(
                name, block, epsilon=epsilon, window=window, runs=plan.runs, fixed=what,
                build=PUBLISHED.get(name), bounded=name not in PUBLISHED,
            )  # fmt: skip
            all_trials.append(one)
            tick(len(block), "")
        rows += cell_rows(stream, epsilon, window, [*all_trials, zeros(block)])
        if (epsilon, window) == SHOWN:
            curves[stream.name] = {
                each.mechanism: each.by_step() for each in all_trials if each.scores
            }
    wide = _wide(plan, names, progress)

    def last(what: str) -> None:
        progress(_TICKS - 1, _TICKS, what)

    mechanisms = [name for name in names if name not in PUBLISHED]
    more = figures.measure(present, mechanisms, plan.figures, last)
    epsilon, window = SHOWN
    forms = figures.measure_published(
        present, epsilon=epsilon, window=window, runs=plan.published_runs, tick=last
    )
    last("steps per second")
    speeds = measure_speed(mechanisms)
    progress(_TICKS, _TICKS, "done")
    sound = [row for row in forms if row["form"] == "sound"]
    others = [*(row for part in wide[1:] for row in part), *more, *sound]
    return Findings(
        rows=[
            *(*rows, *(row for part in wide for row in part), *more, *forms, *speeds),
            *(*figures.theta_rows(), *figures.character_rows(present)),
        ],
        targets=[*targets(rows, wide[0], others), *speed_targets(speeds)],
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


def delta_mre(errors: Mapping[str, float], among: Sequence[str] | None = None) -> dict[str, float]:
    """Each MRE over the smallest one of `among` (default: of all).

    >>> delta_mre({"a": 0.3, "b": 0.2, "zeros": 0.1}, among=["a", "b"])
    {'a': 1.4999999999999998, 'b': 1.0, 'zeros': 0.5}
    """
    known = [errors[name] for name in (errors if among is None else among) if name in errors]
    best = min((error for error in known if not math.isnan(error)), default=math.nan)
    return {
        name: 1.0 if error == best else error / best if best else math.inf
        for name, error in errors.items()
    }


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


_SPEED_EPSILON, _SPEED_WINDOW = 1, 120
AT_LEAST: Final = {1: 20_000, 1_000: 1_000}
"""Bins -> steps per second that every mechanism should reach."""

_ROUNDS: Final = {1: 8, 1_000: 3}
_STEPS: Final = {1: (_SPEED_WINDOW, 15 * _SPEED_WINDOW), 1_000: (_SPEED_WINDOW, _SPEED_WINDOW)}
"""Bins -> steps that are not timed (code is compiled, a window fills), and steps that are."""

_STRETCH: Final = {1: 100, 1_000: 10}  # steps that are timed together


def measure_speed(names: Sequence[str]) -> list[Row]:
    """A row per mechanism and number of bins."""
    return [
        {
            "part": "speed",
            "stream": f"{bins:,} bins" if bins > 1 else "1 bin",
            "mechanism": name,
            "epsilon": _SPEED_EPSILON,
            "window": _SPEED_WINDOW,
            "steps_per_second": _fastest(name, bins),
            "note": "by processor time",
        }
        for bins in AT_LEAST
        for name in names
    ]


def speed_targets(rows: Sequence[Row]) -> list[Row]:
    """The slowest mechanism is judged."""
    found = []
    for bins, bound in AT_LEAST.items():
        stream = f"{bins:,} bins" if bins > 1 else "1 bin"
        here = {
            row["mechanism"]: row["steps_per_second"] for row in rows if row["stream"] == stream
        }
        slowest = min(here, key=lambda name: here[name], default="none")
        found.append(
            target(
                f"steps/s of the slowest mechanism ({slowest}) at {stream}",
                here.get(slowest), ">=", bound, reason="no mechanism was measured",
            )
        )  # fmt: skip
    return found


def _fastest(name: str, bins: int) -> float:
    warm, timed = _STEPS[bins]
    block = _speed_block(bins, warm + timed)
    rounds = [_times(find(name), block, warm, _STRETCH[bins]) for _ in range(_ROUNDS[bins])]
    seconds: float = sum(min(times) for times in zip(*rounds, strict=True))
    return timed / max(seconds, 1e-9)


def _speed_block(bins: int, steps: int) -> Integers:
    """One bin: restless, then calm. Many: roads, whose traffic swings by about w / epsilon."""
    return synthetic_2(steps) if bins == 1 else rome(bins=bins, level=148, swing=0.9, steps=steps)


def _times(build: Any, block: Integers, warm: int, stretch: int) -> list[float]:
    """Seconds for each stretch of steps; noise is fixed, so that every round does the same."""
    runner = Runner(
        build(epsilon=_SPEED_EPSILON, window=_SPEED_WINDOW), secret=bytes(32), run_id=bytes(16)
    )
    for _ in runner.feed(block[:warm]):
        pass
    times = []
    for first in range(warm, len(block), stretch):
        began = time.process_time()
        for _ in runner.feed(block[first : first + stretch]):
            pass
        times.append(time.process_time() - began)
    return times


Curves = dict[str, dict[str, Reals]]
"""Absolute error by step, for each stream and mechanism."""

_DARK = 3.0  # a delta_MRE from here on has the darkest colour
_PANELS = 3
_COLOURS = ("#0b6e99", "#d1495b", "#8f6bb3", "#3a7d44", "#c77d1e", "#8a8f98")
_LINES = [(colour, line) for line in ("-", "--", ":") for colour in _COLOURS]


def draw(figure: Any, rows: Sequence[Row], curves: Curves, more: Sequence[Row] = ()) -> None:
    """One heat map per epsilon above, some streams' errors over time below, then the rest."""
    cells = [row for row in cells_of(rows) if row["window"] == SHOWN[1]]
    epsilons = sorted({row["epsilon"] for row in cells})
    if not epsilons:
        return
    figure.set_size_inches(4.6 * max(len(epsilons), _PANELS), 15)
    above, below, rest = figure.subfigures(3, 1, height_ratios=(1.3, 1, 1))
    panels = above.subplots(1, len(epsilons), sharey=True, squeeze=False)[0]
    for panel, epsilon in zip(panels, epsilons, strict=True):
        _heat(panel, [row for row in cells if row["epsilon"] == epsilon], epsilon)
    above.suptitle(f"delta_MRE: MRE over that of the best mechanism (w = {SHOWN[1]})")
    _over_time(below, curves)
    _others(rest, cells, more)


def _heat(panel: Any, cells: Sequence[Row], epsilon: float) -> None:
    streams = list(dict.fromkeys(row["stream"] for row in cells))
    names = list(dict.fromkeys(row["mechanism"] for row in cells))
    grid = np.full((len(streams), len(names)), np.nan)
    for row in cells:
        grid[streams.index(row["stream"]), names.index(row["mechanism"])] = row["delta_mre"]
    panel.imshow(np.log(grid), cmap="YlGnBu", vmin=0, vmax=math.log(_DARK), aspect="auto")
    for (i, j), value in np.ndenumerate(grid):
        text = "–" if math.isnan(value) else f"{value:.2f}" if value < 10 else f"{value:.0f}"
        light = value > math.sqrt(_DARK) * 1.2
        panel.text(
            j, i, text, ha="center", va="center", fontsize=7, color="white" if light else "black"
        )
    panel.set_xticks(range(len(names)), names, fontsize=7, rotation=50, ha="right")
    panel.set_yticks(range(len(streams)), streams, fontsize=8)
    panel.set_title(f"epsilon = {epsilon}", fontsize=9)


def _over_time(figure: Any, curves: Curves) -> None:
    """Absolute error by step, smoothed over a fifth of the window, for the first few streams."""
    chosen = _spread_out(list(curves))
    panels = figure.subplots(1, max(len(chosen), 1), squeeze=False)[0]
    for panel, stream in zip(panels, chosen, strict=False):
        looks = itertools.cycle(_LINES)
        for (name, errors), (colour, line) in zip(curves[stream].items(), looks, strict=False):
            smooth = min(max(SHOWN[1] // 5, 1), len(errors))
            means = np.convolve(errors, np.ones(smooth) / smooth, mode="valid")
            steps = np.arange(len(means)) + smooth
            panel.plot(steps, means, line, color=colour, linewidth=1, label=name)
        panel.set_yscale("log")
        panel.set_title(stream, fontsize=9)
        panel.set_xlabel("step")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("absolute error")
    figure.suptitle(f"error over time (epsilon = {SHOWN[0]}, w = {SHOWN[1]})")
    handles, labels = panels[0].get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, labels, loc="outside lower center", ncols=(len(labels) + 1) // 2, frameon=False
        )


def _others(figure: Any, cells: Sequence[Row], more: Sequence[Row]) -> None:
    """Range queries, then curves over w, change and number of groups, as far as they are there."""
    shown = (figures.W_ROADS, figures.W_CUP, figures.CHANGE_ROADS, figures.GROUPS_ROADS)
    axes = ("w", "w", "RMS of the change", "column groups")
    panels = figure.subplots(1, 1 + len(shown), squeeze=False)[0]
    last = max(row["epsilon"] for row in cells)
    ranges = [row for row in cells if row["epsilon"] == last and row["range"] == row["range"]]
    _bars(panels[0], ranges, f"range queries, epsilon = {last}")
    for panel, part, axis in zip(panels[1:], shown, axes, strict=True):
        rows = [row for row in more if row["part"] == part]
        for name, (colour, line) in zip(
            dict.fromkeys(row["mechanism"] for row in rows), _LINES, strict=False
        ):
            points = [(row["at"], row["mae"]) for row in rows if row["mechanism"] == name]
            panel.plot(*zip(*points, strict=True), line, color=colour, marker=".", label=name)
        panel.set_title(f"{part}: MAE", fontsize=9)
        panel.set_xlabel(axis)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        if rows:
            panel.set_yscale("log")
            panel.legend(fontsize=6, frameon=False)


def _bars(panel: Any, rows: Sequence[Row], title: str) -> None:
    """Mean relative error of the queries, over the streams of one bin."""
    names = list(dict.fromkeys(row["mechanism"] for row in rows))
    means = [np.mean([row["range"] for row in rows if row["mechanism"] == name]) for name in names]
    panel.barh(names, means, color=_COLOURS[0])
    panel.invert_yaxis()
    panel.tick_params(labelsize=7)
    panel.set_title(title, fontsize=9)
    panel.set_xlabel("mean relative error")
    panel.spines[["top", "right"]].set_visible(False)


def _spread_out(streams: Sequence[str]) -> list[str]:
    """A few of the streams: the first, the last, and one in the middle."""
    places = sorted({0, len(streams) // 2, len(streams) - 1}) if streams else []
    return [streams[place] for place in places][:_PANELS]
