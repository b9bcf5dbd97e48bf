"""What survives the process: secrets, window keys, packed values, journals, input logs."""

import copy
import dataclasses
import errno
import fcntl
import json
import math
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from xxhash import xxh3_128

from dpstream.errors import NoiseReuse, SecretError, ServerUnreachable, StateError
from dpstream.privacy.state import (
    InputLog,
    Journal,
    Secret,
    WindowKeys,
    durable_files,
    mint_run_id,
    pack,
    read_packed,
    storable,
    unpack,
    write_packed,
)
from dpstream.privacy.state.durable_files import create_exclusive, erase, wrap_write_errors
from dpstream.privacy.state.serial import FORMAT
from tests.support.fixed import fixed_randomness
from tests.support.processes import run_in_fork, run_python

VALUE = bytes(range(100, 132))
RUN = b"state tests 0001"


# --- secrets


def test_a_secret_file_is_private_and_reads_back(tmp_path):
    """Created with mode 0600, whatever the umask, and loaded with the same keys."""
    old = os.umask(0)
    try:
        secret = Secret.create(tmp_path / "new" / "s")
    finally:
        os.umask(old)

    assert stat.S_IMODE((tmp_path / "new" / "s").stat().st_mode) == 0o600
    assert Secret.load(tmp_path / "new" / "s").key("use") == secret.key("use")
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["s"]


def test_a_path_is_created_once_and_then_read(tmp_path):
    """`Secret.of` makes the file on first use and reads it from then on."""
    assert Secret.of(tmp_path / "s").key("use") == Secret.of(str(tmp_path / "s")).key("use")
    assert Secret.of(None).key("use") != Secret.of(None).key("use")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o601])
def test_a_secret_others_may_touch_is_refused(tmp_path, mode):
    """Any right of group or others is refused, with the command that repairs it."""
    Secret.create(tmp_path / "s")
    (tmp_path / "s").chmod(mode)

    with pytest.raises(SecretError, match=f"mode {mode:04o}.*chmod 600"):
        Secret.of(tmp_path / "s")


def test_truncated_and_foreign_secrets_are_refused_without_showing_them(tmp_path):
    """Cut anywhere, or another file: one clear error that quotes nothing of the content."""
    Secret.create(tmp_path / "s", value=VALUE)
    whole = (tmp_path / "s").read_bytes()
    foreign = [b"\xff" * 80, b"x" * 82, whole.replace(b"-1", b"-2"), whole[:-1] + b"00\n"]
    for content in [whole[:n] for n in range(len(whole) - 1)] + foreign:
        (tmp_path / "s").write_bytes(content)
        with pytest.raises(SecretError, match="not a dpstream secret file") as caught:
            Secret.load(tmp_path / "s")
        assert not shows(VALUE, str(caught.value))
        assert caught.value.__cause__ is None


def test_a_secret_is_never_overwritten(tmp_path):
    """Creating or writing over an existing file raises and leaves it as it was."""
    Secret.create(tmp_path / "s")
    before = (tmp_path / "s").read_bytes()

    with pytest.raises(SecretError, match="never overwritten"):
        Secret.create(tmp_path / "s")
    with pytest.raises(SecretError, match="never overwritten"):
        Secret(VALUE).write(tmp_path / "s")
    assert (tmp_path / "s").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_a_missing_secret_is_not_made_up(tmp_path):
    """`load` never creates."""
    with pytest.raises(SecretError, match="there is no secret"):
        Secret.load(tmp_path / "s")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [b"", b"short", bytes(33), "x" * 32, 77])
def test_other_values_are_refused_without_showing_them(tmp_path, value):
    """A secret is 32 bytes; the error gives the length or type, not the value."""
    with pytest.raises(SecretError, match="must be 32 bytes; got") as caught:
        Secret(value)
    assert repr(value) not in str(caught.value)
    with pytest.raises(SecretError):
        Secret.create(tmp_path / "s", value=value)
    assert not list(tmp_path.iterdir())


