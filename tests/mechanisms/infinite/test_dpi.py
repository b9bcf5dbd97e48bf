"""DPI: what is charged, what is published, what a user in every slot can move."""

import dataclasses
from fractions import Fraction as F

import numpy as np
import pytest

import dpstream as dps
from dpstream.audit.controls.published_mechanisms import DpiGapsOfData, DpiPublished
from dpstream.audit.replay import Changed, record, replay
from dpstream.errors import BudgetExceeded, InvalidInput, InvalidParameter, StateError
from dpstream.mechanisms.infinite.dpi import SCORE, Dpi
from dpstream.mechanisms.infinite.synopsis_pool import pool
from dpstream.privacy.state import pack
from tests.support.fixed import RUN, SECRET
from tests.support.long import part_of

SMALL = {"pool_size": 50, "rows_per_user": 1, "dummy_rows": 30}
EVERY = {**SMALL, "allocation": "in_order", "series": "telescoping"}  # both draws in every slot


def skewed(slots, bins=8, seed=0, rows=2000):
    shares = 1 / np.arange(1.0, bins + 1)
    return np.random.default_rng(seed).poisson(rows * shares / shares.sum(), (slots, bins))


def regular(block):
    """A user with one row in the same bin of every slot comes in."""
    other = block.copy()
    other[:, 0] += 1
    return other


def kind(call):
    """What is drawn; the purpose names the pool too."""
    return call.purpose.split()[0]


@pytest.mark.parametrize(
    "more",
    [
        {"allocation": "random", "rate": 1000},
        {"allocation": "ranges"},
        {"allocation": "in_order"},
        {"allocation": "sparse"},
        {"gap": 1},
        {"gap": 1, "publish": "histogram"},
        {"gap": 2, "publish": "synopsis", "series": "telescoping"},
        {"gap": 1, "queries": (8, 2), "half_life": 3},
        {"series": "dilogarithm", "decay_rate": 0.5, "allocation": "ranges"},
        {"queries": (8, 2), "allocation": "ranges"},
        {"half_life": 50, "queries": (8, 4, 2), "allocation": "in_order"},
    ],
    ids=str,
)
def test_the_ledger_never_sees_more_than_epsilon(more):
    """Over a thousand slots, or half, with every rule; what is left is what the terms say."""
    mechanism = Dpi(epsilon="0.3", **{**SMALL, "pool_size": 8, **more})
    runner = dps.Runner(mechanism, secret=SECRET, run_id=RUN)
    for _ in runner.feed(skewed(part_of(1000, of=2))):
        pass

    assert 0 <= runner.left < F("0.3")


def test_both_draws_are_charged_half_of_the_slots_budget():
    """alpha_t = eps_t / (4 Delta_s) for each of two draws; a single query leaves one draw."""
    two, one = (
        record(Dpi(epsilon=1, **EVERY, queries=q), skewed(5), secret=SECRET, run=RUN)[0]
        for q in ((8, 2), (8,))
    )

    assert [(c.step, kind(c), c.amount) for c in two] == [
        (t, purpose, F(1, 2 * (t + 1) * (t + 2)))
        for t in range(5)
        for purpose in ("query", "synopsis")
    ]
    assert [(kind(c), c.amount) for c in one] == [
        ("synopsis", F(1, (t + 1) * (t + 2))) for t in range(5)
    ]


