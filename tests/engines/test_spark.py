"""What only Spark has: streams of frames, batches that come again, sinks of its own."""

import doctest
import json
import shutil
import signal
import traceback
from contextlib import suppress
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dpstream as dps
from dpstream.engines.spark import SparkEngine, SparkSink
from dpstream.engines.spark.spark_engine import FrameSink
from dpstream.errors import (
    BudgetExceeded,
    InvalidInput,
    InvalidParameter,
    NoiseReuse,
    StateError,
)
from dpstream.privacy.state import unpack
from dpstream.serve.release_store import ReleaseReader, store_folder
from dpstream.session.change_plan import plan_changes
from tests.cli import test_apply as changed
from tests.cli.test_docs import LOOSE, ROOT
from tests.laws.test_published_keys import every_type_of_key, keys_at_the_edges
from tests.support.kill_and_replay import FailAtCall, kill_and_replay
from tests.support.live_runs import ScriptedClock, arrivals, drop, start_live, whole_live
from tests.support.pipelines import PIPELINE, rows
from tests.support.pipelines import published as run_served
from tests.support.runs import (
    SHORT,
    break_off,
    charges,
    group_by,
    options,
    published,
    query,
    start,
    table,
    whole,
    write,
)

pytestmark = pytest.mark.spark


@pytest.fixture
def engine(session):
    return SparkEngine(session, buckets=2, steps_at_once=3)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What the embedded engine publishes."""
    return whole(tmp_path_factory.mktemp("expected"))


@pytest.fixture(scope="module")
def expected_short(tmp_path_factory):
    return whole(tmp_path_factory.mktemp("short"), SHORT)


@pytest.fixture(scope="module")
def expected_whole(tmp_path_factory):
    return whole(tmp_path_factory.mktemp("one_window"), ONE_WINDOW)


def parts(place, count=3, rows=None):
    """The rows in several files."""
    rows = table() if rows is None else rows
    (place / "in").mkdir(parents=True, exist_ok=True)
    for number in range(count):
        size = len(rows) // count
        pq.write_table(rows.slice(number * size, size), place / "in" / f"{number}.parquet")


def stream(session, place, *, at_once=1):
    """The files as a stream that Spark reads, for it filters them; so many in a batch."""
    return plain_stream(session, place, at_once=at_once).where("true")


def plain_stream(session, place, *, at_once=1):
    """The files as a stream that only projects them."""
    folder = str(place / "in")
    reader = session.readStream.schema(session.read.parquet(folder).schema)
    return reader.option("maxFilesPerTrigger", at_once).parquet(folder)


def test_a_frame_is_looked_at_before_the_charge(session, engine):
    """Of a stream nothing can be looked at."""
    times = [1_714_521_600_000 + n for n in range(50)]
    frame = session.createDataFrame(
        [(f"u{n}", time) for n, time in enumerate(times)], "user string, at bigint"
    )
    asked = dps.Query(
        privacy_unit_column="user",
        epsilon=1,
        delta=1e-6,
        max_groups_contributed=1,
        time_column="at",
        time_unit="s",
        start="2024-05-01",
        end="2024-05-02",
    )
    book = dps.Ledger()
    with pytest.raises(InvalidInput, match="say time_unit = 'ms'"):
        dps.run(asked, source=frame, engine=engine, ledger=book)

    assert not book.report()
    assert len(dps.run(asked, source=frame, engine=engine, ledger=book, anyway=True).collect()) == 1


def test_a_stream_of_several_batches(session, engine, tmp_path, expected):
    """All that a stream has, by event time; broken off and started again."""
    parts(tmp_path)
    break_off(tmp_path, 4, source=stream(session, tmp_path), engine=engine)
    start(tmp_path, source=stream(session, tmp_path), engine=engine).finish()

    assert published(tmp_path) == expected
    assert charges(tmp_path / "state" / "ledger") == 1


def test_a_frame_that_is_no_stream(session, engine, tmp_path, expected_short):
    write(tmp_path, table())
    frame = {"clicks": session.read.parquet(str(tmp_path / "rows.parquet"))}
    start(tmp_path, SHORT, source=frame, engine=engine).finish()

    assert published(tmp_path) == expected_short


def test_a_live_stream_goes_by_the_clock(session, engine, tmp_path):
    """Rows belong to the first trigger after they were read; triggers come without data, too."""
    expected = whole_live(tmp_path / "embedded")
    place = tmp_path / "spark"

    def come(action):
        action()
        for one in session.streams.active:
            one.processAllAvailable()

    clock = ScriptedClock(0, [(at, lambda a=a: come(a)) for at, a in arrivals(place / "in")])
    drop(tmp_path / "types", "any.parquet", pa.table({"user": [""], "page": [""], "at": [0]}))
    schema = session.read.parquet(str(tmp_path / "types")).schema
    (place / "in").mkdir(parents=True)
    frame = session.readStream.schema(schema).parquet(str(place / "in"))
    start_live(place, clock, source=frame, engine=engine).finish()

    assert published(place) == expected
    assert not session.streams.active


def spark_runs(session, engine):
    """Runs on Spark over a stream of the files in `in`, or over the rows of the folder."""

    def start_again(place):
        named = {"source": stream(session, place)} if (place / "in").exists() else {}
        return start(place, SHORT, engine=engine, **named)

    return replace(group_by(SHORT), start=start_again)


def test_a_batch_that_comes_again(session, engine, tmp_path, expected_short):
    """Killed after a batch was taken in and before Spark knows: the same rows go on, others not."""
    from dpstream.engines.spark.bucket_files import DriverProgress

    kind = replace(spark_runs(session, engine), prepare=lambda place: parts(place, 2))
    kill = FailAtCall(DriverProgress, "save", after=True)

    def change(place):
        for part in (place / "in").glob("*.parquet"):  # whichever was the first batch
            pq.write_table(pq.read_table(part).slice(100), part)  # single rows may count nowhere

    with pytest.raises(NoiseReuse, match="batch 0 was read before with other rows"):
        kill_and_replay(kind, tmp_path / "other", kill, damage=change)
    assert not list((tmp_path / "other" / "out").glob("*.parquet"))
    after = kill_and_replay(kind, tmp_path / "same", kill)

    assert after.statuses == [-signal.SIGKILL]
    assert after.published == expected_short


ONE_WINDOW = query(
    aggregates=(dps.Count("clicks"),),
    end="1970-01-01T04:00",
    window=dps.Tumble("4 hours"),
    allowed_lateness="1 hour",
)
"""5 steps."""


def frame_of(session, place):
    return session.read.parquet(str(place / "in"))


def filtered(session, place):
    """Spark reads it."""
    return frame_of(session, place).where("true")


WHOLE = {"stream": plain_stream, "frame": frame_of, "filtered": filtered}


@pytest.mark.parametrize("kind", WHOLE)
def test_one_job_takes_all_rows(session, tmp_path, expected_whole, kind, monkeypatch):
    """They wait nowhere: killed after the log, or before the progress, they are read anew. Files
    that have come meanwhile are no part of a stream; other rows in one that is stop the run."""
    from dpstream.engines.spark import tasks
    from dpstream.engines.spark.bucket_files import DriverProgress
    from dpstream.engines.spark.jobs import Jobs

    def none_waits(*_):
        raise AssertionError("rows were written, or read by the other reader")

    monkeypatch.setattr(tasks, "keep_rows", none_waits)
    monkeypatch.setattr(tasks, "read_source" if kind == "filtered" else "read_frame", none_waits)
    engine = SparkEngine(session, buckets=2, steps_at_once=8)
    again = lambda place: start(  # noqa: E731
        place, ONE_WINDOW, source=WHOLE[kind](session, place), engine=engine
    )
    runs = replace(group_by(ONE_WINDOW), prepare=lambda place: parts(place, 2), start=again)
    looks = iter(
        (
            lambda place: logged(place) == 5 and not published(place),
            lambda place: published(place).keys() == expected_whole.keys(),
        )
    )

    def look(place):
        assert next(looks)(place)
        if kind == "stream":
            pq.write_table(table(), place / "in" / "later.parquet")

    kills = [FailAtCall(Jobs, "publish"), FailAtCall(DriverProgress, "advance")]
    after = kill_and_replay(runs, tmp_path / "same", kills, damage=look)

    assert after.statuses == [-signal.SIGKILL] * 2
    assert after.published == expected_whole
    assert after.charges == 1

    def change(place):
        part = place / "in" / "0.parquet"
        pq.write_table(pq.read_table(part).slice(100), part)

    with pytest.raises(NoiseReuse):
        kill_and_replay(runs, tmp_path / "other", kills[:1], damage=change)
    assert not list((tmp_path / "other" / "out").glob("*.parquet"))


def logged(place):
    """How many steps are in the log."""
    return (place / "state" / "inputs.log").read_bytes().count(b'"digest"')


def test_too_many_rows_for_one_job_wait_in_files(session, tmp_path, expected_whole, monkeypatch):
    from dpstream.engines.spark import driver

    monkeypatch.setattr(driver, "_MOST_GATHERED", 10)
    parts(tmp_path, 2)
    engine = SparkEngine(session, buckets=2, steps_at_once=8)
    start(tmp_path, ONE_WINDOW, source=frame_of(session, tmp_path), engine=engine).finish()

    assert published(tmp_path) == expected_whole


def test_rows_that_were_changed_while_they_waited(engine, tmp_path):
    """Logged rows are what noise is drawn for; other ones stop the run before that."""
    write(tmp_path, table())
    break_off(tmp_path, 1, engine=engine)
    before = published(tmp_path)
    for path in (tmp_path / "state" / "shared").glob("*/rows/*.arrow"):
        rows = pa.ipc.open_file(path).read_all()
        next_one = int((rows["step"].to_numpy() < 3).sum())  # of the steps that come
        left = pa.concat_tables([rows.slice(0, next_one), rows.slice(next_one + 1)])
        path.unlink()
        with pa.ipc.new_file(path, rows.schema) as writer:
            writer.write_table(left)

    with pytest.raises(NoiseReuse, match="does not hold the rows that were logged") as raised:
        start(tmp_path, engine=engine).finish()
    assert published(tmp_path) == before
    assert "org.apache" not in "".join(traceback.format_exception(raised.value))


def test_broken_off_between_log_noise_sink_and_progress(session, engine, tmp_path, expected_short):
    """The charge and the log come first; what was drawn is drawn again, and sent once."""
    from dpstream.engines.spark.bucket_files import DriverProgress
    from dpstream.engines.spark.jobs import Jobs

    def is_paid_and_logged(place):
        assert charges(place / "state" / "ledger") == 1
        assert (
            logged(place) == 2
        )  # the next step begins a window, with the keys that these will show

    def is_sent_in_part(place):
        assert 0 < len(published(place)) < len(expected_short)

    looks = iter((is_paid_and_logged, is_sent_in_part))
    after = kill_and_replay(
        spark_runs(session, engine),
        tmp_path,
        [
            FailAtCall(Jobs, "publish"),  # paid and logged, nothing drawn
            FailAtCall(DriverProgress, "save"),  # drawn and sent, not noted
        ],
        damage=lambda place: next(looks)(place),
    )

    assert after.statuses == [-signal.SIGKILL] * 2
    assert after.published == expected_short
    assert after.charges == 1


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_run_that_was_refused_leaves_nothing(
    session, tmp_path, expected_short, monkeypatch, elsewhere
):
    """But its book, which others may have charged. Its rows were taken in before: they go, and a
    second try reads all of them again."""
    from dpstream.engines.spark.driver import SparkRun

    def refuse(*_):
        raise BudgetExceeded("no")

    place = str(tmp_path / "shared") if elsewhere else None
    engine = SparkEngine(session, buckets=2, steps_at_once=3, state_location=place)
    parts(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(SparkRun, "_pay", refuse)
        with pytest.raises(BudgetExceeded):
            start(tmp_path, SHORT, source=stream(session, tmp_path), engine=engine).finish()
    left = {path.name for path in (tmp_path / "state").iterdir()}
    assert left <= {"ledger", "ledger.head"}
    assert not list((tmp_path / "shared").glob("*"))
    start(tmp_path, SHORT, source=stream(session, tmp_path), engine=engine).finish()

    assert published(tmp_path) == expected_short


def test_nothing_is_left_of_windows_that_are_over(session, tmp_path):
    """Their keys and noise go at once; when the last one is final, everything goes."""
    write(tmp_path, table())
    engine = SparkEngine(session, buckets=2, steps_at_once=1)
    shared, keys = tmp_path / "state" / "shared", tmp_path / "state" / "windows"
    running = iter(start(tmp_path, SHORT, engine=engine))
    for _ in range(3):  # steps 0 to 2: the first window is over
        next(running)
    assert [path.name for path in keys.glob("*.key")] == ["1.key"]
    kept = [unpack(path.read_bytes(), kind="segment") for path in shared.glob("*/state/*-groups-*")]
    assert [one["owners"] for one in kept] == [[["window", 1]]] * 2
    assert list(running)

    assert not list(shared.glob("*/rows/*"))
    assert not list(shared.glob("*/state/*"))
    assert not list(keys.glob("*.key"))


def test_a_function_gets_every_key_that_is_not_set_aside(session):
    """In types that Spark has: no key stops a run after its charge."""
    sizes = []
    sink = FrameSink(session=session, function=lambda frame, _: sizes.append(frame.count()))
    for window, keys in enumerate((every_type_of_key(), pa.table(keys_at_the_edges()))):
        sink.write("q", window, 1, keys.replace_schema_metadata({"dpstream": '{"run": "r"}'}))

    assert sizes == [2, 5]


def test_sinks_of_spark(session, engine, tmp_path):
    """A function gets each release as a frame; files of a release are never doubled.

    Without a checkpoint nothing of a run stays where executors share files.
    """
    write(tmp_path, table())
    seen = []
    engine = replace(engine, state_location=str(tmp_path / "shared"))
    asked = {"state": None, "options": options()}
    start(tmp_path, SHORT, engine=engine, **asked).finish()
    expected = [pq.read_table(path) for path in sorted((tmp_path / "out").glob("*.parquet"))]

    def keep(frame, release):
        seen.append(((release.name, release.window, release.trigger), frame.toArrow()))

    start(tmp_path, SHORT, sink=keep, engine=engine, **asked).finish()
    files = SparkSink(path=str(tmp_path / "files"))
    for _ in range(2):
        start(tmp_path, SHORT, sink=files, engine=engine, **asked).finish()
    found = session.read.parquet(str(tmp_path / "files")).toArrow()

    assert [key for key, _ in seen] == [
        ("clicks", json.loads(t.schema.metadata[b"dpstream"])["window"], t_index(t))
        for t in sorted(expected, key=lambda t: (t_index(t) + 2 * t_window(t), t_window(t)))
    ]
    assert sorted(len(one) for _, one in seen) == sorted(map(len, expected))
    assert found.num_rows == sum(map(len, expected)) > 0
    assert {"query", "run", "window", "trigger"} <= set(found.column_names)
    assert list((tmp_path / "shared").glob("*")) == []


def t_index(release):
    return json.loads(release.schema.metadata[b"dpstream"])["release_index"]


def t_window(release):
    return json.loads(release.schema.metadata[b"dpstream"])["window"]


def test_what_is_refused(session, engine, tmp_path):
    write(tmp_path, table())
    break_off(tmp_path, 1, SHORT)
    with pytest.raises(StateError, match="begun by the engine 'embedded'"):
        start(tmp_path, SHORT, engine=engine)
    with pytest.raises(InvalidParameter, match="standard input cannot be read by executors"):
        dps.run(query(), source="-", engine=engine)
    with pytest.raises(InvalidParameter, match="which is bounded"):
        dps.run(query(), source=table(), live=True, engine=SparkEngine(session))
    frame = session.createDataFrame([("u", 1)], "user string, at bigint")
    with pytest.raises(ValueError, match="has no column 'page'"):
        dps.run(query(), source=frame, engine=engine)
    with pytest.raises(InvalidParameter, match="needs a classic session"):
        SparkEngine(object())
    series = dps.sql(
        """SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 1, privacy_unit = 'w_event', w = 2,
             mechanism = 'uniform', privacy_unit_column = user, start = TIMESTAMP '1970-01-01',
             "end" = TIMESTAMP '1970-01-02', public_groups = ('/1', '/2'))
           page, window_start, COUNT(*) AS n
           FROM TUMBLE(clicks, DESCRIPTOR(at), INTERVAL '1' HOUR) GROUP BY page, window_start"""
    )
    with pytest.raises(InvalidParameter, match="run it on the embedded engine: without engine="):
        dps.run(series, source=table(), engine=engine)
    with pytest.raises(InvalidParameter, match="begin a new run, charged anew"):
        dps.run(query(), source=table(), engine=engine).erase_unit("u")


def test_a_pipeline_runs_on_spark(session, tmp_path, monkeypatch, capsys):
    """The same file; the engine from the command line, or from the file."""
    from dpstream.cli import main

    monkeypatch.chdir(tmp_path)
    for words in (["init"], ["run", "pipeline.toml", "--engine", "spark"]):
        with suppress(SystemExit):
            main(words)
    out = capsys.readouterr().out
    assert "users, 2024-05-01 00:00 to 2024-05-02 00:00, release 4 of 4" in out
    assert len(list((tmp_path / "out").glob("*.parquet"))) == 28
    with (tmp_path / "pipeline.toml").open("a") as file:
        file.write('\n[engine]\nname = "spark"\nbuckets = 2\n')
    with pytest.raises(SystemExit) as left:
        main(["run", "pipeline.toml"])
    assert left.value.code == 0
    assert "everything was published before" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "out")


def test_a_pipeline_is_served_from_spark(session, tmp_path):
    """What the server's process puts into its store is what the embedded engine puts there."""
    head, *queries = PIPELINE.split("[[query]]")
    text = head + "[[query]]" + next(one for one in queries if 'name = "all"' in one)
    found = {}
    for name in ("embedded", "spark"):
        engine = f'[engine]\nname = "{name}"\n'
        pipeline = run_served(tmp_path / name, rows(users=300), text + engine)
        reader = ReleaseReader(store_folder(pipeline))
        reader.look()
        out = {path.name: path.read_bytes() for path in (tmp_path / name / "out").iterdir()}
        found[name] = (out, reader.after(0, 99))

    assert len(found["spark"][1]) == 3
    assert found["spark"] == found["embedded"]