def shows(value: bytes, text: str) -> bool:
    """Does the text hold eight successive bytes of the value, as hex, text or a list?"""
    forms = (lambda part: part.hex(), lambda part: part.decode("latin-1"), lambda p: str(list(p)))
    pieces = [form(value[i : i + 8]).strip("[]") for i in range(len(value) - 7) for form in forms]
    return any(piece in text for piece in pieces)


def test_a_secret_does_not_print_or_serialise_itself(tmp_path):
    """repr, str, formatting, copying and packing show or carry no byte of it."""
    secret = Secret(VALUE)
    secret.write(tmp_path / "s")

    for text in (repr(secret), str(secret), f"{secret}", repr([secret]), repr({"s": secret})):
        assert not shows(VALUE, text)
    assert shows(VALUE, (tmp_path / "s").read_text())  # the check can see it
    for copying in (copy.copy, copy.deepcopy):
        with pytest.raises(SecretError, match="not serialised"):
            copying(secret)
    with pytest.raises(StateError, match="cannot be stored"):
        pack(secret, kind="k")


def test_keys_of_different_uses_share_nothing():
    """A key depends on the whole use and the whole context, and on the boundary between them."""
    secret = Secret(VALUE)
    keys = [secret.key("a"), secret.key("b"), secret.key("a", b"b"), secret.key("ab")]
    keys += [Secret(bytes(32)).key("a")]

    assert len({key[:16] for key in keys} | {key[16:] for key in keys}) == 2 * len(keys)


def test_run_ids_are_random():
    """128 bits, new each time."""
    assert len({mint_run_id() for _ in range(100)}) == 100
    assert len(mint_run_id()) == 16


def test_randomness_is_fixed_in_tests_alone():
    """A test draws the same whenever it runs; a program draws from the system; forks their own."""
    fixed = fixed_randomness()
    fixed._begin("a test")
    here = [mint_run_id().hex(), Secret.of(None)._value.hex()]
    fixed._begin("a test")
    assert [mint_run_id().hex(), Secret.of(None)._value.hex()] == here
    code = "from dpstream.privacy.state import mint_run_id; print(mint_run_id().hex())"
    minted = [subprocess.check_output([sys.executable, "-c", code], text=True) for _ in range(2)]
    assert len({*minted, *here}) == 4
    with tempfile.TemporaryFile("w+") as forks:
        for _ in range(2):
            run_in_fork(lambda: print(mint_run_id().hex(), file=forks, flush=True))
        forks.seek(0)
        assert len({*forks.read().split(), mint_run_id().hex()}) == 3


# --- window keys


def test_window_keys_are_random_wrapped_and_kept(tmp_path):
    """Minted once, the same from then on, not derived from the secret, not readable on disk."""
    here = WindowKeys(tmp_path / "here", Secret(VALUE))
    key = here.mint(0)

    assert len(key) == 32
    assert WindowKeys(tmp_path / "here", Secret(VALUE)).get(0) == key
    assert len({key, here.mint(1), WindowKeys(tmp_path / "there", Secret(VALUE)).mint(0)}) == 3
    assert key not in (tmp_path / "here" / "0.key").read_bytes()
    assert stat.S_IMODE((tmp_path / "here" / "0.key").stat().st_mode) == 0o600
    assert here.open_windows() == [0, 1]


def test_window_keys_open_with_their_secret_alone(tmp_path):
    """Another secret, or a damaged file, is refused."""
    WindowKeys(tmp_path, Secret(VALUE)).mint(0)

    with pytest.raises(StateError, match="does not open with this secret"):
        WindowKeys(tmp_path, Secret(bytes(32))).get(0)
    whole = (tmp_path / "0.key").read_bytes()
    for content in (whole[:-1], whole[:-8], b"", bytes(40), whole[:-1] + bytes([whole[-1] ^ 1])):
        (tmp_path / "0.key").write_bytes(content)
        with pytest.raises(StateError, match="or is damaged"):
            WindowKeys(tmp_path, Secret(VALUE)).get(0)


