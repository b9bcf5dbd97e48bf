"""What is explained is what the plan does."""

import json
import re
from dataclasses import dataclass

import numpy as np
import pytest

import dpstream as dps
from dpstream.explanation import explain
from dpstream.query.noise_plan import plan_query
from tests.sql_compiler.test_accepted import ACCEPTED, compiled


@pytest.mark.parametrize(("query", "facts"), ACCEPTED, ids=lambda item: str(item)[:40])
def test_every_query_can_be_explained(query, facts):
    """In words and as JSON, with a finite noise for every column."""
    told = explain(compiled(query, facts).query)

    text = told.text()
    titles = (
        "PLAN",
        "WHAT IS PROTECTED",
        "SENSITIVITY",
        "NOISE",
        "SCHEMA",
        "KEYS",
        "BUDGET",
        "MEMORY",
    )
    for title in titles:
        assert title in text
    assert "WHAT IS NOT PROTECTED" in text
    assert json.loads(json.dumps(told.to_json())) == told.to_json()
    for each in told.columns:
        assert each["note"] if each["first"] is None else each["first"] > 0 and each["last"] < 1e9


def query(**more):
    given = {
        "privacy_unit_column": "user",
        "keys": ["page"],
        "aggregates": [
            dps.Count("n"),
            dps.Sum("s", column="seconds", contribution_bounds_per_row=(0, 600)),
        ],
        "epsilon": 2,
        "delta": 1e-9,
        "time_column": "ts",
        "start": "2024-05-01",
        "end": "2024-05-02",
        "every": "1 hour",
        "max_groups_contributed": 4,
    }
    return dps.Query(**given | more)


def test_each_aggregate_says_what_is_known_of_its_error_bar():
    """Its own class says it, also where it is made of the measures of another."""

    @dataclass(frozen=True)
    class Squares(dps.Variance, identity="test squares"):
        error_bar = "fixed"

    about = {"column": "seconds", "contribution_bounds_per_row": (0, 10)}
    aggregates = [dps.Sum("s", **about), dps.Avg("a", **about), dps.Variance("v", **about)]
    told = {
        each["column"]: each
        for each in explain(query(aggregates=[*aggregates, Squares("q", **about)])).columns
    }

    assert (told["s"]["note"], told["a"]["note"]) == (
        "", " (divided by the number of rows of the group)"
    )  # fmt: skip
    assert told["v"]["first"] is None
    assert "each release says its own error bar" in told["v"]["note"]
    assert told["q"]["first"] > 0
    assert told["q"]["note"] == ""


def test_numbers_are_those_of_the_plan():
    """Noise, thresholds, sensitivities: the very ones that a run uses."""
    told, plan = explain(query()), plan_query(query())
    window = plan.window(24)

    assert told.keys["last_threshold"] == window.thresholds[-1]
    least, most = min(window.thresholds), max(window.thresholds)
    assert (told.keys["smallest_threshold"], told.keys["largest_threshold"]) == (least, most)
    assert f"at its smallest {least}, at release " in told.keys["words"]
    assert f"at its largest {most}, at release " in told.keys["words"]
    assert told.keys["pre_threshold"] == window.pre_threshold
    assert told.columns[0]["last"] == pytest.approx(window.stddevs[0, -1])
    total = plan.query.aggregates[1]
    value, rows = (plan.query.measures.index(m) for m in plan.query.measures_of[total.name])
    own, middle = window.stddevs[value, 0] * float(total.quantum), float(total.middle)
    assert told.columns[1]["first"] == pytest.approx(
        np.hypot(own, middle * window.stddevs[rows, 0])
    )
    assert told.measures[value]["sensitivity"] == pytest.approx(300 * 2, rel=1e-9)
    assert told.budget["mu_squared"] == pytest.approx(float(plan.calibrated.mu_squared))


def test_what_floats_leave_no_room_for_is_not_measured_and_that_is_said():
    """A trigger a second for a day: with totals it would take more than a book has for rounding."""
    often = {"window": dps.Tumble("1 day"), "public_groups": ["a", "b"], "epsilon": 4}
    told, rare = (explain(query(every=every, **often)) for every in ("1 second", "1 hour"))

    assert "what the bounds drop is not measured" in told.budget["words"]
    assert "kept_share" not in [each["name"] for each in told.schema]
    assert "not measured" not in rare.budget["words"]
    assert "kept_share" in [each["name"] for each in rare.schema]


@pytest.mark.parametrize(
    ("groups", "each", "rows"), [(4, 1, None), (4, 3, None), (4, 3, 7), (9, 2, 5)]
)
def test_the_derivation_adds_up(groups, each, rows):
    """What stands behind the equals sign is what stands before it."""
    told = explain(
        query(max_groups_contributed=groups, max_rows_per_group=each, max_rows_contributed=rows)
    )
    for measure in told.measures:
        factor, inside, shown = re.search(
            r"(?:([\d.]+) \* )?sqrt\((\d+)\) = ([\d.e+]+)", measure["derivation"]
        ).groups()
        value = float(factor or 1) * int(inside) ** 0.5
        assert value == pytest.approx(float(shown), rel=1e-3)
        assert value == pytest.approx(measure["sensitivity"], rel=1e-9)


def test_words_follow_the_unit_and_the_keys():
    """A period renews the budget, public groups are always shown: the text says so."""
    daily = explain(query(privacy_unit_period="1 day")).text()
    assert "Bounds and budget renew with each 1 day" in daily
    assert "several periods of 1 day" in daily
    assert "for ever" in explain(query()).text()
    public = explain(query(public_groups=["a", "b"]))
    assert "the 2 public groups are shown" in public.text()
    assert public.not_protected[0].startswith("which groups exist")


def test_the_schema_is_told_with_what_fixes_it():
    """Counts by the query, keys by a declaration, by the source, or by what is computed."""
    asked = dps.sql("""
        SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 1, delta = 1e-9,
               privacy_unit_column = u, max_groups_contributed = 1, debias = 'global',
               column_types = (day = DATE))
               day, page, LENGTH(page) AS size, COUNT(*) AS n FROM log GROUP BY day, page, size""")
    told = explain(asked)

    assert [(one["name"], one["type"]) for one in told.to_json()["schema"]] == [
        ("day", "date32[day]"),
        ("page", "string"),
        ("size", "int64"),
        ("n", "double"),
        ("n_stddev", "double"),
        ("trigger_time", "timestamp[us, tz=UTC]"),
        ("release_index", "int64"),
        ("kept_share", "double"),
    ]
    assert "  day: date32[day] (declared)\n" in told.text()
    assert "  page: string (or as the source's first schema says" in told.text()
    assert "  size: int64 (computed; it may depend" in told.text()
    assert "  n: double\n" in told.text()
