"""Noise itself and every mechanism, as the audit attacks them: what is shipped, what is broken.

A registered mechanism is audited with its family's parameters. DPI has rows of its own, with users
who decide slots: in its own draws, with several queries, and from rows. The hard pair: all others
have one row in the last bin, and the user has so many in the first that every slot's distribution
moves from one end to the other, by the whole of what is declared. Few large budgets come first
(`in_order`, `telescoping`), and the public pool is one in which a single synopsis fits the user and
the others fit everybody else: where it is chosen, a slot loses nearly all of its budget. A stream
in which budgets are small and many, or scores barely move, hides that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

import numpy as np

from dpstream.audit.controls.broken_noise import (
    RatchetedNoise,
    RedrawnNoise,
    ReusedNoise,
    SharedNoise,
    ShortBudgetWindow,
    SparseVector,
    UnitColumnNorm,
)
from dpstream.audit.controls.published_mechanisms import (
    THETA,
    DpiGapsOfData,
    DpiPublished,
    grouping_loss,
    path_loss,
    svt_loss,
    trajectory_loss,
)
from dpstream.audit.mechanism_samplers import (
    RunsAsBins,
    RunsWithLooks,
    Sampler,
    SequentialRuns,
    unlimited_spend,
    worst_choices_loss,
)
from dpstream.audit.targets import Catalogue, Exact, Maker, Pair, Target, block, by_name, target
from dpstream.mechanisms import REGISTRY, find
from dpstream.mechanisms.base import Delayed, HistogramMechanism, Mechanism, SeriesMechanism
from dpstream.mechanisms.counters.factorised_counter import CounterMechanism, CountingParameters
from dpstream.mechanisms.infinite.dpi import Dpi
from dpstream.mechanisms.release import bounded_counts
from dpstream.mechanisms.w_event.budget_absorption import BudgetAbsorption
from dpstream.mechanisms.w_event.sample import Sample
from dpstream.mechanisms.w_event.uniform import Uniform
from dpstream.privacy.accounting.curves import zcdp_epsilon
from dpstream.records import Integers, Reals

EPSILON, WINDOW, DELAY, DELTA = 2, 3, 3, 0.01
RHO = Fraction(1, 2)
LO, HI = 0, 8
_MILLION = 10**6
_HIGH = 400  # far beyond any noise: who compares, sees a change
LARGE_EPSILON = 6
"""A budget that several draws share shows only if it is large."""
SLOTS = 4
_IN_RHO: dict[str, Any] = {"epsilon": zcdp_epsilon(rho=float(RHO), delta=DELTA), "delta": DELTA}

HARD_DPI: dict[str, Any] = {
    "pool": "dirichlet",
    "pool_size": 4,
    "seed": 9,
    "allocation": "in_order",
    "series": "telescoping",
    "error_bound": Fraction(1, 2),
    "overfitting_bound": Fraction(1, 2),
}
"""Parameters of a DPI that has much to lose; the seed was looked for."""

EXTRA: dict[str, dict[str, Any]] = {
    "adapub": {"pivots": 2},
    "contin_group": {"threshold": 2},
    "discontin_group": {"threshold": 2},
    "buc_order": {"bucket": 2},
    "sensitivity_truncation": {"options": (("threshold", 2),), "every": 2},
    "dpi": HARD_DPI,
    "unbounded_counter": {"epochs": ((4, 0.3, 0.144502, 0.603162), (8, 0.3, 0.144502, 0.603162))},
}
"""What a mechanism needs beside its family's parameters."""

SIMPLE = ("uniform", "sample", "naive")
BINS_APART = (
    *SIMPLE,
    "pegasus_w",
    "pegasus",
    "pegasus_delay",
    "contin_group",
    "discontin_group",
    "comp_order",
    "buc_order",
    "block_smoother",
)
"""Mechanisms, beside the counters, that treat every bin by itself: see `RunsAsBins`."""

_MANY, _SLOW = (24_000, 200_000), (1_200, 8_000)
_USERS, _APART = (3_000, 20_000), (16_000, 100_000)

