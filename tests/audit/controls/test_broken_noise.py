"""Broken noise is caught, each form by the judge that its fault belongs to."""

import numpy as np

import dpstream as dps
from dpstream.audit.controls.broken_noise import SharedNoise
from dpstream.audit.replay import record, replay
from tests.support.fixed import RUN, SECRET


def test_shared_noise_reveals_differences():
    """Whatever the epsilon, the difference of two bins is exact; sound noise hides it."""
    data = np.array([[5, 9]] * 20)
    shared, _ = released(SharedNoise(epsilon=0.01, window=5), data)
    sound, _ = released(dps.mechanisms.Uniform(epsilon=0.01, window=5), data)

    assert (shared[:, 1] - shared[:, 0] == 4).all()
    assert (sound[:, 1] - sound[:, 0] != 4).any()


def test_the_laws_catch_shared_noise():
    """Fewer draws than published coordinates, and answers that do not move with the data."""
    data = np.array([[5, 9]] * 20)
    mechanism = SharedNoise(epsilon=1, window=5)
    values, calls = released(mechanism, data)
    neighbour = data.copy()
    neighbour[7, 1] += 1

    assert sum(call.value.size for call in calls) < values.size
    assert replay(mechanism, neighbour, calls).loss == 0  # the law wants a loss above 0


def released(mechanism, data):
    calls, releases = record(mechanism, data, secret=SECRET, run=RUN)
    return np.array([release.values for release in releases]), calls
