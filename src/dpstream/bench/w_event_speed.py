"""How many steps a w-event mechanism takes per second, ledger, digests and exact noise included.

By the processor time of this process, which does one thing at a time: the clock on the wall would
measure what else the machine does. That still slows a processor down (caches are shared), so the
same run is made several times, and the best time of each stretch of steps is taken.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from dpstream.bench.harness import Row, target
from dpstream.bench.streams import rome, synthetic_2
from dpstream.mechanisms import find
from dpstream.mechanisms.runner import Runner
from dpstream.records import Integers

EPSILON, WINDOW = 1, 120
AT_LEAST: Final = {1: 20_000, 1_000: 1_000}
"""Bins -> steps per second that every mechanism should reach."""

_ROUNDS: Final = {1: 8, 1_000: 3}
_STEPS: Final = {1: (WINDOW, 15 * WINDOW), 1_000: (WINDOW, WINDOW)}
"""Bins -> steps that are not timed (code is compiled, a window fills), and steps that are."""

_STRETCH: Final = {1: 100, 1_000: 10}  # steps that are timed together


def measure(names: Sequence[str]) -> list[Row]:
    """A row per mechanism and number of bins."""
    return [
        {
            "part": "speed",
            "stream": f"{bins:,} bins" if bins > 1 else "1 bin",
            "mechanism": name,
            "epsilon": EPSILON,
            "window": WINDOW,
            "steps_per_second": _fastest(name, bins),
            "note": "by processor time",
        }
        for bins in AT_LEAST
        for name in names
    ]


def targets(rows: Sequence[Row]) -> list[Row]:
    """The slowest mechanism is judged."""
    found = []
    for bins, bound in AT_LEAST.items():
        stream = f"{bins:,} bins" if bins > 1 else "1 bin"
        here = {
            row["mechanism"]: row["steps_per_second"] for row in rows if row["stream"] == stream
        }
        slowest = min(here, key=lambda name: here[name], default="none")
        found.append(
            target(
                f"steps/s of the slowest mechanism ({slowest}) at {stream}",
                here.get(slowest), ">=", bound, reason="no mechanism was measured",
            )
        )  # fmt: skip
    return found


def _fastest(name: str, bins: int) -> float:
    warm, timed = _STEPS[bins]
    block = _block(bins, warm + timed)
    rounds = [_times(find(name), block, warm, _STRETCH[bins]) for _ in range(_ROUNDS[bins])]
    seconds: float = sum(min(times) for times in zip(*rounds, strict=True))
    return timed / max(seconds, 1e-9)


def _block(bins: int, steps: int) -> Integers:
    """One bin: restless, then calm. Many: roads, whose traffic swings by about w / epsilon."""
    return synthetic_2(steps) if bins == 1 else rome(bins=bins, level=148, swing=0.9, steps=steps)


def _times(build: Any, block: Integers, warm: int, stretch: int) -> list[float]:
    """Seconds for each stretch of steps; noise is fixed, so that every round does the same."""
    runner = Runner(build(epsilon=EPSILON, window=WINDOW), secret=bytes(32), run_id=bytes(16))
    for _ in runner.feed(block[:warm]):
        pass
    times = []
    for first in range(warm, len(block), stretch):
        began = time.process_time()
        for _ in runner.feed(block[first : first + stretch]):
            pass
        times.append(time.process_time() - began)
    return times
