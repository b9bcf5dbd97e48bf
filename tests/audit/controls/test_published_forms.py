"""The forms as published: the ledger sees what each of them spends beyond its claim."""

import functools
from fractions import Fraction

import numpy as np
import pytest

from dpstream import Ledger, Runner, Terms
from dpstream.audit.controls.columns_apart import ColumnsApart
from dpstream.audit.controls.dsat_published import DsatPublished
from dpstream.audit.controls.grouping_published import AdaPubPublished, PegasusPublished
from dpstream.errors import BudgetExceeded
from dpstream.mechanisms import AdaPub, BudgetAbsorption, BudgetDistribution, Dsat, FastW, PegasusW

WINDOW = 20
RNG = np.random.default_rng(5)
COUNTS = RNG.integers(0, 400, (200, 40)) * (RNG.random((200, 40)) < np.linspace(0.1, 1, 40))
FORMS = {
    "dsat": (Dsat, DsatPublished),
    "pegasus_w": (PegasusW, PegasusPublished),
    "adapub": (AdaPub, AdaPubPublished),
    "fast_w": (FastW, ColumnsApart),
    "column groups of BD": (
        functools.partial(BudgetDistribution, groups=3),
        functools.partial(ColumnsApart, scheme=BudgetDistribution, groups=3),
    ),
    "column groups of BA": (
        functools.partial(BudgetAbsorption, groups=3),
        functools.partial(ColumnsApart, scheme=BudgetAbsorption, groups=3),
    ),
}


def spent(build, *, total):
    """The worst window of a run, in epsilon, under a book that allows `total`."""
    ledger = Ledger()
    ledger.open("stream", Terms(unit="w_event", total=total, window=WINDOW))
    runner = Runner(
        build(epsilon=1, window=WINDOW), ledger=ledger, secret=bytes(32), run_id=bytes(16)
    )
    for _ in runner.feed(COUNTS):
        pass
    return float(Fraction(ledger.report()[0]["spent"]))


@pytest.mark.parametrize("name", FORMS)
def test_the_published_form_is_refused_and_the_sound_one_is_not(name):
    """Both claim epsilon = 1; one of them keeps to it."""
    sound, published = FORMS[name]

    assert spent(sound, total=1) <= 1
    with pytest.raises(BudgetExceeded):
        spent(published, total=1)


def test_what_they_spend_is_what_the_proofs_say():
    """Half of the noise of the tests: 4/5 + 2/5; tests not divided by w: 4/5 + w/5."""
    assert spent(PegasusPublished, total=100) == pytest.approx(6 / 5)
    assert spent(AdaPubPublished, total=100) == pytest.approx(4 / 5 + WINDOW / 5)


def test_columns_apart_draw_noise_of_their_own():
    """The control differs from the sound form in what it charges, not in how good its noise is."""
    ledger = Ledger()
    ledger.open("stream", Terms(unit="w_event", total=100, window=WINDOW))
    equal = np.full((1, 2), 50)
    runner = Runner(
        ColumnsApart(epsilon=Fraction(1, 10), window=WINDOW), ledger=ledger, secret=bytes(32)
    )
    ((release,),) = runner.feed(equal)

    assert release.values[0] != release.values[1]