WORST: dict[str, str] = {
    "uniform": "flat counts, steps 3 to 5, one bin",
    "sample": "jumping counts, steps 0 to 2, the low bin",
    "budget_distribution": "jumping counts, steps 0 to 2, one bin",
    "budget_absorption": "random counts 0",
    "spas": "jumping counts, steps 0 to 2, another bin each step",
    "pacer": "random counts 1",
    "fast_w": "flat counts, steps 0 to 2, one bin",
    "rescue_dp": "jumping counts, steps 0 to 2, another bin each step",
    "dsat": "flat counts, steps 0 to 2, another bin each step",
    "dsft": "random counts 3",
    "pegasus_w": "jumping counts, steps 0 to 2, the low bin",
    "adapub": "random counts 0",
    "naive": "all at the lower end, step 1 from 0 to 8",
}
"""The pair that full audits found worst: the one that a quick audit tries."""


def example(name: str) -> Mechanism:
    """A registered mechanism with small parameters."""
    cls: type[Any] = find(name)
    family: dict[str, Any] = {"epsilon": EPSILON}
    if issubclass(cls, HistogramMechanism):
        family |= {"window": WINDOW}
    elif issubclass(cls, SeriesMechanism):
        family |= {"lo": LO, "hi": HI}
        if "delay" in {field.name for field in fields(cls)}:
            family["delay"] = DELAY
    elif issubclass(cls, CountingParameters):
        family = {"rho": RHO}
        if issubclass(cls, CounterMechanism):
            family["steps"] = 8
    mechanism: Mechanism = cls(**(family | EXTRA.get(name, {})))
    return mechanism


def pairs_of(mechanism: Mechanism) -> list[Pair]:
    """Pairs for a mechanism's family and unit: the worst that theory knows, then random ones."""
    random, rng = 4, np.random.default_rng(0)
    if isinstance(mechanism, HistogramMechanism):
        return [*_window_pairs(mechanism.window), *_random_windows(mechanism.window, random, rng)]
    if isinstance(mechanism, CountingParameters):
        return [*_impulses(random, rng)]
    if isinstance(mechanism, SeriesMechanism):
        lo, hi, quantum = mechanism.range
        delay = mechanism.delay if isinstance(mechanism, Delayed) else 2
        return [*_values(int(lo / quantum), int(hi / quantum), delay, random, rng)]
    if mechanism.terms().unit == "user":
        return [dominating_user(), user_in_every_slot(4, (0, 1))]
    raise TypeError(f"no neighbours are known for {type(mechanism).__name__}; give pairs")


def _window_pairs(window: int) -> Iterator[Pair]:
    """An event in each of `window` steps: always in one bin, or moving; early, or late."""
    steps = 2 * window
    jumps = np.where(np.arange(steps)[:, None] % 2 == 0, (0, _HIGH), (_HIGH, 0))
    flat = np.full((steps, 2), 20)
    for base_name, base in (("jumping", jumps), ("flat", flat)):
        for start in (0, window):
            inside = np.arange(start, start + window)
            same, moving, apart = base.copy(), base.copy(), base.copy()
            same[inside, 0] += 1
            moving[inside, inside % 2] += 1
            apart[inside] += np.where(base[inside] == 0, 1, 0)  # where a jump has just gone to 0
            when = f"{base_name} counts, steps {start} to {start + window - 1}"
            yield Pair(name=f"{when}, one bin", one=base, two=same)
            yield Pair(name=f"{when}, another bin each step", one=base, two=moving)
            if base_name == "jumping":
                yield Pair(name=f"{when}, the low bin", one=base, two=apart)


def _random_windows(window: int, count: int, rng: np.random.Generator) -> Iterator[Pair]:
    for number in range(count):
        steps = 2 * window
        level = rng.choice([0, 3, 30, _HIGH], size=(steps, 2))
        base = rng.poisson(level)
        other, start = base.copy(), int(rng.integers(0, steps - window + 1))
        for step in range(start, start + window):
            bin_, sign = int(rng.integers(0, 2)), int(rng.choice([-1, 1]))
            other[step, bin_] += sign if other[step, bin_] + sign >= 0 else 1
        yield Pair(name=f"random counts {number}", one=base, two=other)


