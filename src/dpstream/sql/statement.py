"""A statement with the places of its parts, and refusals that point at them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlglot import exp
from sqlglot.tokenizer_core import Token, TokenType

from dpstream.errors import InvalidParameter

_NAMED_CALLS = (exp.Anonymous, exp.Cast, exp.Extract)


@dataclass(frozen=True, kw_only=True)
class Statement:
    """SQL as written, and as parsed."""

    text: str
    tree: exp.Expr
    tokens: Sequence[Token]

    def span(self, node: exp.Expr) -> tuple[int, int] | None:
        """From where to where (exclusive) a part stands in the text; None if it cannot be told."""
        starts, ends = [], []
        for part in node.walk():
            if "start" in part.meta:
                starts.append(part.meta["start"])
                ends.append(self._end(part.meta["start"], part.meta["end"]))
        if starts:
            return min(starts), max(ends) + 1
        return None if node.parent is None else self.span(node.parent)

    def _end(self, start: int, end: int) -> int:
        """The end of a token, or of the call that it begins."""
        at = next((n for n, token in enumerate(self.tokens) if token.start == start), None)
        following = [] if at is None else self.tokens[at + 1 :]
        if not following or following[0].token_type != TokenType.L_PAREN:
            return end
        depth = 0
        for token in following:
            depth += {TokenType.L_PAREN: 1, TokenType.R_PAREN: -1}.get(token.token_type, 0)
            if not depth:
                return token.end
        return end

    def word_after(self, node: exp.Expr) -> str:
        """The word that follows the one a part begins with, in capitals; empty if none does."""
        span = self.span(node)
        found = [token.text for token in self.tokens if span and token.start > span[0]]
        return found[0].upper() if found else ""

    def refusal(self, node: exp.Expr | None, reason: str, fix: str) -> InvalidParameter:
        """What is wrong, where, and what to do."""
        span = None if node is None else self.span(node)
        return refusal(self.text, span, reason, fix)


def close(word: str, known: Iterable[str], *, least: float = 0.75) -> str | None:
    """The known word that another is a slip of the hand away from, if there is one.

    >>> close("gropu", ["FROM", "GROUP"]), close("page", ["FROM", "GROUP"])
    ('GROUP', None)
    """
    spelled = {name.upper(): name for name in known}
    found = difflib.get_close_matches(word.upper(), spelled, n=1, cutoff=least)
    return spelled[found[0]] if found else None


def refusal(text: str, span: tuple[int, int] | None, reason: str, fix: str) -> InvalidParameter:
    """An error that shows the lines of `span`, underlined.

    >>> print(refusal("SELECT\\n  SUM(x)", (9, 15), "SUM needs bounds", "give them"))
    SUM needs bounds
      line 2:   SUM(x)
                ^^^^^^
    fix: give them
    """
    lines = [reason]
    if span is not None:
        lines += underlined(text, *span)
    return InvalidParameter("\n".join([*lines, f"fix: {fix}"]))


def underlined(text: str, start: int, end: int) -> list[str]:
    """The lines that a span touches, each with carets under its part of it."""
    found, at = [], 0
    for number, line in enumerate(text.split("\n"), 1):
        first, last = max(start, at), min(end, at + len(line))
        at += len(line) + 1
        if first >= last and not (start == end == first):
            continue
        begin = at - len(line) - 1
        shown = line.replace("\t", " ")
        label = f"  line {number}: "
        inside = shown[first - begin : last - begin]
        skipped = len(inside) - len(inside.lstrip())
        marks = "^" * max(len(inside.strip()), 1)
        found += [label + shown, " " * (len(label) + first - begin + skipped) + marks]
    return found
