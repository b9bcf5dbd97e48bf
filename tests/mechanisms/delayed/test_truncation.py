"""SensitivityTruncation: the choice of a bound, who pays for it, and what it saves."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest

import dpstream as dps
from dpstream.audit.replay import Recorder, drive, record, replay
from dpstream.errors import InvalidParameter
from dpstream.mechanisms import BucOrder, ContinGroup, Naive, SensitivityTruncation
from dpstream.mechanisms.delayed.truncation import bound_scores, candidate_bounds
from dpstream.mechanisms.runner import Runner
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.sensitivity import truncation_change

SECRET, RUN = bytes(range(32)), bytes(16)
RANGE = {"lo": 0, "hi": 1000}
INSIDE = ("naive", "pegasus", "pegasus_delay", "contin_group", "discontin_group", "comp_order",
          "buc_order", "block_smoother")  # fmt: skip


def test_one_value_moves_no_score_by_more_than_declared():
    """Over all pairs of values; and one pair moves one score by all of it."""
    bounds, most = candidate_bounds(-3, 14, 6), 0
    for a in range(-3, 15):
        for b in range(-3, 15):
            one, other = (
                bound_scores(np.array([v, 5]), bounds, -3, 14, Fraction(1, 3)) for v in (a, b)
            )
            most = max(most, int(np.abs(one - other).max()))

    assert most == truncation_change(Fraction(17)) == 17


def test_scores_prefer_what_costs_less():
    """By exact arithmetic: saved noise less truncated values, for every bound."""
    values, bounds, saved = np.array([1, 2, 3, 90]), np.array([10, 50, 100]), Fraction(1, 5)
    got = bound_scores(values, bounds, 0, 100, saved)
    cost = [sum(max(int(v) - int(b), 0) for v in values) + saved * 4 * int(b) for b in bounds]

    assert [int(got[0] - g) for g in got] == [int(2 * (c - cost[0])) for c in cost]


@pytest.mark.parametrize("name", INSIDE)
def test_any_event_level_mechanism_goes_inside(name):
    """All steps are released, within the budget, and no question depends on raw data."""
    mechanism = SensitivityTruncation(epsilon=2, delay=4, inside=name, every=2, **RANGE)
    block = np.random.default_rng(1).integers(0, 200, (30, 1))
    block[::9] = 990
    calls, releases = record(mechanism, block, secret=SECRET, run=RUN)

    assert sorted(r.step for r in releases) == list(range(30))
    assert [c.step for c in calls if c.purpose == "bound"][:3] == [3, 11, 19]
    for step, value in ((2, 0), (3, 1000), (9, 1000), (10, 0), (29, 1000)):
        other = block.copy()
        other[step] = value
        result = replay(mechanism, other, calls, original=block)
        assert result.violations == []
        assert result.loss <= 2


@pytest.mark.parametrize("name", ["contin_group", "discontin_group", "buc_order"])
def test_representatives_pay_with_what_would_have_published_them(name):
    """Every second value of each group chooses the bound; the sums do not read it."""
    options = (("threshold", 300),) if name != "buc_order" else (("bucket", 100),)
    mechanism = SensitivityTruncation(
        epsilon=2, delay=8, inside=name, options=options, sampled=2, every=1, **RANGE
    )
    block = np.random.default_rng(4).integers(0, 1001, (8, 1))
    calls, _ = record(mechanism, block, secret=SECRET, run=RUN)
    chose, published = (next(c for c in calls if c.purpose == p) for p in ("bound", "publish"))
    readers = {step: set() for step in range(8)}
    for step in range(8):
        for value in (0, 1000):
            other = block.copy()
            other[step] = value
            result = replay(mechanism, other, calls, original=block)
            assert result.violations == []
            readers[step] |= moved_by(mechanism, other, calls)

    assert chose.interval == published.interval
    assert all(len(purposes & {"bound", "publish"}) <= 1 for purposes in readers.values())
    assert {"bound", "publish"} <= set().union(*readers.values())


def moved_by(mechanism, other, calls):
    """Purposes whose exact values a neighbour moves."""
    twin = Recorder(script=calls)
    drive(mechanism, other, twin)
    pairs = zip(calls, twin.calls, strict=True)
    return {a.purpose for a, b in pairs if a.value.size and (a.value != b.value).any()}


def test_truncation_helps_where_a_few_values_are_far_above():
    """Naive noise shrinks with the bound: the error is a third and less."""
    data = np.random.default_rng(0).integers(0, 60, 2000)
    data[::100] = 1000
    plain = dps.release(Naive(epsilon=1, **RANGE), data, secret=SECRET, run_id=RUN).values[:, 0]
    inside = SensitivityTruncation.of(Naive(epsilon=1, **RANGE), delay=100)
    low = dps.release(inside, data, secret=SECRET, run_id=RUN).values[:, 0]
    after = slice(100, None)  # the first batch chooses the first bound

    assert np.abs(low - data)[after].mean() < np.abs(plain - data)[after].mean() / 3


def test_of_takes_everything_from_a_mechanism():
    """Epsilon, range, delay and options."""
    inner = BucOrder(epsilon="1/3", delay=6, bucket=50, publish="pp", smoother="median", **RANGE)
    wrapped = SensitivityTruncation.of(inner, every=3)

    assert wrapped.untruncated == inner
    assert (wrapped.budget, wrapped.delay, wrapped.every) == (Fraction(1, 3), 6, 3)
    with pytest.raises(InvalidParameter, match="has no delay"):
        SensitivityTruncation.of(Naive(epsilon=1, **RANGE))


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"inside": "uniform"}, "event-level mechanism"),
     ({"inside": "sensitivity_truncation"}, "event-level mechanism"),
     ({"inside": "naive", "sampled": 2}, "does not group values"),
     ({"sampled": 1}, "nothing would be left"),
     ({"share": 1}, "share must be below 1"),
     ({"options": "nonsense=3"}, "no parameter 'nonsense'"),
     ({"inside": "discontin_group", "delay": 1}, "use naive"),
     ({"candidates": 1}, "candidates must be a whole number of at least 2")],
)  # fmt: skip
def test_bad_parameters_are_refused(options, reason):
    """With the reason, those of the mechanism inside too."""
    with pytest.raises(InvalidParameter, match=reason):
        SensitivityTruncation(**({"epsilon": 1, "delay": 5, **RANGE} | options))


def test_options_may_be_texts():
    """As the command line gives them."""
    told = SensitivityTruncation(
        epsilon=1, delay=5, options=("publish=pp", "smoother=median", "threshold=20"), **RANGE
    )

    assert told.untruncated == ContinGroup(
        epsilon=1, delay=5, publish="pp", smoother="median", threshold=20, **RANGE
    )


WITH_OPTIONS = [
    ("naive", {}),
    ("pegasus", {}),
    ("contin_group", {"threshold": 50}),
    ("discontin_group", {"threshold": 50}),
    ("comp_order", {}),
    ("block_smoother", {}),
    ("buc_order", {}),
    ("buc_order", {"bucket": 100}),
    ("buc_order", {"bucket": 300}),
]


BATCHES = [(*one, 3) for one in WITH_OPTIONS if one[0].endswith(("_group", "buc_order"))]


@pytest.mark.parametrize(
    ("name", "options", "sampled"), [*((*one, 0) for one in WITH_OPTIONS), *BATCHES]
)
@pytest.mark.parametrize("epsilon", [2, 8])
def test_no_value_costs_more_than_epsilon_whatever_the_book_allows(name, options, sampled, epsilon):
    """Bounds that jump from batch to batch change how many buckets there are, not what is spent."""
    made = SensitivityTruncation(
        epsilon=epsilon, lo=0, hi=1000, delay=6, inside=name, options=tuple(options.items()),
        every=1, sampled=sampled,
    )  # fmt: skip
    book = Ledger()
    book.open("stream", dataclasses.replace(made.terms(), total=Fraction(1000)))
    runner = Runner(made, ledger=book, dataset="stream", secret=bytes(32), run_id=bytes(16))
    for value in np.repeat([5, 990, 1, 500, 60, 990, 5], [7, 9, 12, 6, 8, 7, 5]):
        runner.step([value, 0])
    runner.finish()

    assert 0 < book.peak("stream") <= epsilon
