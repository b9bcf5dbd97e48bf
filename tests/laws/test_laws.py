"""Laws that every registered mechanism obeys. A new mechanism is tested here without a new line."""

import dataclasses
import math
import re
from fractions import Fraction
from functools import cache, lru_cache

import numpy as np
import pytest

import dpstream as dps
from dpstream.audit.replay import Changed, record, replay
from dpstream.errors import NoiseReuse
from dpstream.mechanisms import REGISTRY, find
from dpstream.mechanisms.base import HistogramMechanism
from dpstream.privacy.amounts import on_grid
from dpstream.privacy.state import pack, unpack
from tests.laws.cases import CHOOSING, NAMES, bins_of, example, neighbours, stream, worst_loss
from tests.support.fixed import RUN, SECRET
from tests.support.long import part_of

NOISY = ("laplace", "gaussian")
Z = 4.9  # two-sided false-alarm rate below 1e-6

every_mechanism = pytest.mark.parametrize("name", NAMES)


def published(releases):
    """What leaves the process, as comparable bytes."""
    return [(r.step, r.values.tobytes(), r.paid, r.held) for r in releases]


def all_releases(runner, data):
    return [r for batch in runner.feed(data) for r in batch]


@every_mechanism
def test_a_restart_at_any_step_gives_the_same_releases(name, tmp_path):
    """Saved, killed and loaded after any step, a run publishes what it would have published."""
    mechanism, steps = example(name), 23
    data = stream(mechanism, steps)
    whole = dps.Runner(mechanism, secret=SECRET, run_id=RUN)
    expected = published(all_releases(whole, data) + whole.finish())

    for cut in (0, 1, 6, 7, 15, steps):
        folder = tmp_path / f"cut{cut}"
        first = dps.Runner(mechanism, state=folder, secret=SECRET, run_id=RUN)
        before = all_releases(first, data[:cut])
        first.save()
        after_snapshot = all_releases(first, data[cut : cut + 3])  # lost with the process
        first.close()
        second = dps.Runner(mechanism, state=folder, secret=SECRET)
        after = all_releases(second, data[cut:]) + second.finish()
        second.close()

        assert published(before + after) == expected
        assert published(after[: len(after_snapshot)]) == published(after_snapshot)


@every_mechanism
def test_state_survives_serialisation(name):
    """State is a plain value: packing and unpacking it changes nothing."""
    mechanism = example(name)
    runner = dps.Runner(mechanism, secret=SECRET, run_id=RUN)
    all_releases(runner, stream(mechanism, 12))
    blob = pack(runner._progress.state, kind="mechanism state")

    assert pack(unpack(blob, kind="mechanism state"), kind="mechanism state") == blob
    assert unpack(pack(mechanism, kind="mechanism"), kind="mechanism") == mechanism


@every_mechanism
def test_another_run_sees_other_noise(name):
    """Two runs over the same data share no noise, drawn or published."""
    mechanism = example(name, epsilon=0.1)
    data = stream(mechanism, 40)
    if isinstance(mechanism, HistogramMechanism):
        data = data * 100  # counts far above the noise: an estimate that shrinks cannot hide it
    one = dps.release(mechanism, data, secret=SECRET, run_id=RUN)
    same = dps.release(mechanism, data, secret=SECRET, run_id=RUN)
    other_run = dps.release(mechanism, data, secret=SECRET, run_id=RUN[::-1])
    other_secret = dps.release(mechanism, data, secret=SECRET[::-1], run_id=RUN)

    assert (one.values == same.values).all()
    paid = np.array(one.paid)
    for other in (other_run, other_secret):
        both = paid & np.array(other.paid)
        assert both.any()
        assert (one.values[both] != other.values[both]).any()
    drawn = [
        np.concatenate([drawn_by(c).ravel() for c in calls if c.kind in (*NOISY, "choose")])
        for calls, _ in (
            record(mechanism, data, secret=secret, run=run)
            for secret, run in ((SECRET, RUN), (SECRET, RUN[::-1]), (SECRET[::-1], RUN))
        )
    ]
    for other_noise in drawn[1:]:
        size = min(len(drawn[0]), len(other_noise))
        assert (drawn[0][:size] != other_noise[:size]).mean() > 0.5


