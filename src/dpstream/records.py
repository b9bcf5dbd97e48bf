"""Values that pass between the layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Reals = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
"""128-bit key ids, two words a row."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Release:
    """One published step.

    `paid`: budget was spent on publishing this step. `held`: the values repeat an earlier release.
    `stddev`: standard deviation of the noise in `values`, where it is known; of a held value it is
    that of the release it repeats, and says nothing about how far the stream has moved since.
    """

    step: int
    values: Reals
    paid: bool
    held: bool = False
    stddev: Reals | None = None
