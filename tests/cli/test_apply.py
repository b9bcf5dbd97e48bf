"""`dpstream apply`: a changed pipeline file is shown, accepted, carried out by periods."""

import json
import shutil
import signal
import subprocess
from contextlib import closing
from dataclasses import asdict

import pyarrow as pa
import pytest

from dpstream.cli import apply_command
from dpstream.engines.query_run import EngineOptions, QueryRun
from dpstream.errors import BudgetExceeded, LedgerError, StateError
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.session import changes
from dpstream.session.change_plan import plan_changes
from dpstream.session.start_pipeline import is_to_change, load_current, open_book, start
from tests.support.kill_and_replay import BeforeDiskOperation, KindOfRun
from tests.support.live_runs import ScriptedClock, drop
from tests.support.long import is_long
from tests.support.processes import Command

HOUR = 3_600_000_000
DAY = 24 * HOUR
FIRST = 19_844 * DAY  # 2024-05-01
FOREVER = {"period": "'forever'"}
RUN = b"a run for tests!"
SQL = """SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = {epsilon}, delta = 1e-9,
    privacy_unit_column = user, privacy_unit_period = {period},
    max_groups_contributed = 1, public_groups = ('a', 'b'), allowed_lateness = {lateness})
    page, window_start, COUNT(*) AS visits
    FROM TUMBLE(clicks, DESCRIPTOR(at), INTERVAL '6' HOUR)
    GROUP BY page, window_start{emit}"""
FILE = """
[source]
path = "in"
live = true
[budget]
dataset = "clicks"
epsilon = 4
delta = 1e-8
ledger = "book"
[state]
path = "state"
[sink]
to = "out"
"""


def asked(epsilon=1, lateness="INTERVAL '0' SECOND", emit="", period="INTERVAL '1' DAY"):
    """A query's text."""
    return SQL.format(epsilon=epsilon, lateness=lateness, emit=emit, period=period)


def write(folder, **queries):
    """A pipeline file."""
    tables = [f'[[query]]\nname = "{n}"\nsql = """{text}"""\n' for n, text in queries.items()]
    (folder / "pipeline.toml").write_text(FILE + "".join(tables))


def rows(place):
    """Rows of three days, which are all there."""
    times = [FIRST + hour * HOUR for hour in range(96) for _ in range(3)]
    users = [f"u{number % 7}" for number in range(len(times))]
    pages = ["ab"[number % 2] for number in range(len(times))]
    table = pa.table({"user": users, "page": pages, "at": pa.array(times, pa.timestamp("us"))})
    drop(place / "in", "rows.parquet", table)


def go(path, since, to, **events):
    """Run a pipeline from a time to another, as `dpstream run` does."""
    clock = ScriptedClock(since, **events)
    to -= 1
    while True:
        pipeline = load_current(path)
        pipeline.state.mkdir(exist_ok=True, mode=0o700)
        if not pipeline.secret.exists():
            pipeline.secret.touch(mode=0o600)
            pipeline.secret.write_text("dpstream-secret-1 " + "ab" * 32 + "\n")
        with pipeline.open_ledgers() as ledgers:
            options = EngineOptions(run_id=RUN, snapshot_every=2)
            runs = start(pipeline, ledgers, clock=clock, options=options, anyway=True)
            for book in pipeline.books:
                open_book(pipeline, book, book.terms(), ledgers[book.ledger], now=clock.now())
            with runs:
                try:
                    for name, _ in runs:
                        if clock.now() >= to:
                            runs.runs[name].stop()
                        if is_to_change(pipeline, runs):
                            runs.stop()
                except LedgerError:
                    assert is_to_change(pipeline, runs)
        if clock.now() >= to or not is_to_change(pipeline, runs):
            return


def files(place):
    """What was published, by file."""
    return {path.name: path.read_bytes() for path in sorted((place / "out").glob("*.parquet"))}


def spent(place):
    """The lines of the book."""
    with closing(Ledger(place / "book")) as ledger:
        (book,) = ledger.report()
        return {line["query"]: line for line in book["spent_on"]}


@pytest.fixture
def at(monkeypatch):
    """Set the time that `dpstream apply` sees."""
    return lambda time: monkeypatch.setattr(
        apply_command.SystemClock, "now", lambda self: time, raising=True
    )


