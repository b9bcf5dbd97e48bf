"""Quantiles of made-up values with the peers, once, for many groups of users with one row each."""

from __future__ import annotations

import importlib
import time
from typing import Any

PACKAGES = ("opendp", "pipeline-dp")


def pipeline_dp(request: dict[str, Any]) -> list[list[float]]:
    """The tree of Google's library, 16 children and 4 levels, as PipelineDP offers it."""
    pdp: Any = importlib.import_module("pipeline_dp")
    rows = [
        (user, group, value)
        for group, values in enumerate(request["values"])
        for user, value in enumerate(values, start=group * len(values))
    ]
    budget = pdp.NaiveBudgetAccountant(
        total_epsilon=request["epsilon"], total_delta=request["delta"]
    )
    groups = list(range(len(request["values"])))
    noise = getattr(pdp.NoiseKind, request["noise"])
    found = pdp.DPEngine(budget, pdp.LocalBackend()).aggregate(
        rows,
        pdp.AggregateParams(
            metrics=[pdp.Metrics.PERCENTILE(100 * q) for q in request["q"]],
            noise_kind=noise,
            max_partitions_contributed=1,
            max_contributions_per_partition=1,
            min_value=request["lo"],
            max_value=request["hi"],
        ),
        pdp.DataExtractors(
            privacy_id_extractor=lambda row: row[0],
            partition_extractor=lambda row: row[1],
            value_extractor=lambda row: row[2],
        ),
        public_partitions=groups,
    )
    budget.compute_budgets()
    by_group = dict(found)
    return [list(by_group[group]) for group in groups]


def opendp(request: dict[str, Any]) -> list[list[float]]:
    """The exponential mechanism over the same leaves, each quantile with a part of epsilon."""
    dp: Any = importlib.import_module("opendp.prelude")
    dp.enable_features("contrib")
    lo, hi, leaves = request["lo"], request["hi"], request["leaves"]
    candidates = [lo + (hi - lo) * (i + 0.5) / leaves for i in range(leaves)]
    space = dp.vector_domain(dp.atom_domain(T=float, nan=False)), dp.symmetric_distance()
    each = request["epsilon"] / len(request["q"])
    makers = []
    for q in request["q"]:
        scored = space >> dp.t.then_quantile_score_candidates(candidates, alpha=q)
        chosen = dp.binary_search_param(
            lambda scale, scored=scored: (
                scored >> dp.m.then_noisy_max(dp.max_divergence(), scale=scale, negate=True)
            ),
            d_in=1,
            d_out=each,
        )
        makers.append(scored >> dp.m.then_noisy_max(dp.max_divergence(), scale=chosen, negate=True))
    return [[candidates[make(values)] for make in makers] for values in request["values"]]


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Quantiles of each group, and seconds."""
    began = time.perf_counter()
    found = {"pipeline-dp": pipeline_dp, "opendp": opendp}[request["peer"]](request)
    return {"quantiles": found, "seconds": time.perf_counter() - began}
