"""A query as a value: what it derives, and what it refuses before anything is read."""

import ast
import inspect
from dataclasses import fields, replace

import numpy as np
import pytest

import dpstream as dps
from dpstream.errors import InvalidParameter
from dpstream.query.aggregates import Avg, Count, Sum
from dpstream.query.noise_plan import plan_query
from dpstream.query.query import Bounds, Query
from dpstream.query.windows import DAY, SECOND, Cumulate, Hop, Tumble, instant, iso

DATED = {"time_column": "ts", "start": "2024-05-01", "end": "2024-05-03"}


def query_of(**facts):
    common = {"privacy_unit_column": "user", "keys": ("key",), "epsilon": 1, "delta": 1e-6}
    return Query(**common | {"max_groups_contributed": 4} | facts)


@pytest.mark.parametrize(
    ("facts", "bounds"),
    [
        ({}, (4, 4, 1)),
        ({"max_rows_per_group": 3}, (12, 4, 3)),
        ({"max_rows_per_group": 3, "max_rows_contributed": 5}, (5, 4, 3)),
        ({"max_rows_per_group": 3, "max_rows_contributed": 2}, (2, 2, 2)),
        ({"max_rows_contributed": 100}, (4, 4, 1)),
    ],
)
def test_bounds_fit_each_other(facts, bounds):
    """No more groups than rows, no more rows than the groups hold: no noise is wasted."""
    rows, groups, per_group = bounds
    expected = Bounds(rows=rows, groups=groups, rows_per_group=per_group)
    assert query_of(**facts).bounds == expected
    assert query_of(**facts).one_row == (per_group == 1)


@pytest.mark.parametrize(
    "facts",
    [
        {"epsilon": 0},
        {"epsilon": -1},
        {"delta": 0},
        {"delta": 1},
        {"selection_share": 1},
        {"max_groups_contributed": 0},
        {"max_rows_per_group": 0},
        {"max_rows_contributed": 0},
        {"pre_threshold": -1},
        {"min_change": 0},
        {"aggregates": (), "public_groups": ["a"]},
        {"aggregates": (), "keys": ()},
        {"aggregates": ("count",)},
        {"aggregates": (Count("n"), Sum("n", column="x", contribution_bounds_per_row=(0, 1)))},
        {"aggregates": (Count("key"),)},
        {"aggregates": (Count("n"), Count("n_stddev"))},
        {"aggregates": (Count("release_index"),)},
        {"keys": ("key", "key")},
        {"keys": ("user",)},
        {"name": ""},
        {"name": "x" * 61},
        {**DATED, "window": "1 day"},
        {"time_zone": "Nowhere"},
        {"every": "1 hour"},
        {"window": Tumble("1 day")},
        {"privacy_unit_period": "1 day"},
        {"time_column": "ts"},
        {"time_column": "ts", "start": "2024-05-01"},
        {**DATED, "end": "2024-04-01"},
        {**DATED, "every": "1 hour", "triggers": ["2024-05-03"]},
        {**DATED, "triggers": ["2024-05-02"]},
        {**DATED, "time_unit": "fortnight"},
        {**DATED, "allowed_lateness": "-1 hour"},
        {"public_groups": []},
        {"public_groups": [("a", "b")]},
        {"public_groups": ["a", "a"]},
        {"public_groups": [1, "1"]},
        {"keys": (), "public_groups": ["a"]},
    ],
)
def test_queries_that_make_no_sense_are_refused(facts):
    """When they are written, not when they have run for a day."""
    with pytest.raises(InvalidParameter):
        query_of(**facts)


def test_one_key_column_may_be_named_alone():
    """And its public values need no tuples."""
    query = query_of(keys="key", public_groups=["a", None])
    assert query.keys == ("key",)
    assert query.public_groups == (("a",), (None,))


def test_only_needed_columns_are_read():
    """Each once."""
    two = (
        Sum("s", column="x", contribution_bounds_per_row=(0, 1)),
        Avg("m", column="x", contribution_bounds_per_row=(0, 1)),
    )
    query = query_of(**DATED, arrival_column="seen", aggregates=two)
    assert query.columns == ["user", "key", "ts", "seen", "x"]


