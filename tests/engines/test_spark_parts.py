"""Parts of the Spark engine that need no Spark."""

import json

import numpy as np
import pyarrow as pa
import pytest

import dpstream as dps
from dpstream.connectors.registry import open_source
from dpstream.engines.spark import bucket_files, tasks
from dpstream.engines.spark.bucket_files import DriverProgress, SharedFiles
from dpstream.engines.spark.driver import Intake
from dpstream.engines.spark.jobs import _collect
from dpstream.engines.spark.shuffle_rows import Shape, packets, unpack_packets
from dpstream.engines.spark.spark_engine import FrameSource
from dpstream.engines.spark.tasks import (
    Keys,
    PublishTask,
    ReadTask,
    ShippedPlan,
    TaskFailed,
    translate_error,
)
from dpstream.errors import InvalidParameter, MissingDependency, NoiseReuse, StateError
from dpstream.group_by.flow import Flow
from dpstream.group_by.groups import GroupBucket, sum_groups
from dpstream.privacy.state import Secret
from dpstream.query.noise_plan import plan_query
from dpstream.rows.row_batch import RowKeys
from dpstream.rows.row_reader import RowReader
from tests.support.runs import query, start, table


def read(plan, rows):
    """A reader, and what it makes of rows."""
    reader = RowReader(plan.query, Secret(bytes(32)), bytes(16))
    reader.learn({field.name: field.type for field in rows.schema})
    return reader, reader.read(rows, "here")[0]


@pytest.mark.parametrize("column", ["v0", "digest"])
def test_a_value_that_was_changed_while_it_waited(tmp_path, column):
    """A file of rows is what it was to the last bit, or nothing of it is used."""
    plan = plan_query(query())
    _, rows = read(plan, table())
    shape, files = Shape(plan.query), SharedFiles(str(tmp_path))
    about, _ = bucket_files.keep(files, shape, 0, "rows/one.arrow", shape.packed(rows))
    whole = bucket_files.load_waiting(files, shape, about, 0, 99)
    assert np.array_equal(whole.values, rows.values)
    assert set(bucket_files.load_waiting(files, shape, about, 2, 4).steps) == {2, 3}

    path = tmp_path / "rows" / "one.arrow"
    content = pa.ipc.open_file(path).read_all()
    place = content.column_names.index(column)
    other = content[column].to_pylist()
    other[0], other[1] = other[1], other[0]
    assert other != content[column].to_pylist()
    changed = content.set_column(place, column, pa.array(other, content[column].type))
    path.unlink()
    with pa.ipc.new_file(path, content.schema) as writer:
        writer.write_table(changed)
    with pytest.raises(NoiseReuse, match="does not hold the rows that were logged"):
        bucket_files.load_waiting(files, shape, about, 0, 99)
    path.write_bytes(b"no Arrow at all")
    with pytest.raises(NoiseReuse, match="does not hold the rows that were logged"):
        bucket_files.load_waiting(files, shape, about, 0, 99)


def packed(groups, **columns):
    """Rows of some groups with their keys, and a column of ids."""
    ids = pa.array([bytes([group]) * 16 for group in groups], pa.binary(16))
    named = {"group": ids, "unit": ids, "k0": [None if g == 3 else f"/{g}" for g in groups]}
    return pa.table(named | columns)


LARGEST = 2**63 - 1
NUMBERS = (
    [7] * 6,
    [5, 260, 7, 6, 5, 5],
    [0, 70_000, -5, 2, 2, 2],
    [0, 2**33, 1, 1, 1, 1],
    [-LARGEST - 1, LARGEST, 0, 0, 0, 0],
)


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("groups", [[1, 2, 3, 1, 2, 3], [1, 2, 3, 4, 5, 6], [3, 3, 3, 3, 3, 3]])
@pytest.mark.parametrize("keys_of_groups", [False, True])
def test_packets_hold_what_was_packed(numbers, groups, keys_of_groups):
    """Every number and key, however few bytes it travels in; parts of other widths beside it."""
    values, more = pa.array(numbers, pa.int64()), pa.array([LARGEST - g for g in groups])
    table = packed(groups, step=values, v0=values, k1=more)
    parts = [table.slice(0, 2), table.slice(2, 4), table.slice(0, 0)]
    sent = packets([(4, part) for part in parts], keys_of_groups=keys_of_groups)
    _, received = unpack_packets(sent)

    assert received[4].equals(table)


def test_repeated_keys_and_numbers_travel_once():
    groups, values = [1, 2] * 5000, pa.array([9] * 10_000, pa.int64())
    table = packed(groups, step=values, window=values)
    sizes = [
        sum(batch.nbytes for batch in packets([(0, table)], keys_of_groups=by_group))
        for by_group in (False, True)
    ]

    assert sizes[1] < 10_000 * (16 + 2) + 4000  # its unit, and which group
    assert sizes[0] < 10_000 * (2 * 16 + 2 + 4) + 4000


