"""Keys that are published alone, with weights and without, beside PipelineDP's partition selection;
and how many of the true top keys an order of noisy counts finds, beside a choice of the top alone.

Logs are made up: users with few or many keys, keys by a power law. Each method has the same epsilon
and delta, and is asked at several bounds on the keys of a user; the best of them is compared. The
choice of the top alone is not in dpstream: it is simulated here. It adds Gumbel noise to all counts
and takes the largest k above a noisy threshold (Durfee, Rogers, "Practical Differentially Private
Top-k Selection with Pay-what-you-get Composition", 2019): k choices by the exponential mechanism,
counted by their bounded range, with all of the budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Final

import numpy as np
import pyarrow as pa

from benchmarks.harness import Findings, Progress, Row, target
from benchmarks.peers import PeerError, Peers, started
from dpstream.audit.query_samplers import run_plan
from dpstream.evaluate.trials import fixed_noise
from dpstream.privacy.accounting.calibration import mu_squared_for
from dpstream.privacy.accounting.curves import choice_epsilon
from dpstream.query.aggregates import Count
from dpstream.query.noise_plan import plan_query
from dpstream.query.query import Query
from dpstream.records import Integers

EPSILON: Final = 1.0
DELTA: Final = 1e-9
TRIGGERS: Final = 12
LOGS: Final = {
    "few keys each": (20_000, 1.0, 0.2, 0.6),
    "some": (50_000, 1.1, 1.5, 1.0),
    "many": (50_000, 0.8, 2.5, 1.0),
}
"""Keys, their power law, and the log-normal law of how often a user comes."""
TOPS: Final = (10, 50, 100, 300)
_STRATEGIES = ("TRUNCATED_GEOMETRIC", "GAUSSIAN_THRESHOLDING")


def made_up(name: str, users: int) -> tuple[Integers, Integers]:
    """Who came to which key, each pair once, in the order of coming."""
    keys, power, middle, spread = LOGS[name]
    rng = np.random.default_rng(len(name))
    often = np.maximum(1, np.rint(rng.lognormal(middle, spread, users))).astype(np.int64)
    odds = 1 / np.arange(1, keys + 1) ** power
    user = np.repeat(np.arange(users), often)
    key = rng.choice(keys, size=len(user), p=odds / odds.sum())
    _, first = np.unique(user * keys + key, return_index=True)
    come = rng.permutation(first)
    return user[come], key[come]


def found(
    user: Integers, key: Integers, groups: int, run: int, *, triggers: int = 1, **facts: Any
) -> pa.Table:
    """The last table of a whole query."""
    often: dict[str, Any] = {}
    if triggers > 1:
        often = {"time_column": "ts", "time_unit": "s", "start": "1970-01-01", "end": "1970-01-02"}
        often["every"] = f"{86_400 // triggers} seconds"
    query = Query(
        privacy_unit_column="user",
        keys=("key",),
        epsilon=EPSILON,
        delta=DELTA,
        max_groups_contributed=groups,
        report_bias=False,
        column_types={"key": "INT64"},
        **often,
        **facts,
    )
    times = np.arange(len(user)) * 86_400 // len(user)
    table = pa.table({"user": user, "key": key, "ts": times})
    noise = fixed_noise("found keys", run)
    published = run_plan(
        plan_query(query), table, secret=noise["secret"], run=noise["run_id"], memory=1 << 30
    )
    return [publication.table for _, publication in published][-1]


def _keys(
    user: Integers, key: Integers, bounds: Sequence[int], peers: Peers, name: str
) -> list[Row]:
    """How many keys each method finds at each bound."""
    rows: list[Row] = []

    def add(method: str, numbers: list[int]) -> None:
        at = {f"{bound} keys": number for bound, number in zip(bounds, numbers, strict=True)}
        rows.append({"log": name, "method": method, "best": max(numbers), **at})

    for triggers in (1, TRIGGERS):
        for weighted in (False, True):
            told: dict[str, Any] = {"aggregates": (), "weighted_keys": weighted}
            told["triggers"] = triggers
            numbers = [len(found(user, key, bound, 0, **told)) for bound in bounds]
            words = f"dpstream{', weights' if weighted else ''}, {triggers} triggers"
            add(words.replace(", 1 triggers", ""), numbers)
    for strategy in _STRATEGIES:
        asked = {"users": user.tolist(), "keys": key.tolist(), "strategy": strategy}
        asked |= {"epsilon": EPSILON, "delta": DELTA}
        try:
            numbers = [len(peers.ask(groups=bound, **asked)["keys"]) for bound in bounds]
        except PeerError:
            continue
        add(f"pipeline-dp, {strategy.lower().replace('_', ' ')}", numbers)
    return rows


def _top_alone(true: Integers, k: int, run: int) -> Integers:
    """The top of all counts by Gumbel noise; half of delta is for keys that nobody else has."""
    rng = np.random.default_rng(run)
    mu = math.sqrt(float(mu_squared_for(epsilon=Fraction(1), delta=Fraction(DELTA) / 2)))
    scale = 1 / float(choice_epsilon(mu / math.sqrt(k)))
    noisy = true + rng.gumbel(0, scale, len(true))
    least = 1 + scale * math.log(2 / DELTA) + rng.gumbel(0, scale)
    noisy = np.where((true > 0) & (noisy >= least), noisy, -np.inf)
    order = np.argsort(-noisy)[:k]
    return order[np.isfinite(noisy[order])]


def _tops(user: Integers, key: Integers, bounds: Sequence[int], runs: int, name: str) -> list[Row]:
    """Which part of the true top each way finds."""
    true = np.bincount(key)
    ordered = np.argsort(-true, kind="stable")
    counted: list[list[Integers]] = []
    for bound in bounds:
        tables = [found(user, key, bound, run, aggregates=(Count("n"),)) for run in range(runs)]
        counted.append([t.sort_by([("n", "descending")])["key"].to_numpy() for t in tables])
    rows: list[Row] = []
    for way, of_bounds in (("counts, in order", counted), ("the top alone", [])):
        shares = {}
        for k in TOPS:
            top = set(ordered[:k].tolist())
            several = of_bounds or [[_top_alone(true, k, run) for run in range(runs)]]
            parts = [
                np.mean([len(top & set(keys[:k].tolist())) / k for keys in runs_of])
                for runs_of in several
            ]
            shares[f"of top {k}"] = float(max(parts))
        rows.append({"log": name, "method": way, **shares})
    return rows


def measure(*, quick: bool, progress: Progress) -> Findings:
    """Keys found and parts of the top, on each log."""
    users, runs = (20_000, 2) if quick else (100_000, 4)
    bounds = (4, 16) if quick else (2, 4, 8, 16, 32)
    rows: list[Row] = []
    with started("found_keys") as peers:
        for number, name in enumerate(LOGS):
            progress(number, len(LOGS), name)
            user, key = made_up(name, users)
            rows += _keys(user, key, bounds, peers, name) + _tops(user, key, bounds, runs, name)
        return Findings(rows=rows, targets=_targets(rows, peers), peers=peers.versions)


def _targets(rows: list[Row], peers: Peers) -> list[Row]:
    """The worst over the logs."""
    by_log = {name: {r["method"]: r for r in rows if r["log"] == name} for name in LOGS}

    def worst(one: str, two: str) -> float | None:
        if not all(two in log for log in by_log.values()):
            return None
        return min(float(log[one]["best"] / log[two]["best"]) for log in by_log.values())

    theirs = f"pipeline-dp, {_STRATEGIES[1].lower().replace('_', ' ')}"
    again = f", {TRIGGERS} triggers"
    more = [
        float(log["the top alone"][f"of top {k}"] - log["counts, in order"][f"of top {k}"])
        for log in by_log.values()
        for k in TOPS
    ]
    return [
        target(
            "weights, times the best bound without",
            worst("dpstream, weights", "dpstream"),
            ">=",
            1.1,
        ),
        target(
            "the same, again and again",
            worst(f"dpstream, weights{again}", f"dpstream{again}"),
            ">=",
            1.0,
        ),
        target(
            "weights, times pipeline-dp's",
            worst("dpstream, weights", theirs),
            ">=",
            1.0,
            reason=peers.reason or "a peer did not answer",
        ),
        target("more of the top by a choice of it alone", max(more), "<=", 0.0),
    ]
