"""What DPI's default gains, and the paper's findings about parameters, statistics and losses.

The default over noise seeds, beside the uniform distribution and the best sparse schedule: that
publishes at k slots, evenly spread, with epsilon/k each; k is the one that does best on this very
stream, which only who knows the data can tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, Final

import numpy as np

from benchmarks.dpi_runs import distributions, divergence, mean_squared
from benchmarks.harness import Row, target
from benchmarks.streams import Stream, streams
from dpstream.audit.replay import record, replay
from dpstream.evaluate.trials import fixed_noise
from dpstream.mechanisms import answers
from dpstream.mechanisms.base import Mechanism
from dpstream.mechanisms.infinite.dpi import Dpi, compress_sensitivity
from dpstream.mechanisms.infinite.synopsis_pool import GRID, pool
from dpstream.mechanisms.release import release
from dpstream.mechanisms.w_event.budget_absorption import BudgetAbsorption
from dpstream.mechanisms.w_event.sample import Sample
from dpstream.mechanisms.w_event.uniform import Uniform
from dpstream.records import Reals

DUMMY_ROWS: Final = 1_000
"""A tenth of a public guess of a slot's rows, where bins are few."""

BOUNDED: Final[dict[str, Any]] = {"rows_per_user": 1, "dummy_rows": DUMMY_ROWS}
DEFAULT, LAST_DRAW, COUNTED = "default", "sparse slots, last draw", "noisy histograms"
MOVING: Final = ("moving bump", "t-drive")
"""Streams on which the best sparse schedule is looked for."""

WIDE: Final = 1_000  # bins, from which a stream is one of the large domains
LEAST_CLOSER: Final = 0.8
MOST_TIMES: Final = 2.0
_SCHEDULES: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
_SAME: Final = 1 + 1e-9


def spread_rows(stream: Stream, epsilons: Sequence[float], *, runs: int) -> Iterator[Row]:
    """The default, and the form that publishes the last draw at few slots, over noise seeds."""
    if stream.block is None:
        return
    truth = distributions(stream.block)
    uniform = float(divergence(np.full(truth.shape, 1 / truth.shape[1]), truth).mean())
    dummy = max(DUMMY_ROWS, 100 * truth.shape[1] if truth.shape[1] >= WIDE else 0)
    forms: dict[str, dict[str, Any]] = {
        DEFAULT: {},
        LAST_DRAW: {"allocation": "sparse"},
        COUNTED: {"publish": "histogram"},
    }
    for epsilon in epsilons:
        for name, parameters in forms.items():
            facts: dict[str, Any] = {"rows_per_user": 1, "dummy_rows": dummy} | parameters
            yield (
                {"part": "spread", "stream": stream.name, "epsilon": epsilon, "form": name}
                | {"runs": runs, "uniform_kl": uniform}
                | _spread(stream, Dpi(epsilon=epsilon, **facts), truth, runs, uniform)
            )
        if stream.name in MOVING:
            yield best_sparse(stream, epsilon, truth, runs=runs) | {"uniform_kl": uniform}


def _spread(stream: Stream, dpi: Dpi, truth: Reals, runs: int, uniform: float) -> Row:
    found, released, together, paid = [], [], [], []
    for run in range(runs):
        series = release(dpi, stream.block, **fixed_noise(_name(stream, dpi), run))
        counted = dpi.publish == "histogram"  # counts have no dummy rows
        values = series.values if counted else without_dummies(series.values, dpi.dummy_rows)
        found.append(float(divergence(values, truth).mean()))
        released.append(float(divergence(series.values, truth).mean()))
        together.append(float(_accumulated(values, stream.block).mean()))
        paid.append(sum(series.paid))
    return {
        "kl": float(np.median(found)),
        "kl_least": min(found),
        "kl_most": max(found),
        "released_kl": float(np.median(released)),
        "accumulated_kl": float(np.median(together)),
        "not_further": float(np.mean(np.array(found) <= uniform * _SAME)),
        "publications": float(np.median(paid)),
    }


def _name(stream: Stream, dpi: Dpi) -> str:
    counted = " counted" if dpi.publish == "histogram" else ""
    return f"dpi {stream.name} {float(dpi.epsilon)} {dpi.allocation}{counted}"


def _accumulated(values: Reals, block: Any) -> Reals:
    """Of all slots so far: the mean of the releases, from all rows so far."""
    so_far = distributions(np.cumsum(block, axis=0))
    mean = np.cumsum(values, axis=0) / np.arange(1, len(values) + 1)[:, None]
    return divergence(mean, so_far)


def without_dummies(values: Reals, dummy: int) -> Reals:
    """Dummy rows taken out, by the public guess of a slot's rows (ten times as many)."""
    if not dummy:
        return values
    counts = answers.counts(values, 10 * dummy, dummy_rows=dummy)
    shares: Reals = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1e-9)
    return shares


