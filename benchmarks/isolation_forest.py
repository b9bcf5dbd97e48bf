"""Isolation forest: points that a few random cuts separate from all others are outliers.

Liu, Ting, Zhou, "Isolation Forest", 2008. Here it finds outliers in released distributions and in
the data, with the same random cuts, so that only the difference of the two is measured.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from dpstream.records import Integers, Reals

_TREES: Final = 100
_SAMPLE: Final = 256
_EULER: Final = 0.5772156649


def isolation_scores(points: Reals, *, seed: int = 0) -> Reals:
    """The score of every point (points x features), near 1 for outliers, below 1/2 for others.

    >>> points = np.array([[0.0], [0.1], [0.2], [0.1], [0.0], [9.0]])
    >>> scores = isolation_scores(points)
    >>> int(scores.argmax()), bool(scores[5] > 0.6 > scores[:5].max())
    (5, True)
    """
    rng = np.random.default_rng(seed)
    sample = min(_SAMPLE, len(points))
    highest = math.ceil(math.log2(max(sample, 2)))
    depths = np.zeros(len(points))
    for _ in range(_TREES):
        chosen = points[rng.choice(len(points), sample, replace=False)]
        everywhere = np.arange(len(points))
        depths += _depths(points, everywhere, chosen, highest, rng, np.zeros(len(points)))
    scores: Reals = 2.0 ** (-depths / _TREES / _usual_depth(sample))
    return scores


def _depths(
    points: Reals,
    here: Integers,
    sample: Reals,
    levels: int,
    rng: np.random.Generator,
    depths: Reals,
) -> Reals:
    """How deep the points `here` fall in one tree, which is grown from `sample` on the way."""
    low, high = (sample.min(axis=0), sample.max(axis=0)) if len(sample) else (0.0, 0.0)
    features = np.flatnonzero(np.asarray(high) > low)
    if levels == 0 or len(sample) <= 1 or not len(features):
        depths[here] += _usual_depth(len(sample))
        return depths
    feature = rng.choice(features)
    cut = rng.uniform(sample[:, feature].min(), sample[:, feature].max())
    depths[here] += 1
    left, first = points[here, feature] < cut, sample[:, feature] < cut
    for side, part in ((left, first), (~left, ~first)):
        depths = _depths(points, here[side], sample[part], levels - 1, rng, depths)
    return depths


def _usual_depth(size: int) -> float:
    """How deep a search ends, on average, in a random tree of `size` points."""
    if size <= 2:
        return float(max(size - 1, 0))
    return 2 * (math.log(size - 1) + _EULER) - 2 * (size - 1) / size
