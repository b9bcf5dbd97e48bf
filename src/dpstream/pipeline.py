"""A pipeline file: one source, the dataset's book, state, sinks and named queries, in TOML."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from dpstream.connectors.sinks.encode import ENCODERS
from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.privacy.amounts import positive
from dpstream.privacy.charges import Terms
from dpstream.privacy.state.secret import beside
from dpstream.sql.plan import compile_sql
from dpstream.stages.query import Query

_TEXT: tuple[type, ...] = (str,)
_TEXTS: tuple[type, ...] = (str, list)
_NUMBER: tuple[type, ...] = (int, float, str)
_KEYS: dict[str, dict[str, tuple[type, ...]]] = {
    "source": {"path": _TEXTS, "live": (bool,), "history": _TEXTS},
    "budget": {"dataset": _TEXT, "epsilon": _NUMBER, "delta": _NUMBER, "ledger": _TEXT},
    "state": {"path": _TEXT, "secret": _TEXT},
    "sink": {"to": _TEXTS},
    "query": {"name": _TEXT, "sql": _TEXT, "file": _TEXT},
}
_REQUIRED = {
    "source": ("path",),
    "budget": ("dataset", "epsilon", "delta"),
    "state": ("path",),
    "sink": ("to",),
    "query": ("name",),
}
_OPTIONAL = ("sink",)
_IN_WORDS = {str: "text", list: "a list of texts", bool: "true or false", int: "a number"}


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What a pipeline file says; paths are already relative to the current directory."""

    path: Path
    queries: tuple[Query, ...]
    source: str | tuple[str, ...]
    live: bool = False
    history: str | tuple[str, ...] | None = None
    dataset: str
    epsilon: Fraction
    delta: Fraction
    ledger: Path
    state: Path
    secret: Path
    sinks: tuple[str, ...] = ()

    def terms(self) -> Terms:
        """The terms of the dataset's book; every query must protect the same rows."""
        first = self.queries[0]
        wanted = first.promise(epsilon=self.epsilon, delta=self.delta)
        for query in self.queries[1:]:
            other = query.promise(epsilon=self.epsilon, delta=self.delta)
            if other != wanted:
                raise InvalidParameter(
                    f"{self.path}: queries that share a book must protect the same unit: "
                    f"{first.name!r} protects {_protects(wanted)}, {query.name!r} protects "
                    f"{_protects(other)}; make them agree, or use two pipelines"
                )
        return wanted


def load_pipeline(path: str | Path) -> Pipeline:
    """Read a pipeline file and compile its queries; errors name file, table and key."""
    path = Path(path)
    tables = _read(path)
    source, budget, state = (tables[name] for name in ("source", "budget", "state"))
    base, where = path.parent, f"{path}, [budget]"
    queries = _queries(path, tables["query"])
    folder = _placed(base, state["path"])
    history = source.get("history")
    if history is not None and len(queries) > 1:
        raise InvalidParameter(
            f"{path}, [source]: history goes with one query; this file has {len(queries)}"
        )
    secret = Path(_placed(base, state["secret"])) if "secret" in state else beside(Path(folder))
    return Pipeline(
        path=path,
        queries=queries,
        source=_all_placed(base, source["path"]),
        live=source.get("live", False),
        history=None if history is None else _all_placed(base, history),
        dataset=budget["dataset"],
        epsilon=positive(budget["epsilon"], f"{where}: epsilon"),
        delta=positive(budget["delta"], f"{where}: delta"),
        ledger=Path(_placed(base, budget["ledger"])) if "ledger" in budget else _own(folder),
        state=Path(folder),
        secret=secret,
        sinks=tuple(_sink(base, each) for each in _listed(tables.get("sink", {}).get("to", []))),
    )


