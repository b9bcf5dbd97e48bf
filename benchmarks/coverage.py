"""How often published intervals hold the truth: for every aggregate, strategy and mechanism.

Queries publish intervals of 95% for the rows that the bounds keep, and `high_all` for all rows: a
truth of each is computed beside the run, from the exact sums and from the table. Mechanisms publish
a standard deviation; their interval is 1.96 of it to both sides. What is no sum of rows is asked by
a second query of each log, and its truths are computed from the rows (`coverage_from_rows.py`).

Generated logs have the shapes of two real ones that no bound was tuned on: sessions of a web shop
with 1 to 267 pages, and orders of customers over 78 weeks. Real ones come from DPSTREAM_DATA.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from benchmarks.coverage_from_rows import SHARES, TRUTHS, of_rows, windows_of
from benchmarks.harness import Findings, Progress, Row, target
from benchmarks.streams import VARIABLE, streams
from dpstream.audit.query_samplers import run_plan
from dpstream.errors import DpstreamError
from dpstream.evaluate.trials import fixed_noise
from dpstream.group_by.flow import Flow, Publication
from dpstream.group_by.perturb import NoisySums
from dpstream.mechanisms import REGISTRY, find
from dpstream.mechanisms.base import HistogramMechanism, SeriesMechanism
from dpstream.mechanisms.counters.factorised_counter import CounterMechanism, CountingParameters
from dpstream.mechanisms.release import release
from dpstream.privacy.query_spend import QuerySpend
from dpstream.query.aggregates import Avg, Count, CountUnits, Stddev, Sum, Variance
from dpstream.query.noise_plan import USUAL_INTERVAL, plan_query
from dpstream.query.query import Query
from dpstream.query.windows import Tumble
from dpstream.records import Integers
from dpstream.sql_compiler.model_estimates import shrink, smooth

CONFIDENCE: Final = 0.95
LOWEST: Final = 0.93
HIGHEST: Final = 0.99
LEAST_MODELLED: Final = 0.9
_MODELLED: Final = ("pacer", "block_smoother")
"""Their deviations rest on models of the stream, which no stream has to follow."""
_STRATEGIES: Final[tuple[Literal["latched", "sqlp"], ...]] = ("latched", "sqlp")
_WEEKS: Final = 78
_WEEK: Final = 7 * 86_400
_CLAMP: Final = (0, 100)
_NOISE: Final = 8.0
"""Of what SMOOTH and SHRINK are tried on: about that of a count with eight groups at epsilon 2."""
_LEAST_BINS: Final = 8
TOO_SURE: Final = "most coverage of kept rows: quantiles (missed: levels share what may fail)"
"""A target that is missed as long as intervals of quantiles are proved for every group."""
_EXACT: Final = ("count", "units", "sum")
"""Aggregates whose noise is Gaussian; the others' bars are true to first order."""


@dataclass(frozen=True, kw_only=True)
class Log:
    """A table with the columns user, key, ts (seconds) and x, and what is asked of it."""

    name: str
    table: pa.Table
    query: Query
    real: bool = False


def sessions(size: int, seed: int = 0) -> pa.Table:
    """Sessions with 1 to 267 pages, 2.5 in the mean, of 500 pages.

    >>> sessions(2_000).num_rows > 4_000
    True
    """
    rng = np.random.default_rng(seed)
    pages = np.minimum(np.ceil(rng.pareto(1.35, size) * 0.9 + 0.05), 267).astype(np.int64)
    user = np.repeat(np.arange(size), np.maximum(pages, 1))
    key = np.minimum(rng.zipf(1.25, len(user)) - 1, 10**9) % 500
    ts, x = rng.integers(0, 86_400, len(user)), rng.gamma(2.0, 12.0, len(user))
    return _table(user, key, ts, x, **_beside(x, rng))


