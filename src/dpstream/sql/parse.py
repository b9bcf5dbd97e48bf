"""SQL text to one parsed SELECT."""

from __future__ import annotations

from sqlglot import exp
from sqlglot.errors import ParseError, SqlglotError, TokenError

from dpstream.errors import InvalidParameter
from dpstream.sql.dialect import PrivateSql
from dpstream.sql.functions import TRUNCATIONS
from dpstream.sql.statement import Statement, refusal

_LONGEST = 100_000  # characters
_SHAPE = (
    "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (...) columns FROM table [WHERE ...] GROUP BY ... "
    "[HAVING ...] [ORDER BY ...] [LIMIT n] [EMIT EVERY INTERVAL ...]"
)


def parse(text: str) -> Statement:
    """Parse one statement; what cannot be read is underlined."""
    if not isinstance(text, str) or len(text) > _LONGEST:
        raise InvalidParameter(f"SQL must be text of at most {_LONGEST} characters")
    dialect = PrivateSql()
    try:
        tokens = dialect.tokenize(text)
        trees = [tree for tree in dialect.parser().parse(tokens, text) if tree is not None]
    except TokenError as error:
        raise refusal(
            text, None, f"this is not SQL: {error}", "close every quote and comment"
        ) from None
    except ParseError as error:
        raise _unreadable(text, error) from None
    except RecursionError:
        raise refusal(text, None, "the SQL is nested too deeply", "use fewer parentheses") from None
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


def _name_units(tree: exp.Expr) -> None:
    """DAY in DATE_TRUNC(ts, DAY) is a word, not a column."""
    for call in list(tree.find_all(exp.Anonymous)):
        last = call.expressions[-1] if call.expressions else None
        if call.name.upper() in TRUNCATIONS and isinstance(last, exp.Column):
            if not isinstance(call.expressions[0], exp.Literal):
                last.replace(exp.var(last.name).update_positions(last.this))


def _unreadable(text: str, error: ParseError) -> InvalidParameter:
    """The parser's complaint, with its place."""
    about = error.errors[0] if error.errors else {}
    words = str(about.get("description") or error).rstrip(".")
    if words.startswith("Required keyword"):
        words = "something is missing here"
    line, col = about.get("line"), about.get("col")
    span = None
    if isinstance(line, int) and isinstance(col, int):  # `col` is where the token ends
        before = sum(len(row) + 1 for row in text.split("\n")[: line - 1])
        size = max(len(str(about.get("highlight") or "x")), 1)
        end = min(before + col, len(text))
        span = (max(end - size, 0), end)
    return refusal(text, span, f"this cannot be read as SQL: {words}", f"the shape is {_SHAPE}")
