"""What can be read off released distributions: post-processing, which costs nothing.

All functions take one distribution over the bins, or several (steps x bins), such as the `values`
of a release by `Dpi`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpstream.errors import InvalidInput
from dpstream.records import Integers, Reals

_LEAST = 1e-9  # of the largest density: scores of empty bins stay finite


def counts(pdfs: npt.ArrayLike, totals: npt.ArrayLike, *, dummy_rows: int = 0) -> Reals:
    """Distributions as histograms: each step's `totals` rows, dummy rows taken out again.

    The totals must be public, or released (and paid for) by another mechanism: the number of rows
    of a step is private otherwise.

    >>> counts([[0.25, 0.75], [0.5, 0.5]], [100, 60]).tolist()
    [[25.0, 75.0], [30.0, 30.0]]
    """
    block = _block(pdfs)
    rows = np.broadcast_to(np.asarray(totals, dtype=np.float64), len(block))[:, None]
    if (rows < 0).any():
        raise InvalidInput(f"totals must be 0 or more; got {rows.min():g}")
    scaled: Reals = block * (rows + dummy_rows) - dummy_rows / block.shape[1]
    return np.maximum(scaled, 0.0)


def top_k(pdfs: npt.ArrayLike, k: int) -> Integers:
    """The k most likely bins of each step, likeliest first; of equals the lower number.

    >>> top_k([[0.2, 0.5, 0.3]], 2).tolist()
    [[1, 2]]
    """
    block = _block(pdfs)
    if not 1 <= k <= block.shape[1]:
        raise InvalidInput(f"k must be in [1, {block.shape[1]}], the number of bins; got {k}")
    return np.argsort(-block, axis=1, kind="stable")[:, :k].astype(np.int64)


def range_shares(pdfs: npt.ArrayLike, ranges: Sequence[tuple[int, int]]) -> Reals:
    """The probability of each half-open range of bins, steps x ranges.

    >>> range_shares([[0.2, 0.5, 0.3]], [(0, 2), (1, 3)]).round(3).tolist()
    [[0.7, 0.8]]
    """
    block = _block(pdfs)
    sums = np.concatenate([np.zeros((len(block), 1)), np.cumsum(block, axis=1)], axis=1)
    for first, last in ranges:
        if not 0 <= first <= last <= block.shape[1]:
            raise InvalidInput(
                f"a range [a, b) needs 0 <= a <= b <= {block.shape[1]}; got [{first}, {last})"
            )
    ends = np.array(ranges, dtype=np.int64).reshape(-1, 2)
    shares: Reals = sums[:, ends[:, 1]] - sums[:, ends[:, 0]]
    return shares


def running_mean(pdfs: npt.ArrayLike) -> Reals:
    """The mean of all releases up to each step: smoother than any of them, and as private.

    >>> running_mean([[1.0, 0.0], [0.0, 1.0]]).tolist()
    [[1.0, 0.0], [0.5, 0.5]]
    """
    block = _block(pdfs)
    means: Reals = np.cumsum(block, axis=0) / np.arange(1, len(block) + 1)[:, None]
    return means


def outlier_scores(pdfs: npt.ArrayLike) -> Reals:
    """Histogram-based outlier score of every bin: how much rarer it is than the likeliest, in logs.

    Goldstein, Dengel, "Histogram-Based Outlier Score (HBOS)", 2012, for one feature.

    >>> outlier_scores([[0.5, 0.5, 0.0]]).round(1).tolist()
    [[0.0, 0.0, 20.7]]
    """
    block = _block(pdfs)
    heights = block / block.max(axis=1, keepdims=True)
    scores: Reals = -np.log(np.maximum(heights, _LEAST)) + 0.0
    return scores


def outliers(
    pdfs: npt.ArrayLike, *, share: float = 0.1, threshold: float | None = None
) -> npt.NDArray[np.bool_]:
    """The bins with the highest outlier scores of each step: `share` of all bins (at least one).

    Given a `threshold`, those with a score above it, however many: log(10) marks what is ten
    times rarer than the likeliest bin. Of bins with equal scores a share takes the first.

    >>> outliers([[0.3, 0.1, 0.6]], share=0.4).tolist()
    [[False, True, False]]
    >>> outliers([[0.3, 0.1, 0.6], [0.4, 0.3, 0.3]], threshold=1.0).tolist()
    [[False, True, False], [False, False, False]]
    """
    scores = outlier_scores(pdfs)
    if threshold is not None:
        above: npt.NDArray[np.bool_] = scores > threshold
        return above
    if not 0 < share <= 1:
        raise InvalidInput(f"share must be in (0, 1]; got {share}")
    marked = np.zeros(scores.shape, dtype=bool)
    number = max(int(share * scores.shape[1]), 1)
    rarest = np.argsort(-scores, axis=1, kind="stable")[:, :number]
    np.put_along_axis(marked, rarest, True, axis=1)
    return marked


class Agreement(NamedTuple):
    """Of what was found, how much is right; of what is there, how much was found."""

    precision: float
    recall: float


def agreement(found: npt.ArrayLike, truth: npt.ArrayLike) -> Agreement:
    """Precision and recall of marked bins over all steps. The truth is raw data: not private.

    >>> agreement([[True, True, False]], [[True, False, True]])
    Agreement(precision=0.5, recall=0.5)
    """
    marked, right = np.asarray(found, dtype=bool), np.asarray(truth, dtype=bool)
    both = int((marked & right).sum())
    return Agreement(
        precision=both / max(int(marked.sum()), 1), recall=both / max(int(right.sum()), 1)
    )


def _block(pdfs: npt.ArrayLike) -> Reals:
    block = np.atleast_2d(np.asarray(pdfs, dtype=np.float64))
    if block.ndim != 2 or not np.isfinite(block).all() or (block < 0).any():
        raise InvalidInput(
            f"distributions are steps x bins of finite numbers, 0 or more; got {block.shape}"
        )
    return block