def orders(customers: int, seed: int = 0) -> pa.Table:
    """Orders over 78 weeks, about 3 of a customer, a third of them in the first 12 weeks.

    >>> float(pa.compute.max(orders(1_000)["x"]).as_py()) <= 1_300
    True
    """
    rng = np.random.default_rng(seed)
    each = np.maximum(rng.geometric(0.34, size=customers), 1) * np.where(
        rng.random(customers) < 0.03, 5, 1
    )
    user = np.repeat(np.arange(customers), each)
    early = rng.random(len(user)) < 0.2
    time = np.where(early, rng.random(len(user)) * 12, rng.random(len(user)) * _WEEKS) * _WEEK
    amount = np.minimum(rng.lognormal(np.log(28.0), 0.9, len(user)), 1_300.0)
    key = rng.integers(0, 4, len(user))
    return _table(user, key, time.astype(np.int64), amount, **_beside(amount, rng))


def _beside(x: Any, rng: np.random.Generator) -> dict[str, Any]:
    """A column that goes with x, x itself, and one of 300 items, few of which are common."""
    y = 20 + 0.5 * x + rng.normal(0, 10, len(x))
    return {"y": y, "z": x, "item": np.minimum(rng.zipf(1.3, len(x)) - 1, 10**9) % 300}


def _table(user: Any, key: Any, ts: Any, x: Any, *, y: Any, z: Any, item: Any) -> pa.Table:
    return pa.table({"user": user, "key": key, "ts": ts, "x": x, "y": y, "z": z, "item": item})


def _query(**facts: Any) -> Query:
    """All aggregates at once; one that is bounded as a careful person would bound it."""
    common: dict[str, Any] = {
        "privacy_unit_column": "user",
        "keys": ["key"],
        "aggregates": [
            Count("count"),
            CountUnits("units"),
            Sum("sum", column="x", contribution_bounds_per_row=_CLAMP),
            Avg("avg", column="x", contribution_bounds_per_row=_CLAMP),
            Variance("variance", column="x", contribution_bounds_per_row=_CLAMP),
            Stddev("stddev", column="x", contribution_bounds_per_row=_CLAMP),
        ],
        "epsilon": 8,
        "delta": 1e-6,
        "time_column": "ts",
        "time_unit": "s",
        "start": "1970-01-01",
        "max_groups_contributed": 4,
        "max_rows_per_group": 2,
        "confidence": CONFIDENCE,
    }
    return Query(**common | facts)