def test_a_sum_over_t_slots_is_drawn_with_t_times_the_sensitivity():
    """Which is the running mean with the sensitivity of one score."""
    mechanism = Dpi(epsilon=1, **EVERY, queries=(8, 2))
    calls, _ = record(mechanism, skewed(6), secret=SECRET, run=RUN)
    change = mechanism._scoring.change(mechanism.pdf_change, 8)

    assert float(change) / SCORE == pytest.approx(2 / 31, rel=1e-3)  # 2 Delta_Q / mu
    assert [c.sensitivity / change for c in calls if kind(c) == "synopsis"] == [1, 2, 3, 4, 5, 6]
    assert [c.sensitivity / change for c in calls if kind(c) == "query"] == [1, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("half_life", [None, 1, 2, 7])
@pytest.mark.parametrize("queries", [(), (8, 2)])
def test_a_user_in_every_slot_moves_no_sum_by_more_than_is_declared(queries, half_life):
    """Along the recorded path, also where the past fades; the whole loss stays within epsilon."""
    mechanism = Dpi(epsilon=2, **EVERY, queries=queries, half_life=half_life)
    block = skewed(40, rows=6)
    calls, _ = record(mechanism, block, secret=SECRET, run=RUN)
    result = replay(mechanism, regular(block), calls, original=block)

    assert result.violations == []
    assert 0 < result.loss <= 2


ADAPTIVE = {**SMALL, "gap": 2, "series": "level"}


@pytest.mark.parametrize(
    "more", [{}, {"publish": "synopsis"}, {"queries": (8, 2)}, {"half_life": 3}], ids=str
)
@pytest.mark.parametrize("epsilon", [2, 400])
def test_what_was_drawn_says_when_to_publish_next(more, epsilon):
    """The same draws over a user's absence: the same questions at the same slots, within epsilon.

    Slots that are not listened to are in no sum: a sum counts those that are.
    """
    mechanism = Dpi(epsilon=epsilon, **ADAPTIVE, **more)
    block = np.concatenate([skewed(60, rows=6), skewed(60, rows=6)[:, ::-1]])
    calls, _ = record(mechanism, block, secret=SECRET, run=RUN)
    result = replay(mechanism, regular(block), calls, original=block)

    assert result.violations == []
    assert 0 < result.loss <= epsilon
    assert len({call.step for call in calls}) > 5


def test_gaps_that_follow_the_data_are_caught():
    """Control: when to publish next is read off the exact counts."""
    mechanism = DpiGapsOfData(epsilon=2, **ADAPTIVE)
    block = np.full((30, 2), 5)
    calls, _ = record(mechanism, block, secret=SECRET, run=RUN)

    with pytest.raises(Changed):
        replay(mechanism, regular(block), calls, original=block)


def test_a_stream_that_turns_is_published_more_often_than_one_that_does_not():
    """Read off the releases; and one that turned once is known again. Any noise shows it."""
    facts = {"epsilon": 20, "rows_per_user": 1, "dummy_rows": 500, "pool_size": 400, "gap": 4}
    steady = skewed(400, bins=16, rows=20_000)
    turning = steady.copy()
    for first in range(20, 400, 40):
        turning[first : first + 20] = turning[first : first + 20, ::-1]
    once = np.concatenate([steady[:150], steady[150:, ::-1]])
    one, other, third = (
        dps.release(Dpi(**facts), block, secret=SECRET, run_id=RUN)
        for block in (steady, turning, once)
    )

    assert sum(other.paid) > 2 * sum(one.paid)
    assert np.flatnonzero(third.paid)[-1] == 316  # after half a gap, not after another whole one
    assert np.abs(third.values[-30:] - once[-30:] / 20_000).sum(axis=1).mean() < 0.2


def test_the_printed_form_is_caught():
    """Control: drawn as if it were one score, the sum moves by more than declared."""
    mechanism = DpiPublished(epsilon=2, **EVERY)
    block = skewed(40, rows=6)
    calls, _ = record(mechanism, block, secret=SECRET, run=RUN)
    result = replay(mechanism, regular(block), calls, original=block)

    assert len(result.violations) > 20
    assert result.loss > 2


def test_what_is_published_is_a_member_of_the_pool():
    """Never a mean of synopses or anything else that the data could shape."""
    series = dps.release(Dpi(epsilon=1, **EVERY), skewed(40), secret=SECRET, run_id=RUN)
    synopses = pool("mixed", bins=8, size=50, seed=0)
    members = np.array([synopses.pdf(j) for j in range(50)])

    for row in series.values:
        assert (members == row).all(axis=1).any()
    assert len(np.unique(series.values, axis=0)) > 10


def test_between_publications_the_last_one_is_held_and_nothing_is_charged():
    """Slots 1, 4, 16 of the sparse rule pay."""
    sparse = Dpi(epsilon=1, **SMALL, allocation="sparse")
    runner = dps.Runner(sparse, secret=SECRET, run_id=RUN)
    releases = [r for batch in runner.feed(skewed(20)) for r in batch]

    assert [r.step for r in releases if r.paid] == [0, 3, 15]
    assert runner.ledger.report()[0]["spent_on"][0]["charges"] == 3
    assert all((releases[3].values == r.values).all() for r in releases[3:15])
    assert all(r.held != r.paid for r in releases)


def test_with_bounded_rows_it_learns_the_distribution():
    """Closer than the uniform one at epsilon 2; blind without bounds, as no budget can help it."""
    block = skewed(70, bins=30, rows=20_000)
    truth = block / block.sum(axis=1, keepdims=True)
    even = np.abs(truth - 1 / 30).sum(axis=1).mean()
    errors = {}
    for name, bounds in (("bounded", {"rows_per_user": 1, "dummy_rows": 500}), ("free", {})):
        values = dps.release(Dpi(epsilon=2, **bounds), block, secret=SECRET, run_id=RUN).values
        errors[name] = np.abs(values - truth).sum(axis=1).mean()

    assert errors["bounded"] < 0.5 * even
    assert errors["free"] > 0.7 * even


def test_half_lives_follow_a_stream_that_turns():
    """What was true at first is forgotten."""
    block = np.concatenate([skewed(60, rows=20_000), skewed(196, rows=20_000)[:, ::-1]])
    plain = {"epsilon": 20, "rows_per_user": 1, "dummy_rows": 500, "pool_size": 400}
    shares = block[-1] / block[-1].sum()
    last = {}
    for half_life in (None, 8):
        values = dps.release(
            Dpi(**plain, half_life=half_life), block, secret=SECRET, run_id=RUN
        ).values
        last[half_life] = np.abs(values[-1] - shares).sum()

    assert last[8] < 0.3
    assert last[8] <= last[None]


def test_a_restart_with_algorithm_3_goes_on_as_if_nothing_had_happened(tmp_path):
    """The used terms are part of the state; its size does not grow."""
    mechanism = Dpi(epsilon=1, **SMALL, allocation="random", rate=100, series="telescoping")
    block = skewed(60)
    whole = dps.Runner(mechanism, secret=SECRET, run_id=RUN)
    expected = [r.values.tobytes() for batch in whole.feed(block) for r in batch]
    state = tmp_path / "state"
    first = dps.Runner(mechanism, state=state, secret=SECRET, run_id=RUN)
    before = [r.values.tobytes() for batch in first.feed(block[:31]) for r in batch]
    size = len(pack(first._progress.state, kind="mechanism state"))
    first.save()
    first.close()
    second = dps.Runner(mechanism, state=state, secret=SECRET)
    after = [r.values.tobytes() for batch in second.feed(block[31:]) for r in batch]

    assert before + after == expected
    assert len(pack(second._progress.state, kind="mechanism state")) <= size + 16


def test_a_run_goes_on_with_its_own_pool_only():
    """A pool that came out differently (another version, another library) is noticed."""
    mechanism = Dpi(epsilon=1, **SMALL)
    runner = dps.Runner(mechanism, secret=SECRET, run_id=RUN)
    runner.step(skewed(1)[0])
    state = runner._progress.state
    runner._progress = runner._progress._replace(state=dataclasses.replace(state, pool="another"))

    with pytest.raises(StateError, match="not the one that the run began with"):
        runner.step(skewed(1)[0])


def test_another_pool_never_meets_the_same_noise():
    """The address of every draw names the pool: the same run over another one draws afresh."""
    calls = {
        seed: record(Dpi(epsilon=1, **EVERY, seed=seed), skewed(3), secret=SECRET, run=RUN)[0]
        for seed in (0, 1)
    }

    assert calls[0][0].purpose != calls[1][0].purpose


def test_a_second_run_on_the_same_book_is_refused():
    """The promise is for ever and for all runs together."""
    ledger = dps.Ledger()
    mechanism = Dpi(epsilon=1, **EVERY)
    dps.release(mechanism, skewed(20), ledger=ledger)

    with pytest.raises(BudgetExceeded, match="agree on a larger book"):
        dps.release(mechanism, skewed(1), ledger=ledger)


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"epsilon": 0}, "epsilon must be greater than 0"),
        ({"dummy_rows": 5}, "give rows_per_user too"),
        ({"rows_per_user": 0}, "rows_per_user must be a whole number of at least 1"),
        ({"pool": "sobol"}, "pool must be one of"),
        ({"allocation": "uniform"}, "allocation must be one of"),
        ({"series": "geometric"}, "series must be one of"),
        ({"overfitting_bound": 3}, "overfitting_bound in"),
        ({"epsilon": 9, "series": "dilogarithm"}, "needs epsilon < 6.57974"),
        ({"queries": (1,)}, "at least 2"),
        ({"half_life": 0}, "half_life must be"),
        ({"gap": 0}, "gap must be a whole number of at least 1"),
        ({"publish": "mean"}, "publish must be one of posterior, synopsis"),
        ({"publish": "posterior", "queries": (8, 2)}, "ask for one, or publish='synopsis'"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(parameters, problem):
    """When the mechanism is made, with what was found and what to do."""
    with pytest.raises(InvalidParameter, match=problem):
        Dpi(**{"epsilon": 1, **parameters})


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"publish": "synopsis", "gap": 3},
        {"queries": (8, 2)},
        {"allocation": "sparse"},
        {"allocation": "sparse", "publish": "posterior"},
    ],
    ids=str,
)
def test_what_is_written_of_it_makes_it_again(more):
    """Also where parameters that came later have no key: a run is taken up as it was begun."""
    dpi = Dpi(epsilon=1, **more)
    names = Dpi.names_of_keys()

    assert Dpi(**{names[key]: value for key, value in dpi.written().items()}) == dpi
    if more == {"allocation": "sparse"}:
        assert not {"publish", "gap"} & set(dpi.written())


def test_one_bin_is_no_distribution():
    """It would always be 1."""
    with pytest.raises(InvalidInput, match="at least 2 bins"):
        dps.release(Dpi(epsilon=1), [[3], [4]])
