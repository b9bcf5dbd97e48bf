"""Damaged snapshots and logs: a second copy or a replay stands in, or it is said what is lost."""

import os

import pytest

from benchmarks.recovery_case import left_behind
from dpstream.engines.embedded.snapshots import DamagedSnapshot
from dpstream.errors import StateError
from dpstream.privacy.state import read_packed, write_packed
from dpstream.privacy.state.run_directory import FORMAT
from tests.support.kill_and_replay import AfterReleases, kill_and_replay
from tests.support.runs import break_off, group_by, published, query, start, table, whole, write


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What an unbroken run publishes."""
    return whole(tmp_path_factory.mktemp("whole"))


def halve(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def manifests(place):
    found = (place / "state").glob("manifest-*.dps")
    return sorted(found, key=lambda path: int(path.stem.partition("-")[2]))


def flip_manifests(place):
    for path in manifests(place):
        flip(path)


def cut_log(place, count):
    """Remove the last bytes of the log."""
    log = place / "state" / "inputs.log"
    os.truncate(log, log.stat().st_size - count)


def segments(place, kind):
    """The newest segments of windows or periods."""
    number = manifests(place)[-1].stem.partition("-")[2]
    return sorted((place / "state" / "segments").glob(f"{kind}*-{number}.dps"))


@pytest.mark.parametrize("spoil", [halve, flip, os.remove])
@pytest.mark.parametrize("what", ["manifest", "window", "period"])
def test_a_damaged_snapshot_falls_back_one_generation(tmp_path, expected, what, spoil):
    """The snapshot before it and a replay of the steps in between give the same bytes."""

    def spoil_newest(place):
        assert len(manifests(place)) == 2
        newest = manifests(place)[-1:] if what == "manifest" else segments(place, what)
        spoil(newest[-1])

    if (what, spoil) == ("manifest", os.remove):  # as if the last snapshot had never been made
        after = kill_and_replay(group_by(), tmp_path, AfterReleases(6), damage=spoil_newest)
    else:
        with pytest.warns(DamagedSnapshot, match="the one before it is used"):
            after = kill_and_replay(group_by(), tmp_path, AfterReleases(6), damage=spoil_newest)

    assert after.published == expected


@pytest.mark.filterwarnings("default::dpstream.engines.embedded.snapshots.DamagedSnapshot")
def test_a_snapshot_is_damaged_again_and_again(tmp_path, expected):
    """After each damage the run makes new snapshots that can be damaged in turn."""
    write(tmp_path, table())
    for _ in range(5):
        break_off(tmp_path, 3)
        if len(manifests(tmp_path)) == 2:
            halve(manifests(tmp_path)[-1])
            with pytest.warns(DamagedSnapshot):
                break_off(tmp_path, 1)
    start(tmp_path).finish()

    assert published(tmp_path) == expected


def test_without_any_snapshot_all_is_replayed(tmp_path, expected):
    """As long as every window is open a replay from the start needs nothing but the log."""
    with (
        pytest.warns(DamagedSnapshot, match="the one before it is used"),
        pytest.warns(DamagedSnapshot, match="a replay from the start is used"),
    ):
        after = kill_and_replay(group_by(), tmp_path, AfterReleases(5), damage=flip_manifests)

    assert after.published == expected


@pytest.mark.filterwarnings("default::dpstream.engines.embedded.snapshots.DamagedSnapshot")
def test_a_final_window_cannot_be_replayed(tmp_path):
    """Its key was erased: the error says so, and what is published stays as it is."""
    write(tmp_path, table())
    break_off(tmp_path, 10)  # window 0 is final, and both snapshots are later
    before = published(tmp_path)
    flip_manifests(tmp_path)
    with pytest.warns(DamagedSnapshot), pytest.raises(StateError, match="its key was erased"):
        start(tmp_path).finish()
    with pytest.raises(StateError, match="its key was erased"):
        start(tmp_path).finish()

    assert published(tmp_path) == before


def test_one_generation_is_not_enough_to_erase_keys(tmp_path):
    """Windows shorter than a snapshot's interval: the first snapshot may still be damaged."""
    short = query(
        every=None, window=query().window, allowed_lateness="0", privacy_unit_period="forever"
    )
    kind = group_by(short, every=1)
    unbroken = kind.unbroken(tmp_path / "whole")
    with pytest.warns(DamagedSnapshot):
        after = kill_and_replay(kind, tmp_path / "run", AfterReleases(1), damage=flip_manifests)

    assert after.published == unbroken


