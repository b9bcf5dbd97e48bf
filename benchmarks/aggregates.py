"""Rank errors of quantiles: once beside the peers, over 100 triggers, and how often bars hold.

All find 0.25, 0.5 and 0.95 of the same made-up values, users with one row each, groups that are
public. A rank error is the number of rows between what was published and the true quantile. Peers
publish once. pipeline-dp has the tree of Google's library, with Gaussian noise (which spends delta,
as ours does) and with Laplace noise; opendp the exponential mechanism, with a third of epsilon for
each quantile, or all of it for the median alone, which ours finds in the same way, without delta,
among as many leaves. Ours is asked through whole queries.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa

from benchmarks.harness import Findings, Progress, Row, target
from benchmarks.peers import PeerError, Peers, started
from dpstream.audit.query_samplers import run_plan
from dpstream.evaluate.trials import fixed_noise
from dpstream.query.noise_plan import plan_query
from dpstream.query.quantiles import Quantile
from dpstream.query.query import Query
from dpstream.records import Reals

SHARES: Final = (0.25, 0.5, 0.95)
EPSILON: Final = 1.0
DELTA: Final = 1e-6
TRIGGERS: Final = 100
_LO, _HI, _LEAVES = 0.0, 100.0, 256
_OF_ONE: Final = 4096
"""Leaves among which the median alone is chosen."""
_ROWS: Final = 1_000
_DAY = 86_400
_LOWEST, _HIGHEST = 0.93, 0.99


def made_up(shape: str, groups: int) -> Reals:
    """Values of each group's users."""
    rng = np.random.default_rng(len(shape))
    if shape == "uniform":
        return rng.uniform(_LO, _HI, (groups, _ROWS))
    values: Reals = np.minimum(rng.lognormal(2.5, 0.8, (groups, _ROWS)), _HI)
    return values


