"""The tables of a pipeline file: known ones, with known keys of the right types."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dpstream.errors import InvalidInput

_TEXT: tuple[type, ...] = (str,)
_TEXTS: tuple[type, ...] = (str, list)
_NUMBER: tuple[type, ...] = (int, float, str)
_KEYS: dict[str, dict[str, tuple[type, ...]]] = {
    "source": {
        "path": _TEXTS,
        "live": (bool,),
        "history": _TEXTS,
        "options": (dict,),
        "column_types": (dict,),
        "buffer_mib": (int,),
    },
    "budget": {"dataset": _TEXT, "epsilon": _NUMBER, "delta": _NUMBER, "ledger": _TEXT},
    "state": {"path": _TEXT, "secret": _TEXT},
    "sink": {"to": _TEXTS},
    "engine": {"name": _TEXT, "master": _TEXT, "buckets": (int,), "state_location": _TEXT},
    "query": {"name": _TEXT, "sql": _TEXT, "file": _TEXT},
}
_REQUIRED = {
    "source": ("path",),
    "budget": ("dataset", "epsilon"),
    "state": ("path",),
    "sink": ("to",),
    "engine": ("name",),
    "query": ("name",),
}
_OPTIONAL = ("sink", "engine")
_INNER = ("options", "column_types")  # tables within a source's
_SEVERAL = ("source", "budget")  # one table, or one for each source: [source.clicks]
_IN_WORDS = {
    str: "text",
    list: "a list of texts",
    bool: "true or false",
    int: "a number",
    dict: "a table",
}

Table = dict[str, Any]


def read_tables(path: Path) -> dict[str, Any]:
    """The file's tables; `source` and `budget` by name, under "" if there is one for all."""
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise InvalidInput(f"{path} is not TOML: {problem}") from None
    for name in tables:
        if name not in _KEYS:
            raise InvalidInput(f"{path} has an unknown table [{name}]; {nearest(name, _KEYS)}")
    for name in _KEYS:
        if name not in tables and name not in _OPTIONAL:
            wanted = ", ".join(_REQUIRED[name])
            raise InvalidInput(f"{path} has no table {heading(name)}; add it, with {wanted}")
    found: dict[str, Any] = {}
    for name, table in tables.items():
        if name in _SEVERAL:
            found[name] = _named(path, name, table)
            continue
        entries = table if name == "query" else [table]
        if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
            raise InvalidInput(f"{path}: {name} must be a table; write {heading(name)} above it")
        for number, entry in enumerate(entries, 1):
            which = f" number {number}" if name == "query" else ""
            _check(f"{path}, {heading(name)}{which}", name, entry)
        found[name] = table
    return found


def _named(path: Path, name: str, table: Any) -> dict[str, Table]:
    """One table for all, or one for each name."""
    if not isinstance(table, dict):
        raise InvalidInput(f"{path}: {name} must be a table; write {heading(name)} above it")
    inner = {
        key: value
        for key, value in table.items()
        if isinstance(value, dict) and not (key in _INNER and "path" in table)
    }
    if inner and len(inner) < len(table):
        key = next(key for key in table if key not in inner)
        raise InvalidInput(
            f"{path}, [{name}] has {key} beside [{name}.{next(iter(inner))}]; move it into one of "
            "the named tables"
        )
    if not inner:
        _check(f"{path}, [{name}]", name, table)
        return {"": table}
    for key, value in inner.items():
        entry = {"dataset": key} | value if name == "budget" else value
        _check(f"{path}, [{name}.{key}]", name, entry)
        inner[key] = entry
    return inner


def _check(where: str, name: str, table: Mapping[str, Any]) -> None:
    known = _KEYS[name]
    for key, value in table.items():
        if key not in known:
            raise InvalidInput(f"{where} has an unknown key {key!r}; {nearest(key, known)}")
        fits = isinstance(value, known[key]) and (bool in known[key] or not isinstance(value, bool))
        if isinstance(value, dict):
            for inner, given in value.items():
                if not isinstance(given, str | int | float):
                    raise InvalidInput(
                        f"{where}: {key}.{inner} must be text, a number, true or false; got "
                        f"{given!r:.80}"
                    )
        if isinstance(value, list):
            fits = fits and bool(value) and all(isinstance(each, str) for each in value)
        if not fits or value == "":
            wanted = " or ".join(_IN_WORDS[kind] for kind in known[key] if kind in _IN_WORDS)
            wanted = "a number" if known[key] == _NUMBER else wanted
            raise InvalidInput(f"{where}: {key} must be {wanted}; got {value!r:.80}")
    for key in _REQUIRED[name]:
        if key not in table:
            raise InvalidInput(f"{where} has no {key}; add it")


def heading(name: str) -> str:
    """How a table is written in the file."""
    return "[[query]]" if name == "query" else f"[{name}]"


def nearest(name: str, known: Iterable[str]) -> str:
    """The most similar name there is, as advice."""
    names = [*known]
    found = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {found[0]!r}?" if found else f"known are {', '.join(names)}"