def _impulses(count: int, rng: np.random.Generator) -> Iterator[Pair]:
    """One event more: at the first step, which every prefix sum contains, or somewhere."""
    for number, at in enumerate([0, *(int(n) for n in rng.integers(1, 8, count))]):
        base = rng.poisson(3, size=(8, 1))
        other = base.copy()
        other[at, 0] += 1
        yield Pair(name=f"one event at step {at} ({number})", one=base, two=other)


def _values(lo: int, hi: int, delay: int, count: int, rng: np.random.Generator) -> Iterator[Pair]:
    """One value moved across the range: among equal ones, among extremes, or random ones."""
    steps, middle = 2 * delay, (lo + hi) // 2
    ends = np.where(np.arange(steps) % 2 == 0, lo, hi)[:, None]
    cases = [
        (f"{name}, step {at} from {lo} to {hi}", base, at)
        for name, base in (
            ("all at the lower end", np.full((steps, 1), lo)),
            ("all in the middle", np.full((steps, 1), middle)),
            ("from end to end", ends),
        )
        for at in sorted({0, delay - 1})
    ]
    for number in range(count):
        base, at = rng.integers(lo, hi + 1, size=(steps, 1)), int(rng.integers(0, steps))
        cases.append((f"random values {number}, step {at}", base, at))
    for name, base, at in cases:
        low, high = base.copy(), base.copy()
        low[at, 0], high[at, 0] = lo, hi
        yield Pair(name=name, one=low, two=high)


def dominating_user(slots: int = 4) -> Pair:
    """A user with nearly all rows of every slot, against one row of somebody else."""
    return _user_in_slots(f"a user who decides each of {slots} slots", slots, (0, 1), _MILLION)


def user_in_every_slot(slots: int = 200, others: tuple[int, int] = (0, 0)) -> Pair:
    """All rows of a user come or go: one in each slot, beside the same others in each."""
    name = f"a user in each of {slots} slots, beside {sum(others)} others"
    return _user_in_slots(name, slots, others, 1)


def _user_in_slots(name: str, slots: int, others: tuple[int, int], rows: int) -> Pair:
    without = np.tile(others, (slots, 1))
    return Pair(name=name, one=without + np.array([rows, 0]), two=without)


def mechanism_target(name: str) -> Target:
    """One registered mechanism against its own terms."""
    mechanism = example(name)
    counts = isinstance(mechanism, CountingParameters)
    apart, simple = counts or name in BINS_APART, counts or name in SIMPLE
    users = mechanism.terms().unit == "user"
    first, *_ = (type(mechanism).__doc__ or name).splitlines()
    return Target(
        name=name,
        about=first,
        sample=RunsAsBins(mechanism=mechanism) if apart else SequentialRuns(mechanism=mechanism),
        pairs=tuple(sorted(pairs_of(mechanism), key=lambda pair: pair.name != WORST.get(name))),
        simple=simple,
        runs=_MANY if simple else _APART if apart else _USERS if users else _SLOW,
        **_IN_RHO if counts else {"epsilon": float(EPSILON)},
    )


def _one_draw(kind: str, **law: Any) -> Sampler:
    """As many draws of one kind as there are runs, straight from `Spend`, at one step."""

    def sample(data: Integers, runs: int, secret: bytes) -> Reals:
        spend = unlimited_spend(secret, "rho" if "rho" in law else "epsilon")
        spend.begin(0, lambda _: "")
        answers = getattr(spend, kind)(np.repeat(data[:1], runs, axis=0), purpose="audit", **law)
        return np.asarray(answers, dtype=np.float64)

    return sample