def test_a_live_query_starts_with_the_window_that_now_lies_in():
    """In the calendar of its zone; a start that was given is kept."""
    query = query_of(
        time_column="ts", window=Tumble("1 day"), every="1 hour", time_zone="Europe/Rome"
    )
    assert query.live
    started = query.starting(instant("2024-05-01T12:00Z", "now"))
    assert iso(started.start) == "2024-04-30T22:00:00+00:00"
    assert started.starting(0) is started
    assert started.schedule.releases(0) == 24
    assert not query_of(**DATED).live


def test_periods_are_days_of_the_zone():
    """A user's budget renews at local midnight, winter and summer."""
    query = query_of(**DATED, privacy_unit_period="1 day", time_zone="Europe/Rome")
    noon = instant("2024-07-01T12:00", "t", "Europe/Rome")
    number = query.periods.last_before(noon)
    assert iso(query.periods.at(number)) == "2024-06-30T22:00:00+00:00"
    assert query.periods.at(number + 1) - query.periods.at(number) == DAY
    assert query_of().periods is None
    assert query_of().period_in_words == "forever"
    assert "1 day" in query.period_in_words


def test_facts_differ_wherever_releases_do():
    """They are part of every run's fingerprint: other facts are another run."""
    base = query_of(**DATED, every="1 hour")
    others = (
        {"epsilon": 2},
        {"delta": 1e-7},
        {"every": "2 hours"},
        {"keys": ("other",)},
        {"max_groups_contributed": 5},
        {"max_rows_per_group": 2},
        {"start": "2024-05-01T01:00"},
        {"end": "2024-05-04"},
        {"allowed_lateness": "1 hour"},
        {"pre_threshold": 3},
        {"public_groups": ["a"]},
        {"time_zone": "Europe/Rome", "start": "2024-05-01T00:00Z", "end": "2024-05-03T00:00Z"},
        {"aggregates": (Sum("s", column="x", contribution_bounds_per_row=(0, 1), quantum="0.1"),)},
        {"aggregates": (Sum("s", column="x", contribution_bounds_per_row=(0, 1), quantum="0.01"),)},
        {"min_change": 2},
        {"buffers": 3},
        {"name": "another"},
        {"privacy_unit_period": "1 day"},
    )
    marks = {
        repr(sorted(query_of(**DATED | {"every": "1 hour"} | o).facts().items())) for o in others
    }
    marks.add(repr(sorted(base.facts().items())))
    assert len(marks) == len(others) + 1
    assert base.facts() == query_of(**DATED, every="60 minutes").facts()
    assert base.every == 3600 * SECOND


def test_the_typed_signature_has_every_field():
    """Type checkers read it in place of the one that the dataclass makes."""
    tree = ast.parse(inspect.getsource(Query))
    (told,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    ]

    names = sorted(one.name for one in fields(Query))
    assert sorted(one.arg for one in told.args.kwonlyargs) == names
    required = [
        one.arg
        for one, given in zip(told.args.kwonlyargs, told.args.kw_defaults, strict=True)
        if given is None
    ]
    made = inspect.signature(Query).parameters.values()
    assert sorted(required) == sorted(one.name for one in made if one.default is one.empty)


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"name": "x\ud800"}, "name"),
        ({"keys": ("x\ud800",)}, "keys"),
        ({"public_groups": ["a", "x\ud800"]}, "public_groups"),
        ({"privacy_unit_column": "x\ud800"}, "privacy_unit_column"),
        ({"aggregates": (Count("x\ud800"),)}, "name"),
        ({"column_types": {"x\ud800": "INT64"}}, "column_types"),
    ],
)
def test_half_a_character_is_refused_wherever_text_is_given(facts, named):
    """Nothing could write it, and Arrow's own error says neither where it is nor what to do."""
    with pytest.raises(InvalidParameter, match=f"{named} must be Unicode text; got 'x.ud800'"):
        query_of(**facts)


def test_half_a_character_is_refused_in_sql_and_in_places(tmp_path):
    """What names a file may be no text, as names of files may; but no file has half a character."""
    with pytest.raises(InvalidParameter, match=r"SQL must be Unicode text; got .SELECT"):
        dps.sql("SELECT '\ud800'")
    query = query_of(public_groups=["a"])
    for part in ("source", "sink", "state", "secret", "ledger", "dead_letters"):
        places = {"source": str(tmp_path), "ledger": dps.Ledger()} | {part: "x\ud800"}
        with pytest.raises(InvalidParameter, match=f"{part} must be Unicode text"):
            dps.run(query, **places)


