"""The w-event bench: its rows and targets on tiny streams, and that an overspend is shown."""

import json
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

import benchmarks as bench
from benchmarks import w_event, w_event_figures, w_event_findings
from benchmarks.streams import Stream
from dpstream import mechanisms
from dpstream.errors import InvalidParameter
from dpstream.evaluate import trials
from dpstream.mechanisms.base import HistogramMechanism
from dpstream.privacy.ledger.charges import Terms
from dpstream.records import Release

OVERSPENDER = f"{__name__}:Overspender"
LATE = f"{__name__}:Late"


@dataclass(frozen=True, kw_only=True)
class Overspender(HistogramMechanism, identity="test overspender"):
    """Spends epsilon at every step, and claims a book that would allow it."""

    def terms(self):
        return Terms(unit="w_event", total=self.budget * self.window, window=self.window)

    def start(self):
        return None

    def step(self, state, x, spend):
        noisy = spend.laplace(x, sensitivity=1, epsilon=self.budget, purpose="publish")
        return None, [Release(step=spend.step, values=noisy.astype(float), paid=True)]


@dataclass(frozen=True, kw_only=True)
class Late(HistogramMechanism, identity="late"):
    """Releases nothing at once."""

    def start(self):
        return None

    def step(self, state, x, spend):
        return None, []


@pytest.fixture
def tiny(monkeypatch):
    """Two mechanisms, streams of 24 steps, two runs, roads by the dozen."""
    size = w_event_figures.Size(
        windows_streams=(5, 9), windows=(5, 9), groups=(1, 2), bins=8, steps=20, runs=1
    )
    plan = replace(w_event.QUICK, runs=2, steps=24, rome_bins=12, other_bins=3, figures=size)
    monkeypatch.setattr(w_event, "QUICK", plan)
    monkeypatch.setattr(w_event, "_STEPS", {1: (4, 8), 1_000: (2, 4)})
    monkeypatch.setattr(
        w_event, "w_event_mechanisms", lambda: ["uniform", "sample", "budget_absorption"]
    )
    monkeypatch.setattr(w_event, "rome", lambda **road: np.full((20, road["bins"]), 40))
    monkeypatch.delenv("DPSTREAM_DATA", raising=False)


@pytest.fixture
def overspender(monkeypatch):
    """A registered mechanism that breaks its promise."""
    monkeypatch.setitem(mechanisms.REGISTRY, "overspender", OVERSPENDER)
    return "overspender"


def named(result, part):
    (one,) = [one for one in result["targets"] if part in one["name"]]
    return one


def row(stream, mechanism, mre, **others):
    """A row of the bench, with the figures that targets read."""
    return {"stream": stream, "epsilon": 0.5, "window": 120, "mechanism": mechanism, "mre": mre,
            "mae": mre, "clamped": mre, "delta_mre": mre, "refused": None} | others  # fmt: skip


