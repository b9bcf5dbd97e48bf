"""A long run on a large domain: time, memory of the state, errors over time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np

from dpstream.bench.dpi_streams import distributions, divergence, gaussian_counts, mean_squared
from dpstream.bench.harness import Row
from dpstream.bench.trials import fixed_noise
from dpstream.mechanisms.infinite.dpi import Dpi
from dpstream.mechanisms.runner import Runner
from dpstream.privacy.state import pack

DOMAIN, POOL, SLOTS = 10_000, 6_500, 100_000
_ERRORS_EVERY: Final = 50
_SHARES: Final = 10  # rows, each over so large a part of the run
_WARM: Final = 3


def long_rows(slots: int, progress: Callable[[float], None]) -> list[Row]:
    """Both draws charged in every slot (Algorithm 3), three queries, a pool of 6,500.

    Making the pool and compiling are not in the time per slot; they have their own column.
    """
    mechanism = Dpi(
        epsilon=2,
        rows_per_user=1,
        dummy_rows=1_000_000,
        pool_size=POOL,
        allocation="random",
        series="telescoping",
        queries=(DOMAIN, 16, 4),
    )
    began = time.perf_counter()
    runner = Runner(mechanism, **fixed_noise("dpi long", 0))
    warm = np.concatenate(list(gaussian_counts(_WARM, items=DOMAIN, mean=1_000, seed=1)))
    for _ in runner.feed(warm):
        pass
    made = time.perf_counter() - began
    rows: list[Row] = []
    seconds, cpu, done = 0.0, 0.0, 0
    errors: list[tuple[float, float]] = []
    for block in gaussian_counts(slots, items=DOMAIN, mean=1_000):
        wall, processor = time.perf_counter(), time.process_time()
        values = [releases[0].values for releases in runner.feed(block)]
        seconds += time.perf_counter() - wall
        cpu += time.process_time() - processor
        picked = slice(0, len(block), _ERRORS_EVERY)
        truth, found = distributions(block[picked]), np.array(values[picked])
        errors += zip(
            mean_squared(found, truth).tolist(), divergence(found, truth).tolist(), strict=True
        )
        even = np.full(truth.shape, 1 / DOMAIN)
        last, done = done, done + len(block)
        progress(done / slots)
        if done == slots or _SHARES * done // slots > _SHARES * last // slots:
            mse, kl = (float(np.mean([pair[i] for pair in errors])) for i in (0, 1))
            errors = []
            rows.append(
                {"part": "long", "form": "Algorithm 3", "slots": done, "bins": DOMAIN}
                | {"pool": POOL, "seconds": seconds, "cpu_seconds": cpu}
                | {"ms_per_slot": 1e3 * seconds / done, "made_in_seconds": made}
                | {"mse": mse, "kl": kl, "uniform_mse": float(mean_squared(even, truth).mean())}
                | {"uniform_kl": float(divergence(even, truth).mean())}
                | {"state_bytes": len(pack(runner._progress.state, kind="mechanism state"))}
                | {"left": float(runner.left)}
            )
    return rows
