"""Expressions give what another database gives, NULL included, and never raise for a row."""

import datetime as dt

import duckdb
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sqlglot import exp

from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.sql_compiler.expressions import Compiler
from dpstream.sql_compiler.query_builder import Expression, RowPreparation
from dpstream.sql_compiler.statement import canonical, parse
from tests.support.long import some_examples

KINDS = {
    "i": pa.int64(),
    "j": pa.int64(),
    "f": pa.float64(),
    "s": pa.string(),
    "u": pa.string(),
    "b": pa.bool_(),
    "d": pa.date32(),
    "t": pa.timestamp("us"),
}


def compiled(text, zone="UTC"):
    statement = parse(f"SELECT {text}")
    node = statement.tree.expressions[0]
    compute = Compiler(statement=statement, zone=zone).compile(node)
    names = dict.fromkeys(column.name for column in node.find_all(exp.Column))
    return Expression(text=canonical(node), columns=tuple(names), compute=compute)


def ours(text, table, zone="UTC"):
    names = tuple(table.column_names)
    made = (("x", compiled(text, zone)),)
    prepared = RowPreparation(columns=names, passed=(), computed=made, where=None, zone=zone)
    return prepared(table)["x"].to_pylist()


QUIET = {"ieee_floating_point_ops": False, "error_on_division_by_zero": False}
DATABASE = duckdb.connect(config={"threads": 1, **QUIET})


def theirs(text, table):
    DATABASE.register("source", table)
    return [row[0] for row in DATABASE.execute(f"SELECT {text} FROM source").fetchall()]


def plain(values):
    """Instants without their zone, floats to what two ways of summing agree on."""
    found = []
    for value in values:
        if isinstance(value, dt.datetime):
            value = value.replace(tzinfo=None)
        elif isinstance(value, float):
            value = float(f"{value:.9g}") + 0.0
        found.append(value)
    return found


whole = st.integers(-50, 50)
words = st.sampled_from(["", "a", "B", "ab", "a/b/c", " x ", "12", "-7.5", "é", "%", "a_b", "/"])
cells = {
    "i": whole,
    "j": whole,
    "f": st.sampled_from([-2.5, -1.0, 0.0, 0.25, 1.5, 3.0, 100.0]),
    "s": words,
    "u": words,
    "b": st.booleans(),
    "d": st.dates(dt.date(1999, 1, 1), dt.date(2030, 12, 31)),
    "t": st.datetimes(dt.datetime(1999, 1, 1), dt.datetime(2030, 12, 31)),
}
rows = st.lists(
    st.fixed_dictionaries({name: st.none() | cell for name, cell in cells.items()}), max_size=12
)


def table_of(items):
    return pa.Table.from_pylist(items, schema=pa.schema(list(KINDS.items())))


