"""The golden corpus: what fixed runs publish and charge, kept as digests.

A digest is SHA-256 of a canonical text. Reals have twelve significant digits in it: the last bits
of a logarithm differ between processors. The ledger is taken without times and random values, and
without the names of its fields.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pyarrow.parquet as pq

import dpstream as dps

SECRET, RUN = bytes(range(32)), bytes(range(16))
FILE = Path(__file__).with_name("digests.json")
CHANGELOG = Path(__file__).resolve().parents[2] / "CHANGELOG.md"
_REAL = re.compile(r"(?<![\w.])-?\d+\.\d+(?:e[+-]?\d+)?(?![\w.])")
_PASSING = {"at", "digest", "fingerprint"}  # what a record of the ledger says of this very run
_PASSING |= {"periods", "own_periods"}  # younger than the corpus; tests/query has them


@dataclass(frozen=True)
class Outcome:
    """What one run has published, what its ledger says, and what of that is spent: as text."""

    releases: str
    ledger: str
    spent: str

    def digests(self):
        """The entry of the corpus."""
        return {"releases": sha256(self.releases), "ledger": sha256(self.ledger + self.spent)}


def sha256(text):
    """The digest of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def run_options(**changes):
    """The options of a run."""
    return dps.EngineOptions(
        **{"run_id": RUN, "buckets": 2, "threads": 2, "snapshot_every": 3} | changes
    )


def canonical(value):
    """A value as JSON: reals with twelve digits, everything that JSON has no form for as text."""
    if isinstance(value, bool | int | str | None):
        return value
    if isinstance(value, float):
        return f"{value:.12g}"
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): canonical(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(one) for one in value]
    if hasattr(value, "tolist"):
        return canonical(value.tolist())
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def lines(values):
    """One line of JSON for each value."""
    return "".join(json.dumps(canonical(value), sort_keys=True) + "\n" for value in values)


def outcome(releases, ledger):
    """What was published (a text), and what the ledger at a path says of it.

    The ledger: the terms of its books, every charge in order, and the balances. A run with a state
    directory keeps the digests of its input there, one without in charges of nothing; they alone
    are not in what is spent.
    """
    book = dps.Ledger(ledger)
    try:
        records = [one for one in book.history() if "amount" in one or "terms" in one]
        balances = [[one[name] for name in ("dataset", "spent")] for one in book.report()]
    finally:
        book.close()
    spent = [one for one in records if one.get("amount") != "0" or one.get("kind") == "close"]
    return Outcome(releases, lines(map(_values, records)), lines([*map(_values, spent), *balances]))


def _values(record):
    """The values of a record, without those of this very run; names may change."""
    if not isinstance(record, dict):
        return record
    kept = [_values(value) for name, value in record.items() if name not in _PASSING]
    return sorted(kept, key=lambda value: json.dumps(canonical(value), sort_keys=True))


def release_lines(releases):
    """The releases of a mechanism, a line for each step that was published."""
    return lines([one.step, one.values, one.paid, one.held, one.stddev] for one in releases)


def table_text(table):
    """A release of a query: its columns and their types, its metadata, its rows."""
    told = json.loads((table.schema.metadata or {}).get(b"dpstream", b"null"))
    columns = [[field.name, str(field.type)] for field in table.schema]
    return lines([columns, told, *(list(row.values()) for row in table.to_pylist())])


def files_text(folder):
    """The files of a sink's directory, by name: tables of Parquet, and text as it stands."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.suffix == ".parquet":
            found.append(f"{path.name}\n{table_text(pq.read_table(path))}")
        elif not path.name.startswith("."):
            found.append(f"{path.name}\n{rounded(path.read_text('utf-8'))}")
    return "".join(found)


def rows_text(rows):
    """Rows, dicts, as every sink has them: without an order, numbers and instants in one form."""
    return "".join(sorted(lines([{name: _plain(of) for name, of in row.items()}]) for row in rows))


def _plain(value):
    """Numbers as reals (JSON has 9 for 9.0), instants and texts of them as instants in UTC."""
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and value[4:5] == "-" == value[7:8]:
        value = datetime.fromisoformat(value)
    return value.astimezone(UTC).isoformat() if isinstance(value, datetime) else value


def rounded(text):
    """A text whose reals have twelve significant digits."""
    return _REAL.sub(lambda found: f"{float(found.group()):.12g}", text)


def stored():
    """The corpus: digests by the name of a case."""
    return json.loads(FILE.read_text("ascii")) if FILE.exists() else {}


def write(made):
    """Put digests in place of all cases of the same kinds; the line that CHANGELOG.md needs."""
    kinds = {name.partition("/")[0] for name in made}
    kept = {name: of for name, of in stored().items() if name.partition("/")[0] not in kinds}
    FILE.write_text(json.dumps(kept | made, indent=1, sort_keys=True) + "\n", "ascii")
    return f"Golden corpus: {short_digest()}: <the reason>"


def short_digest():
    """Names the corpus in CHANGELOG.md."""
    return hashlib.sha256(FILE.read_bytes()).hexdigest()[:12]


class Golden:
    """Compares runs with the stored digests, or collects their digests to store them."""

    def __init__(self, writing=False):
        self.writing, self.stored, self.made = writing, stored(), {}

    def check(self, name, whole, resumed):
        """The run `whole` and the run `resumed` in the middle have the digests of the case."""
        parts = [
            one for one in ("releases", "spent") if getattr(whole, one) != getattr(resumed, one)
        ]
        why = f"its {' and '.join(parts)} differ from those of the whole run"
        assert not parts, self.told(name, ["resumed"], why)
        found = whole.digests()
        if self.writing:
            self.made[name] = found
            return
        known = self.stored.get(name, {})
        differs = [part for part in found if found[part] != known.get(part)]
        pairs = (
            f"{part} {str(known.get(part))[:12]} is now {found[part][:12]}" for part in differs
        )
        assert not differs, self.told(name, differs, "; ".join(pairs))

    def told(self, name, parts, why):
        """What differs, and what to do about it."""
        return (
            f"golden case {name!r} differs in: {', '.join(parts)} ({why}). If what is published "
            "was meant to change: make golden WRITE=1, and put the line that it prints, with the "
            "reason, into CHANGELOG.md"
        )
