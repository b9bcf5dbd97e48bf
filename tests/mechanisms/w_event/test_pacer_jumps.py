"""Jumps: a one-step spike is forgotten, a level that shifts is followed, deviations are honest."""

import numpy as np
import pytest

import dpstream as dps
from dpstream.mechanisms import Pacer, Sample
from dpstream.mechanisms.w_event import pacer_jumps
from dpstream.mechanisms.w_event.pacer_jumps import SHIFT, SPIKE, hold, learn_jumps, no_jumps
from dpstream.mechanisms.w_event.pacer_models import first_belief, later, models
from tests.support.fixed import RUN, SECRET

GRID, SCALE, WINDOW = models(1.0, 40, thin=False), 10.0, 40


def learnt(series, bins=1):
    """Jumps, bank and belief after these releases, five steps apart; the same in every bin."""
    jumps, belief = no_jumps(bins, WINDOW), None
    bank, _ = first_belief(np.full(bins, float(series[0])), SCALE, GRID)
    for value in series[1:]:
        z = np.full(bins, float(value))
        jumps, bank, belief = learn_jumps(jumps, bank, z, SCALE, 5, GRID, WINDOW)
    return jumps, bank, belief


QUIET = [500, 508, 493, 503, 489, 507, 500, 511, 496, 502] * 2


def test_a_spike_is_forgotten():
    """Back at the old level, the bank is about as sure of it as if there had been no spike."""
    jumps, bank, _ = learnt([*QUIET, 50_000, 505])
    calm = later(learnt([*QUIET, 500, 505])[1], 3.0, GRID)
    now = later(bank, 3.0, GRID)

    assert jumps.before is None
    assert jumps.counts[SPIKE, 0] > jumps.counts[SHIFT, 0]
    assert abs(now.level[0] - 500) < 10
    assert now.typical[0] < 2 * calm.typical[0]


def test_a_shift_is_followed():
    """There again at the next release, it is the new level, and its size is remembered."""
    jumps, bank, _ = learnt([*QUIET, 5_000, 5_010])

    assert jumps.before is None
    assert jumps.counts[SHIFT, 0] > jumps.counts[SPIKE, 0]
    assert abs(later(bank, 3.0, GRID).level[0] - 5_000) < 60
    assert jumps.sizes[SHIFT, 0] > 3_000


def test_until_the_next_release_both_are_weighed():
    """The lower level is held, and the deviation covers the other one."""
    jumps, bank, belief = learnt([*QUIET, 50_000])
    held = hold(jumps, later(bank, 3.0, GRID), 3.0, GRID, 0.5)

    assert belief.count[0] > 49_000  # the step itself
    assert held.level[0] < 600
    assert np.sqrt(held.variance[0]) > 20_000


def test_only_the_bin_that_jumps_is_in_doubt():
    """Eleven bins, one of them jumps: the others learn as ever."""
    jumps, bank = no_jumps(11, WINDOW), None
    for value in [*QUIET, 5_000]:
        z = np.r_[float(value), np.full(10, 500.0) + np.arange(10)]
        if bank is None:
            bank, _ = first_belief(z, SCALE, GRID)
        else:
            jumps, bank, _ = learn_jumps(jumps, bank, z, SCALE, 5, GRID, WINDOW)

    assert jumps.bins.tolist() == [0]
    assert jumps.before.weight.shape == (1, len(GRID.drift))


def test_noise_is_no_jump():
    """Twelve scales are a release in 160,000; nine are noise."""
    assert learnt([*QUIET, 500 + 9 * SCALE])[0].before is None
    assert learnt([*QUIET, 500 + 300 * SCALE])[0].before is not None


def test_what_jumps_all_the_time_is_no_outlier():
    """Spikes that come every third release are learnt."""
    series = [value for _ in range(12) for value in (500, 503, 5_000)]
    jumps, bank, _ = learnt(series)

    assert later(bank, 3.0, GRID).typical[0] > 1_000**2
    assert jumps.counts[SPIKE, 0] <= 1 + pacer_jumps._OFTEN + 1