def windows(place, name):
    """How many windows of a query were published."""
    return len([file for file in files(place) if file.startswith(f"{name}-w")])


def test_a_change_comes_at_the_end_of_the_period(run, folder, at, tmp_path_factory):
    """One query changed, one added, one removed; the others' bytes are those of an undisturbed run.

    The book of 4 has no room for a second copy within a day: nothing is charged twice.
    """
    alone = tmp_path_factory.mktemp("alone")
    for place in (folder, alone):
        rows(place)
        write(place, kept=asked(3), old=asked(2), gone=asked(1))
    go(alone / "pipeline.toml", FIRST, FIRST + 2 * DAY)
    go(folder / "pipeline.toml", FIRST, FIRST + 15 * HOUR)
    write(folder, kept=asked(3), old=asked("1.9"), more=asked("0.5"))
    at(FIRST + 15 * HOUR)

    shown = run("apply", "pipeline.toml")
    assert shown.code == 0
    assert "nothing was changed; to carry it out: --yes" in shown.err
    assert "unchanged kept" in shown.out
    assert "changed   old (in state and sinks: old_2)" in shown.out
    assert "epsilon was 2 and is now 1.9" in shown.out
    assert (
        "goes on until 2024-05-02T00:00:00+00:00, and ends for good; its releases stay" in shown.out
    )
    told = run("apply", "pipeline.toml", "--yes", "--json").json
    assert told["accepted"]
    kinds = {one["query"]: one["change"] for one in told["changes"]}
    assert kinds == {"kept": "unchanged", "old": "changed", "more": "added", "gone": "removed"}
    go(folder / "pipeline.toml", FIRST + 15 * HOUR, FIRST + 2 * DAY)

    mine, theirs = files(folder), files(alone)
    for name, count in (("kept", 8), ("old", 4), ("gone", 4)):
        assert windows(folder, name) == count
        same = [file for file in mine if file.startswith(f"{name}-w")]
        assert all(mine[file] == theirs[file] for file in same)
    assert (windows(folder, "old_2"), windows(folder, "more")) == (4, 6)
    lines = spent(folder)
    assert [lines[name]["ended"] for name in ("kept", "old", "gone", "old_2", "more")] == [
        False,
        True,
        True,
        False,
        False,
    ]
    assert lines["old_2"]["periods"][0] == lines["old"]["begun"] + 1
    assert not [*(folder / "state" / "old" / "windows").glob("*.key")]
    again = run("apply", "pipeline.toml", "--yes")
    assert "nothing is to be changed" in again.err
    verified = run("state", "verify", "state")
    assert verified.code == 0, verified.out  # runs that are ended are whole without their keys
    write(folder, kept=asked(3), old=asked("1.9"), more=asked("0.5"), gone=asked("0.1"))
    for _ in range(2):  # the sink has releases under its first name, with and without its state
        assert "added     gone (in state and sinks: gone_2)" in run("apply", "pipeline.toml").out
        assert run("state", "gc", "pipeline.toml", "--yes").code == 0
    assert not (folder / "state" / "gone").exists()


def test_a_change_is_not_taken_back_into_a_share_that_is_spent(run, folder, at):
    """What ana's run was to leave has gone to another query of hers; a larger share lets it back.

    The book itself has room all the time.
    """
    rows(folder)

    def write_for_ana(**queries):
        write(folder, **queries)
        text = (folder / "pipeline.toml").read_text()
        (folder / "pipeline.toml").write_text(text.replace("sql =", 'analyst = "ana"\nsql ='))

    given = ("ledger", "allow", "book", "--analyst", "ana", "--because", "a test", "--share")
    write_for_ana(old=asked(2))
    go(folder / "pipeline.toml", FIRST, FIRST + 9 * HOUR)
    assert run(*given, "0.4").code == 0
    at(FIRST + 9 * HOUR)
    write_for_ana(old=asked("0.5"))
    assert run("apply", "pipeline.toml", "--yes").code == 0
    write(folder, more=asked("1.9"))
    second = folder / "second.toml"
    text = (folder / "pipeline.toml").read_text().replace("sql =", 'analyst = "ana"\nsql =')
    second.write_text(text.replace('"state"', '"state2"').replace('"out"', '"out2"'))
    go(second, FIRST + DAY, FIRST + DAY + 9 * HOUR)
    assert spent(folder)["more"]["begun"] is not None

    before = (folder / "book").read_bytes()
    write_for_ana(old=asked(2))
    refused = run("apply", "pipeline.toml", "--yes")
    assert refused.code == 3
    assert "the share of 'ana', 0.4 of the book, was spent on others since" in refused.err
    assert (folder / "book").read_bytes() == before
    assert run(*given, "1").code == 0
    assert run("apply", "pipeline.toml", "--yes").code == 0
    assert spent(folder)["old"]["periods"][1] is None


