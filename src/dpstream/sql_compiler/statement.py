"""A statement: the SQL that dpstream reads, its parsed text, and the draft that the rules fill.

The SQL is BigQuery's privacy clause, Flink's window tables, and EMIT. Function calls stay as they
are written (name and arguments): what they mean is said in one table, `functions.py`, and a name
that is not in it is refused. Names are case-sensitive, as the columns of Arrow tables are; 'text'
is a string, "name" and `name` are names.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sqlglot import exp, generator, parser, tokens
from sqlglot.dialects.dialect import Dialect
from sqlglot.errors import ParseError, SqlglotError, TokenError
from sqlglot.tokenizer_core import Token, TokenType

from dpstream.errors import InvalidParameter, refuse_unwritable
from dpstream.query.aggregates import Avg, Stddev, Sum, Variance
from dpstream.query.grouping_sets import GROUPING_ID, NOT_SHOWN
from dpstream.query.second_moments import Correlation, Covariance, OfTwoColumns, Slope
from dpstream.sql_compiler.functions import TRUNCATIONS
from dpstream.sql_compiler.time_functions import DIFFERENCES, UNIT_FIRST

WINDOWS = ("TUMBLE", "HOP", "CUMULATE", "SESSION")
USER_TABLES = {"FUNNEL": ("step", "step_name"), "RETENTION": ("lag",)}
"""Tables of what units do, and their columns whose values the text lists."""
_EMIT = TokenType.PREWHERE  # a word that this dialect has no other use for
_CALLS = ("CAST", "SAFE_CAST", "TRY_CAST", "EXTRACT")  # calls with a grammar of their own
_WINDOW_ARGUMENTS = ("TIMECOL", "SLIDE", "STEP", "SIZE")  # Flink's names, in order
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
BOUNDED_AGGREGATES: dict[str, type[Sum]] = {
    "SUM": Sum,
    "AVG": Avg,
    "VARIANCE": Variance,
    "VAR_POP": Variance,
    "STDDEV": Stddev,
    "STDDEV_POP": Stddev,
}
"""Aggregates of values, each clamped to bounds; a new one is a class and a line here."""
CELL_AGGREGATES = {
    "MEDIAN": "MEDIAN(x, contribution_bounds_per_row => (0, 600))",
    "MIN": "MIN(x, contribution_bounds_per_row => (0, 600))",
    "MAX": "MAX(x, contribution_bounds_per_row => (0, 600))",
    "PERCENTILE_CONT": "PERCENTILE_CONT(x, 0.95, contribution_bounds_per_row => (0, 600))",
    "APPROX_QUANTILES": "APPROX_QUANTILES(x, 4, contribution_bounds_per_row => (0, 600))",
    "HISTOGRAM": "HISTOGRAM(x, [0, 10, 100])",
}
"""Quantiles and histograms, and how each is written."""
PAIR_AGGREGATES: dict[str, tuple[type[OfTwoColumns], dict[str, bool]]] = {
    "CORR": (Correlation, {}),
    "COVAR_POP": (Covariance, {}),
    "COVAR_SAMP": (Covariance, {"sample": True}),
    "REGR_SLOPE": (Slope, {}),
}
"""Aggregates of two columns: what each is, and what it is made with."""
AGGREGATES = (
    *("COUNT", "COUNTIF", *BOUNDED_AGGREGATES, *CELL_AGGREGATES, *PAIR_AGGREGATES),
    "APPROX_COUNT_DISTINCT",
)
WINDOW_COLUMNS = ("window_start", "window_end")
RELEASE_COLUMNS = ("trigger_time", "release_index")
KEPT_SHARE = "kept_share"


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
        "parts": False,
    }


class UserTable(WindowTable):
    """FUNNEL(table, ...) or RETENTION(table, DESCRIPTOR(time), ...), with `named` arguments."""

    arg_types: ClassVar[dict[str, bool]] = {
        "kind": True,
        "this": True,
        "time": False,
        "named": False,
    }


class UnitSelect(exp.Expression):
    """A SELECT in FROM that groups the rows of each unit; `number` in `Draft.unit_selects`."""

    arg_types: ClassVar[dict[str, bool]] = {"number": True}


class TableSubquery(exp.Expression):
    """A subquery in an expression, which looks into a table; `number` in `Draft.lookups`.

    `this`: what is compared with its values, in x IN (SELECT ...).
    """

    arg_types: ClassVar[dict[str, bool]] = {"this": False, "number": True}


class Item(exp.Expression):
    """An item of the list `this`, which UNNEST made a row of; or its `place`, counted from 0."""

    arg_types: ClassVar[dict[str, bool]] = {"this": True, "number": False, "place": False}


SHRUNK = ("SHRINK", "SHRINK_STDDEV")
"""Functions of OVER whose second argument, the error bar of the first, need not be written."""


class Over(exp.Expression):
    """A function of several published rows: its name `this`, PARTITION BY `parts`, ORDER BY.

    `frame`: ROWS BETWEEN ..., as sqlglot has it; `other`: it has what is not known.
    """

    arg_types: ClassVar[dict[str, bool]] = {
        "this": True,
        "expressions": False,
        "parts": False,
        "order": False,
        "frame": False,
        "other": False,
    }


class KeysOf(exp.Expression):
    """TABLE name, as a list of keys."""

    arg_types: ClassVar[dict[str, bool]] = {"this": True}


class Emit(exp.Expression):
    """EMIT EVERY interval; EMIT ON WINDOW CLOSE (without `every`); `other`: anything else."""

    arg_types: ClassVar[dict[str, bool]] = {"every": False, "other": False}


def _with_position(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A parser of a call that notes where the call's name stands."""

    def parse_call(self: Any) -> Any:
        name = self._tokens[self._index - 2]  # before the parenthesis
        return parse(self).update_positions(name)

    return parse_call


