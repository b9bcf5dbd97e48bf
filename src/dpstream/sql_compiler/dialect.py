"""The SQL that dpstream reads: BigQuery's privacy clause, Flink's window tables, EMIT.

Function calls stay as they are written (name and arguments): what they mean is said in one table,
`functions.py`, and a name that is not in it is refused. Names are case-sensitive, as the columns of
Arrow tables are; 'text' is a string, "name" and `name` are names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from sqlglot import exp, generator, parser, tokens
from sqlglot.dialects.dialect import Dialect
from sqlglot.tokenizer_core import TokenType

WINDOWS = ("TUMBLE", "HOP", "CUMULATE", "SESSION")
_EMIT = TokenType.PREWHERE  # a word that this dialect has no other use for
_CALLS = ("CAST", "SAFE_CAST", "TRY_CAST", "EXTRACT")  # calls with a grammar of their own


class PrivacyClause(exp.Expression):
    """WITH DIFFERENTIAL_PRIVACY OPTIONS (name = value, ...)."""

    arg_types: ClassVar[dict[str, bool]] = {"expressions": False}


class WindowTable(exp.Expression):
    """TUMBLE(table, DESCRIPTOR(time), size), and its relatives."""

    arg_types: ClassVar[dict[str, bool]] = {
        "kind": True,
        "this": True,
        "time": False,
        "expressions": False,
    }


class Emit(exp.Expression):
    """EMIT EVERY interval; EMIT ON WINDOW CLOSE (without `every`); `other`: anything else."""

    arg_types: ClassVar[dict[str, bool]] = {"every": False, "other": False}


def _with_position(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A parser of a call that notes where the call's name stands."""

    def parse_call(self: Any) -> Any:
        name = self._tokens[self._index - 2]  # before the parenthesis
        return parse(self).update_positions(name)

    return parse_call


class PrivateSql(Dialect):
    """SELECT WITH DIFFERENTIAL_PRIVACY ... EMIT ..."""

    class Tokenizer(tokens.Tokenizer):
        """Raw strings for regular expressions; EMIT is a reserved word."""

        IDENTIFIERS: ClassVar[list[Any]] = ['"', "`"]
        RAW_STRINGS: ClassVar[list[Any]] = [("r'", "'"), ("R'", "'")]
        KEYWORDS: ClassVar[dict[str, TokenType]] = {
            **{
                word: kind
                for word, kind in tokens.Tokenizer.KEYWORDS.items()
                if word not in ("DIV", "SESSION")  # here they are calls
            },
            "EMIT": _EMIT,
        }

    class Parser(parser.Parser):
        """The general parser, with three additions and without its library of functions."""

        FUNCTIONS: ClassVar[dict[str, Callable[..., Any]]] = {}
        NO_PAREN_FUNCTIONS: ClassVar[dict[Any, Any]] = {}
        FUNCTION_PARSERS: ClassVar[dict[str, Callable[..., Any]]] = {
            **{name: _with_position(parser.Parser.FUNCTION_PARSERS[name]) for name in _CALLS},
            **{name: _with_position(lambda self: self._parse_window_table()) for name in WINDOWS},
        }
        QUERY_MODIFIER_PARSERS: ClassVar[dict[TokenType, Callable[..., Any]]] = {
            **parser.Parser.QUERY_MODIFIER_PARSERS,
            _EMIT: lambda self: ("emit", self._parse_emit()),
        }

        def _parse_hint(self) -> Any:
            """The clause stands where other dialects have their hints: right after SELECT."""
            if not self._match_text_seq("WITH", "DIFFERENTIAL_PRIVACY"):
                return super()._parse_hint()
            place = self._prev
            options: list[Any] = []
            if self._match_text_seq("OPTIONS"):
                self._match_l_paren()
                if not self._match(TokenType.R_PAREN):
                    options = self._parse_csv(self._parse_assignment)
                    self._match_r_paren()
            return self.expression(PrivacyClause(expressions=options), place)

        def _parse_window_table(self) -> Any:
            kind = self._tokens[self._index - 2].text.upper()
            self._match(TokenType.TABLE)
            table = self._parse_table()
            rest = self._parse_csv(self._parse_assignment) if self._match(TokenType.COMMA) else []
            time = rest.pop(0) if rest else None
            return self.expression(WindowTable(kind=kind, this=table, time=time, expressions=rest))

        def _parse_emit(self) -> Any:
            self._match(_EMIT)
            place = self._prev
            if self._match_text_seq("EVERY") and (every := self._parse_interval()):
                return self.expression(Emit(every=every), place)
            if self._match_text_seq("ON", "WINDOW", "CLOSE"):
                return self.expression(Emit(), place)
            while self._curr and self._curr.token_type not in (TokenType.R_PAREN, _EMIT):
                self._advance()
            return self.expression(Emit(other=True), place)

    class Generator(generator.Generator):
        """The general generator, and the three additions in short."""

        TRANSFORMS: ClassVar[dict[Any, Any]] = {
            **generator.Generator.TRANSFORMS,
            PrivacyClause: lambda self, node: "WITH DIFFERENTIAL_PRIVACY",
            WindowTable: lambda self, node: f"{node.args['kind']}({self.sql(node, 'this')}, ...)",
            Emit: lambda self, node: "EMIT",
        }


def canonical(node: exp.Expr) -> str:
    """One spelling of an expression, whatever spaces, comments and case of words it came with."""
    return node.sql(dialect=PrivateSql, comments=False)
