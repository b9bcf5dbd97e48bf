"""DPI: errors of released distributions, budget that is left, time, and outliers found.

What needs no data stands beside it: the uniform distribution and a member of the pool drawn
blindly in every slot. Noise is fixed by name, so a run gives the same errors again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from scipy.cluster.vq import kmeans2

from benchmarks.dpi_findings import (
    BOUNDED,
    COUNTED,
    WIDE,
    loss_rows,
    parameter_rows,
    spread_notes,
    spread_rows,
    spread_targets,
    statistics_rows,
    without_dummies,
)
from benchmarks.dpi_runs import (
    JUDGED,
    ROWS,
    SLOTS,
    all_streams,
    budget_rows,
    distributions,
    divergence,
    eta_rows,
    gaussian_counts,
    long_rows,
    mean_squared,
)
from benchmarks.harness import Findings, Progress, Row, target
from benchmarks.isolation_forest import isolation_scores
from benchmarks.streams import Stream
from dpstream.errors import BudgetExceeded
from dpstream.evaluate.trials import fixed_noise
from dpstream.mechanisms import answers
from dpstream.mechanisms.infinite.dpi import Dpi
from dpstream.mechanisms.infinite.synopsis_pool import pool
from dpstream.mechanisms.release import release
from dpstream.records import Reals

_PAPER: Final[dict[str, Any]] = {
    "pool": "multinomial",
    "series": "telescoping",
    "queries": (16, 4),
}

FORMS: Final[dict[str, dict[str, Any]]] = {
    "Algorithm 3, no row bound": _PAPER | {"allocation": "random"},
    "Algorithm 3": _PAPER | BOUNDED | {"allocation": "random"},
    "Algorithm 4": _PAPER | BOUNDED | {"allocation": "ranges"},
    "default, no row bound": {},
    "default": BOUNDED,
}
"""Parameters by name; a single query is added where every bin is asked for."""

UNIFORM, BLIND = "uniform", "random member"
TEN_TIMES_RARER: Final = math.log(10)
"""Than a slot's likeliest bin: the outlier score from which a bin counts as one."""

TIME_EPSILON: Final = 2
"""Where errors over time are shown."""

_TENTHS: Final = 10


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    epsilons: tuple[float, ...]
    slots: int
    runs: int
    seeds: int
    pool_size: int
    domains: tuple[int, ...]
    domain_slots: int
    long_slots: int
    budget_slots: int


FULL: Final = Plan(
    epsilons=(0.1, 0.5, 1, 2, 5, 10),
    slots=3_000,
    runs=1,
    seeds=25,
    pool_size=1_000,
    domains=(1_000, 10_000),
    domain_slots=300,
    long_slots=100_000,
    budget_slots=1_000_000,
)
QUICK: Final = Plan(
    epsilons=(0.1, 2, 10),
    slots=150,
    runs=1,
    seeds=3,
    pool_size=300,
    domains=(1_000,),
    domain_slots=30,
    long_slots=1_000,
    budget_slots=20_000,
)


def measure(*, quick: bool, progress: Progress) -> Findings:
    """Errors on small and large domains, a long run, budgets for ever, learning rates."""
    plan = QUICK if quick else FULL
    found = all_streams(plan.slots)
    wide = [_wide(domain, plan.domain_slots) for domain in plan.domains]
    cells = [(one, epsilon) for one in found for epsilon in plan.epsilons]
    cells += [(one, epsilon) for one in wide for epsilon in (0.5, 2, 10)]
    parts: list[tuple[str, Callable[[], list[Row]]]] = [
        (f"{one.name}, epsilon {epsilon}", _part(one, epsilon, plan)) for one, epsilon in cells
    ]
    parts += [
        (f"{one.name}, applications", _application(one, plan)) for one in found if plan is FULL
    ]
    parts += [
        (f"{one.name}, {plan.seeds} noise seeds", partial(_spread, one, plan, epsilons))
        for streams_, epsilons in ((found, plan.epsilons), (wide, (0.5, 2, 10)))
        for one in streams_
    ]
    parts += [
        (f"{one.name}, parameters", partial(_parameters_of, one, plan))
        for one in found[1:3]
        if plan is FULL
    ]
    parts.append(("statistics by region", partial(_statistics, plan)))
    parts.append(("what others lose", loss_rows))
    parts.append(("budgets for ever", lambda: budget_rows(plan.budget_slots)))
    parts.append(("learning rates", eta_rows))
    rows: list[Row] = []
    total = len(parts) + 100
    for done, (what, part) in enumerate(parts):
        progress(done, total, what)
        rows += part()
    rows += long_rows(
        plan.long_slots, lambda share: progress(len(parts) + int(99 * share), total, "a long run")
    )
    progress(total, total, "done")
    return Findings(
        rows=rows,
        targets=targets(rows),
        notes=notes(rows, quick=quick),
        draw=lambda figure: draw(figure, rows),
    )