class Killed(BaseException):
    """As if the process were gone."""


def test_a_kill_anywhere_changes_nothing(run, folder, at, monkeypatch):
    """Before and after every write, time and again: the same releases and charges in the end."""
    rows(folder)
    write(folder, old=asked(4))
    go(folder / "pipeline.toml", FIRST, FIRST + 15 * HOUR)
    write(folder, old=asked("3.9"))
    at(FIRST + 15 * HOUR)
    assert run("apply", "pipeline.toml", "--yes").code == 0
    places = [1, 2, 3, 2, 3, 4, 1, 2]  # before and after texts, the end, its note, texts again
    left = [places.pop(0)]

    def count_down():
        left[0] -= 1
        if not left[0]:
            raise Killed

    def counted(call):
        def count(*args, **named):
            count_down()
            made = call(*args, **named)
            count_down()
            return made

        return count

    monkeypatch.setattr(changes.Changes, "write", counted(changes.Changes.write))
    monkeypatch.setattr(Ledger, "end", counted(Ledger.end))
    while True:
        try:
            go(folder / "pipeline.toml", FIRST + 15 * HOUR, FIRST + 2 * DAY)
            break
        except Killed:
            left[0] = places.pop(0) if places else 0

    assert not places
    assert (windows(folder, "old"), windows(folder, "old_2")) == (4, 4)
    lines = spent(folder)
    assert (lines["old"]["ended"], lines["old_2"]["ended"]) == (True, False)
    assert len(lines) == 2


def accept(place):
    """Accept what the pipeline file says, as `dpstream apply --yes` does."""
    plan = plan_changes(place / "pipeline.toml", at_once=False, now=FIRST + 15 * HOUR, who="me")
    if not plan.empty:
        plan.accept()


def settled(place):
    """What a book and a state directory have settled."""
    told = asdict(changes.Changes.read(place / "state"))
    return {key: each for key, each in told.items() if key != "texts"}, spent(place)


def test_a_kill_of_apply_leaves_what_the_next_one_finishes_or_takes_back(folder):
    """Before every disk operation. The same file again: as if it had not been killed; another file:
    as if that had been the first; the old one: as if nothing had been, and all go on.
    """
    begun = folder / "begun"
    first = {"kept": asked("0.5"), "old": asked(2), "gone": asked(1)}
    second = {"kept": asked("0.5"), "old": asked("2.5"), "more": asked("0.5")}
    files_after = {"first": first, "second": second, "third": first | {"old": asked("1.5")}}
    begun.mkdir()
    rows(begun)
    write(begun, **first)
    go(begun / "pipeline.toml", FIRST, FIRST + 15 * HOUR)
    wanted = {}
    for name, queries in files_after.items():
        shutil.copytree(begun, folder / name)
        write(folder / name, **queries)
        accept(folder / name)
        wanted[name] = settled(folder / name)
    apply = KindOfRun(start=lambda place: accept(place) or (), published=files, charges=spent)

    for nth in range(1, 100) if is_long() else (3, 9, 15, 100):
        killed = folder / f"killed{nth}"
        shutil.copytree(begun, killed)
        write(killed, **second)
        status = BeforeDiskOperation(nth).strike(apply, killed)
        for name, queries in files_after.items():
            place = folder / f"{name}{nth}"
            shutil.copytree(killed, place)
            write(place, **queries)
            accept(place)
            assert settled(place) == wanted[name], (nth, name)
        if status == 0:
            break
    assert nth > 15

    write(begun, **second)
    BeforeDiskOperation(9).strike(apply, begun)
    write(begun, **first)
    accept(begun)
    go(begun / "pipeline.toml", FIRST + 15 * HOUR, FIRST + 2 * DAY)
    assert [windows(begun, name) for name in first] == [8, 8, 8]


