"""Clients that follow a server's events while its pipeline reads as fast as it can.

The pipeline's process has one core, server and clients share another. First nobody follows, then
all clients do, then nobody again; some clients break off again and again and go on by their last
event's number. Every client must have seen every number from its first one on, once.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np

from dpstream.bench.harness import Findings, Progress, Row, target
from dpstream.bench.serve_server import Busy, Cores, busy_server, cores


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    clients: int
    seconds: float
    alone: float
    """Seconds without clients, before and after."""
    breaking: int = 10
    """One client in so many breaks off."""


_DELAY: Final = (
    "a delay is from the trigger's scheduled time to the client: the release is worked out, and "
    "becomes visible at the next whole second"
)
FULL: Final = Plan(clients=200, seconds=60, alone=30)
QUICK: Final = Plan(clients=50, seconds=8, alone=4)


def measure(*, quick: bool, progress: Progress) -> Findings:
    """Follow, count, and compare the pipeline's speed."""
    plan, places = QUICK if quick else FULL, cores()
    with tempfile.TemporaryDirectory(prefix="dpstream-serve-") as folder:
        progress(0, 4, "starting")
        with busy_server(Path(folder), places) as server:
            server.rate(plan.alone / 2)  # the tables have grown to their size
            progress(1, 4, "without clients")
            before = server.rate(plan.alone)
            progress(2, 4, f"{plan.clients} clients")
            with_clients, seen = _followed(server, plan, places)
            progress(3, 4, "without clients")
            after = server.rate(plan.alone)
    progress(4, 4, "done")
    return findings(plan, before=before, with_clients=with_clients, after=after, seen=seen)


def findings(
    plan: Plan, *, before: float, with_clients: float, after: float, seen: Sequence[dict[str, Any]]
) -> Findings:
    """The table, and what it says about the targets."""
    lost, twice = zip(*(_gaps(one["ids"]) for one in seen), strict=True)
    last = max((one["ids"][-1] for one in seen if one["ids"]), default=0)
    behind = sum(last - one["ids"][-1] if one["ids"] else 1 for one in seen)
    delays = np.array([delay for one in seen for delay in one["delays"]] or [np.nan])
    alone = (before + after) / 2
    rows: list[Row] = [
        {"phase": "no clients, before", "rows_per_second": before},
        {
            "phase": f"{plan.clients} clients",
            "rows_per_second": with_clients,
            "clients": len(seen),
            "events": int(sum(len(one["ids"]) for one in seen)),
            "connections": int(sum(one["connections"] for one in seen)),
            "lost": sum(lost) + behind,
            "twice": sum(twice),
            "median_delay": float(np.median(delays)),
            "slowest": float(np.max(delays)),
        },
        {"phase": "no clients, after", "rows_per_second": after},
    ]
    slower = 1 - with_clients / alone
    return Findings(
        rows=rows,
        targets=[
            target("clients that followed to the end", len(seen), ">=", plan.clients),
            target("events lost", sum(lost) + behind, "==", 0),
            target("events seen twice", sum(twice), "==", 0),
        ],
        notes=[
            f"with {plan.clients} clients the pipeline reads {slower:+.1%} slower than without",
            _DELAY,
            f"{plan.seconds:g} s with clients; one in {plan.breaking} breaks off again and again",
        ],
        draw=lambda figure: draw(figure, delays, rows),
    )


def _followed(server: Busy, plan: Plan, places: Cores) -> tuple[float, list[dict[str, Any]]]:
    """The pipeline's speed while clients follow, and what they have seen."""
    at = urlsplit(server.public)
    module = [sys.executable, "-m", "dpstream.bench.serve_clients", str(at.hostname), str(at.port)]
    module += [str(plan.clients), str(plan.breaking), str(places.rest)]
    process = subprocess.Popen(module, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        while server.health()["clients"] < plan.clients:
            server.rate(0.5)
        found = server.rate(plan.seconds)
        last = server.health()["newest_release"]
        told, _ = process.communicate(f"{last}\n".encode())
    finally:
        process.kill()
        process.wait()
    seen: list[dict[str, Any]] = json.loads(told)["clients"]
    for one in seen:  # who was told to stop may have seen a few more
        one["ids"] = [number for number in one["ids"] if number <= last]
    return found, seen


def _gaps(ids: Sequence[int]) -> tuple[int, int]:
    """Numbers that are missing between the first and the last, and those that came again.

    >>> _gaps([4, 5, 7, 7, 8])
    (1, 1)
    """
    known = set(ids)
    missing = (max(known) - min(known) + 1 - len(known)) if known else 0
    return missing, len(ids) - len(known)


def draw(figure: Any, delays: Any, rows: Sequence[Row]) -> None:
    """How long events take, and how fast rows are read in each phase."""
    left, right = figure.subplots(1, 2)
    left.hist(delays, bins=60, color="#0b6e99")
    left.set(xlabel="seconds from trigger to client", ylabel="events")
    names = [str(row["phase"]) for row in rows]
    right.barh(names[::-1], [row["rows_per_second"] / 1e6 for row in rows][::-1], color="#0b6e99")
    right.set(xlabel="million rows read per second")
    for panel in (left, right):
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
