"""`dpstream compare --delay`: which event-level mechanism suits a series that is no secret?"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.table import Table

from dpstream.cli import tables
from dpstream.cli.output import people, progress_bar
from dpstream.cli.parameters import build, describe_parameters
from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.mechanisms import REGISTRY, find
from dpstream.mechanisms.base import Mechanism, SeriesMechanism
from dpstream.mechanisms.release import release

MIDPOINT: Final = "midpoint"
"""What needs no data and no budget: the middle of the public range, always."""

_TIE: Final = 2.0  # standard errors within which a mechanism is as good as the best


def series_mechanisms() -> list[str]:
    """Every registered mechanism over numbers in a range, in the order of the registry."""
    return [name for name in REGISTRY if issubclass(find(name), SeriesMechanism)]


def rankings(
    rows: tables.Rows,
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
    found: list[dict[str, Any]] = []
    with progress_bar("comparing") as progress:
        for epsilon, mechanisms in plan:
            errors = []
            for mechanism in mechanisms:
                errors.append([_error(mechanism, rows.block) for _ in range(runs)])
                done = len(found) * len(candidates) + len(errors)
                progress(done, len(plan) * len(candidates))
            ranking = _ranked(candidates, errors)
            middle = float(np.abs(rows.block - _middle(mechanisms[0])).mean())
            baseline = {"mechanism": MIDPOINT, "mae": middle, "mae_se": None, "tied": False}
            command = _command(ranking[0]["mechanism"], source, epsilon, flags)
            found.append(
                {
                    "epsilon": epsilon,
                    "ranking": [*ranking, {"rank": None} | baseline],
                    "command": command,
                }
            )
    return found


def show(one: Mapping[str, Any], *, delay: str, runs: int) -> None:
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
    return build(name, given | {"epsilon": epsilon}, [])


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


def _command(name: str, source: Path, epsilon: str, flags: Mapping[str, str | None]) -> str:
    """How to publish with the winner."""
    fields = {field["name"] for field in describe_parameters(find(name))}
    words = ["dpstream", "release", str(source), "--mechanism", name, "--epsilon", epsilon]
    for key, value in flags.items():
        if value is not None and key in fields:
            words += [f"--{key}", value]
    return shlex.join(words)
