"""Run one bench: measure, judge its targets, write its JSON and its plot.

A bench is a module named in `BENCHES`, with a function `measure(quick=..., progress=...)` that
returns `Findings`; it is imported only when it runs.
"""

from __future__ import annotations

import importlib
import json
import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from dpstream.errors import InvalidParameter, MissingDependency
from dpstream.evaluate.machine import describe

Row = dict[str, Any]
Result = dict[str, Any]
Progress = Callable[[int, int, str], None]
"""Called with (parts done, parts in all, what is measured next)."""

BENCHES: Final[dict[str, str]] = {
    "noise": "exact samples per second on one core, against opendp, diffprivlib and numpy",
    "counters": "errors, state and speed of the continual counters, and of accounting",
    "w_event": "errors of the w-event mechanisms on real and synthetic streams",
    "shapes": "the w-event mechanisms on generated bursts, on/off, steps, ramps, seasons, near 0",
    "pan_private": "what it costs in accuracy that an intruder may see the memory once",
    "dpi": "distributions for ever under user-level privacy: errors, budget left, time",
    "delayed": "errors of the mechanisms with a delay, beside their published forms, and steps/s",
    "recovery": (
        "kill -9 and restart, again and again: the same bytes, and how long a restart takes"
    ),
    "throughput": (
        "records per second from files to durable releases, against opendp, pipeline-dp, spark"
    ),
    "spark": (
        "the Spark engine against Spark's plain group-by on one cluster, and killed as it runs"
    ),
    "sqlp": "the continual GROUP BY against the DP-SQLP paper's tables, figures and baselines",
    "logs": "the continual GROUP BY on two real event logs: keys found, errors, time",
    "chosen_bounds": "bounds that choose themselves beside the best fixed ones, on six logs",
    "memory_of_keys": "keys that earlier windows have shown: seven days of one law, and two logs",
    "serve": "clients that follow a server's events while its pipeline reads as fast as it can",
    "live": "1, 5 and 20 queries over one live source: rows a second, delays, rows missed",
    "live_files": "a live directory of up to 100,000 files: triggers without news, a restart",
    "queries": "SQL on real event logs, by the command, Python and Spark: the same releases",
    "connectors": "records per second of each source and sink, beside files",
    "aggregates": "rank errors of quantiles, once beside pipeline-dp and opendp, and continually",
    "found_keys": "keys alone, with weights and without, beside pipeline-dp; the true top keys",
    "rollup": "errors of totals and parts of ROLLUP and CUBE, before least squares and after it",
    "shared_noise": "public groups that share noise, and their sums, beside independent noise",
    "users": "activity, sessions, funnels, retention: errors, coverage, speed beside a group-by",
    "coverage": "how often published intervals hold the truth: aggregates, strategies, mechanisms",
    "bounds": "what `bounds` says is left out, paid with epsilon 0.1, beside what is left out",
    "startup": "--version, an import, a first release: without machine code, with it, upgraded",
    "year": "a simulated year with crashes, a move, restores: the same releases, and a flat disk",
}
"""Name of a bench, which is that of its module too -> one line about it."""

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


def run(
    name: str,
    *,
    quick: bool,
    out: Path,
    progress: Progress | None = None,
    more: Mapping[str, Any] | None = None,
) -> Result:
    """Run the bench `name`; write `out/name.json` and `out/name.png`; return the JSON's content.

    `more`: what only this bench takes.
    """
    if name not in BENCHES:
        raise InvalidParameter(f"a bench must be one of {', '.join(BENCHES)}; got {name!r}")
    module = importlib.import_module(f"benchmarks.{name}")
    found: Findings = module.measure(
        quick=quick, progress=progress or (lambda *_: None), **(more or {})
    )
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


@contextmanager
def one_core() -> Iterator[bool]:
    """Keep this thread, and every process and thread it starts, on one core.

    Yields whether that was possible; what was allowed before is allowed again afterwards.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield False
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield True
    finally:
        os.sched_setaffinity(0, allowed)


def child_environment() -> dict[str, str]:
    """Environment variables with which a child's `python -m benchmarks.x` finds this package."""
    places = (str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", ""))
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))}
