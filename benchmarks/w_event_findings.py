"""What the w-event bench is judged by, and whether it finds what the two papers found.

One sentence for each finding, with its figure: "confirmed" where it holds at every place that was
measured, "refuted" where it holds at no more than half of them, "in part" between. The papers of
2014 and 2025 are named in `w_event_figures`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Final

from benchmarks import w_event_figures as figures
from benchmarks.harness import Row, target
from benchmarks.streams import ROME
from benchmarks.w_event_figures import PUBLISHED
from dpstream.evaluate.trials import ZEROS

NOT_JUDGED: Final = frozenset({ZEROS, *PUBLISHED})

OURS: Final = ("pacer",)
"""Mechanisms that no paper has: they are not among the published schemes."""

SHOWN: Final = (0.5, 120)
"""The epsilon and window at which ranks are taken and plots are drawn."""

SHARE_WITHIN, WITHIN, WORST = 0.9, 1.2, 1.5
TOP, TOP_STREAMS, ALL_STREAMS = 3, 7, 9
SECONDS = 30


def targets(rows: Sequence[Row], wide: Sequence[Row], also: Sequence[Row] = ()) -> list[Row]:
    """Every judged figure; what was not measured says why.

    `wide`: the judged rows of the Rome shape; `also`: others that the ledger must not have refused.
    """
    cells = cells_of(rows)
    return [*_pacer(cells), _ledger([*cells, *wide, *also]), _spas(cells), *_absorption(wide)]


def cells_of(rows: Sequence[Row]) -> list[Row]:
    """The rows that a mechanism has on one of the nine streams."""
    return [row for row in rows if "delta_mre" in row and row["mechanism"] not in NOT_JUDGED]


def summaries(rows: Sequence[Row]) -> list[str]:
    """What the rows say together and no target asks, in sentences."""
    cells, found = cells_of(rows), []
    if (count := _top_streams(cells, "clamped")) is not None:
        found.append(
            f"with every scheme clamped at 0, spas is in the top {TOP} on {count} of "
            f"{ALL_STREAMS} streams"
        )
    pacer = {_cell(row): row for row in cells if row["mechanism"] == "pacer"}
    if pacer:
        baseline = {_cell(row): row["mre"] for row in rows if row.get("mechanism") == ZEROS}
        above = sum(not row["mre"] <= baseline[key] for key, row in pacer.items())
        clamped, absolute = (_within(cells, pacer, key) for key in ("clamped", "mae"))
        found.append(
            f"pacer is within {WITHIN} of the best in {clamped:.0%} of cells when every mechanism "
            f"is clamped at 0, and in {absolute:.0%} by MAE; its MRE is above that of zeros, "
            f"which need no data, in {above / len(pacer):.0%}"
        )
    return found


def _pacer(cells: Sequence[Row]) -> list[Row]:
    deltas = [_number(row["delta_mre"]) for row in cells if row["mechanism"] == "pacer"]
    why = "pacer is not registered"
    within = sum(delta <= WITHIN for delta in deltas) / len(deltas) if deltas else None
    name = f"pacer: share of {len(deltas)} cells with delta_MRE <= {WITHIN}"
    return [
        target(name, within, ">=", SHARE_WITHIN, reason=why),
        target("pacer: worst delta_MRE", max(deltas, default=None), "<=", WORST, reason=why),
    ]


def _ledger(measured: Sequence[Row]) -> Row:
    refused = sum(row["refused"] or 0 for row in measured)
    return target("runs that the ledger refused", refused, "==", 0)


def _spas(cells: Sequence[Row]) -> Row:
    schemes = len(published_schemes(cells))
    epsilon, window = SHOWN
    name = f"spas: streams in the top {TOP} of {schemes} published schemes"
    why = "spas is not registered, or not all nine streams are there"
    value = _top_streams(cells, "mre")
    return target(f"{name}, epsilon {epsilon}, w {window}", value, ">=", TOP_STREAMS, reason=why)


def _absorption(wide: Sequence[Row]) -> list[Row]:
    ours = next((row for row in wide if row["mechanism"] == "budget_absorption"), None)
    others = [_number(row["mae"]) for row in wide if row is not ours]
    why, ratio, seconds = "budget_absorption is not registered", None, None
    if ours and others:
        ratio = _number(ours["mae"]) / min(others)
        if ours["stream"].endswith(f"{ROME[0]:,} x {ROME[1]:,}"):
            seconds = _number(ours["seconds"])
    return [
        target(
            "rome shape, swing of the order of w / epsilon: MAE of budget absorption over the "
            "best of BD, Uniform, Sample",
            ratio, "<=", 1, reason=why,
        ),
        target(
            f"{ROME[0]:,} x {ROME[1]:,} through budget absorption: seconds",
            seconds, "<=", SECONDS, reason="measured in full runs only",
        ),
    ]  # fmt: skip


def published_schemes(cells: Sequence[Row]) -> list[str]:
    """The schemes of the papers that were measured."""
    return [name for name in dict.fromkeys(row["mechanism"] for row in cells) if name not in OURS]


def _top_streams(cells: Sequence[Row], figure: str) -> int | None:
    """On how many of the nine streams spas is in the top three of the published schemes."""
    at = [row for row in cells if (row["epsilon"], row["window"]) == SHOWN]
    streams = list(dict.fromkeys(row["stream"] for row in at))
    if len(streams) < ALL_STREAMS or "spas" not in published_schemes(at):
        return None
    count = 0
    for stream in streams:
        here = [row for row in at if row["stream"] == stream and row["mechanism"] not in OURS]
        order = sorted(here, key=lambda row: _number(row[figure]))
        count += "spas" in [row["mechanism"] for row in order[:TOP]]
    return count


def _within(cells: Sequence[Row], ours: dict[Any, Row], figure: str) -> float:
    """In which share of the cells ours is within the factor of the best, by another figure."""
    best: dict[Any, float] = {}
    for row in cells:
        best[_cell(row)] = min(best.get(_cell(row), math.inf), _number(row[figure]))
    near = sum(_number(row[figure]) <= WITHIN * best[key] for key, row in ours.items())
    return near / len(ours)


def _cell(row: Row) -> tuple[str, float, int]:
    return row["stream"], row["epsilon"], row["window"]


def _number(value: float) -> float:
    """A figure that was not measured (a refused mechanism's) is worse than any other."""
    return math.inf if math.isnan(value) else value


_BASELINES = ("uniform", "sample", "fast_w")
_OURS_2014 = ("budget_distribution", "budget_absorption")
Errors = dict[Any, dict[str, float]]
"""Place on a figure -> mechanism -> error."""


def findings(rows: Sequence[Row], more: Sequence[Row], forms: Sequence[Row]) -> list[str]:
    """A sentence for each finding that can be judged by these rows."""
    cells = [row for row in cells_of(rows) if row["mechanism"] not in OURS]
    at_w = [row for row in cells if row["window"] == SHOWN[1]]
    of = {part: [row for row in more if row["part"] == part] for part in _parts(more)}
    by_w = [row for row in of.get(figures.W_STREAMS, []) if row["mechanism"] not in OURS]
    found = [
        _best("2025, Figure 4", "spas", _errors(at_w, "mre", "stream", "epsilon")),
        _worst("2025, Figure 4", "budget_distribution", _errors(at_w, "mre", "stream", "epsilon")),
        _gains("2025, Figure 4", "uniform", "sample", "epsilon", at_w),
        _best("2025, Figure 5", "spas", _errors(by_w, "mre", "stream", "at")),
        _gains("2025, Figure 5", "sample", "uniform", "at", by_w),
        _spread(of.get(figures.LENGTHS, [])),
        _shares(of.get(figures.SHARES, [])),
        _best("2025, Figure 9", "spas", _ranges(at_w, (0.7, 0.9)), what="range queries"),
        _best("2025, Figure 10", "spas", _ranges(by_w, (80, 120), "at"), what="range queries"),
    ]
    found += [
        _best(_title(part), "budget_absorption", _errors(of.get(part, []), "mae", "at"))
        for part in (figures.W_ROADS, figures.W_CUP, figures.CHANGE_ROADS, figures.CHANGE_CUP)
    ]
    for part in (figures.CHANGE_ROADS, figures.CHANGE_CUP):
        found.append(_both_ahead(_title(part), _errors(of.get(part, []), "mae", "at")))
        found.append(_grows(_title(part), _errors(of.get(part, []), "mae", "at")))
    for part in (figures.GROUPS_ROADS, figures.GROUPS_CUP):
        found += [_groups(_title(part), of.get(part, []), name) for name in _OURS_2014]
    return [*(one for one in found if one), *_costs(forms)]


def _costs(forms: Sequence[Row]) -> list[str]:
    """What the published forms spend, and what the sound ones cost."""
    return [
        f"{row['scheme']}: as published {row['published']:.3g} epsilon in the worst window, sound "
        f"{row['sound']:.3g}; MRE of the sound form {row['times']:.2f} times the published one's"
        for row in figures.published_table(forms)
        if row["times"] is not None
    ]


def _said(where: str, claim: str, good: int, places: int, figure: str = "") -> str:
    verdict = "confirmed" if good == places else "refuted" if 2 * good <= places else "in part"
    return f"{where}: {claim}: {verdict}, {good} of {places} places{figure}"


def _best(where: str, name: str, errors: Errors, *, what: str = "error") -> str:
    places = [place for place in errors.values() if name in place and len(place) > 1]
    if not places:
        return ""
    over = sorted(place[name] / min(place.values()) for place in places)
    figure = f"; {what} over the best: median {over[len(over) // 2]:.2f}, worst {over[-1]:.2f}"
    return _said(where, f"{name} is the best scheme", over.count(1.0), len(places), figure)


def _worst(where: str, name: str, errors: Errors) -> str:
    places = [place for place in errors.values() if name in place and len(place) > 1]
    good = sum(place[name] == max(place.values()) for place in places)
    return _said(where, f"{name} is the worst scheme", good, len(places)) if places else ""


def _gains(where: str, name: str, other: str, axis: str, rows: Sequence[Row]) -> str:
    """Along the axis, from its first to its last place, `name` gains on `other`."""
    good, streams = 0, _values(rows, "stream")
    for stream in streams:
        errors = _errors([row for row in rows if row["stream"] == stream], "mre", axis)
        places = [place for place in sorted(errors) if {name, other} <= errors[place].keys()]
        if len(places) < 2:
            return ""
        ratios = [errors[place][name] / errors[place][other] for place in (places[0], places[-1])]
        good += ratios[1] < ratios[0]
    grown = "epsilon" if axis == "epsilon" else "w"
    claim = f"{name} gains on {other} as {grown} grows"
    return _said(where, claim, good, len(streams)) if streams else ""


def _spread(rows: Sequence[Row]) -> str:
    """Looking back over one, two or three windows makes little difference: 10% at most."""
    errors = _errors([row for row in rows if "windows" in row["mechanism"]], "mre", "stream")
    if not errors:
        return ""
    spread = [max(place.values()) / min(place.values()) for place in errors.values()]
    good = sum(one <= 1.1 for one in spread)
    claim = "how many windows spas looks back on hardly matters (10%)"
    return _said("2025, Figure 7", claim, good, len(spread), f"; at most {max(spread):.2f} times")


def _shares(rows: Sequence[Row]) -> str:
    errors = _errors(rows, "mre", "stream")
    good = sum(place["spas, 1 : 3"] == min(place.values()) for place in errors.values())
    claim = "the smallest share for tests (1 : 3) is the best"
    return _said("2025, Figure 8", claim, good, len(errors)) if errors else ""


def _both_ahead(where: str, errors: Errors) -> str:
    def ahead(place: dict[str, float]) -> bool:
        others = min(place[name] for name in _BASELINES if name in place)
        return all(place[name] < others for name in _OURS_2014)

    needed = {*_BASELINES, *_OURS_2014}
    return _count(where, "both BD and BA beat Uniform, Sample and FAST", errors, needed, ahead)


def _grows(where: str, errors: Errors) -> str:
    """From small changes to large ones; the axis of merged steps grows with them too."""
    order = [errors[place] for place in sorted(errors)]
    steps = [(a, b) for a, b in pairwise(order) if "budget_absorption" in a]
    good = sum(b["budget_absorption"] > a["budget_absorption"] for a, b in steps)
    claim = "the error of budget_absorption grows with the change from step to step"
    return _said(where, claim, good, len(steps)) if steps else ""


def _groups(where: str, rows: Sequence[Row], name: str) -> str:
    errors = {row["at"]: row["mae"] for row in rows if row["mechanism"] == name}
    if len(errors) < 2 or 1 not in errors:
        return ""
    best = min((at for at in errors if at > 1), key=lambda at: errors[at])
    less = errors[best] / errors[1]
    verdict = "confirmed" if less < 1 else "refuted"
    return (
        f"{where}: column groups lower the error of {name}: {verdict} for groups that are charged "
        f"soundly, {less:.2f} times the MAE of one group with {best}"
    )


def _count(
    where: str,
    claim: str,
    errors: Errors,
    needed: set[str],
    holds: Callable[[dict[str, float]], bool],
) -> str:
    places = [place for place in errors.values() if needed <= place.keys()]
    return _said(where, claim, sum(map(holds, places)), len(places)) if places else ""


def _ranges(rows: Sequence[Row], places: Iterable[float], axis: str = "epsilon") -> Errors:
    kept = [row for row in rows if row[axis] in tuple(places)]
    return _errors(kept, "range", "stream", axis)


def _errors(rows: Sequence[Row], figure: str, *axes: str) -> Errors:
    errors: Errors = {}
    for row in rows:
        if math.isnan(row[figure]):
            continue  # refused, or not measured there
        place = tuple(row[axis] for axis in axes)
        errors.setdefault(place if len(axes) > 1 else place[0], {})[row["mechanism"]] = row[figure]
    return errors


def _values(rows: Sequence[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def _parts(rows: Sequence[Row]) -> list[str]:
    return _values(rows, "part")


def _title(part: str) -> str:
    number, _, figure = part.partition(" ")
    return f"{number}, {figure.capitalize()}"
