"""Spas: a predicted sampling count, and private tests that are paid before they are made."""

from fractions import Fraction as F

import numpy as np
import pytest

import dpstream as dps
from dpstream.errors import InvalidParameter
from dpstream.mechanisms import Spas
from dpstream.mechanisms.w_event.spas import (
    AllHistory,
    Decayed,
    TwoWindows,
    best_count,
    window_variance,
)
from dpstream.privacy.state.identity import canonical
from tests.mechanisms.steering import Steering, drive
from tests.support.fixed import RUN, SECRET
from tests.support.long import part_of


def steered(publish_at):
    return Steering(publish_at=publish_at, looks=("test",))


def opened(steering):
    """(step, what) of the runs' openings and closings."""
    return [(step, what.split()[0]) for step, what, _ in steering.charges if "above" in what]


def test_the_warm_up_publishes_at_fixed_steps():
    """W = 50: steps 0, 20, 40, each a third of 3/4 epsilon; nothing is tested."""
    steering = steered(())
    drive(Spas(epsilon=1, window=50), np.zeros((50, 2), int), steering)

    assert [(step, paid) for step, paid in enumerate(steering.paid(50)) if paid] == [
        (0, F(1, 4)),
        (20, F(1, 4)),
        (40, F(1, 4)),
    ]
    assert opened(steering) == []


def test_a_run_stays_open_until_the_first_yes():
    """Opened with epsilon_s / (C* + 1) at the first test; closed by a yes, which publishes."""
    steering = steered({9})
    drive(Spas(epsilon=1, window=5), np.full((14, 1), 7), steering)

    assert opened(steering) == [(5, "open"), (9, "close")]
    assert (5, "open above threshold", F(1, 8)) in steering.charges
    assert [step for step, paid in enumerate(steering.paid(14)) if paid] == [0, 9]
    assert steering.paid(14)[9] == F(3, 4)


def test_it_holds_without_a_test_while_nothing_fits():
    """After a publication with all of epsilon_p, a full window passes without a question."""
    steering = steered({9, 14})
    drive(Spas(epsilon=1, window=5), np.full((15, 1), 7), steering)

    asked = sorted({step for step, _, _ in steering.charges})
    assert asked == [0, 5, 9, 14]  # a new run at 14, when the publication of 9 has left
    assert opened(steering) == [(5, "open"), (9, "close"), (14, "open"), (14, "close")]


def test_direct_publication_needs_no_test():
    """A stream that moves far raises C* to w; then every step publishes with epsilon_p / w."""
    block = 10_000 * (np.arange(40)[:, None] % 2) + 5
    steering = steered(())
    drive(Spas(epsilon=1, window=6, warm_up=1, update="all"), block, steering)

    assert steering.paid(40) == [F(3, 4) / 6] * 40
    assert opened(steering) == []


