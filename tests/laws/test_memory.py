"""What a mechanism's state tells beyond its releases: declared by each, measured here, tabled."""

import re
from pathlib import Path

import numpy as np
import pytest

import dpstream as dps
from dpstream.audit.replay import Recorder, spend_on
from dpstream.mechanisms import find
from dpstream.mechanisms.base import HistogramMechanism
from dpstream.mechanisms.w_event.sample import Sample
from dpstream.privacy.ledger.charges import Interval, Paid
from dpstream.privacy.state import pack
from tests.laws.cases import NAMES, example, stream
from tests.support.fixed import RUN, SECRET

STEPS = 40
PAGE = Path(dps.__file__).parents[2] / "docs/soundness/pan_privacy.md"


def states(mechanism, block, spend):
    """The state's bytes after every step, and what was released."""
    state, packed, released = mechanism.start(), [], []
    for step, row in enumerate(block):
        spend.begin(step)
        state, releases = mechanism.step(state, row, spend)
        packed.append(pack(state, kind="mechanism state"))
        released += releases
    return packed, released


class FromReleases:
    """Answers every question from what was published: no noisy answer of the run is known."""

    def __init__(self, released):
        self.released, self.step = {r.step: r for r in released}, -1

    def begin(self, step):
        self.step = step

    def laplace(self, value, *, purpose, **_):
        release = self.released[self.step]
        if purpose == "publish":
            return np.resize(release.values.astype(np.int64), np.shape(value))
        return np.full(np.shape(value), 10**9 if release.paid else -(10**9))


def measured(mechanism):
    """Which of the four words of `Remembers` fits."""
    block = stream(mechanism, STEPS)
    other = stream(mechanism, STEPS, seed=5)[::-1].copy()
    recorder = Recorder(spend_on(mechanism.terms(), secret=SECRET, run=RUN))
    here, released = states(mechanism, block, recorder)
    there, _ = states(mechanism, other, Recorder(script=recorder.calls))
    if here != there:
        return "data"
    if any(isinstance(call.interval, Interval | Paid) for call in recorder.calls):
        return "thresholds"
    if {call.kind for call in recorder.calls} != {"laplace"}:
        return "answers"
    zeros = np.zeros_like(block)
    return "releases" if states(mechanism, zeros, FromReleases(released))[0] == here else "answers"


@pytest.mark.parametrize("name", NAMES)
def test_a_state_is_made_of_what_the_mechanism_says(name):
    """Bytes of the state after each of 40 steps: from releases alone, from paid answers, or not."""
    mechanism = example(name)

    assert measured(mechanism) == mechanism.remembers


def test_the_memory_law_catches_a_kept_count():
    """Control: a mechanism that publishes what Sample does and keeps the last exact counts."""

    class Keeping(Sample, identity="test keeping"):
        def step(self, state, x, spend):
            state, releases = super().step(state, x, spend)
            object.__setattr__(state, "held", state.held + 0 * x)  # allowed: the same values
            return (state, x), releases

        def start(self):
            return (Sample.start(self), np.zeros(3, np.int64))

    class Unpacking(Keeping, identity="test unpacking"):
        def step(self, state, x, spend):
            return Keeping.step(self, state[0], x, spend)

    assert measured(Unpacking(epsilon=1, window=5)) == "data"


def test_the_page_says_what_each_mechanism_remembers():
    """The table in the proof names every registered mechanism once, under its own word."""
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", PAGE.read_text("utf-8"), re.M)
    said = {word: re.findall(r"`(\w+)`", names) for word, names in rows}
    named = sorted(name for names in said.values() for name in names)

    assert named == NAMES
    assert all(find(name).remembers == word for word, names in said.items() for name in names)


def test_a_pan_private_run_takes_what_remembers_answers_and_nothing_else():
    """Of the mechanisms over counts: the others are refused by name of what fits."""
    for name in NAMES:
        mechanism = example(name)
        fits = isinstance(mechanism, HistogramMechanism) and mechanism.remembers in (
            "releases",
            "answers",
        )
        if fits:
            dps.PanPrivateRunner(mechanism, bins=3).close()
        else:
            with pytest.raises(dps.DpstreamError, match="budget_absorption"):
                dps.PanPrivateRunner(mechanism, bins=3)
