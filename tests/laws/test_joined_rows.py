"""A unit's joined rows depend on that unit's rows and on public tables alone.

With a registry: on that unit's rows of the stream and of the registry. That is all that the
contribution bounds rest on (docs/soundness/joins.md).
"""

from collections import Counter
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dpstream as dps
from dpstream.sql_compiler import sql

OPTIONS = (
    "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 1, delta = 1e-9, "
    "privacy_unit_column = user, max_groups_contributed = 2) "
)
PUBLIC = [
    "c, COUNT(*) AS n FROM s JOIN t USING (k) GROUP BY c",
    "c, COUNT(*) AS n FROM s LEFT JOIN t ON s.k = t.k AND s.v = t.w GROUP BY c",
    (
        "u.c AS d, COUNT(*) AS n FROM s JOIN t USING (k) LEFT JOIN t AS u ON LOWER(t.c) = u.k "
        "WHERE s.v > 0 GROUP BY d"
    ),
    "c, COUNT(*) AS n FROM (SELECT user, UPPER(t.c) AS c FROM s JOIN t USING (k)) GROUP BY c",
    (
        "k NOT IN (SELECT c FROM t WHERE w > 0) AS c, v > (SELECT AVG(w) FROM t) AS d, "
        "COUNT(*) AS n FROM s LEFT JOIN t USING (k) WHERE user IN (SELECT k FROM t) IS NOT NULL "
        "GROUP BY c, d"
    ),
]
OWN = "c, COUNT(*) AS n FROM s JOIN r USING (user) GROUP BY c"
cells = st.sampled_from(["a", "b", "5", "5.0", "05", None])
users = st.sampled_from(["1", "2", "2.0", "02", "x"])
streams = st.lists(st.tuples(users, cells, st.integers(0, 2)), max_size=12)
tables = st.lists(st.tuples(cells, cells, st.integers(0, 2)), min_size=1, max_size=8)
registries = st.lists(st.tuples(users, cells), min_size=1, max_size=8)


@cache
def query_of(text):
    return sql(OPTIONS + text)


def table(rows, **columns):
    listed = [*zip(*rows, strict=True)] or [()] * len(columns)
    return pa.table({n: pa.array(c, k) for (n, k), c in zip(columns.items(), listed, strict=True)})


def stream(rows):
    return table(rows, user=pa.string(), k=pa.string(), v=pa.int64())


def unit(name):
    """As the engine tells units apart: 2 and 2.0 are one, 02 is another."""
    return {"2.0": "2"}.get(name, name)


def joined(query, rows):
    """The joined rows of each unit, in any order."""
    prepared = query.prepare(stream(rows).select(query.source_columns))
    found = {}
    for row in prepared.to_pylist():
        found.setdefault(unit(row["user"]), Counter())[tuple(map(str, row.values()))] += 1
    return found


@pytest.mark.parametrize("text", PUBLIC)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(streams, tables)
def test_rows_of_a_unit_meet_public_rows_alone(text, rows, public):
    """Without every other unit, a unit has the same joined rows."""
    public = table(public, k=pa.string(), c=pa.string(), w=pa.int64())
    query = dps.with_tables(query_of(text), public={"t": public})
    together = joined(query, rows)

    for name in {unit(user) for user, *_ in rows}:
        alone = joined(query, [row for row in rows if unit(row[0]) == name])
        assert alone.get(name) == together.get(name)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(streams, registries)
def test_rows_of_a_unit_meet_its_own_rows_of_a_registry_alone(rows, registry):
    """Without every other unit, in the stream and in the registry, a unit has the same rows."""

    def with_rows(kept):
        own = table(kept, user=pa.string(), c=pa.string())
        return dps.with_tables(query_of(OWN), registry={"r": own})

    together = joined(with_rows(registry), rows)

    for name in {unit(user) for user, *_ in rows}:
        mine = [row for row in registry if unit(row[0]) == name]
        alone = joined(with_rows(mine or [(None, None)]), [r for r in rows if unit(r[0]) == name])
        assert alone.get(name) == together.get(name)


def test_a_join_by_value_would_let_a_unit_meet_the_rows_of_another():
    """The control: as a public table of numbers, "02" meets the row of 2; as a registry it does
    not.
    """
    whole = pa.table({"user": [2], "c": ["secret of 2"]})
    rows = [("02", None, 0)]
    by_value = dps.with_tables(sql(OPTIONS + OWN), public={"r": whole})
    by_unit = dps.with_tables(sql(OPTIONS + OWN), registry={"r": whole})

    assert joined(by_value, rows)
    assert not joined(by_unit, rows)


def test_a_registry_is_joined_on_the_unit_alone():
    """On another column rows of one unit would meet another's."""
    text = OPTIONS + "c, COUNT(*) AS n FROM s JOIN r ON s.k = r.user GROUP BY c"
    own = pa.table({"user": ["1"], "c": ["x"]})

    with pytest.raises(dps.errors.InvalidParameter, match="not joined on the privacy unit"):
        dps.with_tables(sql(text), registry={"r": own})


def test_units_of_every_type_meet_the_same_rows():
    """Numbers, text and dictionaries of text name the same units."""
    own = pa.table({"user": [1, 2, 2], "c": ["x", "y", "z"]})
    query = dps.with_tables(sql(OPTIONS + OWN), registry={"r": own})
    kinds = (pa.int32(), pa.string(), pa.float64(), pa.dictionary(pa.int8(), pa.string()))

    for kind in kinds:
        column = pa.array(np.array([2, 3]))
        column = pc.cast(column, pa.string() if pa.types.is_dictionary(kind) else kind)
        source = pa.table({"user": column.cast(kind) if column.type != kind else column})
        assert sorted(query.prepare(source)["c"].to_pylist()) == ["y", "z"]
