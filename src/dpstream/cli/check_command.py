"""`dpstream check`: what would become of a query's rows, and what it would cost; nothing is spent.

All figures are exact, so they are for the operator alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from dpstream.cli.command_options import (
    Payer,
    PublicTables,
    RefreshTables,
    RegistryTables,
    SharedLedger,
    table_paths,
)
from dpstream.cli.output import PROBLEMS, AsJson, note, print_json
from dpstream.cli.sql_command import (
    Functions,
    Params,
    Settings,
    compile_text,
    public_tables,
    source_paths,
)
from dpstream.engines.clock import SystemClock
from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.explanation import explain
from dpstream.explanation.plan_facts import noise_in_words
from dpstream.privacy.ledger.charges import Terms
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.query.book_periods import held_places
from dpstream.query.noise_plan import plan_query
from dpstream.query.query import Query
from dpstream.query.windows import iso
from dpstream.session import Feed, with_tables
from dpstream.session.budget import AnyQuery
from dpstream.session.first_rows import RowSample
from dpstream.session.pipeline import Pipeline, PipelineBook, load_pipeline
from dpstream.session.start import UnitedFeeds, look, would_fit

_MANY = 0.5  # of the rows; where more cannot be used something is wrong with the query


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A query that is checked: what it reads, and what is known of its budget."""

    query: AnyQuery
    feed: Feed
    state: Path | None
    dataset: str
    refused: str = ""
    """Why its book would refuse it."""
    charged: bool = False
    held: str = ""
    """A place in its book that is held for it, in words."""
    terms: Terms | None = None
    """Of its book, as far as they are known."""


def check(
    text: Annotated[
        str,
        Argument(metavar="PIPELINE|SQL", help="A pipeline.toml, the query, or a .sql file."),
    ],
    sources: Annotated[
        list[str] | None,
        Option("--source", metavar="TABLE=PATH", help="With SQL: what the table in FROM is."),
    ] = None,
    name: Annotated[
        str | None, Option("--query", help="Of a pipeline.toml: only this query.")
    ] = None,
    rows: Annotated[int, Option(min=1, help="The most rows to look at for each query.")] = 100_000,
    settings: Settings = None,
    params: Params = None,
    functions: Functions = None,
    public: PublicTables = None,
    refresh: RefreshTables = None,
    registry: RegistryTables = None,
    live: Annotated[
        bool, Option("--live", help="With SQL: a directory that grows, by the clock.")
    ] = False,
    ledger: SharedLedger = None,
    dataset: Payer = "stream",
    as_json: AsJson = False,
) -> None:
    """Look at some rows and the book before a query costs anything: operator only.

    Example: dpstream check pipeline.toml && dpstream run pipeline.toml
    """
    if text.endswith(".toml"):
        if settings or sources or params or functions or public or refresh or registry:
            raise InvalidParameter(
                "--set, --param, --function, --source, --public, --refresh and --registry go with "
                f"SQL; change {text} instead"
            )
        subjects = _of_pipeline(Path(text), name)
    else:
        compiled = compile_text(text, None, settings or [], params, functions)
        query = with_tables(
            compiled.query,
            public=public_tables(public, refresh),
            registry=table_paths("--registry", registry),
        )
        united = table_paths("--source", sources) if query.sources else {}
        paths = list(united.values()) if united else source_paths(compiled, sources or [])
        if name is not None or not paths:
            raise InvalidParameter(
                f"SQL needs --source {compiled.table}=PATH, and --query goes with a pipeline.toml"
            )
        refused, _ = would_fit([(query, None)], ledger=ledger, dataset=dataset)
        feed = Feed(source=paths[0] if len(paths) == 1 else paths, live=live)
        if united:
            feeds = (Feed(source=path, live=live, name=each) for each, path in united.items())
            feed = Feed(source=UnitedFeeds(feeds), live=live)
        subjects = [Subject(query=query, feed=feed, state=None, dataset=dataset, refused=refused)]
    reports = {each.query.name: _report(each, rows) for each in subjects}
    note("operator only: these figures are exact; do not show them to readers; nothing was charged")
    if as_json:
        print_json(reports)
    else:
        print("\n\n".join(_in_words(query, report) for query, report in reports.items()))
    if any(report["problems"] for report in reports.values()):
        raise typer.Exit(PROBLEMS)