def bursts(steps=720):
    """Counts around 1,000; one step in fifty has a hundred times as many."""
    rng = np.random.default_rng(20)
    block = rng.poisson(1_000, (steps, 1))
    block[rng.random(steps) < 0.02] = 100_000
    return block


def relative_error(mechanism, block):
    """Mean over four runs."""
    errors = []
    for run in range(4):
        series = dps.release(mechanism, block, secret=SECRET, run_id=bytes([run] * 16))
        errors.append((np.abs(series.values - block) / np.maximum(block, 1)).mean())
    return float(np.mean(errors))


def test_bursts_are_survived(monkeypatch):
    """Within 1.5 times the error of `sample`; without the jumps it would be several times."""
    block, paced = bursts(), Pacer(epsilon=0.5, window=60)
    best, ours = relative_error(Sample(epsilon=0.5, window=60), block), relative_error(paced, block)
    monkeypatch.setattr(pacer_jumps, "_MOST", 2.0)

    assert ours < 1.5 * best
    assert relative_error(paced, block) > 2 * ours


def streams():
    """Of kinds that no constant was chosen on."""
    rng = np.random.default_rng(7)
    steps = np.repeat(800 * np.exp(rng.normal(size=14)), 50)
    return {
        "bursts": bursts(700),
        "steps": rng.poisson(steps)[:, None],
        "season": rng.poisson(900 * (1 + 0.8 * np.sin(np.arange(700) / 12)))[:, None],
        "walk": rng.poisson(900 * np.exp(np.cumsum(rng.normal(0, 0.03, 700))))[:, None],
    }


@pytest.mark.parametrize("name", streams())
def test_two_deviations_hold_most_counts(name):
    """Held steps included; three quarters of the deviation, as the geometric mean gave, do not."""
    block, held, within, less = streams()[name], [], [], []
    for run in range(3):
        series = dps.release(
            Pacer(epsilon=0.7, window=60), block, secret=SECRET, run_id=bytes([run] * 16)
        )
        off = np.abs(series.values - block)
        within.append(off <= 2 * series.stddev)
        less.append(off <= 1.2 * series.stddev)
        held.append(~np.array(series.paid))
    covered, too_few = np.concatenate(within), np.concatenate(less)

    assert 0.88 < covered.mean() <= 0.995
    assert covered[np.concatenate(held)].mean() > 0.85
    assert too_few.mean() < 0.9


def test_deviations_hold_where_a_stream_turns_on_and_off(monkeypatch):
    """Every ten steps in the mean; what models remember of a level is too sure of itself."""
    on = np.cumsum(np.random.default_rng(5).random((900, 1)) < 0.1, axis=0) % 2
    block = np.random.default_rng(6).poisson(5_000 * on)

    def covered():
        series = dps.release(Pacer(epsilon=0.9, window=120), block, secret=SECRET, run_id=RUN)
        return (np.abs(series.values - block) <= 2 * series.stddev).mean()

    doubted = covered()
    monkeypatch.setattr(pacer_jumps, "_doubt", lambda *_: None)

    assert 0.92 < doubted <= 0.99
    assert covered() < 0.88


def test_a_new_level_is_as_uncertain_as_its_releases():
    """A bank that was at this level before is not surer of it than what was seen since says."""
    again = [*QUIET, *[5_000 + n for n in QUIET], *QUIET[:3]]
    jumps, bank, belief = learnt(again)
    since = (belief.count - np.mean(QUIET[:3])) ** 2 + 2 * SCALE**2 / 3

    assert jumps.fresh[0, 0] == 3
    assert belief.variance[0] == pytest.approx(since[0], rel=1e-9)
    assert later(bank, 0.0, GRID).variance[0] < since[0]


def test_the_deviation_grows_while_a_count_is_held():
    """Each held step is further from the last release."""
    block = np.random.default_rng(3).poisson(900, (300, 1))
    series = dps.release(Pacer(epsilon=0.5, window=60), block, secret=SECRET, run_id=RUN)
    paid = np.array(series.paid)
    both = ~paid[1:] & ~paid[:-1]

    assert (np.diff(series.stddev[:, 0])[both] > 0).all()
