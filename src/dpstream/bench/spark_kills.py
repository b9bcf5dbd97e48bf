"""Kill executors and drivers of a publishing query; what it publishes must not change by a byte.

A kill comes some releases after the last one, and then some time that is drawn anew, so that it
falls anywhere in a step: while rows are read, while noise is drawn, between the sink and the state.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from dpstream.bench.recovery_case import difference
from dpstream.bench.spark_cluster import Cluster
from dpstream.bench.spark_runs import Driver, started

EXECUTOR, DRIVER, ALL = "an executor", "the driver", "all executors"
_STEP: Final = 2.0  # seconds after a release within which a kill falls
_PATIENCE: Final = 300.0


@dataclass(frozen=True, kw_only=True)
class Kill:
    """Kill `what` once `releases` more are out, and `seconds` have passed."""

    what: str
    releases: int
    seconds: float


@dataclass(kw_only=True)
class Disturbed:
    """One run, killed and started again until it ended."""

    kills: list[str] = field(default_factory=list)
    starts: int = 0
    seconds: float = 0.0
    waits: list[tuple[str, float]] = field(default_factory=list)
    """What was killed, and the seconds from there to the next new release."""
    difference: str = ""
    """How its releases differ from those of an undisturbed run; empty: not at all."""


def drawn(whats: Sequence[str], releases: int, rng: np.random.Generator) -> list[Kill]:
    """Kills of these kinds, spread over about so many releases."""
    most = max(2, releases // (len(whats) + 1))
    return [
        Kill(
            what=what,
            releases=int(rng.integers(0, most)),
            seconds=float(rng.uniform(0, _STEP)),
        )
        for what in whats
    ]


def disturbed(
    cluster: Cluster,
    folder: Path,
    job: dict[str, Any],
    kills: Sequence[Kill],
    *,
    after_kill: Callable[[], None] = lambda: None,
) -> Disturbed:
    """Run a job that publishes into `folder / "out"`, killing as planned, until it has ended.

    `after_kill` is called while the driver is dead.
    """
    found, ahead, began = Disturbed(), list(kills), time.monotonic()
    done = False
    while not done:
        part = replace(cluster, folder=cluster.folder / f"start-{found.starts}")
        found.starts += 1
        with started(part) as driver:
            driver.answer()
            driver.begin(**job, folder=str(folder))
            done = _killed(driver, folder, ahead, found)
            if done:
                driver.answer()
            else:
                after_kill()
    found.seconds = time.monotonic() - began
    return found


def _killed(driver: Driver, folder: Path, ahead: list[Kill], found: Disturbed) -> bool:
    """Kill until the driver is killed (False), or the job has ended (True)."""
    while ahead:
        kill, before = ahead[0], out(folder)
        if _until(driver, lambda: out(folder) >= before + kill.releases):  # noqa: B023
            return True
        if driver.waits(kill.seconds):
            return True
        ahead.pop(0)
        found.kills.append(kill.what)
        at, size = time.monotonic(), out(folder)
        if kill.what == DRIVER:
            driver.kill()
            return False
        for _ in range(len(driver.executors()) if kill.what == ALL else 1):
            driver.kill_executor(len(found.kills))
        if _until(driver, lambda: out(folder) > size):  # noqa: B023
            return True
        found.waits.append((kill.what, time.monotonic() - at))
    return driver.waits(_PATIENCE)


def _until(driver: Driver, reached: Callable[[], bool]) -> bool:
    """Wait until it is so; True if the driver has answered, or ended, before."""
    end = time.monotonic() + _PATIENCE
    while not reached():
        if driver.waits(0.02):
            return True
        if time.monotonic() > end:
            return True  # asking it for its answer says what is wrong
    return False


def out(folder: Path) -> int:
    """How many releases the sink has."""
    place = folder / "out"
    return sum(1 for _ in place.glob("*.parquet")) if place.is_dir() else 0


def compared(found: Disturbed, folder: Path, expected: dict[str, str]) -> Disturbed:
    """Look for releases that are missing, too many, or other bytes; then remove what it wrote."""
    found.difference = difference(folder, expected, same_keys=True)
    if not found.difference:
        shutil.rmtree(folder)
    return found