def test_an_erased_key_is_gone(tmp_path):
    """Its bytes leave the disk, also through another link; it is never minted again."""
    keys = WindowKeys(tmp_path / "keys", Secret(VALUE))
    keys.mint(2)
    os.link(tmp_path / "keys" / "1.key", tmp_path / "link")
    wrapped = (tmp_path / "link").read_bytes()
    keys.erase(1)
    keys.erase(1)

    assert (tmp_path / "link").read_bytes() == bytes(len(wrapped))
    assert not any(
        wrapped[:16] in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    )
    assert keys.open_windows() == [0, 2]
    for again in (keys, WindowKeys(tmp_path / "keys", Secret(VALUE))):
        for call in (again.get, again.mint):
            with pytest.raises(StateError, match="window 1 is final"):
                call(1)


def test_a_lost_key_is_not_replaced(tmp_path):
    """Reading never mints: another key would publish a second noisy copy."""
    keys = WindowKeys(tmp_path, Secret(VALUE))
    keys.mint(0)
    (tmp_path / "0.key").unlink()
    with pytest.raises(StateError, match="never minted, or is lost"):
        keys.get(0)


def test_an_interrupted_erase_is_finished_by_the_next(tmp_path):
    """Killed after the tombstone, the key is refused at once and erased by the next call."""
    keys = WindowKeys(tmp_path, Secret(VALUE))
    keys.mint(0)
    (tmp_path / "0.erased").touch()
    with pytest.raises(StateError, match="final"):
        keys.get(0)
    keys.erase(0)

    assert not (tmp_path / "0.key").exists()


MINT = """
import sys
from pathlib import Path
from dpstream.privacy.state import Secret, WindowKeys
keys = WindowKeys(Path(sys.argv[1]), Secret(bytes(range(100, 132))))
sys.stdin.readline()
print([keys.mint(window).hex() for window in range(100)])
"""


def test_processes_that_mint_at_once_get_one_key(tmp_path):
    """Whoever is first mints; the others use that key."""
    command = [sys.executable, "-c", MINT, str(tmp_path)]
    pipe = subprocess.PIPE
    both = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    for process in both:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    first, second = (process.communicate(timeout=60)[0] for process in both)

    assert first == second
    assert first.startswith("[")
    assert len(list(tmp_path.glob("*.key"))) == 100


def test_derived_window_keys_are_for_tests(tmp_path):
    """Two directories derive the same keys, one per window."""
    one, two = (WindowKeys(tmp_path / name, Secret(VALUE), derived_for_tests=True) for name in "ab")

    assert one.mint(0) == two.mint(0) != one.mint(1)


# --- exclusive files


def test_exclusive_creation_keeps_the_first(tmp_path):
    """The second creation raises, changes nothing and leaves no temporary file."""
    create_exclusive(tmp_path / "f", b"first")
    with pytest.raises(FileExistsError):
        create_exclusive(tmp_path / "f", b"second")

    assert (tmp_path / "f").read_bytes() == b"first"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_threads_that_create_at_once_leave_one_whole_file(tmp_path):
    """Temporary files are not shared: one thread wins, the others see FileExistsError."""
    outcomes: list[object] = []
    start = threading.Barrier(8)

    def create(content: bytes) -> None:
        start.wait()
        for number in range(30):
            try:
                create_exclusive(tmp_path / str(number), content)
                outcomes.append((number, content))
            except FileExistsError:
                pass
            except OSError as error:
                outcomes.append(error)

    threads = [threading.Thread(target=create, args=(bytes([i]) * 1000,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    kept = {(number, (tmp_path / str(number)).read_bytes()) for number in range(30)}
    assert sorted(map(repr, outcomes)) == sorted(map(repr, kept))


def test_a_planted_temporary_file_gets_nothing(tmp_path):
    """A file somebody put under a guessable temporary name receives no secret."""
    planted = tmp_path / f".s.{os.getpid()}.new"
    planted.write_bytes(b"planted")
    planted.chmod(0o666)
    Secret.create(tmp_path / "s", value=VALUE)

    assert planted.read_bytes() == b"planted"
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600


# --- packed values


@storable("test point")
@dataclasses.dataclass(frozen=True)
class Point:
    """A class known to the reader."""

    x: Fraction
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.x == Fraction(13):
            raise StateError("checked at construction")


@dataclasses.dataclass
class Unknown:
    x: int


numbers = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**40), 10**40),
    st.floats(allow_nan=False),
    st.fractions().filter(lambda x: x != 13),
)
plain = st.one_of(numbers, st.text(), st.binary())
tables = st.sampled_from(["?", "<i8", ">i4", "<u8", "i1", "<f8", ">f4", "<f2"]).flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0))
)
points = st.builds(
    Point, x=st.fractions().filter(lambda x: x != 13), tags=st.lists(st.text()).map(tuple)
)
values = st.recursive(
    st.one_of(plain, tables, points),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(plain, st.tuples(plain, plain), points), inner, max_size=4),
    ),
    max_leaves=8,
)


