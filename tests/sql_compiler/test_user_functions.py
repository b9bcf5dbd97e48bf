"""Functions in Python: what a row becomes depends on that row, or the run is refused."""

from itertools import count

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import dpstream as dps
from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.session.pipeline import load_pipeline
from tests.sql_compiler.test_refused import PRIVATE

ROWS = pa.table(
    {
        "user_id": list(range(400)),
        "s": ["ab", "b", None, ""] * 100,
        "x": [1.0, 2.0, None, 5.0] * 100,
    }
)
CALLS = count()


def first_letter(s):
    """A function of this module, for other processes."""
    return pc.utf8_slice_codeunits(s, 0, 1)


def share(x):
    return pc.divide(x, pc.sum(x).as_py() or 1.0)


def last_of_batch(s):
    return pa.array([None, *s.to_pylist()[:-1]]) if len(s) else s


def how_many(s):
    return pa.repeat(pa.scalar(len(s)), len(s))


def how_often(s):
    return pa.array([next(CALLS)] * len(s), pa.int64())


def inverse(s):
    return pa.array([1 // len(text or "") for text in s.to_pylist()], pa.int64())


def query(call, **functions):
    return dps.sql(
        f"SELECT {PRIVATE} {call} AS k, COUNT(*) AS n FROM log GROUP BY k", functions=functions
    )


def keys(asked, rows=ROWS):
    return sorted(map(str, set(asked.prepare(rows)["k"].to_pylist())))


def test_a_function_is_called_on_columns():
    """Arrow columns in, one value of each row out; constants are columns, too."""
    assert keys(query("first(s)", first=first_letter)) == ["", "None", "a", "b"]
    assert keys(query("UPPER(First('q'))", first=first_letter)) == ["Q"]
    assert keys(query("add(x, 1)", add=pc.add)) == ["2.0", "3.0", "6.0", "None"]
    lists = {"words": lambda s: [text and text[::-1] for text in s.to_pylist()]}
    assert keys(query("words(s)", **lists)) == ["", "None", "b", "ba"]


@pytest.mark.parametrize("function", [share, last_of_batch, how_many, how_often])
def test_a_function_that_looks_at_other_rows_is_refused(function):
    """Totals, neighbours, sizes and counters; before a release, and without a value of the data."""
    asked = query("f(x)" if function is share else "f(s)", f=function)
    with pytest.raises(InvalidInput, match="must depend on that row alone"):
        dps.run(asked, source=ROWS, ledger=dps.Ledger()).collect()


def test_a_row_that_a_function_cannot_take_is_null():
    """And no other row."""
    assert query("f(s)", f=inverse).prepare(ROWS.slice(0, 5))["k"].to_pylist() == [
        0,
        1,
        None,
        None,
        0,
    ]


def test_results_that_are_no_column_are_refused():
    """Another number of results, lists, an error for no rows at all."""
    wrong = {
        "results for": lambda s: s[:1],
        "gave lists": lambda s: pa.array([["a"]] * len(s), pa.list_(pa.string())),
        "an Arrow array": lambda s: 5,
        "cannot be computed": lambda s: s.no_such_method(),
    }
    for reason, function in wrong.items():
        with pytest.raises(InvalidInput, match=reason):
            query("f(s)", f=function).prepare(ROWS)


def test_which_code_it_is_belongs_to_the_query():
    """Two functions of one name are two queries; the name alone tells nothing."""
    one, other = (query("f(s)", f=each) for each in (first_letter, inverse))

    assert one.facts() != other.facts()
    assert one.prepare.text.endswith(
        "USING F = tests.sql_compiler.test_user_functions:first_letter"
    )


@pytest.mark.parametrize(
    ("functions", "reason"),
    [
        ({"lower": first_letter}, "is there already"),
        ({"count": first_letter}, "is there already"),
        ({"two words": first_letter}, "no name of a function"),
        ({"f": 5}, "must be a function"),
        ({"f": "math"}, "module:function"),
        ({"f": "math:no_such"}, "has no function"),
        ({"f": "no_such_module_here:f"}, "cannot be imported"),
    ],
)
def test_functions_that_cannot_be_had_are_refused(functions, reason):
    """With what to give."""
    with pytest.raises(InvalidParameter, match=reason):
        dps.sql(f"SELECT {PRIVATE} COUNT(*) AS n FROM log", functions=functions)


def test_the_wrong_number_of_columns_and_the_unit_are_refused():
    """Where the call stands."""
    with pytest.raises(InvalidParameter, match="does not take 2 columns"):
        query("f(s, x)", f=first_letter)
    with pytest.raises(InvalidParameter, match="made of the privacy unit"):
        query("f(user_id)", f=first_letter)


PIPELINE = """
[source]
path = "log.csv"
[budget]
dataset = "log"
epsilon = 9
delta = 1e-6
[state]
path = "state"
[functions]
region = "regions_beside_the_pipeline:region"
[[query]]
name = "regions"
params = { least = 2, only = ["a", "b"] }
sql = '''SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 1, delta = 1e-9,
privacy_unit_column = user_id, max_groups_contributed = 4) region(s) AS k, COUNT(*) AS n
FROM log WHERE x >= @least AND s IN UNNEST(@only) GROUP BY k'''
"""


def test_a_pipeline_file_names_functions_and_parameters(tmp_path):
    """Modules beside the file are found."""
    module = "def region(s):\n    import pyarrow.compute as pc\n    return pc.utf8_upper(s)\n"
    (tmp_path / "regions_beside_the_pipeline.py").write_text(module)
    (tmp_path / "pipeline.toml").write_text(PIPELINE)

    (asked,) = load_pipeline(tmp_path / "pipeline.toml").queries
    assert "x >= 2 AND s IN ('a', 'b')" in asked.prepare.text
    assert keys(asked, pa.table({"user_id": ["u"], "s": ["b"], "x": [3]})) == ["B"]
    (tmp_path / "pipeline.toml").write_text(PIPELINE.replace('"regions_beside', "5 #"))
    with pytest.raises(ValueError, match="must be text"):
        load_pipeline(tmp_path / "pipeline.toml")
