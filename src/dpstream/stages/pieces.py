"""Parts of batches that make up a step, put together by window and period."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from dpstream.stages.rows import Rows

Piece = tuple[Rows, int, int]
"""Rows `first` to `end` of a batch, all of one step, window and period."""


def by_window(pieces: Iterable[Piece]) -> Iterator[tuple[int, int, Rows]]:
    """Rows of each window and period together, in their order."""
    found: dict[tuple[int, int], list[Piece]] = {}
    for rows, first, end in pieces:
        place = (int(rows.windows[first]), int(rows.periods[first]))
        found.setdefault(place, []).append((rows, first, end))
    for window, period in sorted(found):
        yield window, period, _joined(found[window, period], window, period)


def _joined(pieces: Sequence[Piece], window: int, period: int) -> Rows:
    parts = [
        {
            name: getattr(rows, name)[first:end]
            for name in ("units", "groups", "digests", "steps", "values")
        }
        for rows, first, end in pieces
    ]
    keys = [rows.keys.slice(first, end - first) for rows, first, end in pieces]
    columns = parts[0]
    if len(parts) > 1:
        columns = {name: np.concatenate([part[name] for part in parts]) for name in columns}
    size = len(columns["steps"])
    windows, periods = (np.broadcast_to(np.int64(one), size) for one in (window, period))
    return Rows(**columns, windows=windows, periods=periods, keys=pa.concat_tables(keys))