def same(left: object, right: object) -> bool:
    """Equal in type, bits and order; an array comes back in the machine's byte order."""
    if isinstance(left, np.ndarray):
        return (
            isinstance(right, np.ndarray)
            and right.dtype == left.dtype.newbyteorder("=")
            and right.shape == left.shape
            and right.tobytes() == left.astype(right.dtype).tobytes()
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return left.hex() == right.hex()
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left), list(right)) and same(list(left.values()), list(right.values()))
    return left == right


@given(values)
def test_values_come_back_as_they_were(value):
    """Every supported value, nested as you like, keeps its type, bits and order."""
    data = pack(value, kind="k")

    assert same(value, unpack(data, kind="k"))
    assert pack(unpack(data, kind="k"), kind="k") == pack(value, kind="k")


def test_unusual_numbers_come_back():
    """NaN, infinities, minus zero and numpy scalars are kept."""
    assert math.isnan(unpack(pack(math.nan, kind="k"), kind="k"))
    for value in (math.inf, -math.inf, -0.0, 5e-324):
        assert same(value, unpack(pack(value, kind="k"), kind="k"))
    assert unpack(pack(np.int64(-5), kind="k"), kind="k") == -5
    assert unpack(pack(np.float32(0.1), kind="k"), kind="k") == float(np.float32(0.1))


SAMPLE = {"a": [1, Fraction(1, 3), np.arange(5)], "b": Point(Fraction(2)), "c": b"\0\1", "d": 0.1}


def test_a_file_cut_anywhere_or_with_any_bit_changed_is_refused(tmp_path):
    """StateError at every length and for every damaged byte, never anything else."""
    data = pack(SAMPLE, kind="kind")
    for n in range(len(data)):
        for broken in (data[:n], data[:n] + bytes([data[n] ^ 0x10]) + data[n + 1 :]):
            with pytest.raises(StateError):
                unpack(broken, kind="kind")
    with pytest.raises(StateError, match="truncated or damaged"):
        unpack(data + b"\0", kind="kind")
    (tmp_path / "f").write_bytes(data[:-1])
    with pytest.raises(StateError, match=f"{tmp_path / 'f'} is truncated or damaged"):
        read_packed(tmp_path / "f", kind="kind")


@given(st.binary(max_size=100))
def test_foreign_bytes_are_refused(data):
    """Bytes that nobody packed are refused, also behind the right first bytes."""
    for foreign in (data, b"dpstream" + data, pack(1, kind="k")[:12] + data):
        with pytest.raises(StateError):
            unpack(foreign, kind="k")


def test_other_kinds_versions_and_missing_files_are_named(tmp_path):
    """The error says what was found."""
    write_packed(tmp_path / "f", 1, kind="snapshot")
    assert read_packed(tmp_path / "f", kind="snapshot") == 1
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o600
    with pytest.raises(StateError, match="holds a 'snapshot', not a 'run'"):
        read_packed(tmp_path / "f", kind="run")
    with pytest.raises(StateError, match="there is no run at"):
        read_packed(tmp_path / "missing", kind="run")
    for change in (-1, 1):  # an older format is not guessed at either
        other = bytearray(pack(1, kind="k"))
        other[9] += change
        said = f"has format {FORMAT + change}; this version of dpstream reads format {FORMAT}; use"
        with pytest.raises(StateError, match=said):
            unpack(bytes(other), kind="k")


