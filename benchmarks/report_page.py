"""Results for people: a table for the terminal, and one HTML page of a whole folder.

The page needs nothing else: no script, no request. It shows what earlier runs left in the folder,
one JSON file per bench, and the audit's file.
"""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.harness import BENCHES, Result, Row, target
from dpstream.audit.report import summary, verdict
from dpstream.errors import InvalidInput

MARKS = {True: ("reached", "green"), False: ("missed", "red"), None: ("not measured", "yellow")}


def table(result: Result) -> RenderableType:
    """The rows, the targets and the notes of a result, for `rich` to print."""
    name = result["bench"]
    about = BENCHES.get(name, "")
    rows = Table(title=f"bench {name}: {about}" if about else f"bench {name}", title_justify="left")
    keys = columns(result["rows"])
    for key in keys:
        rows.add_column(heading(key), justify="right" if _numeric(result["rows"], key) else "left")
    for row in result["rows"]:
        rows.add_row(*(Text(cell(row.get(key))) for key in keys))

    targets = Table(title="targets", title_justify="left")
    for title in ("target", "measured", "bound", "verdict"):
        targets.add_column(title, justify="right" if title in ("measured", "bound") else "left")
    for one in result["targets"]:
        row, colour = _judged_row(one), MARKS[one["reached"]][1]
        judgement = Text(row["verdict"], style=colour)
        targets.add_row(Text(row["target"]), cell(row["measured"]), row["bound"], judgement)
    return Group(rows, targets, *(Text(f"note: {note}") for note in result.get("notes", ())))


def columns(rows: list[Row]) -> list[str]:
    """The keys of all rows, in the order met; those that are empty everywhere are left out."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return [key for key in keys if any(row.get(key) not in (None, "") for row in rows)]


def heading(key: str) -> str:
    """A key as people read it.

    >>> heading("samples_per_second")
    'samples/s'
    """
    return re.sub(r" per second$", "/s", key.replace("_", " "))


def cell(value: Any) -> str:
    """A value as people read it.

    >>> cell(1234567), cell(0.001234567), cell(123.456), cell(None), cell(True)
    ('1,234,567', '0.00123', '123', '–', 'yes')
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def _numeric(rows: list[Row], key: str) -> bool:
    return all(isinstance(row.get(key), int | float | None) for row in rows)


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
            for one in audit_targets(self.audit):
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


_AUDIT_ABOUT = "lower bounds on what is lost, by attack; controls are broken on purpose"


def report(out: Path) -> Path:
    """Collect every result of the folder `out` in `out/report.html`."""
    found = collect(out)
    sections = [_section(result, out / f"{result['bench']}.png") for result in found.results]
    if found.audit is not None:
        sections.append(_audit(found.audit))
    body = "\n".join([_overview(found), *sections])
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>dpstream benchmarks</title><style>{STYLE}</style></head>\n"
        "<body><h1>dpstream benchmarks</h1><p>Ratios were measured side by side in one run; "
        f"absolute figures depend on the machine.</p>\n{body}\n</body></html>\n"
    )
    path = out / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _overview(found: Collected) -> str:
    """Every target of every bench with its verdict, the machines, and what is not here."""
    counts = found.counts()
    tally = ", ".join(f"{counts[key]} {MARKS[key][0]}" for key in (True, False, None))
    parts = [f"<h2>Targets</h2><p>{tally}.</p>", _targets(found)]
    parts.append("<h2>Machines and versions</h2>" + _table(found.machines()))
    if found.absent:
        names = ", ".join(found.absent)
        parts.append(f"<p>Not in this folder: {escape(names)}.</p>")
    return f"<section>{''.join(parts)}</section>"


def _targets(found: Collected) -> str:
    lines = []
    for name, one in found.targets():
        row = {"bench": name} | _judged_row(one)
        link = f'<td><a href="#{escape(name)}">{escape(name)}</a></td>'
        rest = "".join(_cell(key, value) for key, value in row.items() if key != "bench")
        lines.append(f"<tr>{link}{rest}</tr>")
    head = "".join(f"<th>{key}</th>" for key in ("bench", "target", "measured", "bound", "verdict"))
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


def _section(result: Result, plot: Path) -> str:
    name = str(result["bench"])
    parts = [_head(name, BENCHES.get(name, ""), result)]
    if plot.is_file():
        image = base64.b64encode(plot.read_bytes()).decode("ascii")
        parts.append(f'<img alt="Plot of {escape(name)}" src="data:image/png;base64,{image}">')
    parts += [f"<p>Note: {escape(note)}</p>" for note in result.get("notes", ())]
    parts.append(_table([_judged_row(one) for one in result["targets"]]))
    parts.append(f"<details><summary>All figures</summary>{_table(result['rows'])}</details>")
    return f'<section id="{escape(name)}">{"".join(parts)}</section>'


