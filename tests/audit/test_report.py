"""Reports: shape, reproducibility, verdicts, and the quick audit of everything."""

import re
from pathlib import Path

import pytest

from dpstream.audit.lower_bounds import Event, bound_from_event
from dpstream.audit.mechanism_targets import WORST, example, pairs_of
from dpstream.audit.report import audit, catalogue, controls, repeat_row, shipped, summary, verdict
from dpstream.audit.targets import CONFIDENCE, Exact, secret_of
from dpstream.errors import InvalidParameter
from dpstream.mechanisms import REGISTRY
from dpstream.mechanisms.base import HistogramMechanism

CHEAP = ("laplace", "randomised_response", "sample", "svt_1", "svt_5", "same_noise_other_data")
WANTED = {
    "choice_charged_once",
    "pure_noise_in_l2",
    "sets_charged_once",
    "totals_like_parts",
    "contin_group_printed",
    "spas_published",
    "shared_noise",
    "noise_redrawn_on_replay",
    "same_noise_other_data",
    "budget_forgotten",
    "exact_count_in_memory",
    "intrusion_not_charged",
    "noise_ratchet",
    "announced_without_new_noise",
    "column_groups_apart",
    "bounded_before_join",
    "bounds_off_by_one",
    "bounds_sum_not_cut",
    "registry_not_bounded",
    "subquery_over_stream",
    "inner_rows_of_others",
    "inner_rows_charged_once",
    "sessions_over_midnight",
    "cohorts_charged_once",
    "net_results_published_twice",
    "noise_below_reach",
    "months_counted_at_the_start",
    "months_all_as_the_shortest",
    "levels_charged_once",
    "weights_not_shared",
    "keys_only_when_touched",
    "remembered_once_touched",
    "rising_bounds",
    "clamps_of_another_period",
    "shared_by_all_groups",
    "shared_in_every_release",
    "forgotten_by_exact_counts",
    "remembers_active_keys",
    "threshold_without_plus_one",
    "net_clamp",
    "unit_counted_twice",
    "sqlp_per_trigger",
    "blt_wrong_norm",
    "watermark_from_data",
    "dpi_summed_score",
    "dpi_charged_once",
    "dpi_gaps_of_data",
    "dpi_histogram_unbounded",
    "dpi_rows_unbounded",
    "debias_units_not_capped",
    "debias_noise_for_one_row",
    "debias_groups_not_capped",
    "debias_groups_noise_for_one_row",
    "sql_unit_enters_again",
    "sql_w_forgotten",
    "book_forked",
    "book_forked_windows",
    "book_forgets_a_charge",
    "book_forgets_begun_periods",
    "book_forgets_last_periods",
    "book_frees_places_twice",
    "state_lost_keys",
    "state_lost_log",
    "state_lost_types",
    "key_as_spelled",
    "type_from_data",
    "unit_by_spelling",
    *(f"svt_{version}" for version in (3, 4, 5, 6)),
}
"""Every control that there must be; a name that is added here needs its line in the catalogue."""


@pytest.fixture(scope="module")
def rows():
    return list(audit(CHEAP, quick=True))


def test_rows_have_what_scripts_read(rows):
    """Names and types of a row."""
    for row in rows:
        assert {"name", "control", "claimed", "lower_bound", "confidence", "rejected"} <= set(row)
        assert row["confidence"] >= CONFIDENCE
        assert row["rejected"] == (row["lower_bound"] > row["claimed"])
        assert verdict(row)[0], row["name"]


def test_simple_things_come_near_their_claim(rows):
    """At least 30% of the claim is shown to be lost."""
    for row in rows:
        if row["simple"]:
            assert row["share_of_claim"] >= 0.3, row["name"]


