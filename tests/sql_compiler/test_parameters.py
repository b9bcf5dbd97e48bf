"""@name, :name and ? stand for values, never for names."""

import datetime as dt
from decimal import Decimal
from fractions import Fraction

import pytest

import dpstream as dps
from dpstream.errors import InvalidParameter
from tests.sql_compiler.test_refused import PRIVATE, under_carets

TEXT = f"SELECT {PRIVATE} page, COUNT(*) AS n FROM log WHERE {{}} GROUP BY page"


def facts(where, params=None):
    return dps.sql(TEXT.format(where), params=params).facts()


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("5", 5), ("-2.5", -2.5), ("1e-09", 1e-9), ("'x'", "x"), ("'it''s'", "it's"),
        ("TRUE", True), ("NULL", None), ("DATE '2024-05-01'", dt.date(2024, 5, 1)),
        ("0.5", Fraction(1, 2)),
        ("TIMESTAMP '2024-05-01T10:00:00'", dt.datetime(2024, 5, 1, 10)), ("1.50", Decimal("1.50")),
    ],
)  # fmt: skip
def test_a_parameter_is_what_would_be_written(written, value):
    """The same query, in plan, facts and identity; another value is another query."""
    plain = facts(f"page = {written}")

    assert facts("page = @x", {"x": value}) == plain
    assert facts("page = :x", {"x": value}) == plain
    assert facts("page = ?", [value]) == plain
    assert facts("page = @x", {"x": "other"}) != plain


def test_places_count_in_the_order_of_the_text():
    """Wherever they stand: in SELECT, WHERE, HAVING, LIMIT."""
    text = f"SELECT {PRIVATE} page, COUNT(*) + ? AS n FROM log WHERE a > ? AND b < ? "
    text += "GROUP BY page {}"
    query = dps.sql(text.format("HAVING n > ? LIMIT ?"), params=[1, 2, 3, 4, 5])

    wanted = text.replace("?", "{}").format(1, 2, 3, "HAVING n > 4 LIMIT 5")
    assert query.facts() == dps.sql(wanted).facts()


def test_options_and_lists_take_parameters():
    """A budget, public groups, an interval, IN UNNEST(...)."""
    query = dps.sql(
        """SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = @e, delta = @d, public_groups = @g,
        privacy_unit_column = u, max_groups_contributed = @k, start = @s, end = '2024-05-03')
        page, window_start, COUNT(*) AS n FROM TUMBLE(log, DESCRIPTOR(ts), INTERVAL @h HOUR)
        WHERE lang IN UNNEST(@l) GROUP BY page, window_start""",
        params={"e": 0.5, "d": 1e-9, "g": ["a", "b"], "k": 2, "h": 6, "l": ["de", "fr"],
                "s": dt.date(2024, 5, 1)},
    )  # fmt: skip

    assert (query.epsilon, query.public_groups) == (0.5, (("a",), ("b",)))
    assert query.window == dps.Tumble("6 hours")
    assert query.prepare.where.text == "lang IN ('de', 'fr')"
    assert "lang IN ('de', 'fr')" in dps.explain(query).text()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("page, COUNT(*) AS n FROM @x GROUP BY page", "where a name is wanted"),
        ("page, COUNT(*) AS n FROM log GROUP BY @x", "where a name is wanted"),
        ("page, COUNT(*) AS n FROM log GROUP BY page ORDER BY @x", "where a name is wanted"),
        ("COUNT(*) AS @x FROM log", "where a name is wanted"),
        ("@x AS page, COUNT(*) AS n FROM log GROUP BY page", "a constant is no key"),
        ("COUNT(*) AS n FROM log WHERE log.@x = 1", "is no column"),
        ("COUNT(DISTINCT @x) AS n FROM log", "has one value"),
    ],
)
def test_a_parameter_is_no_name(text, reason):
    """Of a table, a column, or the number of one."""
    with pytest.raises(InvalidParameter, match=reason):
        dps.sql(f"SELECT {PRIVATE} {text}", params={"x": "user_id"})
    text = "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 1, privacy_unit_column = @x)"
    with pytest.raises(InvalidParameter, match="a column's name"):
        dps.sql(f"{text} COUNT(*) AS n FROM log", params={"x": "user_id"})


def test_missing_strange_and_odd_parameters_are_refused():
    """With what to give."""
    with pytest.raises(InvalidParameter, match=r"--param x=VALUE") as refused:
        facts("page = @x", {})
    assert under_carets(str(refused.value)) == "@"
    with pytest.raises(InvalidParameter, match="has no parameter 'y'"):
        facts("page = @x", {"x": 1, "y": 2})
    with pytest.raises(InvalidParameter, match="params must be names and values"):
        facts("page = @x", "x")
    for odd in (object(), float("nan"), {"a": 1}, b"x"):
        with pytest.raises(InvalidParameter, match="parameter 'x'"):
            facts("page = @x", {"x": odd})


def test_text_in_a_parameter_stays_text():
    """Quotes and SQL in it are part of the value."""
    odd = "' OR 1 = 1 --"

    assert odd.replace("'", "''") in facts("page = @x", {"x": odd})["prepare"]