@pytest.mark.bench
@pytest.mark.usefixtures("tiny")
def test_a_run_has_a_row_for_every_cell_and_says_what_is_absent(tmp_path):
    """4 streams x 3 epsilons x (3 mechanisms, zeros, published), 5 absent streams, 3 regimes."""
    steps = []

    result = bench.run(
        "w_event", quick=True, out=tmp_path, progress=lambda *step: steps.append(step[:2])
    )

    rows = result["rows"]
    assert len([one for one in rows if "delta_mre" in one]) == 4 * 3 * 5
    assert [one["stream"] for one in rows if one["note"] == "DPSTREAM_DATA is not set"] == [
        "flu outpatients", "flu deaths", "state flu", "t-drive", "world cup",
    ]  # fmt: skip
    assert len([one for one in rows if one["stream"].startswith("rome")]) == 3 * 3
    heat_map = [one for one in rows if "delta_mre" in one]
    cell = [one for one in heat_map if (one["stream"], one["epsilon"]) == ("synthetic 3", 0.5)]
    judged = [one for one in cell if one["mechanism"] not in ("zeros", "spas as published")]
    best = min(one["mre"] for one in judged)
    assert len(judged) == 3
    assert all(one["delta_mre"] == pytest.approx(one["mre"] / best) for one in cell)
    assert all(one["mre_se"] > 0 for one in cell if one["mechanism"] != "zeros")
    assert next(one for one in cell if one["mechanism"] == "sample")["paid"] == 1 / 24
    assert steps == sorted(steps)
    assert steps[-1] == (1_000, 1_000)
    assert json.loads((tmp_path / "w_event.json").read_text()) == result
    assert (tmp_path / "w_event.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("tiny")
def test_what_was_not_measured_leaves_its_target_open(tmp_path):
    """No pacer, no spas, five streams missing, a short run: open, and never reached."""
    result = bench.run("w_event", quick=True, out=tmp_path)

    for part in ("share of 0 cells", "worst delta_MRE", "spas", "seconds"):
        assert named(result, part)["reached"] is None
    assert named(result, "ledger refused")["reached"] is True


@pytest.mark.bench
@pytest.mark.usefixtures("tiny")
def test_figures_are_the_same_every_time(tmp_path):
    """Noise is fixed by name; only times differ."""
    first, second = (bench.run("w_event", quick=True, out=tmp_path)["rows"] for _ in range(2))

    times = {"seconds": 0, "steps_per_second": 0}
    assert [one | times for one in first] == [one | times for one in second]
    assert (
        len({one["mre"] for one in first if one.get("mechanism") == "uniform" and "mre" in one})
        > 10
    )


@pytest.mark.usefixtures("tiny")
def test_an_overspending_mechanism_is_refused_and_shown(tmp_path, monkeypatch, overspender):
    """The book is opened by the bench, so no claim of the mechanism helps; no error is scored."""
    monkeypatch.setattr(w_event, "w_event_mechanisms", lambda: ["sample", overspender])

    result = bench.run("w_event", quick=True, out=tmp_path)

    all_rows = [one for one in result["rows"] if one.get("mechanism") == overspender]
    rows = [one for one in all_rows if "delta_mre" in one]
    assert len(rows) == 4 * 3
    assert all((one["mre"], one["delta_mre"], one["refused"]) == (None, None, 2) for one in rows)
    assert all("the ledger refused 2 runs" in one["note"] for one in rows)
    refused = sum(one.get("refused") or 0 for one in all_rows)
    assert refused == 24 + 4 * 2  # the heat map's, and those of the figure that varies w
    assert (named(result, "ledger refused")["value"], named(result, "ledger")["reached"]) == (
        refused,
        False,
    )
    others = [one for one in result["rows"] if one.get("mechanism") == "sample"]
    assert all(one["delta_mre"] == 1 for one in others if "delta_mre" in one)


def test_every_registered_w_event_mechanism_takes_part():
    """A new one needs no line in the bench; those of other kinds are left out."""
    found = trials.w_event_mechanisms()

    assert {"uniform", "sample", "budget_distribution", "budget_absorption"} <= set(found)
    assert "naive" not in found


def test_a_mechanism_with_a_delay_is_no_candidate(monkeypatch):
    """Its steps would be compared with the wrong ones."""
    monkeypatch.setitem(mechanisms.REGISTRY, "late", LATE)

    with pytest.raises(InvalidParameter, match="has a delay"):
        trials.trials("late", np.ones((3, 1)), epsilon=1, window=2, runs=1)


def test_wide_streams_are_scored_as_a_whole(monkeypatch):
    """Fed in chunks or at once, the same noise gives the same errors."""
    block = np.arange(200).reshape(50, 4)
    whole = trials.trials("sample", block, epsilon=1, window=7, runs=1, fixed="it").scores[0]
    monkeypatch.setattr(trials, "_CHUNK", 64)
    parts = trials.trials("sample", block, epsilon=1, window=7, runs=1, fixed="it").scores[0]

    assert np.array_equal(whole.absolute, parts.absolute)
    assert (whole.paid, whole.spent) == (parts.paid, parts.spent) == (8 / 50, 1)


def test_zeros_are_wrong_by_the_counts_themselves():
    """MRE 1 where there are counts, 0 where there are none; MAE their mean."""
    score = trials.zeros(np.array([[4, 0], [2, 8]])).scores[0]

    assert (score.relative.tolist(), score.absolute.tolist()) == ([0.5, 1.0], [2.0, 5.0])


def test_the_minimum_is_taken_over_mechanisms_only():
    """A baseline without data may be below it."""
    stream = Stream(name="s", source="generated", block=np.array([[3], [3]]))
    worse = trials.trials("sample", stream.block, epsilon=0.001, window=1, runs=2, fixed="it")

    rows = w_event.cell_rows(stream, 0.001, 1, [worse, trials.zeros(stream.block)])

    assert [one["mechanism"] for one in rows] == ["sample", "zeros"]
    assert rows[0]["delta_mre"] == 1
    assert rows[1]["delta_mre"] < 0.1


def test_pacer_is_judged_by_share_and_worst():
    """Nine cells of ten within 1.2, the tenth at 1.6: the share is reached, the worst is not."""
    rows = [row(f"s{i}", "pacer", 1.0) for i in range(9)] + [row("s9", "pacer", 1.6)]

    share, worst, ledger, *_ = w_event_findings.targets(rows, [])

    assert (share["value"], share["reached"]) == (0.9, True)
    assert (worst["value"], worst["reached"]) == (1.6, False)
    assert ledger["reached"] is True


def test_a_refused_pacer_does_not_count_as_good():
    """No figure is not a good figure."""
    rows = [row("s", "pacer", 1.0), row("t", "pacer", math.nan, refused=2)]

    share, worst, ledger, *_ = w_event_findings.targets(rows, [])

    assert (share["value"], share["reached"]) == (0.5, False)
    assert (worst["reached"], ledger["reached"]) == (False, False)
    elsewhere = w_event_findings.targets([], [], [row("rome", "uniform", math.nan, refused=1)])
    assert elsewhere[2]["value"] == 1


@pytest.mark.parametrize(("good", "reached"), [(9, True), (7, True), (6, False)])
def test_spas_is_ranked_among_the_published_schemes(good, reached):
    """Third of them counts, fourth does not; pacer takes no place; other cells do not count."""
    rows = []
    for i in range(9):
        third = [("pacer", 0.5), ("a", 1.0), ("b", 2.0), ("spas", 3.0 if i < good else 5.0)]
        rows += [row(f"s{i}", name, mre) for name, mre in [*third, ("c", 4.0)]]
        rows.append(row(f"s{i}", "spas", 0.1, epsilon=0.9))

    judged = next(one for one in w_event_findings.targets(rows, []) if "spas" in one["name"])

    assert (judged["value"], judged["reached"]) == (good, reached)
    assert "top 3 of 4 published" in judged["name"]


def test_clamped_competitors_are_counted_apart():
    """The sentence uses what max(., 0) would give, and zeros as they are."""
    rows = []
    for i in range(9):
        rows += [row(f"s{i}", name, 9.0, clamped=0.1) for name in ("a", "b", "c")]
        rows += [row(f"s{i}", "spas", 1.0), row(f"s{i}", "pacer", 0.9), row(f"s{i}", "zeros", 0.8)]

    spas, pacer = w_event_findings.summaries(rows)

    assert "spas is in the top 3 on 0 of 9 streams" in spas
    assert "in 0% of cells when every mechanism is clamped at 0, and in 100% by MAE" in pacer
    assert pacer.endswith("in 100%")


def test_budget_absorption_is_judged_against_the_best_of_the_others():
    """Time is judged at the full size only."""
    errors = {"uniform": 9.0, "sample": 8.0, "budget_absorption": 4.0}
    wide = [row("rome 1,442 x 25,936", name, mae, seconds=6.0) for name, mae in errors.items()]

    *_, ratio, seconds = w_event_findings.targets([], wide)
    assert (ratio["value"], ratio["reached"], seconds["value"]) == (0.5, True, 6.0)

    *_, ratio, seconds = w_event_findings.targets(
        [], [one | {"stream": "rome 1,442 x 500", "mae": 1 / one["mae"]} for one in wide]
    )
    assert (ratio["value"], ratio["reached"], seconds["reached"]) == (2.25, False, None)


@pytest.mark.bench
@pytest.mark.usefixtures("tiny")
def test_the_other_figures_have_rows_where_their_data_are(tmp_path):
    """Roads are generated; the World Cup is absent here, and so are its figures."""
    rows = bench.run("w_event", quick=True, out=tmp_path)["rows"]

    parts = {one.get("part") for one in rows}
    assert {
        w_event_figures.W_STREAMS,
        w_event_figures.LENGTHS,
        w_event_figures.SHARES,
        w_event_figures.W_ROADS,
    } <= parts
    assert {
        w_event_figures.CHANGE_ROADS,
        w_event_figures.GROUPS_ROADS,
        "published forms",
        "speed",
    } <= parts
    assert (
        not {w_event_figures.W_CUP, w_event_figures.CHANGE_CUP, w_event_figures.GROUPS_CUP} & parts
    )
    by_w = [one for one in rows if one.get("part") == w_event_figures.W_ROADS]
    assert {(one["at"], one["window"]) for one in by_w} == {(5, 5), (9, 9)}
    change = [one["at"] for one in rows if one.get("part") == w_event_figures.CHANGE_ROADS]
    assert change == sorted(change)


def test_the_slowest_mechanism_is_judged():
    """One that is too slow misses, whatever the others do."""
    rows = [
        {"stream": "1 bin", "mechanism": name, "steps_per_second": speed}
        for name, speed in (("a", 90_000.0), ("b", 19_999.0))
    ]

    one, many = w_event.speed_targets(rows)

    assert (one["value"], one["reached"]) == (19_999.0, False)
    assert "(b) at 1 bin" in one["name"]
    assert many["reached"] is None


def test_a_published_form_is_set_against_its_sound_one():
    """Worst window over the streams; the errors' ratio as a geometric mean."""
    rows = [
        {"mechanism": "x", "form": form, "stream": stream, "mre": mre, "spent": spent}
        for form, stream, mre, spent in (
            ("sound", "s", 4.0, 0.9), ("published", "s", 1.0, 3.0),
            ("sound", "t", 1.0, 1.0), ("published", "t", 1.0, 2.0),
        )
    ]  # fmt: skip

    assert w_event_figures.published_table(rows) == [
        {"scheme": "x", "sound": 1.0, "published": 3.0, "times": pytest.approx(2)}
    ]


def figure_row(part, stream, at, mechanism, error):
    return {"part": part, "stream": stream, "at": at, "mechanism": mechanism, "mre": error,
            "mae": error, "range": math.nan}  # fmt: skip


def test_findings_are_judged_by_the_rows():
    """The same sentence is confirmed, in part or refuted, as the rows have it."""

    def said(*errors):
        rows = []
        for at, error in enumerate(errors):
            rows.append(
                figure_row(w_event_figures.W_ROADS, "roads", at, "budget_absorption", error)
            )
            rows.append(figure_row(w_event_figures.W_ROADS, "roads", at, "uniform", 2.0))
        return next(one for one in w_event_findings.findings([], rows, []) if "Figure 6" in one)

    assert "confirmed, 3 of 3 places; error over the best: median 1.00" in said(1.0, 1.0, 1.0)
    assert "in part, 2 of 3" in said(1.0, 5.0, 1.0)
    assert "refuted, 1 of 2 places; error over the best: median 4.00, worst 4.00" in said(1.0, 8.0)


def test_groups_are_judged_against_one_group():
    """A finding on groups needs the single group beside it."""
    rows = [
        figure_row(w_event_figures.GROUPS_ROADS, "roads", at, "budget_absorption", error)
        for at, error in ((1, 10.0), (5, 8.0), (20, 9.0))
    ]

    (sentence,) = w_event_findings.findings([], rows, [])
    assert "confirmed for groups that are charged soundly, 0.80 times" in sentence
    assert w_event_findings.findings([], rows[1:], []) == []


def test_delta_is_taken_from_the_best_of_those_that_count():
    """A baseline without data is shown, and is not what the others are divided by."""
    errors = {"a": 2.0, "b": 3.0, "zeros": 1.0, "refused": math.nan}

    delta = w_event.delta_mre(errors, among=["a", "b", "refused"])

    assert (delta["a"], delta["b"], delta["zeros"]) == (1.0, 1.5, 0.5)
    assert math.isnan(delta["refused"])
    assert w_event.delta_mre({"a": 2.0, "zeros": 1.0}) == {"a": 2.0, "zeros": 1.0}


def test_delta_of_a_perfect_release():
    """Nothing is divided by zero."""
    assert w_event.delta_mre({"a": 0.0, "b": 0.0, "c": 1.0}) == {"a": 1, "b": 1, "c": math.inf}
