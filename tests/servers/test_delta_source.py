"""A Delta Lake table that grows, as a source."""

import shutil
import signal

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

import dpstream as dps
from dpstream.connectors.registry import open_source
from dpstream.connectors.testing import SourceSuite
from dpstream.errors import InvalidInput, InvalidParameter, RowsLost
from tests.support.processes import kill_this_process, run_in_new_process

pytestmark = pytest.mark.servers

FEED = {"delta.enableChangeDataFeed": "true"}


def put(place, rows, **named):
    mode = "append" if DeltaTable.is_deltatable(str(place)) else "error"
    write_deltalake(place, pa.Table.from_pylist(rows), mode=mode, configuration=FEED, **named)


def rows_of(batch):
    return sorted(map(tuple, (row.values() for row in batch.table.to_pylist())))


def clicks(first, count, page="home"):
    return [{"user": f"u{n}", "page": page} for n in range(first, first + count)]


@pytest.fixture
def table(tmp_path):
    """Two versions of two rows each."""
    put(tmp_path / "clicks", clicks(0, 2))
    put(tmp_path / "clicks", clicks(2, 2))
    return tmp_path / "clicks"


class TestDeltaSource(SourceSuite):
    growing = True

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path):
        self.place = tmp_path / "clicks"

    def open(self):
        if not self.place.exists():  # a table with no rows yet
            schema = pa.schema([("user", pa.string()), ("page", pa.string())])
            write_deltalake(self.place, schema.empty_table(), configuration=FEED)
        return open_source(f"delta:{self.place}/")

    def put(self, rows):
        put(self.place, rows)

    def foreign_positions(self):
        return [17, "x", [1, 2], ["a", "b", "c", "d"], ["another table", -1, 0, 5], {"next": 3}]


def test_rows_that_move_to_other_files_come_once(table):
    """OPTIMIZE makes a version without rows; a list of files would show them all again."""
    DeltaTable(table).optimize.compact()
    put(table, clicks(4, 1))
    source = open_source(f"delta:{table}")
    (name,) = source.partitions()
    position, seen = None, []
    for _ in range(4):
        batch = source.read(name, position)
        position, seen = batch.position, [*seen, *rows_of(batch)]

    assert batch.done
    assert name == "clicks"
    assert [user for user, _ in seen] == ["u0", "u1", "u2", "u3", "u4"]


def test_columns_that_are_added_are_null_before(table):
    """Types are those of the newest version."""
    source = open_source(f"delta:{table}")
    first = source.read("clicks", None)
    put(table, [{"user": "u9", "page": "home", "price": 1.5}], schema_mode="merge")
    second = source.read("clicks", first.position)
    third = source.read("clicks", second.position)

    assert source.columns("clicks")["price"] == pa.float64()
    assert second.table["price"].to_pylist() == [None, None]
    assert third.table["price"].to_pylist() == [1.5]


def test_columns_may_have_any_name(tmp_path):
    """Capitals, spaces, dots and quotes, as other programs write them."""
    row = {"User": "u1", "page.name": "home", "at (s)": 5, 'the "best"': 1.5}
    put(tmp_path / "clicks", [row])
    place = f"delta:{tmp_path / 'clicks'}?until=0"

    assert dps.read(place).to_pylist() == [row]
    assert dps.read(place, columns=["User"]).to_pylist() == [{"User": "u1"}]


@pytest.mark.parametrize("asked", ["start=latest&until=1", "start=2&until=1"])
def test_an_end_before_the_start_is_refused(table, asked):
    """A query over no rows would be charged."""
    with pytest.raises(InvalidParameter, match="there is no version"):
        open_source(f"delta:{table}?{asked}")


@pytest.mark.parametrize(
    ("start", "users"), [("earliest", 4), ("latest", 0), ("0", 4), ("1", 2), ("2", 0)]
)
def test_where_it_starts(table, start, users):
    """At the table's first version, behind its last one, or at one that is named."""
    source = open_source(f"delta:{table}?start={start}")
    position, seen, done = None, 0, False
    while not done:
        batch = source.read("clicks", position)
        position, seen, done = batch.position, seen + len(batch.table), batch.done

    assert seen == users
    put(table, clicks(10, 1))
    assert rows_of(source.read("clicks", position)) == [("u10", "home")]


