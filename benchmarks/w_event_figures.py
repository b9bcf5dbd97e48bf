"""The other figures of the two papers on w-event privacy, and what their published forms spend.

Figures of 2014 are those of Kellaris, Papadopoulos, Xiao, Papadias, "Differentially Private Event
Sequences over Infinite Streams", whose Rome stream was never published: a generated one of its
shape stands in. Figures of 2025 are those of "SPAS: Continuous Release of Data Streams under
w-Event Differential Privacy".

A published form that spends more than it claims runs under a book that counts and does not refuse;
`spent` is the worst window by that book, as a multiple of the epsilon claimed. (Noise that is
drawn once for the whole stream is charged to every window, and each positive too: their sum grows
with the stream, which is what the form's proof would have to pay.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Final

import numpy as np

from benchmarks.harness import Row
from benchmarks.streams import Stream, rome
from dpstream.audit.controls.published_mechanisms import (
    AdaPubPublished,
    ColumnsApart,
    DsatPublished,
    PegasusWPublished,
    SpasPublished,
)
from dpstream.evaluate.trials import Build, Character, Trials, trials
from dpstream.mechanisms import find
from dpstream.mechanisms.base import HistogramMechanism
from dpstream.mechanisms.w_event.budget_absorption import BudgetAbsorption
from dpstream.mechanisms.w_event.budget_distribution import BudgetDistribution
from dpstream.mechanisms.w_event.rescue_dp import RescueDp
from dpstream.mechanisms.w_event.spas import (
    Spas,
    SpasState,
    TwoWindows,
    best_count,
    window_variance,
)
from dpstream.privacy.amounts import on_grid
from dpstream.records import Integers

EPSILON: Final = 1.0  # of all these figures
WINDOW: Final = 120  # of all but those that vary it
FIVE: Final = ("uniform", "sample", "fast_w", "budget_distribution", "budget_absorption")
GROUPED: Final = {
    "budget_distribution": BudgetDistribution,
    "budget_absorption": BudgetAbsorption,
}
W_STREAMS: Final = "2025 figure 5"
LENGTHS, SHARES = "2025 figure 7", "2025 figure 8"
THETA, CHARACTER, THETAS = "2025 figure 2", "2025 figure 6", "2025 theta"
W_ROADS, W_CUP = "2014 figure 6", "2014 figure 7"
CHANGE_ROADS, CHANGE_CUP = "2014 figure 8", "2014 figure 9"
GROUPS_ROADS, GROUPS_CUP = "2014 figure 10a", "2014 figure 10b"

Tick = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured."""

    windows_streams: Sequence[int] = (80, 120, 160, 200, 240)
    windows: Sequence[int] = (40, 80, 120, 160, 200)
    groups: Sequence[int] = (1, 5, 20, 50, 150)
    groups_cup: Sequence[int] = (1, 2, 5, 10)
    bins: int = 5_000
    steps: int = 1_442
    runs: int = 3


