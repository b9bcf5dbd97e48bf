"""Kill a running query again and again; what it publishes must be the bytes of an unbroken run.

Most kills are placed: before the n-th operation that changes the disk, n drawn over a counted run,
so that each of them is hit sooner or later. Others come from outside at any moment. Some leave a
file as a power failure may leave it, and some damage what was already durable.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from dpstream.bench.harness import Findings, Progress, Row, target
from dpstream.bench.recovery_case import published, write_source
from dpstream.bench.recovery_plot import draw
from dpstream.bench.recovery_runs import (
    Job,
    Kind,
    Outcome,
    cold_restart,
    job,
    kill_and_compare,
    started,
)

_SEED: Final = 9

KINDS: Final = (
    Kind(name="operation on the disk", where="any"),
    Kind(name="any moment, from outside"),
    Kind(name="torn write", where="any", torn=True),
    Kind(name="sink written, no snapshot", where="save"),
    Kind(name="inside a snapshot", where="snapshot"),
    Kind(name="damaged snapshot", where="any", damages="snapshot"),
    Kind(name="cut log", where="any", damages="log"),
    Kind(name="operation, random keys", where="any", fixed=False),
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    kills: int
    cold: int  # restarts with a new interpreter


FULL: Final = Plan(kills=200, cold=3)
QUICK: Final = Plan(kills=20, cold=1)


def measure(*, quick: bool, progress: Progress) -> Findings:
    """Run until enough kills are counted, the kinds in turn; then a few with a new interpreter."""
    plan = QUICK if quick else FULL
    rng = np.random.default_rng(_SEED)
    with tempfile.TemporaryDirectory(prefix="dpstream-recovery-") as folder, started() as child:
        place = Path(folder)
        sources = write_source(place / "source")
        progress(0, plan.kills, "an unbroken run")
        began = time.monotonic()
        whole = child.run(job(place / "whole", str(sources[0])))
        seconds = time.monotonic() - began
        counts = next(line["counts"] for line in whole if line["event"] == "counted")
        expected = published(place / "whole")
        outcomes: list[Outcome] = []
        while (killed := sum(one.kills for one in outcomes)) < plan.kills:
            kind = KINDS[len(outcomes) % len(KINDS)]
            source = sources[len(outcomes) // len(KINDS) % len(sources)]
            progress(killed, plan.kills, kind.name)
            found = Outcome(kind=kind, source=str(source))
            wanted = min(int(rng.integers(2, 4)), plan.kills - killed)
            kill_and_compare(
                child,
                found,
                place / f"run{len(outcomes)}",
                aims=aims(kind, wanted, counts, seconds, rng),
                expected=expected,
                rng=rng,
            )
            outcomes.append(found)
        cold = [cold_restart(place / f"cold{n}", str(sources[0])) for n in range(plan.cold)]
    progress(plan.kills, plan.kills, "done")
    return Findings(
        rows=[*_rows(outcomes), *_cold_rows(cold)],
        targets=targets(outcomes, plan),
        notes=_notes(outcomes, seconds, counts),
        draw=lambda figure: draw(figure, {kind.name: _seconds(outcomes, kind) for kind in KINDS}),
    )


def aims(
    kind: Kind, wanted: int, counts: dict[str, int], seconds: float, rng: np.random.Generator
) -> Iterator[Job]:
    """Where the starts of a run are killed, so that together they reach over all of it."""
    for _ in range(wanted):
        if not kind.where:
            yield {"kill after": float(rng.uniform(0, 2 * seconds / (wanted + 1)))}
        else:
            most = max(2, 2 * counts[kind.where] // (wanted + 1))
            nth = int(rng.integers(1, most))
            yield {"kill": {"where": kind.where, "nth": nth, "torn": kind.torn}}


def targets(outcomes: Sequence[Outcome], plan: Plan) -> list[Row]:
    """The same bytes every time, nothing left behind, and enough kills to say so."""
    same = sum(not one.difference for one in outcomes) / len(outcomes)
    tidy = sum(not one.untidy for one in outcomes) / len(outcomes)
    kills = sum(one.kills for one in outcomes)
    return [
        target("share of runs with identical bytes", same, "==", 1.0),
        target("share of runs charged once that leave no key and no segment", tidy, "==", 1.0),
        target("kills", kills, ">=", plan.kills),
    ]


def _rows(outcomes: Sequence[Outcome]) -> list[Row]:
    rows: list[Row] = []
    for kind in KINDS:
        mine = [one for one in outcomes if one.kind == kind]
        seconds = _seconds(outcomes, kind)
        rows.append(
            {
                "kill": kind.name,
                "runs": len(mine),
                "identical": sum(not one.difference for one in mine),
                "kills": sum(one.kills for one in mine),
                "restarts": len(seconds),
                "restart_seconds": float(np.median(seconds)) if seconds else None,
                "slowest": max(seconds, default=None),
            }
        )
    return rows


def _cold_rows(cold: Sequence[tuple[float, float]]) -> list[Row]:
    if not cold:
        return []
    imports, restarts = zip(*cold, strict=True)
    return [
        {
            "kill": "new interpreter",
            "runs": len(cold),
            "kills": len(cold),
            "restarts": len(cold),
            "restart_seconds": float(np.median(restarts)),
            "slowest": max(restarts),
            "note": f"after {np.median(imports):.1f} s for the interpreter and its imports",
        }
    ]


def _seconds(outcomes: Sequence[Outcome], kind: Kind) -> list[float]:
    return [second for one in outcomes if one.kind == kind for second in one.restarts]


def _notes(outcomes: Sequence[Outcome], seconds: float, counts: dict[str, int]) -> list[str]:
    restart = (
        "a restart is measured from the start of a process that has imported everything to the "
        "first release that the sink did not have"
    )
    troubles = [
        f"{one.kind.name}, {Path(one.source).name}: {one.difference or one.untidy}"
        for one in outcomes
        if one.difference or one.untidy
    ]
    whole = f"an unbroken run took {seconds:.1f} s and changed the disk {counts['any']:,} times"
    return [whole, restart, *troubles]
