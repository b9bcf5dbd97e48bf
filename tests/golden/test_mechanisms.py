"""Every mechanism publishes and charges what the golden corpus says, resumed in the middle too."""

import json
import subprocess
import sys

import numpy as np
import pytest

import dpstream as dps
from tests.golden.corpus import RUN, SECRET, outcome, release_lines
from tests.golden.mechanisms import CASES, mechanism, stream


def publish(name, place, *, resume):
    """Feed half of a stream, save the run and go on with it if asked, feed the rest, finish."""
    data, ledger = stream(name), place / "book"
    half = len(data) // 2
    facts = {"secret": SECRET, "ledger": ledger, "state": place / "state" if resume else None}
    runner = dps.Runner(mechanism(name), run_id=RUN, **facts)
    releases = [one for step in runner.feed(data[:half]) for one in step]
    if resume:
        runner.save()
        runner.close()
        runner = dps.Runner(mechanism(name), **facts)
    releases += [one for step in runner.feed(data[half:]) for one in step]
    releases += runner.finish()
    runner.close()
    return outcome(release_lines(releases), ledger), releases


@pytest.mark.parametrize("name", CASES)
def test_mechanism(golden, name, tmp_path):
    """The releases, the ledger, and the same of a run that was saved and gone on with."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "resumed").mkdir()
    whole, releases = publish(name, tmp_path / "whole", resume=False)
    resumed, again = publish(name, tmp_path / "resumed", resume=True)
    book = dps.Ledger()
    series = dps.release(mechanism(name), stream(name), secret=SECRET, run_id=RUN, ledger=book)

    golden.check(f"mechanism/{name}", whole, resumed)
    assert len(releases) == len(stream(name))
    for one, other in zip(releases, again, strict=True):
        assert np.array_equal(one.values, other.values)  # to the last bit
    assert np.array_equal(series.values, [one.values for one in releases])


def test_no_mechanism_is_left_out():
    """What `dpstream mechanisms` lists has a case."""
    listed = subprocess.check_output([sys.executable, "-m", "dpstream", "mechanisms", "--json"])

    assert {one["name"] for one in json.loads(listed)} == {n.partition("/")[0] for n in CASES}