@pytest.mark.parametrize("refuses", [None, "at once", "at a write", "half a write"])
def test_large_files_are_whole_however_they_are_written(tmp_path, monkeypatch, refuses):
    """Directly, or as usual where the file system cannot, from the start or in between."""
    content = np.random.default_rng(2).integers(0, 2**60, 700_001)
    write, calls = os.write, []

    def poor(fd, data):
        calls.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        if len(calls) == 2 and refuses == "at a write":
            raise OSError(errno.EINVAL, "no")
        half = len(calls) == 2 and refuses == "half a write"
        return write(fd, data[: len(data) // 2] if half else data)

    if refuses == "at once":
        monkeypatch.setattr("dpstream.privacy.state.durable_files._DIRECT", 0)
    monkeypatch.setattr(os, "write", poor)
    write_packed(tmp_path / "f", {"a": content, "b": b"rest"}, kind="k")
    monkeypatch.undo()

    found = read_packed(tmp_path / "f", kind="k")
    assert (found["a"] == content).all()
    assert found["b"] == b"rest"
    assert len(calls) >= 6
    if refuses is not None:
        assert not any(calls[2:])


@pytest.mark.parametrize("size", [0, 5, (1 << 20) - 1, 1 << 20, (5 << 20) + 7])
def test_an_erased_file_is_overwritten_to_its_last_byte(tmp_path, monkeypatch, size):
    """Another name of the same file shows what was left under it when its name went."""
    path, other = tmp_path / "noise", tmp_path / "other"
    path.write_bytes(b"\1" * size)
    os.link(path, other)
    synced, order = os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append(path.exists()), synced(fd)))

    erase(path)

    assert other.read_bytes() == bytes(size)
    assert not path.exists()
    assert order == [True, False]  # the zeros are durable before the name goes


def packed_json(tree: object) -> bytes:
    """A file with a right checksum around JSON that `pack` would not write."""
    text = json.dumps(tree).encode()
    body = len(text).to_bytes(8, "big") + text
    return b"dpstream" + FORMAT.to_bytes(2, "big") + b"\1k" + xxh3_128(body).digest() + body


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"$": "object", "class": "os.system", "is": {"command": "true"}}, "does not know"),
        ({"$": "object", "class": "test point", "is": {"x": 1, "z": 2}}, "unknown fields"),
        ({"$": "pickle", "is": "gASVAA=="}, "unknown kind of value 'pickle'"),
    ],
)
def test_unknown_classes_fields_and_kinds_are_refused(tree, message):
    """The reader builds registered classes from known fields and runs nothing else."""
    with pytest.raises(StateError, match=message):
        unpack(packed_json(tree), kind="k")


@pytest.mark.parametrize(
    "tree",
    [
        {"no tag": 1},
        {"$": "fraction", "is": "1/0"},
        {"$": "float", "is": 5},
        {"$": "bytes", "is": "xyz"},
        {"$": "array", "dtype": "<i8", "shape": [10**6], "at": 0},
        {"$": "array", "dtype": "O", "shape": [1], "at": 0},
        {"$": "array", "dtype": "<i8", "shape": [0]},
        {"$": "dict", "is": [[[], 1]]},
        {"$": "object", "class": "test point", "is": {}},
    ],
)
def test_malformed_content_is_a_state_error(tree):
    """A body that checks but makes no sense, like a field that a newer class needs, is refused."""
    with pytest.raises(StateError):
        unpack(packed_json(tree), kind="k")


@pytest.mark.parametrize(
    "value", [Unknown(1), {1, 2}, object(), lambda: 0, 1j, np.array(["a"]), np.array([object()])]
)
def test_values_without_a_rule_are_not_stored(value):
    """There is no fallback to pickle: what has no rule is refused when it is written."""
    with pytest.raises(StateError, match="cannot be stored"):
        pack([value], kind="k")