@pytest.mark.parametrize("cut", [1, 2, 20, 60])
def test_a_torn_log_is_mended(tmp_path, expected, cut):
    """The last record is written again by the replay, with the same digest."""
    after = kill_and_replay(
        group_by(), tmp_path, AfterReleases(7), damage=lambda place: cut_log(place, cut)
    )

    assert after.published == expected


@pytest.mark.parametrize("releases", [1, 2, 3])
def test_a_log_torn_at_a_snapshot_stays_mended(tmp_path, expected, releases):
    """The line that the ledger has made up for is needed again by the next start."""
    cuts = iter((5, 0))
    after = kill_and_replay(
        group_by(),
        tmp_path,
        [AfterReleases(4), AfterReleases(releases)],  # the fourth step ends with a snapshot
        damage=lambda place: cut_log(place, next(cuts)),
    )

    assert after.published == expected


def test_a_record_that_never_was_durable_is_cut_off(tmp_path, expected):
    """Half a line at the end is what a kill inside a write leaves."""

    def begin_line(place):
        with (place / "state" / "inputs.log").open("ab") as log:
            log.write(b'0123456789abcdef {"digest":"00')

    after = kill_and_replay(group_by(), tmp_path, AfterReleases(7), damage=begin_line)

    assert after.published == expected


@pytest.mark.parametrize("name", ["inputs.log", "run.dps", "ledger"])
def test_what_has_no_second_copy_is_refused(tmp_path, name):
    """Nothing is guessed from a log, a run or a ledger that was altered."""
    write(tmp_path, table())
    break_off(tmp_path, 7)
    before = published(tmp_path)
    path = tmp_path / "state" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    with pytest.raises(Exception, match=r"damaged|altered|rolled back|checksum|not a dpstream"):
        start(tmp_path).finish()

    assert published(tmp_path) == before


def test_another_format_is_refused(tmp_path):
    """A directory of another version names both."""
    write(tmp_path, table())
    break_off(tmp_path, 3)
    path = tmp_path / "state" / "run.dps"
    about = read_packed(path, kind="run")
    for other in (FORMAT - 1, FORMAT + 1):
        write_packed(path, about | {"format": other}, kind="run")
        said = f"has state format {other}; this version reads {FORMAT}"
        with pytest.raises(StateError, match=said):
            start(tmp_path)


def test_keys_and_noise_of_final_windows_are_gone(tmp_path):
    """Once two snapshots are past a window, no file holds its key or its segments any more."""
    write(tmp_path, table())
    break_off(tmp_path, 3)
    windows = tmp_path / "state" / "windows"
    key = (windows / "0.key").read_bytes()
    noise = [path.read_bytes()[-64:] for path in segments(tmp_path, "window")]
    assert noise
    break_off(tmp_path, 8)
    open_keys = sorted(path.name for path in windows.glob("*.key"))
    start(tmp_path).finish()
    kept = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]

    assert open_keys == ["1.key"]
    assert not list(windows.glob("*.key"))
    for old in (key, *noise):
        assert not [path.name for path in kept if old in path.read_bytes()]


def test_segments_of_windows_are_overwritten_when_they_go(tmp_path):
    """They hold noise, and who is in a group; a second name shows what became of their bytes."""
    write(tmp_path, table())
    break_off(tmp_path, 3)
    old = tmp_path / "state" / "segments"
    names = sorted(path.name for path in old.iterdir())
    for name in names:
        os.link(old / name, tmp_path / name)
    start(tmp_path).finish()
    overwritten = {name for name in names if not any((tmp_path / name).read_bytes())}

    assert not list(old.iterdir())
    assert overwritten == {name for name in names if name.startswith("window")}
    assert overwritten


def test_a_run_that_is_over_keeps_nobody(tmp_path):
    """Units of an endless period go too when there is nothing left to publish."""
    whole(tmp_path, query(privacy_unit_period="forever"))

    assert left_behind(tmp_path / "state") == ""