def _choose(data: Integers, runs: int, secret: bytes) -> Reals:
    """A choice has a step of its own: it is one answer to all scores."""
    spend, chosen, unit = unlimited_spend(secret), np.empty((runs, 1)), Fraction(1)
    for run in range(runs):
        spend.begin(run, lambda _: "")
        chosen[run] = spend.choose(data[0], sensitivity=unit, epsilon=unit, purpose="audit")
    return chosen


def draw_targets() -> Catalogue:
    """The four draws that everything else is made of, straight from `Spend`."""
    unit, another_bucket = Fraction(1), Pair(name="another bucket", one=block([0]), two=block([3]))
    one_more = Pair(name="one more", one=block([5]), two=block([6]))
    scores = Pair(name="scores part", one=block([5, 4, 4]), two=block([4, 5, 5]))

    def draw(sample: Sampler, pair: Pair, **facts: Any) -> Maker:
        about = "One draw of `Spend`, the only way to noise."
        usual: dict[str, Any] = {"epsilon": 1.0, "runs": _MANY, "simple": True}
        return target(about, sample, pair, **usual | facts)

    return by_name(
        laplace=draw(_one_draw("laplace", sensitivity=unit, epsilon=unit), one_more),
        gaussian=draw(_one_draw("gaussian", sensitivity=unit, rho=RHO), one_more, **_IN_RHO),
        randomised_response=draw(_one_draw("respond", buckets=4, epsilon=unit), another_bucket),
        choice=draw(_choose, scores, runs=(4_000, 40_000)),
    )


_IN_EVERY_SLOT = user_in_every_slot()


def _dpi_loss() -> float:
    """Over 200 slots, so many that runs show nothing; budgets in any order, one row of a user."""
    mechanism = Dpi(epsilon=EPSILON, rows_per_user=1, pool_size=20, allocation="ranges")
    return worst_choices_loss(mechanism, _IN_EVERY_SLOT.one, _IN_EVERY_SLOT.two)


@dataclass(frozen=True, kw_only=True)
class UserRows:
    """In each slot: rows of one user in the first bin, and one row of each other in the last."""

    unit: int
    """How many rows the user has in a slot."""
    others: int

    def facts(self) -> dict[str, int]:
        """For a report."""
        return {"unit": self.unit, "others": self.others, "slots": SLOTS}

    def columns(self) -> dict[str, Integers]:
        """One entry a row; user 0 is the target."""
        users = np.concatenate([np.zeros(self.unit, np.int64), 1 + np.arange(self.others)])
        everywhere = np.tile(users, SLOTS)
        steps = np.repeat(np.arange(SLOTS), len(users))
        return {"steps": steps, "users": everywhere, "bins": (everywhere > 0).astype(np.int64)}


@dataclass(frozen=True, kw_only=True)
class RunsFromRows:
    """Rows of users to counts to releases; `bounded`: as many rows a slot as was declared."""

    mechanism: Dpi
    bounded: bool = True

    def __call__(self, data: UserRows, runs: int, secret: bytes) -> Reals:
        """As `SequentialRuns`, over what the bound leaves of the rows."""
        most = self.mechanism.rows_per_user if self.bounded else None
        limit = data.unit + data.others if most is None else most
        counts = bounded_counts(**data.columns(), slots=SLOTS, domain=2, rows_per_user=limit)
        return SequentialRuns(mechanism=self.mechanism)(counts, runs, secret)


_LINEAR = HARD_DPI | {"error_bound": 0, "overfitting_bound": 2}  # a score that moves everywhere
_ADAPTIVE = HARD_DPI | {
    "allocation": "adaptive", "series": "level", "gap": 1, "publish": "synopsis"
}  # fmt: skip
_TWO_QUERIES = Dpi(epsilon=LARGE_EPSILON, queries=(2, (1, 0)), **HARD_DPI)


def _from_rows(epsilon: int) -> Dpi:
    return Dpi(epsilon=epsilon, rows_per_user=1, dummy_rows=9, **_LINEAR)


def _counts_of_slots(epsilon: Fraction) -> Dpi:
    return Dpi(epsilon=epsilon, rows_per_user=1, gap=1, publish="histogram")