def best_sparse(stream: Stream, epsilon: float, truth: Reals, *, runs: int) -> Row:
    """The best of some even schedules, by its median; each draws by the slot's own distribution."""
    assert stream.block is not None
    members = pool("mixed", bins=truth.shape[1], size=1_000, seed=0)
    pdfs = np.array([members.pdf(number) for number in range(len(members))])
    exponent = epsilon / (2 * float(Dpi(epsilon=1, **BOUNDED).pdf_change))  # of an L1 distance
    found: dict[int, float] = {}
    for count in _SCHEDULES:
        slots = [len(truth) * k // count for k in range(count)]
        lengths = np.diff([*slots, len(truth)])
        rows = [compress_sensitivity(stream.block[slot], dummy_rows=DUMMY_ROWS) for slot in slots]
        off = np.array([members.distances(row) for row in rows]) / GRID
        figures = []
        for run in range(runs):
            noise = np.random.default_rng(run).gumbel(size=off.shape)
            drawn = (noise - exponent / count * off).argmax(axis=1)
            values = without_dummies(pdfs[drawn], DUMMY_ROWS).repeat(lengths, axis=0)
            figures.append(float(divergence(values, truth).mean()))
        found[count] = float(np.median(figures))
    best = min(found, key=lambda count: found[count])
    about = {"part": "spread", "stream": stream.name, "epsilon": epsilon, "runs": runs}
    return about | {"form": "best sparse schedule", "kl": found[best], "publications": best}


def spread_targets(rows: Sequence[Row]) -> list[Row]:
    """How many cells are no further than uniform; how far behind the best sparse schedule."""
    spread = [row for row in rows if row["part"] == "spread"]
    cells = [row for row in spread if row["form"] == DEFAULT]
    enough = all(row["runs"] >= _ENOUGH for row in cells if row["stream"] in MOVING)
    why = f"medians of fewer than {_ENOUGH} noise seeds" if not enough else "the stream is absent"
    close = sum(row["kl"] <= row["uniform_kl"] * _SAME for row in cells)
    what = f"default: share of {len(cells)} cells with a median no further than uniform"
    share = close / len(cells) if cells and enough else None
    judged = [target(what, share, ">=", LEAST_CLOSER, reason=why)]
    best = {
        (row["stream"], row["epsilon"]): row["kl"]
        for row in spread
        if row["form"] == "best sparse schedule"
    }
    for stream in MOVING:
        pairs = [
            (row["kl"], best[stream, row["epsilon"]]) for row in cells if row["stream"] == stream
        ]
        times = max(kl / least for kl, least in pairs) if pairs and enough else None
        what = f"default on {stream}: most error over the best sparse schedule's"
        judged.append(target(what, times, "<=", MOST_TIMES, reason=why))
    return judged


_ENOUGH: Final = 20


def spread_notes(rows: Sequence[Row]) -> list[str]:
    """Strictly closer, by form; on even streams nothing can be closer."""
    found = []
    for form in (DEFAULT, LAST_DRAW, COUNTED):
        cells = [row for row in rows if row["part"] == "spread" and row["form"] == form]
        closer = [row for row in cells if row["kl"] * _SAME < row["uniform_kl"]]
        same = [row for row in cells if abs(row["kl"] / row["uniform_kl"] - 1) <= _SAME - 1]
        found.append(
            f"{form}, medians over noise seeds: closer than uniform in {len(closer)}, the uniform "
            f"distribution itself in {len(same)} of {len(cells)} cells"
        )
    return found


PARAMETERS: Final[dict[str, dict[str, Any]]] = {
    "as it comes": {},
    "lambda 0.05": {"error_bound": "0.05"},
    "lambda 0.5": {"error_bound": "0.5"},
    "mu 0.05": {"overfitting_bound": "0.05"},
    "mu 0.3": {"overfitting_bound": "0.3"},
    "mu 1": {"overfitting_bound": 1},
    "zeta 0.1": {"series": "dilogarithm", "decay_rate": "0.1"},
    "zeta 0.5": {"series": "dilogarithm", "decay_rate": "0.5"},
    "pool of 100": {"pool_size": 100},
    "pool of 4,000": {"pool_size": 4_000},
    "16 groups of bins": {"queries": (16,)},
    "4 groups of bins": {"queries": (4,)},
    "three queries": {"queries": (100, 16, 4)},
}
"""Figure 3 of the paper, the size of the pool, and hierarchical queries (100 bins)."""


def parameter_rows(stream: Stream, *, epsilon: float, runs: int) -> Iterator[Row]:
    """The default and the paper's pool and allocation, with one parameter changed.

    The series with zeta has no terms at this epsilon unless users may have all rows of a slot.
    """
    if stream.block is None:
        return
    truth = distributions(stream.block)
    paper = {"pool": "multinomial", "allocation": "random", "series": "telescoping"}
    for form, base in ((DEFAULT, {}), ("Algorithm 3", paper)):
        for name, changed in PARAMETERS.items():
            bounds = {} if "decay_rate" in changed else BOUNDED
            dpi = Dpi(epsilon=epsilon, **bounds | base | changed)
            figures = []
            for run in range(runs):
                noise = fixed_noise(f"{_name(stream, dpi)} {name}", run)
                values = release(dpi, stream.block, **noise).values
                values = without_dummies(values, dpi.dummy_rows)
                off = float(mean_squared(values, truth).mean())
                figures.append((float(divergence(values, truth).mean()), off))
            kl, mse = np.median(figures, axis=0).tolist()
            yield (
                {"part": "parameter", "stream": stream.name, "epsilon": epsilon, "form": form}
                | {"changed": name, "runs": runs, "kl": kl, "mse": mse}
            )


def statistics_rows(epsilons: Sequence[float], *, runs: int) -> Iterator[Row]:
    """Figure 4: sums and means of patients by region, from releases, in per cent of all patients.

    A sum is that of a tenth of the regions, a mean that of the regions' numbers over all patients.
    """
    stream = next(one for one in streams() if one.name == "state flu")
    if stream.block is None:
        yield {"part": "statistics", "stream": stream.name, "note": stream.absence}
        return
    truth = distributions(stream.block)
    wanted = _statistics(truth)
    even = np.full(truth.shape, 1 / truth.shape[1])
    for epsilon in epsilons:
        found = {"uniform": _off(_statistics(even), wanted)}
        for form, more in ((DEFAULT, {}), (COUNTED, {"publish": "histogram"})):
            dpi = Dpi(epsilon=epsilon, **BOUNDED | more)
            figures = []
            for run in range(runs):
                values = release(dpi, stream.block, **fixed_noise(_name(stream, dpi), run)).values
                values = values if more else without_dummies(values, DUMMY_ROWS)
                figures.append(_off(_statistics(values), wanted))
            found[form] = tuple(np.median(figures, axis=0).tolist())
        about = {"part": "statistics", "stream": stream.name, "epsilon": epsilon, "runs": runs}
        for form, (sums, mean) in found.items():
            yield about | {"form": form, "sum_error": sums, "mean_error": mean}


def _statistics(pdfs: Reals) -> tuple[Reals, Reals]:
    bins = pdfs.shape[1]
    edges = np.linspace(0, bins, 11).astype(int)
    ranges = list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
    return answers.range_shares(pdfs, ranges), pdfs @ np.arange(bins)


def _off(found: tuple[Reals, Reals], wanted: tuple[Reals, Reals]) -> tuple[float, float]:
    """Mean absolute errors: of a tenth's share of all patients, and of the mean region."""
    return tuple(float(np.abs(a - b).mean()) for a, b in zip(found, wanted, strict=True))  # type: ignore[return-value]


def loss_rows() -> list[Row]:
    """Table 3 and Figure 14: what a user with a row in every slot loses after t slots.

    A run is recorded and its noisy answers are held against a user's absence: the log ratios of
    all of them, at most, added up. For Laplace noise a run may come as near to that as one likes.
    Of `dpi` all that was charged counts.
    """
    methods: dict[str, Mechanism] = {
        "a noisy count in every slot": Uniform(epsilon="0.5", window=1),
        "uniform, w = 10": Uniform(epsilon="0.5", window=10),
        "sample, w = 10": Sample(epsilon="0.5", window=10),
        "budget_absorption, w = 10": BudgetAbsorption(epsilon="0.5", window=10),
        "dpi": Dpi(epsilon="0.5", **BOUNDED),
    }
    rows = [
        _loss("a tree over all slots, 0.5 for one event", t, _tree_loss(t)) for t in _LOST_AFTER
    ]
    for name, mechanism in methods.items():
        for slots in _LOST_AFTER:
            block = np.full((slots, 10), 1_000)
            user = block.copy()
            user[:, 0] += 1
            calls, _ = record(mechanism, block, secret=bytes(32), run=bytes(16))
            if isinstance(mechanism, Dpi):
                lost = sum((call.amount for call in calls), Fraction(0))
            else:
                lost = replay(mechanism, user, calls, original=block).loss
            rows.append(_loss(name, slots, float(lost)))
    return rows


_LOST_AFTER: Final = (5, 50, 500)


def _loss(method: str, slots: int, lost: float) -> Row:
    return {"part": "loss", "method": method, "slots": slots, "loss": lost}


def _tree_loss(slots: int, epsilon: float = 0.5) -> float:
    """One row in each slot moves a node by its width; a node is noised for one event's path."""
    levels = int(np.ceil(np.log2(slots))) + 1
    widths = (np.arange(slots) // (1 << level) for level in range(levels))
    moved = sum(int(np.bincount(nodes).sum()) for nodes in widths)
    return epsilon / levels * moved
