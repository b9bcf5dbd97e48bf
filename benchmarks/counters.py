"""Continual counters: error in closed form and sampled, state, speed, accounting.

Errors are standard deviations at rho = 1 and sensitivity 1. A sampled error is the root mean square
of simulated noise over the claimed standard deviation, over all steps and many streams.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft

from benchmarks.harness import Findings, Progress, Row, one_core, target
from dpstream.errors import MissingDependency
from dpstream.mechanisms import find
from dpstream.mechanisms.counter import KeyedCounting
from dpstream.mechanisms.counters.toeplitz import root_coefficients
from dpstream.mechanisms.counters.unbounded import UnboundedCounter
from dpstream.mechanisms.runner import Runner
from dpstream.privacy.accounting.calibration import mu_squared_for, rho_for
from dpstream.privacy.accounting.curves import gdp_delta, gdp_epsilon, zcdp_delta, zcdp_epsilon
from dpstream.privacy.amounts import gaussian_stddev
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.spend import Spend
from dpstream.records import Reals

NAMES = ("naive_counter", "tree", "honaker", "smooth_binary", "toeplitz", "blt")
STEPS = (128, 1024, 10**5)
BLT_BOUNDS = (1.85, 2.32, 3.37)
HONAKER = (4.15, 5.65, 8.65)
KEYS, KEY_STEPS, KEY_SECONDS = 1_000_000, 100, 30
FACTOR, FLOATS, RUN_STEPS = 1.35, 7, 2_000
SAMPLED = 0.25  # five standard errors of the naive counter's error over 64 streams, and more


def measure(*, quick: bool, progress: Progress) -> Findings:
    """Errors and speed of every counter, a stream without end, many keys, accounting."""
    try:
        peers = {"dp-accounting": version("dp-accounting")}
    except PackageNotFoundError:
        raise MissingDependency(
            "delta is compared with that of dp-accounting, which is not installed; install it with "
            "`pip install dp-accounting`"
        ) from None
    parts: list[tuple[str, Callable[[], list[Row]]]] = [
        (f"{name}, T = {steps:,}", partial(fixed, name, steps, quick))
        for steps in STEPS
        for name in NAMES
    ]
    parts.append(("a stream without end", partial(unbounded, 2**14 if quick else 10**6)))
    parts.append(("many keys", partial(many_keys, KEYS // (20 if quick else 1))))
    parts.append(("accounting", accounting_rows))
    rows: list[Row] = []
    with one_core():
        for done, (what, part) in enumerate(parts):
            progress(done, len(parts), what)
            rows += part()
    progress(len(parts), len(parts), "done")
    return Findings(
        rows=rows,
        targets=targets(rows),
        peers=peers,
        notes=["errors: standard deviations at rho = 1, sensitivity 1; speeds: one core"],
        draw=lambda figure: draw(figure, curves()),
    )


def fixed(name: str, steps: int, quick: bool) -> list[Row]:
    """One counter for a known number of steps."""
    mechanism: Any = find(name)(rho=1, steps=steps)  # type: ignore[call-arg]
    closed = claimed(mechanism, steps)
    return [
        {
            "part": "error",
            "counter": name,
            "steps": steps,
            "max_std": float(closed.max()),
            "mean_std": float(closed.mean()),
            "sampled_over_claimed": None if quick and steps > 2000 else sampled(mechanism, steps),
            "state_floats": state_floats(mechanism),
            "steps_per_second": speed(mechanism, min(RUN_STEPS // (10 if quick else 1), steps)),
        }
    ]


def claimed(mechanism: Any, steps: int) -> Reals:
    """Standard deviations of all steps in closed form."""
    if mechanism.identity == "toeplitz":  # summed anew for every step otherwise
        return np.sqrt(np.cumsum(root_coefficients(steps) ** 2)) * float(mechanism.stddev(1))
    return np.array([mechanism.stddev(step) for step in range(1, steps + 1)])


def state_floats(mechanism: Any) -> int:
    """Numbers that the decoder keeps for one bin."""
    state = mechanism.coder(0).begin(1)
    kept = getattr(state, "estimates", getattr(state, "increments", getattr(state, "decoder", 0)))
    return int(np.size(kept)) or 1


def sampled(mechanism: Any, steps: int) -> float:
    """Root mean square of decoded noise over its claimed standard deviation, both for sigma = 1."""
    streams, noise = 256 if steps < 10_000 else 64, []
    rng = np.random.default_rng(steps)
    errors = claimed(mechanism, steps) * mechanism.row_norm(steps) / mechanism.stddev(steps)
    if mechanism.identity == "toeplitz":
        return sampled_root(rng.normal(size=(steps, streams)), errors)
    coder = mechanism.coder(0)
    state = coder.begin(streams)
    for step in range(1, steps + 1):
        shape: tuple[int, ...] = (streams,)
        if mechanism.identity == "honaker":  # every node that ends at the step is measured
            shape = (mechanism.tree.level(step) + 1, streams)
        state, sums = coder.decode(state, step, rng.normal(size=shape))
        noise.append(float(np.mean((sums / errors[step - 1]) ** 2)))
    return float(np.sqrt(np.mean(noise)))


def sampled_root(z: Reals, errors: Reals) -> float:
    """The same for the square root of the prefix-sum matrix, by fast Fourier transform."""
    size = next_fast_len(2 * len(z), real=True)
    weights = rfft(root_coefficients(len(z)), size)[:, None]
    noise = irfft(rfft(z, size, axis=0) * weights, size, axis=0)[: len(z)]
    return float(np.sqrt(np.mean((noise / errors[:, None]) ** 2)))


def speed(mechanism: Any, steps: int) -> float:
    """Steps per second of a whole run: ledger, exact noise, decoding; one bin."""
    data = np.random.default_rng(0).poisson(20, (steps + 1, 1))
    runner = Runner(mechanism)
    feed = runner.feed(data[:steps])
    next(feed)  # compiles, and fills the caches
    began = time.perf_counter()
    for _ in feed:
        pass
    return (steps - 1) / (time.perf_counter() - began)


def unbounded(steps: int) -> list[Row]:
    """Largest error so far against the best counter for exactly t steps, at powers of two."""
    mechanism = UnboundedCounter(rho=1)
    powers = [2**k for k in range(steps.bit_length())]
    errors = largest_so_far(mechanism, powers)
    best = np.cumsum(root_coefficients(steps) ** 2)  # column norm times row norm, for T = t
    seen = sampled_epochs(mechanism, powers)
    ledger = Ledger()
    list(Runner(mechanism, ledger=ledger).feed(np.ones((600, 1))))
    spent = {float(1 - ledger.left("stream", step)) for step in range(600)}
    return [
        {
            "part": "no end",
            "counter": "unbounded_counter",
            "steps": power,
            "max_std": errors[power],
            "times_best_fixed": float(errors[power] * 2**0.5 / best[power - 1]),
            "state_floats": len(mechanism.epochs[mechanism.epoch(power)[0]][2:]) + 3,
            "rho_spent": max(spent) if len(spent) == 1 else None,
            "sampled_over_claimed": ratio,
        }
        for power, ratio in seen.items()
    ]


def largest_so_far(mechanism: UnboundedCounter, powers: list[int]) -> dict[int, float]:
    """Errors grow within an epoch, so the largest stand before the ends of epochs."""
    ends = [int(end) - 1 for end in np.cumsum([int(epoch[0]) for epoch in mechanism.epochs])]
    looked = sorted({*powers, *(end for end in ends if end < powers[-1])})
    errors = np.maximum.accumulate([mechanism.stddev(step) for step in looked])
    return {step: float(error) for step, error in zip(looked, errors, strict=True)}


def sampled_epochs(mechanism: UnboundedCounter, powers: list[int]) -> dict[int, float]:
    """Root mean square of decoded noise over its claimed standard deviation, at these steps."""
    streams, rng, seen = 256, np.random.default_rng(0), {}
    closed = np.zeros(streams)
    coder: Any  # which decodes integers in the mechanism, floats here
    for step in range(1, powers[-1] + 1):
        before, offset = mechanism.epoch(step)
        epoch = mechanism.design(before)
        coder = epoch.coder
        if offset == 1:
            state, scale = coder.begin(streams), gaussian_stddev(epoch.moved, epoch.inside)
        state, open_sums = coder.decode(state, offset, rng.normal(size=streams) * scale)
        if offset == epoch.steps:
            counted = epoch.closing[0]
            total = rng.normal(size=streams) * gaussian_stddev(mechanism.change, epoch.total)
            noise = closed = closed + counted * open_sums + (1 - counted) * total
        else:
            noise = closed + open_sums
        if step & (step - 1) == 0:  # a power of two
            seen[step] = float(np.sqrt((noise**2).mean()) / mechanism.stddev(step))
    return seen


def many_keys(keys: int) -> list[Row]:
    """Seconds for KEY_STEPS steps of noise for many keys; scaled up to KEYS in a short run."""
    mechanism = KeyedCounting(epsilon=1, delta=1e-9, steps=KEY_STEPS)
    ids = np.random.default_rng(0).integers(0, 2**63, size=(keys, 2)).astype(np.uint64)

    def run(count: int) -> float:
        ledger = Ledger()
        ledger.open("bench", mechanism.terms())
        spend = Spend(run=bytes(16), key=bytes(32), ledger=ledger, dataset="bench")
        noise, joining = mechanism.start(), ids[:count]
        began = time.perf_counter()
        for step in range(KEY_STEPS):
            spend.begin(step, lambda _: "")
            if step == 0:
                cover = spend.cover(mechanism.calibrated[0], last=KEY_STEPS - 1)
            noise, _ = mechanism.step(noise, joining, step + 1, spend, cover)
            joining = ids[:0]
        return time.perf_counter() - began

    run(10)
    seconds = run(keys)
    return [
        {
            "part": "keys",
            "counter": "blt",
            "steps": KEY_STEPS,
            "keys": keys,
            "seconds": seconds,
            "seconds_for_a_million_keys": seconds * KEYS / keys,
            "state_floats": mechanism.process.width,
            "normals_per_second": round(keys * KEY_STEPS / seconds),
        }
    ]


def curves(steps: int = 1024) -> dict[str, Reals]:
    """Standard deviation over time, every counter tuned for `steps`."""
    found = {name: find(name)(rho=1, steps=steps) for name in NAMES}  # type: ignore[call-arg]
    found["unbounded_counter"] = UnboundedCounter(rho=1)
    return {name: claimed(mechanism, steps) for name, mechanism in found.items()}


def targets(rows: list[Row]) -> list[Row]:
    """The bounds on errors, state, time and accounting."""
    seen = {(row["counter"], row["steps"]): row for row in rows if row["part"] == "error"}
    judged = []
    for steps, bound, known in zip(STEPS, BLT_BOUNDS, HONAKER, strict=True):
        what = f"T = {steps:,}"
        judged.append(target(f"blt max std, {what}", seen["blt", steps]["max_std"], "<=", bound))
        off = abs(seen["honaker", steps]["max_std"] / known - 1)
        judged.append(target(f"honaker max std off {known}, {what}", off, "<=", 0.01))
    samples = [row.get("sampled_over_claimed") for row in rows]
    worst = max(abs(one - 1) for one in samples if one is not None)
    judged.append(target("worst sampled error off its closed form", worst, "<=", SAMPLED))
    endless = [row["times_best_fixed"] for row in rows if row["part"] == "no end"]
    judged.append(target("no end: worst times best fixed T", max(endless), "<=", FACTOR))
    keys = next(row for row in rows if row["part"] == "keys")
    seconds = keys["seconds_for_a_million_keys"]
    judged.append(target("1M keys x 100 steps of blt noise, s", seconds, "<=", KEY_SECONDS))
    judged.append(target("blt floats per key", float(keys["state_floats"]), "<=", FLOATS))
    return judged + accounting_targets(rows)


# Noise of a hierarchical sum: T, levels, and the known sigma at epsilon 3, delta 1e-9/3, bound 32.
SIGMAS = ((100, 7, 177.170), (1000, 10, 211.758))
GDP_CASES = [(mu, epsilon) for mu in (0.1, 0.5, 1.0, 2.0, 5.0) for epsilon in (0.0, 0.5, 1, 3, 6)]
REPEATS, MILLISECONDS = 15, 10.0


def accounting_rows() -> list[Row]:
    """Sigmas, the largest distance from dp-accounting's delta, and milliseconds per call."""
    found = [
        {
            "part": "sigma",
            "steps": steps,
            "value": 32 * math.sqrt(levels / (2 * float(rho_for(epsilon=3, delta=1e-9 / 3)))),
            "reference": known,
        }
        for steps, levels, known in SIGMAS
    ]
    found.append({"part": "delta_GDP, worst distance", "value": _gdp_distance(), "reference": 0.0})
    for name, call in _CALLS.items():
        found.append({"part": "conversion", "counter": name, "milliseconds": _milliseconds(call)})
    return found


