"""Values to bytes and back, versioned and checksummed, without running code from the file.

    "dpstream" | format: 2 bytes | kind length: 1 | kind | checksum of the body: 16 | body
    body = JSON length: 8 | JSON | raw arrays, one after another

The checksum is XXH3 of 128 bits. It finds damage: torn, swapped or flipped bytes. It does not stop
somebody who forges a file; who can write to the state directory is trusted.

JSON holds plain values; what JSON lacks is tagged: {"$": "fraction", ...}. Classes are written by
the name that `storable` gave them and are rebuilt through their constructors, which check. Digests
of parameters are made of the same JSON (`identity.py`).
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128

from dpstream.errors import InvalidParameter, StateError
from dpstream.privacy.state.durable_files import Buffer, replace

FORMAT = 3
_CHECKSUM_SIZE = 16
_MAGIC = b"dpstream"
_T = TypeVar("_T")
_CLASSES: dict[str, type] = {}
_NAMES: dict[type, str] = {}
_KEYS: dict[type, Mapping[str, str]] = {}


def storable(name: str, *, keys: Mapping[str, str] | None = None) -> Callable[[type[_T]], type[_T]]:
    """Let instances of a dataclass be packed, under a name that outlives refactoring.

    `keys`: what each field is written as, by its name; without it, its name.
    """

    def register(cls: type[_T]) -> type[_T]:
        known = _CLASSES.get(name, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(
                f"{name!r} is the identity of {known.__module__}.{known.__qualname__} and cannot "
                f"be that of {cls.__module__}.{cls.__qualname__} too; choose another"
            )
        _CLASSES[name], _NAMES[cls] = cls, name  # once more where a notebook runs a cell again
        if keys is not None:
            _KEYS[cls] = keys
        return cls

    return register


def pack(value: object, *, kind: str) -> bytes:
    """Serialise `value` as a file body of this kind."""
    return b"".join(_pieces(value, kind))


def _pieces(value: object, kind: str) -> list[Buffer]:
    """The file in pieces; large arrays are views, not copies."""
    arrays = _Arrays()
    text = json.dumps(_encode(value, arrays), separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-len(text) % 8)  # arrays begin at a word
    body: list[Buffer] = [len(text).to_bytes(8, "big") + text, *arrays.views]
    digest = xxh3_128()
    for piece in body:
        digest.update(piece)
    name = kind.encode()
    head = _MAGIC + FORMAT.to_bytes(2, "big") + bytes([len(name)]) + name
    return [head + digest.digest(), *body]


class _Arrays:
    """Raw arrays, one after another."""

    def __init__(self) -> None:
        self.views: list[Buffer] = []
        self.size = 0

    def add(self, array: npt.NDArray[Any]) -> int:
        """Where the array is put."""
        at = self.size
        if array.nbytes:
            self.views.append(memoryview(array.reshape(-1).view(np.uint8).data))
            self.size += array.nbytes
        return at


def unpack(
    data: bytes, *, kind: str, origin: str = "these bytes", checksum: bytes | None = None
) -> Any:
    """Read what `pack` wrote; anything else is refused with the reason.

    With `checksum`, only the very content that `checksum_of` gave it for.

    >>> unpack(pack({"left": Fraction(1, 3)}, kind="example"), kind="example")
    {'left': Fraction(1, 3)}
    """
    name = kind.encode()
    head = len(_MAGIC) + 3
    if data[: len(_MAGIC)] != _MAGIC or len(data) < head:
        raise StateError(f"{origin} is not a dpstream file (foreign or truncated); restore it")
    version = int.from_bytes(data[8:10], "big")
    if version != FORMAT:
        raise StateError(
            f"{origin} has format {version}; this version of dpstream reads format {FORMAT}; use "
            "the version that wrote it"
        )
    actual = data[head : head + data[10]]
    if actual != name:
        raise StateError(f"{origin} holds a {actual.decode(errors='replace')!r}, not a {kind!r}")
    start = head + len(name) + _CHECKSUM_SIZE
    body = memoryview(data)[start:]
    if checksum is not None and checksum_of(data) != checksum:
        raise StateError(f"{origin} is damaged, or not the {kind} that belongs here; restore it")
    if xxh3_128(body).digest() != data[start - _CHECKSUM_SIZE : start]:
        raise StateError(
            f"{origin} is truncated or damaged: its checksum does not match; restore it"
        )
    length = int.from_bytes(body[:8], "big")
    try:
        return _decode(json.loads(bytes(body[8 : 8 + length])), body[8 + length :], origin)
    except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise StateError(
            f"{origin} holds values that this version cannot rebuild ({error}); "
            "use the version of dpstream that wrote it"
        ) from error


def rebuild(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with `change` applied to every storable object in it, innermost first.

    >>> rebuild((1, [Fraction(1, 2)], {"a": None}), lambda item: item)
    (1, [Fraction(1, 2)], {'a': None})
    """
    if isinstance(value, list | tuple):
        return type(value)(rebuild(item, change) for item in value)
    if isinstance(value, dict):
        return {key: rebuild(item, change) for key, item in value.items()}
    if type(value) in _NAMES and dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        rebuilt = {name: rebuild(item, change) for name, item in fields.items()}
        return change(dataclasses.replace(value, **rebuilt))
    return value


def write_packed(path: Path, value: object, *, kind: str) -> bytes:
    """Pack to a file, atomically and durably; gives the checksum that the file holds."""
    pieces = _pieces(value, kind)
    replace(path, *pieces)
    return checksum_of(bytes(pieces[0]))


