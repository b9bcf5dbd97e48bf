"""The bench of the engine's speed: its data, what it reports and judges; no speed."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from scipy.stats import chi2

import benchmarks as bench
from benchmarks import click_log, peers, throughput
from benchmarks.click_log import ClickLog
from dpstream.errors import InvalidParameter

FALSE_ALARM = 1e-6
SMALL = throughput.Plan(
    sizes=(2_000, 3_000), one_shot=2_000, spark=3_000, spark_files=(24,), rounds=1, joined=2_000
)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """Logs of these tests stay with them, and are small."""
    monkeypatch.setenv(click_log.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(throughput, "_WARM_UP", 1_000)
    monkeypatch.setattr(throughput, "QUICK", SMALL)


@pytest.fixture
def no_peers(monkeypatch, tmp_path):
    """An interpreter that is not there."""
    monkeypatch.setenv("DPSTREAM_BENCH_PYTHON", str(tmp_path / "no-such-python"))


def columns(log):
    """Times, users and ranks of a whole log."""
    return [np.concatenate(part) for part in zip(*click_log.parts(log), strict=True)]


def misfit(counts, law):
    """Chi-square in 40 bins over its limit at the false-alarm rate: above 1 is another law."""
    bins = (np.cumsum(law) * 40).astype(int)
    seen = np.bincount(bins, counts)
    wanted = np.bincount(bins, law * counts.sum())
    kept = wanted > 5
    statistic = ((seen[kept] - wanted[kept]) ** 2 / wanted[kept]).sum()
    return statistic / chi2.isf(FALSE_ALARM, kept.sum() - 1)


def test_a_log_comes_back_from_its_seed(tmp_path):
    """The same rows for the same seed, others for another."""
    folders = [tmp_path / name for name in ("one", "two", "other")]
    for folder, seed in zip(folders, (1, 1, 2), strict=True):
        folder.mkdir()
        click_log.write(ClickLog(records=5_000, keys=1_000, seed=seed), folder)

    one, two, other = (pq.read_table(folder) for folder in folders)
    assert one.equals(two)
    assert not one.equals(other)


def test_rows_are_sorted_and_spread_over_the_day():
    """One row in each of the day's equal slices, the files one after the other."""
    times, _, _ = columns(ClickLog(records=10_000, keys=100))

    assert (np.diff(times) >= 0).all()
    assert (times * 10_000 // click_log.DAY == np.arange(10_000)).all()


def test_a_user_is_there_all_day():
    """Rows of one user side by side would be bounded within one trigger, and flatter the engine."""
    _, users, _ = columns(ClickLog(records=20_000, keys=100))
    first, last = np.array_split(users, 2)

    shared = len(np.intersect1d(first, last)) / len(np.unique(users))
    assert shared > 0.5


def test_files_are_what_their_readers_expect(tmp_path):
    """24 files with typed columns, keys of 15 to 40 bytes, and the counts beside them."""
    log = ClickLog(records=30_000)

    folder = click_log.files(log)
    table = pq.read_table(folder)

    assert len(list(folder.glob("part-*.parquet"))) == 24
    assert table.schema.types == [pa.timestamp("us", "UTC"), pa.string(), pa.string()]
    assert table["ts"][0].as_py().date() == table["ts"][-1].as_py().date()
    lengths = pc.min_max(pc.binary_length(click_log.urls(log.keys))).as_py()
    assert 15 <= lengths["min"] <= lengths["max"] <= 40
    assert set(pc.binary_length(table["user_id"]).to_pylist()) == {15}
    distinct = [pc.count_distinct(table[name]).as_py() for name in ("user_id", "url")]
    assert click_log.about(folder) == dict(
        zip(("records", "users", "keys"), (30_000, *distinct), strict=True)
    )


def test_a_log_is_written_once(tmp_path):
    """A second run reads the files of the first; an unfinished log leaves nothing."""
    log = ClickLog(records=500, keys=100)
    folder = click_log.files(log)
    written = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}

    assert click_log.files(log) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == written
    assert [path.name for path in folder.parent.iterdir()] == [log.name]


