"""`dpstream audit`: attack what is shipped, and what is known to be broken."""

from __future__ import annotations

import json
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from typer import Argument, Option

from dpstream.audit import report
from dpstream.cli.output import AsJson, new_table, note, people, print_json, progress_bar
from dpstream.errors import InvalidParameter
from dpstream.evaluate.machine import describe


def complete_audit(incomplete: str) -> list[str]:
    """Names for shell completion."""
    return [name for name in report.catalogue() if name.startswith(incomplete)]


def audit(
    name: Annotated[
        str | None,
        Argument(autocompletion=complete_audit, help="A mechanism, a query or a control."),
    ] = None,
    everything: Annotated[bool, Option("--all", help="Audit all of them.")] = False,
    quick: Annotated[
        bool, Option("--quick", help="Fewer runs, and one pair of neighbours each.")
    ] = False,
    seed: Annotated[int, Option(help="Chooses the secrets of the runs.")] = 0,
    out: Annotated[
        Path | None, Option(help="Also write DIR/audit.json, for `dpstream bench report`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Attack what dpstream ships, and show that the attacks catch what is broken."""
    if name is not None and everything:
        raise InvalidParameter(f"give a name or --all, not both; got {name!r} and --all")
    names = list(report.catalogue()) if everything else [name] if name is not None else []
    if not names:
        _list(as_json)
        return
    rows: list[dict[str, Any]] = []
    for number, target in enumerate(names, start=1):
        with ExitStack() as bars:

            def watch(label: str, bars: ExitStack = bars, number: int = number) -> Any:
                return bars.enter_context(progress_bar(f"{label} ({number}/{len(names)})"))

            rows += report.audit([target], quick=quick, seed=seed, watch=watch)
    summary = report.summary(rows)
    results = {"rows": rows, "summary": summary, "quick": quick, "seed": seed}
    if out is not None:  # where the benches' results are, with the machine that they name too
        facts = {"version": version("dpstream"), "machine": describe()}
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(facts | results, indent=2, allow_nan=False)
        (out / "audit.json").write_text(text + "\n", encoding="utf-8")
    if as_json:
        print_json(results)
    else:
        people().print(_table(rows))
        for row in rows if len(rows) == 1 else ():
            people().print(f"worst: {_witness(row)}")
    if summary["rejected"] or summary["missed"]:
        note(f"not as it should be: {', '.join([*summary['rejected'], *summary['missed']])}")
        raise typer.Exit(1)


def _list(as_json: bool) -> None:
    targets = [make() for make in report.catalogue().values()]
    if as_json:
        print_json([{"name": t.name, "control": t.control, "about": t.about} for t in targets])
        return
    table = new_table("name", "", "what it is", title="What can be audited")
    for target in targets:
        table.add_row(target.name, "control" if target.control else "", target.about)
    people().print(table)
    note("give a name, or --all; --quick takes a few minutes")


def _table(rows: list[dict[str, Any]]) -> Table:
    figures = ("claimed", "delta", "at least", "share", "confidence")
    title = "Lower bounds on what is lost"
    table = new_table("name", "", *figures, "verdict", right=figures, title=title)
    for row in rows:
        good, word = report.verdict(row)
        table.add_row(
            row["name"],
            "control" if row["control"] else "",
            f"{row['claimed']:.3g}",
            f"{row['delta']:.3g}",
            f"{row['lower_bound']:.3f}",
            f"{row['share_of_claim']:.0%}",
            "exact" if row["method"] == "exact" else f"{row['confidence']:.1%}",
            word,
            style=None if good else "bold red",
        )
    return table


def _witness(row: dict[str, Any]) -> str:
    witness = row["witness"]
    if "outcome" in witness:
        return str(witness["outcome"])
    event = witness["event"]
    return (
        f"{witness['pair']['name']}; the event {event['score']!r} >= {event['threshold']:.4g} "
        f"({event['order']}) was seen {event['hits']} times against {event['other_hits']}, in "
        f"{event['runs']} runs of each"
    )