def _of_pipeline(path: Path, name: str | None) -> list[Subject]:
    """The queries of a pipeline; whether they fit is asked for all of a book together."""
    pipeline = load_pipeline(path)
    names = [query.name for query in pipeline.queries]
    if name is not None and name not in names:
        raise InvalidParameter(f"{path} has no query {name!r}; its queries are {', '.join(names)}")
    subjects = []
    for book in pipeline.books:
        refused, charged = would_fit(
            [(query, pipeline.folders[query.name]) for query in book.queries],
            ledger=book.ledger,
            dataset=book.dataset,
            terms=book.terms(),
            analysts=pipeline.analysts,
            held=pipeline.changes.held,
        )
        held = _held(pipeline, book)
        subjects += [
            Subject(
                query=query,
                terms=book.terms(),
                feed=pipeline.feeds[query.name],
                state=pipeline.state,
                dataset=book.dataset,
                refused=refused,
                charged=query.name in charged,
                held=held.get(query.name, ""),
            )
            for query in book.queries
            if name in (None, query.name)
        ]
    return subjects


def _held(pipeline: Pipeline, book: PipelineBook) -> dict[str, str]:
    """In words, by query: places in the book that are held for it, or for what comes after it."""
    if not book.ledger.exists():
        return {}
    with closing(Ledger(book.ledger)) as ledger:
        known = [each for each in ledger.report() if each["dataset"] == book.dataset]
    held = {
        line["query"]: f"its place in the book is held: {line['query']!r} begins {iso(at)}"
        for each in known
        for line in each["spent_on"]
        if (at := held_places(each).get(line["run"])) is not None
    }
    after = {name: held.get(one.successor or "") for name, one in pipeline.changes.endings.items()}
    return held | {name: words for name, words in after.items() if words}


def _report(subject: Subject, rows: int) -> dict[str, Any]:
    """All that is known of a query before it runs; its problems in words."""
    query, problems, remarks = subject.query, list[str](), list[str]()
    samples: dict[str, RowSample] = {}
    try:
        clock = SystemClock()
        samples = look(query, subject.feed, state=subject.state, rows=rows, clock=clock)
        if "source" not in samples:
            remarks.append("standard input is not looked at: what is read from it is gone")
    except InvalidInput as problem:
        problems.append(str(problem))
    for place, sample in samples.items():
        _judge(place, sample, problems, remarks)
    if subject.refused:
        problems.append(subject.refused)
    if subject.held:
        remarks.append(subject.held)
    plan = explain(query)
    return {
        "problems": problems,
        "remarks": remarks,
        "operator_only": {place: sample.to_json() for place, sample in samples.items()},
        "bounds": plan.bounds,
        "noise": plan.columns,
        "keys": plan.keys,
        "budget": {
            **plan.budget,
            "dataset": subject.dataset,
            "charged_before": subject.charged,
            "fits": not subject.refused,
            **_charge(query, subject.terms),
        },
        "memory": plan.memory,
    }


def _charge(query: AnyQuery, terms: Terms | None) -> dict[str, Any]:
    """What the book counts of a query over users, which may have other periods than the book."""
    if terms is None or not isinstance(query, Query) or terms.unit != "user":
        return {}
    amount = plan_query(query.starting(SystemClock().now())).cost(terms)["amount"]
    share = float(amount / terms.total)
    return {"charge": float(amount), "of_the_book": share, "measure": terms.measure}


