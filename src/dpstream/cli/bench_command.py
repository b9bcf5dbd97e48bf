"""`dpstream bench`: measure, print a table, write JSON and plots."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from dpstream.cli.output import AsJson, note, people, print_json, progress_bar
from dpstream.errors import InvalidParameter, MissingDependency


def complete_bench(incomplete: str) -> list[str]:
    """Names for shell completion."""
    try:
        names = ("all", "report", *_benches().BENCHES)
    except MissingDependency:
        return []
    return [name for name in names if name.startswith(incomplete)]


def bench(
    name: Annotated[
        str,
        typer.Argument(
            autocompletion=complete_bench, help="A bench, all of them, or report (one HTML page)."
        ),
    ] = "all",
    quick: Annotated[bool, typer.Option("--quick", help="A short run.")] = False,
    as_json: AsJson = False,
    out: Annotated[Path, typer.Option(help="Folder for JSON and plots.")] = Path("bench-results"),
) -> None:
    """Measure dpstream, against its peers where they are installed."""
    benches = _benches()
    if name == "report":
        _report(benches, out, as_json=as_json)
        return
    if name not in ("all", *benches.BENCHES):
        known = "; ".join(f"{key}: {line}" for key, line in benches.BENCHES.items())
        raise InvalidParameter(
            f"there is no bench {name!r}; choose all, report, or one of: {known}"
        )
    found = []
    for each in benches.BENCHES if name == "all" else [name]:
        note(f"bench {each}: {benches.BENCHES[each]}")
        found.append(_measure(benches, each, quick=quick, out=out))
        if not as_json:
            people().print(benches.table(found[-1]))
    if as_json:
        print_json({"benches": found} if name == "all" else found[0])


def _report(benches: ModuleType, out: Path, *, as_json: bool) -> None:
    page, found = str(benches.report(out)), benches.collect(out).to_json()
    if as_json:
        print_json({"report": page} | found)
        return
    print(page)
    note(
        f"targets: {found['reached']} reached, {found['missed']} missed, "
        f"{found['not_measured']} not measured"
    )
    if found["absent"]:
        note(f"not in {out}: {', '.join(found['absent'])}")


def _measure(benches: ModuleType, name: str, *, quick: bool, out: Path) -> dict[str, Any]:
    with progress_bar(name) as progress:
        result: dict[str, Any] = benches.run(
            name, quick=quick, out=out, progress=lambda done, total, what: progress(done, total)
        )
    return result


def _benches() -> ModuleType:
    """The package `benchmarks` of the checkout that dpstream runs from; a wheel is without it."""
    checkout = Path(__file__).resolve().parents[3]
    if not (checkout / "benchmarks" / "__init__.py").is_file():
        raise MissingDependency(
            "the benchmarks are not part of the installed package, they are in the folder "
            "benchmarks/ of dpstream's sources; in an unpacked sdist or a checkout, run "
            "`make bench BENCH=noise`, or `pip install -e '.[dev]'` and this command again"
        )
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    return import_module("benchmarks")
