"""Paths in a pipeline file are relative to it: here they are seen from the current directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpstream.connectors.options import is_uri
from dpstream.connectors.sinks.encode import ENCODERS


def listed(value: str | list[str]) -> list[str]:
    """One value or several, as several."""
    return [value] if isinstance(value, str) else value


def all_placed(base: Path, value: str | list[str]) -> str | list[str]:
    """One path or several."""
    if isinstance(value, str):
        return placed(base, value)
    return [placed(base, each) for each in value]


def placed(base: Path, text: str) -> str:
    """A path of the file, seen from the current directory; "-" is standard input or output.

    A URI stays as it is.
    """
    slash = "/" if text.endswith("/") else ""  # an "out.db/" is a directory
    return text if text == "-" or is_uri(text) else f"{base / text}{slash}"


def placed_sink(base: Path, text: str) -> str:
    """A sink, which may have its kind before its path."""
    kind, colon, rest = text.partition(":")
    paths = (*ENCODERS, "delta")
    return f"{kind}:{placed(base, rest)}" if colon and kind in paths else placed(base, text)


def placed_options(base: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """A server's options; the files that they name are placed like all others."""
    return {
        name: placed(base, value) if name.endswith("_file") else value
        for name, value in options.items()
    }