def checksum_of(data: bytes) -> bytes:
    """The checksum that packed content holds; it tells one content from another."""
    start = len(_MAGIC) + 3 + data[len(_MAGIC) + 2]
    return data[start : start + _CHECKSUM_SIZE]


def read_packed(path: Path, *, kind: str, checksum: bytes | None = None) -> Any:
    """Unpack a file; with `checksum`, only the very content that `write_packed` gave it for."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise StateError(f"there is no {kind} at {path}; restore it") from None
    return unpack(data, kind=kind, origin=str(path), checksum=checksum)


def check_packed(path: Path) -> None:
    """Refuse a packed file, of whatever kind, that is not what was written."""
    data = path.read_bytes()
    head = len(_MAGIC) + 3
    kind = data[head : head + data[head - 1]] if len(data) > head else b""
    unpack(data, kind=kind.decode(errors="replace"), origin=str(path))


def encode(value: object) -> object:
    """Parameters as JSON, for digests: what `written` of an object says, and no arrays."""
    return _encode(value, None)


def _encode(value: object, arrays: _Arrays | None) -> object:
    match value:
        case None | bool() | str():
            return value
        case int() | np.integer():
            return int(value)
        case np.bool_():
            return bool(value)
        case float() | np.floating():
            return {"$": "float", "is": float(value).hex()}
        case Fraction():
            return {"$": "fraction", "is": str(value)}
        case bytes():
            return {"$": "bytes", "is": value.hex()}
        case list():
            return [_encode(item, arrays) for item in value]
        case tuple():
            return {"$": "tuple", "is": [_encode(item, arrays) for item in value]}
        case dict():
            pairs = [[_encode(k, arrays), _encode(v, arrays)] for k, v in value.items()]
            return {"$": "dict", "is": pairs}
        case np.ndarray() if arrays is not None:
            if value.dtype.kind not in "biuf":
                raise StateError(f"an array of dtype {value.dtype} cannot be stored")
            flat = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("<"))
            at = arrays.add(flat)
            return {"$": "array", "dtype": flat.dtype.str, "shape": list(value.shape), "at": at}
        case _ if type(value) in _NAMES and dataclasses.is_dataclass(value):
            keys = _keys(type(value))
            fields = {key: getattr(value, name) for name, key in keys.items()}
            if arrays is None and hasattr(value, "written"):
                fields = value.written()
            items = {key: _encode(item, arrays) for key, item in fields.items()}
            return {"$": "object", "class": _NAMES[type(value)], "is": items}
    if arrays is None:
        return _encode_parameter(value)
    raise StateError(f"a {type(value).__name__} cannot be stored; mark its class with @storable")


def _encode_parameter(value: object) -> object:
    """What stands in parameters and is never read back."""
    match value:
        case Decimal():
            return {"$": "decimal", "is": str(value)}
        case datetime.datetime():
            return {"$": "instant", "is": value.isoformat()}
        case datetime.date():
            return {"$": "date", "is": value.isoformat()}
        case datetime.time():
            return {"$": "time", "is": value.isoformat()}
        case datetime.timedelta():
            return {"$": "duration", "is": str(value)}
        case np.datetime64() | np.timedelta64():
            return {"$": value.dtype.str, "is": str(value)}
        case UUID():
            return {"$": "uuid", "is": str(value)}
        case type() if value in _NAMES:
            return {"$": "class", "is": _NAMES[value]}
    raise InvalidParameter(
        f"a {type(value).__name__} has no identity, so no run can be known by it: use numbers, "
        "texts, dates or tuples, or make its class an Identified dataclass: "
        'class Name(Identified, identity="...", keys="...")'
    )


def _keys(cls: type) -> Mapping[str, str]:
    """What each field is written as."""
    return _KEYS.get(cls) or {field.name: field.name for field in dataclasses.fields(cls)}


def _decode(value: Any, raw: memoryview, origin: str) -> Any:
    if isinstance(value, list):
        return [_decode(item, raw, origin) for item in value]
    if not isinstance(value, dict):
        return value
    match value["$"]:
        case "float":
            return float.fromhex(value["is"])
        case "fraction":
            return Fraction(value["is"])
        case "bytes":
            return bytes.fromhex(value["is"])
        case "tuple":
            return tuple(_decode(item, raw, origin) for item in value["is"])
        case "dict":
            return {_decode(k, raw, origin): _decode(v, raw, origin) for k, v in value["is"]}
        case "array":
            dtype, shape = np.dtype(value["dtype"]), tuple(value["shape"])
            count = int(np.prod(shape))
            flat = np.frombuffer(raw, dtype=dtype, count=count, offset=value["at"])
            return flat.reshape(shape).astype(dtype.newbyteorder("="))
        case "object":
            cls = _CLASSES.get(value["class"])
            if cls is None:
                raise StateError(
                    f"{origin} holds a {value['class']!r}, which this version does not know"
                )
            fields = {name: _decode(item, raw, origin) for name, item in value["is"].items()}
            names = {key: name for name, key in _keys(cls).items()}
            if set(fields) - set(names):
                raise StateError(
                    f"{origin}: {value['class']!r} has unknown fields "
                    f"{sorted(set(fields) - set(names))}; it comes from another version"
                )
            return cls(**{names[key]: item for key, item in fields.items()})
    raise StateError(f"{origin} holds an unknown kind of value {value['$']!r}")