def test_a_direct_publication_leaves_the_open_run_alone():
    """With a small C* left over, what the window cannot use otherwise is published directly."""
    steering = steered(())
    block = np.array([[0], [60], [0], [60]] + [[0]] * 20)
    drive(Spas(epsilon=1, window=4, warm_up=1), block, steering)
    closes = [what for _, what in opened(steering) if what == "close"]

    assert closes == []
    assert len(opened(steering)) <= 1


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 0.9, 2, 7])
@pytest.mark.parametrize("update", ["two_windows", "all", "decay"])
def test_every_window_is_within_epsilon(epsilon, update):
    """The ledger, which refuses any overspend, admits every charge on calm and wild streams."""
    rng = np.random.default_rng(3)
    steps = part_of(160, of=2)
    streams = [
        np.full((steps, 1), 50),
        rng.integers(0, 3000, (steps, 2)),
        np.where(np.arange(steps) // 25 % 2, 900, 20)[:, None],
        rng.poisson(5, (steps, 30)),
    ]
    for number, block in enumerate(streams):
        for window in (1, 7, 40):
            mechanism = Spas(epsilon=epsilon, window=window, update=update)
            run = bytes([number, window, *bytes(14)])
            series = dps.release(mechanism, block, secret=SECRET, run_id=run)
            assert series.paid[0]


def test_it_follows_a_stream_that_moves():
    """Jumps far beyond the noise are published; without them little is."""
    calm, jumps = np.full((400, 1), 500), np.full((400, 1), 500)
    jumps[np.arange(400) // 40 % 2 == 1] = 20_000
    mechanism = Spas(epsilon=5, window=40, update="all")
    error = {}
    for name, block in (("calm", calm), ("jumps", jumps)):
        values = dps.release(mechanism, block, secret=SECRET, run_id=RUN).values
        error[name] = np.abs(values - block)[40:].mean()

    assert error["calm"] < 20
    assert error["jumps"] < 5000


def test_the_three_ways_to_look_back():
    """Hand-computed variances of the changes 3, 5 and 1 at steps 2, 4 and 9 (w = 4)."""
    rows = [np.array([v]) for v in (0, 3, 8, 7)]
    two, everything = TwoWindows(window=4), AllHistory()
    decayed = Decayed(phases=np.zeros(4))
    for step, old, new in zip((2, 4, 9), rows, rows[1:], strict=False):
        two, everything, decayed = (r.add(step, old, new) for r in (two, everything, decayed))

    assert two.variance() == pytest.approx((9 + 25 + 1) / 3 - 9)
    assert everything.variance() == pytest.approx(35 / 3)
    assert decayed.variance() == pytest.approx((9 / 2**2 + 25 / 2**2 + 1) / 3)


def test_two_windows_forget():
    """A change older than two windows no longer counts."""
    record = TwoWindows(window=4).add(0, np.array([0]), np.array([100]))
    record = record.add(8, np.array([100]), np.array([101]))

    assert [step for step, _, _ in record.entries] == [8]


def test_unknown_updates_are_refused():
    """The error names the choices."""
    with pytest.raises(InvalidParameter, match="two_windows, all or decay"):
        Spas(epsilon=1, window=5, update="latest")


def test_later_parameters_at_their_defaults_change_no_noise():
    """A run is known by its parameters; those that came later stand there only if they differ."""
    plain = {"epsilon": 1, "window": 4}
    given = [Spas(**plain, **more) for more in ({}, {"theta": F(1, 3)}, {"decay_base": 3})]
    given.append(Spas(**plain, testing_share=F(1, 3)))
    texts = [canonical(one) for one in given]

    assert "theta" not in texts[0] + texts[2]
    assert ["1/3" in text for text in texts] == [False, True, False, True]
    assert "decay_base" in texts[2]
    assert len(set(texts)) == 4


@pytest.mark.parametrize("theta", [F(1, 4), F(1, 3), F(1, 2), F(3, 4)])
def test_the_count_is_where_the_windows_variance_is_least(theta):
    """Theorem 1 of the paper, against the function that it minimises; and it is the one used."""
    for variance in (1.0, 10.0, 1e4, 1e7):
        best = best_count(variance, 0.75, 40, float(theta))
        grid = np.linspace(0, 2 * best + 1, 20_001)
        errors = [window_variance(c, variance, 0.75, 40, float(theta)) for c in grid]
        assert abs(grid[int(np.argmin(errors))] - best) <= grid[1] - grid[0]
        used = Spas(epsilon=1, window=40, theta=theta)._count(variance)
        assert used == max(1, min(40, round(best)))


@pytest.mark.parametrize("base", [2, F(3, 2), 10])
def test_decay_divides_by_its_base_for_every_window(base):
    """Equation 3 of the paper, over all changes at once, is what w sums give."""
    rng, window = np.random.default_rng(3), 4
    steps = np.flatnonzero(rng.random(50) < 0.4)
    moves = rng.integers(0, 100, len(steps))
    kept = Decayed(phases=np.zeros(window), base=float(base))
    for step, move in zip(steps, moves, strict=True):
        kept = kept.add(int(step), np.array([0]), np.array([move]))
    windows = np.ceil((steps[-1] - steps) / window)
    wanted = (float(base) ** -windows * moves**2).sum() / len(steps)

    assert kept.variance() == pytest.approx(wanted, rel=1e-12)


def test_tests_get_the_share_that_they_are_given():
    """And publications the rest; the warm-up shares it."""
    steering = steered(())
    drive(Spas(epsilon=1, window=50, testing_share=F(1, 2)), np.zeros((50, 2), int), steering)

    assert [paid for paid in steering.paid(50) if paid] == [F(1, 6)] * 3


@pytest.mark.parametrize(
    "wrong", [{"theta": 0}, {"theta": 2}, {"decay_base": 1}, {"testing_share": 1}]
)
def test_parameters_out_of_range_are_refused(wrong):
    """Each by its name."""
    with pytest.raises(InvalidParameter, match=next(iter(wrong))):
        Spas(epsilon=1, window=4, **wrong)
