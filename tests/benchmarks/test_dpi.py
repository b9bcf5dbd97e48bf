"""The bench of DPI on short streams: its rows, its targets, and that misses are shown."""

import dataclasses
import json

import numpy as np
import pytest

import benchmarks as bench
from benchmarks import dpi, dpi_findings, dpi_runs
from benchmarks.dpi import targets
from benchmarks.streams import Stream
from dpstream.errors import BudgetExceeded


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """A run with few slots, few bins and a small pool."""
    patch = pytest.MonkeyPatch()
    small = {"epsilons": (2, 10), "slots": 100, "pool_size": 300, "domains": (1_000,)}
    more = {"domain_slots": 5, "long_slots": 60, "budget_slots": 300}
    patch.setattr(dpi, "QUICK", dataclasses.replace(dpi.QUICK, **small, **more))
    patch.setattr(dpi_runs, "DOMAIN", 200)
    patch.setattr(dpi_runs, "POOL", 50)
    out = tmp_path_factory.mktemp("bench")
    patch.delenv("DPSTREAM_DATA", raising=False)
    found = bench.run("dpi", quick=True, out=out)
    patch.undo()
    return found, out


def test_every_form_stands_beside_what_needs_no_data(result):
    """On every stream that is there; one that is not says why."""
    rows = [row for row in result[0]["rows"] if row["part"] == "error"]
    gaussian = [r["form"] for r in rows if (r["stream"], r.get("epsilon")) == ("gaussian", 10)]

    assert gaussian == [*dpi.FORMS, dpi.UNIFORM, dpi.BLIND]
    for row in rows:
        if "mse" in row:
            assert row["mse"] >= 0
            assert row["kl"] >= 0
            assert 0 <= row["precision"] <= 1
    assert "DPSTREAM_DATA" in next(row["note"] for row in rows if row["stream"] == "t-drive")


def test_with_bounded_rows_and_a_large_epsilon_the_skewed_stream_is_learnt(result):
    """What the docs say about when it is worth using."""
    rows = [row for row in result[0]["rows"] if row["part"] == "error"]
    zipf = {r["form"]: r["kl"] for r in rows if (r["stream"], r.get("epsilon")) == ("zipf", 10)}

    assert zipf["default"] < 0.1 * zipf[dpi.UNIFORM]
    assert zipf["Algorithm 3"] > 0.9 * zipf[dpi.UNIFORM]


def test_results_are_written(result):
    """JSON and a plot; budgets, learning rates and the long run have their rows."""
    found, out = result
    stored = json.loads((out / "dpi.json").read_text())
    parts = {row["part"] for row in stored["rows"]}

    assert parts == {
        *("error", "time", "budget", "eta", "true cost", "long"),
        *("spread", "statistics", "loss"),
    }
    assert (out / "dpi.png").stat().st_size > 10_000
    assert stored["targets"] == found["targets"]
    long = [row for row in stored["rows"] if row["part"] == "long"]
    assert long[-1]["slots"] == 60
    assert long[-1]["state_bytes"] <= long[0]["state_bytes"] + 64


def test_targets_that_do_not_depend_on_the_machine_are_reached(result):
    """Budget, digits, true cost, refusals."""
    judged = {one["name"]: one["reached"] for one in result[0]["targets"]}
    timed = [name for name in judged if "minutes" in name]

    assert len(timed) == 2
    unjudged = {name for name, reached in judged.items() if reached is None}
    assert len(unjudged) == 3  # too few noise seeds
    assert all(reached for name, reached in judged.items() if name not in {*timed, *unjudged})


def test_an_overspent_budget_and_a_wrong_digit_are_missed(result):
    """Control."""
    rows = [dict(row) for row in result[0]["rows"]]
    for row in rows:
        if row["part"] == "budget":
            row["spent"] = 1.001
        if row["part"] == "eta" and row.get("slot") == 2:
            row["value"] = 0.0191
    missed = [one["name"] for one in targets(rows) if one["reached"] is False]

    assert len([name for name in missed if "spent" in name]) == 2
    assert any("four digits" in name for name in missed)