def _read(path: Path) -> dict[str, Any]:
    """The file's tables, with known keys of the right types."""
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise InvalidInput(f"{path} is not TOML: {problem}") from None
    for name in tables:
        if name not in _KEYS:
            raise InvalidInput(f"{path} has an unknown table [{name}]; {_nearest(name, _KEYS)}")
    for name in _KEYS:
        if name not in tables and name not in _OPTIONAL:
            wanted = ", ".join(_REQUIRED[name])
            raise InvalidInput(f"{path} has no table {_heading(name)}; add it, with {wanted}")
    for name, table in tables.items():
        entries = table if name == "query" else [table]
        if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
            raise InvalidInput(f"{path}: {name} must be a table; write {_heading(name)} above it")
        for number, entry in enumerate(entries, 1):
            which = f" number {number}" if name == "query" else ""
            _check(f"{path}, {_heading(name)}{which}", name, entry)
    return tables


def _check(where: str, name: str, table: Mapping[str, Any]) -> None:
    known = _KEYS[name]
    for key, value in table.items():
        if key not in known:
            raise InvalidInput(f"{where} has an unknown key {key!r}; {_nearest(key, known)}")
        fits = isinstance(value, known[key]) and (bool in known[key] or not isinstance(value, bool))
        if isinstance(value, list):
            fits = fits and bool(value) and all(isinstance(each, str) for each in value)
        if not fits or value == "":
            wanted = " or ".join(_IN_WORDS[kind] for kind in known[key] if kind in _IN_WORDS)
            wanted = "a number" if known[key] == _NUMBER else wanted
            raise InvalidInput(f"{where}: {key} must be {wanted}; got {value!r:.80}")
    for key in _REQUIRED[name]:
        if key not in table:
            raise InvalidInput(f"{where} has no {key}; add it")


def _queries(path: Path, tables: Sequence[Mapping[str, Any]]) -> tuple[Query, ...]:
    """Every query, compiled; all read the one source, so all name one table."""
    found: dict[str, Query] = {}
    sources: dict[str, str] = {}
    for table in tables:
        name = table["name"]
        where = f"{path}, [[query]] {name!r}"
        if name in found:
            raise InvalidInput(f"{where}: two queries have this name; rename one")
        if ("sql" in table) == ("file" in table):
            raise InvalidInput(f"{where} needs sql or file, and not both")
        text = table["sql"] if "sql" in table else _text(where, path.parent / table["file"])
        try:
            compiled = compile_sql(text, name)
        except InvalidParameter as problem:
            raise InvalidParameter(f"{where}: {problem}") from None
        found[name], sources[name] = compiled.query, compiled.table
    if len(set(sources.values())) > 1:
        listed = ", ".join(f"{name!r} reads {table!r}" for name, table in sources.items())
        raise InvalidInput(f"{path}: all queries read the one [source]; but {listed}")
    return tuple(found.values())


def _text(where: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "it is not UTF-8 text"
        raise InvalidInput(f"{where}: file {path} cannot be read: {reason}") from None


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _all_placed(base: Path, value: str | list[str]) -> str | tuple[str, ...]:
    if isinstance(value, str):
        return _placed(base, value)
    return tuple(_placed(base, each) for each in value)


def _placed(base: Path, text: str) -> str:
    """A path of the file, seen from the current directory; "-" is standard input or output."""
    slash = "/" if text.endswith("/") else ""  # an "out.db/" is a directory
    return text if text == "-" else f"{base / text}{slash}"


def _sink(base: Path, text: str) -> str:
    kind, colon, rest = text.partition(":")
    return f"{kind}:{_placed(base, rest)}" if colon and kind in ENCODERS else _placed(base, text)


def _heading(name: str) -> str:
    return "[[query]]" if name == "query" else f"[{name}]"


def _own(folder: str) -> Path:
    return Path(folder) / "ledger"


def _protects(terms: Terms) -> str:
    return f"{terms.change} (period {terms.period}, time zone {terms.time_zone})"


def _nearest(name: str, known: Iterable[str]) -> str:
    names = [*known]
    found = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {found[0]!r}?" if found else f"known are {', '.join(names)}"