_IN_FIRST_SLOTS = _user_in_slots("a row in each of 3 slots", 3, (40, 2_000), 1)
_TWENTY_IN_FIRST_SLOTS = _user_in_slots("20 rows in each of 3 slots", 3, (40, 2_000), 20)


def _user(others: int) -> Pair:
    """Nobody else moves the distribution most within the bound, many others most without it."""
    return Pair(
        name=f"a user with 2,000 rows a slot, beside {others} others",
        one=UserRows(unit=2_000, others=others),
        two=UserRows(unit=0, others=others),
    )


def mechanism_targets() -> Catalogue:
    """The draws, all registered mechanisms, and DPI where it looks back and from rows."""
    large: dict[str, Any] = {"epsilon": float(LARGE_EPSILON), "runs": _USERS}
    return draw_targets() | by_name(
        **dict.fromkeys(REGISTRY, mechanism_target),
        dpi_exactly=_exact(
            "DPI: the worst path of choices over all slots, computed.",
            _dpi_loss,
            f"{_IN_EVERY_SLOT.name}; the choices that they make likelier, in every slot",
            epsilon=float(EPSILON),
            control=False,
        ),
        dpi_queries=target(
            "DPI with two queries: what was chosen steers the next draw.",
            SequentialRuns(mechanism=_TWO_QUERIES),
            dominating_user(),
            **large,
        ),
        dpi_adaptive=target(
            "DPI that publishes sooner where its releases moved: each draw, and when it was.",
            SequentialRuns(mechanism=Dpi(epsilon=LARGE_EPSILON, **_ADAPTIVE)),
            dominating_user(8),
            **large,
        ),
        dpi_histogram=target(
            "DPI that publishes noisy counts of few slots, a row of a user in each.",
            SequentialRuns(mechanism=_counts_of_slots(Fraction(2))),
            _IN_FIRST_SLOTS,
            epsilon=2.0,
            runs=(1_000, 10_000),
        ),
        dpi_rows=target(
            "DPI from rows: one of a user a slot, nine dummy rows.",
            RunsFromRows(mechanism=_from_rows(LARGE_EPSILON)),
            _user(0),
            **large,
        ),
        pan_private=target(
            "Counting under noise, one look at a held step: epsilon and the intrusion.",
            _looked_at(Fraction(1)),
            _LOOK,
            epsilon=2.0,
            runs=_MANY,
            simple=True,
        ),
        pan_private_absorption=target(
            "Budget absorption that counts under noise, one look in the middle.",
            RunsWithLooks(
                mechanism=BudgetAbsorption(epsilon=2, window=3), intrusion=Fraction(2), steps=(1,)
            ),
            _JUMPS_LOOKED_AT,
            epsilon=4.0,
            runs=_SLOW,
        ),
        pan_private_announced=target(
            "Counting under noise, looks at two held steps, the first announced.",
            RunsWithLooks(
                mechanism=Sample(epsilon=1, window=3),
                intrusion=Fraction(1, 2),
                steps=(1, 2),
                apart=True,
            ),
            _TWO_LOOKS,
            epsilon=2.0,
            runs=_MANY,
            simple=True,
        ),
    )


_LOOK = Pair(
    name="one event at the paid step, one before the look at the held one",
    one=block([5], [0], [5], [0]),
    two=block([6], [0], [6], [0]),
)
_JUMPS_LOOKED_AT = Pair(
    name="an event in each of 3 steps of jumping counts, before the look at the middle one",
    one=block([0], [0], [_HIGH], [0], [0], [0]),
    two=block([1], [0], [_HIGH + 1], [0], [1], [0]),
)


_TWO_LOOKS = Pair(
    name="an event in each of 3 steps, in the held ones before the looks",
    one=block([5], [0], [5], [0], [5], [0]),
    two=block([6], [0], [6], [0], [6], [0]),
)


def _looked_at(intrusion: Fraction | None) -> RunsWithLooks:
    """Sample with epsilon = 1, whose held step is looked at."""
    mechanism = Sample(epsilon=1, window=2)
    return RunsWithLooks(mechanism=mechanism, intrusion=intrusion, steps=(1,), apart=True)