def _item_text(self: Any, node: exp.Expr) -> str:
    """UNNEST(list), with a number from the second one of the same list on."""
    number, word = node.args.get("number"), "OFFSET OF " if node.args.get("place") else ""
    return f"{word}UNNEST({self.sql(node, 'this')}){f' #{number + 1}' if number else ''}"


def _lookup_text(self: Any, node: exp.Expr) -> str:
    number = node.args["number"] + 1
    return f"{self.sql(node, 'this')} IN (SUBQUERY {number})" if node.this else f"SUBQUERY {number}"


def _over_text(self: Any, node: exp.Expr) -> str:
    parts = self.expressions(node, key="parts", flat=True)
    order = self.expressions(node, key="order", flat=True)
    spec = [f"PARTITION BY {parts}" if parts else "", f"ORDER BY {order}" if order else ""]
    spec.append(self.sql(node, "frame"))
    given = self.expressions(node, flat=True)
    return f"{node.this}({given}) OVER ({' '.join(filter(None, spec))})"


def _at_its_place(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A parser of a parameter that notes where it stands."""

    def parse_parameter(self: Any) -> Any:
        token = self._prev
        node = parse(self)
        return None if node is None else node.update_positions(token)

    return parse_parameter


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
            **{name: _with_position(lambda self: self._parse_user_table()) for name in USER_TABLES},
        }
        PLACEHOLDER_PARSERS: ClassVar[dict[TokenType, Callable[..., Any]]] = {
            token: _at_its_place(parse)
            for token, parse in parser.Parser.PLACEHOLDER_PARSERS.items()
        }
        RANGE_PARSERS: ClassVar[dict[TokenType, Callable[..., Any]]] = {
            **parser.Parser.RANGE_PARSERS,
            **dict.fromkeys((TokenType.TILDE, TokenType.RLIKE), lambda self, x: self._matches(x)),
            TokenType.IRLIKE: lambda self, x: self._matches(x, "(?i)"),
        }
        QUERY_MODIFIER_PARSERS: ClassVar[dict[TokenType, Callable[..., Any]]] = {
            **parser.Parser.QUERY_MODIFIER_PARSERS,
            _EMIT: lambda self: ("emit", self._parse_emit()),
        }

        def _parse_hint(self) -> Any:
            """The clause stands where other dialects have their hints: right after SELECT."""
            named = self._match_text_seq("WITH", "DIFFERENTIAL_PRIVACY")
            if not named and not self._match_text_seq("WITH", "ANONYMIZATION"):
                return super()._parse_hint()
            place = self._prev
            options: list[Any] = []
            if self._match_text_seq("OPTIONS"):
                self._match_l_paren()
                if not self._match(TokenType.R_PAREN):
                    options = self._parse_csv(self._parse_assignment)
                    self._match_r_paren()
            return self.expression(PrivacyClause(expressions=options), place)

        def _parse_unary(self) -> Any:
            """TABLE name is a list of keys, and nothing else."""
            if self._match(TokenType.TABLE):
                return self.expression(KeysOf(this=self._parse_id_var()))
            return super()._parse_unary()

        def _matches(self, value: Any, flags: str = "") -> Any:
            """PostgreSQL's value ~ 'pattern' and value ~* 'pattern', as a call."""
            place, pattern = self._prev, self._parse_bitwise()
            if flags and isinstance(pattern, exp.Literal | exp.RawString):
                pattern = exp.Literal.string(flags + pattern.name)
            elif flags:
                self.raise_error("a pattern in quotes is wanted after ~*")
            call = exp.Anonymous(this="REGEXP_LIKE", expressions=[value, pattern])
            return self._parse_escape(self.expression(call, place))

        def _parse_window_table(self) -> Any:
            kind = self._tokens[self._index - 2].text.upper()
            self._match_text_seq("DATA", "=>")
            self._match(TokenType.TABLE)
            table = self._parse_table()
            parts = self._parse_assignment() if self._match(TokenType.PARTITION_BY) else None
            rest = self._parse_csv(self._parse_lambda) if self._match(TokenType.COMMA) else []
            if rest and all(isinstance(each, exp.Kwarg) for each in rest):
                named = {each.this.name.upper(): each.expression for each in rest}
                if set(named) <= set(_WINDOW_ARGUMENTS):
                    rest = [named[name] for name in _WINDOW_ARGUMENTS if name in named]
            time = rest.pop(0) if rest else None
            made = WindowTable(kind=kind, this=table, time=time, expressions=rest, parts=parts)
            return self.expression(made)

        def _parse_user_table(self) -> Any:
            """A table, perhaps its time column, and arguments by name; steps may have aliases."""
            kind = self._tokens[self._index - 2].text.upper()
            table, time, named = self._parse_table(), None, []
            while self._match(TokenType.COMMA):
                if not self._next or self._next.token_type != TokenType.FARROW:
                    time = self._parse_assignment()
                    continue
                name = exp.Var(this=self._curr.text).update_positions(self._curr)
                self._advance(2)
                value = self._parse_expression()
                if isinstance(value, exp.Paren) and isinstance(value.this, exp.Alias):
                    value = exp.Tuple(expressions=[value.this])
                named.append(exp.Kwarg(this=name, expression=value))
            return self.expression(UserTable(kind=kind, this=table, time=time, named=named))

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
            UserTable: lambda self, node: f"{node.args['kind']}({self.sql(node, 'this')}, ...)",
            UnitSelect: lambda self, node: "SELECT ... GROUP BY unit",
            TableSubquery: _lookup_text,
            KeysOf: lambda self, node: f"TABLE {self.sql(node, 'this')}",
            Emit: lambda self, node: "EMIT",
            Item: _item_text,
            Over: _over_text,
        }