def logs(*, quick: bool) -> Iterator[Log]:
    """Generated ones, then those of DPSTREAM_DATA that are there."""
    day = _query(name="sessions", end="1970-01-02", every="12 hours")
    yield Log(name="sessions", table=sessions(6_000 if quick else 60_000), query=day)
    weeks = _query(
        name="orders", end="1971-07-02", window=Tumble("7 days"), max_groups_contributed=8,
        public_groups=[0, 1, 2, 3],
    )  # fmt: skip
    yield Log(name="orders", table=orders(4_000 if quick else 23_600), query=weeks)
    folder = Path(os.environ.get(VARIABLE, "/nowhere"))
    higgs = folder / "events_higgs_twitter_20120704.csv"
    if not quick and higgs.is_file():
        read = pa_csv.read_csv(higgs)
        x, second = pa.array(np.full(read.num_rows, 1.0)), read["sec"].to_numpy()
        retweet = 100.0 * (read["kind"].to_numpy() == "RT")
        beside = {"y": second / 864, "z": retweet, "item": second // 3600}
        table = _table(read["user"], read["target"], read["sec"], x, **beside)
        yield Log(name="higgs", table=table, query=replace(day, name="higgs"), real=True)
    movies = folder / "events_movielens_100k_2016.csv"
    if not quick and movies.is_file():
        read = pa_csv.read_csv(movies)
        x = pc.multiply(read["rating"], 20.0)
        zeros = pa.array(np.zeros(read.num_rows, np.int64))
        seconds = read["unix_ts"].to_numpy()
        when = 100 * (seconds - seconds.min()) / np.ptp(seconds)
        beside = {"y": x, "z": when, "item": read["movie"]}
        table = _table(read["user"], read["main_genre"], zeros, x, **beside)
        asked = replace(day, name="movielens", every=None, max_groups_contributed=8)
        yield Log(name="movielens", table=table, query=asked, real=True)
    shop = folder / "events_online_retail_2010_2011.csv"
    if not quick and shop.is_file():
        read = pa_csv.read_csv(shop)
        codes, minute = read["stock_code"], read["minute"].to_numpy()
        first = [int(code[0]) if code[0].isdigit() else 0 for code in codes.to_pylist()]
        items = codes.combine_chunks().dictionary_encode().indices
        beside = {"y": read["quantity"], "z": minute % 1440 / 14.4, "item": items}
        table = _table(read["customer"], first, minute * 60, read["quantity"], **beside)
        shown: dict[str, Any] = {"end": "1970-07-30", "public_groups": list(range(10))}
        asked = replace(weeks, name="shop", **shown)
        yield Log(name="shop", table=table, query=asked, real=True)


class ExactBeside(Flow):
    """Also notes the table that each release would be without noise, row by row the same groups."""

    def __init__(self, *args: Any, **facts: Any) -> None:
        super().__init__(*args, **facts)
        self.exact: list[pa.Table] = []

    def publish(self, step: int, spend: QuerySpend) -> list[Publication]:
        """As ever, and the exact sums in a second table."""
        self.exact.clear()
        releases = []
        for due in self.due(step):
            noisy = self.perturb(due, spend)
            totals = self.noisy_totals(due, spend)
            exact = [
                NoisySums(**vars(part) | {"sums": bucket.sums(part.groups)})
                for bucket, part in zip(self.groups(due.window), noisy, strict=True)
            ]
            table = self._table(step, due, noisy, totals)
            self.exact.append(self._table(step, due, exact, totals))
            releases.append(Publication(due=due, table=table))
        return releases


Truth = dict[tuple[int, Any], dict[str, float]]
"""(window, key) -> the aggregates of all rows, each value clamped."""


def truth_of(log: Log) -> Truth:
    """What the query would publish without noise and bounds on rows."""
    table = log.table
    held = pa.table(
        {
            "window": windows_of(log.query, table),
            "key": table["key"],
            "user": table["user"],
            "x": np.clip(table["x"].to_numpy().astype(np.float64), *_CLAMP),
        }
    )
    found = held.group_by(["window", "key"]).aggregate(
        [("x", "count"), ("user", "count_distinct"), ("x", "sum"), ("x", "mean")]
    )
    names = ["count", "units", "sum", "avg"]
    columns = ["x_count", "user_count_distinct", "x_sum", "x_mean"]
    places = zip(found["window"].to_pylist(), found["key"].to_pylist(), strict=True)
    rows = zip(*(found[name].to_pylist() for name in columns), strict=True)
    named = (dict(zip(names, row, strict=True)) for row in rows)
    return dict(zip(places, named, strict=True))


def of_query(log: Log, *, runs: int) -> list[Row]:
    """Coverage of every aggregate, at every release that is the last of its window."""
    query, truth = log.query, truth_of(log)
    seen: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    shares: list[float] = []
    plan = plan_query(query)
    for run in range(runs):
        noise = fixed_noise(f"coverage of {log.name}, {query.strategy}", run)
        flows: list[ExactBeside] = []

        def flow(*args: Any, into: list[ExactBeside] = flows, **facts: Any) -> ExactBeside:
            into.append(ExactBeside(*args, **facts))
            return into[0]

        published = run_plan(
            plan, log.table, secret=noise["secret"], run=noise["run_id"], flow=flow, memory=1 << 30
        )
        for number, (_, publication) in enumerate(published):
            due, table = publication.due, publication.table
            if due.release < due.releases:
                continue
            exact = flows[0].exact[-1]
            assert exact["key"].equals(table["key"]), number
            shares += [share for share in table["kept_share"].to_pylist()[:1] if share is not None]
            for aggregate in query.aggregates:
                name, found = aggregate.name, seen[aggregate.name]
                low, high = (table[f"{name}_{end}"].to_numpy() for end in ("low", "high"))
                kept = exact[name].to_numpy()
                found["kept"] += ((low <= kept) & (kept <= high)).tolist()
                if name not in ("count", "units", "sum", "avg"):
                    continue
                places = [(due.window, key) for key in table["key"].to_pylist()]
                of_all = np.array([truth.get(place, {}).get(name, 0.0) for place in places])
                there = np.array([place in truth for place in places], bool)
                found["all"] += ((low <= of_all) & (of_all <= high))[there].tolist()
                most = table[f"{name}_high_all"].to_numpy()
                found["high_all"] += (of_all <= most)[there].tolist()
    about = {"log": log.name, "real": log.real, "strategy": query.strategy, "runs": runs}
    return [
        about
        | {
            "aggregate": name,
            "figures": len(found["kept"]),
            "kept_rows": _mean(found["kept"]),
            "all_rows": _mean(found["all"]),
            "all_rows_high_all": _mean(found["high_all"]),
            "kept_share": float(np.median(shares)) if shares else None,
        }
        for name, found in seen.items()
    ]


def _mean(covered: list[bool]) -> float | None:
    return float(np.mean(covered)) if covered else None


def mechanism_of(name: str, block: Integers) -> Any:
    """A mechanism with the parameters that its family needs, and defaults else."""
    cls: Any = find(name)
    needed = {field.name for field in fields(cls)}
    if issubclass(cls, HistogramMechanism):
        return cls(epsilon=1, window=20)
    if issubclass(cls, SeriesMechanism):
        delay = {"delay": 8} if "delay" in needed else {}
        more = {"bucket": 64} if name == "buc_order" else {}
        return cls(epsilon=1, lo=0, hi=int(block.max()), **delay | more)
    if issubclass(cls, CountingParameters):
        return cls(rho=0.5, **{"steps": len(block)} if issubclass(cls, CounterMechanism) else {})
    return None  # distributions have no error bars


def of_mechanism(name: str, stream: str, block: Integers, *, runs: int) -> Row | None:
    """Coverage of 1.96 standard deviations, by steps that were measured and steps held."""
    covered: dict[bool, list[Any]] = {True: [], False: []}
    counts = issubclass(find(name), CountingParameters)
    truth = np.cumsum(block, axis=0) if counts else block
    for run in range(runs):
        mechanism = mechanism_of(name, block)
        if mechanism is None:
            return None
        noise = fixed_noise(f"coverage of {name} on {stream}", run)
        series = release(mechanism, block, secret=noise["secret"], run_id=noise["run_id"])
        values = np.asarray(series.values, np.float64)
        if not np.isfinite(series.stddev).any():
            return None
        half = USUAL_INTERVAL * np.asarray(series.stddev, np.float64).reshape(len(values), -1)
        inside = np.abs(values - truth[: len(values)]) <= half
        known = np.broadcast_to(np.isfinite(half), inside.shape)
        held = np.broadcast_to(np.asarray(series.held, bool).reshape(-1, 1), inside.shape)
        for kind, found in covered.items():
            found += inside[known & (held == kind)].tolist()
    return {
        "mechanism": name,
        "stream": stream,
        "runs": runs,
        "figures": sum(map(len, covered.values())),
        "measured": _mean(covered[False]),
        "held": _mean(covered[True]),
        "held_share": len(covered[True]) / max(sum(map(len, covered.values())), 1),
    }


def of_model(stream: str, block: Integers) -> list[Row]:
    """SMOOTH and SHRINK of counts with normal noise: error beside what was measured, coverage.

    Figures are smoothed over 30 steps, and shrunk beside the other bins of their step.
    """
    noise = np.random.default_rng(0).normal(scale=_NOISE, size=block.shape)
    measured, stddevs = block + noise, np.full(block.shape, _NOISE)
    rows: list[Row] = []
    for model in ("SMOOTH", "SHRINK"):
        if model == "SHRINK" and block.shape[1] < _LEAST_BINS:
            continue
        made, spread = np.empty(block.shape), np.empty(block.shape)
        for step in range(len(block)):
            before = slice(max(0, step - 29), step + 1)
            made[step], spread[step] = (
                smooth(measured[before], stddevs[before])
                if model == "SMOOTH"
                else shrink(measured[step], stddevs[step])
            )
        off, plain = np.abs(made - block), np.abs(noise)
        rows.append(
            {
                "model": model,
                "stream": stream,
                "figures": off.size,
                "covered": float((off <= USUAL_INTERVAL * spread).mean()),
                "l2_ratio": float(np.sqrt((off**2).sum() / (plain**2).sum())),
                "median_ratio": float(np.median(off) / np.median(plain)),
            }
        )
    return rows


def measure(*, quick: bool, progress: Progress) -> Findings:
    """Rows of queries, then of mechanisms; quick: smaller logs, fewer runs, two streams."""
    rows: list[Row] = []
    notes = ["truths are exact: not private, for this comparison only"]
    tried = [(log, strategy) for log in logs(quick=quick) for strategy in _STRATEGIES]
    names = [name for name in REGISTRY if name != "dpi"]
    blocks = {
        one.name: one.block[: 300 if quick else 1_000]
        for one in streams(steps=300 if quick else 1_000)
        if one.block is not None and one.block.shape[1] <= 64
    }
    chosen = list(blocks)[:1] + list(blocks)[-1:] if quick else list(blocks)
    parts = len(tried) + len(names)
    for number, (log, strategy) in enumerate(tried):
        progress(number, parts, f"{log.name}, {strategy}")
        asked = replace(log, query=replace(log.query, strategy=strategy))
        rows += of_query(asked, runs=2 if quick else 8)
        about = {"log": log.name, "real": log.real, "strategy": strategy}
        found = of_rows(asked.query, asked.table, runs=1 if quick else 8)
        rows += [about | row for row in found]
    silent = []
    for number, name in enumerate(names, start=len(tried)):
        progress(number, parts, name)
        for stream in chosen:
            block = blocks[stream]
            if issubclass(find(name), SeriesMechanism):
                block = block[:, :1]
            try:
                row = of_mechanism(name, stream, block, runs=2 if quick else 5)
            except DpstreamError as problem:
                notes.append(f"{name} on {stream}: {problem}")
                continue
            if row is None:
                silent.append(name)
                break
            rows.append(row)
    for stream in chosen:
        rows += of_model(stream, blocks[stream])
    if silent:
        notes.append(f"publish no standard deviation: {', '.join(silent)}")
    return Findings(rows=rows, targets=_targets(rows), notes=notes, draw=partial(_draw, rows=rows))


def _targets(rows: list[Row]) -> list[Row]:
    """The widest miss of each kind; figures of all logs of one (aggregate, strategy) together."""
    exact: list[float] = []
    quotients: list[float] = []
    all_rows: list[float] = []
    for strategy in _STRATEGIES:
        for name in dict.fromkeys(row["aggregate"] for row in rows if "aggregate" in row):
            of_both = (row for row in rows if row.get("strategy") == strategy and row["figures"])
            mine = [row for row in of_both if row.get("aggregate") == name]
            if not mine:
                continue
            sizes = [row["figures"] for row in mine]
            kept = float(np.average([row["kept_rows"] for row in mine], weights=sizes))
            (exact if name in _EXACT else quotients).append(kept)
            all_rows += [row["all_rows_high_all"] for row in mine if row["all_rows_high_all"]]
    from_rows = _pooled_from_rows(rows)
    counters = []  # the noise of a stream's steps is shared: only all streams together say much
    for name in _COUNTERS:
        mine = [row for row in rows if row.get("mechanism") == name]
        sizes = [row["figures"] for row in mine]
        counters.append(float(np.average([row["measured"] for row in mine], weights=sizes)))
    modelled = []  # all steps of a stream, held ones included
    for row in rows:
        if row.get("mechanism") in _MODELLED:
            held, paid = row["held"] or 0.0, row["measured"] or 0.0
            modelled.append(paid + row["held_share"] * (held - paid))
    return [
        target("least coverage of kept rows: counts and sums", min(exact), ">=", LOWEST),
        target("most coverage of kept rows: counts and sums", max(exact), "<=", HIGHEST),
        target("least coverage of kept rows: averages and spreads", min(quotients), ">=", LOWEST),
        target(
            "least coverage of kept rows: pairs, distinct values, quantiles",
            min(row["kept_rows"] for row in from_rows),
            ">=",
            LOWEST,
        ),
        target(
            "most coverage of kept rows: pairs (where intervals say something), distinct values",
            max(row["kept_rows_told"] for row in from_rows if not row["quantile"]),
            "<=",
            HIGHEST,
        ),
        target(
            TOO_SURE,
            max(row["kept_rows_told"] for row in from_rows if row["quantile"]),
            "<=",
            HIGHEST,
        ),
        target("least share of keys that high_all covers", min(all_rows), ">=", 0.9),
        target("least coverage of counters", min(counters), ">=", LOWEST),
        target(f"least coverage of {' and '.join(_MODELLED)}", min(modelled), ">=", LEAST_MODELLED),
        target(
            "SMOOTH and SHRINK: most l_2 over that of what was measured",
            max(row["l2_ratio"] for row in rows if "model" in row),
            "<=",
            1.05,
        ),
        target(
            "SMOOTH and SHRINK: least coverage",
            min(row["covered"] for row in rows if "model" in row),
            ">=",
            LEAST_MODELLED,
        ),
    ]


def _pooled_from_rows(rows: list[Row]) -> list[Row]:
    """Of each aggregate that is no sum of rows and each strategy: all logs together."""
    pooled = []
    for strategy in _STRATEGIES:
        for name in TRUTHS:
            of_both = (row for row in rows if row.get("from_rows") == name and row["figures"])
            mine = [row for row in of_both if row["strategy"] == strategy]
            if not mine:
                continue
            sizes = np.array([row["figures"] for row in mine])
            told = sizes * [row["told"] for row in mine]
            kept = float(np.average([row["kept_rows"] for row in mine], weights=sizes))
            of_told = [row["kept_rows_told"] or 0.0 for row in mine]
            pooled.append(
                {
                    "quantile": name in SHARES,
                    "kept_rows": kept,
                    "kept_rows_told": float(np.average(of_told, weights=told)),
                }
            )
    return pooled


_COUNTERS: Final = tuple(name for name in REGISTRY if "counters" in REGISTRY[name])


def _draw(figure: Any, *, rows: list[Row]) -> None:
    """A point for each row: what its intervals hold, beside the 95% that they say."""
    axes = figure.subplots()
    asked = [row for row in rows if "aggregate" in row or "from_rows" in row]
    labels = [
        f"{row['log']}, {row['strategy']}, {row.get('aggregate') or row['from_rows']}"
        for row in asked
    ]
    for kind, colour in (("kept_rows", "C0"), ("all_rows", "C3"), ("all_rows_high_all", "C2")):
        held = [(n, row[kind]) for n, row in enumerate(asked) if row.get(kind) is not None]
        axes.scatter(*zip(*held, strict=True), color=colour, s=12, label=kind.replace("_", " "))
    axes.axhline(CONFIDENCE, color="0.6", linewidth=0.8)
    axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=5)
    axes.set_ylabel("share of intervals that hold the truth")
    axes.legend(fontsize=7)
