"""What all mechanisms with a delay have in common."""

from fractions import Fraction

import numpy as np
import pytest

import dpstream as dps
from dpstream.errors import InvalidParameter, StateError
from dpstream.mechanisms import REGISTRY, find
from dpstream.mechanisms.base import SeriesMechanism

SECRET, RUN = bytes(range(32)), bytes(16)
RANGE = {"lo": 0, "hi": 100}
DELAYED = ("pegasus_delay", "contin_group", "discontin_group", "comp_order", "buc_order",
           "block_smoother", "sensitivity_truncation")  # fmt: skip
BATCHED = ("contin_group", "discontin_group", "buc_order")

every_delayed = pytest.mark.parametrize("name", DELAYED)


def build(name, **options):
    return find(name)(**({"epsilon": 1, "delay": 5, **RANGE} | options))


def waits(mechanism, steps):
    """How late each step was published."""
    runner, late = dps.Runner(mechanism, secret=SECRET, run_id=RUN), {}
    data = np.arange(steps) * 7 % 100
    for now, batch in enumerate(runner.feed(data)):
        late |= {release.step: now - release.step for release in batch}
    return late


@every_delayed
@pytest.mark.parametrize("delay", [2, 3, 8])
def test_no_value_waits_longer_than_its_delay(name, delay):
    """Batches wait for `delay` - 1 steps at most, sliding windows `delay`."""
    for epsilon in (0.1, 1, 300):
        late = waits(build(name, delay=delay, epsilon=epsilon), 60)
        most = delay if name in ("pegasus_delay", "comp_order") else delay - 1

        assert max(late.values()) <= most
        assert set(range(60 - most - 1)) <= set(late)


def test_every_mechanism_with_lo_and_hi_is_covered():
    """A new one is added to the list above, or has no delay."""
    series = {name for name in REGISTRY if issubclass(find(name), SeriesMechanism)}

    assert series == {*DELAYED, "naive", "pegasus"}


@every_delayed
@pytest.mark.parametrize(
    ("delay", "reason"),
    [(0, "delay=0 is not possible"), (-1, "whole number"), (2.5, "whole number"),
     (10**9, "at most 1048576")],
)  # fmt: skip
def test_impossible_delays_are_refused_with_the_reason(name, delay, reason):
    """What cannot be is named."""
    with pytest.raises(InvalidParameter, match=reason):
        build(name, delay=delay)


def test_a_single_value_cannot_be_grouped():
    """DiscontinGroup needs two values, and says what to use for one."""
    with pytest.raises(InvalidParameter, match=r"delay=1 is not possible: .*use naive"):
        build("discontin_group", delay=1)


@every_delayed
def test_values_outside_the_range_are_clamped(name):
    """They count as lo or hi, and nothing outside is published."""
    wild = dps.release(build(name), [-500, 20, 9000, 50, 1e6] * 4, secret=SECRET, run_id=bytes(16))
    tame = dps.release(build(name), [0, 20, 100, 50, 100] * 4, secret=SECRET, run_id=bytes(16))

    assert (wild.values == tame.values).all()
    assert wild.values.min() >= 0
    assert wild.values.max() <= 100


@pytest.mark.parametrize("name", BATCHED)
def test_batches_do_not_depend_on_each_other(name):
    """What comes in one batch changes no other; the last one may be short."""
    options = {"epsilon": 20, "threshold": 10}  # little noise: shrinking does not hide the change
    if name == "buc_order":  # which learns from batch to batch what it shrinks towards
        options = {"bucket": 10, "shrink": False}
    data = np.array([5, 5, 90, 90, 5] * 3 + [40, 40])
    other = data.copy()
    other[5:10] = 77
    a, b = (dps.release(build(name, **options), x, secret=SECRET, run_id=bytes(16)).values
            for x in (data, other))  # fmt: skip

    assert len(a) == 17
    assert (a[:5] == b[:5]).all()
    assert (a[10:] == b[10:]).all()
    assert (a[5:10] != b[5:10]).any()


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("publish", ["reduce", "pp"])
def test_charges_are_what_the_shares_say(name, publish):
    """One charge for publishing a batch; its cells are the batch's steps; the rest tells apart."""
    options = {"threshold": 10} if name != "buc_order" else {"bucket": 10}
    mechanism = build(name, publish=publish, group_share="1/4", **options)
    runner = dps.Runner(mechanism, secret=SECRET, run_id=RUN)
    for _ in runner.feed(np.arange(12)):
        pass
    runner.finish()
    (book,) = runner.ledger.report()
    spent = {line["purpose"]: line for line in book["spent_on"]}

    assert Fraction(book["spent"]) == 1
    assert Fraction(spent["publish"]["amount"]) / spent["publish"]["charges"] == Fraction(3, 4)
    assert spent["publish"]["charges"] == 3


def test_reduce_has_one_noise_for_a_group_and_pp_one_for_each_value():
    """With everything in one group: noise of the mean is n times, or sqrt(n) times, less."""
    spread = {}
    for publish in ("reduce", "pp"):
        mechanism = build("contin_group", delay=100, publish=publish, shrink=False)
        values = dps.release(mechanism, [50] * 20000, secret=SECRET, run_id=RUN).values[::100, 0]
        spread[publish] = float(np.std(values))

    # std of Laplace(100): 141; over 100 or 10. 200 batches: relative error 8%, 5.5 of them
    assert spread["reduce"] == pytest.approx(1.414, rel=0.45)
    assert spread["pp"] == pytest.approx(14.14, rel=0.3)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"publish": "sum"}, "publish must be one of reduce, pp"),
     ({"smoother": "mode"}, "smoother must be one of mean, median, james_stein"),
     ({"smoother": "median"}, "needs publish='pp'"),
     ({"group_share": 1}, "group_share must be below 1"),
     ({"threshold": -1}, "threshold must be greater than 0"),
     ({"lo": 5, "hi": 5}, "lo < hi")],
)  # fmt: skip
def test_bad_parameters_are_refused(options, reason):
    """With the reason."""
    with pytest.raises(InvalidParameter, match=reason):
        build("contin_group", **options)


def test_a_kept_series_ends_when_told(tmp_path):
    """What waits is published with final=True, and nothing can follow."""
    mechanism, data, state = build("contin_group"), list(range(12)), tmp_path / "state"
    open_, ended, again = (
        dps.release(mechanism, data, state=state, secret=SECRET, final=final)
        for final in (None, True, None)
    )

    assert (len(open_), len(ended), len(again)) == (10, 12, 12)
    assert (open_.values == ended.values[:10]).all()
    assert (again.values == ended.values).all()
    with pytest.raises(StateError, match="was finished after 12 steps"):
        dps.release(mechanism, [*data, 5], state=state, secret=SECRET)
