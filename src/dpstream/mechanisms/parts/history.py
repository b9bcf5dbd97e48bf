"""The newest values of every bin, as a value that is cheap to extend.

Guarantee: none; it is memory, and what it holds may be raw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dpstream.privacy.state.serial import storable


@storable("history")
@dataclass(frozen=True, kw_only=True, eq=False)
class History:
    """At least the last `longest` steps: bins x columns, the newest at column `end - 1`.

    An older History goes on showing what it showed: columns are written once, the first to append
    to a block owns its next column, and whoever comes later (or finds it full) takes a copy.

    >>> old = History.of(bins=1, longest=2, dtype=np.int64).append(np.array([5]))
    >>> new, other = old.append(np.array([6])), old.append(np.array([7]))
    >>> [h.block[0, : h.end].tolist() for h in (old, new, other)]
    [[5], [5, 6], [5, 7]]
    """

    block: npt.NDArray[Any]
    end: int
    written: npt.NDArray[np.int64]  # columns of the block that are taken, shared by all who see it

    @classmethod
    def of(cls, *, bins: int, longest: int, dtype: npt.DTypeLike) -> History:
        """Nothing yet. Room for twice `longest`, so that a copy is made every `longest` steps."""
        block = np.zeros((bins, 2 * longest), dtype)
        return cls(block=block, end=0, written=np.zeros(1, np.int64))

    def append(self, column: npt.NDArray[Any]) -> History:
        """One step more."""
        block, end, written = self.block, self.end, self.written
        if end == block.shape[1] or written[0] != end:
            keep = min(end, block.shape[1] // 2)
            block = np.zeros_like(self.block)
            block[:, :keep] = self.block[:, end - keep : end]
            end, written = keep, np.zeros(1, np.int64)
        block[:, end] = column
        written[0] = end + 1
        return History(block=block, end=end + 1, written=written)
