"""The bench of a year: its calendar, its rows, what it notices, and a short one."""

import json
from hashlib import sha256

import numpy as np
import pytest

import dpstream as dps
from benchmarks import year
from benchmarks.year import DAY, HOUR, Comparison, SimulatedClock, calendar, compare_releases
from dpstream.errors import InvalidParameter
from dpstream.privacy.query_spend import QuerySpend
from dpstream.privacy.state import MemoryWindowKeys
from dpstream.query.noise_plan import plan_query

KINDS = {"change", "rotate", "upgrade", "end"}


@pytest.mark.parametrize("days", [3, 28, 30, 100, 365])
def test_both_lives_have_the_same_changes(days):
    """And no backup is put back over a change: its query would be another run."""
    unbroken, broken = calendar(days, "unbroken"), calendar(days, "broken")
    assert [one for one in broken if one.kind in KINDS] == unbroken
    kinds = [one.kind for one in broken if one.kind != "crash"]
    assert kinds.count("move") == kinds.count("rotate") == kinds.count("upgrade") == 1
    assert kinds.count("change") >= (11 if days >= 28 else 2)
    assert kinds.count("restore") == 2
    for place, kind in enumerate(kinds):
        assert kind != "backup" or kinds[place + 1] == "restore"
    assert sum(one.kind == "crash" for one in broken) >= 5


def test_rows_are_the_same_whenever_they_are_read():
    """In one piece or in several; some of them are late, some by days."""
    tick = year.MINUTE
    whole = year.rows(0, 3000, tick)
    assert whole.slice(600 * year.ROWS, 60).equals(year.rows(600, 610, tick))
    come = year.START + tick // 2 + tick * (np.arange(whole.num_rows) // year.ROWS)
    late = come - whole["at"].to_numpy()
    assert late.min() >= 0
    assert 0.1 < (late > tick).mean() < 0.2
    assert 2 * DAY < late.max() < 3 * DAY


