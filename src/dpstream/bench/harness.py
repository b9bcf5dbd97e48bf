"""Run one bench: measure, judge its targets, write its JSON and its plot.

A bench is a function `(quick=..., progress=...) -> Findings`, named in `_REGISTRY` and imported
only when it runs.
"""

from __future__ import annotations

import importlib
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from dpstream.bench.machine import describe
from dpstream.errors import InvalidParameter, MissingDependency

Row = dict[str, Any]
Result = dict[str, Any]
Progress = Callable[[int, int, str], None]
"""Called with (parts done, parts in all, what is measured next)."""

# Name -> where its function is, and one line about it.
_REGISTRY: Final = {
    "noise": (
        "dpstream.bench.noise:measure",
        "exact samples per second on one core, against opendp, diffprivlib and numpy",
    ),
    "counters": (
        "dpstream.bench.counters:measure",
        "errors, state and speed of the continual counters, and of accounting",
    ),
    "w_event": (
        "dpstream.bench.w_event:measure",
        "errors of the w-event mechanisms on real and synthetic streams",
    ),
    "dpi": (
        "dpstream.bench.dpi:measure",
        "distributions for ever under user-level privacy: errors, budget left, time",
    ),
    "delayed": (
        "dpstream.bench.delayed:measure",
        "errors of the mechanisms with a delay, beside their published forms, and steps/s",
    ),
    "recovery": (
        "dpstream.bench.recovery:measure",
        "kill -9 and restart, again and again: the same bytes, and how long a restart takes",
    ),
    "throughput": (
        "dpstream.bench.throughput:measure",
        "records per second from files to durable releases, against opendp, pipeline-dp, spark",
    ),
    "spark": (
        "dpstream.bench.spark:measure",
        "the Spark engine against Spark's plain group-by on one cluster, and killed as it runs",
    ),
    "sqlp": (
        "dpstream.bench.sqlp:measure",
        "the continual GROUP BY against the DP-SQLP paper's tables, figures and baselines",
    ),
    "logs": (
        "dpstream.bench.logs:measure",
        "the continual GROUP BY on two real event logs: keys found, errors, time",
    ),
    "serve": (
        "dpstream.bench.serve:measure",
        "clients that follow a server's events while its pipeline reads as fast as it can",
    ),
    "live": (
        "dpstream.bench.live:measure",
        "1, 5 and 20 queries over one live source: rows a second, delays, rows missed",
    ),
    "queries": (
        "dpstream.bench.queries:measure",
        "SQL on real event logs, from the command and from Python: the same releases",
    ),
    "connectors": (
        "dpstream.bench.connectors:measure",
        "records per second of each source and sink, beside files",
    ),
}
BENCHES: Final[dict[str, str]] = {name: line for name, (_, line) in _REGISTRY.items()}

_OPERATORS: Final = {">=": operator.ge, "<=": operator.le, "==": operator.eq}


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a bench found: rows of its table, judged targets, versions of peers, how to draw it."""

    rows: Sequence[Row]
    targets: Sequence[Row]
    peers: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    draw: Callable[[Any], None] | None = None
    """Draws on an empty matplotlib figure."""


def target(name: str, value: float | None, op: str, bound: float, *, reason: str = "") -> Row:
    """One judged target; without a value it is neither reached nor missed, and says why.

    >>> target("records/s", 5.0, ">=", 3.0)["reached"]
    True
    >>> target("times opendp", None, ">=", 20, reason="no opendp here")["reached"] is None
    True
    """
    if op not in _OPERATORS:
        raise InvalidParameter(f"a target's op must be one of {', '.join(_OPERATORS)}; got {op!r}")
    row: Row = {"name": name, "value": value, "op": op, "bound": bound}
    if value is None:
        if not reason:
            raise InvalidParameter(f"target {name!r} has no value; say why with reason=")
        return row | {"reached": None, "reason": reason}
    if not math.isfinite(value):
        return row | {"value": None, "reached": False, "reason": f"the value measured is {value}"}
    return row | {"reached": bool(_OPERATORS[op](value, bound))}


def run(name: str, *, quick: bool, out: Path, progress: Progress | None = None) -> Result:
    """Run the bench `name`; write `out/name.json` and `out/name.png`; return the JSON's content."""
    if name not in _REGISTRY:
        raise InvalidParameter(f"a bench must be one of {', '.join(_REGISTRY)}; got {name!r}")
    module, _, function = _REGISTRY[name][0].partition(":")
    measure = getattr(importlib.import_module(module), function)
    found: Findings = measure(quick=quick, progress=progress or (lambda *_: None))
    result: Result = {
        "bench": name,
        "version": version("dpstream"),
        "machine": describe(),
        "quick": quick,
        "peers": dict(found.peers),
        "rows": [_finite(row) for row in found.rows],
        "targets": [_finite(row) for row in found.targets],
        "notes": list(found.notes),
    }
    out.mkdir(parents=True, exist_ok=True)
    try:
        _plot(found, out / f"{name}.png")
    except MissingDependency as absent:
        result["notes"].append(str(absent))
    text = json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False)
    (out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    return result


def _finite(row: Mapping[str, Any]) -> Row:
    """JSON has no NaN and no infinity; what could not be measured is null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }


def _plot(found: Findings, path: Path) -> None:
    path.unlink(missing_ok=True)  # a plot of an older run must not stand beside new figures
    if found.draw is None:
        return
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependency(
            "no plot was drawn, because matplotlib is not installed; "
            "install it with `pip install 'dpstream[plot]'`"
        ) from error
    figure = Figure(figsize=(9, 4), dpi=144, layout="constrained")
    found.draw(figure)
    figure.savefig(path, metadata={"Software": None})
