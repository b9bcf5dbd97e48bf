"""State that an earlier version wrote is taken up by this one."""

import zipfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import dpstream as dps
from dpstream.connectors.sinks import open_sink
from dpstream.connectors.sources import open_source
from dpstream.engines.local import LocalRun, Options
from dpstream.errors import InvalidParameter
from dpstream.privacy.ledger import Ledger
from dpstream.privacy.state import InputLog, read_packed, write_packed
from tests.laws.queries import RUN, SECRET, Unseen

OLD = Path(__file__).parent / "data" / "state_1.zip"
QUERY = dps.Query(
    name="old",
    unit="user",
    keys=("key",),
    time="ts",
    time_unit="s",
    start="1970-01-01",
    end="1970-01-02",
    window=dps.Tumble("12 hours"),
    every="3 hours",
    epsilon=8,
    delta=0.1,
    max_groups_contributed=2,
    max_rows_per_group=2,
    aggregates=(dps.Count("n"), dps.Sum("s", column="x", lo=0, hi=10)),
)


@pytest.fixture
def old(tmp_path):
    """A run of format 1 that was killed after five of eight tables, and all that it publishes.

    It was unpacked, so it is a copy; here it is told that it is not.
    """
    with zipfile.ZipFile(OLD) as stored:
        stored.extractall(tmp_path)
    state = tmp_path / "state"
    about = read_packed(state / "run.dps", kind="query run")
    ledger = Ledger(state / "ledger")
    ledger.repair(because="it was written before ledgers had heads")
    about["ledger"] = ledger.identity()
    ledger.close()
    log = InputLog(state / "inputs.log", run=RUN)
    about["log"] = log.identity
    log.close()
    write_packed(state / "run.dps", about, kind="query run")
    return tmp_path


def run_of(old, query=QUERY):
    return LocalRun(
        query=query,
        source=open_source(pq.read_table(old / "rows.parquet")),
        aside=Unseen(),
        options=Options(buckets=2, threads=1, run_id=RUN),
        secret=SECRET,
        folder=old / "state",
        sink=open_sink(str(old / "out")),
    )


def test_a_run_of_an_earlier_version_goes_on_with_the_same_tables(old):
    """Thresholds, noise and charge are those it began with, also where defaults have changed."""
    list(run_of(old))

    names = sorted(path.name for path in (old / "out").glob("*.parquet"))
    assert len(names) == 4  # two snapshots of two steps: the rest is taken again
    for name in names:
        assert pq.read_table(old / "out" / name).equals(pq.read_table(old / "full" / name))
    book = Ledger(old / "state" / "ledger")
    assert sum("amount" in record for record in book.history()) == 1  # charged once
    book.close()


@pytest.mark.parametrize("more", [{"debias": "global"}, {"strategy": "sqlp"}, {"confidence": 0.9}])
def test_what_an_earlier_version_did_not_know_needs_a_new_run(old, more):
    """It would change what the run publishes."""
    with pytest.raises(InvalidParameter, match=f"did not know {next(iter(more))}"):
        run_of(old, dps.Query(**{**_fields(QUERY), **more}))


def _fields(query):
    return {name: getattr(query, name) for name in type(query).__dataclass_fields__}
