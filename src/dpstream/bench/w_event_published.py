"""What the published forms claim, what they spend, and what soundness costs in error.

A published form that spends more than it claims runs under a book that counts and does not refuse;
`spent` is the worst window by that book, as a multiple of the epsilon claimed. (Noise that is
drawn once for the whole stream is charged to every window, and each positive too: their sum grows
with the stream, which is what the form's proof would have to pay.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from dpstream.audit.controls.published_mechanisms import (
    AdaPubPublished,
    ColumnsApart,
    DsatPublished,
    PegasusWPublished,
    SpasPublished,
)
from dpstream.bench.harness import Row
from dpstream.bench.streams import Stream
from dpstream.bench.trials import Build, Trials, trials
from dpstream.mechanisms import find
from dpstream.mechanisms.w_event.budget_absorption import BudgetAbsorption
from dpstream.mechanisms.w_event.budget_distribution import BudgetDistribution

PART: Final = "published forms"
GROUPS: Final = 5


@dataclass(frozen=True, kw_only=True)
class Form:
    """A scheme in its sound form and as it was published (None: they are the same)."""

    scheme: str
    sound: Build
    published: Build | None = None
    many_bins: bool = False  # differs on streams of several bins only


def forms() -> list[Form]:
    """All schemes of the papers."""
    made = [Form(scheme=name, sound=find(name)) for name in _AS_PUBLISHED]
    made += [
        Form(scheme="spas", sound=find("spas"), published=SpasPublished),
        Form(scheme="dsat", sound=find("dsat"), published=DsatPublished),
        Form(scheme="fast_w", sound=find("fast_w"), published=ColumnsApart, many_bins=True),
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


def measure(
    streams: Sequence[Stream],
    *,
    epsilon: float,
    window: int,
    runs: int,
    tick: Callable[[str], None],
) -> list[Row]:
    """Two rows per scheme and stream, sound and as published."""
    rows: list[Row] = []
    for form in forms():
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
                rows.append(_row(form.scheme, name, stream.name, epsilon, window, one))
    return rows


def _row(scheme: str, form: str, stream: str, epsilon: float, window: int, one: Trials) -> Row:
    return {
        "part": PART,
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


def table(rows: Sequence[Row]) -> list[Row]:
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
