"""Public tables that are read anew: by the schedule, killed, restarted, restored, with errors."""

import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

import dpstream as dps
from dpstream.cli import main
from dpstream.engines.chunks import OperatorCounts
from dpstream.engines.spark import SparkEngine
from dpstream.engines.table_versions import TableVersions
from dpstream.errors import InvalidParameter, StateError
from dpstream.privacy.state.backup import Restoration, back_up, move
from tests.support.fixed import SECRET
from tests.support.kill_and_replay import BeforeDiskOperation, KindOfRun, kill_and_replay
from tests.support.live_runs import HOUR, ScriptedClock, drop, last_releases, rows, seconds_before
from tests.support.runs import charges, options, published

OPTIONS = """WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 8, delta = 1e-5,
    privacy_unit_column = user, time_unit = 'us', start = '1970-01-01',
    end = '1970-01-01 06:00', allowed_lateness = INTERVAL '1' HOUR, max_groups_contributed = 2,
    max_rows_per_group = 3, public_groups = ('v0', 'v2', 'v4', 'v6'))"""
TEXT = f"""
    SELECT {OPTIONS} kind, window_start, COUNT(*) AS n
    FROM TUMBLE(log, DESCRIPTOR(at), INTERVAL '3' HOUR) JOIN pages USING (page)
    GROUP BY kind, window_start EMIT EVERY INTERVAL '1' HOUR"""
LAST = last_releases(dps.sql(TEXT, name="live"))


def version(number, **more):
    return pa.table({"page": ["/1", "/2"], "kind": [f"v{number}"] * 2} | more)


def write(place, table):
    """Put the table there whole."""
    csv.write_csv(table, place / ".pages.csv")
    os.rename(place / ".pages.csv", place / "pages.csv")


