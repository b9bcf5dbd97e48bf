"""What earlier runs left in a folder: a JSON file per bench, and the audit's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpstream.bench import page_audit
from dpstream.bench.harness import BENCHES, Result, Row
from dpstream.errors import InvalidInput

AUDIT = "audit.json"


@dataclass(frozen=True, kw_only=True)
class Collected:
    """Results in the order of BENCHES, unknown ones last; other JSON files are passed over."""

    results: list[Result]
    audit: Result | None

    @property
    def absent(self) -> list[str]:
        """What has no result here."""
        there = {result["bench"] for result in self.results}
        benches = [name for name in BENCHES if name not in there]
        return benches if self.audit is not None else [*benches, "audit"]

    def targets(self) -> Iterator[tuple[str, Row]]:
        """Every judged target with the name of its bench."""
        for result in self.results:
            for one in result["targets"]:
                yield str(result["bench"]), one
        if self.audit is not None:
            for one in page_audit.targets(self.audit):
                yield "audit", one

    def counts(self) -> Counter[bool | None]:
        """How many targets were reached (True), missed (False), not measured (None)."""
        return Counter(one["reached"] for _, one in self.targets())

    def machines(self) -> list[Row]:
        """Each machine and set of versions once, with the benches that ran there."""
        found: dict[str, Row] = {}
        results = [*self.results, *([self.audit] if self.audit is not None else [])]
        for result in results:
            facts = {"dpstream": result.get("version"), **result.get("machine", {})}
            row = found.setdefault(json.dumps(facts, sort_keys=True), {**facts, "measured": ""})
            name = str(result.get("bench", "audit"))
            name += " (short run)" if result.get("quick") else ""
            row["measured"] += f", {name}" if row["measured"] else name
        return list(found.values())

    def to_json(self) -> dict[str, Any]:
        """What a script wants to know of a report."""
        counts = self.counts()
        return {
            "benches": [result["bench"] for result in self.results],
            "absent": self.absent,
            "reached": counts[True],
            "missed": counts[False],
            "not_measured": counts[None],
            "targets": [{"bench": name} | one for name, one in self.targets()],
        }


def collect(out: Path) -> Collected:
    """Read the folder; without a single result there is nothing to report."""
    results, audit = [], None
    for path in sorted(out.glob("*.json")):
        content = _read(path)
        if not isinstance(content, dict):
            continue
        if {"bench", "machine", "rows", "targets"} <= set(content):
            results.append(content)
        elif path.name == AUDIT and {"rows", "summary"} <= set(content):
            audit = content
    if not results and audit is None:
        raise InvalidInput(
            f"a report needs results, but {out} has none; run `dpstream bench NAME` or "
            "`dpstream audit --all --out DIR` first"
        )
    order = {name: place for place, name in enumerate(BENCHES)}
    results.sort(key=lambda one: (order.get(one["bench"], len(order)), one["bench"]))
    return Collected(results=results, audit=audit)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidInput(f"{path.name} is no JSON ({error}); run its bench again") from error