def test_reading_never_pickles():
    """Packing, unpacking and the whole state package work without importing pickle's loader."""
    script = (
        "import sys, pickle, numba\n"  # a compiler, which needs pickle to be whole as it loads
        "def no(*a, **k): raise SystemExit('pickle was used')\n"
        "pickle.loads = pickle.load = pickle.dumps = pickle.dump = no\n"
        "pickle.Pickler = pickle.Unpickler = no\n"
        "import numpy as np\n"
        "from dpstream.privacy.state import pack, unpack\n"
        "value = [1, (2.5, b'x'), {'a': np.arange(3)}]\n"
        "assert str(unpack(pack(value, kind='k'), kind='k')) == str(value)\n"
    )

    assert run_python(script).returncode == 0


# --- journals


def journal(path: Path, kind: str = "k") -> Journal:
    """Opened anew, as another process would."""
    return Journal(path, kind=kind)


def write_journal(path: Path, *batches: list[dict[str, int]]) -> None:
    """Append batches, each durable on its own."""
    book = journal(path)
    with book.locked():
        book.read_new()
        for batch in batches:
            book.append(batch)
    book.close()


def read_journal(path: Path, kind: str = "k") -> list[dict[str, int]]:
    """Everything a new reader sees."""
    book = journal(path, kind)
    try:
        with book.locked():
            return book.read_new()
    finally:
        book.close()


def test_records_come_back_in_order(tmp_path):
    """What was appended is read by the next process, and by one that reads along."""
    write_journal(tmp_path / "j", [{"n": 1}], [{"n": 2}, {"n": 3}])
    along = journal(tmp_path / "j")
    with along.locked():
        assert along.read_new() == [{"n": 1}, {"n": 2}, {"n": 3}]
        assert along.read_new() == []
    write_journal(tmp_path / "j", [{"n": 4}])
    with along.locked():
        assert along.read_new() == [{"n": 4}]
        along.append([{"n": 5}])
        along.rewind()
        assert [record["n"] for record in along.read_new()] == [1, 2, 3, 4, 5]
    along.close()
    assert stat.S_IMODE((tmp_path / "j").stat().st_mode) == 0o600


def test_a_torn_tail_is_cut_by_the_next_writer(tmp_path):
    """A write killed at any byte loses its last record at most, and the file stays good.

    A record that lacks its newline alone is whole: its tag verifies.
    """
    write_journal(tmp_path / "j", [{"n": 1}], [{"n": 10**40}])
    whole = (tmp_path / "j").read_bytes()
    lines = whole.splitlines(keepends=True)
    for n in range(len(whole)):
        (tmp_path / "j").write_bytes(whole[:n])
        kept = max(0, sum(n + 1 >= sum(map(len, lines[: i + 1])) for i in range(3)) - 1)
        expected = [{"n": 1}, {"n": 10**40}][:kept]
        assert read_journal(tmp_path / "j") == expected
        write_journal(tmp_path / "j", [{"n": 9}])
        assert read_journal(tmp_path / "j") == [*expected, {"n": 9}]
        assert (tmp_path / "j").read_bytes().endswith(b"\n")


def test_a_damaged_tail_is_not_cut(tmp_path):
    """A last record that is whole but does not verify was relied on: it is refused, and kept."""
    write_journal(tmp_path / "j", [{"n": 1}], [{"n": 10**40}])
    whole = (tmp_path / "j").read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for place in range(last, len(whole)):
        for flip in (1, 4, 128):
            bad = whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :]
            (tmp_path / "j").write_bytes(bad)
            with pytest.raises(StateError, match="damaged after byte"):
                write_journal(tmp_path / "j", [{"n": 9}])
            assert (tmp_path / "j").read_bytes() == bad


def test_damage_in_the_middle_is_found(tmp_path):
    """A changed, missing, repeated or moved record, and any changed byte before the last."""
    write_journal(tmp_path / "j", [{"n": n} for n in range(4)])
    whole = (tmp_path / "j").read_bytes()
    head, *rows = whole.splitlines(keepends=True)
    tampered = [
        [head, rows[0], rows[2], rows[3]],
        [head, rows[0], rows[0], *rows[1:]],
        [head, rows[1], rows[0], *rows[2:]],
        [head, rows[0].replace(b"0}", b"9}"), *rows[1:]],
        rows,
    ]
    changed = [
        whole[:n] + bytes([whole[n] ^ 4]) + whole[n + 1 :] for n in range(len(whole) - len(rows[3]))
    ]
    for content in [b"".join(parts) for parts in tampered] + changed:
        (tmp_path / "j").write_bytes(content)
        with pytest.raises(StateError, match=r"damaged after byte|not a dpstream k file"):
            read_journal(tmp_path / "j")
        assert (tmp_path / "j").read_bytes() == content