def arrivals(place):
    """Rows come in the middle of every hour."""
    times = [number * HOUR + HOUR // 2 for number in range(6)]
    return [
        (time, lambda time=time: drop(place / "in", f"{time}.parquet", rows(seconds_before(time))))
        for time in times
    ]


def changes(place):
    """Every second hour the table is another."""
    return [(n * HOUR - 1, lambda n=n: write(place, version(n))) for n in (2, 4, 6)]


def start(place, *, events=changes, refresh="2 hours", query=None, **named):
    """A run over a growing directory; the clock goes on where it was, or just before that."""
    (place / "in").mkdir(parents=True, exist_ok=True)
    if not (place / "pages.csv").exists():
        write(place, version(0))
    keep = place / "clock"
    now = max(int(keep.read_text()) - 2, 0) if keep.exists() else 0  # before its trigger
    script = [*arrivals(place), *events(place)]
    settings = {
        "source": place / "in",
        "live": True,
        "sink": place / "out",
        "state": place / "state",
        "secret": SECRET,
        "options": options(),
        "clock": ScriptedClock(now, script, keep),
        "public": {"pages": dps.Refreshed(place / "pages.csv", every=refresh)},
    }
    return dps.run(query or dps.sql(TEXT, name="live"), **(settings | named))


def kind(**named):
    return KindOfRun(
        start=lambda place: start(place, **named),
        published=published,
        charges=lambda place: charges(place / "state" / "ledger"),
    )


def counts(place, name):
    """The noisy counts of a release, by kind."""
    table = pq.read_table(place / "out" / name)
    return dict(zip(table["kind"].to_pylist(), table["n"].to_pylist(), strict=True))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Where an unbroken run has published."""
    place = tmp_path_factory.mktemp("whole")
    start(place).finish()
    return place


def test_rows_meet_the_version_of_their_interval(whole, tmp_path):
    """Rows of the first two hours meet v0, those of the next two v2; else all meet v0."""
    start(tmp_path, public={"pages": version(0)}).finish()
    plain = counts(tmp_path, LAST[0])
    first, second = (counts(whole, name) for name in LAST)

    assert plain["v0"] > 20 > abs(plain["v2"])
    assert min(first["v0"], first["v2"]) > 10 > abs(first["v6"])  # three standard deviations
    assert second["v4"] > 10 > abs(second["v0"])


@pytest.mark.parametrize("engine", [None, pytest.param("spark", marks=pytest.mark.spark)])
def test_subqueries_in_expressions_look_into_the_version_of_their_interval(
    tmp_path, engine, request
):
    """The one kind of a version is that of every row that arrives while it is read."""
    text = TEXT.replace("kind, w", "(SELECT MAX(kind) FROM pages) AS kind, w", 1).replace(
        "JOIN pages USING (page)", "WHERE page IN (SELECT page FROM pages)"
    )
    text = text.replace("epsilon = 8", "epsilon = 30")
    if engine is not None:
        engine = SparkEngine(request.getfixturevalue("session"), buckets=2)
    start(tmp_path, query=dps.sql(text, name="live"), engine=engine).finish()
    first, second = (counts(tmp_path, name) for name in LAST)

    assert min(first["v0"], first["v2"]) > 6 > abs(first["v6"])  # five standard deviations
    assert second["v4"] > 10 > abs(second["v0"])


@pytest.mark.parametrize("nth", [5, 30, 60, 75, 90, 105, 120])
def test_a_killed_run_joins_the_same_versions(tmp_path, whole, nth):
    """Wherever it is killed, its releases and its charge are those of an unbroken run."""
    after = kill_and_replay(kind(), tmp_path / "run", BeforeDiskOperation(nth))

    assert after.published == published(whole)
    assert after.charges == 1


@pytest.mark.spark
@pytest.mark.parametrize("releases", [None, 3, 4])
def test_spark_joins_the_versions_that_one_process_joins(session, tmp_path, whole, releases):
    """Byte for byte, whole or broken off and begun again; copies that nobody needs are gone."""
    engine = SparkEngine(session, buckets=2)
    if releases is not None:
        running = iter(start(tmp_path, engine=engine))
        for _ in range(releases):
            next(running)
        running.close()
    run = start(tmp_path, engine=engine).finish()

    assert published(tmp_path) == published(whole)
    assert charges(tmp_path / "state" / "ledger") == 1
    assert run.operator.stale_tables == {}
    copies = {path.stem for path in (tmp_path / "state" / "tables" / "pages").iterdir()}
    assert len(copies) == 2
    assert "first" in copies


def test_rows_that_come_again_meet_the_versions_of_then(tmp_path):
    """Spark sends a batch again: it is joined as it was, though newer versions are met by now."""
    write(tmp_path, version(0))
    query = dps.with_tables(
        dps.sql(TEXT, name="live"),
        public={"pages": dps.Refreshed(tmp_path / "pages.csv", every="2 hours")},
    )
    folder, table = tmp_path / "state", rows([1, 2])
    versions = TableVersions(query, folder, OperatorCounts())
    met = {0: versions.save()}
    for step in (1, 2, 3, 4):
        write(tmp_path, version(step))
        versions.begin(step, None)
        met[step] = versions.save()
    later = TableVersions(query, folder, OperatorCounts())
    later.go_on_from({"step": 3, "tables": met[3]})
    later.go_on_from({"step": 5, "tables": met[4]})

    def kinds(digests):
        return set(later.prepared_as(digests, 3)(table)["kind"].to_pylist())

    assert met[2] == met[3] != met[4] == later.save()
    assert (kinds(met[0]), kinds(met[3]), kinds(met[4])) == ({"v0"}, {"v2"}, {"v4"})
    for _ in range(2):
        later.settle({"step": 5, "tables": met[3]})
        assert (kinds(met[3]), kinds(met[4])) == ({"v2"}, {"v4"})
    later.settle({"step": 5, "tables": met[4]})
    with pytest.raises(StateError, match="whose copy"):
        kinds(met[3])


def test_a_replay_joins_the_copy_and_not_the_file(tmp_path):
    """The file is another by then, and even gone; a copy that is lost is asked for."""
    running = iter(start(tmp_path, events=changes))
    for _ in range(5):
        next(running)
    running.close()
    copies = tmp_path / "state" / "tables" / "pages"
    kept = {path.name for path in copies.iterdir()}
    (tmp_path / "pages.csv").unlink()
    os.rename(copies, tmp_path / "aside")
    copies.mkdir()
    shutil.copy(tmp_path / "aside" / "first.arrow", copies)

    assert "first.arrow" in kept
    assert len(kept) >= 2
    with pytest.raises(StateError, match="has met a version of the table 'pages' whose copy"):
        going_on(tmp_path).finish()
    shutil.rmtree(copies)
    os.rename(tmp_path / "aside", copies)
    running = going_on(tmp_path).finish()
    assert "pages.csv" in running.operator.stale_tables["pages"]


def going_on(place):
    """The same run, without the file of the table."""
    running = start(place, events=lambda place: ())
    (place / "pages.csv").unlink()
    return running


def test_versions_go_when_no_recovery_needs_them(whole):
    """Two snapshots are kept, and the versions that steps since the older of them have met."""
    kept = list((whole / "state" / "tables" / "pages").iterdir())

    assert len(kept) <= 3


def test_what_cannot_be_joined_leaves_the_version_there_was(tmp_path):
    """Another type, a column less or no file: the operator is told, and nothing stops."""
    worse = [
        (2 * HOUR - 1, lambda: (tmp_path / "pages.csv").unlink()),
        (4 * HOUR - 1, lambda: write(tmp_path, version(4).drop_columns("kind"))),
        (6 * HOUR - 1, lambda: write(tmp_path, version(6))),
    ]
    running = start(tmp_path, events=lambda place: worse)
    told = [dict(running.operator.stale_tables) for _ in running]

    assert any("pages.csv" in each.get("pages", "") for each in told)
    assert any("no column 'kind' any more" in each.get("pages", "") for each in told)
    assert told[-1] == {}
    assert min(counts(tmp_path, LAST[0])["v0"], counts(tmp_path, LAST[1])["v0"]) > 5


def test_a_new_column_takes_no_name_from_the_stream(tmp_path):
    """What a bare name means was settled when the run began."""
    more = [(2 * HOUR - 1, lambda: write(tmp_path, version(2, at=["no time"] * 2)))]
    running = start(tmp_path, events=lambda place: more).finish()

    assert running.operator.rejected_rows == 0
    assert counts(tmp_path, LAST[1])["v2"] > 5


def test_a_changed_file_without_refresh_is_refused(tmp_path):
    """And so is another interval: it would be another query."""
    place = {"public": {"pages": tmp_path / "pages.csv"}}
    running = iter(start(tmp_path, events=lambda place: (), **place))
    next(running)
    running.close()
    write(tmp_path, version(2))

    with pytest.raises(StateError, match="the table 'pages' has changed since the run"):
        start(tmp_path, **place).finish()
    write(tmp_path, version(0))
    with pytest.raises(StateError, match="REFRESHED EVERY 7200000000"):
        start(tmp_path).finish()


def test_a_backup_has_the_copies(tmp_path, whole):
    """Restored, or moved, a run goes on with the versions that it had."""
    place = tmp_path / "one"
    running = iter(start(place))
    for _ in range(5):
        next(running)
    running.close()
    back_up(place / "state", tmp_path / "backup")
    shutil.rmtree(place / "state")
    os.remove(place / "state.secret") if (place / "state.secret").exists() else None
    Restoration(folder=place / "state", nothing_since=True, because="a test", who="a test").restore(
        tmp_path / "backup"
    )
    move(place / "state", place / "moved", because="a test", who="a test")
    start(place, state=place / "moved").finish()

    assert published(place) == published(whole)


def test_history_meets_the_first_version(tmp_path):
    """Files of before are read ahead, in any order of steps: they meet what the run began with."""
    before = rows(seconds_before(HOUR // 2), user="old")
    start(tmp_path, history=before, events=changes).finish()

    assert counts(tmp_path, LAST[0])["v0"] > 20


def test_keys_are_not_taken_from_a_table_that_changes():
    """They are fixed for the whole run, so that the releases have one shape."""
    text = TEXT.replace("('v0', 'v2', 'v4', 'v6')", "(SELECT kind FROM pages)")

    with pytest.raises(InvalidParameter, match="keys are fixed for a whole run; take them from"):
        dps.with_tables(dps.sql(text), public={"pages": refreshed("pages.csv", version(0))})


def refreshed(path, table):
    csv.write_csv(table, path)
    return dps.Refreshed(path, every="1 day")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"registry": {"pages": dps.Refreshed("x.csv", every="1 day")}}, "only a public table"),
        ({"public": {"pages": dps.Refreshed(version(0), every="1 day")}}, "which never changes"),
        ({"public": {"pages": dps.Refreshed("x.csv", every="often")}}, "refresh of the table"),
    ],
)
def test_what_cannot_be_refreshed_is_refused(tables, words):
    """With what to do about it."""
    with pytest.raises(InvalidParameter, match=words):
        dps.with_tables(dps.sql(TEXT), **tables)


def test_explain_says_when_it_is_read_anew():
    """And the interval is part of the query."""
    query = dps.with_tables(dps.sql(TEXT), public={"pages": refreshed("pages.csv", version(0))})

    assert "a live run reads the table anew every 1 day, at the next trigger" in (
        dps.explain(query).text()
    )
    assert "REFRESHED EVERY 86400000000" in query.facts()["prepare"]


PIPELINE = """
[source]
path = "log.csv"
[budget]
dataset = "log"
epsilon = 4
delta = 1e-6
[state]
path = "state"
[sink]
to = "out"
[[public]]
name = "pages"
path = "pages.csv"
{refresh}
[[query]]
name = "kinds"
sql = '''SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 2, delta = 1e-7,
  privacy_unit_column = user, max_groups_contributed = 1, public_groups = ('v0', 'v2'))
  kind, COUNT(*) AS n FROM log JOIN pages USING (page) GROUP BY kind'''
"""


@pytest.mark.parametrize(("refresh", "code"), [('refresh = "1 day"', 0), ("", 4)])
def test_a_pipeline_goes_on_with_its_copy(tmp_path, capsys, refresh, code):
    """After the file has changed; the control, without refresh, is refused and says so."""
    csv.write_csv(rows(seconds_before(HOUR)), tmp_path / "log.csv")
    write(tmp_path, version(0))
    (tmp_path / "pipeline.toml").write_text(PIPELINE.format(refresh=refresh))
    assert command("run", "pipeline.toml") == 0
    write(tmp_path, version(2))
    capsys.readouterr()

    assert command("run", "pipeline.toml") == code
    assert ("the table 'pages' has changed since" in capsys.readouterr().err) == bool(code)


def command(*arguments):
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    return left.value.code


def test_the_command_reads_a_table_anew(tmp_path, capsys):
    """`--refresh` goes with `--public`, and `explain` says what it does."""
    write(tmp_path, version(0))
    public = ("--public", "pages=pages.csv")

    assert command("explain", TEXT, *public, "--refresh", "pages=1 day") == 0
    assert "reads the table anew every 1 day" in capsys.readouterr().out
    assert command("explain", TEXT, *public, "--refresh", "codes=1 day") == 2
    assert "there is no --public codes=PATH" in capsys.readouterr().err


def test_queries_of_one_source_have_versions_of_their_own(tmp_path):
    """One joins what is read anew, the other what it began with; they share what they parse."""
    (tmp_path / "in").mkdir()
    write(tmp_path, version(0))
    fixed = TEXT.replace("JOIN pages", "JOIN fixed AS pages")
    asked = [dps.sql(TEXT, name="live"), dps.sql(fixed, name="fixed")]
    book = dps.Ledger(tmp_path / "book")
    book.open("stream", asked[0].promise(epsilon=40, delta=1e-2))
    runs = dps.run_all(
        asked,
        source=tmp_path / "in",
        live=True,
        sink=tmp_path / "out",
        state=tmp_path / "state",
        secret=SECRET,
        options=options(),
        ledger=book,
        clock=ScriptedClock(0, [*arrivals(tmp_path), *changes(tmp_path)]),
        public={
            "pages": dps.Refreshed(tmp_path / "pages.csv", every="2 hours"),
            "fixed": tmp_path / "pages.csv",
        },
    )
    for _ in runs:
        pass

    last = LAST[1].removeprefix("live")
    assert counts(tmp_path, f"live{last}")["v4"] > 5 > abs(counts(tmp_path, f"live{last}")["v0"])
    assert counts(tmp_path, f"fixed{last}")["v0"] > 20 > abs(counts(tmp_path, f"fixed{last}")["v4"])


def test_a_series_is_joined_to_versions_too(tmp_path):
    """And goes on with them after a stop."""
    text = """SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 8, privacy_unit = 'w_event',
        w = 1, mechanism = 'uniform', privacy_unit_column = user,
        time_unit = 'us', public_groups = ('v0', 'v2', 'v4', 'v6'), start = '1970-01-01',
        end = '1970-01-01 06:00') kind, window_start, COUNT(*) AS n
        FROM TUMBLE(log, DESCRIPTOR(at), INTERVAL '1' HOUR) JOIN pages USING (page)
        GROUP BY kind, window_start"""

    def largest(releases):
        running, found = start(tmp_path, query=dps.sql(text, name="live")), []
        for _, table in zip(range(releases), running, strict=False):
            shown = dict(zip(table["kind"].to_pylist(), table["n"].to_pylist(), strict=True))
            found.append(max(shown, key=shown.get))
        running.close()
        return found

    assert largest(3) == ["v0", "v0", "v2"]
    assert largest(6)[-3:] == ["v2", "v4", "v4"]