def _audit(result: Result) -> str:
    parts = [_head("audit", _AUDIT_ABOUT, result)]
    parts.append(_table([_judged_row(one) for one in audit_targets(result)]))
    parts.append(audit_table(result["rows"]))
    return f'<section id="audit">{"".join(parts)}</section>'


def _head(name: str, about: str, result: Result) -> str:
    facts = [f"dpstream {result.get('version', '?')}", "short run" if result.get("quick") else ""]
    machine = result.get("machine", {})
    facts += [f"{heading(key)} {value}" for key, value in machine.items() if value is not None]
    facts += [f"{peer} {number}" for peer, number in result.get("peers", {}).items()]
    small = escape(" · ".join(fact for fact in facts if fact))
    return f"<h2>{escape(name)}</h2><p>{escape(about)}<br><small>{small}</small></p>"


def _judged_row(one: Row) -> Row:
    word = MARKS[one["reached"]][0]
    return {
        "target": one["name"],
        "measured": one["value"],
        "bound": f"{one['op']} {cell(one['bound'])}",
        "verdict": f"{word}: {one['reason']}" if one.get("reason") else word,
    }


def _table(rows: list[Row]) -> str:
    keys = columns(rows)
    head = "".join(f"<th>{escape(heading(key))}</th>" for key in keys)
    lines = ("".join(_cell(key, row.get(key)) for key in keys) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _cell(key: str, value: Any) -> str:
    kind = "number" if isinstance(value, int | float) else ""
    if key == "verdict":
        kind = str(value).partition(":")[0].replace(" ", "-")
    return f'<td class="{kind}">{escape(cell(value))}</td>'


_HEADINGS = ("name", "what it is", "claimed", "delta", "shown", "", "verdict")
_FULL = 2.0  # the bar's right end, in claims


def audit_targets(result: Result) -> list[Row]:
    """Nothing shipped is rejected, and every control is caught."""
    found = summary(result["rows"])
    return [
        target(f"shipped and rejected, of {found['shipped']}", len(found["rejected"]), "==", 0),
        target(f"controls missed, of {found['controls']}", len(found["missed"]), "==", 0),
    ]


def audit_table(rows: list[Row]) -> str:
    """One line each; the mark in the middle of the bar is the claim."""
    head = "".join(f"<th>{title}</th>" for title in _HEADINGS)
    body = "".join(_line(row) for row in rows)
    return (
        '<p>The bar is what an attack has shown to be lost; the mark is the claim.</p><div class="'
        f'wide"><table><tr>{head}</tr>{body}</table></div>'
    )


def _line(row: Row) -> str:
    kind = "control: " if row["control"] else ""
    word = verdict(row)[1]
    share = min(max(row["lower_bound"] / row["claimed"] / _FULL, 0.0), 1.0)
    bar = f'<div class="track"><i style="width:{100 * share:.0f}%"></i><b></b></div>'
    figures = "".join(_number(row[key]) for key in ("claimed", "delta", "lower_bound"))
    texts = f"<td>{escape(row['name'])}</td><td>{escape(kind + row.get('about', ''))}</td>"
    return f'<tr>{texts}{figures}<td>{bar}</td><td class="{word}">{word}</td></tr>'


def _number(value: Any) -> str:
    return f'<td class="number">{value:.3g}</td>'


POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5d6675; --line: #dfe3ea;
  --back: #f6f7f9; --card: #fff; --good: #17703a; --bad: #b3261e; --open: #8a5a00;
  --bar: #9db7e8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #9aa4b5; --line: #313947;
  --back: #12161d; --card: #1a202a; --good: #5fd08a; --bad: #ff8a80; --open: #f2c14e;
  --bar: #3f5f9c; } }
body { margin: 0 auto; max-width: 68rem; padding: 2rem 1rem 4rem; background: var(--back);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1, h2 { line-height: 1.2; margin: 0 0 .4rem; } p { margin: .3rem 0 1rem; color: var(--soft); }
a { color: inherit; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 1.3rem 1.5rem; margin: 1.5rem 0; }
img { display: block; width: 100%; height: auto; background: #fff; border-radius: 6px; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: left; }
th { color: var(--soft); font-weight: 600; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.reached, .holds, .caught { color: var(--good); } .missed, .MISSED, .REJECTED { color: var(--bad); }
.not-measured { color: var(--open); }
.track { position: relative; width: 12rem; height: .8rem; background: var(--back);
  border-radius: 3px; overflow: hidden; }
.track i { position: absolute; inset: 0 auto 0 0; background: var(--bar); }
.track b { position: absolute; left: 50%; top: 0; bottom: 0; width: 2px; background: var(--ink); }
summary { cursor: pointer; color: var(--soft); }
"""
