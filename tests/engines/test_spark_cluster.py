"""The Spark engine on a cluster whose executors and drivers are killed, and what it leaves behind.

One run for all tests: a cluster costs seconds to start. Its releases must be those of the embedded
engine, undisturbed; everything that its drivers and executors have written is searched for raw
values and for keys.
"""

import base64
import hashlib
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dpstream as dps
from benchmarks.recovery_case import (
    QUERY,
    RUN,
    SECRET,
    CheckingSink,
    difference,
    published,
    write_source,
)
from benchmarks.spark_cluster import DRIVER, EXECUTOR, Cluster, Kill, disturbed
from dpstream.engines.query_run import EngineOptions
from dpstream.engines.spark.spark_engine import arrow_schema
from dpstream.privacy.state import Secret
from dpstream.privacy.state.secret import derive
from tests.support.long import is_long

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

END = "1970-01-01T08:00"  # 14 steps, 2 windows that overlap by their lateness
UNIT, KEY, VALUE = "zebra-unit-8841", "okapi-page-5527", 739182645
BAD, WORD = "quagga-text-3306", "gnu-word-7719"
KILLS = (
    Kill(what=EXECUTOR, releases=1, seconds=0.1),
    Kill(what=EXECUTOR, releases=2, seconds=0.6),
    Kill(what=DRIVER, releases=1, seconds=0.3),
    Kill(what=EXECUTOR, releases=0, seconds=1.0),
    Kill(what=DRIVER, releases=2, seconds=0.5),
)[: None if is_long() else 3]