def ours(
    values: Reals,
    *,
    triggers: int,
    run: int,
    shares: tuple[float, ...] = SHARES,
    pure: bool = False,
) -> list[tuple[float, Reals, Reals, Reals]]:
    """Per release: the part of the rows that have come, quantiles, and both ends of intervals."""
    groups, rows = values.shape
    query = Query(
        privacy_unit_column="user",
        keys=("key",),
        public_groups=list(range(groups)),
        time_column="ts",
        time_unit="s",
        start="1970-01-01",
        end="1970-01-02",
        epsilon=EPSILON,
        delta=0 if pure else DELTA,
        max_groups_contributed=1,
        report_bias=False,
        confidence=None if pure else 0.95,
        aggregates=[
            Quantile(
                "q",
                column="x",
                q=list(shares),
                contribution_bounds_per_row=(_LO, _HI),
                leaves=_OF_ONE if pure else _LEAVES,
            )
        ],
        every=f"{_DAY // triggers} seconds" if triggers > 1 else None,
    )
    table = pa.table(
        {
            "user": np.arange(values.size),
            "key": np.repeat(np.arange(groups), rows),
            "ts": np.tile(np.arange(rows) * _DAY // rows, groups),
            "x": values.reshape(-1),
        }
    )
    noise = fixed_noise(f"quantiles, {triggers} triggers", run)
    found = []
    published = run_plan(
        plan_query(query), table, secret=noise["secret"], run=noise["run_id"], memory=1 << 30
    )
    for number, (_, publication) in enumerate(published, start=1):
        shown = publication.table.sort_by("key")
        middle, low, high = (
            np.array(shown[f"q{end}"].to_pylist())
            for end in ("", *(("", "") if pure else ("_low", "_high")))
        )
        found.append((number / triggers, middle, low, high))
    return found


def rank_errors(values: Reals, found: Reals, shares: tuple[float, ...]) -> Reals:
    """Rows between what was found and the true quantile, groups x quantiles."""
    wanted = np.array(shares) * values.shape[1]
    below = (values[:, :, None] < found[:, None, :]).sum(axis=1)
    upto = (values[:, :, None] <= found[:, None, :]).sum(axis=1)
    errors: Reals = np.maximum(np.maximum(below - wanted, wanted - upto), 0.0)
    return errors


def covered(values: Reals, low: Reals, high: Reals) -> Reals:
    """Which intervals hold the true quantile, the value at its rank."""
    at = np.ceil(np.array(SHARES) * values.shape[1]).astype(int) - 1
    truth = np.sort(values, axis=1)[:, at]
    return ((low <= truth) & (truth <= high)).astype(np.float64)


def _rms(errors: Reals) -> float:
    return float(np.sqrt((errors**2).mean()))


def _peer(peers: Peers, name: str, values: Reals, **more: Any) -> Reals:
    """What a peer finds in the same values."""
    asked: dict[str, Any] = {
        "epsilon": EPSILON,
        "delta": DELTA,
        "lo": _LO,
        "hi": _HI,
        "leaves": _LEAVES,
    }
    asked |= {"peer": name, "values": values.tolist(), "q": list(SHARES)}
    return np.array(peers.ask(**asked | more)["quantiles"])


def _once(shape: str, values: Reals, peers: Peers, notes: list[str]) -> list[Row]:
    """Rank errors of one publication."""
    asked: dict[str, Any] = {
        "dpstream": lambda: ours(values, triggers=1, run=0)[0][1],
        "dpstream, the median alone": lambda: ours(
            values, triggers=1, run=1, shares=(0.5,), pure=True
        )[0][1],
        "pipeline-dp, Gaussian": lambda: _peer(peers, "pipeline-dp", values, noise="GAUSSIAN"),
        "pipeline-dp, Laplace": lambda: _peer(peers, "pipeline-dp", values, noise="LAPLACE"),
        "opendp": lambda: _peer(peers, "opendp", values),
        "opendp, the median alone": lambda: _peer(peers, "opendp", values, q=[0.5], leaves=_OF_ONE),
    }
    rows = []
    for method, find in asked.items():
        try:
            found = find()
        except PeerError as problem:
            notes.append(f"{method}: {problem}")
            continue
        shares = SHARES if found.shape[1] > 1 else (0.5,)
        errors = rank_errors(values, found, shares)
        of_each = {f"q{share}": _rms(errors[:, n]) for n, share in enumerate(shares)}
        rows.append({"log": shape, "method": method, "triggers": 1, "all": _rms(errors), **of_each})
    return rows


def _continual(shape: str, values: Reals) -> list[Row]:
    """Rank errors and coverage over many publications, beside those of one."""
    rows = []
    for triggers in (1, TRIGGERS):
        errors, held = [], []
        for part, found, low, high in ours(values, triggers=triggers, run=2):
            come = values[:, : round(part * values.shape[1])]
            errors.append(rank_errors(come, found, SHARES))
            held.append(covered(come, low, high))
        rows.append(
            {
                "log": shape,
                "method": "dpstream",
                "triggers": triggers,
                "all": _rms(np.array(errors)),
                "last": _rms(errors[-1]),
                "covered": float(np.mean(held)),
            }
        )
    return rows


def measure(*, quick: bool, progress: Progress) -> Findings:
    """Rank errors once, beside the peers, and over 100 triggers; coverage of intervals."""
    rows: list[Row] = []
    notes = ["truths are exact: not private, for this comparison only"]
    groups = 30 if quick else 100
    with started("quantiles") as peers:
        for number, shape in enumerate(("uniform", "log-normal")):
            progress(2 * number, 4, f"{shape}, once")
            values = made_up(shape, groups)
            rows += _once(shape, values, peers, notes)
            progress(2 * number + 1, 4, f"{shape}, {TRIGGERS} triggers")
            rows += _continual(shape, values)
        return Findings(
            rows=rows, targets=_targets(rows, peers), notes=notes, peers=peers.versions, draw=None
        )


def _targets(rows: list[Row], peers: Peers) -> list[Row]:
    """The worst over the logs."""
    by_log: dict[str, dict[Any, Row]] = {}
    for row in rows:
        by_log.setdefault(row["log"], {})[row["method"], row["triggers"], "covered" in row] = row
    once, tree = ("dpstream", 1, False), ("pipeline-dp, Gaussian", 1, False)
    alone = ("dpstream, the median alone", 1, False), ("opendp, the median alone", 1, False)

    def worst(one: Any, two: Any, figure: str = "all") -> float | None:
        if not all(one in log and two in log for log in by_log.values()):
            return None
        return max(float(log[one][figure] / log[two][figure]) for log in by_log.values())

    continual = worst(("dpstream", TRIGGERS, True), ("dpstream", 1, True))
    held = [float(row["covered"]) for row in rows if "covered" in row]
    why = peers.reason or "a peer did not answer"
    return [
        target(
            "rank error, times pipeline-dp (Gaussian)", worst(once, tree), "<=", 0.8, reason=why
        ),
        target("of the median alone, times opendp", worst(*alone), "<=", 1.0, reason=why),
        target(
            f"over {TRIGGERS} triggers, times once", continual, "<=", 3.2, reason="not measured"
        ),
        target("intervals that hold the truth, least", min(held), ">=", _LOWEST),
        target("intervals that hold the truth, most", max(held), "<=", _HIGHEST),
    ]
