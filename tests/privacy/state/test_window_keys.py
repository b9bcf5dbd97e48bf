"""Keys of final windows: one number instead of a file each, and what a kill leaves behind."""

import pytest

from dpstream.errors import StateError
from dpstream.privacy.state import MemoryWindowKeys, Secret, WindowKeys, durable_files, window_keys

SECRET = Secret(bytes(range(100, 132)))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def refused(keys, window):
    for call in (keys.mint, getattr(keys, "get", keys.mint)):
        with pytest.raises(StateError, match=f"window {window} is final"):
            call(window)


@pytest.fixture(params=["disk", "memory"])
def keys(request, tmp_path):
    if request.param == "memory":
        return MemoryWindowKeys()
    return WindowKeys(tmp_path / "keys", SECRET)


def test_a_thousand_final_windows_leave_one_number(tmp_path):
    """Windows that become final in order leave no file each."""
    keys = WindowKeys(tmp_path, SECRET)
    for window in range(50):
        keys.mint(window)
        keys.erase(window)

    assert names(tmp_path) == ["final", "minted"]
    assert (tmp_path / "final").read_bytes() == b"50"
    refused(WindowKeys(tmp_path, SECRET), 17)
    assert WindowKeys(tmp_path, SECRET).mint(50) == keys.get(50)


def test_windows_out_of_order_wait_as_tombstones(tmp_path):
    """They are folded into the number when the windows before them are final."""
    keys = WindowKeys(tmp_path, SECRET)
    for window in range(5):
        keys.mint(window)
    for window in (2, 1, 4):
        keys.erase(window)
    assert names(tmp_path) == ["0.key", "1.erased", "2.erased", "3.key", "4.erased", "minted"]
    keys.erase(0)
    assert names(tmp_path) == ["3.key", "4.erased", "final", "minted"]
    for window in (0, 1, 2, 4):
        refused(keys, window)
    keys.erase(3)

    assert names(tmp_path) == ["final", "minted"]
    assert keys.open_windows() == []


def test_a_window_may_become_final_unminted(keys):
    """A window without data: its number is used up all the same."""
    keys.erase(0)
    keys.erase(0)
    refused(keys, 0)

    assert len(keys.mint(1)) == 32


class Killed(BaseException):
    pass


def test_a_kill_at_any_point_of_erasing_keeps_the_promises(tmp_path, monkeypatch):
    """Before the mark the key is as it was; after it, refused for ever and gone when reopened."""
    for point in range(40):
        folder = tmp_path / str(point)
        keys = WindowKeys(folder, SECRET)
        before = {window: keys.mint(window) for window in (0, 1, 2, 3)}
        keys.erase(1)
        countdown = iter(range(point))

        def tick(call, countdown=countdown):
            def wrapped(*args, **more):
                if next(countdown, None) is None:
                    raise Killed
                return call(*args, **more)

            return wrapped

        with monkeypatch.context() as patch:
            for module, name in (
                (window_keys, "replace"),
                (window_keys, "create_exclusive"),
                (window_keys, "erase"),
                (durable_files.os, "replace"),
                (durable_files.os, "fsync"),
            ):
                patch.setattr(module, name, tick(getattr(module, name)))
            try:
                for window in (0, 2):
                    keys.erase(window)
                finished = True
            except Killed:
                finished = False
        again = WindowKeys(folder, SECRET)
        for window, key in before.items():
            if window in again.open_windows():
                assert window != 1
                assert again.mint(window) == again.get(window) == key
            else:
                assert window != 3
                refused(again, window)
                assert not (folder / f"{window}.key").exists()
        if finished:
            assert again.open_windows() == [3]
            break
    else:
        raise AssertionError("the last kill came too early")
    assert point > 5


def test_a_key_left_beside_its_mark_goes_when_the_number_passes_it(tmp_path):
    """Killed between tombstone and key: the next erase in order removes both."""
    keys = WindowKeys(tmp_path, SECRET)
    keys.mint(0)
    keys.mint(1)
    (tmp_path / "1.erased").touch()
    keys.erase(0)

    assert names(tmp_path) == ["final", "minted"]


def test_a_lost_key_is_not_minted_again(tmp_path):
    """Also `mint` knows that there was one."""
    keys = WindowKeys(tmp_path, SECRET)
    for window in (0, 3, 4):
        keys.mint(window)
    for window in (2, 4):
        (tmp_path / f"{window}.key").unlink()
        for again in (keys, WindowKeys(tmp_path, SECRET)):
            with pytest.raises(StateError, match="is lost"):
                again.mint(window)

    assert len({keys.mint(window) for window in (0, 1, 3, 5)}) == 4


def test_a_kill_while_minting_loses_nothing(tmp_path, monkeypatch):
    """A key that is there without the mark was never used, and is used then."""
    keys = WindowKeys(tmp_path, SECRET)

    def killed(*args):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(window_keys, "replace", killed)
        with pytest.raises(Killed):
            keys.mint(2)
    kept = [(tmp_path / f"{window}.key").read_bytes() for window in (0, 1, 2)]
    keys.mint(2)

    assert kept == [(tmp_path / f"{window}.key").read_bytes() for window in (0, 1, 2)]


def test_a_damaged_number_is_refused(tmp_path):
    """Guessing it could mint a final window's key again."""
    keys = WindowKeys(tmp_path, SECRET)
    keys.erase(0)
    for content in (b"", b"-1", b"x", b"1\0"):
        (tmp_path / "final").write_bytes(content)
        with pytest.raises(StateError, match="damaged"):
            keys.mint(5)


def test_windows_are_numbered_from_zero(tmp_path):
    """Those in between are minted along, so a window before 0 is a mistake."""
    with pytest.raises(StateError, match="numbered from 0"):
        WindowKeys(tmp_path, SECRET).mint(-4)


def test_keys_are_minted_once_and_gone_once_erased(keys):
    """Whatever holds them: in files or in memory."""
    first = keys.mint(0)

    assert keys.mint(0) == first != keys.mint(1)
    keys.erase(1)
    keys.erase(0)
    for window in (0, 1):
        refused(keys, window)
