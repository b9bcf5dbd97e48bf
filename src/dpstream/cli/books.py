"""Books of a ledger as people read them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table

from dpstream.cli.output import print_whole
from dpstream.privacy.amounts import show
from dpstream.privacy.charges import Terms
from dpstream.privacy.known_runs import is_about_run
from dpstream.privacy.ledger import Ledger
from dpstream.privacy.promises import delta_of_terms
from dpstream.privacy.remaining import as_epsilon, spent_and_left

_BAR = 24  # characters
_ALLOWANCES = {"tail": "of delta to find keys", "drift": "to round noise"}


def dated(book_file: Ledger) -> list[dict[str, Any]]:
    """The ledger's report in epsilon too, with the first and last time each line was charged."""
    books = book_file.report()
    times: dict[tuple[str, ...], list[str]] = {}
    for record in book_file.history():
        if "purpose" in record:
            key = (record["dataset"], record["run"], record["query"], record["purpose"])
            times.setdefault(key, []).append(record["at"])
    for book in books:
        terms = Terms.from_json(book["terms"])
        left = Fraction(book["left"])
        book["promise"] = promised(terms)
        book["epsilon"] = {
            "total": as_epsilon(terms, terms.total),
            "spent": as_epsilon(terms, terms.total - left),
            "left": as_epsilon(terms, left),
        }
        for line in book["spent_on"]:
            at = times.get((book["dataset"], line["run"], line["query"], line["purpose"]), [""])
            line["first_at"], line["last_at"] = at[0], at[-1]
    return books


def print_books(console: Console, books: list[dict[str, Any]]) -> None:
    """A bar and a table per book."""
    if not books:
        console.print("no book is open yet")
    for book in books:
        terms = book["terms"]
        total, left = Fraction(terms["total"]), Fraction(book["left"])
        console.print(f"{book['dataset']}: {promised(Terms.from_json(terms))}", style="bold")
        console.print(f"{_bar(1 - left / total)} {spent_and_left(book)}", soft_wrap=True)
        _print_parts(console, book, total, left)
        if book["spent_on"]:
            print_whole(console, _spent_on(book["spent_on"]))
        console.print()


def promised(terms: Terms) -> str:
    """The promise in epsilon and delta where the book has them."""
    if terms.measure != "mu_squared" or terms.epsilon is None:
        return terms.describe()
    whom = terms.describe().partition(" for ")[2]
    return f"epsilon = {show(terms.epsilon)}, delta = {delta_of_terms(terms):.3g} for {whom}"


def _opened(terms: Terms) -> str:
    """The promise, and the amounts that it is counted in if those are others."""
    counted = terms.describe()
    shown = promised(terms)
    return shown if shown == counted else f"{shown} ({counted.partition(' for ')[0]})"


def _print_parts(console: Console, book: dict[str, Any], total: Fraction, left: Fraction) -> None:
    """What a book counts instead of epsilon, and what it allows for besides noise."""
    if book["terms"]["measure"] == "epsilon":
        return
    parts = [f"{book['terms']['measure']} {show(total - left)} of {show(total)}"]
    for name, what in _ALLOWANCES.items():
        if name in book:
            spent, rest = Fraction(book[name]["spent"]), Fraction(book[name]["left"])
            parts.append(f"{show(spent)} of {show(spent + rest)} {what} ({name})")
    console.print(f"counted as {', '.join(parts)}", soft_wrap=True)


def print_history(console: Console, records: Iterable[dict[str, Any]]) -> None:
    """One line per entry, oldest first."""
    table = Table(box=None, pad_edge=False)
    for title in ("when (UTC)", "dataset", "what", "amount", "steps"):
        table.add_column(title)
    for record, after in pairwise([*records, {}]):
        goes_on = "reached" in record and "reached" in after and record["run"] == after["run"]
        if not goes_on:
            table.add_row(*_entry(record))
    console.print(table)


def _bar(share: Fraction) -> str:
    full = math.ceil(share * _BAR)
    return "█" * full + "░" * (_BAR - full)


def _spent_on(lines: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("run", "query", "purpose", "steps"):
        table.add_column(title)
    for title in ("charges", "each"):
        table.add_column(title, justify="right")
    when = any(line.get("last_at") for line in lines)
    if when:
        table.add_column("last charged (UTC)")
    for line in lines:
        each = Fraction(line["amount"]) / max(line["charges"], 1)
        cells = [line["run"][:8], line["query"] or "-", line["purpose"]]
        cells += [f"{line['first_step']}..{line['last_step']}", str(line["charges"]), show(each)]
        table.add_row(*cells, *([_clock(line["last_at"])] if when else []))
    return table


def _about_run(record: dict[str, Any]) -> tuple[str, str]:
    """What a record says of a run, and of which step."""
    if "epoch" in record:
        return "was started, or goes on", ""
    if "reached" in record:
        return "has come so far", str(record["reached"])
    if "minted" in record:
        return f"has had {record['minted']} window keys; {record['final']} are erased", ""
    if "erasure" in record:
        return "had a unit erased", f"..{record['erasure'] - 1}"
    return f"was adopted by {record['who']}: {record['adopted']}", ""


def _entry(record: dict[str, Any]) -> tuple[str, str, str, str, str]:
    at = _clock(record["at"])
    if "book" in record:
        return at, record["book"], f"opened: {_opened(Terms.from_json(record['terms']))}", "", ""
    if "repaired" in record:
        return at, "", f"taken as it is: {record['repaired']}", "", ""
    dataset = record["dataset"]
    if "fingerprint" in record:
        return at, dataset, f"run {record['run'][:8]} started", "", ""
    if is_about_run(record):
        what, steps = _about_run(record)
        return at, dataset, f"run {record['run'][:8]} {what}", "", steps
    if "peak" in record:
        return at, dataset, "moved here from memory", "", ""
    what = f"{record['query'] or 'run'} {record['run'][:8]}: {record['purpose']}"
    if record.get("kind", "cells") != "cells":
        what += f" ({record['kind']})"
    last = record["step"] + record.get("repeat", 1) - 1
    steps = f"{record['step']}..{last}" if last > record["step"] else str(last)
    each = " each" if last > record["step"] else ""
    return at, dataset, what, show(Fraction(record["amount"])) + each, steps


def _clock(at: str) -> str:
    return at[:19].replace("T", " ")