numbers = st.deferred(
    lambda: (
        st.sampled_from(["i", "j", "f", "0", "3", "-2", "1.5"])
        | st.tuples(numbers, st.sampled_from("+-*/"), numbers).map(lambda p: f"({' '.join(p)})")
        | st.tuples(st.sampled_from(["ABS", "FLOOR", "CEIL"]), numbers).map(
            lambda p: f"{p[0]}({p[1]})"
        )
        | st.tuples(conditions, numbers, numbers).map(
            lambda p: f"CASE WHEN {p[0]} THEN {p[1]} ELSE {p[2]} END"
        )
        | st.tuples(numbers, numbers).map(lambda p: f"COALESCE({p[0]}, {p[1]})")
        | st.tuples(numbers, numbers).map(lambda p: f"NULLIF({p[0]}, {p[1]})")
        | texts.map(lambda s: f"LENGTH({s})")
    )
)
texts = st.deferred(
    lambda: (
        st.sampled_from(["s", "u", "'a'", "''", "'x/y'"])
        | st.tuples(texts, texts).map(lambda p: f"({p[0]} || {p[1]})")
        | st.tuples(
            st.sampled_from(["LOWER", "UPPER", "REVERSE", "TRIM", "LTRIM", "RTRIM"]), texts
        ).map(lambda p: f"{p[0]}({p[1]})")
        | texts.map(lambda s: f"REPLACE({s}, 'a', 'zz')")
        | st.tuples(texts, st.integers(1, 4), st.integers(0, 3)).map(
            lambda p: f"SUBSTR({p[0]}, {p[1]}, {p[2]})"
        )
        | st.tuples(conditions, texts, texts).map(
            lambda p: f"CASE WHEN {p[0]} THEN {p[1]} ELSE {p[2]} END"
        )
    )
)
conditions = st.deferred(
    lambda: (
        st.sampled_from(["b", "NULL IS NULL", "b IS TRUE", "b IS NOT FALSE", "TRUE"])
        | st.tuples(numbers, st.sampled_from(["=", "<>", "<", "<=", ">", ">="]), numbers).map(
            lambda p: f"({' '.join(p)})"
        )
        | st.tuples(texts, st.sampled_from(["=", "<>"]), texts).map(lambda p: f"({' '.join(p)})")
        | st.tuples(
            texts, st.sampled_from(["LIKE", "NOT LIKE"]), st.sampled_from(["'a%'", "'_'", "'%b%'"])
        ).map(lambda p: f"({' '.join(p)})")
        | st.tuples(conditions, st.sampled_from(["AND", "OR"]), conditions).map(
            lambda p: f"({' '.join(p)})"
        )
        | conditions.map(lambda c: f"(NOT {c})")
        | st.tuples(numbers, st.sampled_from(["IN", "NOT IN"])).map(
            lambda p: f"({p[0]} {p[1]} (1, 2, NULL))"
        )
        | texts.map(lambda s: f"({s} IN ('a', 'ab'))")
        | st.tuples(numbers, numbers).map(lambda p: f"({p[0]} BETWEEN -3 AND {p[1]})")
        | st.one_of(numbers, texts, conditions).map(lambda x: f"({x} IS NULL)")
        | st.one_of(numbers, texts).map(lambda x: f"({x} IS NOT NULL)")
    )
)


ZERO = {"i": 0, "j": None, "f": None, "s": None, "u": None, "b": None, "d": None, "t": None}


