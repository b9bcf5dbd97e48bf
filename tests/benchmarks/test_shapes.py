"""The bench of generated shapes: its rows, its targets, and that a miss is shown."""

import numpy as np
import pytest

import benchmarks as bench
from benchmarks import shapes
from benchmarks.shapes import Plan, judge, targets
from benchmarks.streams import SHAPES, shape


def row(mechanism, mre, covered=0.95):
    return {"shape": "steps", "epsilon": 0.5, "mechanism": mechanism, "mre": mre} | {
        "covered": covered
    }


def test_every_run_has_a_stream_of_its_own():
    """The same again for the same run; whole counts from 0 on."""
    for name in SHAPES:
        one, other = (shape(name, steps=400, run=run) for run in (0, 1))

        assert np.array_equal(one, shape(name, steps=400, run=0))
        assert one.shape == other.shape
        assert not np.array_equal(one, other)
        assert one.min() >= 0


def test_bursts_are_rare_and_large():
    """About one step in a hundred, a hundred times the base."""
    block = shape("bursts, base 100", steps=20_000, run=0)

    assert 0.007 < (block > 5_000).mean() < 0.013
    assert 80 < np.median(block) < 120


def test_a_miss_is_shown():
    """An error of more than 1.5 times the best other, and deviations that hold too few."""
    near = targets(judge([row("pacer", 1.4), row("sample", 1.0, None), row("uniform", 3.0, None)]))
    far = targets(judge([row("pacer", 1.6, 0.8), row("sample", 1.0, None)]))

    assert [each["reached"] for each in near] == [True, True, True]
    assert [each["reached"] for each in far] == [False, False, True]


@pytest.mark.bench
def test_its_rows_and_its_heat_map(tmp_path, monkeypatch):
    """One row per mechanism and shape; deviations are scored where they are published."""
    monkeypatch.setattr(shapes, "QUICK", Plan(epsilons=(0.5,), window=20, steps=60, runs=2))
    monkeypatch.setattr(shapes, "SHAPES", {"bursts, base 20": None, "near 0, 1 column": None})
    monkeypatch.setattr(shapes, "w_event_mechanisms", lambda: ["sample", "fast_w", "pacer"])

    result = bench.run("shapes", quick=True, out=tmp_path)

    assert len(result["rows"]) == 6
    for each in result["rows"]:
        assert (each["covered"] is None) == (each["mechanism"] == "fast_w")
        assert each["mre_least"] <= each["mre"] <= each["mre_most"]
    assert (tmp_path / "shapes.json").is_file()
