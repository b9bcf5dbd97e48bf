"""Pipelines whose state is in a bucket, and `dpstream state` there: any machine goes on.

A machine is a folder with the pipeline file and the secret, and a cache of its own.
"""

import itertools
import json
import shutil
import signal

import pytest

from dpstream.cli import main
from dpstream.connectors.objects import state_mirror
from dpstream.engines.clock import SystemClock
from dpstream.errors import InvalidInput, InvalidParameter, StateError
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.state import Secret
from dpstream.session.pipeline import load_pipeline
from dpstream.session.start_pipeline import load_current, open_book, start
from tests.golden.corpus import SECRET, run_options
from tests.golden.queries import text, write_parquet
from tests.servers.test_object_state import ObjectFeed
from tests.support.live_runs import TIMES
from tests.support.processes import kill_this_process, run_in_new_process

pytestmark = pytest.mark.servers
names = (f"pipes-{number}" for number in itertools.count())
FILE = '''
[source.log]
path = "{source}"
{live}
[sink]
to = "{sink}"
[state]
path = "{state}"
secret = "pipe.secret"
[budget]
dataset = "clicks"
epsilon = 40
delta = 2e-2
[[query]]
name = "sent"
sql = """{sql}"""
[[query]]
name = "again"
sql = """{sql}"""
'''
SQL = text(
    "COUNT(*) AS n, AVG(price, contribution_bounds_per_row => (0, 9)) AS p",
    keys="page, lang",
    epsilon=8,
)
LIVE = """SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 8, delta = 1e-5,
    privacy_unit_column = user, public_groups = ('/1', '/2'), max_groups_contributed = 2,
    max_rows_per_group = 3, time_unit = 'us', allowed_lateness = INTERVAL '1' HOUR,
    start = '1970-01-01', end = '1970-01-01T06:00')
    page, window_start, COUNT(*) AS n FROM TUMBLE(log, DESCRIPTOR(at), INTERVAL '3' HOUR)
    GROUP BY page, window_start EMIT EVERY INTERVAL '1' HOUR"""


@pytest.fixture
def bucket(objects):
    """With a log in it."""
    folder = objects.bucket(next(names))
    (folder / "in").mkdir()
    write_parquet(folder / "in")
    return folder


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """`machine("a", ...)`: the pipeline file of a new machine; this process is that one now."""

    def made(name, bucket, **changes):
        path = tmp_path / name / "pipeline.toml"
        path.parent.mkdir(exist_ok=True)
        Secret.create(path.parent / "pipe.secret", value=SECRET)
        given = {
            "source": f"s3://{bucket.name}/in/",
            "sink": "out/",
            "state": f"s3://{bucket.name}/states/pipe",
            "sql": SQL,
            "live": "",
        }
        path.write_text(FILE.format(**given | changes))
        be(path)
        return path

    def be(path):
        state_mirror._OPEN.clear()
        state_mirror._TAKEN.clear()
        monkeypatch.setenv("XDG_CACHE_HOME", str(path.parent / "cache"))

    made.be = be
    return made


@pytest.fixture
def run(capsys):
    """A command: its exit code, and what it says."""

    def call(*words):
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in words])
        said = capsys.readouterr()
        return left.value.code, said.out, said.err

    return call


def releases(path, *, clock=None, **changes):
    """Run a pipeline as `dpstream run` does, with fixed noise unless that is changed."""
    pipeline, clock = load_current(path), clock or SystemClock()
    with pipeline.open_ledgers() as ledgers:
        runs = start(pipeline, ledgers, clock=clock, options=run_options(**changes))
        for book in pipeline.books:
            shared, terms = ledgers[book.ledger], book.terms()
            open_book(pipeline, book, terms, shared, now=clock.now())
        with runs:
            yield from runs


def finish(path, **changes):
    return [name for name, _ in releases(path, **changes)]


def published(path):
    return {one.name: one.read_bytes() for one in (path.parent / "out").glob("*.parquet")}


def charges(bucket, place="states/pipe/ledger"):
    return [r for r in Ledger(f"s3://{bucket.name}/{place}").history() if "amount" in r]


def head(bucket):
    return (bucket / "states" / "pipe" / "head").read_bytes()


def publish_and_die(path):
    for number, _ in enumerate(releases(path)):
        if number == 6:
            kill_this_process()


