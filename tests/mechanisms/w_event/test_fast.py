"""FastW: blocks, samples, a filter and a controller."""

from fractions import Fraction as F

import numpy as np
import pytest

import dpstream as dps
from dpstream.mechanisms import FastW
from dpstream.mechanisms.w_event.fast import Kalman, Pid
from tests.mechanisms.steering import Steering, drive
from tests.support.fixed import RUN, SECRET


def test_a_block_never_pays_more_than_its_samples():
    """W = 40: six samples of eps/12 in each block, the first five steps among them."""
    steering = Steering(publish_at=())
    block = np.random.default_rng(3).poisson(50, size=(200, 2))
    drive(FastW(epsilon=1, window=40), block, steering)
    paid = np.array([bool(a) for a in steering.paid(200)]).reshape(5, 40)

    assert {a for _, _, a in steering.charges} == {F(1, 12)}
    assert (paid.sum(axis=1) <= 6).all()
    assert paid[0, :5].all()


def test_small_windows_take_one_sample_per_block():
    """floor(0.15 w) is 0 for w < 7; one sample is the least."""
    assert [FastW(epsilon=1, window=w).samples for w in (1, 6, 7, 40, 120)] == [1, 1, 1, 6, 18]


def test_all_bins_share_the_schedule():
    """A step pays for all bins or for none: one charge a step at most."""
    steering = Steering(publish_at=())
    drive(FastW(epsilon=1, window=40), np.zeros((80, 7), int), steering)
    steps = [step for step, _, _ in steering.charges]

    assert len(steps) == len(set(steps))


def test_the_filter_is_the_textbook_one():
    """Gain P / (P + R) after P += Q; the first measurement is taken whole."""
    first = Kalman().predict().correct(np.array([7.0]))
    second = first.predict().correct(np.array([17.0]))
    gain = (100 + 2e5) / (100 + 2e5 + 1e6)

    assert first.estimate == pytest.approx([7.0])
    assert second.estimate == pytest.approx([7 + 10 * gain])
    assert second.variance == pytest.approx((100 + 2e5) * (1 - gain))


def test_the_controller_slows_down_on_quiet_streams_and_not_on_wild_ones():
    """No error stretches the interval, a large one resets it to 1."""
    quiet = Pid()
    for _ in range(4):
        quiet = quiet.feed(0.0)

    assert quiet.interval == pytest.approx(1 + 4 * 5 * (1 - np.exp(-1)))
    assert quiet.feed(1e9).interval == 1


def test_it_follows_a_smooth_stream():
    """On a slow wave far above the noise its error is a fraction of publishing nothing."""
    steps = np.arange(400)
    wave = np.rint(5000 + 2000 * np.sin(steps / 60)).astype(int)
    values = dps.release(FastW(epsilon=1, window=40), wave, secret=SECRET, run_id=RUN).values[:, 0]

    assert np.abs(values - wave).mean() < 0.5 * np.abs(wave - wave.mean()).mean()