REACH = {
    "one total": {"window": None, "privacy_unit_period": "forever"},
    "days, users for ever": {"privacy_unit_period": "forever"},
    "days of users' days": {},
    "days of users' days, public keys": {"keys": ["k"], "public_groups": ["a", "b", "c"]},
    "days that begin at noon": {"start": "2024-03-28T12:00"},
    "hours of a day that is long": {"window": Tumble("1 hour"), "time_zone": "Europe/Rome"},
    "hours of a long day in autumn": {
        "window": Tumble("1 hour"),
        "time_zone": "Europe/Rome",
        "start": "2024-10-25",
        "end": "2024-10-30",
    },
    "windows that hop": {"window": Hop("24 hours", slide="6 hours")},
    "windows that grow": {"window": Cumulate("24 hours", step="6 hours")},
    "windows that grow, from noon": {
        "window": Cumulate("24 hours", step="6 hours"),
        "start": "2024-03-28T12:00",
    },
    "periods that do not fit": {"privacy_unit_period": "7 hours", "window": Tumble("5 hours")},
    "long windows": {"privacy_unit_period": "6 hours", "window": Hop("2 days", slide="1 day")},
    "longer windows": {"privacy_unit_period": "6 hours", "window": Hop("3 days", slide="1 day")},
    "days of months": {"privacy_unit_period": "1 month", "end": "2024-06-03"},
    "months of days": {"window": Tumble("1 month"), "end": "2024-06-28"},
    "months that hop": {
        "window": Hop("3 months", slide="1 month"),
        "privacy_unit_period": "1 month",
        "start": "2024-01-01",
        "end": "2024-12-01",
        "time_zone": "Europe/Rome",
    },
}


@pytest.mark.parametrize("name", REACH)
def test_reachable_groups_are_those_that_rows_of_one_period_are_in(name):
    """By enumeration: of each period all moments, of each moment the windows that hold it."""
    facts = {
        "time_column": "ts",
        "start": "2024-03-28",
        "end": "2024-04-03",
        "window": Tumble("1 day"),
        "privacy_unit_period": "1 day",
        "max_groups_contributed": 10_000,
        "keys": (),
    }
    query = query_of(**facts | REACH[name])
    schedule, minute = query.schedule, 60_000_000
    spans = np.array([schedule.span(w) for w in range(schedule.windows)], np.int64)
    moments = np.arange(query.start, query.end, 30 * minute)
    inside = (spans[:, :1] <= moments) & (moments < spans[:, 1:])  # windows x moments
    periods = np.zeros(len(moments), int)
    if query.periods is not None:
        periods = query.periods.before(moments)
    most = max(inside[:, periods == each].any(axis=1).sum() for each in set(periods.tolist()))
    groups = len(query.public_groups)

    assert query.reachable == most * groups
    assert query.bounds.groups == query.reachable
    if query.window is not None and query.privacy_unit_period != "forever":
        endless = replace(query, end=None)  # as many, or more where no day of the few is long
        assert most * groups <= endless.reachable <= (2 * most + 4) * groups
        assert replace(endless, start=None).reachable is not None


def test_a_total_is_reached_as_often_as_windows_hold_a_period():
    """Each unit of six hours is in three windows: the first ones, which begin with it, do not tell.

    The noise of a total was once for two of them.
    """
    wide = query_of(
        **DATED | {"end": "2024-05-09"},
        **REACH["longer windows"],
        keys=("k",),
        grouping_sets=(("k",), ()),
        max_groups_contributed=9,
    )

    assert wide.groups_of_set(()) == 3
    assert replace(wide, end=None).groups_of_set(()) == 3


def test_only_groups_that_are_known_to_be_few_cut_bounds():
    """Unknown keys and streams without end are what they were, in bytes too."""
    open_keys = query_of(keys=["k"], max_groups_contributed=8)
    assert open_keys.reachable is None
    assert open_keys.bounds == open_keys.declared_bounds
    assert "reachable_groups" not in open_keys.facts()
    few = query_of(keys=(), max_groups_contributed=8)
    assert few.declared_bounds.groups == 8
    assert few.bounds == query_of(keys=(), max_groups_contributed=1).bounds
    assert "reachable_groups" in few.facts()
    assert "reachable_groups" not in query_of(keys=(), max_groups_contributed=1).facts()
    noise = [
        float(plan_query(each).window(1).stddevs[0, 0])
        for each in (few, query_of(keys=(), max_groups_contributed=1))
    ]
    assert noise[0] == noise[1]