_CALLS: dict[str, Callable[[], object]] = {
    "rho_for": lambda: rho_for(epsilon=3, delta=1e-9),
    "mu_squared_for": lambda: mu_squared_for(epsilon=3, delta=1e-9),
    "zcdp_epsilon": lambda: zcdp_epsilon(rho=0.1, delta=1e-9),
    "zcdp_delta": lambda: zcdp_delta(rho=0.1, epsilon=3),
    "gdp_epsilon": lambda: gdp_epsilon(mu=0.5, delta=1e-9),
    "gdp_delta": lambda: gdp_delta(mu=0.5, epsilon=3),
}


def _gdp_distance() -> float:
    from dp_accounting.pld import privacy_loss_mechanism

    worst = 0.0
    for mu, epsilon in GDP_CASES:
        theirs = privacy_loss_mechanism.GaussianPrivacyLoss(1 / mu).get_delta_for_epsilon(epsilon)
        worst = max(worst, abs(gdp_delta(mu=mu, epsilon=epsilon) - theirs))
    return worst


def _milliseconds(call: Callable[[], object]) -> float:
    call()
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return 1000 * statistics.median(seconds)


def accounting_targets(found: list[Row]) -> list[Row]:
    """The known sigmas, delta to 1e-9, conversions in milliseconds."""
    judged = [
        target(f"sigma, T = {row['steps']}, off {row['reference']}", off, "<=", 0.0005)
        for row in found
        if row["part"] == "sigma" and (off := abs(row["value"] - row["reference"])) is not None
    ]
    distance = next(row["value"] for row in found if row["part"].startswith("delta_GDP"))
    judged.append(target("delta_GDP off dp-accounting", distance, "<=", 1e-9))
    slowest = max(row["milliseconds"] for row in found if row["part"] == "conversion")
    judged.append(target("slowest conversion, ms", slowest, "<=", MILLISECONDS))
    return judged


# Told apart by colour-blind readers and in print: hue and dash.
_LOOKS = {
    "naive_counter": ("#8a8f98", ":"),
    "tree": ("#d1495b", "-"),
    "honaker": ("#e08e45", "-"),
    "smooth_binary": ("#8f6bb3", "-"),
    "toeplitz": ("#2e8b57", "--"),
    "blt": ("#0b6e99", "-"),
    "unbounded_counter": ("#222222", "-."),
}


def draw(figure: Any, curves: dict[str, Reals]) -> None:
    """Standard deviation of the running sum by step, at rho = 1."""
    panel = figure.subplots()
    for name, (colour, dash) in _LOOKS.items():
        line = curves[name]
        panel.plot(np.arange(1, len(line) + 1), line, dash, color=colour, linewidth=1.1, label=name)
    panel.set(xlabel="step", ylabel="standard deviation", xscale="log", ylim=(0, 9))
    panel.set_title("Noise of the running sum, rho = 1, T = 1024")
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False)
