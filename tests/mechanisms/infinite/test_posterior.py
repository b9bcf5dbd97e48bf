"""What draws say of the distribution: Bayes' rule, against sums by hand, and what it gains."""

import numpy as np
import pytest

import dpstream as dps
from dpstream.mechanisms.infinite import posterior as module
from dpstream.mechanisms.infinite.dpi import Dpi, Scoring, posterior_over
from dpstream.mechanisms.infinite.posterior import FADES, Posterior
from dpstream.mechanisms.infinite.synopsis_pool import even, pool
from tests.support.fixed import SECRET

BINS = 12


def over(name="mixed", size=40, bound=0, span=2):
    return posterior_over(
        pool(name, bins=BINS, size=size, seed=1),
        Scoring(error_bound=bound, overfitting_bound=span),
    )


@pytest.mark.parametrize("name", ["mixed", "dirichlet"])
@pytest.mark.parametrize("scale", [0.5, 9.0, 800.0])
@pytest.mark.parametrize("bound", [0, 0.25])
def test_weights_follow_bayes_rule(name, scale, bound):
    """Against the law of the draw, written out for each member and the uniform distribution."""
    given = over(name, bound=bound)
    members = np.array([*(given.pool.pdf(j) for j in range(40)), even(BINS)])
    distance = np.abs(members[:, None] - members[None, :40]).sum(axis=2)
    score = np.clip(1 + bound - distance, -1, 1)
    law = np.exp(scale * (score - score.max(axis=1, keepdims=True)))
    law /= law.sum(axis=1, keepdims=True)  # by member: with which chance each synopsis is drawn
    before = given.start()
    once = given.update(before, 7, scale)
    expected = before * law[:, 7]  # a prior that fades into itself is itself
    again = given.update(once, 3, scale)
    twice = ((1 - FADES) * once + FADES * before) * law[:, 3]

    assert before[-1] == 0.5
    assert before.sum() == pytest.approx(1)
    assert once == pytest.approx(expected / expected.sum(), abs=1e-4)
    assert again == pytest.approx(twice / twice.sum(), abs=1e-4)


def test_a_large_pool_looks_at_some_synopses_only(monkeypatch):
    """The sums over all of them are then nearly those over all."""
    whole, scale = over(size=600), 6.0
    exact = whole.update(whole.start(), 11, scale)
    monkeypatch.setattr(module, "_DRAWS", 200)
    part = Posterior(pool=whole.pool, score=whole.score)
    about = part.update(part.start(), 11, scale)

    assert len(part.scores[0]) == 200
    assert np.abs(about - exact).sum() < 0.1
    assert np.abs(part.mean(about) - whole.mean(exact)).sum() < 0.02


def test_without_evidence_the_uniform_distribution_is_published():
    """Exactly; a draw that tells nothing, and one that names it, change nothing."""
    given = over()
    blind = given.update(given.start(), 7, 1e-9)
    named = given.update(given.start(), 0, 100.0)  # the first of the mixed pool is uniform

    for weights in (given.start(), blind, named):
        assert (given.mean(weights) == even(BINS)).all()


def test_the_mean_is_that_of_the_members_by_weight():
    """By hand, of all that are not nearly uniform."""
    given = over("dirichlet", size=150)
    weights = given.update(given.start(), 1, 20.0)
    members = np.array([given.pool.pdf(j) for j in range(150)])
    apart = weights[:-1] * (np.abs(members - 1 / BINS).sum(axis=1) > 0.2)
    expected = (apart[:, None] * members).sum(axis=0) / apart.sum()

    assert apart.sum() > 0.5
    assert given.mean(weights) == pytest.approx(expected, abs=1e-6)


def test_a_stream_that_is_not_learnt_is_published_as_uniform():
    """Where the drawn synopsis is nearly blind: no bound on rows, and a small epsilon."""
    block = np.random.default_rng(0).poisson(2000 / np.arange(1.0, 21), (80, 20))
    mean, drawn = (
        dps.release(Dpi(epsilon=1, gap=8, publish=which), block, secret=SECRET).values
        for which in ("posterior", "synopsis")
    )

    assert (mean == even(20)).all()
    assert np.abs(drawn - even(20)).sum(axis=1).mean() > 0.3


def test_the_mean_of_what_the_draws_say_is_closer_than_the_last_draw():
    """Over 20 noise seeds, where single draws are noisy."""
    shares = 1 / np.arange(1.0, 21)
    block = np.random.default_rng(1).poisson(10_000 * shares / shares.sum(), (140, 20))
    truth = block / block.sum(axis=1, keepdims=True)
    facts = {"epsilon": "0.3", "rows_per_user": 1, "dummy_rows": 1000, "gap": 8}
    off = {
        which: [
            np.abs(
                dps.release(
                    Dpi(**facts, publish=which), block, secret=bytes([seed] * 32), run_id=bytes(16)
                ).values
                - truth
            )
            .sum(axis=1)
            .mean()
            for seed in range(20)
        ]
        for which in ("posterior", "synopsis")
    }

    assert np.median(off["posterior"]) < 0.6 * np.median(off["synopsis"])