def test_a_kill_and_another_machine(bucket, machine):
    """Two queries; SIGKILL on the first machine, the second goes on: as without it, on disk."""
    calm = machine("calm", bucket, state="state")
    assert len(finish(calm)) == len(published(calm))
    first, second = machine("a", bucket), machine("b", bucket)
    assert run_in_new_process(publish_and_die, first) == -signal.SIGKILL
    early = published(first)
    finish(second)
    late = published(second)

    assert early
    assert {n: late[n] for n in early.keys() & late.keys()} == {
        n: early[n] for n in early.keys() & late.keys()
    }
    assert early | late == published(calm)
    assert len(charges(bucket)) == 2
    assert finish(second) == []  # it is at its end


def test_live_on_three_machines(objects, bucket, machine, tmp_path):
    """Objects come while two queries run; both are left twice, each time for another machine: the
    same releases as with a state on a disk that all machines share, one charge for each query."""
    found = {}
    for state in (f"s3://{bucket.name}/states/pipe", str(tmp_path / "disk")):
        feed, seen = ObjectFeed(objects), {}
        more = {"sql": LIVE, "live": "live = true", "state": state}
        more["source"] = f"s3://{feed.folder.name}/in/?poll=0"
        ticking = feed.clock([(TIMES[2] + 1, objects.restart)])
        for name, most in (("a", 2), ("b", 3), ("c", None)):
            path = machine(f"{name}{len(found)}", bucket, **more)
            running = releases(path, clock=ticking)
            list(itertools.islice(running, most))
            running.close()
            again = published(path)
            assert all(seen.get(n, data) == data for n, data in again.items())
            seen |= again
        found[state] = seen
    ours, theirs = found.values()
    assert len(ours) == 16
    assert ours == theirs
    assert len(charges(bucket)) == 2


def test_mistakes_disturb_nobody(bucket, machine, run):
    """Each is told by the state's own name, and what runs elsewhere goes on."""
    path = machine("a", bucket)
    running = releases(path)
    list(itertools.islice(running, 4))
    before, cache = head(bucket), str(path.parent.parent)
    wrong = machine("b", bucket)
    (wrong.parent / "pipe.secret").unlink()
    code, _, said = run("run", wrong)
    assert (code, "which is not there; restore it" in said) == (4, True)
    Secret.create(wrong.parent / "pipe.secret")
    code, _, said = run("run", wrong)
    assert code == 4
    assert f"s3://{bucket.name}/states/pipe/sent was made with another secret" in said
    assert cache + "/b/cache" not in said
    changed = machine("c", bucket, sql=SQL.replace("COUNT(*)", "COUNT(DISTINCT user)"))
    code, _, said = run("run", changed)
    assert (code, "belongs to another query" in said) == (4, True)
    for words in (("check", path), ("explain", path), ("ledger", path), ("state", "gc", path)):
        assert run(*words)[0] == 0
    assert head(bucket) == before
    list(running)
    assert head(bucket) != before


def test_what_a_pipeline_file_may_say(bucket, machine, run):
    """What cannot be is refused when the file is read, with the line to write."""
    path = machine("a", bucket)
    written = path.read_text()

    def refused(old, new):
        path.write_text(written.replace(old, new))
        with pytest.raises((InvalidInput, InvalidParameter)) as problem:
            load_pipeline(path)
        return str(problem.value)

    assert 'needs its secret named: add secret = "FILE"' in refused('secret = "pipe.secret"', "")
    assert "must be a directory, or a name in a bucket" in refused("s3://pipes", "kafka://pipes")
    assert "is for the embedded engine; for spark name a directory" in refused(
        "[state]", '[engine]\nname = "spark"\n[state]'
    )
    assert "would stay on this machine; leave it out" in refused(
        "[budget]", '[budget]\nledger = "book"'
    )
    path.write_text(written)
    code, _, said = run("serve", path)
    assert (code, "is in a bucket; run it there with dpstream run" in said) == (2, True)
    code, _, said = run("run", path, "--metrics", "0")
    assert (code, "no token is kept; name a file" in said) == (2, True)


def test_state_commands(bucket, machine, run):
    """They look at a copy of one moment; what they write takes the state over, or is refused."""
    path, uri = machine("a", bucket), f"s3://{bucket.name}/states/pipe"
    running = releases(path)
    list(itertools.islice(running, 4))
    before = head(bucket)
    _, out, _ = run("state", "inspect", uri, "--json")
    assert [one["directory"] for one in json.loads(out)["runs"]] == [f"{uri}/again", f"{uri}/sent"]
    assert run("state", "verify", uri, "--secret", path.parent / "pipe.secret")[0] == 0
    assert run("state", "quarantine", uri) == (0, "", "")
    assert run("state", "gc", uri)[0] == 0
    for words in (
        ("rotate", uri),
        ("gc", uri, "--yes"),
        ("move", uri, path.parent / "state"),
        ("move", path.parent, uri),
        ("inspect", f"s3://{bucket.name}/states/none"),
    ):
        code, _, said = run("state", *words)
        assert (code, "s3://" in said or "bucket" in said) == (4, True)
        assert "/cache/" not in said
    tar = path.parent / "backup.tar"
    code, _, said = run("state", "backup", uri, tar)
    assert (code, "its secret is not in it" in said) == (0, True)
    assert head(bucket) == before
    running.close()


