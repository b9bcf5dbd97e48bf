"""Dsat and Dsft: at most c publications per window, each after a test."""

from dataclasses import replace
from fractions import Fraction as F

import numpy as np
import pytest

import dpstream as dps
from dpstream.audit.replay import record
from dpstream.errors import InvalidParameter
from dpstream.mechanisms import Dsat, Dsft
from tests.mechanisms.steering import Steering, drive
from tests.support.fixed import RUN, SECRET

LOOKS = ("test",)


def test_a_window_holds_at_most_c_publications():
    """W = 20: c = 3 publications of eps/4 in any 20 steps, however often tests say yes."""
    steering = Steering(publish_at=range(100), looks=LOOKS)
    drive(Dsat(epsilon=1, window=20), np.zeros((100, 1), int), steering)
    paid = np.array([bool(a) for a in steering.paid(100)])
    busiest = np.convolve(paid, np.ones(20), "valid").max()

    assert busiest == 3
    assert {a for _, what, a in steering.charges if what == "publish"} == {F(1, 4)}


def test_every_yes_is_followed_by_a_fresh_run():
    """A run is opened with eps_1 / (c + 1) and closed by its yes; after c no run is opened."""
    steering = Steering(publish_at={5, 9}, looks=LOOKS)
    drive(Dsat(epsilon=1, window=20), np.zeros((12, 1), int), steering)
    runs = [(s, w, a) for s, w, a in steering.charges if "above" in w]

    assert runs == [
        (1, "open above threshold", F(1, 16)),
        (5, "close above threshold", 0),
        (6, "open above threshold", F(1, 16)),
        (9, "close above threshold", 0),
    ]


def test_nothing_is_tested_while_no_publication_can_be_paid():
    """With three publications in the window the answer could not be used, so it is not asked."""
    steering = Steering(publish_at=range(100), looks=LOOKS)
    asked = []
    laplace = steering.laplace

    def spy(value, **options):
        asked.append((steering.step, options["purpose"]))
        return laplace(value, **options)

    steering.laplace = spy
    drive(Dsat(epsilon=1, window=20), np.zeros((15, 1), int), steering)

    assert [step for step, purpose in asked if purpose == "test"] == [1, 2]


def test_the_threshold_follows_the_sampling_share():
    """Too many samples raise the factor to at most 2, too few lower it to at least 0."""
    mechanism = Dsat(epsilon=1, window=20)
    state = mechanism.start()
    assert mechanism._adapt(state, 50) == pytest.approx(1 - 0.5 * 3 / 20)
    for step in range(30, 40):
        state = replace(state, published=state.published.pay(step, F(1, 100)), factor=1.9)
    assert mechanism._adapt(state, 40) == 2.0


def test_the_fixed_form_keeps_its_threshold():
    """Dsft is Dsat without the factor; parameters are checked."""
    block = np.random.default_rng(5).poisson(30, size=(120, 2))
    fixed, same = (
        [release.values.tolist() for release in record(m, block, secret=SECRET, run=RUN)[1]]
        for m in (Dsft(epsilon=3, window=20), Dsat(epsilon=3, window=20, adaptive=False))
    )

    assert fixed == same
    with pytest.raises(InvalidParameter, match="change must be greater than 0"):
        Dsat(epsilon=1, window=20, change=0)
    with pytest.raises(InvalidParameter, match="adaptive"):
        Dsat(epsilon=1, window=20, adaptive="yes")


def test_it_rests_on_a_constant_stream_and_follows_jumps():
    """Jumps of half the level are published, rest is not."""
    still = np.full((200, 40), 500)
    jumping = still + 250 * (np.arange(200) // 40 % 2)[:, None]
    quiet, busy = (
        sum(dps.release(Dsft(epsilon=5, window=20), b, secret=SECRET, run_id=RUN).paid)
        for b in (still, jumping)
    )

    assert quiet < busy
