"""All results of a folder as one HTML file that needs nothing else: no script, no request."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path
from typing import Any

from dpstream.bench import page_audit
from dpstream.bench.collected import Collected, collect
from dpstream.bench.harness import BENCHES, Result, Row
from dpstream.bench.page_style import POLICY, STYLE
from dpstream.bench.tables import MARKS, cell, columns, heading

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
        row = {"bench": name} | _judged(one)
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
    parts.append(_table([_judged(one) for one in result["targets"]]))
    parts.append(f"<details><summary>All figures</summary>{_table(result['rows'])}</details>")
    return f'<section id="{escape(name)}">{"".join(parts)}</section>'


def _audit(result: Result) -> str:
    parts = [_head("audit", _AUDIT_ABOUT, result)]
    parts.append(_table([_judged(one) for one in page_audit.targets(result)]))
    parts.append(page_audit.table(result["rows"]))
    return f'<section id="audit">{"".join(parts)}</section>'


def _head(name: str, about: str, result: Result) -> str:
    facts = [f"dpstream {result.get('version', '?')}", "short run" if result.get("quick") else ""]
    machine = result.get("machine", {})
    facts += [f"{heading(key)} {value}" for key, value in machine.items() if value is not None]
    facts += [f"{peer} {number}" for peer, number in result.get("peers", {}).items()]
    small = escape(" · ".join(fact for fact in facts if fact))
    return f"<h2>{escape(name)}</h2><p>{escape(about)}<br><small>{small}</small></p>"


def _judged(one: Row) -> Row:
    word = MARKS[one["reached"]][0]
    verdict = f"{word}: {one['reason']}" if one.get("reason") else word
    bound = f"{one['op']} {cell(one['bound'])}"
    return {"target": one["name"], "measured": one["value"], "bound": bound, "verdict": verdict}


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