def _part(stream: Stream, epsilon: float, plan: Plan) -> Callable[[], list[Row]]:
    return lambda: error_rows(stream, epsilon, runs=plan.runs, pool_size=plan.pool_size)


def _application(stream: Stream, plan: Plan) -> Callable[[], list[Row]]:
    return lambda: application_rows(stream, runs=5, pool_size=plan.pool_size)


def _spread(stream: Stream, plan: Plan, epsilons: Sequence[float]) -> list[Row]:
    return list(spread_rows(stream, epsilons, runs=plan.seeds))


def _parameters_of(stream: Stream, plan: Plan) -> list[Row]:
    return list(parameter_rows(stream, epsilon=TIME_EPSILON, runs=5))


def _statistics(plan: Plan) -> list[Row]:
    return list(statistics_rows(plan.epsilons, runs=plan.seeds))


def _wide(domain: int, slots: int) -> Stream:
    block = np.concatenate(list(gaussian_counts(slots, items=domain, mean=1_000)))
    return Stream(name=f"gaussian {domain:,}", source="generated", block=block)


def error_rows(stream: Stream, epsilon: float, *, runs: int, pool_size: int) -> list[Row]:
    """Every form on one stream, and what needs no data."""
    if stream.block is None:
        return [{"part": "error", "stream": stream.name, "note": stream.absence}]
    truth = distributions(stream.block)
    slots, bins = truth.shape
    rare = answers.outliers(truth, threshold=TEN_TIMES_RARER)
    rows = []
    for name, parameters in FORMS.items():
        scaled = _parameters(parameters, bins)
        mechanism = Dpi(epsilon=epsilon, pool_size=pool_size, **scaled)
        figures, refused = [], 0
        for run in range(runs):
            noise = fixed_noise(f"dpi {stream.name} {epsilon} {name}", run)
            try:
                values = release(mechanism, stream.block, **noise).values
            except BudgetExceeded:
                refused += 1
                continue
            values = without_dummies(values, scaled.get("dummy_rows", 0))
            figures.append(_figures(values, truth, rare))
            if run == 0 and epsilon == TIME_EPSILON and bins < WIDE:
                rows += time_rows(stream, epsilon, name, values, truth)
        rows.append(_row(stream, epsilon, name, slots, bins, figures) | {"refused": refused})
    even = np.broadcast_to(np.full(bins, 1 / bins), truth.shape)
    rows.append(_row(stream, epsilon, UNIFORM, slots, bins, [_figures(even, truth, rare)]))
    blind = _blind(bins, pool_size, slots)
    rows.append(_row(stream, epsilon, BLIND, slots, bins, [_figures(blind, truth, rare)]))
    return rows


def application_rows(stream: Stream, *, runs: int, pool_size: int) -> list[Row]:
    """Figures 5 and 6 of the paper: what is done with releases, beside the same done with the data.

    `sudden`: of the slots that stand out from the 24 before them, a 20th, how many are found;
    `isolated`, `isolated_slots`: of the tenth of the bins (by their mean shares in the tenths of
    the stream) and the 20th of the slots (by all shares) that an isolation forest finds in the
    data;
    `ranked`: of the tenth of the bins that rank first in the last slot by the first five singular
    vectors of all slots; `clustered`: how often two bins are together, or apart, in three clusters
    (k-means) of the bins' courses, in both or in none.
    """
    if stream.block is None:
        return []
    truth = distributions(stream.block)
    wanted = _applied(truth)
    forms: dict[str, Any] = {name: FORMS[name] for name in ("Algorithm 3", "default")}
    forms[COUNTED] = BOUNDED | {"publish": "histogram"}
    rows = []
    for name, parameters in forms.items():
        scaled = _parameters(parameters, truth.shape[1])
        mechanism = Dpi(epsilon=TIME_EPSILON, pool_size=pool_size, **scaled)
        found = []
        for run in range(runs):
            noise = fixed_noise(f"dpi applied {stream.name} {name}", run)
            values = release(mechanism, stream.block, **noise).values
            values = without_dummies(values, 0 if name == COUNTED else scaled["dummy_rows"])
            found.append([float(np.mean(a[b])) for a, b in _compared(_applied(values), wanted)])
        means = dict(zip(APPLIED, np.median(found, axis=0).tolist(), strict=True))
        about = {"part": "applied", "stream": stream.name, "epsilon": TIME_EPSILON, "form": name}
        rows.append(about | means | {"runs": runs})
    return rows


