"""Live runs whose log and ledger are compacted all the time publish what they publish otherwise."""

import json
import shutil
from contextlib import closing
from dataclasses import replace
from datetime import timedelta

import pytest

import dpstream as dps
from benchmarks.recovery_case import CheckingSink
from dpstream.engines.embedded import snapshots
from dpstream.errors import InvalidParameter, NoiseReuse, StateError
from dpstream.privacy.ledger import ledger as ledgers
from dpstream.privacy.state import InputLog, journal
from dpstream.privacy.state.input_log import logged_quarantine
from dpstream.session.pipeline import load_pipeline
from tests.stored.cases import CLICKS
from tests.support.fixed import RUN, SECRET
from tests.support.kill_and_replay import AfterReleases, KindOfRun, kill_and_replay, kill_everywhere
from tests.support.live_runs import kept_clock, live, settled, start_live
from tests.support.runs import options, published, query, spent_on, start, table, write

SERIES = dps.sql(
    """SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 2, privacy_unit = 'w_event',
    w = 3, mechanism = 'budget_distribution', privacy_unit_column = user, time_unit = 'us',
    public_groups = ('/1', '/2'), start = '1970-01-01', end = '1970-01-01 06:00') window_start,
    page, COUNT(*) AS n FROM TUMBLE(clicks, DESCRIPTOR(at), INTERVAL '1' HOUR)
    GROUP BY window_start, page""",
    name="series",
)


def start_series(place):
    (place / "in").mkdir(parents=True, exist_ok=True)
    return dps.run(
        SERIES, source=place / "in", live=True, state=place / "state", secret=SECRET,
        sink=CheckingSink(place, lambda: None), clock=kept_clock(place), options=options(every=1),
    )  # fmt: skip


KINDS = {
    "live": (replace(live(), published=settled), 29),
    "series": (
        KindOfRun(
            start=start_series,
            published=lambda place: sorted(published(place)),  # rows are by when they were seen
            charges=lambda place: spent_on(place / "state" / "ledger")[:1],
        ),
        37,
    ),
}


@pytest.fixture
def always(monkeypatch):
    """Everything is compacted at every occasion, up to the last record."""
    monkeypatch.setattr(journal, "LARGE", 0)
    monkeypatch.setattr(ledgers, "_WORTHWHILE", 1)
    monkeypatch.setattr(ledgers, "_VERBATIM", timedelta(0))


def formats(place):
    """The first lines of ledger and log."""
    paths = [place / "state" / "ledger", *(place / "state").glob("inputs*.log")]
    headers = [json.loads(path.open().readline()[17:]) for path in paths]
    return [header["format"] for header in headers]


@pytest.mark.parametrize("name", KINDS)
def test_compactions_change_no_release(tmp_path, name, monkeypatch, request):
    """Not one byte; also after kills at operations on the disk, many of which belong to them."""
    kind, stride = KINDS[name]
    expected, whole = kind.unbroken(tmp_path / "plain"), published(tmp_path / "plain")
    charges = kind.charges(tmp_path / "plain")
    assert formats(tmp_path / "plain") == [1, 1]
    request.getfixturevalue("always")
    assert kind.unbroken(tmp_path / "whole") == expected
    assert published(tmp_path / "whole") == whole
    assert kind.charges(tmp_path / "whole") == charges
    assert formats(tmp_path / "whole") == [2, 2]
    killed = list(kill_everywhere(kind, tmp_path, range(9, 100_000, stride)))

    assert len(killed) > 3
    assert [nth for nth, after in killed if after.published != expected] == []
    assert [nth for nth, after in killed if after.charges != charges] == []


def test_a_compacted_log_still_names_quarantined_files(tmp_path, always):
    """`dpstream state quarantine` lists them from it; also after a second time."""
    path, mark = tmp_path / "inputs.log", {"quarantined": "00", "reason": "cut"}
    with closing(InputLog(path, run=RUN, new=True)) as log:
        for step in range(60):
            positions = {"p": step} | ({"a.csv.gz": mark} if step == 3 else {})
            log.record(step, [bytes(16)], ledger=(step, "tag"), positions=positions)
            if step % 20 == 19:
                log.compact_before(step - 5)
    with closing(InputLog(path, run=RUN)) as log:
        assert (log.last, 3 in log.positions) == (59, False)
    assert logged_quarantine(path) == {"a.csv.gz": mark}