def drawn_by(call):
    """What a call added to its value, or what it chose."""
    return np.atleast_1d(call.answer - call.value if call.kind in NOISY else call.answer)


@every_mechanism
def test_other_data_never_meets_the_same_noise(name, tmp_path):
    """A run id brought back with other data is refused before anything is published."""
    mechanism = example(name)
    data = stream(mechanism, 12)
    changed = data.copy()
    changed[5] += 1
    ledger = dps.Ledger(tmp_path / "ledger")
    dps.release(mechanism, data, secret=SECRET, run_id=RUN, ledger=ledger)
    spent = ledger.report()
    dps.release(mechanism, data, secret=SECRET, run_id=RUN, ledger=ledger)

    assert ledger.report() == spent
    with pytest.raises(NoiseReuse):
        dps.release(mechanism, changed, secret=SECRET, run_id=RUN, ledger=ledger)

    runner = dps.Runner(mechanism, state=tmp_path / "state", secret=SECRET, replay=True)
    all_releases(runner, data)
    runner.close()
    again = dps.Runner(mechanism, state=tmp_path / "state", secret=SECRET, replay=True)
    feed = again.feed(changed)
    with pytest.raises(NoiseReuse):
        next(feed)


@every_mechanism
def test_no_release_uses_later_data(name):
    """What was published by step t is the same whatever comes after t."""
    mechanism, cut = example(name), 13
    data = stream(mechanism, 26)
    other = data.copy()
    other[cut:] = stream(mechanism, 26, seed=9)[cut:]

    def by_cut(block):
        runner = dps.Runner(mechanism, secret=SECRET, run_id=RUN)
        return published(all_releases(runner, block[:cut]))

    assert by_cut(data) == by_cut(other)
    runner = dps.Runner(mechanism, secret=SECRET, run_id=RUN)
    complete = all_releases(runner, other)
    assert published(complete)[: len(by_cut(data))] == by_cut(data)


@every_mechanism
def test_every_release_comes_within_its_delay(name):
    """And so depends on no data later than that: at once, or `delay` steps later at most."""
    mechanism = example(name)
    runner = dps.Runner(mechanism, secret=SECRET, run_id=RUN)
    late = [
        now - release.step
        for now, batch in enumerate(runner.feed(stream(mechanism, 50)))
        for release in batch
    ]

    assert min(late) >= 0
    assert max(late) <= getattr(mechanism, "delay", 0)
    assert len(late) >= 50 - getattr(mechanism, "delay", 0)


@every_mechanism
def test_every_step_is_released_once(name):
    """After finish, each step has exactly one release."""
    mechanism = example(name)
    for steps in (1, 2, 11, 24):
        runner = dps.Runner(mechanism, secret=SECRET, run_id=RUN)
        releases = all_releases(runner, stream(mechanism, steps)) + runner.finish()
        assert sorted(r.step for r in releases) == list(range(steps))


@every_mechanism
@pytest.mark.parametrize("epsilon", [0.1, 1, 7])
def test_an_independent_ledger_sees_no_overspend(name, epsilon):
    """Charges added up by brute force stay within epsilon in every window."""
    mechanism = example(name, epsilon=epsilon)
    calls, _ = record(mechanism, stream(mechanism, 60), secret=SECRET, run=RUN)
    closed = {c.interval: c.step for c in calls if c.kind == "close_interval"}
    charges = []
    for call in calls:
        cells = call.cells
        first, last = (call.step, call.step) if cells is None else (cells.first, cells.last)
        if call.kind == "open_interval":
            charges.append(("interval", first, closed.get(call.answer), None, call.amount))
        elif call.kind != "close_interval" and call.interval is None and call.cover is None:
            bins = None if cells is None else cells.bins
            charges.append(("cells", first, last, bins, on_grid(call.amount)))
    terms = mechanism.terms()

    assert 0 < worst_loss(charges, terms.width) <= terms.total