def test_a_default_that_is_further_than_uniform_or_than_a_schedule_is_missed():
    """The same rows with other figures: reached at the bound, missed beyond it."""
    row = {"part": "spread", "runs": 25, "uniform_kl": 1.0, "epsilon": 1}
    cells = [row | {"stream": f"stream {n}", "form": "default", "kl": 0.5} for n in range(3)]
    moving = [
        row | {"stream": name, "form": form, "kl": kl}
        for name in dpi_findings.MOVING
        for form, kl in (("default", 1.0), ("best sparse schedule", 0.5))
    ]
    further = [one | {"kl": 1.1} if one["form"] == "default" else one for one in moving]
    reached = [one["reached"] for one in dpi_findings.spread_targets(cells + moving)]
    missed = [one["reached"] for one in dpi_findings.spread_targets(cells + further)]

    assert reached == [True, True, True]
    assert missed == [False, False, False]


def test_the_best_sparse_schedule_of_a_steady_stream_publishes_once_and_well():
    """Of a stream that turns, more than once; with next to no budget it is no better than blind."""
    rows = 10_000 / np.arange(1.0, 21)
    steady = np.rint(np.tile(rows, (48, 1))).astype(np.int64)
    turning = np.where(np.arange(48)[:, None] % 24 < 12, steady, steady[:, ::-1])

    def best(block, epsilon):
        stream = Stream(name="made", source="test", block=block)
        return dpi_findings.best_sparse(stream, epsilon, dpi_runs.distributions(block), runs=3)

    assert best(steady, 10)["kl"] < 0.1 < 1 < best(steady, 1e-4)["kl"]
    assert best(turning, 10)["publications"] in {4, 8, 12, 16, 24, 32, 48}
    assert best(turning, 10)["kl"] < 0.2


def test_what_others_lose_grows_with_the_slots_and_dpi_stays_within_epsilon():
    """A tree for one event loses as much as a count in every slot: each row moves its path."""
    lost = {(row["method"], row["slots"]): row["loss"] for row in dpi_findings.loss_rows()}
    methods = {method for method, _ in lost}

    assert lost["a noisy count in every slot", 50] == 25
    assert lost["a tree over all slots, 0.5 for one event", 500] == 250
    assert lost["uniform, w = 10", 500] == 25
    for method in methods - {"dpi"}:
        assert lost[method, 500] > 20 * lost[method, 5] > 0
    assert 0 < lost["dpi", 5] <= lost["dpi", 500] < 0.5


def test_the_ledger_judges_the_schedules(monkeypatch):
    """A schedule that used a term twice would be refused."""

    class Again:
        def start(self):
            return None

        def pick(self, used, slot):
            return None, 1

    monkeypatch.setattr(dpi_runs, "allocation", lambda *_, **__: Again())
    with pytest.raises(BudgetExceeded):
        dpi_runs.budget_rows(5)


def test_the_papers_stream_is_nearly_even():
    """Mean 100, standard deviations 1 to 10, drawn afresh in every slot."""
    block = np.concatenate(list(dpi_runs.gaussian_counts(600)))
    spread = block.std(axis=1)

    assert block.shape == (600, 100)
    assert abs(block.mean() - 100) < 0.2
    assert set(np.rint(spread)) >= set(range(2, 10))
    assert 0.7 < spread.min() < 1.5
    assert 8 < spread.max() < 13


def test_applications_of_the_data_themselves_agree_with_themselves():
    """And those of other data do not: a stream against itself, and against its bins turned."""
    rng = np.random.default_rng(3)
    pdfs = rng.dirichlet(np.linspace(0.2, 9, 40), 200)
    pdfs[[50, 90, 120, 150, 180]] = rng.dirichlet(np.ones(40) / 9, 5)
    own, turned = dpi._applied(pdfs), dpi._applied(np.roll(pdfs[::-1], 7, axis=1))
    found = [[float(a[b].mean()) for a, b in dpi._compared(other, own)] for other in (own, turned)]

    assert found[0] == [1.0] * len(dpi.APPLIED)
    assert set(np.flatnonzero(own[0])) >= {50, 90, 120, 150, 180}
    assert set(np.flatnonzero(own[2])) >= {50, 90, 120, 150, 180}  # the forest finds them, too
    assert max(found[1][:-1]) < 0.5