def test_a_row_can_be_made_again_from_itself(rows):
    """The same name and seed give the same row; its counts alone give its bound."""
    for row in rows[:1] + rows[-1:]:
        same = repeat_row(row, quick=True)
        assert {**same, "seconds": 0} == {**row, "seconds": 0}
    for row in rows:
        event = Event(**row["witness"]["event"])
        error = (1 - row["confidence"]) / row["tests"]
        found = bound_from_event(event, epsilon=row["claimed"], delta=row["delta"], error=error)
        assert found.epsilon == pytest.approx(row["lower_bound"])
        assert found.delta == pytest.approx(row["delta_lower_bound"])


def test_another_seed_gives_other_runs(rows):
    """Each part of an audit has a secret of its own."""
    (other,) = audit(["laplace"], quick=True, seed=1)

    assert other["witness"]["event"] != rows[0]["witness"]["event"]
    assert secret_of("laplace 0 test 0 one") != secret_of("laplace 0 test 0 two")


def test_everything_shipped_is_in_the_catalogue():
    """A registered mechanism is audited without being named; names are unique."""
    assert set(REGISTRY) <= set(shipped())
    assert not set(shipped()) & set(controls())
    assert all(make().name == name for name, make in catalogue().items())
    assert {"latched", "sqlp"} <= set(shipped())


def test_every_control_is_in_the_catalogue():
    """And is one; version 1 and 2 of the sparse vector technique are not."""
    found = {name for name, make in controls().items() if make().control}

    assert found == WANTED


def test_controls_with_a_delta_run_where_it_can_be_seen():
    """Nothing shows below a delta of 0.01 or so."""
    targets = [make() for make in controls().values()]

    assert all(target.delta == 0 or target.delta >= 0.01 for target in targets)
    assert all(target.control for target in targets if isinstance(target, Exact))


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_neighbours_are_neighbours(name):
    """One unit apart, and inside what the mechanism accepts."""
    mechanism = example(name)
    target = shipped()[name]()
    for pair in target.pairs:
        moved = abs(pair.one - pair.two)
        for data in (pair.one, pair.two):
            assert (mechanism.check(data.astype(float)) == data).all()
        assert moved.any(), pair.name
        if isinstance(mechanism, HistogramMechanism):
            changed = moved.sum(axis=1).nonzero()[0]
            assert moved.sum(axis=1).max() == 1
            assert changed[-1] - changed[0] < mechanism.window
        elif mechanism.terms().unit == "event":
            assert (moved > 0).sum() == 1
    names = [pair.name for pair in target.pairs]
    assert WORST.get(name, names[0]) == names[0]


def test_pairs_are_the_same_every_time():
    """A report names them; they must mean the same tomorrow."""
    one, two = pairs_of(example("spas")), pairs_of(example("spas"))

    assert [pair.facts() for pair in one] == [pair.facts() for pair in two]


def test_an_unknown_name_is_refused_before_anything_runs():
    """With the nearest name."""
    with pytest.raises(InvalidParameter, match="did you mean 'svt_5'"):
        next(audit(["laplace", "svt_55"]))


@pytest.mark.audit
@pytest.mark.timeout(900)
def test_the_quick_audit_of_everything():
    """Nothing shipped is rejected, every control is, and simple things come near their claim."""
    rows = list(audit(quick=True))
    found = summary(rows)

    assert (found["rejected"], found["missed"]) == ([], [])
    assert {row["name"]: row["share_of_claim"] for row in rows if row["simple"]}
    assert all(row["share_of_claim"] >= 0.3 for row in rows if row["simple"])


def test_the_documents_have_a_row_of_everything_that_is_audited():
    """Each of what is shipped and of the controls once, each in its table."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "audit.md").read_text()
    tables = text.split("| shipped | ")[1].split("| control | ")
    found = [re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) for table in tables]
    sound = ["svt_1", "svt_2"]  # two of six published forms, beside their four broken ones

    assert sorted(found[0]) == sorted([*shipped(), *sound])
    assert sorted(found[1]) == sorted(set(controls()) - {*sound})