SMALL: Final = Size(
    windows_streams=(80, 240), windows=(40, 200), groups=(1, 20), groups_cup=(1, 5), bins=100,
    steps=240, runs=1,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SpasWith(Spas, identity="bench/spas", keys="windows share"):
    """`Spas` that looks back over so many windows, or gives its tests another share of epsilon."""

    windows: int = 2
    share: Fraction = Fraction(1, 4)

    @cached_property
    def testing(self) -> Fraction:
        """epsilon_s, for the tests."""
        return on_grid(self.budget * self.share)

    def start(self) -> SpasState:
        """Nothing published, nothing spent; with "two_windows", as many as asked for."""
        state = super().start()
        if self.update != "two_windows":
            return state
        changes = TwoWindows(window=self.window, windows=self.windows)
        return SpasState(published=state.published, runs=state.runs, changes=changes)


def measure(streams: Sequence[Stream], names: Sequence[str], size: Size, tick: Tick) -> list[Row]:
    """One row per figure, stream, point on its axis and mechanism."""
    present = [one for one in streams if one.block is not None]
    cup = next((one.block for one in present if one.name == "world cup"), None)
    roads = rome(bins=size.bins, level=148, swing=0.9, steps=size.steps)
    road = f"roads {len(roads):,} x {size.bins:,}"
    run = functools.partial(_rows, size=size, tick=tick)
    rows: list[Row] = []
    for stream in present:
        own = _block(stream)
        for w in size.windows_streams:
            rows += run(W_STREAMS, stream.name, own, w, _named(names), window=w)
        rows += run(LENGTHS, stream.name, own, None, _lengths())
        rows += run(SHARES, stream.name, own, None, _shares())
        rows += run(THETAS, stream.name, own, None, _thetas())
    five = _named([name for name in FIVE if name in names])
    wide = [(road, roads, W_ROADS, GROUPS_ROADS, size.groups)]
    if cup is not None:
        wide.append(("world cup", cup, W_CUP, GROUPS_CUP, size.groups_cup))
    for name, block, by_w, by_groups, groups in wide:
        for w in size.windows:
            rows += run(by_w, name, block, w, five, window=w)
        for count in groups:
            grouped: dict[str, Build] = {
                scheme: functools.partial(build, groups=count) for scheme, build in GROUPED.items()
            }
            rows += run(by_groups, name, block, count, grouped)
    for rms, part in quarters(roads):
        rows += run(CHANGE_ROADS, road, part, rms, five)
    if cup is not None:
        for merged in (8, 4, 2, 1):
            rows += run(CHANGE_CUP, "world cup", merge(cup, merged), merged, five)
    return rows


def quarters(block: Integers) -> Iterator[tuple[float, Integers]]:
    """The columns in four parts by how much they change: the mean RMS of a part, and the part.

    >>> [round(rms, 1) for rms, _ in quarters(np.array([[0, 0, 0, 0], [1, 4, 2, 3]]))]
    [1.0, 2.0, 3.0, 4.0]
    """
    rms = np.sqrt(np.mean(np.square(np.diff(block, axis=0), dtype=np.float64), axis=0))
    for part in np.array_split(np.argsort(rms, kind="stable"), 4):
        yield float(rms[part].mean()), np.ascontiguousarray(block[:, np.sort(part)])


def merge(block: Integers, steps: int) -> Integers:
    """Sums of `steps` successive steps: fewer timestamps a day, larger changes between them.

    >>> merge(np.arange(5)[:, None], 2).ravel().tolist()
    [1, 5]
    """
    whole = len(block) // steps * steps
    merged: Integers = block[:whole].reshape(-1, steps, block.shape[1]).sum(axis=1)
    return merged


def _rows(
    part: str,
    stream: str,
    block: Integers,
    at: float | None,
    builds: dict[str, Build],
    *,
    size: Size,
    tick: Tick,
    window: int = WINDOW,
) -> list[Row]:
    rows: list[Row] = []
    for name, build in builds.items():
        tick(f"{part}: {name} on {stream}")
        one = trials(
            name, block, epsilon=EPSILON, window=window, runs=size.runs,
            fixed=f"{part}, {stream}, {at}, {name}", build=build,
        )  # fmt: skip
        rows.append(
            {
                "part": part,
                "stream": stream,
                "at": at,
                "epsilon": EPSILON,
                "window": window,
                "mechanism": name,
                "mre": one.mean("relative")[0],
                "mae": one.mean("absolute")[0],
                "range": one.mean("range_error")[0],
                "refused": len(one.refusals) or None,
                "note": "",
            }
        )
    return rows


def _named(names: Sequence[str]) -> dict[str, Build]:
    return {name: find(name) for name in names}


def _lengths() -> dict[str, Build]:
    """What C* looks back on: one, two or three windows, everything, or with decay."""
    found: dict[str, Build] = {
        f"spas, {count} windows": functools.partial(SpasWith, windows=count) for count in (1, 2, 3)
    }
    for update in ("all", "decay"):
        found[f"spas, {update}"] = functools.partial(SpasWith, update=update)
    return found


def _shares() -> dict[str, Build]:
    """epsilon_s : epsilon_p = 1 : 3, 1 : 2, 1 : 1."""
    return {
        f"spas, 1 : {rest}": functools.partial(SpasWith, share=Fraction(1, 1 + rest))
        for rest in (3, 2, 1)
    }


def _thetas() -> dict[str, Build]:
    """The share of held steps that C* takes the tests to have missed."""
    return {
        f"spas, theta = 1/{parts}": functools.partial(Spas, theta=Fraction(1, parts))
        for parts in (2, 3, 4)
    }


def theta_rows() -> list[Row]:
    """Figure 2 of the SPAS paper, from its formula: counts for one theta, where another one holds.

    >>> best = [row for row in theta_rows() if row["at"] == 0.5]
    >>> min(best, key=lambda row: row["variance"])["mechanism"]
    'count for theta = 1/2'
    """
    thetas = (Fraction(1, 2), Fraction(1, 3), Fraction(1, 4))
    counts = {theta: best_count(10.0, 1.0, 10, float(theta)) for theta in thetas}
    return [
        {
            "part": THETA,
            "note": "",
            "stream": "by its formula",
            "at": at / 10,
            "mechanism": f"count for theta = {theta}",
            "variance": window_variance(count, 10.0, 1.0, 10, at / 10),
        }
        for at in range(1, 11)
        for theta, count in counts.items()
    ]


def character_rows(streams: Sequence[Stream]) -> list[Row]:
    """Figure 6 of the SPAS paper: how restless each stream is, and how `compare` calls it."""
    rows = []
    for stream in streams:
        if stream.block is None:
            continue
        for epsilon, window in [(e, WINDOW) for e in (0.1, 0.5, 0.9)] + [
            (1.0, w) for w in (80, 240)
        ]:
            found = Character.of(stream.block, epsilon=epsilon, window=window)
            rows.append(
                {
                    "part": CHARACTER,
                    "note": "",
                    "stream": stream.name,
                    "at": epsilon,
                    "window": window,
                }
                | {"epsilon": epsilon, "mechanism": found.words().partition(":")[0]}
                | {"step": found.step, "within": found.window, "printed": found.printed}
            )
    return rows


def _block(stream: Stream) -> Integers:
    assert stream.block is not None
    return stream.block


PUBLISHED_PART: Final = "published forms"
GROUPS: Final = 5

PUBLISHED: Final[dict[str, type[HistogramMechanism]]] = {"spas as published": SpasPublished}
"""Forms that overspend what they claim: run under a book that lets them, shown and never judged."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """A scheme in its sound form and as it was published (None: they are the same)."""

    scheme: str
    sound: Build
    published: Build | None = None
    many_bins: bool = False  # differs on streams of several bins only


def published_forms() -> list[Form]:
    """All schemes of the papers."""
    made = [Form(scheme=name, sound=find(name)) for name in _AS_PUBLISHED]
    made += [
        Form(scheme="spas", sound=find("spas"), published=SpasPublished),
        Form(scheme="dsat", sound=find("dsat"), published=DsatPublished),
        Form(scheme="fast_w", sound=find("fast_w"), published=ColumnsApart, many_bins=True),
        Form(
            scheme="rescue_dp",
            sound=find("rescue_dp"),
            published=functools.partial(ColumnsApart, scheme=RescueDp),
            many_bins=True,
        ),
        Form(scheme="pegasus_w", sound=find("pegasus_w"), published=PegasusWPublished),
        Form(scheme="adapub", sound=find("adapub"), published=AdaPubPublished),
    ]
    made += [
        Form(
            scheme=f"{name}, {GROUPS} column groups",
            sound=functools.partial(scheme, groups=GROUPS),
            published=functools.partial(ColumnsApart, scheme=scheme, groups=GROUPS),
            many_bins=True,
        )
        for name, scheme in (
            ("budget_distribution", BudgetDistribution),
            ("budget_absorption", BudgetAbsorption),
        )
    ]
    return made


_AS_PUBLISHED: Final = ("uniform", "sample", "budget_distribution", "budget_absorption")


def measure_published(
    streams: Sequence[Stream],
    *,
    epsilon: float,
    window: int,
    runs: int,
    tick: Callable[[str], None],
) -> list[Row]:
    """Two rows per scheme and stream, sound and as published."""
    rows: list[Row] = []
    for form in published_forms():
        for stream in streams:
            if stream.block is None or (form.many_bins and stream.block.shape[1] == 1):
                continue
            tick(f"{form.scheme}, published and sound, on {stream.name}")
            for name, build in (("sound", form.sound), ("published", form.published)):
                if build is None:
                    continue
                one = trials(
                    form.scheme, stream.block, epsilon=epsilon, window=window, runs=runs,
                    fixed=f"{stream.name}, {form.scheme}, {name}", build=build,
                    bounded=name == "sound",
                )  # fmt: skip
                rows.append(_published_row(form.scheme, name, stream.name, epsilon, window, one))
    return rows


def _published_row(
    scheme: str, form: str, stream: str, epsilon: float, window: int, one: Trials
) -> Row:
    return {
        "part": PUBLISHED_PART,
        "stream": stream,
        "epsilon": epsilon,
        "window": window,
        "mechanism": scheme,
        "form": form,
        "mre": one.mean("relative")[0],
        "mae": one.mean("absolute")[0],
        "spent": max((score.spent for score in one.scores), default=math.nan),
        "refused": len(one.refusals) or None,
        "note": "",
    }


def published_table(rows: Sequence[Row]) -> list[Row]:
    """Per scheme: the worst window of each form over all streams, and what soundness costs.

    `times`: MRE of the sound form over that of the published one, geometric mean over the streams.
    """
    found: list[Row] = []
    for scheme in dict.fromkeys(row["mechanism"] for row in rows):
        mine = [row for row in rows if row["mechanism"] == scheme]
        by_form = {
            form: {row["stream"]: row for row in mine if row["form"] == form}
            for form in ("sound", "published")
        }
        both = [s for s in by_form["sound"] if s in by_form["published"]]
        logs = [math.log(by_form["sound"][s]["mre"] / by_form["published"][s]["mre"]) for s in both]
        worst = {
            form: max((row["spent"] for row in cells.values()), default=None)
            for form, cells in by_form.items()
        }
        times = math.exp(sum(logs) / len(logs)) if logs else None
        found.append({"scheme": scheme, **worst, "times": times})
    return found