@every_mechanism
def test_each_coordinate_has_its_own_draw(name):
    """Noise shared between bins would reveal their difference exactly."""
    mechanism = example(name, epsilon=Fraction(1, 10**4))
    block = np.full((30, max(2, bins_of(mechanism))), 7)
    calls, _ = record(mechanism, block, secret=SECRET, run=RUN)
    wide = [c for c in calls if c.kind in ("laplace", "gaussian") and c.value.size > 1]

    # scales are 10^4 and more: one equal pair has chance below 1e-4, half of them below 1e-6
    equal = [len(np.unique(c.answer - c.value)) < c.value.size for c in wide]
    assert sum(equal) <= len(wide) / 2


def moments(call, off):
    """The declared scale times `off`, and E|X| and E X^2 of the discrete noise of that scale."""
    return _moments(call.kind, call.sensitivity, call.amount, off)


@cache
def _moments(kind, sensitivity, amount, off):
    if kind == "laplace":
        scale = off * float(sensitivity / on_grid(amount))
        return scale, 1 / math.sinh(1 / scale), 0.5 / math.sinh(0.5 / scale) ** 2
    scale = off * float(sensitivity) / math.sqrt(2 * float(on_grid(amount)))
    if scale > 100:  # the sums below equal the integrals to more digits than are tested
        return scale, scale * math.sqrt(2 / math.pi), scale**2
    x = np.arange(-1500.0, 1501.0)
    weights = np.exp(-(x**2) / (2 * scale**2))
    weights /= weights.sum()
    return scale, float(weights @ np.abs(x)), float(weights @ x**2)


@cache
def choices_of(name):
    """The private choices of many short runs."""
    mechanism, found = dataclasses.replace(example(name), **CHOOSING[name]), []
    for number in range(400):
        run = number.to_bytes(16, "big")
        calls, _ = record(mechanism, stream(mechanism, 6, seed=number), secret=SECRET, run=run)
        found += [call for call in calls if call.kind == "choose"]
    return found


@pytest.mark.parametrize("name", CHOOSING)
@pytest.mark.parametrize(("off", "passes"), [(1.0, True), (1.2, False), (0.8, False)])
def test_choices_have_the_declared_weights(name, off, passes):
    """Scores of what was chosen match their mean at a 1e-6 level; weights 20% off must fail."""
    total = variance = 0.0
    for call in choices_of(name):
        slope = float(on_grid(call.amount) / (2 * call.sensitivity))
        exponent = slope * (call.value - call.value.max())
        weights = np.exp(off * exponent)
        weights /= weights.sum()
        mean = weights @ exponent
        total += exponent[call.answer] - mean
        variance += weights @ exponent**2 - mean**2
    z = total / math.sqrt(variance)

    assert (abs(z) < Z) == passes


@lru_cache(maxsize=1)
def noisy_calls(name):
    """Enough noise of a mechanism to tell its scale; the same for all that is asked of it."""
    mechanism, calls, draws = example(name), [], 0
    for number in range(2000):
        run = number.to_bytes(16, "big")
        new, _ = record(mechanism, stream(mechanism, 30), secret=SECRET, run=run)
        new = [c for c in new if c.kind in NOISY]
        calls += new
        draws += sum(c.value.size for c in new)
        if draws >= 2500:
            break
    return calls


@pytest.mark.parametrize(("off", "passes"), [(1.0, True), (1.2, False), (0.8, False)])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in CHOOSING])
def test_noise_has_the_declared_scale(name, off, passes):
    """Mean |noise| matches the declared scale at a 1e-6 level; 20% off must fail."""
    calls = noisy_calls(name)
    assert sum(call.value.size for call in calls) >= 2500
    total = expected = variance = 0.0
    for call in calls:
        scale, mean, second = moments(call, off)
        total += float(np.abs(call.answer - call.value).sum()) / scale
        expected += call.value.size * mean / scale
        variance += call.value.size * (second - mean**2) / scale**2
    z = (total - expected) / math.sqrt(variance)

    assert (abs(z) < Z) == passes


@every_mechanism
def test_memory_is_bounded(name):
    """The state of a long stream is no larger than that of a short one."""
    mechanism = example(name)

    runner = dps.Runner(mechanism, secret=SECRET, run_id=RUN)
    data = stream(mechanism, part_of(1500, of=2))

    def size_after(part):
        all_releases(runner, part)
        return len(pack(runner._progress.state, kind="mechanism state"))

    short = size_after(data[:150])
    assert size_after(data[150:]) <= 1.5 * short + 200