@pytest.mark.parametrize("content", [b"hello\n", b"{}\nmore\n", b"\n", b"\xff\xfe\n\0", b"0" * 99])
def test_a_foreign_file_is_refused_and_left_alone(tmp_path, content):
    """Naming the wrong file must not destroy it, with or without a newline in it."""
    (tmp_path / "j").write_bytes(content)

    with pytest.raises(StateError, match="not a dpstream k file"):
        write_journal(tmp_path / "j", [{"n": 1}])
    assert (tmp_path / "j").read_bytes() == content


def test_another_kind_or_format_is_refused(tmp_path, monkeypatch):
    """A ledger is not an input log; a newer format is not guessed at."""
    write_journal(tmp_path / "j", [{"n": 1}])

    with pytest.raises(StateError, match="is a dpstream 'k' file; a 'ledger' file was expected"):
        read_journal(tmp_path / "j", "ledger")
    monkeypatch.setattr("dpstream.privacy.state.journal.FORMAT", 2)
    with pytest.raises(StateError, match="has format 1; this version reads 2"):
        read_journal(tmp_path / "j")


def test_a_file_cut_under_a_reader_is_found(tmp_path):
    """Records that were read and are gone mean a restored or replaced file."""
    write_journal(tmp_path / "j", [{"n": 1}])
    book = journal(tmp_path / "j")
    with book.locked():
        book.read_new()
        os.truncate(tmp_path / "j", 10)
        with pytest.raises(StateError, match="became shorter"):
            book.read_new()
    book.close()


def test_short_reads_lose_nothing(tmp_path, monkeypatch):
    """A read that returns less than asked (as beyond 2 GiB) is continued, not taken for the end."""
    write_journal(tmp_path / "j", [{"n": n} for n in range(20)])
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, min(size, 7), at))

    assert len(read_journal(tmp_path / "j")) == 20


def test_appending_blindly_never_cuts_what_others_wrote(tmp_path):
    """A writer that has not read to the end is refused; only a torn tail is ever cut."""
    late = journal(tmp_path / "j")
    write_journal(tmp_path / "j", [{"n": 1}])
    with late.locked(), pytest.raises(StateError):
        late.append([{"n": 2}])
    late.close()

    assert read_journal(tmp_path / "j") == [{"n": 1}]


# --- input logs

DIGESTS = [bytes([i]) * 16 for i in range(6)]


def test_a_replay_of_the_same_input_is_fine_and_writes_nothing(tmp_path):
    """Old steps with old digests pass, new steps are appended."""
    log = InputLog(tmp_path / "l", run=RUN, new=True)
    log.record(0, DIGESTS[:3])
    log.close()
    size = (tmp_path / "l").stat().st_size
    again = InputLog(tmp_path / "l", run=RUN)
    assert again.last == 2
    again.record(1, DIGESTS[1:3])
    assert (tmp_path / "l").stat().st_size == size
    again.record(2, DIGESTS[2:5])
    again.close()

    third = InputLog(tmp_path / "l", run=RUN)
    assert third.last == 4
    third.close()


def test_changed_input_under_an_old_step_raises_and_logs_nothing(tmp_path):
    """NoiseReuse, and not even the new steps of the same call are written."""
    log = InputLog(tmp_path / "l", run=RUN, new=True)
    log.record(0, DIGESTS[:3])
    before = (tmp_path / "l").read_bytes()

    with pytest.raises(NoiseReuse, match="step 2 was already published from other data"):
        log.record(2, DIGESTS[3:6])
    assert (tmp_path / "l").read_bytes() == before
    log.record(5, DIGESTS[:1])
    with pytest.raises(NoiseReuse, match="step 4"):  # a gap is not filled afterwards
        log.record(4, DIGESTS[:1])
    log.forget_before(5)
    with pytest.raises(NoiseReuse, match="step 1"):  # forgotten is not unknown
        log.record(1, DIGESTS[1:2])
    log.record(5, DIGESTS[:1])
    log.close()