def test_a_change_that_is_refused_when_it_is_accepted_leaves_all_as_it_was(folder):
    """The room was there when it was worked out; a place that was held stays held."""
    rows(folder)
    write(folder, old=asked(2), small=asked("0.5"))
    go(folder / "pipeline.toml", FIRST, FIRST + 15 * HOUR)
    write(folder, old=asked("2.1"), small=asked("0.5"))
    accept(folder)
    before = settled(folder)
    write(folder, old=asked("2.1"), small=asked("1.8"))
    late = plan_changes(folder / "pipeline.toml", at_once=False, now=FIRST + 15 * HOUR, who="me")
    write(folder, another=asked("3.2"))
    text = (folder / "pipeline.toml").read_text().replace('"state"', '"state2"')
    (folder / "other.toml").write_text(text.replace('"out"', '"out2"'))
    go(folder / "other.toml", FIRST + 15 * HOUR, FIRST + 27 * HOUR)

    with pytest.raises(BudgetExceeded):
        late.accept()

    after = settled(folder)
    assert after[0] == before[0]
    assert {name: line for name, line in after[1].items() if name != "another"} == before[1]


def test_late_windows_are_published_before_the_successor_begins(run, folder, at):
    """With lateness the last windows of the period come after its end, and none is lost."""
    rows(folder)
    text = {"lateness": "INTERVAL '7' HOUR", "emit": " EMIT EVERY INTERVAL '3' HOUR"}
    write(folder, old=asked(4, **text))
    go(folder / "pipeline.toml", FIRST, FIRST + 15 * HOUR)
    write(folder, old=asked(3, **text))
    at(FIRST + 15 * HOUR)
    assert run("apply", "pipeline.toml", "--yes").code == 0
    go(folder / "pipeline.toml", FIRST + 15 * HOUR, FIRST + 2 * DAY)

    of = [name.rsplit("-t", 1)[0] for name in files(folder)]
    assert [of.count(f"old-w00000{window}") for window in range(5)] == [5, 5, 5, 5, 0]
    assert [of.count(f"old_2-w00000{window}") for window in range(2)] == [5, 5]


def test_a_change_can_be_taken_back_before_it_comes(run, folder, at):
    """The old text in the file again: the run goes on as if nothing had been."""
    rows(folder)
    write(folder, old=asked(4))
    go(folder / "pipeline.toml", FIRST, FIRST + 9 * HOUR)
    write(folder, old=asked(3))
    at(FIRST + 9 * HOUR)
    assert run("apply", "pipeline.toml", "--yes").code == 0
    write(folder, old=asked(4))
    back = run("apply", "pipeline.toml", "--yes")
    assert "unchanged old" in back.out
    go(folder / "pipeline.toml", FIRST + 9 * HOUR, FIRST + 2 * DAY)

    assert windows(folder, "old") == 8
    assert [*spent(folder)] == ["old"]


def other(folder, **queries):
    """Another pipeline over the same book."""
    write(folder, **queries)
    text = (folder / "pipeline.toml").read_text().replace('"state"', '"state2"')
    (folder / "other.toml").write_text(text.replace('"out"', '"out2"'))
    return folder / "other.toml"


def test_a_successor_holds_its_place_from_when_it_is_accepted(run, folder, at):
    """Another query no longer fits; taken back, it does. What holds the place is not counted twice.

    The control is the same query before and after: it fits.
    """
    rows(folder)
    other(folder, another=asked(2))
    write(folder, old=asked(2))
    go(folder / "pipeline.toml", FIRST, FIRST + 15 * HOUR)
    at(FIRST + 15 * HOUR)
    fits = lambda: run("check", "other.toml", "--json").json["another"]["budget"]["fits"]  # noqa: E731
    assert fits()
    write(folder, old=asked("3.9"))
    assert run("apply", "pipeline.toml", "--yes").code == 0
    held = spent(folder)["old_2"]
    assert (held["begun"], held["ended"], held["charges"]) == (None, False, 1)
    assert held["periods"] == [spent(folder)["old"]["begun"] + 1, None]
    assert spent(folder)["old"]["periods"][1] == held["periods"][0] - 1
    assert "held: it begins 2024-05-02" in run("ledger", "show", "book").out
    assert not fits()
    before = (folder / "book").read_bytes()
    assert run("apply", "pipeline.toml", "--yes").code == 0  # the same once more
    assert (folder / "book").read_bytes() == before
    write(folder, old=asked(2))
    assert "unchanged old" in run("apply", "pipeline.toml", "--yes").out
    assert [*spent(folder)] == ["old"]
    assert fits()
    write(folder, old=asked("3.9"))
    assert run("apply", "pipeline.toml", "--yes").code == 0
    shown = run("check", "pipeline.toml", "--json").json
    assert shown["old"]["budget"]["charged_before"]
    assert any("'old_2' begins 2024-05-02" in words for words in shown["old"]["remarks"])
    go(folder / "pipeline.toml", FIRST + 15 * HOUR, FIRST + 2 * DAY)

    lines = spent(folder)
    assert [*lines] == ["old", "old_2"]
    assert lines["old_2"]["run"] != held["run"]
    assert lines["old_2"]["begun"] == held["periods"][0]
    assert windows(folder, "old_2") == 4
    assert "whose place it held" in run("ledger", "history", "book").out


