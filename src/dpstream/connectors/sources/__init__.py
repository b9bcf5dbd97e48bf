"""Where rows come from: files of several formats, growing directories, pipes, tables in memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from dpstream.connectors.options import is_uri
from dpstream.connectors.registry import open_uri
from dpstream.connectors.sources.files import SUFFIXES, Files, suffix
from dpstream.connectors.sources.growing import GrowingDirectory
from dpstream.connectors.sources.stdin import StandardInput
from dpstream.connectors.sources.table import TableSource, as_table
from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.records import Source

__all__ = ["Files", "GrowingDirectory", "StandardInput", "TableSource", "open_source"]


def open_source(
    spec: Any, *, growing: bool = False, options: Mapping[str, Any] | None = None
) -> Source:
    """A source for a path, glob, directory, list of them, "-", a URI, or a table in memory.

    A directory stands for its files of one format, sorted by name, as they are now; `growing`,
    also for the files that are moved into it later. "-" is standard input. A URI such as
    "kafka://127.0.0.1:9092/clicks" names a server; it may have further `options`.
    """
    if is_uri(spec):
        found: Source = open_uri("source", spec, options)
        return found
    if options:
        raise InvalidParameter(f"only a server's URI has options; got {spec!r:.200}")
    if isinstance(spec, Source):
        return spec
    table = as_table(spec)
    if table is not None:
        return TableSource(table)
    if isinstance(spec, str) and spec == "-":
        return StandardInput()
    if isinstance(spec, str | os.PathLike):
        if growing and Path(spec).is_dir():
            return GrowingDirectory(Path(spec))
        return Files(_expand(spec))
    several = isinstance(spec, Sequence) and len(spec) > 0
    if several and all(isinstance(one, str | os.PathLike) for one in spec):
        return Files(path for one in spec for path in _expand(one))
    raise InvalidParameter(
        "a source must be a path, a glob, a directory, a list of them, '-', a URI or a table; got "
        f"{spec!r:.200}"
    )


def _expand(spec: str | os.PathLike[str]) -> list[Path]:
    """The files that a path, directory or glob stands for, sorted by name."""
    path = Path(spec)
    if path.is_dir():
        return _in_directory(path)
    text = os.fspath(spec)
    if path.exists() or not has_magic(text):
        return [path]
    found = sorted(Path(one) for one in glob(text, recursive=True) if os.path.isfile(one))
    if not found:
        raise InvalidInput(f"no file matches {text!r}")
    return found


def _in_directory(folder: Path) -> list[Path]:
    visible = [path for path in folder.iterdir() if not path.name.startswith((".", "_"))]
    found = sorted(path for path in visible if path.is_file() and suffix(path))
    kinds = sorted({str(suffix(path)).removesuffix(".gz") for path in found})
    if not kinds:
        raise InvalidInput(f"{folder} has no file that ends in {', '.join(SUFFIXES)}")
    if len(kinds) > 1:
        raise InvalidInput(
            f"{folder} has files of several formats ({', '.join(kinds)}); name one of them with a "
            f"glob such as {folder / ('*' + kinds[0])}"
        )
    return found
