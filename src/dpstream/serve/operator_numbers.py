"""What the operator sees of a run: exact numbers and raw rows, which are not private."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dpstream.serve.ingest import Intake
from dpstream.serve.metrics import Sample

COUNTS = {
    "read": "Rows read since this start.",
    "outside": "Rows outside the public range since this start.",
    "late": "Rows that came too late since this start.",
    "other_keys": "Rows of keys that are not public since this start.",
    "rejected": "Rows set aside as dead letters since this start.",
}
_GAUGES = {
    "rows_waiting": "Rows that have come and that the query has not read.",
    "release_delay_seconds": "From a trigger to its release, the last one.",
    "worst_release_delay_seconds": "From a trigger to its release, the worst since this start.",
}
_POSTED = {
    "accepted": "Rows taken in.",
    "rejected": "Posted lines that are no rows.",
    "requests": "Posts taken in.",
}


def samples_of_query(name: str, told: Mapping[str, Any]) -> list[Sample]:
    """One query, as its run has told."""
    label = {"query": name}
    found: list[Sample] = [
        (f"dpstream_rows_{count}_total", "counter", about, label, told[count])
        for count, about in COUNTS.items()
    ]
    done = told["triggers_done"]
    found.append(("dpstream_triggers_total", "counter", "Triggers done.", label, done))
    behind = lag(told)
    if behind is not None:
        found.append(("dpstream_lag_seconds", "gauge", "Behind its schedule.", label, behind))
    found += [
        (f"dpstream_{name}", "gauge", about, label, told[name])
        for name, about in _GAUGES.items()
        if name in told
    ]
    stands = {
        "starved": "Has it read nothing, while another query over its source has?",
        "failed": "Has it failed, while the others go on?",
    }
    return found + [
        (f"dpstream_query_{name}", "gauge", about, label, float(bool(told.get(name))))
        for name, about in stands.items()
    ]


def samples_of_intake(intake: Intake) -> list[Sample]:
    """Rows that were posted to one source."""
    label = {"source": intake.name}
    found: list[Sample] = [
        (f"dpstream_posted_{count}_total", "counter", about, label, getattr(intake, count))
        for count, about in _POSTED.items()
    ]
    waiting = intake.inbox.waiting
    return [*found, ("dpstream_posted_bytes", "gauge", "Kept for the run.", label, waiting)]


def lag(told: Mapping[str, Any]) -> float | None:
    """Seconds since the next trigger was due; 0 if it is not due yet."""
    due = told["next_trigger"]
    return None if due is None else max(0.0, time.time() - due / 1e6)


def dead_letters(folder: Path, limit: int) -> list[dict[str, Any]]:
    """The rows that a query has set aside last."""
    return _newest(sorted((folder / "dead-letters").glob("*.jsonl"), key=_age), limit)


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _newest(files: Iterable[Path], limit: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in files:
        if len(found) >= limit:
            break
        try:
            found += [json.loads(line) for line in path.read_bytes().splitlines()[::-1]]
        except FileNotFoundError:
            continue
    return found[:limit]
