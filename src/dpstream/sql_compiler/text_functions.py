"""Text with a structure in SQL: JSON documents, addresses (URLs), and lists of parts.

Each looks at one row alone; what cannot be read is NULL. JSON is read by Python's reader, document
by document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from dpstream.sql_compiler.functions import Function, list_item, split
from dpstream.sql_compiler.sql_values import Value, also_for_scalars, as_text, kind, wrong_kind

_MISSING = object()
_DEEPEST = 100  # levels of a JSON document: more than people write, far less than Python's stack
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_STEP = re.compile(
    r"""\.(?P<name>[A-Za-z_$][\w$-]*) | \[(?P<at>\d{1,9})\]
    | \.?\[?(?P<quote>["'])(?P<quoted>.+?)(?P=quote)\]?""",
    re.VERBOSE,
)
Path: TypeAlias = Sequence[str | int]


def json_path(text: str) -> Path:
    """The names and places of a path.

    >>> json_path("$.items[0].name"), json_path("$['odd name']"), json_path("$")
    (['items', 0, 'name'], ['odd name'], [])
    """
    text = text.removeprefix("lax ").strip()
    at, steps = 1, list[str | int]()
    while text.startswith("$") and at < len(text):
        step = _STEP.match(text, at)
        if step is None:
            break
        place = step["at"]
        steps.append(int(place) if place is not None else step["name"] or step["quoted"])
        at = step.end()
    if not text.startswith("$") or at < len(text):
        raise ValueError(f"{text!r} is no path such as $.items[0].name")
    return steps


def _unknown_number(word: str) -> Any:
    raise ValueError(word)


def _deep(document: str) -> bool:
    """Is it nested more deeply than is read? The same on every machine, whatever its stack."""
    if document.count("[") + document.count("{") <= _DEEPEST:
        return False
    depth = 0
    for bracket in re.finditer(r"[\[\]{}]", _STRING.sub("", document)):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > _DEEPEST:
            return True
    return False


def _found(document: str | None, path: Path) -> Any:
    """What stands at a path of a document; `_MISSING` if nothing does."""
    if document is None or _deep(document):
        return _MISSING
    try:
        value = json.loads(document, parse_constant=_unknown_number)
    except (ValueError, RecursionError):
        return _MISSING
    for step in path:
        if isinstance(step, int):
            if not isinstance(value, list) or step >= len(value):
                return _MISSING
            value = value[step]
        elif not isinstance(value, dict) or step not in value:
            return _MISSING
        else:
            value = value[step]
    return value


def _scalar(value: Any) -> str | None:
    """Text of a JSON value that is none of several; NULL for others."""
    if value is None or isinstance(value, dict | list) or value is _MISSING:
        return None
    return _sound(value if isinstance(value, str) else json.dumps(value))


def _document(value: Any) -> str | None:
    """JSON text of any value."""
    if value is None or value is _MISSING:
        return None
    return _sound(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def _sound(text: str) -> str | None:
    """Text, unless it holds half a character."""
    return text if text.isascii() or text == text.encode(errors="ignore").decode() else None


def _json(read: Callable[[Any], str | None]) -> Function:
    def compute(zone: str, value: Value, path: str = "$") -> Value:
        steps = json_path(path)

        @also_for_scalars
        def of_rows(texts: pa.Array) -> pa.Array:
            found = (read(_found(text, steps)) for text in texts.to_pylist())
            return pa.array(list(found), pa.string())

        return of_rows(as_text(value))

    return Function(compute, 1, 2, {1: str})


def _json_list(read: Callable[[Any], str | None]) -> Function:
    def compute(zone: str, value: Value, path: str = "$") -> Value:
        return json_items(as_text(value), json_path(path), read)

    return Function(compute, 1, 2, {1: str})


def json_items(
    value: Value, path: Path = (), read: Callable[[Any], str | None] | None = None
) -> Value:
    """The items of a JSON array; NULL where there is none. Nested items are JSON text."""

    def item(each: Any) -> str | None:
        return (_document if isinstance(each, dict | list) else _scalar)(each)

    @also_for_scalars
    def of_rows(texts: pa.Array) -> pa.Array:
        found = (_found(text, path) for text in texts.to_pylist())
        lists = [
            list(map(read or item, each)) if isinstance(each, list) else None for each in found
        ]
        return pa.array(lists, pa.list_(pa.string()))

    return of_rows(value)


_ADDRESS = (
    r"^\s*(?:(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://|//)?(?:[^/?#@\s]*@)?"
    r"(?P<host>\[[^\]\s]*\]|[^/?#:\s]*)(?::\d*)?(?P<path>/[^?#\s]*)?"
    r"(?:\?(?P<query>[^#\s]*))?(?:#(?P<ref>\S*))?\s*$"
)
"""Scheme, host, path, query and fragment of an address; without a scheme the host comes first."""
_URL_PARTS = {"PROTOCOL": "scheme", "HOST": "host", "PATH": "path", "QUERY": "query", "REF": "ref"}


def url_part(zone: str, value: Value, part: str, name: str | None = None) -> Value:
    """PARSE_URL(url, 'HOST'), and PARSE_URL(url, 'QUERY', 'name'); NULL where it has none."""
    if part.upper() not in _URL_PARTS or (name is not None and part.upper() != "QUERY"):
        raise ValueError(f"{part!r} is not among {', '.join(_URL_PARTS)}; a name goes with QUERY")
    found = pc.struct_field(pc.extract_regex(as_text(value), _ADDRESS), _URL_PARTS[part.upper()])
    found = pc.if_else(pc.equal(found, ""), pa.scalar(None, pa.string()), found)
    if name is None:
        return found
    pattern = rf"(?:^|&){re.escape(name)}=(?P<value>[^&]*)"
    return pc.struct_field(pc.extract_regex(found, pattern), "value")


def _part_of_list(zone: str, value: Value, separator: str, number: int) -> Value:
    """SPLIT_PART, which counts from 1."""
    if number < 1:
        raise ValueError("parts count from 1")
    return list_item(zone, split(zone, value, separator), number - 1)


def list_length(lists: Value) -> Value:
    """How many items a list has."""
    return pc.cast(pc.list_value_length(lists), pa.int64())


def _pad(compute: Callable[..., Value]) -> Function:
    def padded(zone: str, value: Value, width: int, filling: str = " ") -> Value:
        if not 0 <= width <= 1_000 or len(filling) != 1:
            raise ValueError("a width up to 1000 and one character are wanted")
        text = pc.utf8_slice_codeunits(as_text(value), 0, width)
        return compute(text, width=width, padding=filling)

    return Function(padded, 2, 3, {1: int, 2: str})


LIST_FUNCTIONS: dict[str, Function] = {
    "JSON_EXTRACT_ARRAY": _json_list(_document),
    "JSON_QUERY_ARRAY": _json_list(_document),
    "JSON_VALUE_ARRAY": _json_list(_scalar),
    "JSON_EXTRACT_STRING_ARRAY": _json_list(_scalar),
    "SPLIT": Function(split, 1, 2, {1: str}),
}
"""Functions that give a list: for UNNEST, [OFFSET(n)] and ARRAY_LENGTH."""
TEXT_FUNCTIONS: dict[str, Function] = {
    "JSON_EXTRACT": _json(_document),
    "JSON_EXTRACT_SCALAR": _json(_scalar),
    "JSON_QUERY": _json(_document),
    "JSON_VALUE": _json(_scalar),
    "LPAD": _pad(pc.utf8_lpad),
    "NET.HOST": Function(lambda zone, value: url_part(zone, value, "HOST")),
    "PARSE_URL": Function(url_part, 2, 3, {1: str, 2: str}),
    "RPAD": _pad(pc.utf8_rpad),
    "SPLIT_PART": Function(_part_of_list, 3, 3, {1: str, 2: int}),
}


def as_list(value: Value) -> Value:
    """A list: a column of lists as it is, text as a JSON array."""
    return value if pa.types.is_list(value.type) else json_items(_text_only(value))


def _text_only(value: Value) -> Value:
    if kind(value) not in ("text", "null"):
        raise wrong_kind(value, "a list")
    return as_text(value)