def test_the_clock_goes_on_before_what_is_not_logged(tmp_path):
    """Rows of a trigger that was not taken come again before it, and after the one before it."""
    tick = 10 * year.MINUTE
    clock, reached = SimulatedClock(tmp_path / "clock", tick=tick, until=year.START + HOUR), []
    clock.reach = lambda: reached.append(clock.now())
    while not reached:
        clock.wait(clock.now() // tick * tick + tick, None)
    assert reached == [year.START + HOUR]
    again = SimulatedClock(tmp_path / "clock", tick=tick)
    again.go_back(year.START + HOUR + tick)

    assert again.now() == year.START + HOUR - 2 * tick // 3


def noted(place, releases, lost=(), anew=(), begins=()):
    place.mkdir()
    (place / "published").write_text("".join(f"run {line}\n" for line in releases))
    (place / "begins").write_text("".join(f"run {line}\n" for line in begins))
    event = {"event": "restore", "lost": [["run", "q", window] for window in lost]}
    event["anew"] = [["run", window] for window in anew]
    (place / "events").write_text(json.dumps(event) + "\n")
    return place


def test_what_differs_or_is_missing_is_noticed(tmp_path):
    """A release that is missing is lost only if its window was listed."""
    whole = noted(tmp_path / "whole", ["q 0 0 aa", "q 0 1 bb", "q 1 2 cc", "q 2 3 dd"])
    same = noted(tmp_path / "same", ["q 0 0 aa", "q 0 0 aa", "q 0 1 bb", "q 2 3 dd"], lost=[1])
    found = compare_releases(whole, same)
    assert (found.differ, found.unlisted, found.lost) == ([], [], {(1, "q", 1): 1})

    other = noted(tmp_path / "other", ["q 0 0 aa", "q 0 0 ab", "q 0 1 xx", "q 9 9 ee"], lost=[1])
    found = compare_releases(whole, other)
    assert sum("came again" in line for line in found.differ) == 1
    assert sum("other bytes" in line for line in found.differ) == 2
    assert sorted(line.split(") is ")[1] for line in found.unlisted) == ["missing", "too many"]
    measured = {kind: [{"day": d, **sizes()} for d in (1, 2, 3)] for kind in year.LIVES}
    missed = [row["reached"] for row in year.targets(found, measured, 3)]
    assert missed[:4] == [False, False, True, True]
    assert missed[-1] is None


def test_windows_that_begin_with_other_keys_are_told_apart(tmp_path):
    """They may have other bytes where a restore said so; with the same keys they must not."""
    keys = ["0 aa", "1 bb", "2 cc", "3 dd"]
    whole = noted(tmp_path / "whole", ["q 0 0 aa", "q 2 1 bb", "q 3 2 cc", "p 3 3 dd"], begins=keys)
    releases = ["q 0 0 aa", "q 2 1 xx", "q 3 2 yy", "p 3 3 dd"]
    others = [*keys[:2], "2 ee", "3 dd"]
    told = noted(tmp_path / "told", releases, anew=[2], begins=others)
    found = compare_releases(whole, told)
    assert found.begun_anew == {(1, "q", 2): 1}
    assert ["'3', '2'" in line for line in found.differ] == [True]

    untold = noted(tmp_path / "untold", releases, anew=[3], begins=others)
    assert len(compare_releases(whole, untold).differ) == 2


def test_a_file_that_goes_while_sizes_are_added_up_counts_nothing(tmp_path):
    """Snapshots are removed by a thread of their own; a link to nowhere is such a file."""
    (tmp_path / "kept").write_bytes(bytes(7))
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    assert sum(year._sizes_of_files(tmp_path)) == 7


def sizes(memory=200.0, state=1.0):
    return {"memory_mb": memory, "state_mb": state, "book_mb": 0.1}


def test_what_grows_misses_its_target():
    """The control of the targets of memory and disk."""
    flat = [{"day": day, **sizes()} for day in range(1, 31)]
    grows = [{"day": day, **sizes(200 + day, 1 + day / 5)} for day in range(1, 31)]
    leaks = [{"day": day, **sizes(200 + 3 * day)} for day in range(1, 31)]
    found = year.targets(Comparison(releases=1), {"a": flat, "b": grows, "c": leaks}, 30)

    assert [row["name"] for row in found if row["reached"] is False] == [
        "b: state on disk, last third over the others",
        "c: MB of memory more in the last third",
    ]


def test_books_are_compared_to_the_last_digit(tmp_path):
    """One charge more, or another one, is a line each."""
    asked = year.queries(3, 0)[:2]
    for name, which in (("one", [0, 1]), ("same", [0, 1]), ("other", [0])):
        book = dps.Ledger(tmp_path / name / "book")
        book.open("clicks", asked[0].promise(epsilon=24, delta=1e-4))
        for number in which:
            run = sha256(bytes([number])).digest()[:16]
            charge(book, asked[number], run)
        book.close()

    assert year.compare_books(tmp_path / "one", tmp_path / "same") == []
    assert any("hour" in line for line in year.compare_books(tmp_path / "one", tmp_path / "other"))


def charge(book, query, run):
    book.register("clicks", run.hex(), "test")
    keys = MemoryWindowKeys()
    spend = QuerySpend(run=run, query=query.name, ledger=book, dataset="clicks", keys=keys)
    plan_query(query).pay(spend, "test")


def test_an_earlier_version_must_be_one(tmp_path):
    """Before anything is begun."""
    with pytest.raises(InvalidParameter, match="holds no package dpstream"):
        year.measure(quick=True, progress=lambda *step: None, earlier=tmp_path)


@pytest.mark.bench
@pytest.mark.timeout(500)  # two lives of some 20 s of processor time each, beside other tests
def test_the_shortest_year():
    """Three days with all that happens in a year: nothing differs, the losses are listed."""
    steps = []
    found = year.measure(quick=True, progress=lambda *step: steps.append(step))

    assert [row["reached"] for row in found.targets[:4]] == [True] * 4
    assert any("lost by restore" in note for note in found.notes)
    assert steps[-1][:2] == (6, 6)
