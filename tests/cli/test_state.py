"""State directories that were moved: refused until somebody vouches that there is no other."""

import os
import shutil
import signal
from contextlib import closing
from pathlib import Path

import pytest

import dpstream as dps
from dpstream.cli import main
from dpstream.engines.embedded.snapshots import Snapshots
from dpstream.mechanisms import Sample
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.state import InputLog, Secret, backup, run_directory
from dpstream.privacy.state.run_directory import read_about
from dpstream.session import retention
from dpstream.session.pipeline import load_pipeline
from tests.support.long import is_long
from tests.support.processes import kill_this_process, run_in_fork

CLICKS = "user,page,at\n" + "".join(f"u{n},/{n % 2},{n % 7200}\n" for n in range(400))
PIPELINE = """
[source]
path = "clicks.csv"
[budget]
dataset = "clicks"
epsilon = 3
delta = 1e-5
[state]
path = "state/"
[sink]
to = "csv:out/"
"""
QUERY = '''
[[query]]
name = "{name}"
sql = """SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 1, delta = 1e-6, privacy_unit_column = user,
  max_groups_contributed = 1, max_rows_per_group = 1, time_column = at, time_unit = 's',
  start = TIMESTAMP '1970-01-01', end = TIMESTAMP '1970-01-01 02:00:00')
  page, COUNT(*) AS n FROM clicks GROUP BY page EMIT EVERY INTERVAL '1' HOUR"""
'''  # noqa: E501
BOTH = QUERY.format(name="first") + QUERY.format(name="second")


@pytest.fixture
def moved(folder, run):
    """A pipeline of two queries whose state was copied elsewhere after a first trigger."""
    (folder / "clicks.csv").write_text(CLICKS)
    queries = QUERY.format(name="first") + QUERY.format(name="second")
    (folder / "pipeline.toml").write_text(PIPELINE + queries)
    assert run("run", "pipeline.toml", "--once").code == 0
    shutil.copytree(folder / "state", folder / "elsewhere")
    shutil.rmtree(folder / "state")
    (folder / "elsewhere").rename(folder / "state")
    return folder / "state"


def test_a_moved_state_is_refused_until_it_is_adopted(run, moved):
    """The refusal names the command; with a reason and the word, the run goes on."""
    refused = run("run", "pipeline.toml")
    assert refused.code == 4
    assert "dpstream state adopt" in refused.err
    unsaid = run("state", "adopt", "state", "--because", "new disk")
    assert unsaid.code == 2
    assert "--only-copy" in unsaid.err
    older = run("state", "adopt", "state", "--because", "new disk", "--only-copy")
    assert older.code == 2
    assert "--nothing-since" in older.err
    word = ("--only-copy", "--nothing-since")
    empty = run("state", "adopt", "state", "--because", " ", *word)
    assert empty.code == 2
    typo = run("state", "adopt", "state", "--because", "x", *word, "--ledger", "state/legder")
    assert "there is no ledger" in typo.err
    done = run("state", "adopt", "state", "--because", "new disk", *word, "--json", "--who", "ann")
    assert [one["directory"] for one in done.json["adopted"]] == ["state/first", "state/second"]
    assert run("run", "pipeline.toml").code == 0

    said = run("ledger", "history", "--ledger", "state/ledger").out
    assert said.count("was adopted by ann: new disk") == 2


def test_what_was_lost_on_the_way_is_not_adopted(run, moved):
    """An adoption vouches for the place, not for what is in it."""
    (moved / "first" / "inputs.log").unlink()
    done = run("state", "adopt", "state", "--because", "new disk", "--only-copy", "--nothing-since")

    assert done.code == 4
    assert "inputs.log is missing" in done.err


def test_nothing_to_adopt_is_said(run, folder):
    """A folder without a run, and a run without a ledger."""
    done = run("state", "adopt", ".", "--because", "x", "--only-copy", "--nothing-since")

    assert done.code == 4
    assert "holds no run" in done.err


@pytest.fixture
def started(folder, run):
    """A pipeline of two queries that has published, with its ledger in the state directory."""
    (folder / "clicks.csv").write_text(CLICKS)
    queries = QUERY.format(name="first") + QUERY.format(name="second")
    (folder / "pipeline.toml").write_text(PIPELINE + queries)
    assert run("run", "pipeline.toml").code == 0
    return folder / "state"


