"""`dpstream apply`: what a changed pipeline file means and costs, and carry it out."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from dpstream.cli.output import AsJson, note, print_json
from dpstream.cli.watch import cost_in_words
from dpstream.engines.clock import SystemClock
from dpstream.errors import InvalidParameter
from dpstream.privacy.state.mirrors import mirror_of
from dpstream.query.query import Query
from dpstream.query.windows import iso
from dpstream.session.change_plan import Change, plan_changes


def apply(
    path: Annotated[Path, Argument(metavar="PIPELINE", help="A pipeline.toml file.")],
    now: Annotated[
        bool,
        Option("--now", help="End runs at once; what takes their place is charged in full."),
    ] = False,
    yes: Annotated[bool, Option("--yes", "-y", help="Carry it out without asking.")] = False,
    who: Annotated[str, Option(help="Who wants that (default: the login name).")] = "",
    as_json: AsJson = False,
) -> None:
    """Show what a changed pipeline file means and costs, and carry it out.

    A query that is changed or removed goes on as it was to the end of its units' period, where they
    have one; then its run is ended for good, and the changed query begins, under a name of its own.
    The other queries are not disturbed. Without a terminal and without --yes it is only shown. What
    was accepted is carried out by the next start of `dpstream run` or `serve`; one that runs takes
    it up on SIGHUP, or (serve) by POST /reload on the operator side. Example:

    dpstream apply pipeline.toml --yes && kill -HUP "$(pidof -s dpstream)"
    """
    wanted_by = who or getpass.getuser()
    plan = plan_changes(path, at_once=now, now=SystemClock().now(), who=wanted_by)
    forced = [change for change in plan.changes if change.kind == "changed" and change.remark]
    accepted = False
    if not as_json:
        for change in plan.changes:
            print(_in_words(change))
    if plan.empty:
        note("nothing is to be changed")
    elif forced and not now:
        names = ", ".join(repr(change.name) for change in forced)
        note(
            f"{names} cannot wait for the end of a period, and a successor is charged in full: say "
            "so with --now (it applies to all of the above), or leave it as it was"
        )
        yes = False
    elif yes or (not as_json and sys.stdin.isatty() and typer.confirm("carry it out?")):
        plan.accept()
        accepted = True
        taken = "what runs takes it up on SIGHUP, or (dpstream serve) by POST /reload on the "
        taken += "operator side"
        if mirror_of(plan.file.state) is not None:
            taken = "a run that goes on with this state stops at its next step: start it again"
        note(f"accepted: the next start of {path} carries it out; {taken}")
    else:
        note("nothing was changed; to carry it out: --yes")
    if as_json:
        print_json({"changes": [_facts(change) for change in plan.changes], "accepted": accepted})
    if forced and not now:
        raise InvalidParameter(f"{path} was not applied")


def _in_words(change: Change) -> str:
    words = [f"{change.kind:<9} {change.name}"]
    if change.called != change.name:
        words[0] += f" (in state and sinks: {change.called})"
    words += change.differences
    ending, query = change.ending, change.query
    if ending is not None:
        until = "ends at once" if ending.at is None else f"goes on until {iso(ending.at)}, and ends"
        why = f" ({change.remark})" if change.remark else ""
        words.append(f"run {ending.run[:8]} {until} for good{why}; its releases stay")
    if query is not None and change.kind != "unchanged":
        words.append(f"charged: {cost_in_words(query)}{_begins(change)}")
    if _loses_windows(change):
        words.append(
            "windows that reach over this moment (HOP) are published by neither of the two"
        )
    return "\n          ".join(words)


def _loses_windows(change: Change) -> bool:
    """Do windows reach over the end of the old run, and the beginning of the new one?"""
    window = None if change.query is None else change.query.window
    return change.ending is not None and window is not None and window.kind == "hop"


def _begins(change: Change) -> str:
    """From when on a new query publishes."""
    first = _first(change)
    begins = "" if first is None else f", from {iso(first)} on"
    if change.ending is not None and change.ending.at is not None:
        return f"{begins}: nothing more in periods that have begun"
    return begins


def _first(change: Change) -> int | None:
    later = change.beginning.not_before
    at = None if change.ending is None else change.ending.at
    known = [time for time in (later, at) if time is not None]
    return max(known, default=None)


def _facts(change: Change) -> dict[str, Any]:
    ending, query = change.ending, change.query
    facts: dict[str, Any] = {"query": change.name, "change": change.kind, "called": change.called}
    if change.differences:
        facts["differences"] = change.differences
    if ending is not None:
        until = None if ending.at is None else iso(ending.at)
        facts |= {"ended_run": ending.run, "until": until, "remark": change.remark}
    if query is not None and change.kind != "unchanged":
        first = _first(change)
        facts["windows_over_the_border"] = "lost" if _loses_windows(change) else "none"
        facts |= {"charge": cost_in_words(query), "from": None if first is None else iso(first)}
        if isinstance(query, Query):
            facts |= {"epsilon": str(query.epsilon), "delta": str(query.delta)}
    return facts
