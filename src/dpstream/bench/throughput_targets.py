"""What the throughput bench has to reach."""

from __future__ import annotations

from typing import Final

from dpstream.bench.harness import Row, target

OURS: Final = "dpstream"
PER_SECOND: Final = 3_000_000
TIMES: Final = {"opendp": 15, "pipeline-dp": 30}
FLAT: Final = (10_000_000, 60_000_000, 1.3)


def targets(rows: list[Row], one_shot: int, spark: int) -> list[Row]:
    """Speed at each size, ratios with the peers, and how speed holds up as a log grows.

    A one-shot peer is judged twice: at the same number of records, where 100 durable releases
    cost as much as ever, and against our speed over the largest log.
    """
    ours = {row["records"]: row for row in rows if row["library"] == OURS}
    largest = max(ours)
    judged = [
        target(
            f"records/s, {records:,} records",
            row["records_per_second"],
            ">=",
            PER_SECOND,
            reason=_why(row),
        )
        for records, row in ours.items()
    ]
    for library, times in TIMES.items():
        row = _fastest(rows, library, one_shot)
        judged += [
            target(
                f"times {library} ({one_shot:,} records), over {records:,} records",
                _ratio(ours[records], row, same=records == one_shot),
                ">=",
                times,
                reason=_why(ours[records], row),
            )
            for records in dict.fromkeys((one_shot, largest))
        ]
    row = _fastest(rows, "spark", spark)
    judged.append(
        target(
            f"times spark's plain group-by, {spark:,} records",
            _ratio(ours[spark], row, same=True),
            ">=",
            1,
            reason=_why(ours[spark], row),
        )
    )
    return [*judged, _flat(ours)]


def _flat(ours: dict[int, Row]) -> Row:
    small, large, bound = FLAT
    name = f"time per record, {large:,} over {small:,} records"
    if not {small, large} <= set(ours):
        return target(name, None, "<=", bound, reason="a short run has no logs of these sizes")
    before, after = ours[small]["records_per_second"], ours[large]["records_per_second"]
    value = before / after if before and after else None
    return target(name, value, "<=", bound, reason=_why(ours[small], ours[large]))


def _fastest(rows: list[Row], library: str, records: int) -> Row:
    """The library's best row at this size: a peer is judged in its strongest form."""
    found = [row for row in rows if (row["library"], row["records"]) == (library, records)]
    return max(found, key=lambda row: row["records_per_second"] or 0)


def _ratio(ours: Row, theirs: Row, *, same: bool) -> float | None:
    if not (ours["records_per_second"] and theirs["records_per_second"]):
        return None
    if same:  # measured in turns
        ratio: float = theirs["times_slower"]
        return ratio
    return float(ours["records_per_second"] / theirs["records_per_second"])


def _why(*rows: Row) -> str:
    """Why there is no figure."""
    return next((row["note"] for row in rows if row["note"]), "it was not measured")