def test_a_backup_is_put_back_beside_the_ledger_that_was_kept(run, started):
    """The queries' directories are lost, the ledger in the state directory is not."""
    assert run("state", "backup", "state", "b.tar").code == 0
    for name in ("first", "second"):
        shutil.rmtree(started / name)
    done = run("state", "restore", "b.tar", "state", "--json", "--who", "ann")
    assert [one["directory"] for one in done.json["restored"]] == ["state/first", "state/second"]
    again = run("run", "pipeline.toml")

    assert again.code == 0
    assert "nothing new was charged" in again.err
    said = run("ledger", "history", "--ledger", "state/ledger").out
    assert said.count("was restored by ann: the backup b.tar was put back") == 2
    taken = run("state", "restore", "b.tar", "state")
    assert taken.code == 4
    assert "is there already" in taken.err


def test_nothing_is_said_of_a_secret_where_there_is_none(run, folder):
    """A run whose memory may be seen keeps none: nobody is asked to put one back."""
    mechanism = Sample(epsilon=1, window=2)
    with closing(dps.PanPrivateRunner(mechanism, bins=2, state="s", ledger="book")) as runner:
        runner.count([0])
        runner.end_step()
    done = [
        run("state", "verify", "s"),
        run("state", "backup", "s", "copy.tar"),
        run("state", "restore", "copy.tar", "new", "--because", "a test"),
    ]

    assert [one.code for one in done] == [0, 0, 0]
    assert not any("secret" in one.err + one.out for one in done)


def test_one_query_is_left_out(run, started):
    """Another one than those of the backup is named."""
    assert run("state", "backup", "state", "b", "--with-secret").code == 0
    shutil.rmtree(started)
    wrong = run("state", "restore", "b", "state", "--nothing-since", "--without", "third")
    assert "it has first, second" in wrong.err
    args = ("--nothing-since", "--without", "second")
    assert run("state", "restore", "b", "new", *args).code == 0
    assert (started.parent / "new.secret").exists()
    assert not (started.parent / "new" / "second").exists()
    again = run("state", "inspect", "new", "--json").json["runs"]

    assert [(one["query"], one["steps"]["logged"]) for one in again] == [("first", 2)]


def test_runs_that_were_ended_are_left_out_of_a_restore(run, started):
    """Ended since the backup or before; if all of them are, there is nothing to go on with."""
    assert run("state", "backup", "state", "b.tar").code == 0
    runs = {name: read_about(started / name)["run"].hex() for name in ("first", "second")}
    with closing(Ledger(started / "ledger")) as book:
        book.end("clicks", runs["first"], because="another query", who="ann")
    for name in runs:
        shutil.rmtree(started / name)
    done = run("state", "restore", "b.tar", "state")
    assert done.code == 0
    assert "first is left out: its run was ended for good (another query)" in done.err
    assert not (started / "first").exists()
    (started.parent / "pipeline.toml").write_text(PIPELINE + QUERY.format(name="second"))
    assert "nothing new was charged" in run("run", "pipeline.toml").err

    with closing(Ledger(started / "ledger")) as book:
        book.end("clicks", runs["second"], because="no more", who="ann")
    shutil.rmtree(started / "second")
    none = run("state", "restore", "b.tar", "state")
    assert none.code == 4
    assert "ended for good" in none.err


@pytest.mark.parametrize("copied", [False, True])
def test_a_stopped_state_moves_with_its_ledger_and_secret(run, started, monkeypatch, copied):
    """Within a file system, or to another one, where everything is copied and then removed."""
    assert run("state", "rotate", "state").code == 0  # its new secrets lie in the directory
    with monkeypatch.context() as patch:
        if copied:
            stat = os.stat
            other = (Path("state").absolute().parent, Path(".").absolute())

            def elsewhere(path, *args, **named):
                found = stat(path, *args, **named)
                if path in other:
                    return os.stat_result((*found[:2], found.st_dev + 1, *found[3:10]))
                return found

            patch.setattr(backup.os, "stat", elsewhere)
        assert run("state", "move", "state", "moved").code == 0
    assert {path.name for path in Path(".").iterdir() if "state" in path.name} == set()
    assert run("state", "verify", "moved").out == "no fault was found\n"
    text = Path("pipeline.toml").read_text().replace('"state/"', '"moved/"')
    Path("pipeline.toml").write_text(text)
    again = run("run", "pipeline.toml")

    assert again.code == 0
    assert "nothing new was charged" in again.err


