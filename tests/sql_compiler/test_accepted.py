"""SQL compiles to the query it stands for."""

import json
from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest

import dpstream as dps
from dpstream.query.query import Query
from dpstream.query.row_spec import RowSpec
from dpstream.query.series_query import SeriesQuery
from dpstream.sql_compiler import compile_sql
from dpstream.sql_compiler.compile_sql import Compiled
from dpstream.sql_compiler.privacy_clause import OPTIONS
from tests.sql_compiler.test_refused import FIXTURES, PRIVATE, cases

ACCEPTED = list(cases("accepted.sql"))
ROOT = Path(__file__).resolve().parents[2]
EXPECTED = Path(FIXTURES / "accepted.txt")


def described(compiled: Compiled) -> str:
    """Table and every parameter that differs from its default."""
    plain = Query(privacy_unit_column="u", epsilon=1, delta=0.1, max_groups_contributed=1)
    lines = [f"table = {compiled.table}"]
    query = compiled.query
    if isinstance(query, SeriesQuery):
        lines.append(f"mechanism = {query.mechanism!r}")
        lines.append(f"count = {query.count!r}")
    for each in fields(RowSpec if isinstance(query, SeriesQuery) else Query):
        value = getattr(query, each.name)
        required = each.default is MISSING
        if required or repr(value) != repr(getattr(plain, each.name)):
            shown = str(value) if hasattr(value, "numerator") else repr(value)
            lines.append(f"{each.name} = {shown}")
    return "\n".join(lines)


def compiled(query, facts):
    return compile_sql(query, **json.loads(facts.get("options", "{}")))


def test_accepted_queries_are_what_they_were():
    """Each fixture's query, in the order of the file; accepted.txt holds what was reviewed."""
    found = "\n\n".join(described(compiled(query, facts)) for query, facts in ACCEPTED)

    assert found.strip() == EXPECTED.read_text().strip()


def test_plain_sql_is_the_query_that_python_writes():
    """Nothing is added where SQL says no more than Python would."""
    query = ACCEPTED[0][0]
    python = dps.Query(
        privacy_unit_column="user_id",
        keys=["url"],
        aggregates=[
            dps.Count("clicks"),
            dps.Sum("seconds", column="seconds", contribution_bounds_per_row=(0, 600)),
        ],
        epsilon=6,
        delta=1e-9,
        time_column="ts",
        window=dps.Tumble("1 day"),
        every="15 minutes",
        privacy_unit_period="1 day",
        max_groups_contributed=32,
    )

    assert replace(dps.sql(query), finish=None) == python
    plain = query.replace("url, window_start, C", "window_start, window_end, url, C")
    assert dps.sql(plain) == python
    assert dps.sql(query, name="clicks").name == "clicks"


def test_options_of_the_call_go_before_those_of_the_text():
    """Ranges and budgets may be given when the query is made."""
    query = ACCEPTED[0][0]

    assert dps.sql(query, epsilon=1, start="2024-05-01", end="2024-05-02").epsilon == 1
    assert dps.sql(query, min_privacy_units_per_group=6).pre_threshold == 5
    with pytest.raises(ValueError, match="there is no option epsilom"):
        dps.sql(query, epsilom=1)
    assert dps.sql(query, strategy="sqlp").strategy == "sqlp"
    with pytest.raises(ValueError, match="strategy cannot be 'best'"):
        dps.sql(query, strategy="best")


def test_options_of_mechanisms_come_from_python_and_the_command_line():
    """As dicts, or as the texts that --set gives."""
    text = next(query for query, _ in ACCEPTED if "'naive'" in query)
    python = dps.sql(text, mechanism_options={"lo": 0, "hi": 1000})
    command = dps.sql(text, mechanism_options=("lo=0", "hi=1000"))

    assert python == command
    assert python.mechanism.hi == 1000
    for wrong in (5, ("lo",), {"low": 0}):
        with pytest.raises(ValueError, match="fix: "):
            dps.sql(text, mechanism_options=wrong)
    for option in ("mechanism", "privacy_unit"):
        with pytest.raises(ValueError, match=f"{option} cannot be 5"):
            dps.sql(text, **{option: 5})


def test_comments_spaces_and_case_of_words_change_nothing():
    """What fixes the releases is what the query does, not how it is laid out."""
    one = "SELECT {} LOWER( page ) AS p, COUNT(*) AS n FROM log WHERE a=1 GROUP BY p"
    two = "select {}\n  lower(page) as p, -- key\n  count(*) AS n\nfrom log where a = 1 group by 1"

    facts = [compile_sql(text.format(PRIVATE)).query.facts() for text in (one, two)]
    assert facts[0] == facts[1]


def test_an_option_is_called_as_the_parameter_of_a_query():
    """One word for one thing; the docs have a table of those that differ."""
    names = {each.name for each in fields(Query)}
    others = {"privacy_unit", "w", "mechanism", "mechanism_options", "min_privacy_units_per_group"}
    table = (ROOT / "docs" / "sql.md").read_text("utf-8").partition("## The same words")[2]

    assert set(OPTIONS) - names == others
    for word in others | (names - set(OPTIONS) - {"name", "aggregates"}):
        assert f"`{word}" in table, word