def canonical(node: exp.Expr) -> str:
    """One spelling of an expression, whatever spaces, comments and case of words it came with."""
    return node.sql(dialect=PrivateSql, comments=False)


@dataclass(frozen=True, kw_only=True)
class Statement:
    """SQL as written, and as parsed."""

    text: str
    tree: exp.Expr
    tokens: Sequence[Token]

    def span(self, node: exp.Expr) -> tuple[int, int] | None:
        """From where to where (exclusive) a part stands in the text; None if it cannot be told."""
        places = [part.meta for part in node.walk() if "start" in part.meta]
        if places:
            ends = (self._end(place["start"], place["end"]) for place in places)
            return min(place["start"] for place in places), max(ends) + 1
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
    refuse_unwritable("SQL", text)
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
        raise _parse_error(text, tokens, error) from None
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
    """DAY in DATE_TRUNC(ts, DAY) is a word, not a column; SAFE.F(x) is F(x), which never fails."""
    for dot in list(tree.find_all(exp.Dot)):
        owner, call = dot.this, dot.expression
        if isinstance(owner, exp.Identifier) and isinstance(call, exp.Anonymous):
            space = owner.name.upper()
            if space == "NET":
                call.set("this", f"NET.{call.name.upper()}")
            if space in ("NET", "SAFE"):
                dot.replace(call)
    for window in list(tree.find_all(exp.Window)):
        call, order = window.this, window.args.get("order")
        if isinstance(call, exp.Anonymous):
            known = {"this", "partition_by", "order", "over", "spec"}
            name, given = call.name.upper(), call.expressions
            if name in SHRUNK and len(given) == 1 and isinstance(given[0], exp.Column):
                given = [*given, exp.column(f"{given[0].name}_stddev", quoted=True)]
            made = Over(
                this=name,
                expressions=given,
                parts=window.args.get("partition_by"),
                order=[] if order is None else order.expressions,
                frame=window.args.get("spec"),
                other=bool(present_args(window) - known),
            )
            window.replace(made.update_positions(call))
    for call in list(tree.find_all(exp.Anonymous)):
        name, arguments = call.name.upper(), call.expressions
        if name == "TABLE" and len(arguments) == 1 and isinstance(arguments[0], WindowTable):
            call.replace(arguments[0])  # TABLE(TUMBLE(...)), as Flink has it
        place = {**dict.fromkeys((*TRUNCATIONS, *DIFFERENCES), -1), **dict.fromkeys(UNIT_FIRST, 0)}
        if name not in place or not arguments:
            continue
        if name in TRUNCATIONS and isinstance(arguments[0], exp.Literal):
            continue
        unit = arguments[place[name]]
        if isinstance(unit, exp.Column):
            unit.replace(exp.var(unit.name).update_positions(unit.this))