def test_the_log_survives_the_process(tmp_path):
    """Digests are durable when `record` returns: a killed process leaves them."""
    script = (
        "import os, sys; from pathlib import Path; from dpstream.privacy.state import InputLog\n"
        "InputLog(Path(sys.argv[1]), run=b'state tests 0001', new=True).record(0, [bytes(16)])\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert run_python(script, tmp_path / "l").returncode == -9

    log = InputLog(tmp_path / "l", run=RUN, new=True)
    with pytest.raises(NoiseReuse):
        log.record(0, DIGESTS[1:2])
    log.record(0, [bytes(16)])
    log.close()


def test_a_second_process_is_refused_while_the_log_is_open(tmp_path):
    """One writer: the other is told so at once, and may have the log after `close`."""
    script = (
        "import sys; from pathlib import Path; from dpstream.privacy.state import InputLog\n"
        "InputLog(Path(sys.argv[1]), run=b'state tests 0001').close()\n"
    )
    log = InputLog(tmp_path / "l", run=RUN, new=True)
    refused = run_python(script, tmp_path / "l")
    log.close()

    assert refused.returncode == 1
    assert "StateError" in refused.stderr
    assert "is in use by another process" in refused.stderr
    assert run_python(script, tmp_path / "l").returncode == 0


def test_a_log_of_another_run_is_refused_and_let_go(tmp_path):
    """Another run's log raises, and the failed attempt does not keep the file locked."""
    InputLog(tmp_path / "l", run=RUN, new=True).close()

    with pytest.raises(StateError, match="belongs to another run"):
        InputLog(tmp_path / "l", run=bytes(16))
    InputLog(tmp_path / "l", run=RUN).close()


@settings(max_examples=20)
@given(st.lists(st.integers(1, 4), max_size=6))
def test_logs_know_all_their_steps(tmp_path_factory, sizes):
    """Whatever the batches, a reader finds every step and the newest one."""
    path = tmp_path_factory.mktemp("logs") / "l"
    log, step = InputLog(path, run=RUN, new=True), 0
    for size in sizes:
        log.record(step, DIGESTS[:size])
        step += size
    log.close()
    again = InputLog(path, run=RUN, new=True)

    assert again.last == step - 1
    again.close()


def test_a_file_is_known_by_inode_and_birth_not_by_device(tmp_path, monkeypatch):
    """A volume that is attached again has another device number; a copy is another file."""
    (tmp_path / "a").write_bytes(b"x")
    shutil.copy2(tmp_path / "a", tmp_path / "b")
    with (tmp_path / "a").open() as a, (tmp_path / "b").open() as b:
        before = durable_files.file_identity(a.fileno())
        assert before != durable_files.file_identity(b.fileno())
        fstat = os.fstat
        monkeypatch.setattr(
            os, "fstat", lambda fd: os.stat_result([*fstat(fd)[:2], 99, *fstat(fd)[3:]])
        )
        assert durable_files.file_identity(a.fileno()) == before
        monkeypatch.setattr(durable_files, "_birth_time", lambda fd: 0)
        assert durable_files.file_identity(a.fileno()).endswith("-on-63")


def test_a_journal_that_nobody_has_any_more_is_closed(tmp_path):
    """Else a long process that opens ledgers and drops them runs out of descriptors."""
    before = len(os.listdir("/proc/self/fd"))
    for number in range(5):
        Journal(tmp_path / f"{number}", kind="test")

    assert len(os.listdir("/proc/self/fd")) == before


def test_a_server_that_does_not_answer_is_told_as_such():
    """It is an OSError too, but no failure to write the state."""
    with (
        pytest.raises(ServerUnreachable, match="does not answer"),
        wrap_write_errors(Path("state")),
    ):
        raise ServerUnreachable("kafka://x does not answer")
    with pytest.raises(StateError, match="cannot be written"), wrap_write_errors(Path("state")):
        raise ConnectionError("reset")
