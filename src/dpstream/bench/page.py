"""All results of a folder as one HTML file that needs nothing else: no script, no request."""

from __future__ import annotations

import base64
import json
from html import escape
from pathlib import Path
from typing import Any

from dpstream.bench.harness import BENCHES, Result, Row
from dpstream.bench.tables import MARKS, cell, columns, heading
from dpstream.errors import InvalidInput

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5d6675; --line: #dfe3ea;
  --back: #f6f7f9; --card: #fff; --good: #17703a; --bad: #b3261e; --open: #8a5a00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #9aa4b5; --line: #313947;
  --back: #12161d; --card: #1a202a; --good: #5fd08a; --bad: #ff8a80; --open: #f2c14e; } }
body { margin: 0 auto; max-width: 68rem; padding: 2rem 1rem 4rem; background: var(--back);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1, h2 { line-height: 1.2; margin: 0 0 .4rem; } p { margin: .3rem 0 1rem; color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 1.3rem 1.5rem; margin: 1.5rem 0; }
img { display: block; width: 100%; height: auto; background: #fff; border-radius: 6px; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: left; }
th { color: var(--soft); font-weight: 600; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.reached { color: var(--good); } .missed { color: var(--bad); }
.not-measured { color: var(--open); }
summary { cursor: pointer; color: var(--soft); }
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def report(out: Path) -> Path:
    """Collect every result of the folder `out` in `out/report.html`."""
    results = _results(out)
    if not results:
        raise InvalidInput(
            f"a report needs results, but {out} has none; run `dpstream bench NAME` first"
        )
    body = "\n".join(_section(result, out / f"{result['bench']}.png") for result in results)
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>dpstream benchmarks</title><style>{_STYLE}</style></head>\n"
        "<body><h1>dpstream benchmarks</h1><p>Ratios were measured side by side in one run; "
        f"absolute figures depend on the machine.</p>\n{body}\n</body></html>\n"
    )
    path = out / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _results(out: Path) -> list[Result]:
    """Results in the order of BENCHES, unknown ones last; other JSON files are passed over."""
    found = []
    for path in sorted(out.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InvalidInput(f"{path.name} is no JSON ({error}); run its bench again") from error
        if isinstance(content, dict) and {"bench", "machine", "rows", "targets"} <= set(content):
            found.append(content)
    order = {name: place for place, name in enumerate(BENCHES)}
    return sorted(found, key=lambda one: (order.get(one["bench"], len(order)), one["bench"]))


def _section(result: Result, plot: Path) -> str:
    name, machine = str(result["bench"]), result["machine"]
    facts = [f"dpstream {result.get('version', '?')}", "short run" if result.get("quick") else ""]
    facts += [f"{heading(key)} {value}" for key, value in machine.items() if value is not None]
    facts += [f"{peer} {number}" for peer, number in result.get("peers", {}).items()]
    parts = [
        f"<h2>{escape(name)}</h2><p>{escape(BENCHES.get(name, ''))}<br>",
        f"<small>{escape(' · '.join(fact for fact in facts if fact))}</small></p>",
    ]
    if plot.is_file():
        image = base64.b64encode(plot.read_bytes()).decode("ascii")
        parts.append(f'<img alt="Plot of {escape(name)}" src="data:image/png;base64,{image}">')
    parts += [f"<p>Note: {escape(note)}</p>" for note in result.get("notes", ())]
    parts.append(_table([_judged(one) for one in result["targets"]]))
    parts.append(f"<details><summary>All figures</summary>{_table(result['rows'])}</details>")
    return f"<section>{''.join(parts)}</section>"


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