def test_one_query_grows_into_what_another_leaves_and_both_can_be_had_back(run, folder, at):
    """All ends are settled before any place is held."""
    rows(folder)
    write(folder, a=asked(2), b=asked("2.5"))
    go(folder / "pipeline.toml", FIRST, FIRST + 9 * HOUR)
    at(FIRST + 9 * HOUR)
    write(folder, a=asked("3.9"))
    assert run("apply", "pipeline.toml", "--yes").code == 0
    ends = {name: line["periods"][1] for name, line in spent(folder).items()}
    assert ends["a"] == ends["b"] == spent(folder)["a_2"]["periods"][0] - 1
    write(folder, a=asked(2), b=asked("2.5"))
    assert run("apply", "pipeline.toml", "--yes").code == 0
    assert {name: line["periods"][1] for name, line in spent(folder).items()} == {
        "a": None,
        "b": None,
    }


def test_a_change_that_a_backup_does_not_know_of_is_made_once_more(run, folder, at):
    """The state is lost after it: the sink has releases of the first and the second name."""
    rows(folder)
    write(folder, a=asked(3), b=asked("0.5"))
    go(folder / "pipeline.toml", FIRST, FIRST + 9 * HOUR)
    assert run("state", "backup", "state", "b.tar").code == 0
    at(FIRST + 9 * HOUR)
    write(folder, a=asked("3.1"), b=asked("0.5"))
    assert run("apply", "pipeline.toml", "--yes").code == 0
    go(folder / "pipeline.toml", FIRST + 9 * HOUR, FIRST + DAY + 13 * HOUR)
    before = files(folder)
    assert windows(folder, "a_2") > 1
    shutil.rmtree(folder / "state")
    assert "a is left out" in run("state", "restore", "b.tar", "state").err
    at(FIRST + DAY + 14 * HOUR)
    full = run("apply", "pipeline.toml")
    assert full.code == 3
    assert "if the state of a run in that book is lost, end it: dpstream ledger end" in full.err
    lost = spent(folder)["a_2"]["run"]
    assert run("ledger", "end", lost, "book", "--because", "its state is lost").code == 0
    done = run("apply", "pipeline.toml", "--yes")
    assert "added     a (in state and sinks: a_3)" in done.out
    go(folder / "pipeline.toml", FIRST + DAY + 14 * HOUR, FIRST + 3 * DAY)

    assert windows(folder, "a_3") == 4  # of the third day: the second one is a_2's
    assert files(folder).items() >= before.items()
    assert spent(folder)["a_3"]["periods"][0] == spent(folder)["a_2"]["begun"] + 1


def test_a_change_made_at_once_gives_back_what_it_held(run, folder, at):
    """Accepted for the end of the period first, then with --now: the place is held no more."""
    rows(folder)
    write(folder, old=asked(1))
    go(folder / "pipeline.toml", FIRST, FIRST + 9 * HOUR)
    at(FIRST + 9 * HOUR)
    write(folder, old=asked("1.2"))
    assert run("apply", "pipeline.toml", "--yes").code == 0
    assert "old_2" in spent(folder)
    assert run("apply", "pipeline.toml", "--now", "--yes").code == 0
    assert [*spent(folder)] == ["old"]
    go(folder / "pipeline.toml", FIRST + 9 * HOUR, FIRST + 2 * DAY)
    assert spent(folder)["old_2"]["charges"] == 1


