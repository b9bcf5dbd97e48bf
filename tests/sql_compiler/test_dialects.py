"""Queries of other systems run unchanged, or are refused with the line to write."""

import datetime as dt
import json

import pyarrow as pa
import pytest

import dpstream as dps
from dpstream.errors import InvalidParameter
from dpstream.sql_compiler import compile_sql
from tests.sql_compiler.test_refused import cases

BESIDE = {"epsilon": 1, "delta": 1e-9, "privacy_unit_column": "user_id"}
BESIDE |= {"max_groups_contributed": 4}
WINDOWS = {"start": "2024-05-01", "end": "2024-05-02"}
SETS = {
    "bigquery.sql": (60, {}),
    "snowflake.sql": (30, BESIDE),
    "flink.sql": (20, BESIDE | WINDOWS),
}
QUERIES = [
    pytest.param(query, facts, options, id=f"{name[:2]}{number}")
    for name, (_, options) in SETS.items()
    for number, (query, facts) in enumerate(cases(name))
]
ROWS = pa.table(
    {
        "user_id": ["ann", "bob", "cat"],
        "page": ["/a", None, "shop"],
        "lang": ["de", "fr", None],
        "seconds": [5.0, None, 700.0],
        "ts": pa.array([dt.datetime(2024, 5, 1, hour) for hour in (0, 7, 23)]),
        "text_day": ["20240501", "01/May/2024:10:00:00 +0200", "x"],
        "tags": pa.array([["a", "b"], None, []], pa.list_(pa.string())),
        "words": ["a b", None, ""],
        "payload": ['{"device": {"os": "x"}, "items": [{"sku": 1}]}', None, "{"],
        "url": ["https://h/products/12?a=b", None, "nothing at all"],
    }
)

PUBLIC = {
    "catalogue": pa.table({"page": ["/a", "/b"], "price": [9, 2]}),
    "targets": pa.table({"seconds": [30, 60]}),
}


@pytest.mark.parametrize(("query", "facts", "options"), QUERIES)
def test_a_query_of_another_system_runs_or_says_what_to_write(query, facts, options):
    """One without a fix compiles, and computes what it wants of rows."""
    params = json.loads(facts.get("params", "null"))
    if "fix" not in facts:
        made = dps.with_tables(compile_sql(query, params=params, **options).query, public=PUBLIC)
        rows = ROWS if made.prepare is None else made.prepare(ROWS)
        assert set(made.columns) <= set(rows.column_names)
        return
    with pytest.raises(InvalidParameter) as refused:
        compile_sql(query, params=params, **options)

    assert facts["fix"] in str(refused.value).partition("\nfix: ")[2]


@pytest.mark.parametrize("name", SETS)
def test_there_are_as_many_as_promised(name):
    """Of each system so many, and some of both kinds."""
    least, found = SETS[name][0], [facts for _, facts in cases(name)]

    assert len(found) >= least
    assert least / 5 < sum("fix" in facts for facts in found) < least / 2 + 5