@every_mechanism
def test_replaying_the_answers_over_a_neighbour(name):
    """With the answers frozen, one unit changes no question, no value beyond its sensitivity,
    and the loss along the path stays within the promise."""
    mechanism = example(name)
    block = stream(mechanism, 40)
    calls, _ = record(mechanism, block, secret=SECRET, run=RUN)
    losses = []
    for other in neighbours(mechanism, block, part_of(60, of=6)):
        result = replay(mechanism, other, calls, original=block)
        assert result.violations == []
        losses.append(result.loss)

    assert 0 < max(losses) <= mechanism.terms().total


def test_the_replay_law_catches_a_peek():
    """Control: a mechanism that looks at raw data to decide whether to pay is caught."""

    class Peeking(type(example("sample")), identity="test peeking"):
        def step(self, state, x, spend):
            if x.sum() > 20:
                return super().step(self.start(), x, spend)
            return super().step(state, x, spend)

    mechanism = Peeking(epsilon=100, window=5)
    block = np.full((12, 3), 7)
    block[3] = (7, 7, 6)
    other = block.copy()
    other[3, 2] = 7
    calls, _ = record_unchecked(mechanism, block)
    with pytest.raises(Changed):
        replay(mechanism, other, calls)


def test_the_replay_law_catches_cells_not_named():
    """Control: a mechanism that reads the step before but charges its own step is caught."""

    class Late(type(example("uniform")), identity="test late"):
        def start(self):
            return np.zeros(3, np.int64)

        def step(self, state, x, spend):
            _, releases = super().step(None, state, spend)
            return x, releases

    mechanism = Late(epsilon=1, window=5)
    block = np.full((12, 3), 7)
    other = block.copy()
    other[3, 2] = 8
    calls, _ = record(mechanism, block, secret=SECRET, run=RUN)

    assert replay(mechanism, other, calls).violations == []
    assert replay(mechanism, other, calls, original=block).violations != []


def record_unchecked(mechanism, block):
    """Record with a book so large that only the replay can object."""

    class Generous(type(mechanism), identity="test generous"):
        def terms(self):
            return dps.Terms(unit="user", total=10**6)

    generous = Generous(epsilon=mechanism.epsilon, window=mechanism.window)
    return record(generous, block, secret=SECRET, run=RUN)


@every_mechanism
def test_the_docstring_states_the_promise(name):
    """Guarantee, unit, delay and paper (authors, title, year) are stated, with an example."""
    text = find(name).__doc__ or ""

    for part in ("Guarantee:", "Unit:", "Delay:", "Paper:"):
        assert part in text
    assert re.search(r'"[^"]+",\s+\d{4}', text), 'Paper: names no "title", year'
    assert ">>>" in text, "there is no example"


def test_every_registered_mechanism_is_reachable_by_name():
    """`mechanisms.Sample` and REGISTRY name the same class."""
    for name, path in REGISTRY.items():
        assert getattr(dps.mechanisms, path.partition(":")[2]) is find(name)
        assert dps.mechanisms.name_of(example(name)) == name


def test_the_independent_ledger_catches_overspend():
    """Control: one charge too many inside a window is seen, one step later it is not."""
    half = Fraction(1, 2)
    inside = [("cells", 0, 0, None, half), ("cells", 3, 3, None, half), ("cells", 4, 4, None, half)]
    outside = [*inside[:2], ("cells", 5, 5, None, half)]

    assert worst_loss(inside, 5) == Fraction(3, 2)
    assert worst_loss(outside, 5) == 1
    assert isinstance(example("sample"), HistogramMechanism)


@every_mechanism
def test_a_mechanism_says_whether_it_publishes_a_deviation(name):
    """The tables of the docs and the page repeat what it says; a release has one, or none has."""
    mechanism = example(name)
    series = dps.release(mechanism, stream(mechanism, 12), secret=SECRET, run_id=RUN)

    assert (~np.isnan(series.stddev)).all() == mechanism.publishes_stddev
    assert np.isnan(series.stddev).all() != mechanism.publishes_stddev
