"""`dpstream bench`: measure, print a table, write JSON and plots."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated

from typer import Argument, Option

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
        Argument(
            autocompletion=complete_bench, help="A bench, all of them, or report (one HTML page)."
        ),
    ] = "all",
    quick: Annotated[bool, Option("--quick", help="A short run.")] = False,
    as_json: AsJson = False,
    out: Annotated[Path, Option(help="Folder for JSON and plots.")] = Path("bench-results"),
    days: Annotated[
        int | None, Option(help="Of year: how many days are simulated, instead of 365.")
    ] = None,
    earlier: Annotated[
        Path | None,
        Option(help="Of year: the src folder of an earlier version, to upgrade from."),
    ] = None,
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
    asked = {"days": days, "earlier": earlier}
    more = {key: value for key, value in asked.items() if value is not None}
    if more and name != "year":
        raise InvalidParameter(f"only the bench year has --{next(iter(more))}; got {name!r}")
    results = []
    for each in benches.BENCHES if name == "all" else [name]:
        note(f"bench {each}: {benches.BENCHES[each]}")
        with progress_bar(each) as progress:
            result = benches.run(
                each,
                quick=quick,
                out=out,
                progress=lambda done, total, what: progress(done, total),
                more=more,
            )
        results.append(result)
        if not as_json:
            people().print(benches.table(result))
    if as_json:
        print_json({"benches": results} if name == "all" else results[0])


def _report(benches: ModuleType, out: Path, *, as_json: bool) -> None:
    page, facts = str(benches.report(out)), benches.collect(out).to_json()
    if as_json:
        print_json({"report": page} | facts)
        return
    print(page)
    note(
        f"targets: {facts['reached']} reached, {facts['missed']} missed, "
        f"{facts['not_measured']} not measured"
    )
    if facts["absent"]:
        note(f"not in {out}: {', '.join(facts['absent'])}")


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