def test_a_log_that_is_cut_short_leaves_nothing(monkeypatch):
    """Half a log under the final name would be measured as a whole one."""

    def broken(log, folder):
        (folder / "part-00.parquet").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(click_log, "write", broken)

    with pytest.raises(KeyboardInterrupt):
        click_log.files(ClickLog(records=500))
    assert list(click_log.cache().iterdir()) == []


@pytest.mark.parametrize("wrong", [{"records": 0}, {"records": 1, "keys": 1_000_001}])
def test_a_log_without_rows_or_names_is_refused(wrong):
    """Six digits name a million keys."""
    with pytest.raises(InvalidParameter, match="must be"):
        ClickLog(**wrong)


def test_keys_follow_the_law():
    """Counts by rank fit Zipf-Mandelbrot(1000, 1.4) over 10^6 keys, and not a neighbour of it."""
    _, _, ranks = columns(ClickLog(records=200_000))
    counts = np.bincount(ranks, minlength=1_000_000)

    assert misfit(counts, click_log.zipf_mandelbrot(1_000_000, 1000, 1.4)) < 1
    assert misfit(counts, click_log.zipf_mandelbrot(1_000_000, 1100, 1.4)) > 1
    assert misfit(counts, click_log.zipf_mandelbrot(1_000_000, 1000, 1.35)) > 1


def test_rows_per_user_follow_the_law():
    """So do rows per user, Zipf-Mandelbrot(26, 6.738), for all users but the last."""
    _, users, _ = columns(ClickLog(records=200_000, keys=100))
    rows = np.bincount(users)[:-1]
    counts = np.bincount(rows, minlength=click_log.MOST_ROWS + 1)[1:]

    assert counts.sum() == len(rows)  # nobody is without rows
    assert misfit(counts, click_log.zipf_mandelbrot(click_log.MOST_ROWS, 26, 6.738)) < 1
    assert misfit(counts, click_log.zipf_mandelbrot(click_log.MOST_ROWS, 26, 6.4)) > 1
    assert misfit(counts, click_log.zipf_mandelbrot(click_log.MOST_ROWS, 24, 6.738)) > 1


@pytest.mark.bench
@pytest.mark.usefixtures("no_peers")
def test_a_run_without_peers_measures_ours(tmp_path):
    """Our rows have every figure; ratios with nobody stay open and say why."""
    steps = []

    result = bench.run(
        "throughput", quick=True, out=tmp_path / "out", progress=lambda *step: steps.append(step)
    )

    ours = [row for row in result["rows"] if row["library"] == "dpstream"]
    assert [row["records"] for row in ours] == [2_000, 3_000]
    for row in ours:
        for figure in ("records_per_second", "peak_mb", "bytes_per_unit", "snapshot_mb"):
            assert row[figure] > 0
    (joined,) = [row for row in result["rows"] if row["library"] == "dpstream, joined"]
    assert joined["cost"] < 1
    assert joined["cost_in_processor_time"] < 1
    open_ones = [one for one in result["targets"] if one["reached"] is None]
    ratios = [one for one in open_ones if "distinct" in one["name"]]
    assert len(ratios) == 3
    rest = [one for one in open_ones if one not in ratios and "more cores" not in one["name"]]
    assert len(rest) == 6
    assert sum("must name a Python" in one["reason"] for one in rest) == 5
    by_cores = [row for row in result["rows"] if row["library"] == "dpstream, by cores"]
    assert {row["cores"] for row in by_cores} == set(throughput._cores())
    assert all(row["dpstream s"] > 0 for row in by_cores)
    assert [done for done, *_ in steps] == sorted(done for done, *_ in steps)
    assert steps[-1][:2] == (9, 9)
    assert str(tmp_path) not in (tmp_path / "out" / "throughput.json").read_text()
    assert (tmp_path / "out" / "throughput.png").read_bytes().startswith(b"\x89PNG")
    left = {path.name for path in click_log.cache().iterdir()}
    joined = [ClickLog(records=n, keys=2_000).name for n in (1_000, 2_000)]
    logs = {ClickLog(records=n).name for n in (1_000, 2_000, 3_000)}
    assert left == {*logs, *joined, f"{joined[1]}-pages.parquet"}