def _parse_error(text: str, tokens: Sequence[Token], error: ParseError) -> InvalidParameter:
    """The parser's complaint, or a word beside its place that is nearly a word of the language."""
    about = error.errors[0] if error.errors else {}
    line, col, span = about.get("line"), about.get("col"), None
    if isinstance(line, int) and isinstance(col, int):
        before = sum(len(row) + 1 for row in text.split("\n")[: line - 1])
        end = min(before + col, len(text))
        span = (max(end - max(len(str(about.get("highlight") or "x")), 1), 0), end)
        at = next((n for n, token in enumerate(tokens) if end and token.end + 1 >= end), None)
        beside = () if at is None else (at, at - 1, at + 1)
        near = () if at is None else tokens[max(at - 3, 0) : at + 1]
        after = () if at is None else tokens[at : at + 2]
        if any(token.text.upper() == "CLAMPED" for token in (*near, *after)):
            reason = "this cannot be read as SQL: CLAMPED BETWEEN is not known"
            fix = "write SUM(x, contribution_bounds_per_group => (0, 10)), or AVG likewise"
            return refusal(text, span, reason, fix)
        if any(token.token_type == TokenType.COLON for token in near):
            reason = "this cannot be read as SQL: a colon does not take a field of a value"
            return refusal(text, span, reason, "write JSON_VALUE(column, '$.name')")
        for token in (tokens[n] for n in beside if n in range(len(tokens))):
            meant = closest_word(token.text, _WORDS)
            if meant and not token.text.upper().startswith(meant):  # "orders" may be meant
                reason = f"this cannot be read as SQL: {token.text} is not expected here"
                return refusal(text, (token.start, token.end + 1), reason, f"did you mean {meant}?")
    words = str(about.get("description") or error).split(" but got <")[0].rstrip(".")
    if words.startswith("Required keyword"):
        words = "something is missing here"
    if words.startswith("Invalid expression"):
        words = "this is not expected here"
    return refusal(text, span, f"this cannot be read as SQL: {words}", f"the shape is {_SHAPE}")