def test_a_change_cannot_be_taken_back_when_its_place_is_given_away(run, folder, at):
    """The successor is smaller, another query has taken what it leaves, and the old one stays."""
    rows(folder)
    write(folder, old=asked(4))
    go(folder / "pipeline.toml", FIRST, FIRST + 15 * HOUR)
    at(FIRST + 15 * HOUR)
    write(folder, old=asked(1))
    assert run("apply", "pipeline.toml", "--yes").code == 0
    path = other(folder, another=asked(2))
    go(path, FIRST + 15 * HOUR, FIRST + 31 * HOUR)
    write(folder, old=asked(4))
    refused = run("apply", "pipeline.toml", "--yes")

    assert refused.code == 3
    assert "were given to others since" in refused.err
    assert sorted(spent(folder)) == ["another", "old", "old_2"]


@pytest.mark.parametrize("lateness", ["7", "0"] if is_long() else ["7"])
def test_a_run_that_nobody_has_told_ends_with_its_period_all_the_same(
    run, folder, at, tmp_path_factory, lateness, caplog
):
    """It is stopped where the next period would begin; the releases are those of a reload."""
    text = {"lateness": f"INTERVAL '{lateness}' HOUR", "emit": " EMIT EVERY INTERVAL '3' HOUR"}
    told = tmp_path_factory.mktemp("told")
    at(FIRST + 15 * HOUR)
    for place in (folder, told):
        rows(place)
        write(place, old=asked(3, **text), kept=asked("0.5"))

    def accept(place):
        write(place, old=asked("2.9", **text), kept=asked("0.5"))
        assert run("apply", str(place / "pipeline.toml"), "--yes").code == 0

    go(told / "pipeline.toml", FIRST, FIRST + 15 * HOUR)
    accept(told)
    go(told / "pipeline.toml", FIRST + 15 * HOUR, FIRST + 2 * DAY)
    events = [(FIRST + 15 * HOUR + 1, lambda: accept(folder))]
    go(folder / "pipeline.toml", FIRST, FIRST + 2 * DAY, events=events)

    assert windows(folder, "old") > 0
    assert [*files(folder)] == [*files(told)]
    assert spent(folder).keys() == {"old", "kept", "old_2"}
    said = [one for one in caplog.records if "'old' has come to its end" in one.getMessage()]
    assert {one.levelname for one in said} == {"WARNING"}  # no fault: nobody is to be woken


class Seen(BaseException):
    """Somebody has looked, and the process is gone."""


def begun_later(folder):
    """A query for which its book has no room today: it begins tomorrow; the book at 16:00."""
    rows(folder)
    write(folder, old=asked(4))
    go(folder / "pipeline.toml", FIRST, FIRST + 15 * HOUR)
    with closing(Ledger(folder / "book")) as ledger:
        ledger.end("clicks", spent(folder)["old"]["run"], because="a test", who="ana")
    seen = []

    def look():
        seen.append(spent(folder))
        raise Seen

    path = other(folder, new=asked(4))
    with pytest.raises(Seen):
        go(path, FIRST + 15 * HOUR, FIRST + 2 * DAY, events=[(FIRST + 16 * HOUR, look)])
    return path, seen[0]


def test_a_query_that_begins_later_holds_its_place(run, folder):
    """It is in the book before its first period, and counts once when it begins."""
    path, seen = begun_later(folder)
    write(folder, third=asked(2))
    with pytest.raises(BudgetExceeded, match="does not fit"):
        go(folder / "pipeline.toml", FIRST + 16 * HOUR, FIRST + 2 * DAY)
    go(path, FIRST + 17 * HOUR, FIRST + 2 * DAY)

    assert seen["new"]["begun"] is None
    assert seen["new"]["periods"] == [seen["old"]["begun"] + 1, None]
    assert spent(folder)["new"] == seen["new"] | {"begun": seen["new"]["periods"][0]}
    assert [len([*(folder / "out2").glob("new-w*")])] == [4]


def test_without_that_another_query_would_take_its_place(run, folder, monkeypatch):
    """The control."""
    monkeypatch.setattr(QueryRun, "_hold_place", lambda run: None)
    _, seen = begun_later(folder)
    write(folder, third=asked(2))
    go(folder / "pipeline.toml", FIRST + 16 * HOUR, FIRST + 2 * DAY)

    assert [*seen] == ["old"]
    assert windows(folder, "third") == 4


