"""What the peers find of the keys of a log; runs in their environment."""

from __future__ import annotations

import importlib
import time
from typing import Any

PACKAGES = ("pipeline-dp",)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The keys that PipelineDP's partition selection publishes, and seconds."""
    pdp: Any = importlib.import_module("pipeline_dp")
    began = time.perf_counter()
    rows = list(zip(request["users"], request["keys"], strict=True))
    budget = pdp.NaiveBudgetAccountant(
        total_epsilon=request["epsilon"], total_delta=request["delta"]
    )
    strategy = getattr(pdp.PartitionSelectionStrategy, request["strategy"])
    found = pdp.DPEngine(budget, pdp.LocalBackend()).select_partitions(
        rows,
        pdp.SelectPartitionsParams(
            max_partitions_contributed=request["groups"], partition_selection_strategy=strategy
        ),
        pdp.DataExtractors(
            privacy_id_extractor=lambda row: row[0], partition_extractor=lambda row: row[1]
        ),
    )
    budget.compute_budgets()
    return {"keys": [int(key) for key in found], "seconds": time.perf_counter() - began}