def test_a_backup_goes_from_bucket_to_bucket_and_to_a_directory(bucket, machine, run):
    """With its ledger, which is named; the run goes on, and publishes what it would have."""
    calm = machine("calm", bucket, state="calm")
    finish(calm)
    path, uri = machine("a", bucket), f"s3://{bucket.name}/states/pipe"
    running = releases(path)
    list(itertools.islice(running, 4))
    running.close()
    tar, book = path.parent / "backup.tar", f"{uri}/ledger"
    assert run("state", "backup", uri, tar)[0] == 0
    other = f"s3://{bucket.name}/states/other"
    how = ("--ledger", book, "--newest-ledger")
    for to, words, why in (
        (other, (), "name the ledger that the runs are charged to"),
        (other, ("--ledger", f"{other}/ledger"), "there is no ledger at"),
        (uri, how, "holds a state already"),
    ):
        code, _, said = run("state", "restore", tar, to, *words)
        assert (code, why in said) == (4, True)
    assert run("state", "restore", tar, other, *how)[0] == 0
    moved = machine("b", bucket, state=other)
    moved.write_text(moved.read_text().replace("[budget]", f'[budget]\nledger = "{book}"'))
    running = releases(moved)
    list(itertools.islice(running, 3))
    running.close()
    with pytest.raises(StateError, match=rf"{uri}/\w+ is older than what"):
        finish(machine("late", bucket))
    machine.be(moved)
    assert run("state", "backup", other, moved.parent / "2.tar")[0] == 0
    here = moved.parent / "state"
    assert run("state", "restore", moved.parent / "2.tar", here, *how)[0] == 0
    moved.write_text(moved.read_text().replace(other, "state"))
    finish(moved)

    assert published(path) | published(moved) == published(calm)
    assert len(charges(bucket)) == 2


def test_a_copy_in_another_bucket_is_adopted(objects, bucket, machine, run):
    """A bucket that its store's tools have copied has another ledger: somebody must vouch."""
    path = machine("a", bucket)
    finish(path)
    copy = objects.bucket(next(names))
    shutil.copytree(bucket, copy, dirs_exist_ok=True)
    later = machine("b", copy, source=f"s3://{bucket.name}/in/")
    with pytest.raises(StateError, match="dpstream state adopt"):
        finish(later)
    words = ("--only-copy", "--nothing-since", "--because", "the first bucket is lost")
    code, _, said = run("state", "adopt", f"s3://{copy.name}/states/pipe", *words)
    assert code == 0, said
    machine.be(later)
    assert finish(later) == []


def test_a_change_is_accepted_on_another_machine(bucket, machine, run):
    """`apply` takes the state over, and the next start, anywhere, carries the change out."""
    path = machine("a", bucket)
    running = releases(path)
    list(itertools.islice(running, 4))
    other = machine("b", bucket, sql=SQL.replace("AVG(price", "SUM(price"))
    code, _, said = run("apply", other, "--yes", "--now")
    assert (code, "stops at its next step: start it again" in said) == (0, True)
    with pytest.raises(StateError, match="was opened by another process"):
        list(running)
    machine.be(path)
    path.write_text(other.read_text())
    (path.parent / "out").rename(path.parent / "before")
    assert {*finish(path)} == {"sent_2", "again_2"}
    assert len(charges(bucket)) == 4


def test_a_unit_is_erased_from_another_machine(bucket, machine, run):
    """Then the bucket has the state without it, and the run goes on from that, anywhere."""
    path = machine("a", bucket)
    running = releases(path)
    list(itertools.islice(running, 6))
    running.close()
    other = machine("b", bucket)
    code, out, said = run("run", other, "--erase-unit", "user 7")
    assert (code, "erased from" in out) == (0, True), said
    machine.be(path)
    finish(path)  # it would be refused from a state that has the unit still
    book = Ledger(f"s3://{bucket.name}/states/pipe/ledger")
    assert len([r for r in book.history() if "erasure" in r]) == 2