def test_a_query_that_never_begins_is_given_back(run, folder):
    """Its run is ended for good; nothing of it was drawn."""
    path, seen = begun_later(folder)
    held = seen["new"]["run"]
    assert "held: it begins 2024-05-02" in run("ledger", "show", "book").out
    assert run("ledger", "void", held, "book", "--because", "not wanted").code == 0

    assert [*spent(folder)] == ["old"]
    with pytest.raises(StateError, match="ended for good"):
        go(path, FIRST + 17 * HOUR, FIRST + 2 * DAY)


def test_a_changed_file_that_was_not_applied_is_refused(run, folder, at):
    """The refusal names the command that shows what it costs."""
    rows(folder)
    write(folder, old=asked(4))
    go(folder / "pipeline.toml", FIRST, FIRST + 9 * HOUR)
    write(folder, old=asked(3))

    with pytest.raises(StateError, match="dpstream apply"):
        go(folder / "pipeline.toml", FIRST + 9 * HOUR, FIRST + DAY)
    at(FIRST + 9 * HOUR)  # and how it was asked is still known
    assert "goes on until 2024-05-02" in run("apply", "pipeline.toml").out


def test_at_once_is_charged_in_full_or_refused(run, folder, at):
    """`--now` needs room in the book; without periods there is no other way."""
    rows(folder)
    write(folder, old=asked(2, **FOREVER))
    go(folder / "pipeline.toml", FIRST, FIRST + 9 * HOUR)
    at(FIRST + 9 * HOUR)
    write(folder, old=asked("3.9", **FOREVER))
    refused = run("apply", "pipeline.toml", "--now", "--yes")
    assert "does not fit" in refused.err
    write(folder, old=asked(1, **FOREVER))
    waits = run("apply", "pipeline.toml", "--yes")
    assert waits.code == 2
    assert "charged in full: say so with --now" in waits.err
    assert run("apply", "pipeline.toml", "--now", "--yes").code == 0
    go(folder / "pipeline.toml", FIRST + 9 * HOUR, FIRST + DAY)

    assert windows(folder, "old") == 2
    assert windows(folder, "old_2") == 3
    assert [line["query"] for line in spent(folder).values()] == ["old", "old_2"]


@pytest.fixture
def process(folder):
    """`dpstream run` in a process of its own, over rows of now."""
    (folder / "in").mkdir()
    (folder / "in" / "a.csv").write_text("user,page,at\n")
    write(folder, one=often(1))
    with Command(
        *("run", "pipeline.toml", "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # whoever ignores it here
    ) as process:
        yield process
        process.kill()


def often(epsilon):
    """A query with a release every second."""
    return asked(epsilon, emit=" EMIT EVERY INTERVAL '1' SECOND")


def wait_for(name, process):
    """Read what is published until it is of this query."""
    for line in process.stdout:
        if json.loads(line).get("query") == name:
            return


def test_a_run_takes_the_file_up_on_sighup(folder, process):
    """An added query joins; a change that was not accepted leaves all as it is, and says so."""
    wait_for("one", process)
    write(folder, one=often(1), two=often(1))
    process.send_signal(signal.SIGHUP)
    wait_for("two", process)
    write(folder, one=often(2), two=often(1))
    process.send_signal(signal.SIGHUP)
    for line in process.stderr:
        if "is not taken up" in line:
            break
    assert "dpstream apply pipeline.toml" in line
    wait_for("one", process)
    wait_for("two", process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 130
    assert sorted(spent(folder)) == ["one", "two"]


def test_a_file_whose_start_is_refused_leaves_what_ran(folder, process):
    """Its sink cannot be made, which only a start finds out: what ran goes on, at no new charge."""
    wait_for("one", process)
    write(folder, one=often(1), two=often(1))
    path = folder / "pipeline.toml"
    good = path.read_text()
    path.write_text(good.replace('to = "out"', 'to = "in/a.csv/out"'))
    process.send_signal(signal.SIGHUP)
    for line in process.stderr:
        if "is not taken up" in line:
            break
    assert "what ran goes on" in line
    wait_for("one", process)
    assert [*spent(folder)] == ["one"]
    path.write_text(good)
    process.send_signal(signal.SIGHUP)
    wait_for("two", process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 130