@pytest.mark.parametrize("change", ["delete", "update"])
def test_a_version_that_changes_rows(table, change):
    """It stops the run, with the number of rows and the option that goes on; others are read."""
    old = DeltaTable(table)
    if change == "delete":
        old.delete("\"user\" = 'u1'")
    else:
        old.update({"page": "'news'"}, predicate="\"user\" = 'u1'")
    put(table, clicks(7, 1))
    source = open_source(f"delta:{table}")
    before = source.read("clicks", source.read("clicks", None).position)
    words = "version 2 .* (deletes|changes) 1 row: .*changes=inserts"
    with pytest.raises(InvalidInput, match=words):
        source.read("clicks", before.position)

    source = open_source(f"delta:{table}?changes=inserts")
    passed = source.read("clicks", before.position)
    assert not len(passed.table)
    assert rows_of(source.read("clicks", passed.position)) == [("u7", "home")]


def test_rows_that_are_gone_are_an_error(table):
    """A cleaned log, a table that was made anew, and one that was put back to an earlier state."""
    source = open_source(f"delta:{table}")
    position = source.read("clicks", source.read("clicks", None).position).position
    shutil.copytree(table, table.parent / "copy")
    (table / "_delta_log" / f"{0:020d}.json").rename(table.parent / "kept.json")
    with pytest.raises(RowsLost, match=r"version 0 .* cannot be read"):
        source.read("clicks", None, until=position)

    shutil.rmtree(table)
    put(table, clicks(0, 2))
    with pytest.raises(RowsLost, match="another table"):
        open_source(f"delta:{table}").read("clicks", position)

    shutil.rmtree(table)
    shutil.copytree(table.parent / "copy", table)
    (table / "_delta_log" / f"{1:020d}.json").unlink()
    with pytest.raises(RowsLost, match="ends at version 0 now, and was read up to 1"):
        open_source(f"delta:{table}").read("clicks", position)


def test_a_replay_finds_the_same_number_of_rows(table):
    """A position says how many rows there were."""
    source = open_source(f"delta:{table}")
    after = source.read("clicks", None).position
    with pytest.raises(RowsLost, match=r"read 3 rows .* they are 2 now"):
        source.read("clicks", None, until=[*after[:3], 3])


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ("?start=yesterday", InvalidParameter, "start must be earliest, latest or the number"),
        ("?until=-1", InvalidParameter, "until must be the number of a version"),
        ("?until=9", InvalidInput, "ends at version 1, before until=9"),
        ("?changes=all", InvalidParameter, "changes must be one of stop, inserts"),
        ("?untill=1", InvalidParameter, "did you mean 'until'"),
        ("x", InvalidInput, "is no Delta table that can be read"),
    ],
)
def test_options_that_cannot_be(table, more, error, words):
    """Each is refused with what it should be."""
    with pytest.raises(error, match=words):
        open_source(f"delta:{table}{more}")


def test_a_table_without_a_change_feed_is_refused(tmp_path):
    """With the setting, and where to start then; which goes on without what was before."""
    place = tmp_path / "clicks"
    write_deltalake(place, pa.Table.from_pylist(clicks(0, 2)))
    with pytest.raises(InvalidInput, match=r"enableChangeDataFeed = true .* start=2"):
        open_source(f"delta:{place}")

    DeltaTable(place).alter.set_table_properties(FEED)
    put(place, clicks(5, 1))
    assert rows_of(open_source(f"delta:{place}?start=2").read("clicks", None)) == [("u5", "home")]
    with pytest.raises(RowsLost, match="older than the table's change feed"):
        open_source(f"delta:{place}").read("clicks", None)


QUERY = """
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 4, delta = 1e-6, privacy_unit_column = user, max_groups_contributed = 1,
                privacy_unit_period = 'forever')
       page, COUNT(*) AS visitors FROM clicks GROUP BY page
"""


def publish(place, killed=False):
    """Releases of the table's first two versions; killed when the second release is written."""
    if killed:
        from dpstream.connectors.delta.sink import DeltaSink

        DeltaSink._sync = kill_this_process
    list(
        dps.run(
            dps.sql(QUERY, name="pages"),
            source=f"delta:{place}/clicks/?until=1",
            sink=f"delta:{place}/out/",
            state=f"{place}/state",
        )
    )


def test_from_table_to_table_through_a_kill(tmp_path):
    """Killed when a release was committed and not acknowledged: it is there once, and the same."""
    put(tmp_path / "clicks", clicks(0, 400))
    put(tmp_path / "clicks", clicks(400, 300, page="news"))
    assert run_in_new_process(publish, tmp_path, True) == -signal.SIGKILL
    out = tmp_path / "out" / "pages"
    before = DeltaTable(out).to_pyarrow_table().sort_by("page")
    publish(tmp_path)

    after = DeltaTable(out)
    assert after.version() == 0
    assert after.to_pyarrow_table().sort_by("page") == before
    assert sorted(before["page"].to_pylist()) == ["home", "news"]
    assert abs(before["visitors"][0].as_py() - 400) < 60  # 8 deviations and more
