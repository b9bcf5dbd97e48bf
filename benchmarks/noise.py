"""Exact samples per second on one core: ours, the peers', and NumPy's unsafe floats for scale.

Every round times each library once, in turns on the same core, so a ratio compares neighbours in
time; figures are medians over rounds. The measured spread is compared with the exact one: a fast
sampler of the wrong law is of no use.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from benchmarks.harness import Findings, Progress, Row, one_core, target
from benchmarks.peers import PeerError, Peers, started
from dpstream.privacy.noise import Address, Stream, discrete_gaussian, discrete_laplace

LAWS = ("discrete_laplace", "discrete_gaussian")
SCALES = (10, 100, 1_000, 10_000, 1_000_000)
JUDGED = SCALES[:4]
PER_SECOND, TIMES_OPENDP, STANDARD_ERRORS = 2_000_000, 20, 5
_OURS, _SAFE_TO_WAIT = "dpstream", 10_000
_KURTOSIS = {"discrete_laplace": 6, "discrete_gaussian": 3}

Timed = tuple[list[float], float]
"""Seconds of each call, and the sum of all squared samples."""


@dataclass
class Lane:
    """One library at one law and scale: how it draws, how much, and what was seen."""

    library: str
    size: int
    time: Callable[[int, int], Timed]  # (size, calls) -> what was seen
    rates: list[float] = field(default_factory=list)
    samples: int = 0
    squares: float = 0.0
    microseconds: float | None = None
    note: str = ""

    def measure(self) -> None:
        """One vector call; a library that once could not is left out from there on."""
        if self.note:
            return
        try:
            seconds, squares = self.time(self.size, 1)
        except PeerError as error:
            self.note = str(error)
            return
        self.rates.append(self.size / seconds[0])
        self.samples += self.size
        self.squares += squares

    def warm_up(self, calls: int) -> None:
        """Compile, load, fill caches; then the time of a call that draws one sample."""
        try:
            self.time(min(self.size, 1_000), 1)
            self.microseconds = statistics.median(self.time(1, calls)[0]) * 1e6
        except PeerError as error:
            self.note = str(error)


def measure(*, quick: bool, progress: Progress) -> Findings:
    """Time every library at every law and scale."""
    rounds = 5 if quick else 21
    cells = [(law, scale) for law in LAWS for scale in SCALES]
    rows: list[Row] = []
    with one_core() as pinned, started("noise_samplers") as peers:
        for done, (law, scale) in enumerate(cells):
            progress(done, len(cells), f"{law} at scale {scale:,}")
            lanes = _lanes(law, scale, peers)
            able = [lane for lane in lanes if not lane.note]
            for lane in able:
                lane.warm_up(20 if quick else 100)
            for _ in range(rounds):
                for lane in able:
                    lane.measure()
            rows += [_row(law, scale, lane, lanes[0]) for lane in lanes]
        progress(len(cells), len(cells), "done")
    notes = [] if pinned else ["this system cannot keep a process on one core"]
    if peers.reason:
        notes.append(f"peers were not measured: {peers.reason}")
    return Findings(
        rows=rows,
        targets=targets(rows),
        peers=peers.versions,
        notes=notes,
        draw=lambda figure: draw(figure, rows, PER_SECOND),
    )


def _lanes(law: str, scale: int, peers: Peers) -> list[Lane]:
    def peer(library: str) -> Callable[[int, int], Timed]:
        def ask(size: int, calls: int) -> Timed:
            answer = peers.ask(library=library, law=law, scale=scale, size=size, calls=calls)
            return answer["seconds"], answer["squares"]

        return ask

    # Calls of about equal length (some 50 ms): a busy machine then slows all of them alike.
    lanes = [
        Lane(_OURS, 1_000_000, _ours(law, scale)),
        Lane("opendp", 5_000, peer("opendp")),
        Lane("diffprivlib", 4_000, peer("diffprivlib")),
        Lane("numpy (unsafe)", 1_000_000, _numpy(law, scale)),
    ]
    if law == "discrete_gaussian":  # diffprivlib walks from zero: its time grows with the scale
        lanes[2].size = max(4, 10_000 // scale)
        if scale > _SAFE_TO_WAIT:
            lanes[2].note = "left out: seconds per draw at this scale"
    return lanes


def _ours(law: str, scale: int) -> Callable[[int, int], Timed]:
    address = Address(run=b"bench of samples", query=law, window=scale, purpose="bench")
    stream, step = Stream(b"a key that keeps no secret here.", address), 0

    def call(size: int) -> Any:
        nonlocal step
        step += 1
        if law == "discrete_laplace":
            return discrete_laplace(stream.at(step, size), Fraction(scale))
        return discrete_gaussian(stream.at(step, size), Fraction(scale) ** 2)

    return _timed(call)


def _numpy(law: str, scale: int) -> Callable[[int, int], Timed]:
    """Rounded floats from a generator that is no cipher: fast, and no privacy."""
    rng = np.random.default_rng(scale)
    sample = rng.laplace if law == "discrete_laplace" else rng.normal
    return _timed(lambda size: np.rint(sample(0.0, scale, size)).astype(np.int64))


def _timed(call: Callable[[int], Any]) -> Callable[[int, int], Timed]:
    def timed(size: int, calls: int) -> Timed:
        seconds, squares = [], 0.0
        for _ in range(calls):
            began = time.perf_counter()
            values = call(size)
            seconds.append(time.perf_counter() - began)
            squares += float(np.square(values.astype(np.float64)).sum())
        return seconds, squares

    return timed


def _row(law: str, scale: int, lane: Lane, ours: Lane) -> Row:
    ratios = [mine / theirs for mine, theirs in zip(ours.rates, lane.rates, strict=False)]
    exact = exact_std(law, scale)
    std = math.sqrt(lane.squares / lane.samples) if lane.samples else None
    error = exact * math.sqrt((_KURTOSIS[law] - 1) / (4 * max(lane.samples, 1)))
    return {
        "law": law,
        "scale": scale,
        "library": lane.library,
        "samples_per_second": round(statistics.median(lane.rates)) if lane.rates else None,
        "times_slower": statistics.median(ratios) if ratios else None,
        "single_draw_us": lane.microseconds,
        "vector": lane.size,
        "std": std,
        "exact_std": exact,
        "std_z": None if std is None else (std - exact) / error,
        "note": lane.note,
    }


def exact_std(law: str, scale: int) -> float:
    """The standard deviation of the law on the integers.

    Laplace: 2q / (1 - q)^2 with q = exp(-1 / scale). Gaussian: the scale itself, which from scale
    10 on is off by less than exp(-1900).

    >>> round(exact_std("discrete_laplace", 10), 4), exact_std("discrete_gaussian", 10)
    (14.1362, 10.0)
    """
    if law == "discrete_gaussian":
        return float(scale)
    return 1 / (math.sqrt(2) * math.sinh(0.5 / scale))


def targets(rows: list[Row]) -> list[Row]:
    """Speed and ratio for each law and scale up to 10^4, and the spread of all our samples."""
    seen = {(row["law"], row["scale"], row["library"]): row for row in rows}
    judged = []
    for law in LAWS:
        for scale in JUDGED:
            what = f"{law}, scale {scale:,}"
            ours, opendp = seen[law, scale, _OURS], seen[law, scale, "opendp"]
            judged.append(
                target(f"{what}: samples/s", ours["samples_per_second"], ">=", PER_SECOND)
            )
            judged.append(
                target(
                    f"{what}: times opendp",
                    opendp["times_slower"],
                    ">=",
                    TIMES_OPENDP,
                    reason=opendp["note"] or "opendp was not measured",
                )
            )
    worst = max(abs(row["std_z"]) for row in rows if row["library"] == _OURS)
    judged.append(target("worst std, in standard errors", worst, "<=", STANDARD_ERRORS))
    return judged


# Told apart by colour-blind readers and in print: hue and marker.
_LOOKS = {
    "dpstream": ("#0b6e99", "o"),
    "opendp": ("#d1495b", "s"),
    "diffprivlib": ("#8f6bb3", "^"),
    "numpy (unsafe)": ("#8a8f98", "x"),
}


def draw(figure: Any, rows: list[Row], aim: float) -> None:
    """Log-log lines, and the target as a dashed line."""
    laws = list(dict.fromkeys(row["law"] for row in rows))
    panels = figure.subplots(1, len(laws), sharey=True, squeeze=False)[0]
    for panel, law in zip(panels, laws, strict=True):
        for library, (colour, marker) in _LOOKS.items():
            points = [
                (row["scale"], row["samples_per_second"])
                for row in rows
                if row["law"] == law and row["library"] == library and row["samples_per_second"]
            ]
            if points:
                panel.plot(*zip(*points, strict=True), color=colour, marker=marker, label=library)
        panel.axhline(aim, color="#444444", linestyle="--", linewidth=1, label="target")
        panel.set(xscale="log", yscale="log", title=law.replace("_", " "), xlabel="scale")
        panel.grid(alpha=0.25, which="major")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("samples per second, one core")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