def _not_covered(spend: Any, counts: Any, intrusion: Any, paid: Any) -> Any:
    """An announced look after which counts go on as they were seen."""
    return counts


_ONE_MORE = Pair(name="one event", one=block([5]), two=block([6]))
_UNIFORM = Uniform(epsilon=1, window=1)


def _spas_loss() -> float:
    """One test near the threshold in each of 400 earlier windows, then a changed window."""
    window, share, at = 120, 0.25, 400.0
    before = [True, False] * 200
    return svt_loss(
        [at] * (len(before) + window),
        [*[at] * len(before), *[at + 1] * window],
        [*before, *[False] * window],
        threshold=at,
        rho_scale=2 / share,
        nu_scale=4 / share,
    )


def _contin_group_loss() -> float:
    """The tests' loss, and the noise on the sum, which is drawn apart: eps_p = 4 eps_g."""
    rest, share = [0.0] * 73 + [1.0] * 26, 0.01
    tests = grouping_loss([0.0, *rest], [1.0, *rest], epsilon=share, theta=THETA)
    return 4 * share + abs(tests)


def _sparse_vector(version: int, one: list[int], two: list[int], **facts: Any) -> Maker:
    sound = version in (1, 2)
    about = f"Sparse vector technique, version {version} of Lyu, Su, Li (2017)"
    return target(
        f"{about}, {'sound' if sound else 'broken'}.",
        SparseVector(version=version, count=facts.pop("count", 1)),
        Pair(name="queries part", one=block(*one), two=block(*two)),
        **{"epsilon": 1.0, "control": not sound, "runs": (20_000, 100_000)} | facts,
    )


def _control(about: str, sample: Sampler, pair: Pair = _ONE_MORE, **facts: Any) -> Maker:
    usual: dict[str, Any] = {"epsilon": 1.0, "runs": (8_000, 40_000), "control": True}
    return target(about, sample, pair, **usual | facts)


def _exact(about: str, loss: Callable[[], float], witness: str, **facts: Any) -> Maker:
    facts = {"epsilon": 1.0} | facts
    return lambda name: Exact(name=name, about=about, loss=loss, witness=witness, **facts)


