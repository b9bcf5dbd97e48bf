"""Keys of releases as JSON values, and a digest that stands for a key of any length."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import date, datetime, time
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Digests = npt.NDArray[np.uint64]
"""Rows x 2 words."""
KEY_ID = r"^[0-9a-f]{32}$"


def as_json(value: Any) -> Any:
    """A key's value as JSON can hold it; no two values of a column look alike.

    >>> [as_json(value) for value in ("a", None, 5, float("nan"), date(2024, 5, 1), b"\\x00")]
    ['a', None, 5, 'nan', '2024-05-01', '00']
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.hex()
    if value is None or isinstance(value, str | int):
        return value
    return str(value)


def key_values(table: pa.Table, names: Sequence[str]) -> list[list[Any]]:
    """The key of every row; a release without keys has the empty one."""
    columns = [[as_json(value) for value in table[name].to_pylist()] for name in names]
    if not columns:
        return [[] for _ in range(table.num_rows)]
    return [list(key) for key in zip(*columns, strict=True)]


def key_id(key: Sequence[Any]) -> str:
    """32 hexadecimal digits that stand for a key.

    >>> key_id(["home", None])
    'bdbba6aec7a253403a2cba4366c98cf1'
    """
    return blake2b(_canonical(key), digest_size=16).hexdigest()


def digests(keys: Sequence[Sequence[Any]]) -> Digests:
    """The same as two words each."""
    joined = b"".join(blake2b(_canonical(key), digest_size=16).digest() for key in keys)
    found: Digests = np.frombuffer(joined, ">u8").reshape(-1, 2).astype(np.uint64)
    return found


def words_of(identity: str) -> tuple[np.uint64, np.uint64]:
    """The two words of an id."""
    return np.uint64(int(identity[:16], 16)), np.uint64(int(identity[16:], 16))


def id_of(high: int, low: int) -> str:
    """The id of two words."""
    return f"{high:016x}{low:016x}"


def _canonical(key: Sequence[Any]) -> bytes:
    return json.dumps(list(key), separators=(",", ":")).encode()
