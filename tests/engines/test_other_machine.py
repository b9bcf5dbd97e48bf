"""A state goes on where counters that are optimised on the spot would come out otherwise."""

import numpy as np
import pytest

import dpstream as dps
from dpstream.counting import buffered
from dpstream.errors import StateError
from dpstream.mechanisms import BltCounter
from dpstream.query import noise_plan
from tests.support.fixed import SECRET
from tests.support.lost_files import Grouped, rows, some

STEPS = 7  # not in the table that is shipped
QUERY = dps.Query(
    name="clicks", privacy_unit_column="user", keys=("page",), public_groups=("/a", "/b", "/c"),
    epsilon=2, delta=1e-6, max_groups_contributed=3, time_column="at", time_unit="s",
    start="1970-01-01", end="1970-01-01T07:00", window=dps.Tumble("7 hours"), every="1 hour",
)  # fmt: skip


class Sevens(Grouped):
    query = QUERY


@pytest.fixture
def other_machine(monkeypatch):
    """What another kind of processor finds: the third digit is another one."""
    optimise = buffered.optimise

    def go():
        def differently(steps, buffers):
            return tuple(decay * 1.003 for decay in optimise(steps, buffers))

        monkeypatch.setattr(buffered, "optimise", differently)
        buffered.decays_for.cache_clear()
        noise_plan._buffered.cache_clear()

    yield go
    buffered.decays_for.cache_clear()
    noise_plan._buffered.cache_clear()


def test_a_query_goes_on_with_the_counters_that_it_began_with(tmp_path, other_machine):
    """They are in its directory, and its noise is calibrated for them."""
    expected = some(Sevens(), tmp_path / "whole", None, 99)
    assert f"{STEPS}/4" not in buffered.shipped_decays()
    shown = some(Sevens(), tmp_path / "state", tmp_path / "book", 3)
    decays = dps.run(QUERY, source=rows(0)).plan.matrices
    other_machine()
    assert dps.run(QUERY, source=rows(0)).plan.matrices != decays
    rest = some(Sevens(), tmp_path / "state", tmp_path / "book", 99)

    assert len(shown | rest) == len(expected) == STEPS
    assert all(rest[key] == shown[key] for key in shown.keys() & rest.keys())


def test_a_counter_goes_on_with_the_decays_that_it_began_with(tmp_path, other_machine):
    """Those that somebody chose are still compared."""
    facts = {"state": tmp_path / "state", "secret": SECRET}
    with dps.Runner(BltCounter(epsilon=1, delta=1e-9, steps=STEPS), **facts) as runner:
        list(runner.feed(np.ones((3, 1))))
        runner.save()
        decays = runner.mechanism.decays
    other_machine()
    counter = BltCounter(epsilon=1, delta=1e-9, steps=STEPS)
    assert counter.decays != decays
    with dps.Runner(counter, **facts) as runner:
        assert runner.mechanism.decays == decays
        assert runner.steps_done == 3
    chosen = tuple(decay * 0.99 for decay in decays)
    with pytest.raises(StateError, match="was made for"):
        dps.Runner(BltCounter(epsilon=1, delta=1e-9, steps=STEPS, decays=chosen), **facts)