APPLIED: Final = ("sudden", "isolated", "isolated_slots", "ranked", "clustered")
_RECENT, _RANK, _CLUSTERS = 24, 5, 3


def _applied(pdfs: Reals) -> list[Any]:
    """Marks of outlying slots and bins, of first bins, and of pairs of bins in one cluster."""
    slots, bins = pdfs.shape
    sums = np.vstack([np.zeros(bins), np.cumsum(pdfs, axis=0)])
    first = np.maximum(np.arange(slots) - _RECENT, 0)
    recent = (sums[:-1] - sums[first]) / np.maximum(np.arange(slots) - first, 1)[:, None]
    away = np.abs(pdfs - recent).sum(axis=1)
    away[0] = 0
    left, sizes, right = np.linalg.svd(pdfs, full_matrices=False)
    ranked = (left[-1, :_RANK] * sizes[:_RANK]) @ right[:_RANK]
    courses = pdfs.T / np.maximum(np.linalg.norm(pdfs, axis=0), 1e-12)[:, None]
    _, label = kmeans2(courses, _CLUSTERS, seed=0, minit="++")
    tenths = np.array([part.mean(axis=0) for part in np.array_split(pdfs, _TENTHS)])
    return [
        _top(away, slots // 20),
        _top(isolation_scores(tenths.T), bins // 10),
        _top(isolation_scores(pdfs), slots // 20),
        _top(ranked, bins // 10),
        label[:, None] == label[None, :],
    ]


def _top(scores: Reals, number: int) -> npt.NDArray[np.bool_]:
    marked = np.zeros(len(scores), dtype=bool)
    marked[np.argsort(-scores, kind="stable")[: max(number, 1)]] = True
    return marked


def _compared(found: list[Any], wanted: list[Any]) -> Iterator[tuple[Any, Any]]:
    """What is found, where it is wanted; of clusters, whether pairs agree, everywhere."""
    yield from zip(found[:-1], wanted[:-1], strict=True)
    yield found[-1] == wanted[-1], np.ones_like(wanted[-1])


def time_rows(stream: Stream, epsilon: float, name: str, values: Reals, truth: Reals) -> list[Row]:
    """Errors by tenths of the stream, and the median bin as a count, released and true."""
    rows: list[Row] = []
    for part in np.array_split(np.arange(len(truth)), _TENTHS):
        found, right = values[part], truth[part]
        rows.append(
            {"part": "time", "stream": stream.name, "epsilon": epsilon, "form": name}
            | {"slots": int(part[-1]) + 1, "mse": float(mean_squared(found, right).mean())}
            | {"kl": float(divergence(found, right).mean())}
            | {"median": float(np.median(found[-1]) * ROWS)}
            | {"true_median": float(np.median(right[-1]) * ROWS)}
        )
    return rows


def _parameters(parameters: dict[str, Any], bins: int) -> dict[str, Any]:
    """The queries with every bin among them; dummy rows a tenth of what a slot has, as a guess."""
    scaled = dict(parameters)
    if "queries" in scaled:
        scaled["queries"] = (bins, *scaled["queries"])
    if "dummy_rows" in scaled and bins >= WIDE:  # a thousand rows a bin
        scaled["dummy_rows"] = 100 * bins
    return scaled


def _blind(bins: int, size: int, slots: int) -> Reals:
    members = pool("multinomial", bins=bins, size=size, seed=0)
    drawn = np.random.default_rng(0).integers(0, size, slots)
    return np.array([members.pdf(int(number)) for number in drawn])


def _figures(values: Reals, truth: Reals, rare: Any) -> Row:
    found = answers.agreement(answers.outliers(values, threshold=TEN_TIMES_RARER), rare)
    return {
        "mse": float(mean_squared(values, truth).mean()),
        "kl": float(divergence(values, truth).mean()),
        "l1": float(np.abs(values - truth).sum(axis=1).mean()),
        "precision": found.precision,
        "recall": found.recall,
    }


def _row(
    stream: Stream, epsilon: float, name: str, slots: int, bins: int, figures: list[Row]
) -> Row:
    means = {key: float(np.mean([one[key] for one in figures])) for key in figures[0]}
    about = {"part": "error", "stream": stream.name, "slots": slots, "bins": bins}
    return about | {"epsilon": epsilon, "form": name} | means


MINUTES = 30
_UNIFORM = "uniform"


def targets(rows: Sequence[Row]) -> list[Row]:
    """Budget within epsilon, learning rates to four digits, time, no refusal."""
    judged = []
    for name in JUDGED:
        last = [row for row in rows if row["part"] == "budget" and row["form"] == name][-1]
        what = f"{name}: spent of epsilon = 1 over {last['slots']:,} slots, by the ledger"
        judged.append(target(what, last["spent"], "<=", last["epsilon"]))
    eta = [row for row in rows if row["part"] == "eta"]
    off = max(abs(round(row["value"], 4) - row["known"]) for row in eta)
    judged.append(target("m^2 and eta_t off their known four digits", off, "<=", 1e-9))
    cost = next(row["value"] for row in rows if row["part"] == "true cost" and row["mu"] == 2)
    judged.append(
        target("true cost of Theorem 5.4 at mu = 2, in epsilons", round(cost, 9), "==", 4)
    )
    long = [row for row in rows if row["part"] == "long"][-1]
    minutes = long["seconds"] / 60 * SLOTS / long["slots"]
    how = "" if long["slots"] == SLOTS else f", from {long['slots']:,}"
    what = f"minutes for {SLOTS:,} slots, {long['bins']:,} bins, {long['pool']:,} synopses{how}"
    judged.append(target(what, minutes, "<=", MINUTES))
    processor = minutes * long["cpu_seconds"] / long["seconds"]
    judged.append(target("the same in minutes of one core's time", processor, "<=", MINUTES))
    refused = sum(row.get("refused", 0) for row in rows)
    judged.append(target("runs that the ledger refused", float(refused), "==", 0))
    return judged + spread_targets(rows)


def notes(rows: Sequence[Row], *, quick: bool) -> list[str]:
    """How often DPI beats what needs no data."""
    found = ["a short run: judge by a full one"] if quick else []
    errors = [row for row in rows if row["part"] == "error" and "kl" in row]
    uniform = {(row["stream"], row["epsilon"]): row for row in errors if row["form"] == _UNIFORM}
    for form in dict.fromkeys(row["form"] for row in errors if "refused" in row):
        cells = [row for row in errors if row["form"] == form]
        better = [row for row in cells if row["kl"] < uniform[row["stream"], row["epsilon"]]["kl"]]
        where = ", ".join(dict.fromkeys(f"{row['stream']} at {row['epsilon']:g}" for row in better))
        found.append(
            f"{form}: closer (KL) than the uniform distribution in {len(better)} of {len(cells)} "
            f"cells{': ' + where if better else ''}"
        )
    return found + spread_notes(rows)


def draw(figure: Any, rows: Sequence[Row]) -> None:
    """Four panels on an empty figure."""
    figure.set_size_inches(18, 4)
    left, drifting, middle, right = figure.subplots(1, 4)
    _errors(left, [row for row in rows if row["part"] == "error" and row["stream"] == "zipf"])
    moving = [row for row in rows if row["part"] == "time" and row["stream"] == "moving bump"]
    _over_slots(drifting, moving, "kl")
    drifting.set(yscale="log", ylabel="KL divergence", title="moving bump, epsilon 2")
    _over_slots(middle, [row for row in rows if row["part"] == "budget"], "left")
    middle.set(xscale="log", ylabel="epsilon left", title="budget left of 1")
    long = [row for row in rows if row["part"] == "long"]
    _over_slots(right, long, "kl")
    right.plot(
        [row["slots"] for row in long], [row["uniform_kl"] for row in long], "--", label="uniform"
    )
    right.set(yscale="log", ylabel="KL divergence", title="a large domain over time")
    right.legend(fontsize=7)


def _over_slots(axes: Any, rows: Sequence[Row], column: str) -> None:
    for form, line in _lines(rows).items():
        slots = [row["slots"] for row in line]
        axes.plot(slots, [row[column] for row in line], marker=".", label=form)
    axes.set_xlabel("slots")
    axes.legend(fontsize=7)


def _errors(axes: Any, rows: Sequence[Row]) -> None:
    for form, line in _lines(rows).items():
        style = "--" if "refused" not in line[0] else "-"
        axes.plot([r["epsilon"] for r in line], [r["kl"] for r in line], style, label=form)
    axes.set(
        xscale="log", yscale="log", xlabel="epsilon", ylabel="KL divergence", title="zipf, 100 bins"
    )
    axes.legend(fontsize=7)


def _lines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["form"], []).append(row)
    return found
