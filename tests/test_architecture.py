"""How many files a reader must open to follow a row, and a step of a mechanism, to its release."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import dpstream as dps
from tests.support.live_runs import HOUR, ScriptedClock

ROOT = Path(dps.__file__).parent

HOURLY = """
    SELECT WITH DIFFERENTIAL_PRIVACY
           OPTIONS (epsilon = 2, delta = 1e-9, privacy_unit_column = user,
                    privacy_unit_period = INTERVAL '1' DAY, max_groups_contributed = 4)
           page, window_start, COUNT(*) AS n
    FROM TUMBLE(clicks, DESCRIPTOR(ts), INTERVAL '1' DAY)
    GROUP BY page, window_start
    EMIT EVERY INTERVAL '1' HOUR
"""


class Tracer:
    """Notes the package's files whose functions run, in every thread, while it is on."""

    def __init__(self) -> None:
        self.on, self.files = False, set[str]()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if self.on and event == "call" and frame.f_code.co_name != "<module>":
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT):
                self.files.add(str(path.relative_to(ROOT)))


@pytest.fixture
def tracer() -> Iterator[Tracer]:
    """Sees this thread and those that start from now on."""
    before, tracer = sys.getprofile(), Tracer()
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    try:
        yield tracer
    finally:
        sys.setprofile(before)
        threading.setprofile(before)


@contextmanager
def switched_on(tracer: Tracer) -> Iterator[None]:
    """Trace what happens inside."""
    tracer.on = True
    try:
        yield
    finally:
        tracer.on = False


def test_a_row_passes_at_most_60_files(tmp_path: Path, tracer: Tracer) -> None:
    """From `read` of a CSV file to its release in a running query: one step, not the first."""
    folder = tmp_path / "clicks"
    folder.mkdir()

    def arrive(hour: int) -> None:
        rows = [f"u{hour}-{i},p{i % 2},1970-01-01T{hour:02}:{i % 60:02}:00Z" for i in range(300)]
        (folder / ".new").write_text("\n".join(["user,page,ts", *rows, ""]))
        (folder / ".new").rename(folder / f"{hour}.csv")

    clock = ScriptedClock(
        events=[(hour * HOUR + HOUR // 2, partial(arrive, hour)) for hour in (0, 1)]
    )
    query = dps.sql(HOURLY, start="1970-01-01", end="1970-01-02")
    places = {"sink": tmp_path / "out", "state": tmp_path / "state"}
    releases = iter(dps.run(query, source=folder, live=True, clock=clock, **places))
    first = next(releases)
    with switched_on(tracer):
        second = next(releases)

    assert sum(second["n"].to_pylist()) > 1.5 * sum(first["n"].to_pylist()) > 0
    assert {"connectors/files/csv.py", "group_by/flow.py"} <= tracer.files
    assert len(tracer.files) <= 60, "\n".join(
        [f"{len(tracer.files)} files:", *sorted(tracer.files)]
    )


def test_a_w_event_step_passes_at_most_12_files(tracer: Tracer) -> None:
    """One later step of BudgetDistribution that compares, publishes and charges both."""
    mechanism = dps.mechanisms.BudgetDistribution(epsilon=1.0, window=10)
    runner = dps.Runner(mechanism, secret=bytes(32), run_id=bytes(16), ledger=dps.Ledger())
    for _ in range(3):
        runner.step(np.array([5, 3, 2]))
    with switched_on(tracer):
        (release,) = runner.step(np.array([500, 3, 2]))

    assert release.paid
    assert len(tracer.files) <= 12, "\n".join(
        [f"{len(tracer.files)} files:", *sorted(tracer.files)]
    )