def test_what_is_damaged_is_found(run, started):
    """Every file of the state, and of a backup, by flipping a byte in its middle."""
    assert run("state", "backup", "state", "b").code == 0
    assert run("state", "verify", "state").code == 0
    for root in (started, started.parent / "b"):
        found = sorted(path for path in root.rglob("*") if path.is_file())
        unchecked = ("backup.json", ".changes.json.lock")  # texts for who reads
        found = [path for path in found if path.name not in unchecked or root != started]
        found = [path for path in found if path.name != "backup.json"]
        for path in found if is_long() else found[:: 1 if root == started else 6]:
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            whole, _ = path.read_bytes(), path.write_bytes(content)
            done = run("state", "verify", root.name, "--json")
            assert (done.code, bool(done.json["faults"])) == (4, True), path
            path.write_bytes(whole)


def test_a_running_state_does_not_move(run, started):
    """Somebody holds its log."""
    about = read_about(started / "first")
    with closing(InputLog(started / "first" / about["log"], run=about["run"])):
        done = run("state", "move", "state", "moved")

    assert done.code == 4
    assert "is in use by another process" in done.err
    assert started.exists()


def test_a_single_run_moves_with_the_secrets_beside_it(run, started):
    """One that wraps its keys since a rotation lies beside its directory."""
    assert run("state", "rotate", "state/first", "--secret", "state.secret").code == 0
    assert run("state", "move", "state/first", "alone").code == 0

    assert {path.name for path in started.glob("first*")} == set()
    assert (started.parent / "alone.keys-1.secret").exists()


def test_a_backup_with_secrets_has_all_of_them(run, started):
    """Also those of a rotation, and no token of the operator's."""
    (started / "operator.token").write_text("t")
    assert run("state", "rotate", "state").code == 0
    assert run("state", "backup", "state", "b", "--with-secret").code == 0
    assert not list((started.parent / "b").rglob("*.token"))
    ledger = started.parent / "kept"
    ledger.mkdir()
    for path in started.glob("ledger*"):
        shutil.move(path, ledger / path.name)
    shutil.rmtree(started)
    started.mkdir()
    for path in ledger.iterdir():
        shutil.copy(path, started / path.name)
    unsaid = run("state", "restore", "b", "state")
    assert unsaid.code == 4
    assert "--newest-ledger" in unsaid.err
    assert run("state", "restore", "b", "state", "--newest-ledger").code == 0
    again = run("run", "pipeline.toml")

    assert again.code == 0
    assert "nothing new was charged" in again.err


def test_nothing_is_rotated_beside_a_run_that_cannot_be(run, started, monkeypatch):
    """A series takes its noise from the secret alone; it comes last by its name."""
    whole = run_directory.read_about

    def of_series(folder, **named):
        about = whole(folder, **named)
        return about | {"mechanism": "uniform"} if about and folder.name == "second" else about

    monkeypatch.setattr(run_directory, "read_about", of_series)
    done = run("state", "rotate", "state")

    assert done.code == 4
    assert "comes from its secret alone" in done.err
    assert not list(started.glob("*.keys-*"))


def test_a_rotated_pipeline_goes_on(run, started):
    """Each of its queries has a new secret for its keys."""
    done = run("state", "rotate", "state", "--json")
    assert [one["secret"] for one in done.json["rotated"]] == [
        "state/first.keys-1.secret",
        "state/second.keys-1.secret",
    ]
    assert run("run", "pipeline.toml").code == 0


def test_a_secret_of_a_rotation_that_is_lost_is_told_with_the_ways_out(run, started):
    """It lies beside the run, on the disk that may be lost; a new one would open nothing."""
    assert run("state", "rotate", "state").code == 0
    (started / "first.keys-1.secret").unlink()
    done = run("run", "pipeline.toml")

    assert done.code == 4
    assert "are wrapped by state/first.keys-1.secret since they were rotated" in done.err
    assert "--take-over" in done.err


def releases():
    return {path.name: path.read_bytes() for path in Path("out").glob("*.csv")}


