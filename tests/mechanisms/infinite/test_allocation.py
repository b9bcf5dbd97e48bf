"""Which slot spends which term: each at most once, by public rules, with little to remember."""

import math
from fractions import Fraction as F

import numpy as np
import pytest

from dpstream.errors import InvalidParameter
from dpstream.mechanisms.infinite import budget_series as allocations
from dpstream.mechanisms.infinite.budget_series import (
    ALLOCATIONS,
    Adaptive,
    Dilogarithm,
    Nearest,
    Telescoping,
    allocation,
    uniforms,
)
from dpstream.privacy.state import pack

SERIES = Telescoping(total=F(1))


def picks(rule, slots):
    used, found = rule.start(), []
    for slot in range(1, slots + 1):
        used, term = rule.pick(used, slot)
        used = rule.after(used, slot, moved=slot % 3 > 0) if term else used
        found.append(term)
    return found, used


@pytest.mark.parametrize("name", ALLOCATIONS)
@pytest.mark.parametrize("rate", [10, 10**4, 10**8])
def test_no_term_is_spent_twice(name, rate):
    """So the sum is at most that of the series."""
    terms, _ = picks(allocation(name, series=SERIES, rate=F(rate), seed=3), 2000)
    spent = [term for term in terms if term]

    assert len(spent) == len(set(spent)) > 0
    assert sum(SERIES.term(term) for term in spent) <= 1


@pytest.mark.parametrize("rate", [20, 10**5])
def test_algorithm_3_takes_the_nearest_term_that_is_left(rate):
    """Against a search of all terms."""
    terms, _ = picks(Nearest(series=SERIES, rate=rate, seed=1), 250)
    left = np.array([math.inf] + [SERIES.about(i) for i in range(1, 30_000)])
    for slot, term in enumerate(terms, start=1):
        aim = -math.log(uniforms(f"nearest 1 {slot}", 1)[0]) / rate
        nearest = int(np.abs(left - aim).argmin())
        if nearest < 29_000:  # else the true one may lie beyond the table
            assert term == nearest
            left[term] = math.inf


def test_with_a_high_rate_budget_is_kept():
    """The paper's rate spends next to nothing; in order, all but the last ten-thousandth."""
    kept, _ = picks(allocation("random", series=SERIES, rate=F(10**8), seed=0), 3000)
    order, _ = picks(allocation("in_order", series=SERIES, rate=F(1), seed=0), 3000)

    assert sum(SERIES.term(term) for term in kept) < F(1, 10_000)
    assert sum(SERIES.term(term) for term in order) == 1 - F(1, 3001)


def test_too_many_runs_give_terms_up_and_spend_none_twice(monkeypatch):
    """Memory stays as large as it was at the start."""
    monkeypatch.setattr(allocations, "RUNS", 4)
    rule = Nearest(series=SERIES, rate=10**6, seed=0)
    terms, used = picks(rule, 600)

    assert len(set(terms)) == 600
    assert used.shape == (4, 2)
    assert len(pack(used, kind="x")) <= len(pack(rule.start(), kind="x")) + 8


def test_algorithm_4_takes_from_every_range_in_order():
    """Large terms are used up soon; small ones never end."""
    terms, used = picks(allocation("ranges", series=SERIES, rate=F(1), seed=0), 4000)
    large, small = [t for t in terms if t <= 10], [t for t in terms if t > 1000]

    assert large == list(range(1, 11))
    assert small == list(range(1001, 1001 + len(small)))
    assert terms.index(11 if terms[0] == 11 else 10) + 5 >= 5
    assert used[2] == 1001 + len(small)
    first = np.array(terms[:30])
    assert min((first <= 10).sum(), ((first > 10) & (first <= 1000)).sum()) >= 3


def test_sparse_publishes_at_powers_of_four():
    """Term k in slot 4^(k-1)."""
    terms, _ = picks(allocation("sparse", series=SERIES, rate=F(1), seed=0), 300)

    assert {slot: term for slot, term in enumerate(terms, start=1) if term} == {
        1: 1, 4: 2, 16: 3, 64: 4, 256: 5,
    }  # fmt: skip


def published_at(rule, slots, moved):
    """The slots that pay, if the release of slot t moved where `moved(t)` says so."""
    used, paid = rule.start(), []
    for slot in range(1, slots + 1):
        used, term = rule.pick(used, slot)
        if term:
            assert term == len(paid) + 1
            paid, used = [*paid, slot], rule.after(used, slot, moved=moved(slot))
    return paid


def test_gaps_grow_on_a_steady_stream_and_not_on_one_that_moves():
    """Never below the gap that was asked for, nor below the slots so far over a third of n."""
    steady = published_at(Adaptive(level=24, gap=8), 2000, lambda slot: False)
    moving = published_at(Adaptive(level=24, gap=8), 2000, lambda slot: True)
    turned = published_at(Adaptive(level=24, gap=8), 2000, lambda slot: slot > 600)

    assert steady == [1, 9, 25, 57, 121, 249, 505, 1017]
    assert moving[:4] == [1, 9, 17, 25]
    assert np.diff(moving).tolist() == [max(8, slot // 8) for slot in moving[:-1]]
    assert steady[:7] == turned[:7]
    assert len(steady) < len(turned) < len(moving)


def test_the_last_quarter_of_a_gap_counts():
    """And always the slot itself."""
    rule = Adaptive(level=24, gap=8)
    used, heard = rule.start(), []
    for slot in range(1, 60):
        used, term = rule.pick(used, slot)
        heard += [slot] * rule.listens(used, slot)
        used = rule.after(used, slot, moved=False) if term else used

    assert heard == [1, 8, 9, 22, 23, 24, 25, *range(50, 58)]


def test_choices_are_public_and_the_same_again():
    """They depend on the seed alone."""
    one, again, other = (
        picks(allocation("random", series=SERIES, rate=F(1000), seed=seed), 50)[0]
        for seed in (5, 5, 6)
    )

    assert one == again != other


def test_algorithm_3_runs_on_the_dilogarithm_too():
    """Terms that are not a simple formula are found by halving."""
    terms, _ = picks(Nearest(series=Dilogarithm(total=F(1), change=F(2)), rate=500), 200)

    assert len(set(terms)) == 200


def test_an_unknown_allocation_is_refused():
    """With the names that there are."""
    with pytest.raises(InvalidParameter, match="one of adaptive, sparse, random, ranges, in_order"):
        allocation("uniform", series=SERIES, rate=F(1), seed=0)
