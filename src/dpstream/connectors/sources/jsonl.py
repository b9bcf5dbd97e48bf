"""JSON lines: one object a line, its scalars as strings; a number has one spelling for its value.

A line that the compiled scanner cannot take as it stands (broken, an escape in a key, a nested
value) is looked at by the `json` module, and rejected alone if that refuses it too. The scanner
skips nested values of columns that nobody wants; a nested value of a wanted one rejects the line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.connectors.sources.cells import Offsets, not_utf8, strings
from dpstream.connectors.sources.jsonl_scan import GOOD, HARD, NEW_KEY, scan
from dpstream.connectors.sources.text import Bad, Parsed
from dpstream.errors import InvalidInput
from dpstream.stages.number_text import number_text

_BOM = b"\xef\xbb\xbf"
_MOST_COLUMNS = 1000
_LOOK_AHEAD = 64  # lines that are looked at together when one has a new key


class _Refused(Exception):
    """Why a line is no row."""


class JsonlParser:
    """Objects of scalars; an absent key and a JSON null are null."""

    def __init__(self, name: str) -> None:
        self._name = name

    def head(self, block: bytes, *, final: bool) -> int | None:
        """JSON lines have no header."""
        if len(block) < len(_BOM) and not final:
            return None
        return len(_BOM) if block.startswith(_BOM) else 0

    def parse(self, block: bytes, *, final: bool, columns: Sequence[str] | None) -> Parsed:
        """The whole lines of the block; without `columns`, every key that the block has."""
        block = block if final else block[: block.rfind(b"\n") + 1]
        every = columns is None
        names = self._add([], [block[: block.find(b"\n") + 1]]) if every else _distinct(columns)
        lines, starts, stops = _scan(block, names, every)
        while (fresh := lines[lines[:, 2] == NEW_KEY][:_LOOK_AHEAD]).size:
            names = self._add(names, (block[start:stop] for start, stop, _ in fresh.tolist()))
            lines, starts, stops = _scan(block, names, every)

        hard = np.flatnonzero(lines[:, 2] == HARD)
        starts[:, hard] = -1
        objects, bad = _look(block, lines, hard, None if every else names)
        if every:
            names = _distinct([*names, *(key for one in objects.values() for key in one)])
        arrays = [
            _array(block, name, starts[j], stops[j], objects)
            if j < len(starts)
            else _absent(name, len(lines), objects)
            for j, name in enumerate(names)
        ]
        table = pa.table(arrays, names=names)
        keep = lines[:, 2] == GOOD
        keep[list(objects)] = True
        if names and not keep.all():
            table = table.filter(pa.array(keep))
        return Parsed(table=table, used=len(block), bad=bad)

    def _add(self, names: list[str], lines: Iterable[bytes]) -> list[str]:
        """The names, and those of the lines that can be read."""
        found = list(names)
        for line in lines:
            try:
                found += _loads(line, None)
            except _Refused:
                continue
        found = _distinct(found)
        if len(found) > _MOST_COLUMNS:
            raise InvalidInput(
                f"{self._name} has more than {_MOST_COLUMNS} different keys; name the columns"
            )
        return found


def _scan(block: bytes, names: list[str], every: bool) -> tuple[Offsets, Offsets, Offsets]:
    """Lines x (start, stop, kind), and the cells, columns x lines."""
    data = np.frombuffer(block, dtype=np.uint8)
    encoded = [name.encode() for name in names]
    bounds = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    most = int(np.count_nonzero(data == ord("\n"))) + 1
    starts, stops = (np.empty((len(names), most), dtype=np.int32) for _ in range(2))
    lines = np.empty((most, 3), dtype=np.int32)
    joined = np.frombuffer(b"".join(encoded), dtype=np.uint8)
    count = scan(data, joined, bounds, every, starts, stops, lines)
    lines = lines[:count]
    foreign = not_utf8(block, lines[:, 0], lines[:, 1])
    if foreign is not None:
        lines[foreign, 2] = HARD
    return lines, starts[:, :count], stops[:, :count]


def _look(
    block: bytes, lines: Offsets, hard: Any, names: list[str] | None
) -> tuple[dict[int, dict[str, str | None]], list[Bad]]:
    """What the `json` module makes of the hard lines: objects by line, and what it refuses."""
    objects, bad = {}, []
    for line in hard.tolist():
        start, stop, _ = lines[line].tolist()
        try:
            objects[line] = _loads(block[start:stop], names)
        except _Refused as problem:
            bad.append(Bad(start=start, stop=stop, reason=str(problem)))
    return objects, bad


def _array(
    block: bytes,
    name: str,
    starts: Offsets,
    stops: Offsets,
    objects: dict[int, dict[str, str | None]],
) -> pa.Array:
    """One column; cells that must be written anew and hard lines are put in afterwards."""
    anew = np.flatnonzero((starts >= 0) & (stops < 0))
    places = np.stack([starts[anew], ~stops[anew]], axis=1).tolist()
    starts[anew] = -1
    array = strings(np.frombuffer(block, dtype=np.uint8), starts, stops)
    if not len(anew) and not objects:
        return array
    later: dict[int, str | None] = {}
    escaped, cells = [], []
    for line, (start, stop) in zip(anew.tolist(), places, strict=True):
        if block[start - 1 : start] == b'"':
            escaped.append(line)
            cells.append(block[start:stop])
        else:
            later[line] = number_text(block[start:stop].decode())
    texts = json.loads(b'["' + b'","'.join(cells) + b'"]') if cells else []
    later |= zip(escaped, texts, strict=True)
    later |= {line: one.get(name) for line, one in objects.items()}
    mask = np.zeros(len(array), dtype=np.bool_)
    mask[list(later)] = True
    values = pa.array([later[line] for line in sorted(later)], pa.string())
    return pc.replace_with_mask(array, pa.array(mask), values)


def _absent(name: str, rows: int, objects: dict[int, dict[str, str | None]]) -> pa.Array:
    """A column that only hard lines have."""
    return pa.array([objects.get(line, {}).get(name) for line in range(rows)], pa.string())


def _loads(line: bytes, names: list[str] | None) -> dict[str, str | None]:
    """The wanted scalars of one line as strings, or _Refused."""
    try:
        found = json.loads(
            line.decode(),
            parse_int=number_text,
            parse_float=number_text,
            parse_constant=_refuse_constant,
        )
    except UnicodeDecodeError:
        raise _Refused("it is not UTF-8 text") from None
    except json.JSONDecodeError as problem:
        raise _Refused(f"it is not JSON: {problem.msg} at column {problem.colno}") from None
    except RecursionError:
        raise _Refused("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise _Refused("it is not a JSON object; one object a line is needed")
    return {
        key: _scalar(key, value) for key, value in found.items() if names is None or key in names
    }


def _scalar(key: str, value: Any) -> str | None:
    if isinstance(value, dict | list):
        kind = "an object" if isinstance(value, dict) else "a list"
        raise _Refused(f"the value of {key!r} is {kind}; a column holds numbers or strings")
    text = None if value is None else str(value)
    if isinstance(value, bool):
        text = "true" if value else "false"
    try:
        (key + (text or "")).encode()
    except UnicodeEncodeError:
        raise _Refused(f"{key!r} has half of a surrogate pair, which is no character") from None
    return text


def _refuse_constant(word: str) -> NoReturn:
    raise _Refused(f"{word} is no JSON value")


def _distinct(names: Iterable[str] | None) -> list[str]:
    return list(dict.fromkeys(names or ()))