@pytest.mark.spark
def test_a_shuffle_that_was_made_again_of_other_rows(tmp_path):
    """Logged rows are what noise is drawn for: one that differs, or is missing, stops the job."""
    whole = table()
    plan = plan_query(query())
    reader, _ = read(plan, whole)
    keys = Keys(rows=RowKeys.of(Secret(bytes(32)), bytes(16)))
    files = SharedFiles(str(tmp_path))
    common = {"plan": plan, "types": reader.types, "buckets": 1, "files": files, "keys": keys}
    told = {}

    def gathered(rows):
        source = open_source(rows)
        parts = tuple(source.partitions())
        more = {"where": "", "arrived": None, "source": source, "partitions": parts}
        numbers = pa.record_batch({"id": pa.array(range(len(parts)), pa.int64())})
        task = ReadTask(**common, job="", **more, tells=True)
        return list(tasks.read_source(task, iter([numbers])))

    sent = gathered(whole)
    for text in unpack_packets(sent)[0][0]:
        if "gathered" in text:
            _, listed = json.loads(text)["gathered"]
            parts = told.get(0, {}), bucket_files.digests_of(listed)
            told[0] = bucket_files.add_digests(parts)
    nothing = {"waiting": [], "units": {}, "groups": {}, "begins": {}, "remembered": {}}
    more = nothing | {"chosen": {}, "gathered": told, "job": "one", "first": 0, "end": 10}
    task = PublishTask(**common, **more)

    assert sum(
        len(one) for one in unpack_packets(tasks.bound_gathered(task, iter(sent)))[1].values()
    )
    for other in (whole.slice(1), pa.concat_tables([whole, whole.slice(3, 1)])):
        with pytest.raises(NoiseReuse, match="other rows when a part of it was read again"):
            list(tasks.bound_gathered(task, iter(gathered(other))))


@pytest.mark.parametrize("pre_threshold", [-1, 0, 2, 9])
def test_sums_of_parts_are_sums_of_rows(pre_threshold):
    """Also for a key that most rows have: the same sums, and the same groups become active."""
    measures, rng = plan_query(query()).query.measures, np.random.default_rng(12)
    columns = Shape(plan_query(query()).query).values
    plain, parted = GroupBucket(measures), GroupBucket(measures)
    ids = rng.integers(0, 2**63, (40, 2)).astype(np.uint64)
    for _ in range(3):
        which = np.where(rng.random(600) < 0.7, 0, rng.integers(0, 40, 600))
        keep_mask = rng.choice(np.array([0, 1, 3], np.uint8), 600)
        values = rng.integers(-9, 9, (600, columns))
        keys = pa.table({"page": pa.array([f"/{one}" for one in which])})
        kept = np.flatnonzero(keep_mask)
        plain.add(ids[which], keep_mask, values, keys, kept, pre_threshold=pre_threshold)
        for part in (slice(0, 100), slice(100, 600)):
            groups, sums, first = sum_groups(
                measures, ids[which[part]], keep_mask[part], values[part]
            )
            assert len(groups) == len(np.unique(which[part][keep_mask[part] > 0]))
            mine = keys.slice(part.start).take(pa.array(first))
            parted.add_sums(groups, sums, mine, pre_threshold=pre_threshold)

    assert sums_of(parted) == sums_of(plain)
    assert active_of(parted) == active_of(plain)
    assert bool(active_of(plain)) == (pre_threshold >= 0)


def sums_of(bucket):
    used = bucket.table.used
    ids, numbers = bucket.table.ids[:used], bucket.table.numbers[:used]
    return {tuple(i): tuple(n) for i, n in zip(ids.tolist(), numbers.tolist(), strict=True)}


def active_of(bucket):
    places = np.arange(len(bucket.active))
    if not len(places):
        return {}
    names = bucket.key_columns(places)["page"].to_pylist()
    return dict(zip(map(tuple, bucket.ids(places).tolist()), names, strict=True))


def test_an_error_of_a_task_comes_out_as_itself():
    """Its type and its whole message; what Spark puts around it stays away."""
    said = 'line one\nline "two" of café'
    failed = TaskFailed.of(StateError(said))
    wall = f"Traceback:\n  File x\n{TaskFailed.__module__}.TaskFailed: {failed}\n\n\tat org.apache"
    found = translate_error(RuntimeError(wall))
    assert (type(found), str(found)) == (StateError, said)
    lack = translate_error(
        RuntimeError("ModuleNotFoundError: No module named 'dpstream'\n\tat org")
    )
    assert isinstance(lack, MissingDependency)
    assert "ship_code(session)" in str(lack)
    full = translate_error(RuntimeError("is bigger than spark.driver.maxResultSize (1024.0 MiB)"))
    assert "lower steps_at_once" in str(full)
    assert translate_error(RuntimeError("the disk is gone")) is None


