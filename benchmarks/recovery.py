"""Kill a running query again and again; what it publishes must be the bytes of an unbroken run.

Most kills are placed: before the n-th operation that changes the disk, n drawn over a counted run,
so that each of them is hit sooner or later. Others come from outside at any moment. Some leave a
file as a power failure may leave it, and some damage what was already durable.
"""

from __future__ import annotations

import json
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.harness import Findings, Progress, Row, child_environment, target
from benchmarks.recovery_case import damage, difference, left_behind, published, write_source
from dpstream.errors import StateError

_PATIENCE: Final = 300.0  # seconds for one line of the child
Job = dict[str, Any]
Said = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A way to kill: before an operation counted in `where`, or ("") at any moment."""

    name: str
    where: str = ""
    torn: bool = False
    """Half of what was being written is lost, as when the power fails."""
    damages: str = ""
    """What is spoilt after the kill: the newest "snapshot", or the end of the "log"."""
    fixed: bool = True
    """Run id and keys are fixed, so that bytes can be compared with those of an unbroken run."""


@dataclass(kw_only=True)
class Outcome:
    """One run, killed until it ended."""

    kind: Kind
    source: str
    kills: int = 0
    restarts: list[float] = field(default_factory=list)
    """Seconds from a process's start to the first release that the sink did not have."""
    difference: str = ""
    """How it differs from an unbroken run, or why it failed; empty: identical."""
    untidy: str = ""
    """What it should not have left: a second charge, keys, segments."""


class Child:
    """The process that runs jobs, each in a fork."""

    def __init__(self, process: subprocess.Popen[bytes], began: float) -> None:
        self._process, self.began = process, began
        self.imported: float = self._until("imported")[-1]["at"] - began
        self._until("ready")

    def run(self, job: Job) -> Said:
        """Run a job until it ends or is killed; all that was said of it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        return self._until("ended")

    def _until(self, event: str) -> Said:
        assert self._process.stdout is not None
        said: Said = []
        while not said or said[-1]["event"] != event:
            if not select.select([self._process.stdout], [], [], _PATIENCE)[0]:
                raise StateError(f"the killed query said nothing for {_PATIENCE:.0f} s")
            line = self._process.stdout.readline()
            if not line:
                raise StateError(f"the process that runs the query ended before {event!r}")
            said.append(json.loads(line))
        return said


@contextmanager
def started(*options: str) -> Iterator[Child]:
    """Start the child; it ends with its input."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.recovery_child", *options],
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )
    try:
        yield Child(process, began)
    finally:
        process.communicate()


def job(folder: Path, source: str, *, fixed: bool = True) -> Job:
    """The run of the query in `folder`."""
    return {"folder": str(folder), "source": source, "fixed": fixed}


def kill_and_compare(
    child: Child,
    found: Outcome,
    folder: Path,
    *,
    aims: Iterator[Job],
    expected: dict[str, str],
    rng: np.random.Generator,
) -> None:
    """Kill a run as aimed, start it again until it ends, and look at what it has published."""
    work, status = job(folder, found.source, fixed=found.kind.fixed), None
    while status != 0 and not found.difference:
        said = child.run(work | next(aims, {}))
        status = said[-1]["status"]
        at = {line["event"]: line.get("at", 0.0) for line in said}
        if found.kills and "new" in at:
            found.restarts.append(at["new"] - at["started"])
        found.difference = " ".join(line["error"] for line in said if line["event"] == "failed")
        if status == -signal.SIGKILL:
            found.kills += 1
            damage(folder / "state", found.kind.damages, rng)
    if not found.difference:
        found.difference = difference(folder, expected, same_keys=found.kind.fixed)
        found.untidy = left_behind(folder / "state")
        shutil.rmtree(folder)


def cold_restart(folder: Path, source: str) -> tuple[float, float]:
    """Seconds until a new interpreter has imported everything, and from there to a new release."""
    with started("--cold") as child:
        child.run(job(folder, source) | {"kill": {"where": "save", "nth": 6, "torn": False}})
    with started("--cold") as child:
        said = child.run(job(folder, source))
        new = [line["at"] for line in said if line["event"] == "new"]
        if not new:
            raise StateError(f"a killed run published nothing after its restart: {said}")
        return child.imported, new[0] - child.began - child.imported


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


def draw(figure: Any, seconds: Mapping[str, Sequence[float]]) -> None:
    """A strip plot; overlapping dots darken."""
    panel = figure.subplots()
    kinds = list(seconds)[::-1]
    for line, kind in enumerate(kinds):
        panel.plot(seconds[kind], [line] * len(seconds[kind]), "o", color="#0b6e99", alpha=0.35)
    panel.set(
        yticks=range(len(kinds)), yticklabels=kinds, xlabel="seconds from restart to a new release"
    )
    panel.set_xlim(left=0)
    panel.grid(alpha=0.25, axis="x")
    panel.spines[["top", "right"]].set_visible(False)