def test_a_compacted_log_still_refuses_other_data(tmp_path, always):
    """What it kept it compares; what it dropped no replay may reach."""
    path, digests = tmp_path / "inputs.log", [bytes([step] * 16) for step in range(40)]
    with closing(InputLog(path, run=RUN, new=True)) as log:
        for number in range(3):
            log.begin(f"epoch {number}")
        log.keep_types(b"types")
        for step, digest in enumerate(digests):
            log.record(step, [digest], ledger=(step, "tag"), positions={"p": step})
        size = path.stat().st_size
        log.forget_before(30)
        log.compact_before(30)
        log.record(40, [bytes(16)], ledger=(40, "tag"), positions={"p": 40})
    assert path.stat().st_size < size / 2
    with closing(InputLog(path, run=RUN)) as log:
        assert (log.epochs, log.types, log.last) == (["epoch 2"], [b"types"], 40)
        assert (log.ledger_head, log.told) == ((40, "tag"), 39)
        assert {step: log.positions[step] for step in range(30, 41)} == {
            step: {"p": step} for step in range(30, 41)
        }
        log.record(30, digests[30:])
        for step, digest in ((30, digests[31]), (5, digests[5]), (5, digests[6])):
            with pytest.raises(NoiseReuse):
                log.record(step, [digest])
    with pytest.raises(StateError, match="another run"):
        InputLog(path, run=bytes(16))


def test_a_rolled_back_ledger_is_seen_although_its_end_was_folded(tmp_path, request):
    """It knows less of the run's steps than it was told."""
    book, head = tmp_path / "book", tmp_path / "book.head"
    running = iter(start_live(tmp_path, kept_clock(tmp_path), ledger=book))
    older = [(next(running), book.read_bytes(), head.read_bytes()) for _ in range(7)][1]
    running.close()
    length = book.stat().st_size
    for path, content in zip((book, head), older[1:], strict=True):
        path.write_bytes(content)  # the same file, so nothing but its content tells
    request.getfixturevalue("always")
    with closing(dps.Ledger(book)) as ledger:  # others go on with it, beyond where it had been
        while ledger.head()[0] < 2 * length:
            ledger.register("stream", f"run {ledger.head()[0]}", "of others")
        ledger.compact()
        assert ledger._journal._base.offset > length

    with pytest.raises(StateError, match=r"lacks charges that .* has seen"):
        start_live(tmp_path, kept_clock(tmp_path), ledger=book).finish()


def test_a_run_goes_on_with_a_ledger_that_was_compacted_meanwhile(tmp_path, always):
    """It knows the file by what that one took the place of."""
    kind, _ = KINDS["live"]
    expected = kind.unbroken(tmp_path / "plain")
    place = tmp_path / "killed"

    def compact(place):
        with closing(dps.Ledger(place / "state" / "ledger")) as ledger:
            ledger.compact()

    after = kill_and_replay(kind, place, [AfterReleases(2), AfterReleases(3)], damage=compact)
    assert after.published == expected
    assert formats(place)[0] == 2
    shutil.copytree(place / "state", tmp_path / "copy" / "state")
    with pytest.raises(StateError, match="is a copy"):
        start_live(tmp_path / "copy", kept_clock(place)).finish()


def test_a_pipeline_says_how_long_backups_are_kept(tmp_path):
    """35 days unless it says otherwise; the ledgers that it opens know."""
    path = tmp_path / "pipeline.toml"
    for retention, days in (("", 35), ('[retention]\nbackups = "90 days"\n', 90)):
        path.write_text(retention + CLICKS)
        with load_pipeline(path).open_ledgers() as opened:
            assert [book._backups for book in opened.values()] == [timedelta(days=days)]
    path.write_text('[retention]\nbackups = "soon"\n' + CLICKS)
    with pytest.raises(InvalidParameter, match=r"\[retention\]: backups must be a timedelta"):
        load_pipeline(path)


def most_segments(place):
    """The most segments that a run with a snapshot at each of 96 triggers has at a time."""
    asked = query(window=dps.Tumble("8 hours"), every="5 minutes", allowed_lateness="0 hours")
    write(place, table(200))
    run = start(place, asked, every=1)
    return max(len([*(place / "state" / "segments").iterdir()]) for _ in run)


def test_a_snapshot_of_many_small_segments_is_written_anew(tmp_path, monkeypatch):
    """A file costs more than its bytes: to make, to name in every manifest, to read back."""
    assert most_segments(tmp_path / "few") < 90
    monkeypatch.setattr(snapshots, "_FILE", 0)
    assert most_segments(tmp_path / "many") > 150