@dataclass(kw_only=True)
class Relation:
    """What FROM gives: a table of the source, filtered, with columns made of its columns."""

    table: str
    columns: dict[str, exp.Expr] = field(default_factory=dict)
    """Expressions of the table's columns, by name."""
    open: bool = True
    """Are other columns of the table there too, as they are?"""
    without: set[str] = field(default_factory=set)
    """Columns that SELECT * EXCEPT left out."""
    where: list[exp.Expr] = field(default_factory=list)
    window: WindowTable | None = None
    names: set[str] = field(default_factory=set)
    """What columns may be qualified with."""
    unnests: list[tuple[Item, Item | None, bool]] = field(default_factory=list)
    """Lists whose items are rows: the item, its place if wanted, are rows without items kept?"""
    joins: list[Any] = field(default_factory=list)
    """Tables that it is joined to, in order (`JoinClause`)."""
    union: list[Relation] = field(default_factory=list)
    """The branches of a UNION ALL that its rows come from; none: they come from `table`."""
    unit: Any = None
    """What its rows are made of, where a subquery groups the rows of each unit (`UnitRelation`)."""


@dataclass(kw_only=True)
class Draft:
    """A statement and what the rules know of it; each rule reads it and adds to it."""

    statement: Statement
    overrides: dict[str, Any]
    name: str = "query"
    functions: Mapping[str, Any] = field(default_factory=dict)
    """Functions in Python (`UserFunction`), by their names in capitals."""
    unbounded: bool = False
    """May bounds and clamps be missing?"""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Of the query, by their names in `Query`."""
    relation: Relation = field(default_factory=lambda: Relation(table=""))
    unit_selects: list[exp.Expr] = field(default_factory=list)
    """Subqueries that group the rows of each unit."""
    lookups: list[Any] = field(default_factory=list)
    """Subqueries in expressions that look into tables (`Lookup`)."""
    keys: dict[str, exp.Expr] = field(default_factory=dict)
    """Expressions of the source's columns to group by, by the name they are published under."""
    aggregates: dict[str, exp.Expr] = field(default_factory=dict)
    """Calls as they are written, by the name they are published under."""
    hidden: set[str] = field(default_factory=set)
    """Aggregates that only computed columns need: they are not shown themselves."""
    computed: dict[str, exp.Expr] = field(default_factory=dict)
    """Expressions of published columns, by the name they are published under."""
    ranked: dict[str, exp.Expr] = field(default_factory=dict)
    """Expressions with OVER of published columns, by the name they are published under."""
    outputs: list[str] = field(default_factory=list)
    """The columns of SELECT, in order."""
    sets: list[tuple[str, ...]] = field(default_factory=list)
    """The keys of each set, where GROUP BY has several."""
    windowed: bool = False
    """Is window_start or window_end grouped by?"""
    series: bool = False
    """Is it published through a time-series mechanism?"""

    @property
    def labels(self) -> list[str]:
        """The columns that say which set a published row is of, where there are several."""
        rest = [] if "public_groups" in self.parameters else [NOT_SHOWN]
        return [GROUPING_ID, *rest] if self.sets else []

    @property
    def select(self) -> exp.Expr:
        """The outer SELECT."""
        return self.statement.tree

    @property
    def clause(self) -> PrivacyClause:
        """The privacy clause."""
        clause = self.select.args["hint"]
        assert isinstance(clause, PrivacyClause)
        return clause

    def refusal(self, node: exp.Expr | None, reason: str, fix: str) -> InvalidParameter:
        """What is wrong, where, and what to do."""
        return self.statement.refusal(node, reason, fix)


def call_name(node: exp.Expr) -> str:
    """The name of a call in capitals; empty if it is none."""
    return node.name.upper() if isinstance(node, exp.Anonymous) else ""


def find_calls(node: exp.Expr, names: Collection[str]) -> Iterator[exp.Expr]:
    """Every call of these functions within a node."""
    return (each for each in node.find_all(exp.Anonymous) if call_name(each) in names)


def present_args(node: exp.Expr) -> set[str]:
    """The arguments of a node that are there, such as the clauses of a SELECT."""
    return {name for name, value in node.args.items() if value}


def other_clauses(select: exp.Expr, allowed: set[str]) -> Iterator[tuple[str, exp.Expr]]:
    """The name in capitals and the node of each clause that is not among the allowed ones."""
    for name in sorted(present_args(select) - allowed):
        value = select.args[name]
        node = value[0] if isinstance(value, list) else value
        yield name.rstrip("_").upper(), node if isinstance(node, exp.Expr) else select
