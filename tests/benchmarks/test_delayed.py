"""The delay bench: its cells, rows and targets on short series, and that an overspend is shown."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

import benchmarks as bench
from benchmarks import delayed, delayed_figures
from benchmarks.delayed_figures import EVERYTHING, TABLE, Cell
from benchmarks.delayed_trials import (
    MIDPOINT,
    PUBLISHED,
    SOUND,
    Series,
    method,
    midpoint,
    released,
    series,
    trials,
    truncated_method,
)
from dpstream.mechanisms import Naive

SHORT = Series(name="s", source="", values=np.arange(30) % 7, lo=0, hi=10, bucket=5)


@pytest.fixture
def tiny(monkeypatch):
    """Series of 24 steps, two runs, one epsilon and delay, few mechanisms; nothing from outside."""
    plan = replace(
        delayed_figures.QUICK, runs=2, steps=24, epsilons=(1.0,), delays=(10,), timed=200,
        many_delays=(10,), thetas=(5,), buckets=(10,),
    )  # fmt: skip
    monkeypatch.setattr(delayed_figures, "QUICK", plan)
    monkeypatch.setattr(delayed, "_WARM", 20)
    monkeypatch.delenv("DPSTREAM_DATA", raising=False)


def row(mechanism, mae, *, name="foodmart", epsilon=0.1, delay=10, **others):
    """A row of Figures 2 and 3, with the figures that targets read."""
    return {"figure": EVERYTHING, "series": name, "epsilon": epsilon, "delay": delay,
            "mechanism": mechanism, "mae": mae, "mae_se": mae / 100, "clamped": mae,
            "share": mae, "refused": None, "note": ""} | others  # fmt: skip


def named(judged, part):
    (one,) = [one for one in judged if part in one["name"]]
    return one


def grid(**factors):
    """Every judged cell: all printed forms at 2, the sound ones at 1 or what `factors` say."""
    rows = []
    for name in ("covid deaths", "foodmart"):
        for epsilon in delayed.JUDGED_EPSILONS:
            at = {"name": name, "epsilon": epsilon}
            rows += [row(form, 2.0, **at) for form in PUBLISHED]
            rows += [row(form, factors.get(form, 1.0), **at) for form in (*SOUND, MIDPOINT)]
    return rows


@pytest.mark.bench
@pytest.mark.usefixtures("tiny")
def test_a_run_has_every_figure_its_targets_and_a_plot(tmp_path):
    """One row per cell, one target per demand, progress that only grows."""
    steps = []

    result = bench.run(
        "delayed", quick=True, out=tmp_path, progress=lambda *step: steps.append(step[:2])
    )

    rows = result["rows"]
    everything = [one for one in rows if one["figure"] == EVERYTHING]
    assert len(everything) == 4 * (len(SOUND) + len(PUBLISHED) + 1)
    assert {one["figure"] for one in rows} == {
        "2, 3", "4", "5", "6", "7 to 10", "table III", "speed",
    }  # fmt: skip
    assert all(one["mae_se"] > 0 for one in everything if one["mechanism"] != MIDPOINT)
    assert {one["note"] for one in everything} == {"generated", "bundled"}
    assert all(one["steps_per_second"] > 0 for one in rows if one["figure"] == "speed")
    assert named(result["targets"], "ledger refused")["reached"] is True
    assert named(result["targets"], "slowest mechanism")["reached"] is None
    assert any("a short run" in note for note in result["notes"])
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1]
    assert json.loads((tmp_path / "delayed.json").read_text()) == result
    assert (tmp_path / "delayed.png").read_bytes().startswith(b"\x89PNG")


def test_noise_is_fixed_by_name():
    """The same cell again has the same figures; another name has others."""
    one, two, other = (
        trials(Naive(epsilon=1, lo=0, hi=10), SHORT, runs=3, fixed=name) for name in "aac"
    )

    assert one.plain == two.plain
    assert set(one.plain).isdisjoint(other.plain)


@pytest.mark.parametrize("name", [*SOUND, *PUBLISHED])
def test_bins_are_independent_runs(name):
    """What one bin releases does not change when the others hold another series."""
    one = method(name, SHORT, epsilon=2, delay=4)
    block = np.repeat(SHORT.values[:, None], 3, axis=1)
    other = block.copy()
    other[:, 1:] = 10 - other[:, 1:]
    same = {"fixed": name, "limited": one.limited}

    first, second = released(one.mechanism, block, **same), released(one.mechanism, other, **same)

    assert np.array_equal(first[:, 0], second[:, 0])
    assert not np.array_equal(first[:, 1], second[:, 1])


@pytest.mark.parametrize("name", SOUND)
def test_sound_forms_stay_within_a_book_of_epsilon(name):
    """Nothing is refused, and every step is released."""
    found = trials(method(name, SHORT, epsilon=1, delay=5).mechanism, SHORT, runs=2, fixed=name)

    assert found.refusal == ""
    assert len(found.plain) == 2


@pytest.mark.parametrize("name", ["pegasus as published", "contin_group as published"])
def test_published_forms_that_overspend_are_refused(name):
    """A book of epsilon has no room for tests that cost twice what they claim."""
    published = method(name, SHORT, epsilon=1, delay=5)

    held = trials(published.mechanism, SHORT, runs=2, fixed="it", limited=True)
    let = trials(published.mechanism, SHORT, runs=2, fixed="it", limited=published.limited)

    assert "epsilon" in held.refusal
    assert math.isnan(held.mae()[0])
    assert len(let.plain) == 2


def test_truncation_is_run_apart():
    """A bound is chosen for one series; runs that shared it would not be runs."""
    for name in ("contin_group pp", "contin_group pp as published"):
        one = truncated_method(name, SHORT, epsilon=1, delay=10)
        assert one.apart
        found = trials(one.mechanism, SHORT, runs=2, fixed=name, limited=one.limited, apart=True)
        assert found.plain[0] != found.plain[1]


def test_the_midpoint_needs_no_data():
    """Its error is the mean distance from the middle of the range."""
    assert midpoint(replace(SHORT, values=np.array([0, 5, 10]))).plain == [10 / 3]


def test_series_stay_in_their_ranges(monkeypatch):
    """Also the generated ones; a folder without a file falls back to them."""
    monkeypatch.setenv("DPSTREAM_DATA", "/nonexistent")
    found = series()

    assert [(one.name, one.source, len(one.values)) for one in found] == [
        ("covid deaths", "generated", 216),
        ("unemployment", "bundled", 622),
        ("outpatients", "generated", 1_212),
        ("foodmart", "generated", 18_319),
    ]
    for one in found:
        assert one.lo <= one.values.min()
        assert one.values.max() <= one.hi
        assert one.values.max() - one.values.min() > 0.8 * (one.hi - one.lo)


def test_a_sound_form_is_judged_by_its_worst_cell():
    """One cell above the printed form is enough to miss; its place and spread are named."""
    good = delayed.targets(grid(), [], timed=0)
    bad = delayed.targets(
        [one | {"mae": 2.2, "mae_se": 0.022} if _is(one, "buc_order", "foodmart", 0.5) else one
         for one in grid()], [], timed=0,
    )  # fmt: skip

    for name in ("discontin_group:", "discontin_group pp:", "comp_order:", "buc_order:"):
        assert (named(good, name)["value"], named(good, name)["reached"]) == (0.5, True)
    judged = named(bad, "buc_order:")
    assert judged["value"] == pytest.approx(1.1)
    assert judged["reached"] is False
    assert judged["cell"] == "foodmart, epsilon 0.5, w 10"
    assert judged["se"] == pytest.approx(1.1 * math.hypot(0.01, 0.01))


def test_the_best_reading_of_a_printed_form_counts():
    """CompOrder has two; being better than the worse one is not enough."""
    rows = [
        one | {"mae": 0.8} if one["mechanism"] == "comp_order, both ends as published" else one
        for one in grid()
    ]

    judged = named(delayed.targets(rows, [], timed=0), "comp_order:")

    assert (judged["value"], judged["reached"]) == (1.25, False)


def test_the_factor_of_thirty_stands_beside_the_midpoint():
    """Both sides of it may be far worse than an answer that needs no data."""
    rows = [
        row("pegasus as published", 87.0), row("buc_order as published", 3.0),
        row("buc_order", 2.0), row(MIDPOINT, 1.5),
    ]  # fmt: skip

    judged = delayed._thirty(rows)

    assert [one["value"] for one in judged] == [29, 43.5, 4 / 3, 2, 58]
    assert [one["reached"] for one in judged] == [True, True, False, True, True]
    assert {one["reached"] for one in delayed._thirty([])} == {None}


def test_a_refused_release_misses_its_target():
    """No figure is not a good figure."""
    rows = grid()
    for one in rows:
        if _is(one, "buc_order", "foodmart", 0.5):
            one |= {"mae": math.nan, "refused": 1}

    judged = delayed.targets(rows, [], timed=0)

    assert named(judged, "buc_order:")["reached"] is False
    assert named(judged, "ledger refused")["value"] == 1


def test_table_three_is_relative_to_naive():
    """Only its two series, its delay and its epsilons."""
    rows = [
        row("naive", 8.0, name="unemployment"), row("buc_order", 2.0, name="unemployment"),
        row("adapub, one event", 10.0, name="unemployment", figure=TABLE),
        row("naive", 8.0, name="unemployment", epsilon=0.3), row("naive", 1.0),
    ]  # fmt: skip

    assert [(one["mechanism"], one["over_naive"]) for one in delayed.table_three(rows)] == [
        ("naive", 1.0), ("buc_order", 0.25), ("adapub, one event", 1.25),
    ]  # fmt: skip


def test_short_series_have_more_runs():
    """So many that all runs of a cell have about the same number of values."""
    plan = replace(delayed_figures.QUICK, runs=2, values=100)
    cell = Cell(figure=EVERYTHING, series=SHORT, epsilon=1, delay=5, mechanism="naive")

    assert len(delayed_figures.measured(cell, plan).plain) == 4


def _is(one, mechanism, name, epsilon):
    return (one["mechanism"], one["series"], one["epsilon"]) == (mechanism, name, epsilon)