def source(folder):
    """Rows as the bench of recovery has them, and some of a unit that is alone with its page."""
    rows = pq.read_table(write_source(folder, rows=6_000)[0])
    planted = pa.table(
        {
            "user": [UNIT, UNIT, BAD],
            "page": [KEY, "/1", BAD * 1_000],  # no key may be as long as the last one
            "at": [9_000, 12_000, 9_000],
            "came": [9_000, 12_000, 9_000],
            "seconds": [VALUE, VALUE, 5],
        }
    )
    (folder / "clicks.csv").unlink()
    path = folder / "clicks.parquet"
    pq.write_table(pa.concat_tables([rows, planted]), path, row_group_size=300)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run that was killed again and again, and how it went."""
    folder = tmp_path_factory.mktemp("spark")
    rows = source(folder / "source")
    dps.run(
        replace(QUERY, end=END),
        source=rows,
        sink=CheckingSink(folder / "whole", lambda: None),
        state=folder / "whole" / "state",
        secret=SECRET,
        options=EngineOptions(buckets=2, threads=1, run_id=RUN),
    ).finish()
    cluster = Cluster(
        folder=folder / "cluster", speculate=True, hasty=True, log_level="INFO", readable=True
    )
    copies = []

    def copy():
        copies.append(folder / f"copy-{len(copies)}")
        shutil.copytree(folder / "run", copies[-1])

    job = {"job": "publish", "source": str(rows), "end": END, "word": WORD}
    found = disturbed(cluster, folder / "run", job, KILLS, after_kill=copy)
    return folder, found


def test_every_kill_was_made(run):
    """Of executors and of drivers, each of which is started again."""
    _, found = run

    assert found.kills == [kill.what for kill in KILLS]
    assert found.starts == 1 + found.kills.count(DRIVER) > 1


def test_releases_are_those_of_an_undisturbed_run(run):
    """None is missing, none came twice with other bytes, and both engines publish the same."""
    folder, _ = run
    expected = published(folder / "whole")

    assert len([name for name in expected if name.endswith(".parquet")]) == 16
    assert difference(folder / "run", expected, same_keys=True) == ""


def test_the_run_is_charged_once_and_leaves_no_keys(run):
    """Restarts are not paid for, and closed windows have no key and no state."""
    folder, _ = run
    ledger = dps.Ledger(folder / "run" / "state" / "ledger")

    assert sum("amount" in record for record in ledger.history()) == 1
    ledger.close()
    left = [path.name for path in (folder / "run" / "state" / "windows").iterdir()]
    assert set(left) <= {"final", "minted"}


def test_logs_plans_and_events_hold_no_values(run):
    """Event logs (with every plan), and what drivers and executors print, name no raw value."""
    folder, _ = run

    assert found_in(files(folder / "cluster", *LOGS), values()) == []


def test_keys_are_written_nowhere(run):
    """No log, no scratch file of Spark, no file of the checkpoint holds the secret or a key."""
    folder, _ = run
    places = [*files(folder / "cluster", "**/*"), *files(folder, "copy-*/state/**/*")]

    assert found_in(places, keys(folder)) == []


def test_the_checkpoint_holds_hashes(run):
    """A unit is there as a keyed hash; raw rows are in the dead letters alone."""
    folder, _ = run
    places = [(where, c) for where, c in files(folder, "copy-*/state/**/*") if "dead" not in where]

    assert places
    assert found_in(places, spellings(UNIT) + numbers(VALUE)) == []


def test_the_search_can_find(run):
    """Control: a word in a plan is in the event log, and values are where they may be."""
    folder, _ = run

    assert found_in(files(folder / "cluster", "*/events/*"), spellings(WORD))
    assert found_in(files(folder / "source", "*"), spellings(UNIT))
    assert found_in(files(folder, "run/state/**/*"), spellings(BAD))
    printed = b"".join(content for _, content in files(folder / "cluster", "**/stderr"))
    assert b"Running task" in printed
    assert keys(folder)[0] == SECRET


# what executors print is in files of the names stdout and stderr
LOGS = ("*/events/*", "*/driver-*.log", "**/std*")


def files(folder, *patterns):
    """(name, content) of every file."""
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            home = "home" in path.parts and "work" not in path.parts  # links to Spark itself
            if path.is_file() and not home:
                yield str(path.relative_to(folder)), path.read_bytes()


def spellings(text):
    """A word as bytes: plain, hex, base64, as UTF-16."""
    raw = text.encode() if isinstance(text, str) else text
    return [raw, raw.hex().encode(), base64.b64encode(raw), raw.decode("latin").encode("utf-16-le")]


def numbers(value):
    """A number as text and as the bytes that a file may hold."""
    return [str(value).encode()] + [value.to_bytes(8, order) for order in ("little", "big")]


def values():
    """Everything planted, as bytes."""
    return [*spellings(UNIT), *spellings(KEY), *spellings(BAD), *numbers(VALUE)]


def keys(folder):
    """The secret, and every key that comes from it in this run, as bytes."""
    secret = Secret(SECRET)
    found = [SECRET, secret.key("input digest", RUN), secret.key("window keys")]
    uses = ("unit ids", "group ids", "row digests", "period ids")
    found += [secret.key(use, RUN)[:16] for use in uses]
    ledger = dps.Ledger(folder / "run" / "state" / "ledger")
    charged = next(record for record in ledger.history() if "amount" in record)
    ledger.close()
    paid = b"query" + hashlib.sha256(charged["digest"].encode()).digest()
    for window in range(2):
        key = secret.key("window key for tests", window.to_bytes(8, "big", signed=True))
        found += [key, derive(key, paid)]
    return [form for key in found for form in (key, key.hex().encode(), base64.b64encode(key))]


def found_in(named, words):
    """(where, what) of every word that is found."""
    return [(where, word) for where, content in named for word in words if word in content]


def test_times_of_a_frame_are_instants():
    """A frame with timestamps is read, whatever time zone its session shows them in."""
    from pyspark.sql.types import StructType, TimestampNTZType, TimestampType

    schema = StructType().add("at", TimestampType()).add("here", TimestampNTZType())

    found = arrow_schema(SimpleNamespace(schema=schema))
    assert found.types == [pa.timestamp("us", "UTC"), pa.timestamp("us")]
