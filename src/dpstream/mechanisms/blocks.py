"""Numbers as people feed them: steps x bins; the first that cannot be used is named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dpstream.errors import InvalidInput
from dpstream.records import Integers, Reals

_LARGEST = 1 << 53  # beyond it float64, in which releases leave, has no exact integers


def as_block(data: Any) -> Reals:
    """Anything array-like as steps x bins; a flat sequence is one bin.

    >>> as_block([3, 1, 4]).shape, as_block([[3, 1], [4, 1]]).shape
    ((3, 1), (2, 2))
    """
    if isinstance(data, Sequence) and data and isinstance(data[0], Sequence | np.ndarray):
        widths = {len(row) if hasattr(row, "__len__") else 0 for row in data}
        if len(widths) > 1:
            first = len(data[0])
            row = next(
                i for i, r in enumerate(data) if not hasattr(r, "__len__") or len(r) != first
            )
            raise InvalidInput(
                f"rows must all have {first} bins; row {row} is {data[row]!r}; "
                "write 0 for a bin without events"
            )
    try:
        array = np.asarray(data)
    except ValueError as problem:
        raise InvalidInput(f"the data must be a rectangular array of numbers; {problem}") from None
    if array.dtype.kind not in "biuf":
        raise InvalidInput(
            f"the data must be numbers; got dtype {array.dtype}; "
            "did you forget to leave out a text or time column?"
        )
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2 or array.shape[1] == 0:
        raise InvalidInput(f"the data must be steps x bins; got shape {array.shape}")
    return array.astype(np.float64)


def check_counts(block: Reals) -> Integers:
    """Whole, non-negative numbers as int64; the first offender is named."""
    refuse_nan(block)
    bad = (block < 0) | (block != np.rint(block)) | (block >= _LARGEST)
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        value = block[row, column]
        problem = "negative" if value < 0 else "too large" if value >= _LARGEST else "not whole"
        raise InvalidInput(
            f"a histogram needs whole counts from 0 to 2^53; row {row}, bin {column} is "
            f"{problem}: {value:g}; for other numbers use an event-level mechanism with lo and hi"
        )
    return block.astype(np.int64)


def refuse_nan(block: Reals) -> None:
    """NaN and infinite values have no place on a grid."""
    bad = ~np.isfinite(block)
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        raise InvalidInput(
            f"row {row}, bin {column} is {block[row, column]}; every step needs a finite number; "
            "fill missing steps before releasing (with a public constant)"
        )