def _judge(place: str, sample: RowSample, problems: list[str], remarks: list[str]) -> None:
    """What is wrong with rows: what is worth stopping for, and what is worth knowing."""
    if not sample.read:
        remarks.append(f"{place}: there are no rows to look at (yet)")
        return
    lost = sample.read - sample.usable
    old = sample.outside + sample.late if sample.live else 0  # of a live source no mistake
    if sample.usable == 0 and sample.other_keys:
        problems.append(f"{place}: no row has one of the public groups; list those that are there")
    elif sample.useless or lost - old > _MANY * sample.read:
        words = sample.what_is_wrong()
        problems.append(f"{place}: {lost:,} of {sample.read:,} rows cannot be used; {words}")
    elif lost:
        remarks.append(f"{place}: {lost / sample.read:.1%} of the rows cannot be used")
    left_out = sample.contributions()["rows_left_out"] if sample.rows else 0.0
    if left_out > _MANY:
        remarks.append(
            f"{place}: the bounds leave out {left_out:.1%} of these rows; dpstream bounds proposes "
            "others"
        )


def _in_words(query: str, report: Mapping[str, Any]) -> str:
    """A report for people, a line for each topic."""
    lines = [f"QUERY {query}"]
    for place, facts in report["operator_only"].items():
        lines += [f"  {topic:<12}{words}" for topic, words in _sample_lines(place, facts)]
    budget = report["budget"]
    fits = "charged before, and not again" if budget["charged_before"] else budget["words"]
    room = ""
    if "charge" in budget:
        share = f"{budget['of_the_book']:.1%} of it"
        measure = "mu^2" if budget["measure"] == "mu_squared" else budget["measure"]
        room = f"; the book counts {measure} = {budget['charge']:.6g}, {share}"
    if not budget["charged_before"]:
        room += "; it fits" if budget["fits"] else "; it does not fit (see the problem below)"
    lines += [f"  {'noise':<12}{c['column']}: {noise_in_words(c)}" for c in report["noise"]]
    lines += [
        f"  {'keys':<12}{report['keys']['words']}",
        f"  {'budget':<12}{fits}, by the book of {budget['dataset']!r}{room}",
        f"  {'memory':<12}{report['memory']['words']}",
    ]
    lines += [f"  {'remark':<12}{words}" for words in report["remarks"]]
    lines += [f"  {'PROBLEM':<12}{words}" for words in report["problems"]]
    return "\n".join(lines if report["problems"] else [*lines, "  no problem was found"])


def _sample_lines(place: str, facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(topic, words) of rows that were looked at."""
    all_or_first = "all there are" if facts["complete"] else "the first"
    lines = [(place, f"{facts['rows']:,} rows were looked at, {all_or_first}")]
    lines.append(("columns", ", ".join(f"{name} ({k})" for name, k in facts["columns"].items())))
    if not facts["rows"]:
        return lines[:1]
    parts = ", ".join(f"{part} {share:.1%}" for part, share in facts["usable_parts"].items())
    lines.append(("usable", f"{facts['usable']:.1%} of the rows; by part: {parts}"))
    unusable = {**facts["unusable"]}
    unusable |= {"outside start and end": facts["outside"], "late": facts["late"]}
    unusable |= {"another key than the public groups": facts["other_keys"]}
    if any(unusable.values()):
        words = ", ".join(f"{reason}: {count:,}" for reason, count in unusable.items() if count)
        lines.append(("not usable", words))
    if times := facts.get("times"):
        found = f"{times['first']} to {times['last']}" if times["first"] else "none could be read"
        ends = f"{times['start']} to {times['end'] or 'no end'}"
        lines.append(("times", f"{found}; the query's range is {ends}"))
        if times["likely_unit"]:
            given = times["time_unit"] or "none"
            likely = f"{times['likely_unit']} since 1970, by its size; time_unit is {given}"
            lines.append(("time unit", likely))
        lines.append(("late", f"{facts['late_share']:.1%} of the rows"))
    if units := facts["units"]:
        words = f"{units['units']:,}, half of them with at most {units['median_rows']:g} rows, the "
        lines.append(("units", f"{words}largest with {units['most_rows']:,}, among these rows"))
        words = f"leave out {units['rows_left_out']:.1%} of these rows, of "
        lines.append(("bounds", f"{words}{units['units_cut']:.1%} of the units"))
    return lines