@pytest.mark.usefixtures("no_peers")
def test_a_run_of_ours_that_fails_is_told(monkeypatch):
    """No figure, no verdict, and the last words of the run."""
    monkeypatch.setattr(throughput.sys, "executable", "/bin/false")

    found = throughput.measure(quick=True, progress=lambda *_: None)

    speeds = [one for one in found.targets if one["name"].startswith("records/s")]
    assert [one["reached"] for one in speeds] == [None, None]
    assert all("the run failed" in one["reason"] for one in speeds)


def row(library, records, rate, **more):
    known = {"times_slower": None, "note": "" if rate else "it is absent"}
    return {"library": library, "records": records, "records_per_second": rate} | known | more


def test_targets_are_judged_by_the_rows():
    """A peer counts in its best form; a ratio at one size is the one measured in turns."""
    million, most = 10_000_000, 60_000_000
    rows = [
        row("dpstream", 1_000_000, 2_000_000),
        row("dpstream", million, 5_000_000),
        row("dpstream", most, 4_000_000),
        row("opendp", 1_000_000, 250_000, times_slower=8.1),
        row("pipeline-dp", 1_000_000, None),
        row("spark", million, 200_000, times_slower=25.0),
        row("spark", million, 5_500_000, times_slower=0.9),
    ]

    judged = throughput.targets(rows, 1_000_000, million)

    assert [(one["value"], one["reached"]) for one in judged] == [
        (2_000_000, False), (5_000_000, True), (4_000_000, True),
        (8.1, False), (16.0, True), (None, None), (None, None), (0.9, False), (1.25, True),
    ]  # fmt: skip


@pytest.mark.bench
def test_peers_count_every_row():
    """Without privacy the peers find every key; the private ones run at the same budget."""
    log = ClickLog(records=3_000)
    keys = click_log.about(click_log.files(log))["keys"]
    lane = throughput.Lane(library="", records=3_000, what="", asked={"files": 24})

    for library in ("polars", "polars, distinct", "opendp", "pipeline-dp"):
        lane.library = library
        with peers.started("group_by_counts") as asked:
            answer = throughput._theirs(asked, lane, 3_000)
        assert answer["keys"] == (keys if "polars" in library else 0)  # all are below a threshold
        assert answer["seconds"] > 0
        assert answer["peak_mb"] > 0


@pytest.mark.bench
@pytest.mark.timeout(300)  # every peer starts anew for every row
def test_every_ratio_is_judged_when_peers_are_there(tmp_path):
    """With the peers present only the sizes of a full run stay open; Spark finds every key."""
    result = bench.run("throughput", quick=True, out=tmp_path / "out")

    left = [
        one["name"]
        for one in result["targets"]
        if one["reached"] is None and "cores" not in one["name"]
    ]
    assert left == ["time per record, 60,000,000 over 10,000,000 records"]
    spark, polars = (
        next(r for r in result["rows"] if r["library"] == name and r["records"] == 3_000)
        for name in ("spark", "polars")
    )
    assert spark["keys"] == polars["keys"]
    assert spark["peak_mb"] > 0
    assert {"opendp", "pipeline-dp", "polars", "pyspark"} <= set(result["peers"])


def test_cores_that_make_a_run_slower_miss_the_target():
    """The ratio is of the largest log, with the peer on the same cores."""

    def of(cores, records, ours, theirs):
        times = {"dpstream s": ours, "polars, distinct s": theirs}
        return {"cores": cores, "records": records, "note": ""} | times

    most = 60_000_000
    rows = [of(1, 10, 4.0, 9.0), of(1, most, 9.0, 9.0), of(2, 10, 4.4, 1.0), of(2, most, 6.0, 10.0)]
    judged = throughput.targets_of_cores(rows)

    assert [(one["value"], one["reached"]) for one in judged] == [
        (0.6, True), (None, None), (None, None), (4.4 / 4.0, False), (6 / 9, True),
    ]  # fmt: skip