@some_examples(150, of=3)
@given(rows, st.one_of(numbers, texts, conditions))
@example([ZERO], "(i / i)")
@example([ZERO], "(i % i)")
def test_random_expressions_agree_with_duckdb(items, text):
    """Arithmetic, text, logic with three values, CASE: on any table, as in another database."""
    table = table_of(items)

    assert plain(ours(text, table)) == plain(theirs(text, table))


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("DATE(t)", "t::DATE"),
        ("TO_DATE(t)", "t::DATE"),
        ("TIMESTAMP_SECONDS(i)", "make_timestamp(i * 1000000)"),
        ("TIMESTAMP_MILLIS(i * 100000000)", "make_timestamp(i * 100000000000)"),
        ("TIMESTAMP_MICROS(i)", "make_timestamp(i)"),
        ("EXTRACT(HOUR FROM t)", None),
        ("EXTRACT(DAY FROM t)", None),
        ("EXTRACT(MONTH FROM d)", None),
        ("EXTRACT(YEAR FROM t)", None),
        ("EXTRACT(QUARTER FROM t)", None),
        ("EXTRACT(DAYOFYEAR FROM t)", "EXTRACT(DOY FROM t)"),
        ("EXTRACT(DAYOFWEEK FROM t)", "EXTRACT(DOW FROM t) + 1"),
        ("EXTRACT(ISOWEEK FROM t)", "EXTRACT(WEEK FROM t)"),
        ("EXTRACT(MICROSECOND FROM t)", "EXTRACT(MICROSECOND FROM t) % 1000000"),
        ("DATE_TRUNC(t, HOUR)", "date_trunc('hour', t)"),
        ("DATE_TRUNC('day', t)", None),
        ("DATE_TRUNC(t, ISOWEEK)", "date_trunc('week', t)"),
        ("DATE_TRUNC(t, MONTH)", "date_trunc('month', t)"),
        ("DATE_TRUNC(d, QUARTER)", "date_trunc('quarter', d)::DATE"),
        ("t >= TIMESTAMP '2010-05-01 12:00:00'", None),
        ("d < DATE '2015-02-03'", None),
        ("CAST(s AS INT64)", "round(TRY_CAST(s AS DOUBLE))::BIGINT"),
        ("CAST(s AS FLOAT64)", "TRY_CAST(s AS DOUBLE)"),
        ("SAFE_CAST(i AS STRING)", "CAST(i AS VARCHAR)"),
        ("CAST(d AS STRING)", "CAST(d AS VARCHAR)"),
        ("CAST(b AS INT64)", "CAST(b AS BIGINT)"),
        ("s = 12", "TRY_CAST(s AS DOUBLE) = 12"),
        ("s > -8", "TRY_CAST(s AS DOUBLE) > -8"),
        ("s IN (12, 13)", "TRY_CAST(s AS DOUBLE) IN (12, 13)"),
        ("i % 7", None),
        ("MOD(i, j)", "i % NULLIF(j, 0)"),
        ("DIV(i, j)", "i // NULLIF(j, 0)"),
        ("ROUND(f)", None),
        ("ROUND(f / 3, 2)", None),
        ("SQRT(ABS(i))", None),
        ("SQRT(i)", "CASE WHEN i >= 0 THEN SQRT(i) END"),
        ("LN(f)", "CASE WHEN f > 0 THEN LN(f) END"),
        ("POW(i, 2)", None),
        ("SIGN(i)", None),
        ("GREATEST(i, j)", "CASE WHEN i IS NOT NULL AND j IS NOT NULL THEN GREATEST(i, j) END"),
        ("LEAST(i, f)", "CASE WHEN i IS NOT NULL AND f IS NOT NULL THEN LEAST(i, f) END"),
        ("IF(i > j, s, u)", None),
        ("CASE i WHEN 1 THEN 'one' WHEN 2 THEN 'two' END", None),
        ("SPLIT(s, '/')[OFFSET(1)]", "string_split(s, '/')[2]"),
        ("SPLIT(s, '/')[SAFE_ORDINAL(1)]", "string_split(s, '/')[1]"),
        ("REGEXP_CONTAINS(s, r'^[a-z]+')", "regexp_matches(s, '^[a-z]+')"),
        ("REGEXP_REPLACE(s, '[a-z]', '-')", "regexp_replace(s, '[a-z]', '-', 'g')"),
        ("REGEXP_EXTRACT(s, r'/([a-z])')",
         "CASE WHEN regexp_matches(s, '/([a-z])') THEN regexp_extract(s, '/([a-z])', 1) END"),
        ("STRPOS(s, 'b')", None),
        ("LEFT(s, 2)", None),
        ("RIGHT(s, 1)", None),
        ("STARTS_WITH(s, 'a')", None),
        ("ENDS_WITH(s, 'b')", None),
        ("CONCAT(s, '-', u)", "s || '-' || u"),
        ("s ILIKE 'A%'", None),
        ("SUBSTR(s, -2)", None),
    ],
)  # fmt: skip
@some_examples(8, of=2)
@given(items=rows)
def test_functions_agree_with_duckdb(text, other, items):
    """Dates, casts and text functions, on any table."""
    table = table_of(items)

    assert plain(ours(text, table)) == plain(theirs(other or text, table))


def test_local_time_is_the_querys():
    """Days, hours and truncation follow the query's time zone, whatever the column's own is."""
    table = pa.table({"t": pa.array([0, 1711846800000000], pa.timestamp("us", tz="UTC"))})

    assert ours("EXTRACT(HOUR FROM t)", table, "Europe/Rome") == [1, 3]
    assert ours("DATE(t)", table, "America/New_York") == [
        dt.date(1969, 12, 31),
        dt.date(2024, 3, 30),
    ]
    midnight = ours("DATE_TRUNC(t, DAY)", table, "Europe/Rome")
    assert [m.isoformat() for m in midnight] == [
        "1969-12-31T23:00:00+00:00",
        "2024-03-30T23:00:00+00:00",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("i * i", None),
        ("i + i", None),
        ("-i", None),
        ("ABS(i)", None),
        ("i / 0", None),
        ("i % 0", None),
        ("DIV(i, 0)", None),
        ("EXP(-i)", None),
        ("CAST(f AS INT64)", None),
        ("f * f", None),
        ("CAST(s AS INT64)", None),
        ("CAST(s AS TIMESTAMP)", None),
        ("s < 5", None),
        ("LOWER(bad)", None),
        ("TIMESTAMP_SECONDS(i)", None),
        ("TIMESTAMP_MICROS(i)", None),
        ("TIMESTAMP_MILLIS(f)", None),
        ("SPLIT(bad, '/')[OFFSET(3)]", None),
        ("CAST(t AS STRING)", None),
        ("EXTRACT(YEAR FROM t)", None),
        ("DATE_TRUNC(t, MONTH)", None),
        ("d", None),
        ("DATE_TRUNC(d, YEAR)", None),
        ("DATE_TRUNC(CAST('0001-01-01' AS DATE), WEEK)", None),
        ("DATE_TRUNC(CAST('0001-01-01' AS TIMESTAMP), WEEK)", None),
        ("EXTRACT(DAY FROM d)", None),
    ],
)
def test_what_cannot_be_computed_is_null(text, expected):
    """Overflow, division by zero, bad casts, broken text, times beyond the calendar."""
    text_bytes = pa.array([b"\xff\xfe"], pa.binary())
    table = pa.table(
        {
            "i": pa.array([-(2**63)], pa.int64()),
            "f": pa.array([1e300], pa.float64()),
            "s": pa.array(["30 February"], pa.string()),
            "bad": pa.Array.from_buffers(pa.string(), 1, text_bytes.buffers()),
            "t": pa.array([2**62], pa.timestamp("us")),
            "d": pa.array([2**31 - 1], pa.int32()).view(pa.date32()),
        }
    )

    assert ours(text, table) == [expected]