class Failing:
    """A frame whose job fails so many times, in Spark's words."""

    def __init__(self, times, words):
        self.left, self.words = times, words

    def toArrow(self):
        self.left -= 1
        if self.left >= 0:
            raise RuntimeError(self.words)
        return pa.table({})


def test_a_job_that_has_lost_an_executor_at_a_bad_moment_runs_again(caplog):
    """Spark gives such a job up; ours have the same result again, so they need not stop a run."""
    lost = "A shuffle map stage with indeterminate output was failed and retried. However, Spark"

    assert _collect(Failing(2, lost)) == ([], None)
    assert len(caplog.records) == 2
    with pytest.raises(RuntimeError, match="indeterminate"):
        _collect(Failing(100, lost))
    once = Failing(1, "the disk is gone")
    with pytest.raises(RuntimeError, match="disk"):
        _collect(once)
    assert once.left == 0


def test_a_file_that_cannot_be_written(tmp_path):
    """A task says which, and what to do."""
    (tmp_path / "rows").write_text("a file where a folder should be")
    with pytest.raises(StateError, match="cannot be written"):
        SharedFiles(str(tmp_path)).write("rows/one.arrow", b"")


A_SHORT_DAY = {
    "start": "2024-03-30",
    "end": "2024-04-02",
    "time_zone": "Europe/Berlin",
    "window": dps.Tumble("1 day"),
    "every": "1 hour",
}
CUMULATED = {
    "start": "2024-03-30",
    "end": "2024-04-01",
    "window": dps.Cumulate("1 day", step="8 hours"),
    "every": "5 hours",
}


@pytest.mark.parametrize(
    ("changes", "at"), [(A_SHORT_DAY, "2024-03-30T23:00:07"), (CUMULATED, "2024-03-30T01:00:00")]
)
def test_rows_of_windows_that_are_due_later(changes, at):
    """A job knows the noise of every window that its rows may enter, and computes none itself."""
    plan = plan_query(query(**changes, privacy_unit_period="1 day", allowed_lateness=0))
    schedule = plan.query.schedule
    time = int(np.datetime64(at).astype("datetime64[s]").astype(np.int64))
    row = {"user": ["a"], "page": ["/"], "at": [time], "came": [time - 8], "seconds": [1]}
    reader, rows = read(plan, pa.table(row))

    due = schedule.due(int(rows.steps[0]))
    flow = Flow(ShippedPlan.of(plan, due), reader, buckets=1, threads=1)
    slices = [(rows, first, end) for *_, first, end in rows.runs]
    flow.aggregate_rows(flow.bound_rows(0, slices))

    entered = {schedule.releases(window) for window in flow.state.windows}
    assert entered - {one.releases for one in due}


def test_progress_of_another_run(tmp_path):
    """A run goes on from its own progress alone, and a new one never begins beside another's."""
    path = tmp_path / "state" / "spark.dps"
    path.parent.mkdir()
    DriverProgress(path=path, run="one", step=3).save()
    assert DriverProgress.load(path, "one").step == 3
    with pytest.raises(StateError, match="belongs to another run"):
        DriverProgress.load(path, "two")
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(StateError, match=r"spark\.dps .* restore it from a backup"):
        DriverProgress.load(path, "one")
    path.write_bytes(whole)
    with pytest.raises(StateError, match=r"holds spark\.dps but no run\.dps"):
        start(tmp_path, source=table()).finish()


class Rereading:
    """Jobs that find no row to keep, and remember for which step they looked."""

    def __init__(self):
        self.asked = []

    def take(self, *_, arrived, **__):
        self.asked.append(arrived)
        return []


def test_a_batch_that_comes_again_is_read_for_its_own_step(tmp_path):
    """Also when none of its rows was kept, and after a restart: the clock has moved on."""
    path, jobs = tmp_path / "spark.dps", Rereading()
    for now in (3, 9):
        progress = DriverProgress.load(path, "run")
        intake = Intake(
            jobs=jobs,
            progress=progress,
            operator=None,
            reader=None,
            arrival_step=lambda now=now: now,
            checkpoint="",
        )
        intake._stream = FrameSource(None)
        intake._one_batch(None, 0)

    assert jobs.asked == [3, 3]
    with pytest.raises(StateError, match="batch 1 was never taken in"):
        intake._one_batch(None, 2)


class Elsewhere:
    """An engine that knows no source of its own."""

    def source(self, spec):
        return None


def test_an_address_is_refused_without_its_password():
    for uri, said in (
        ("kafka://me:hush@host:9092/clicks", "must not hold a password"),
        ("nats://me@host:4222/clicks?password_env=X", "nats://host:4222/clicks is read by one"),
    ):
        with pytest.raises(InvalidParameter, match=said) as refused:
            dps.run(query(), source=uri, engine=Elsewhere())
        assert "hush" not in str(refused.value)
