"""Keys that earlier windows have shown, which later ones show without a threshold.

    tables of windows --take_in--> what is remembered --begin--> the keys of a window that opens

What is remembered is made of tables alone: which keys they show, and their noisy numbers. So all
that is done with it is post-processing: ranking, forgetting, hiding a key while it is small. What a
window remembers is fixed before its first release, and stays to its last one.

Proof: `docs/soundness/latched.md`, section 12.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dpstream.query.query import Query
from dpstream.query.schedule import DueRelease
from dpstream.records import Integers, Words
from dpstream.rows.row_batch import id_order

FORGOTTEN_AFTER = 8
"""Windows in a row whose last table did not show a key: then it has to be found anew."""

FirstWords = npt.NDArray[np.uint64]
NONE: FirstWords = np.zeros(0, np.uint64)
Known = tuple[Words, pa.Table | None]
"""Ids of groups, and their key columns; none if there are none."""


@dataclass(kw_only=True)
class RememberedKeys:
    """The keys that a query remembers, and those that each open window began with."""

    most: int
    """How many; of more, those with the largest noisy numbers when they were shown last."""
    ids: Words = field(default_factory=lambda: np.zeros((0, 2), np.uint64))
    keys: pa.Table | None = None
    sizes: Integers = field(default_factory=lambda: np.zeros(0, np.int64))
    """Their noisy numbers when they were shown last, in grid steps."""
    missed: Integers = field(default_factory=lambda: np.zeros(0, np.int64))
    """At the end of how many windows since then they were not shown."""
    of_windows: dict[int, FirstWords] = field(default_factory=dict)
    """By open window: the first words of the ids that it remembers, in order."""
    version: int = 0
    """Grows with every change."""

    def begin(self, windows: Iterable[int]) -> tuple[dict[int, Known], dict[int, bytes]]:
        """What windows remember from their first release on, and a digest of it for each.

        The digest is made durable before a window draws: the same noise must not meet others.
        """
        known, digests = {}, {}
        for window in windows:
            self.of_windows[window] = np.sort(self.ids[:, 0])
            self.version += 1
            known[window] = self.ids, self.keys
            digests[window] = hashlib.sha256(self.ids.astype("<u8").tobytes()).digest()
        return known, digests

    def take_in(
        self, window: int, ids: Words, keys: pa.Table | None, sizes: Integers, *, final: bool
    ) -> None:
        """Remember what a table shows; after a window's last one, note what that does not show."""
        missed = self.missed
        if final:
            missed = missed + among_first_words(self.ids, self.of_windows.pop(window, NONE))
        every = np.concatenate([ids, self.ids])
        order = id_order(every)  # of equal ids, that of the table comes first
        new = np.ones(len(order), bool)
        new[1:] = (every[order[1:]] != every[order[:-1]]).any(axis=1)
        kept = order[new]
        missed = np.concatenate([np.zeros(len(ids), np.int64), missed])
        kept = kept[missed[kept] < FORGOTTEN_AFTER]
        sizes = np.concatenate([sizes, self.sizes])
        if len(kept) > self.most:
            largest = np.argsort(-sizes[kept], kind="stable")[: self.most]
            kept = kept[np.sort(largest)]
        tables = [table for table in (keys, self.keys) if table is not None]
        if tables:
            self.keys = pa.concat_tables(tables).take(pa.array(kept)).combine_chunks()
        self.ids, self.sizes, self.missed = every[kept], sizes[kept], missed[kept]
        self.version += 1

    def save(self) -> dict[str, Any]:
        """All of it, for `restore`."""
        keys = np.zeros(0, np.uint8)
        if self.keys is not None:
            out = pa.BufferOutputStream()
            with pa.ipc.new_stream(out, self.keys.schema) as writer:
                writer.write_table(self.keys)
            keys = np.frombuffer(out.getvalue(), np.uint8)
        return {
            "ids": self.ids,
            "keys": keys,
            "sizes": self.sizes,
            "missed": self.missed,
            "windows": [[window, words] for window, words in self.of_windows.items()],
            "version": self.version,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on from what `save` gave."""
        self.ids, self.sizes, self.missed = (saved[name] for name in ("ids", "sizes", "missed"))
        content = saved["keys"].tobytes()
        self.keys = pa.ipc.open_stream(content).read_all() if content else None
        self.of_windows = dict(saved["windows"])
        self.version = saved["version"]


def is_taken_in(query: Query, step: int, due: DueRelease) -> bool:
    """Is this table taken in? The last one of its window, and what windows may begin with.

    Where a table has only a part of what its window shows, all of them are.
    """
    partly = query.in_rounds or query.min_change is not None
    final = due.release == due.releases
    return final or partly or query.schedule.opens_windows(step + 1)


def among_first_words(ids: Words, words: FirstWords) -> npt.NDArray[np.bool_]:
    """Which ids begin with one of these words, which are in order."""
    if not len(words):
        return np.zeros(len(ids), bool)
    at = np.minimum(np.searchsorted(words, ids[:, 0]), len(words) - 1)
    return np.asarray(words[at] == ids[:, 0], bool)