def test_the_page_shows_what_happens(session, tmp_path, monkeypatch):
    """Every `>>>` of the how-to, run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "spark.md"
    failed, tried = doctest.testfile(str(page), module_relative=False, optionflags=LOOSE)

    assert failed == 0
    assert tried == page.read_text().count(">>> ")


def test_a_changed_pipeline_is_carried_out_as_by_the_embedded_engine(session, tmp_path):
    """The old query ends with the day, its successor begins there: the same bytes."""
    found = []
    for name in ("embedded", "spark"):
        place = tmp_path / name
        place.mkdir()
        changed.rows(place)
        path = place / "pipeline.toml"
        for number, epsilon in enumerate((4, "3.9")):
            changed.write(place, old=changed.asked(epsilon))
            path.write_text(f'{path.read_text()}\n[engine]\nname = "{name}"\n')
            now, until = (changed.FIRST + day * changed.DAY for day in ((0, 1, 2)[number:][:2]))
            if number:
                now -= 9 * changed.HOUR
                plan_changes(path, at_once=False, now=now, who="ann").accept()
            changed.go(path, now, until - (0 if number else 9 * changed.HOUR))
        found.append((changed.files(place), changed.spent(place)))
    (files, lines), (theirs, others) = found

    assert files == theirs
    assert {name.partition("-")[0] for name in files} == {"old", "old_2"}
    for name, line in lines.items():
        assert [line[k] for k in ("amount", "periods", "ended")] == [
            others[name][k] for k in ("amount", "periods", "ended")
        ]
