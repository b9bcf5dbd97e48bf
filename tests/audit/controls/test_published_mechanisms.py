"""Published forms: the ledger, or an exact loss, shows what each spends beyond its claim."""

import functools
from fractions import Fraction

import numpy as np
import pytest

import dpstream as dps
from dpstream import Ledger, Runner, Terms
from dpstream.audit.controls import published_mechanisms
from dpstream.audit.controls.published_mechanisms import (
    AdaPubPublished,
    ColumnsApart,
    DsatPublished,
    PegasusWPublished,
    SpasPublished,
    grouping_loss,
    path_loss,
    svt_loss,
)
from dpstream.errors import BudgetExceeded
from dpstream.mechanisms import (
    REGISTRY,
    AdaPub,
    BudgetAbsorption,
    BudgetDistribution,
    Dsat,
    FastW,
    PegasusW,
    Spas,
)
from dpstream.mechanisms.parts.above_threshold import split
from tests.support.fixed import RUN, SECRET

WINDOW = 20
RNG = np.random.default_rng(5)
COUNTS = RNG.integers(0, 400, (200, 40)) * (RNG.random((200, 40)) < np.linspace(0.1, 1, 40))
FORMS = {
    "dsat": (Dsat, DsatPublished),
    "pegasus_w": (PegasusW, PegasusWPublished),
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
    assert spent(PegasusWPublished, total=100) == pytest.approx(6 / 5)
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


def busy(steps, bins=1):
    """A stream that jumps every ten steps."""
    level = np.where(np.arange(steps) // 10 % 2, 4000, 100)[:, None]
    return np.repeat(level, bins, axis=1)


def test_controls_are_not_offered():
    """No registered name leads to a control."""
    assert not any("controls" in path for path in REGISTRY.values())


@pytest.mark.parametrize("window", [30, 40, 50])
def test_the_ledger_refuses_published_spas(window):
    """Its warm-up, its lasting run and its positives do not fit; the sound form does."""
    data = busy(400)
    with pytest.raises(BudgetExceeded):
        dps.release(SpasPublished(epsilon=1, window=window), data, secret=SECRET, run_id=RUN)

    dps.release(Spas(epsilon=1, window=window), data, secret=SECRET, run_id=RUN)


def test_one_rho_for_ever_loses_more_than_was_claimed():
    """Outcomes outside the window pin rho down; then every test inside it costs by itself."""
    window, epsilon_s, threshold = 120, 0.25, 400.0
    before = [True, False] * 200  # one test near the threshold in each of 400 earlier windows
    unchanged = [threshold] * len(before)
    published = svt_loss(
        [*unchanged, *([threshold] * window)],
        [*unchanged, *([threshold + 1] * window)],
        [*before, *([False] * window)],
        threshold=threshold,
        rho_scale=2 / epsilon_s,
        nu_scale=4 / epsilon_s,
    )

    assert published > 1 > epsilon_s  # beyond epsilon, let alone the tests' share of it


def test_a_sound_run_loses_no_more_than_its_budget():
    """The same changed window within one fresh run; changes may go either way."""
    window, budget = 120, 0.25
    e1, e2 = (float(part) for part in split(dps.mechanisms.base.exact(budget)))
    rng = np.random.default_rng(5)
    for last in (False, True):
        for _ in range(20):
            distances = rng.integers(0, 40, window).astype(float)
            neighbour = distances + rng.integers(-1, 2, window)
            outcomes = [False] * (window - 1) + [last]
            scales = {"rho_scale": 1 / e1, "nu_scale": 2 / e2}
            loss = svt_loss(distances, neighbour, outcomes, threshold=20, **scales)
            assert abs(loss) <= budget


def test_printed_dpi_loses_more_than_epsilon():
    """A user who decides every slot: the exact loss of one path, on sums and on means of scores."""
    budgets = [Fraction(1, t * (t + 1)) for t in range(1, 201)]  # below 1 for ever
    floats = [float(budget) for budget in budgets]
    printed, sound = (path_loss(floats, printed=form) for form in (True, False))

    at_most = sum(t * budget for t, budget in enumerate(budgets, start=1))
    assert sound <= 1 < 4 < printed <= float(at_most)
    assert printed > path_loss(floats[:100], printed=True) + 0.5  # and it never stops growing
    assert sound > 0.95  # the bound of the sound form is reached


def test_grouping_loses_more_than_it_claims():
    """An exact loss above eps_g for the printed noise; twice the noise (the sound form) holds."""
    ones = [0.0] * 73 + [1.0] * 26
    stream, neighbour = [0.0, *ones], [1.0, *ones]

    printed = grouping_loss(stream, neighbour, epsilon=0.01, theta=3.0)
    doubled = grouping_loss(stream, neighbour, epsilon=0.005, theta=3.0)

    assert 1.06 < abs(printed) / 0.01 < 1.09
    assert abs(doubled) / 0.01 < 0.55


def test_a_deviation_moves_by_more_than_delta():
    """One of ten values moved by 1: 1.8."""
    moved = published_mechanisms._deviation([0.0] * 9 + [1.0]) - published_mechanisms._deviation(
        [0.0] * 10
    )

    assert moved == pytest.approx(2 * (1 - 1 / 10))
