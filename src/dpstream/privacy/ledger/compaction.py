"""What the oldest records of a ledger fold to, so that a file written for years stays short.

Read in place of those that they stand for, the folded records leave every book and every run as it
was; `docs/decisions/0024-compaction.md` says who needs what.

- Books, repairs and adoptions stay. Of other facts about a run the newest of each kind stays.
- Digests of steps stay as long as a backup may need them, many in a record; the newest of each run,
  which its directory is compared with, for ever.
- Equal charges of successive steps become one that is repeated, with the digest of its last step. A
  step, once charged, stays charged: a new run may begin at step 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dpstream.privacy.ledger.charges import RECENT, is_about_run
from dpstream.privacy.state.journal import Record

_FACTS = ("ended", "begun", "fingerprint", "epoch", "reached", "minted", "finished", "erasure")
_BLOCK = 1024  # steps at most, so that one charge is quickly added to a book


def fold(
    records: Sequence[Record], *, digests_since: str, books: Mapping[str, Record]
) -> list[Record]:
    """The records that stand for these.

    `digests_since`: as `at` has it. `books`: what is known of a book, by its dataset: the most that
    was lost (`peak`), and before which step its account need not be read (`settled`).
    """
    kept: dict[int, Record] = {}
    newest: dict[tuple[str, ...], int] = {}  # of what a later record may be joined with
    first_charged: set[tuple[str, ...]] = set()
    for index, record in enumerate(records):
        key = _key(record)
        before = newest.pop(key, None)
        joined = None if before is None else _join(kept[before], record)
        if before is not None and joined is not None:
            del kept[before]
        kept[index] = joined or record | books.get(record.get("book", ""), {})
        if "amount" in record and key not in first_charged:
            first_charged.add(key)  # it says when the charges began
        elif key:
            newest[key] = index
    _drop_digests(kept, digests_since)
    return [kept[index] for index in sorted(kept)]


def _key(record: Record) -> tuple[str, ...]:
    """What a record may be joined by; () for those that stay alone."""
    if "amount" in record:
        names = ("dataset", "run", "query", "purpose")
        return (*(record[name] for name in names), record.get("kind", "cells"))
    if is_about_run(record):
        return next(((record["run"], fact) for fact in _FACTS if fact in record), ())
    return ("compacted",) if "compacted" in record else ()


def _join(old: Record, new: Record) -> Record | None:
    """One record for both, in the place of the later one; None if there is none."""
    if "amount" in new:
        return _join_charges(old, new)
    if "reached" in new:
        count = _count(old) + _count(new)
        follows = new["reached"] - _count(new) == old["reached"] and old["types"] == new["types"]
        if not follows or count > RECENT:
            return None
        told = old.get("positions", {}) | new.get("positions", {})
        joined = new | {"digests": [*_digests(old), *_digests(new)]}
        return joined | ({"positions": told} if told else {})
    names = ("minted", "final", "begun")
    largest = {name: max(old[name], new[name]) for name in names if name in new}
    return new | largest


def _join_charges(old: Record, new: Record) -> Record | None:
    repeat, again = old.get("repeat", 1), new.get("repeat", 1)
    step = old["step"]
    names = ("amount", "bins", "kind", "tail", "drift", "periods")
    same = all(old.get(name) == new.get(name) for name in names)
    alike = [cell - step for cell in old["cells"]] == [c - new["step"] for c in new["cells"]]
    plain = not ("kind" in new or "tail" in new or "drift" in new)
    if not (same and alike and plain) or new["step"] != step + repeat:
        return None
    if ("digest" in old) != ("digest" in new) or step // _BLOCK != new["step"] // _BLOCK:
        return None
    return new | {"step": step, "cells": old["cells"], "repeat": repeat + again}


def _drop_digests(kept: dict[int, Record], since: str) -> None:
    """Drop what is older and not among a run's newest; write the others as one text each."""
    known: dict[str, int] = {}
    for index in sorted(kept, reverse=True):
        record = kept[index]
        if "reached" not in record:
            continue
        run = record["run"]
        if record["at"] < since and known.get(run, 0) >= RECENT:
            del kept[index]
            continue
        known[run] = known.get(run, 0) + _count(record)
        if not isinstance(record["digests"], str):
            kept[index] = record | {"digests": " ".join(record["digests"])}


def _digests(record: Record) -> list[str]:
    digests = record["digests"]
    return digests.split() if isinstance(digests, str) else digests


def _count(record: Record) -> int:
    digests = record["digests"]
    return digests.count(" ") + 1 if isinstance(digests, str) else len(digests)
