"""What the two papers on w-event privacy found, and whether the bench finds it too.

One sentence each, with its figure: "confirmed" where it holds at every place that was measured,
"refuted" where it holds at no more than half of them, "in part" between. The papers of
2014 and 2025 are named in `w_event_figures`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from dpstream.bench import w_event_figures as figures
from dpstream.bench import w_event_published as published
from dpstream.bench.harness import Row
from dpstream.bench.w_event_targets import OURS, SHOWN, cells_of

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
        for row in published.table(forms)
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
