"""What a route takes: declared once, checked for every request, and shown in its OpenAPI."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from starlette.datastructures import QueryParams

_NUMBERS = re.compile(r"-?[0-9]{1,18}")


class Refusal(Exception):
    """An answer that is no success; its words are fixed, and hold nothing of data or request."""

    def __init__(self, status: int, words: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(words)
        self.status, self.words, self.headers = status, words, headers or {}


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a query string or path."""

    name: str
    about: str
    kind: Literal["integer", "number", "string"] = "string"
    default: Any = None
    least: float | None = None
    most: float | None = None
    longest: int = 4096
    choices: Sequence[str] | None = None
    pattern: str | None = None
    names: Sequence[str] = ()
    """What there is; another name is not refused here, but not found."""
    repeated: int = 1
    """How often it may be given."""
    required: bool = False
    place: Literal["query", "path"] = "query"

    def read(self, given: Sequence[str]) -> Any:
        """The checked value, or values."""
        if not given:
            if self.required:
                raise Refusal(422, f"the parameter {self.name} is missing")
            return [] if self.repeated > 1 else self.default
        if len(given) > self.repeated:
            times = "once" if self.repeated == 1 else f"{self.repeated} times"
            raise Refusal(422, f"the parameter {self.name} may be given {times} at most")
        values = [self._one(text) for text in given]
        return values if self.repeated > 1 else values[0]

    def _one(self, text: str) -> Any:
        value: Any = text
        fits = len(text) <= self.longest
        if self.kind == "integer":
            fits = fits and _NUMBERS.fullmatch(text) is not None
            value = int(text) if fits else 0
        elif self.kind == "number":
            value = _number(text) if fits else math.nan
            fits = math.isfinite(value)
        if self.kind == "string":
            fits = fits and (self.choices is None or text in self.choices)
            fits = fits and (self.pattern is None or re.fullmatch(self.pattern, text) is not None)
            fits = fits and _is_text(text)
        else:
            fits = fits and (self.least is None or value >= self.least)
            fits = fits and (self.most is None or value <= self.most)
        if not fits:
            raise Refusal(422, f"the parameter {self.name} must be {self.wanted}")
        return value

    @property
    def wanted(self) -> str:
        """What may be given, in words."""
        if self.choices is not None:
            return f"one of {', '.join(self.choices)}"
        if self.kind == "string":
            shape = f" that matches {self.pattern}" if self.pattern else ""
            return f"text of at most {self.longest} characters{shape}"
        ends = [f"at least {self.least:g}" if self.least is not None else ""]
        ends += [f"at most {self.most:g}" if self.most is not None else ""]
        limits = " and ".join(end for end in ends if end)
        return f"{'a whole number' if self.kind == 'integer' else 'a number'} {limits}".strip()

    def openapi(self) -> dict[str, Any]:
        """As OpenAPI has it."""
        schema: dict[str, Any] = {"type": self.kind}
        if self.kind == "string":
            schema["maxLength"] = self.longest
        for key, value in (("minimum", self.least), ("maximum", self.most)):
            if value is not None and self.kind != "string":
                schema[key] = int(value) if self.kind == "integer" else value
        if self.choices is not None:
            schema = {"type": "string", "enum": list(self.choices)}
        if self.names:
            schema = {"type": "string", "enum": list(self.names)}
        if self.pattern is not None:
            schema["pattern"] = self.pattern
        if self.default is not None:
            schema["default"] = self.default
        if self.repeated > 1:
            schema = {"type": "array", "items": schema, "maxItems": self.repeated}
        required = self.required or self.place == "path"
        return {
            "name": self.name,
            "in": self.place,
            "required": required,
            "description": self.about,
            "schema": schema,
        }


def read_all(parameters: Sequence[Parameter], query: QueryParams) -> dict[str, Any]:
    """The checked parameters of a query string; what nobody asked for is not looked at."""
    return {
        each.name: each.read(query.getlist(each.name))
        for each in parameters
        if each.place == "query"
    }


def _number(text: str) -> float:
    try:
        return float(text) if len(text) < 40 else math.nan
    except ValueError:
        return math.nan


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