def keep(**spans):
    """Give the pipeline a retention."""
    lines = [f'{key} = "{span}"\n' for key, span in spans.items()]
    Path("pipeline.toml").write_text("[retention]\n" + "".join(lines) + PIPELINE + BOTH)


def make_old(*paths):
    for path in paths:
        os.utime(path, (1, 1))


def test_what_may_go_is_told_and_goes_when_that_is_asked(run, started):
    """Release files and dead letters by their age; what kills have left; nothing else."""
    letters = started / "first" / "dead-letters" / "x.jsonl"
    letters.parent.mkdir(exist_ok=True)
    letters.write_text("{}\n")
    cut = started / "first" / ".run.dps.0123456789abcdef.new"
    part = started / "first" / "segments" / "window0-99.dps"
    for path in (cut, part):
        path.write_text("cut")
    other = Path("out") / "notes.csv"
    other.write_text("mine")
    nothing = run("state", "gc", "pipeline.toml")
    assert "half-written files: 1 file, 3 bytes; a kill has left them" in nothing.out
    assert "kept for ever: releases, served, dead_letters" in nothing.err
    keep(releases="400 days", dead_letters="30 days")
    first = Path("out") / "first-w000000-t000001.csv"
    make_old(first, letters, other)

    told = run("state", "gc", "pipeline.toml", "--json").json
    what = ["half-written files", "parts of snapshots", "release files", "dead letters"]
    assert [one["what"] for one in told["waste"]] == what
    assert told["waste"][2]["why"] == "published more than 400 days ago"
    assert all(path.exists() for path in (cut, part, first, letters))
    done = run("state", "gc", "pipeline.toml", "--yes")
    assert done.out.count("removed: ") == 4
    assert not any(path.exists() for path in (cut, part, first, letters))
    assert other.exists()
    assert run("state", "verify", "state").out == "no fault was found\n"
    assert "nothing may go" in run("state", "gc", "pipeline.toml").out
    assert run("run", "pipeline.toml").code == 0
    assert first.name not in releases()


def test_release_files_that_a_replay_writes_again_are_as_they_were(run, folder, monkeypatch):
    """A kill before the snapshot repeats the steps; the files were removed meanwhile."""
    (folder / "clicks.csv").write_text(CLICKS)
    keep(releases="0 days")
    with monkeypatch.context() as patch:
        patch.setattr(Snapshots, "save", kill_this_process)
        assert run_in_fork(lambda: main(["run", "pipeline.toml"])) == -signal.SIGKILL
    before = releases()
    assert "first-w000000-t000002.csv" in before
    assert run("state", "gc", "pipeline.toml", "--yes").code == 0
    assert releases() == {}
    done = run("run", "pipeline.toml")

    assert done.code == 0
    assert "nothing new was charged" in done.err
    assert releases().items() >= before.items()


def test_a_run_that_was_ended_may_go_and_one_that_is_running_is_left(run, started):
    """The ledger says which; it stays, and so do the other runs."""
    abouts = {name: read_about(started / name) for name in ("first", "second")}
    with closing(Ledger(started / "ledger")) as book:
        book.end("clicks", abouts["first"]["run"].hex(), because="another query", who="ann")
    with closing(InputLog(started / "first" / "inputs.log", run=abouts["first"]["run"])):
        busy = run("state", "gc", "state", "--yes")
    assert "left: state/first: it is running" in busy.out
    assert (started / "first").exists()
    done = run("state", "gc", "state", "--yes")

    assert "its run was ended for good (another query)" in done.out
    assert not (started / "first").exists()
    assert read_about(started / "second") == abouts["second"]
    keep()
    Path("pipeline.toml").write_text(PIPELINE + QUERY.format(name="second"))
    assert run("run", "pipeline.toml").code == 0


