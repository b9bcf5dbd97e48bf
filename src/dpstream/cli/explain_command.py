"""`dpstream explain`: what a query will do and cost, before it reads anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from dpstream.cli.command_options import (
    PublicTables,
    RefreshTables,
    RegistryTables,
    table_paths,
)
from dpstream.cli.output import AsJson, print_json
from dpstream.cli.sql_command import Functions, Params, Settings, compile_text, public_tables
from dpstream.connectors.storage import safe_name
from dpstream.errors import InvalidParameter
from dpstream.explanation import explain as explain_query
from dpstream.explanation.alternatives import (
    Alternative,
    alternatives,
    as_plain,
    why_in_words,
)
from dpstream.privacy.state.inspection import bounds_in_words, chosen_bounds
from dpstream.session import with_tables
from dpstream.session.budget import AnyQuery
from dpstream.session.pipeline import load_pipeline


def explain(
    text: Annotated[
        str,
        Argument(
            metavar="SQL",
            help="The query, a .sql file, - for standard input, or a pipeline.toml: all it asks.",
        ),
    ],
    name: Annotated[
        str | None, Option("--query", help="Of a pipeline.toml: only this query.")
    ] = None,
    settings: Settings = None,
    params: Params = None,
    functions: Functions = None,
    public: PublicTables = None,
    refresh: RefreshTables = None,
    registry: RegistryTables = None,
    why: Annotated[
        bool, Option("--why", help="Also what other settings would do: noise, thresholds, bias.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Explain a query: plan, sensitivity, noise, keys, budget, memory, what it leaves open."""
    if text.endswith(".toml"):
        given = [*(settings or []), *(params or []), *(functions or [])]
        _explain_pipeline(Path(text), name, given, as_json=as_json, why=why)
        return
    if name is not None:
        raise InvalidParameter("--query chooses among the queries of a pipeline.toml")
    query = with_tables(
        compile_text(text, None, settings or [], params, functions).query,
        public=public_tables(public, refresh),
        registry=table_paths("--registry", registry),
    )
    explanation = explain_query(query)
    others = alternatives(query) if why else []
    if as_json:
        print_json(explanation.to_json() | _why(others))
    else:
        print("\n\n".join([explanation.text(), *([why_in_words(others)] if others else [])]))


def _why(others: list[Alternative]) -> dict[str, Any]:
    return {"alternatives": as_plain(others)} if others else {}


def _explain_pipeline(
    path: Path, name: str | None, settings: Sequence[str], *, as_json: bool, why: bool
) -> None:
    """Every query of a pipeline, or one of them, each under its name."""
    if settings:
        raise InvalidParameter(
            f"--set, --param and --function go with SQL; change the query in {path}"
        )
    pipeline = load_pipeline(path)
    queries: dict[str, AnyQuery] = {query.name: query for query in pipeline.queries}
    if name is not None and name not in queries:
        raise InvalidParameter(
            f"{path} has no query {name!r}; its queries are {', '.join(queries)}"
        )
    explanations = {
        each: explain_query(query) for each, query in queries.items() if name in (None, each)
    }
    bounds = {each: chosen_bounds(pipeline.state / safe_name(each)) for each in explanations}
    if as_json:
        told = {each: {"bounds_now": now} for each, now in bounds.items() if now is not None}
        for each in explanations if why else ():
            told[each] = told.get(each, {}) | _why(alternatives(queries[each]))
        print_json({each: one.to_json() | told.get(each, {}) for each, one in explanations.items()})
        return
    parts = []
    for each, one in explanations.items():
        parts.append(f"QUERY {each}\n\n{one.text()}")
        if why:
            parts.append(why_in_words(alternatives(queries[each])))
        if (now := bounds[each]) is not None:
            parts.append(f"BOUNDS NOW (as releases say)\n  {bounds_in_words(now)}")
    print("\n\n".join(parts))
