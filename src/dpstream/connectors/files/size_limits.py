"""How large a row may be, and a file when it is unpacked: what a source's options say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dpstream.errors import InvalidParameter, UnusableFile


@dataclass(frozen=True, kw_only=True)
class SizeLimits:
    """Bounds on rows and files; without any option, these."""

    max_row_bytes: int = 16 << 20
    """A longer line is set aside alone."""
    max_unpacked_bytes: int = 64 << 30
    """A compressed file that is larger than this when it is unpacked is refused."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("max_row_bytes", 1 << 20, 1 << 30),
            ("max_unpacked_bytes", 1, 1 << 62),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise InvalidParameter(
                    f"{name} must be a whole number from {least} to {most}; got {value!r}"
                )

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> SizeLimits:
        """The limits that a source's options name.

        >>> SizeLimits.of({"max_row_bytes": 1 << 24}).max_row_bytes
        16777216
        """
        known = [each.name for each in fields(cls)]
        for name in options or {}:
            if name not in known:
                raise InvalidParameter(f"files have no option {name!r}; {', '.join(known)}")
        return cls(**(options or {}))

    def too_long(self, size: int) -> str:
        """Why a row of this many bytes is set aside."""
        return f"it has {size} bytes, more than max_row_bytes = {self.max_row_bytes}"

    def refuse_unpacked(self, path: Path, size: int) -> None:
        """Refuse a file that has this many bytes, or more, when it is unpacked."""
        if size > self.max_unpacked_bytes:
            raise UnusableFile(
                f"{path} has more than max_unpacked_bytes = {self.max_unpacked_bytes} bytes when "
                f"it is unpacked ({path.stat().st_size} as it is); split it, or allow more: "
                "options = { max_unpacked_bytes = ... }"
            )


LIMITS = SizeLimits()
