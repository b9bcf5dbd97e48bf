"""What the DPI bench is judged by, and what its rows say in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from dpstream.bench.dpi_budget import JUDGED
from dpstream.bench.dpi_long import SLOTS
from dpstream.bench.harness import Row, target

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
    return judged


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
    return found