def mechanism_controls() -> Catalogue:
    """Mechanisms that lose more than they claim, several of them as published."""
    jumps = np.where(np.arange(20)[:, None] % 2 == 0, 0, 10_000)
    impulse = Pair(name="one event at step 0", one=block(*[3] * 80), two=block(4, *[3] * 79))
    gaussian = {"epsilon": zcdp_epsilon(rho=float(RHO), delta=0.1), "delta": 0.1}
    sparse_dpi = HARD_DPI | {"series": "level", "allocation": "sparse"}
    return by_name(
        spas_published=_exact(
            "SPAS as printed: one threshold noise for ever (w > 4 C d).",
            _spas_loss,
            "400 tests at the threshold, yes and no in turn; then 120 changed ones, no",
        ),
        shared_noise=_control(
            "One draw for all bins of a step.",
            SequentialRuns(mechanism=SharedNoise(epsilon=1, window=1)),
            Pair(name="one event", one=block([5, 9]), two=block([5, 10])),
            runs=(2_000, 10_000),
        ),
        noise_redrawn_on_replay=_control(
            "Every restart publishes another noisy copy: 24 of them.",
            RedrawnNoise(mechanism=_UNIFORM, starts=24),
        ),
        same_noise_other_data=_control(
            "One noise over two datasets, of which one is known.",
            ReusedNoise(mechanism=_UNIFORM),
        ),
        exact_count_in_memory=_control(
            "One look at a step whose count is exact.",
            _looked_at(None),
            _LOOK,
            runs=(2_000, 10_000),
        ),
        intrusion_not_charged=_control(
            "Counting under noise, with the look's own cost left out of the claim.",
            _looked_at(Fraction(1)),
            _LOOK,
            runs=_MANY,
        ),
        announced_without_new_noise=_control(
            "Two looks at a running step, the first announced, and no new noise in between.",
            RunsWithLooks(
                mechanism=_UNIFORM,
                intrusion=Fraction(1),
                steps=(0,),
                twice=True,
                cover=_not_covered,
                apart=True,
            ),
            Pair(
                name="one event between the looks",
                one=block([5], [0], [0]),
                two=block([5], [1], [0]),
            ),
            epsilon=2.0,
            runs=(2_000, 10_000),
        ),
        noise_ratchet=_control(
            "Counting under noise whose next key follows from the one in memory.",
            RatchetedNoise(mechanism=_UNIFORM),
            Pair(name="one event after the look", one=block([5], [0]), two=block([5], [1])),
            epsilon=2.0,
            runs=(150, 1_000),
        ),
        budget_forgotten=_control(
            "Budget distribution that forgets a charge inside its window.",
            SequentialRuns(mechanism=ShortBudgetWindow(epsilon=2, window=20)),
            Pair(name="an event in every step of jumping counts", one=jumps, two=jumps + 1),
            epsilon=2.0,
            runs=(1_600, 10_000),
        ),
        column_groups_apart=_exact(
            "Groups of columns with a budget each: 12 of them, w = 12.",
            lambda: trajectory_loss(12, 12),
            "each column publishes in its turn, and the events are always there",
        ),
        blt_wrong_norm=_control(
            "A BLT counter with noise for a column norm of 1.",
            RunsAsBins(mechanism=UnitColumnNorm(rho=RHO, steps=80)),
            impulse,
            runs=(10_000, 40_000),
            **gaussian,
        ),
        contin_group_printed=_exact(
            "ContinGroup at the printed scale: a fifth of epsilon for its tests.",
            _contin_group_loss,
            "the first of 100 values 0 or 1, then 73 zeros, 26 ones: all but the last join",
            epsilon=0.05,
        ),
        dpi_summed_score=_exact(
            "DPI as printed: scores summed over all slots, charged as one.",
            lambda: path_loss([1 / (t * (t + 1)) for t in range(1, 201)], printed=True),
            "the synopsis that a user in each of 200 slots fits is drawn in every slot",
        ),
        svt_1=_sparse_vector(1, [0] * 4 + [1], [1] * 4 + [0]),
        svt_2=_sparse_vector(2, [0] * 4 + [1], [1] * 4 + [0]),
        svt_3=_sparse_vector(3, [-1] * 8 + [2], [0] * 8 + [3], runs=(160_000, 400_000)),
        svt_4=_sparse_vector(4, [1, 0] * 10, [0, 1] * 10, count=20),
        svt_5=_sparse_vector(5, [0, 1], [1, 0]),
        svt_6=_sparse_vector(6, [0] * 10 + [1] * 10, [1] * 10 + [0] * 10),
        dpi_charged_once=_control(
            "DPI as printed, sampled: scores summed over 64 slots, charged as those of one.",
            SequentialRuns(mechanism=DpiPublished(epsilon=1, **sparse_dpi)),
            dominating_user(64),
            runs=(150, 1_000),
        ),
        dpi_gaps_of_data=_control(
            "DPI that publishes sooner where the counts moved: when it does tells of them.",
            SequentialRuns(mechanism=DpiGapsOfData(epsilon=1, **_ADAPTIVE)),
            dominating_user(8),
            runs=(150, 1_000),
        ),
        dpi_histogram_unbounded=_control(
            "DPI that publishes noisy counts, charged for a row a slot and given twenty.",
            SequentialRuns(mechanism=_counts_of_slots(Fraction(1))),
            _TWENTY_IN_FIRST_SLOTS,
            runs=(400, 2_000),
        ),
        dpi_rows_unbounded=_control(
            "DPI charged for one row of a user a slot, and given all of them.",
            RunsFromRows(mechanism=_from_rows(EPSILON), bounded=False),
            _user(100),
            epsilon=float(EPSILON),
            runs=(2_000, 10_000),
        ),
    )
