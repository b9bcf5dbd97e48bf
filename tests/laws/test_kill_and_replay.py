"""Every kind of run is killed before operations on the disk; started again it is what it was."""

from dataclasses import replace

import numpy as np
import pytest

import dpstream as dps
from dpstream.mechanisms import Spas, Uniform
from tests.support.fixed import SECRET
from tests.support.kill_and_replay import AfterReleases, kill_and_replay, kill_everywhere
from tests.support.live_runs import live, settled
from tests.support.lost_files import Series, rows
from tests.support.pipelines import served_files
from tests.support.runs import SHORT, group_by, keep_release, series, stepped

BLOCK = np.array([[30 + 7 * step, 12] for step in range(12)])
KINDS = {
    "group by": (group_by(SHORT), 37),
    "series": (series(Series.query, rows(0)), 23),
    "runner": (stepped(Spas(epsilon=1, window=3), BLOCK), 23),
    "live": (replace(live(), published=settled), 41),
    "served": (served_files(), 173),
}
"""Each kind of run, and how many operations lie between two kills."""


@pytest.mark.parametrize("name", KINDS)
def test_a_kill_changes_nothing(tmp_path, name):
    """The same releases with the same bytes, and what an unbroken run is charged for."""
    kind, stride = KINDS[name]
    expected = kind.unbroken(tmp_path / "whole")
    charges = kind.charges(tmp_path / "whole")
    points = range(2, 100_000, stride)
    killed = list(kill_everywhere(kind, tmp_path, points))

    assert len(killed) > 3
    assert [nth for nth, after in killed if after.survived] == [killed[-1][0]]
    assert [nth for nth, after in killed if after.published != expected] == []
    assert [nth for nth, after in killed if after.charges != charges] == []


def test_a_run_that_begins_anew_is_found_out(tmp_path):
    """The control: noise that is drawn again for a release that was shown."""

    def start(place):
        with dps.Runner(Uniform(epsilon=1, window=3), secret=SECRET) as runner:
            for row in BLOCK:
                for release in runner.step(row):
                    keep_release(place / "out", release)
                    yield release

    kind, _ = KINDS["runner"]
    with pytest.raises(AssertionError, match="came again with other values"):
        kill_and_replay(replace(kind, start=start), tmp_path, AfterReleases(3))
