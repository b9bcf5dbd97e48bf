"""Queries made at random are refused in words, or have a finite sensitivity; never a traceback."""

import math
from dataclasses import fields

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.mechanisms import REGISTRY, find
from dpstream.query.noise_plan import NoisePlan
from dpstream.query.series_query import SeriesQuery
from dpstream.sql_compiler import compile_sql
from dpstream.sql_compiler.statement import PrivateSql
from tests.sql_compiler.test_accepted import ACCEPTED
from tests.sql_compiler.test_expressions import compiled
from tests.sql_compiler.test_refused import REFUSED
from tests.support.long import part_of


def tokens_of(query):
    return [query[token.start : token.end + 1] for token in PrivateSql().tokenize(query)]


GOOD, BAD = ([tokens_of(query) for query, _ in each] for each in (ACCEPTED, REFUSED))
WORDS = sorted({word for tokens in GOOD + BAD for word in tokens})


class Dice:
    """Choices from NumPy's generator, which takes lists of anything."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def random(self):
        return self.rng.random()

    def randrange(self, stop):
        return int(self.rng.integers(0, stop))

    def randint(self, low, high):
        return int(self.rng.integers(low, high + 1))

    def choice(self, items):
        return items[self.randrange(len(items))]

    def sample(self, items, count):
        return [items[at] for at in self.rng.permutation(len(items))[:count]]


def mutated(rng):
    """A known query with some tokens dropped, doubled, replaced, moved, or taken from another."""
    tokens = list(rng.choice(GOOD if rng.random() < 0.7 else BAD))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(tokens))
        kind = rng.randrange(5)
        if kind == 0 and len(tokens) > 1:
            del tokens[at]
        elif kind == 1:
            tokens.insert(at, tokens[at])
        elif kind == 2:
            tokens[at] = rng.choice(WORDS)
        elif kind == 3:
            other = rng.randrange(len(tokens))
            tokens[at], tokens[other] = tokens[other], tokens[at]
        else:
            donor = rng.choice(GOOD + BAD)
            start = rng.randrange(len(donor))
            tokens[at:at] = donor[start : start + rng.randint(1, 8)]
    return " ".join(tokens)


NAMES = [
    "page",
    "user_id",
    "seconds",
    "ts",
    "lang",
    "window_start",
    "n",
    "log",
    '"odd name"',
    "tag",
]
VALUES = ["1", "0", "-2.5", "'a'", "''", "NULL", "TRUE", "1e308", "9223372036854775807", "r'(x'"]
CALLS = ["LOWER", "COUNT", "SUM", "AVG", "SPLIT", "DATE", "RAND", "COALESCE", "SUBSTR", "MAX", "IF"]
ROW_CALLS = [
    "JSON_VALUE({0}, '$.a')", "JSON_QUERY({0}, '$[0]')", "JSON_VALUE({0})", "NET.HOST({0})",
    "PARSE_URL({0}, 'QUERY', 'x')", "FORMAT_DATE('%F', {0})", "FORMAT_TIMESTAMP('%H', {0}, 'UTC')",
    "PARSE_DATE('%F', {0})", "PARSE_TIMESTAMP('%d/%b/%Y %I%p %z', {0})", "UNIX_MILLIS({0})",
    "DATE_DIFF({0}, {1}, WEEK)", "TIMESTAMP_DIFF({0}, {1}, HOUR)", "DATEDIFF(YEAR, {0}, {1})",
    "DATE_ADD({0}, INTERVAL {1} MONTH)", "TIMESTAMP_SUB({0}, INTERVAL {1} HOUR)",
    "({0} + INTERVAL 3 DAY)", "RANGE_BUCKET({0}, [0, 5])", "WIDTH_BUCKET({0}, 0, 9, 3)",
    "REGEXP_LIKE({0}, 'a')", "SPLIT_PART({0}, ',', 2)", "LPAD({0}, 3, '*')", "YEAR({0})",
    "ARRAY_LENGTH({0})", "SPLIT({0}, ',')[OFFSET(1)]", "TO_CHAR({0}, 'YYYY')",
    "SAFE_DIVIDE({0}, 0)",
    "JSON_VALUE_ARRAY({0})[OFFSET(0)]", "{0}[OFFSET(0)]", "DATE_SUB({0}, INTERVAL 2 YEAR)",
]  # fmt: skip
FROMS = [
    "log", "log AS l", "(SELECT * FROM log)", "(SELECT user_id, page FROM log WHERE seconds > 1)",
    "TUMBLE(log, DESCRIPTOR(ts), INTERVAL '1' DAY)", "log, other", "(SELECT DISTINCT * FROM log)",
    "TUMBLE((SELECT *, ts AS at FROM log), DESCRIPTOR(at), INTERVAL '6' HOUR)", "SESSION(log, ts)",
    "log, UNNEST(tags) AS tag", "log LEFT JOIN UNNEST(SPLIT(page, '')) AS page WITH OFFSET AS n",
    "(SELECT * EXCEPT (n) FROM log), UNNEST(JSON_VALUE_ARRAY(page)) AS tag",
    "log, UNNEST(n) AS user_id",
    "(SELECT * REPLACE (page AS lang) FROM log, UNNEST(tags) AS page)",
]  # fmt: skip
BOUNDS = ", contribution_bounds_per_row => "


def expression(rng, depth=0):
    """Any expression, sense or nonsense."""
    kind = rng.randrange(3 if depth > 2 else 15)
    inner = [expression(rng, depth + 1) for _ in range(3)] if kind > 2 else []
    if kind < 2:
        return rng.choice(NAMES)
    if kind == 2:
        return rng.choice(VALUES)
    if kind > 11:
        return rng.choice(ROW_CALLS).format(*inner)
    forms = (
        "({0} {op} {1})", "{call}({0})", "{call}({0}, {1})", "CASE WHEN {0} THEN {1} ELSE {2} END",
        "({0} IN ({1}, {2}))", "CAST({0} AS {kind})", "({0} IS NULL)", "({0} BETWEEN {1} AND {2})",
        "(NOT {0})",
    )  # fmt: skip
    operators = ["+", "-", "*", "/", "%", "=", "<", "AND", "OR", "||", "LIKE", "<>", "&"]
    return forms[kind - 3].format(
        *inner,
        op=rng.choice(operators),
        call=rng.choice(CALLS),
        kind=rng.choice(["INT64", "STRING", "DATE", "JSON", "BOOL"]),
    )


def aggregate(rng):
    """An aggregate that may pass."""
    inside = rng.choice(NAMES) if rng.random() < 0.5 else expression(rng)
    lo, hi = rng.choice(VALUES), rng.choice(VALUES)
    return rng.choice(
        [
            "COUNT(*)", "COUNT(DISTINCT user_id)", f"COUNT({inside})", f"COUNTIF({inside})",
            f"SUM({inside}{BOUNDS}(0, 10))", f"AVG({inside}{BOUNDS}({lo}, {hi}))", f"SUM({inside})",
        ]
    )  # fmt: skip


SERIES = [
    "end = '2024-05-03'", "mechanism = 'spas'", "mechanism = 'blt'", "mechanism_options = (lo = 0)",
    "mechanism_options = (warm_up = 2, update = 'all')", "public_groups = ('a', 'b')", "w = page",
]  # fmt: skip


def figure(rng):
    """An aggregate, or arithmetic on some."""
    if rng.random() < 0.85:
        return aggregate(rng)
    forms = ["({0} + {1})", "{0} / {1}", "2 * {0} - 1", "IF({0} > {1}, {0}, {2})", "{0} * {2}"]
    return rng.choice(forms).format(aggregate(rng), aggregate(rng), rng.choice(VALUES))


def built(rng):
    """A query by the grammar, with parts that may not go together."""
    number = rng.choice(["1", "0.5", "3"] * 5 + ["0", "page", "1e400"])
    options = [f"epsilon = {number}", "delta = 1e-6", "privacy_unit_column = user_id"]
    options += ["max_groups_contributed = 3", *rng.sample(
        ["privacy_unit_period = INTERVAL '1' DAY", "max_rows_per_group = 4", "nonnegative = TRUE",
         "max_rows_contributed = 5", "start = '2024-05-01'", "end = '2024-05-03'",
         "public_groups = ('a', 'b')", "pre_threshold = 7", "time_zone = 'Europe/Rome'"],
        rng.randint(0, 4))]  # fmt: skip
    keys = [rng.choice(NAMES) if rng.random() < 0.6 else expression(rng) for _ in range(2)]
    keys = [f"{key} AS k{at}" for at, key in enumerate(keys[: rng.randint(0, 2)])]
    if rng.random() < 0.1:
        options = [option for option in options if "delta" not in option and "max_" not in option]
        options += ["privacy_unit = 'w_event'", "w = 4", "start = '2024-05-01'"]
        options += rng.sample(SERIES, rng.randint(0, 3))
    items = [*keys, *(f"{figure(rng)} AS a{at}" for at in range(rng.randint(1, 3)))]
    groups = [f"k{at}" for at in range(len(keys))]
    source = rng.choice(FROMS)
    if "TUMBLE" in source and rng.random() < 0.9:
        groups.append("window_start")
    text = f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS ({', '.join(options)}) {', '.join(items)}"
    text += f" FROM {source}"
    text += f" WHERE {expression(rng)}" if rng.random() < 0.5 else ""
    listed = "ALL" if rng.random() < 0.1 else ", ".join(groups)
    if len(keys) == 2 and rng.random() < 0.1:
        sets = ["ROLLUP (k0, k1)", "CUBE (k0, k1)", "GROUPING SETS ((k1), (k0, k1), ())"]
        listed = ", ".join([*groups[2:], rng.choice(sets)])
        items_of_set = [
            f"GROUPING({rng.choice(NAMES)}) AS g",
            "GROUPING_ID(k0, k1) AS g",
            "k1 AS g",
        ]
        text = text.replace(" FROM ", f", {rng.choice(items_of_set)} FROM ", 1)
    text += f" GROUP BY {listed}" if groups else ""
    text += f" HAVING {rng.choice(['a0 > 5', expression(rng)])}" if rng.random() < 0.2 else ""
    text += " ORDER BY a0 DESC LIMIT 3" if rng.random() < 0.2 else ""
    return text + (" EMIT EVERY INTERVAL '6' HOUR" if rng.random() < 0.2 else "")


PUBLISHED = ["k0", "k1", "a0", "a1", "a0_stddev", "window_start", "release_index", "kept_share"]
OVER_WINDOWS = ["LAG({0})", "LAG({0}, 2)", "LEAD({0})", "SUM({0})", "MAX({0})", "{0} - LAG(a0)"]
FRAMES = ["", "", " ROWS 3 PRECEDING", " ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW"]
CLAUSE = (
    "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 1, delta = 1e-6, privacy_unit_column = "
    "user_id, max_groups_contributed = 3, start = '2024-05-01', end = '2024-05-03'{more}) {items} "
)
INSIDE = [
    CLAUSE.format(more=more, items="page AS k0, lang AS k1, COUNT(*) AS a0, COUNT(n) AS a1")
    + f"FROM {kind}(log, DESCRIPTOR(ts), INTERVAL '1' HOUR{size}) GROUP BY k0, k1, window_end{end}"
    for kind, size, more, end in [
        ("TUMBLE", "", "", ""),
        ("TUMBLE", "", ", debias = 'global'", " HAVING a0 > 2"),
        ("HOP", ", INTERVAL '3' HOUR", ", confidence = 0.9", ""),
        ("CUMULATE", ", INTERVAL '1' DAY", ", public_groups = (('a', 'b'), ('c', 'd'))", ""),
    ]
] + [CLAUSE.format(more=", time_column = ts", items="COUNT(*) AS a0, AVG(n, contribution_bounds_per"
                   "_row => (0, 9)) AS a1") + "FROM log"]  # fmt: skip
GROUPINGS = ["k0", "k1", "1", "ALL", "ROLLUP (k0, k1)", "a0 > 3", "CUBE (k0)"]


def published(rng):
    """An expression of published columns, sense or nonsense."""
    name = rng.choice([*PUBLISHED, "a0", "a0"])
    forms = ["{0}", "{0}", "2 * {0}", "{0} - {1}", "{0} / {1}", "SUM({0})", "AVG({0})", "MAX({0})"]
    forms += ["COUNT(*)", "SUM({0}) OVER ()", "RANK() OVER (PARTITION BY {1} ORDER BY {0})"]
    parts = rng.choice(["PARTITION BY k0, k1"] * 6 + ["", "PARTITION BY {1}"])
    over = f"{rng.choice(OVER_WINDOWS)} OVER ({parts} ORDER BY window_start"
    forms += [f"{over}{rng.choice(FRAMES)})"] * 5
    return rng.choice(forms).format(name, rng.choice(PUBLISHED))


def wrapped(rng):
    """A private query inside of a SELECT, or with a column of several windows."""
    inside = rng.choice(INSIDE) if rng.random() < 0.95 else built(rng)
    items = [f"{published(rng)} AS x{at}" for at in range(rng.randint(1, 3))]
    if rng.random() < 0.3:
        return inside.replace(" FROM ", f", {items[0]} FROM ", 1)
    text = f"FROM ({inside})"
    if rng.random() < 0.2:
        text += f" PIVOT({rng.choice(['SUM(a0)', 'MAX(a0)', 'a0'])} FOR k0 IN ('a', 1, 'b' AS c))"
        items = rng.choice([["*"], items])
    if rng.random() < 0.2:
        items = ["*", *items]
    text = f"SELECT {', '.join(items)} {text}"
    text += f" WHERE {published(rng)} > 3" if rng.random() < 0.3 else ""
    text += f" GROUP BY {rng.choice(GROUPINGS)}" if rng.random() < 0.3 else ""
    text += f" QUALIFY {published(rng)} IS NOT NULL" if rng.random() < 0.1 else ""
    return text + (f" ORDER BY {published(rng)} LIMIT 2" if rng.random() < 0.3 else "")


def outcome(text, **options):
    """The query, or None if it was refused in words."""
    try:
        return compile_sql(text, **options).query
    except InvalidParameter as refused:
        return None if "fix: " in str(refused) else pytest.fail(f"{refused}: {text}")


@pytest.mark.parametrize(("make", "seed", "count"), [(mutated, 1, 15_000), (built, 2, 5_000)])
def test_queries_made_at_random_are_refused_or_bounded(make, seed, count):
    """20,000 in all, or a tenth of them, the same ones every time."""
    rng = Dice(seed)
    queries = [query for _ in range(part_of(count)) if (query := outcome(make(rng))) is not None]

    assert len(queries) > part_of(50)
    for query in queries:
        if isinstance(query, SeriesQuery):  # one row of a unit in each window, and a finite budget
            assert not hasattr(query, "bounds")
            assert 0 < query.terms().total < math.inf
            continue
        sizes = NoisePlan(query.starting(0)).sensitivities
        assert all(0 < float(size) < math.inf for size in sizes)


ODD = pa.table(
    {
        "page": ["/a", "", None, "12", "\x00é"],
        "user_id": ["ann", "bob", None, "", "ann"],
        "seconds": [1.5, -7.0, None, float("nan"), 1e308],
        "ts": pa.array([0, 10**15, None, 2**62, -(2**61)], pa.timestamp("us")),
        "lang": pa.array(["en", "it", None, "en", "it"]).dictionary_encode(),
        "n": [2**63 - 1, -(2**63), 0, None, 1],
        "log": [True, False, None, True, False],
        "odd name": pa.array([1, 2, None, 4, 5], pa.decimal128(20, 3)),
        "tag": ['["a", {"b": 1}]', "x,y", None, "[]", "https://h/?x=1"],
        "tags": pa.array([["a", None], [], None, ["b"], ["a", "a"]], pa.list_(pa.string())),
        "window_start": ["x", "y", None, "", "2024-01-01"],
    }
)


def test_random_queries_that_compile_also_compute():
    """What was compiled meets rows of any type without raising for a row, each row alone.

    The law of row independence: what becomes of rows together is what becomes of each alone, one
    after the other.
    """
    rng = Dice(3)
    table, done, finished = ODD, 0, 0
    for _ in range(part_of(3_000)):
        query = outcome(built(rng))
        if query is None:
            continue
        prepare, finish = query.prepare or (lambda rows: rows), query.finish or (lambda rows: rows)
        try:
            made = prepare(table)
            assert made.schema == prepare(table.slice(0, 0)).schema
            alone = [prepare(table.slice(at, 1)) for at in range(len(table))]
            assert comparable(pa.concat_tables(alone)).equals(comparable(made))
            release = release_of(query, made.slice(0, 5))
            assert finish(release).schema == finish(release.slice(0, 0)).schema
            done += 1
            finished += query.finish is not None
        except InvalidInput:  # kinds that cannot meet: the same without any row
            with pytest.raises(InvalidInput):
                finish(release_of(query, prepare(table.slice(0, 0))))
    assert done > part_of(40)
    assert finished > part_of(16)


def test_random_selects_around_queries_compute():
    """Whatever is published, in several windows: the columns that were told, and no traceback."""
    rng, done, back = Dice(6), 0, 0
    rows = ODD.append_column("k0", ODD["page"]).append_column("k1", ODD["lang"].cast(pa.string()))
    for _ in range(part_of(2_500)):
        query = outcome(wrapped(rng))
        if query is None or query.finish is None or not {*query.keys} <= {"k0", "k1"}:
            continue
        release, earlier = release_of(query, rows), {}
        try:
            schema = query.finish(release.slice(0, 0)).schema
        except InvalidInput:  # kinds that cannot meet
            continue
        for window, order in enumerate(([0, 1, 2, 3, 4], [4, 2], [], [1, 0, 3])):
            table = release.take(pa.array(order, pa.int64()))
            look_back = getattr(query.finish, "look_back", None)
            made = look_back(table, window, earlier) if look_back else query.finish(table)
            assert made.schema == schema
        done += 1
        back += bool(earlier)
    assert done > part_of(250)
    assert back > part_of(40)


def test_expressions_made_at_random_look_at_one_row():
    """The same law for expressions, of which more compile, in another order."""
    rng, done = Dice(4), 0
    order = pa.array([3, 0, 4, 2, 1])
    for _ in range(part_of(20_000, of=100)):
        try:
            made = compiled(expression(rng, depth=1))
            schema = made.evaluate(ODD.slice(0, 0), "UTC").type
        except (InvalidParameter, InvalidInput):
            continue
        value = made.evaluate(ODD, "UTC")
        other = made.evaluate(ODD.take(order), "UTC")
        assert comparable(pa.table({"x": other})).equals(
            comparable(pa.table({"x": value.take(order)}))
        )
        assert value.type == schema
        done += 1
    assert done > part_of(5_000, of=100)


def comparable(table):
    """The same table, in which a NaN is equal to another."""
    columns = {}
    for name in table.column_names:
        column = table[name]
        if pa.types.is_dictionary(column.type):
            column = column.cast(pa.string())
        if pa.types.is_floating(column.type):
            column = pc.if_else(pc.is_nan(column), -0.125, column)
        columns[name] = column
    return pa.table(columns)


def release_of(query, rows):
    """A release with the keys of these rows, and odd figures."""
    odd = pa.array([1.0, -2.5, None, float("nan"), 1e308][: len(rows)], pa.float64())
    names = [name for name in query.answer_columns if name != "held"]
    times = pa.array([0] * len(rows), pa.timestamp("us", tz="UTC"))
    columns = {name: rows[name] for name in query.keys} | dict.fromkeys(names, odd)
    if getattr(query, "grouping_sets", ()):
        columns["grouping_id"] = pa.array(query.grouping_ids[[0] * len(rows)])
        columns["not_shown"] = pa.array([True] * len(rows), pa.bool_())
    columns |= dict.fromkeys(("window_start", "window_end", "trigger_time"), times)
    return pa.table(columns | {"held": pa.array([True] * len(rows), pa.bool_()),
                               "release_index": pa.array([1] * len(rows), pa.int64())})  # fmt: skip


@pytest.mark.parametrize("mechanism", sorted(REGISTRY))
def test_odd_parameters_of_mechanisms_are_refused_in_words(mechanism):
    """Whatever stands in mechanism_options: a query, or a refusal."""
    unit = "privacy_unit = 'event', delta = 1e-6"
    names = [field.name for field in fields(find(mechanism)) if field.init]
    if "window" in names:
        unit = "privacy_unit = 'w_event', w = 3"
    text = f"""SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 1, {unit}, start = '2024-05-01',
        mechanism = '{mechanism}', privacy_unit_column = u, end = '2024-05-02') window_start,
        COUNT(*) AS n FROM TUMBLE(l, DESCRIPTOR(t), INTERVAL '1' HOUR) GROUP BY window_start"""
    for name in [*names, "other"]:
        for value in (0, -1, 2.5, "x", "", None, True, 10**30, math.nan, math.inf):
            query = outcome(text, mechanism_options={name: value})
            assert query is None or 0 < query.terms().total < math.inf
