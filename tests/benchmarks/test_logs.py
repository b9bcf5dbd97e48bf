"""Real logs, where they are; without them the bench says so."""

import numpy as np
import pyarrow.compute as pc
import pytest
from matplotlib.figure import Figure

from benchmarks import logs
from benchmarks.logs import Course, _exact, draw
from dpstream.data.clicks import clicks


def test_without_data_nothing_is_measured(monkeypatch):
    """And the note says what to set."""
    monkeypatch.delenv("DPSTREAM_DATA", raising=False)
    found = logs.measure(quick=True, progress=lambda *_: None)
    assert not found.rows
    assert not found.targets
    assert "DPSTREAM_DATA" in found.notes[-1]


def test_a_log_is_compared_with_its_truth(monkeypatch, tmp_path):
    """Every scheduled table is there, and the figures lie near the exact ones."""
    table = clicks(20_000).rename_columns(["user", "target", "sec", "seconds"])
    start = 1_714_521_600
    table = table.set_column(2, "sec", [[at - start for at in table["sec"].to_pylist()]])
    row, releases = logs._measured(logs.HIGGS, table)
    figure = Figure()
    course = Course(query=logs.HIGGS.query, figure="events", releases=releases, table=table)
    draw(figure, course)

    assert row["releases"] == row["scheduled"] == 96
    assert row["keys_shown"] == row["keys"] == 10
    assert 0 < row["median_relative_error"] < 0.3
    assert row["share_of_total_shown"] == pytest.approx(1.0)
    exact = _exact(course, "home", np.array([24.0]))
    home = pc.equal(table["target"], "home")
    assert exact == len(pc.unique(table.filter(home)["user"]))
    assert figure.axes[1].lines[0].get_ydata()[-1] == 10