def test_two_calls_of_gc_at_once_remove_what_one_would(run, started, monkeypatch):
    """The second comes in whole at some file of the first; both end well, and no folder is left."""
    with closing(Ledger(started / "ledger")) as book:
        run_id = read_about(started / "first")["run"].hex()
        book.end("clicks", run_id, because="another query", who="ann")
    keep(releases="400 days")
    make_old(*Path("out").glob("*.csv"))
    whole = {path: path.read_bytes() for path in started.rglob("*") if path.is_file()}
    files = len([path for path in whole if (started / "first") in path.parents])
    pipeline = load_pipeline("pipeline.toml")

    def collect():
        runs = retention.collect_runs([started / "first", started / "second"], remove=True)
        return [*runs, *retention.collect_by_age(pipeline, remove=True)]

    erase = retention.erase
    for at in (1, files - 2, files - 1, files):
        for path, content in whole.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        (Path("out") / "first-w000000-t000001.csv").touch()
        make_old(*Path("out").glob("*.csv"))
        left = iter([False] * (at - 1) + [True])

        def meet(path, left=left):
            if next(left, False):
                collect()
            erase(path)

        monkeypatch.setattr(retention, "erase", meet)
        assert sum(one.files for one in collect()) >= files
        assert not [*left]
        assert not (started / "first").exists()
        assert not [*Path("out").glob("first*.csv")]
    assert run("state", "verify", "state").code == 0


def test_a_run_that_has_begun_in_the_place_of_an_ended_one_stays(run, started, monkeypatch):
    """gc has read whose it is; another gc removes it, and a new run begins there and stops."""
    place = started / "first"
    about = read_about(place)
    with closing(Ledger(started / "ledger")) as book:
        book.end("clicks", about["run"].hex(), because="another query", who="ann")

    def read_first(folder):
        monkeypatch.setattr(retention, "read_about", read_about)
        shutil.rmtree(place)
        place.mkdir()
        with closing(Ledger(started / "ledger")) as book:
            more = {name: about[name] for name in ("facts", "notes")}
            made = run_directory.make_run(
                place,
                kind=about["kind"],
                run=bytes(16),
                dataset="clicks",
                secret=Secret(bytes(32)),
                ledger=book,
                more=more,
            )
            made.close()
        return about

    monkeypatch.setattr(retention, "read_about", read_first)
    found = [*retention.collect_runs([place], remove=True)]

    assert [one.files for one in found] == [0]
    assert read_about(place)["run"] == bytes(16)
    assert (place / "inputs.log").exists()


def test_files_of_a_run_that_is_going_are_left_to_it(run, started):
    """By age, too: it is named, and what belongs to the others goes. Inputs are everybody's."""
    keep(releases="400 days", dead_letters="30 days", inputs="1 day")
    mine, theirs = {}, {}
    for name, paths in (("first", mine), ("second", theirs)):
        paths["release"] = Path("out") / f"{name}-w000000-t000001.csv"
        paths["letters"] = started / name / "dead-letters" / "x.jsonl"
        paths["letters"].parent.mkdir(exist_ok=True)
        paths["letters"].write_text("{}\n")
        make_old(*paths.values())
    about = read_about(started / "first")
    with closing(InputLog(started / "first" / "inputs.log", run=about["run"])):
        busy = run("state", "gc", "pipeline.toml", "--yes")

    assert busy.out.count("left: state/first: it is running") == 1
    assert all(path.exists() for path in mine.values())
    assert not any(path.exists() for path in theirs.values())
    run("state", "gc", "pipeline.toml", "--yes")
    assert not any(path.exists() for path in mine.values())


def test_a_pipeline_that_runs_removes_what_is_old_itself(run, folder):
    """When it starts, by the age of each file; the others stay."""
    (folder / "clicks.csv").write_text(CLICKS)
    keep(releases="400 days")
    assert run("run", "pipeline.toml", "--once").code == 0
    first = Path("out") / "first-w000000-t000001.csv"
    make_old(first)
    before = releases()
    assert run("run", "pipeline.toml").code == 0

    assert before.keys() - releases().keys() == {first.name}


def test_a_span_that_is_none_is_refused_with_its_place(run, started):
    """As every key of the file."""
    keep(served="long")
    assert "pipeline.toml, [retention]: served" in run("state", "gc", "pipeline.toml").err
    keep(serve="1 day")
    assert "did you mean 'served'?" in run("state", "gc", "pipeline.toml").err


def test_rows_that_no_recovery_needs_are_in_no_backup(run, started):
    """They are kept for longer, and would be copied every day."""
    kept = started / "arrived" / "kept" / "a-000000000000.segment"
    kept.parent.mkdir(parents=True)
    for path in (kept, started / "arrived" / "a-000000000001.segment"):
        path.write_bytes(b"rows")
    assert run("state", "backup", "state", "b").code == 0

    assert [path.name for path in Path("b").rglob("*.segment")] == ["a-000000000001.segment"]