def test_one_bad_row_leaves_the_others_alone():
    """A row that cannot be computed is NULL; its neighbours are what they would be without it."""
    table = pa.table({"s": ["1", "x", "2.5", "", None, "1e999", "nan", "7"]})

    assert ours("s * 2", table) == [2.0, None, 5.0, None, None, None, None, 14.0]


def test_rows_that_break_a_kernel_are_found_by_halves():
    """Whatever Arrow raises for one row costs that row alone."""

    def fussy(columns):
        if "boom" in columns["s"].to_pylist():
            raise pa.ArrowInvalid("boom")
        return columns["s"]

    expression = Expression(text="fussy", columns=("s",), compute=fussy)
    table = pa.table({"s": ["a", "boom", "b", "c", "boom"]})

    assert expression.evaluate(table, "UTC").to_pylist() == ["a", None, "b", "c", None]


def test_types_do_not_depend_on_rows():
    """An empty table has the types of a full one: the engine fixes types before it reads."""
    full = table_of([{"i": 1, "f": 2.0, "s": "12", "t": dt.datetime(2020, 1, 1), "b": True}])
    for text in ("i + f", "s * 2", "SPLIT(s, '/')[OFFSET(1)]", "CASE WHEN b THEN i END", "NULL"):
        made = (("x", compiled(text)),)
        prepare = RowPreparation(
            columns=tuple(KINDS), passed=(), computed=made, where=None, zone="UTC"
        )
        assert prepare(full).schema == prepare(full.slice(0, 0)).schema


@pytest.mark.parametrize("text", ["b + d", "i = d", "CASE WHEN b THEN i ELSE d END", "LENGTH(x)"])
def test_kinds_that_cannot_meet_are_refused_before_the_first_row(text):
    """By their types alone, so that no row can cause it."""
    table = table_of([]).append_column("x", pa.array([], pa.list_(pa.int64())))

    with pytest.raises(InvalidInput):
        ours(text, table)


@pytest.mark.parametrize(
    "text",
    ["SQUARE(i)", "LOWER(i, i)", "REGEXP_CONTAINS(s, '(')", "SUBSTR(s, i)", "s LIKE u", "i & 1",
     "SPLIT(s, '')[OFFSET(0)]", "CAST(s AS JSON)", "EXTRACT(MOON FROM t)", "DATE_TRUNC(t, EON)",
     "SPLIT(s, '/')", "i IN (j)", "(s || u)[OFFSET(0)]", "CAST(s AS VARCHAR(3))", "i IS j",
     "i BETWEEN SYMMETRIC 1 AND 2", "s LIKE 'a' ESCAPE '!'", "ARRAY[1]", "LOWER(s AS x)"],
)  # fmt: skip
def test_what_is_not_understood_is_refused(text):
    """Nothing is guessed."""
    with pytest.raises(InvalidParameter):
        compiled(text)


def test_between_computes_its_value_once():
    """It may be a long expression, and is most of what a filter costs."""
    looked_up = []

    class Columns(dict):
        def __getitem__(self, name):
            looked_up.append(name)
            return super().__getitem__(name)

    between = compiled("i + 1 BETWEEN 2 AND 3")
    columns = Columns(i=pa.array([0, 1, 2, 3, None]))

    assert between.compute(columns).to_pylist() == [False, True, True, False, None]
    assert looked_up == ["i"]
