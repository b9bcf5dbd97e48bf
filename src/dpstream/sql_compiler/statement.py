"""SQL text to one parsed statement, with the places of its parts for errors that point at them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlglot import exp
from sqlglot.errors import ParseError, SqlglotError, TokenError
from sqlglot.tokenizer_core import Token, TokenType

from dpstream.errors import InvalidParameter
from dpstream.sql_compiler.dialect import PrivateSql
from dpstream.sql_compiler.functions import TRUNCATIONS

_LONGEST = 100_000  # characters
_BEGINNINGS = (TokenType.SELECT, TokenType.WITH, TokenType.L_PAREN)
_SHAPE = (
    "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (...) columns FROM table [WHERE ...] GROUP BY ... "
    "[HAVING ...] [ORDER BY ...] [LIMIT n] [EMIT EVERY INTERVAL ...]"
)
_WORDS = (
    *("SELECT", "WITH", "DIFFERENTIAL_PRIVACY", "OPTIONS", "FROM", "WHERE", "GROUP", "HAVING"),
    *("ORDER", "LIMIT", "OFFSET", "EMIT", "EVERY", "INTERVAL", "BETWEEN"),
)


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
        after = (token.text for token in self.tokens if span and token.start > span[0])
        return next(after, "").upper()

    def refusal(self, node: exp.Expr | None, reason: str, fix: str) -> InvalidParameter:
        """What is wrong, where, and what to do."""
        span = None if node is None else self.span(node)
        return refusal(self.text, span, reason, fix)


def closest_word(word: str, known: Iterable[str], *, least: float = 0.75) -> str | None:
    """The known word that another is a slip of the hand away from, if there is one.

    >>> closest_word("gropu", ["FROM", "GROUP"]), closest_word("page", ["FROM", "GROUP"])
    ('GROUP', None)
    """
    spelled = {name.upper(): name for name in known}
    matches = difflib.get_close_matches(word.upper(), spelled, n=1, cutoff=least)
    return spelled[matches[0]] if matches else None


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
        lines += underline(text, *span)
    return InvalidParameter("\n".join([*lines, f"fix: {fix}"]))


def underline(text: str, start: int, end: int) -> list[str]:
    """The lines that a span touches, each with carets under its part of it."""
    lines, begin = [], 0
    for number, line in enumerate(text.split("\n"), 1):
        first, last = max(start, begin), min(end, begin + len(line))
        if first < last or start == end == first:
            shown, label = line.replace("\t", " "), f"  line {number}: "
            inside = shown[first - begin : last - begin]
            indent = len(label) + first - begin + len(inside) - len(inside.lstrip())
            lines += [label + shown, " " * indent + "^" * max(len(inside.strip()), 1)]
        begin += len(line) + 1
    return lines


def parse(text: str) -> Statement:
    """Parse one statement; what cannot be read is underlined."""
    if len(text) > _LONGEST:
        raise InvalidParameter(f"SQL must have at most {_LONGEST} characters; got {len(text)}")
    dialect = PrivateSql()
    try:
        tokens = dialect.tokenize(text)
        _require_select(text, tokens)
        trees = [tree for tree in dialect.parser().parse(tokens, text) if tree is not None]
    except TokenError as error:
        raise refusal(
            text, None, f"this is not SQL: {error}", "close every quote and comment"
        ) from None
    except ParseError as error:
        raise _misspelling(text, tokens, error) or _parser_error(text, error) from None
    except RecursionError:
        raise refusal(text, None, "the SQL is nested too deeply", "use fewer parentheses") from None
    except InvalidParameter:
        raise
    except (SqlglotError, ValueError, AttributeError, TypeError, IndexError, KeyError) as error:
        raise refusal(text, None, f"this cannot be read as SQL ({error})", _SHAPE) from None
    if len(trees) != 1:
        raise refusal(
            text,
            None,
            f"one statement is wanted; {len(trees)} were found",
            "give each query on its own",
        )
    _name_units(trees[0])
    return Statement(text=text, tree=trees[0], tokens=tokens)


def _require_select(text: str, tokens: Sequence[Token]) -> None:
    """Other statements, and pipes, are not even parsed."""
    first = tokens[0] if tokens else None
    if first is None or first.token_type not in _BEGINNINGS:
        span = None if first is None else (first.start, first.end + 1)
        found = "there is nothing" if first is None else f"this begins with {first.text}"
        raise refusal(text, span, f"a SELECT is wanted; {found}", f"the shape is {_SHAPE}")
    for token in tokens:
        if token.token_type == TokenType.PIPE_GT:
            span = (token.start, token.end + 1)
            raise refusal(text, span, "pipe syntax is not known", f"the shape is {_SHAPE}")


def _name_units(tree: exp.Expr) -> None:
    """DAY in DATE_TRUNC(ts, DAY) is a word, not a column."""
    for call in list(tree.find_all(exp.Anonymous)):
        if not call.expressions:
            continue
        last = call.expressions[-1]
        if call.name.upper() not in TRUNCATIONS or isinstance(call.expressions[0], exp.Literal):
            continue
        if isinstance(last, exp.Column):
            last.replace(exp.var(last.name).update_positions(last.this))


def _misspelling(text: str, tokens: Sequence[Token], error: ParseError) -> InvalidParameter | None:
    """A word beside the parser's complaint that is nearly a word of the language."""
    end = _error_end(text, error)
    at = next((n for n, token in enumerate(tokens) if end and token.end + 1 >= end), None)
    beside = () if at is None else (at, at - 1, at + 1)
    for token in (tokens[n] for n in beside if n in range(len(tokens))):
        meant = closest_word(token.text, _WORDS)
        if meant and not token.text.upper().startswith(meant):  # "orders" may be meant
            reason = f"this cannot be read as SQL: {token.text} is not expected here"
            return refusal(text, (token.start, token.end + 1), reason, f"did you mean {meant}?")
    return None


def _error_end(text: str, error: ParseError) -> int | None:
    """Where the token ends that the parser complains about."""
    about = error.errors[0] if error.errors else {}
    line, col = about.get("line"), about.get("col")
    if not isinstance(line, int) or not isinstance(col, int):
        return None
    before = sum(len(row) + 1 for row in text.split("\n")[: line - 1])
    return min(before + col, len(text))


def _parser_error(text: str, error: ParseError) -> InvalidParameter:
    """The parser's complaint, with its place."""
    about = error.errors[0] if error.errors else {}
    words = str(about.get("description") or error).split(" but got <")[0].rstrip(".")
    if words.startswith("Required keyword"):
        words = "something is missing here"
    if words.startswith("Invalid expression"):
        words = "this is not expected here"
    span, end = None, _error_end(text, error)
    if end is not None:
        size = max(len(str(about.get("highlight") or "x")), 1)
        span = (max(end - size, 0), end)
    return refusal(text, span, f"this cannot be read as SQL: {words}", f"the shape is {_SHAPE}")
