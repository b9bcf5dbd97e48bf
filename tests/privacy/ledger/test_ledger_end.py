"""The end of a ledger: what is lost or altered there is refused or counts as spent."""

import os
import shutil
from fractions import Fraction

import pytest

from dpstream.errors import BudgetExceeded, LedgerError, NewBook
from dpstream.privacy.ledger.charges import Cells, Charge, Terms
from dpstream.privacy.ledger.ledger import Ledger
from tests.support.processes import run_python

RUN = "ab" * 16


def charge(step, amount="1/8", run=RUN):
    cells = Cells(first=step, last=step)
    return Charge(
        run=run, query="q", purpose="p", step=step, amount=Fraction(amount), cells=cells, digest="d"
    )


@pytest.fixture
def fast(monkeypatch):
    """Nothing is killed here, so nothing has to wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def written(tmp_path, fast):
    """A ledger, and both of its files as they were after each append."""
    path, ages = tmp_path / "book", []
    ledger = Ledger(path)
    appends = [lambda: ledger.open("flu", Terms(unit="user", total=1))]
    appends += [lambda: ledger.register("flu", RUN, "plan")]
    appends += [lambda step=step: ledger.charge("flu", charge(step)) for step in range(5)]
    for append in appends:
        append()
        ages.append((path.read_bytes(), _head(path).read_bytes()))
    ledger.close()
    return path, ages


def _head(path):
    return path.with_name(path.name + ".head")


def spent(path, book, head):
    """What these two files say was spent; None: they are refused."""
    path.write_bytes(book)
    _head(path).unlink(missing_ok=True)
    if head is not None:
        _head(path).write_bytes(head)
    ledger = Ledger(path)
    try:
        return ledger.peak("flu")
    except LedgerError:
        return None
    finally:
        ledger.close()


def alterations(book, first, others=(lambda b: b ^ 1, lambda b: b ^ 128, lambda b: 10)):
    """Every truncation, and flipped bytes of several kinds, from byte `first` on."""
    for place in range(first, len(book)):
        yield book[:place]
        for other in (make(book[place]) for make in others):
            if other != book[place]:
                yield book[:place] + bytes([other]) + book[place + 1 :]


def damaged_heads(head):
    """The head removed, cut and altered."""
    yield None
    for size in (0, 10, 54, 55, 4096, 4120, 4150, 4151):
        yield head[:size]
    for slot in (0, 4096):
        for place in range(slot, slot + 55, 6):
            yield head[:place] + bytes([head[place] ^ 1]) + head[place + 1 :]


def test_what_is_lost_at_the_end_is_refused_or_spent(written):
    """Every truncation and flipped byte in the last three records, with the head as it was."""
    path, ages = written
    book, head = ages[-1]
    assert spent(path, book, head) == Fraction(5, 8)
    for altered in alterations(book, len(ages[-4][0])):
        assert spent(path, altered, head) in (None, Fraction(5, 8)), altered[-250:]
    assert spent(path, book[:-1], head) == Fraction(5, 8)  # a record is one without its newline


def test_a_damaged_head_forgets_nothing(written):
    """The head removed, cut or altered, beside a ledger that is whole, cut or altered."""
    path, ages = written
    book, head = ages[-1]
    cuts = [book[: len(ages[age][0]) - more] for age in range(-4, 0) for more in (0, 1, 7)]
    flips = [book[:place] + b"#" + book[place + 1 :] for place in range(len(book) - 400, len(book))]
    for altered_head in damaged_heads(head):
        for altered in (*cuts, *flips[::29]):
            whole = altered in (book, book[:-1])
            found = spent(path, altered, altered_head)
            assert found in ((None, Fraction(5, 8)) if whole else (None,))


def test_an_older_head_forgets_nothing(written):
    """Only both files put back together to a moment that was are not seen from inside."""
    path, ages = written
    book = ages[-1][0]
    for age in (0, 3, 4, 5):
        then, head = ages[age]
        next_end = len(ages[age + 1][0])
        for altered in (book, *alterations(book, len(ages[-4][0]), [lambda b: b ^ 4])):
            rolled_back = book.startswith(altered) and len(then) - 1 <= len(altered) <= next_end
            if not rolled_back:
                assert spent(path, altered, head) in (None, Fraction(5, 8)), (age, altered[-250:])


def test_another_ledgers_head_is_refused(written, tmp_path):
    """Heads do not fit each other's ledgers, even of the same length."""
    path, ages = written
    other = Ledger(tmp_path / "other")
    other.open("flu", Terms(unit="user", total=1))
    other.register("flu", RUN, "plaN")
    other.close()
    assert len((tmp_path / "other").read_bytes()) == len(ages[1][0])

    assert spent(path, ages[1][0], _head(tmp_path / "other").read_bytes()) is None


def test_a_kill_between_record_and_head_is_harmless(written):
    """The file one append ahead of its head counts in full, and the head follows it."""
    path, ages = written
    for age in range(len(ages) - 1):
        before, after = ages[age][1], ages[age + 1][0]
        for torn in range(len(ages[age][0]), len(after)):
            path.write_bytes(after[:torn])
            _head(path).write_bytes(before)
            ledger = Ledger(path)
            ledger.report()
            ledger.close()
        path.write_bytes(after)
        _head(path).write_bytes(before)
        ledger = Ledger(path)
        charges = sum(line["charges"] for line in ledger.report()[0]["spent_on"])
        ledger.close()
        assert charges == max(0, age)
        slots = (_head(path).read_bytes()[at : at + 20] for at in (0, 4096))
        assert max(map(int, slots)) == len(after)


def test_the_head_is_synced_before_the_charge_is_done(tmp_path, monkeypatch):
    """Record, sync, head, sync: in this order, before the caller may draw."""
    ledger = Ledger(tmp_path / "book")
    ledger.open("flu", Terms(unit="user", total=1))
    seen, real = [], {name: getattr(os, name) for name in ("pwrite", "fsync")}

    def watched(name):
        def operation(descriptor, *rest):
            seen.append((name, os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
            return real[name](descriptor, *rest)

        return operation

    for name in real:
        monkeypatch.setattr(os, name, watched(name))
    ledger.charge("flu", charge(0))

    assert seen == [(do, file) for file in ("book", "book.head") for do in ("pwrite", "fsync")]


def test_repair_takes_a_ledger_as_it_is_and_says_so(written):
    """The way out is recorded, with what is known to be lost; damage has none."""
    path, ages = written
    book, head = ages[-1]
    for kept, beside in ((book, None), (book, head[:100]), (ages[-3][0], head), (book, ages[2][1])):
        assert spent(path, kept, beside) is None
        ledger = Ledger(path)
        ledger.repair(because="restored from Monday's backup")
        ledger.close()
        again = Ledger(path)
        (note,) = [record for record in again.history() if "repaired" in record]
        assert note["repaired"] == "restored from Monday's backup"
        assert note["had"] == {head: len(book), ages[2][1]: len(ages[2][0])}.get(
            beside, note["had"]
        )
        charges = sum(line["charges"] for line in again.report()[0]["spent_on"])
        assert charges == kept.count(b'"amount"')
        again.close()
    assert spent(path, book[:-9] + b"#" + book[-8:], None) is None
    damaged = Ledger(path)
    with pytest.raises(LedgerError, match="does not match its checksum"):
        damaged.repair(because="never mind")
    damaged.close()


def test_a_removed_ledger_is_told(written):
    """Whoever removes a ledger begins anew, and hears that the old one is not counted."""
    path, _ = written
    path.unlink()
    with pytest.warns(NewBook, match="was removed"):
        ledger = Ledger(path)
    ledger.open("flu", Terms(unit="user", total=1))
    ledger.charge("flu", charge(0))
    ledger.close()

    assert spent(path, path.read_bytes(), _head(path).read_bytes()) == Fraction(1, 8)


def test_one_file_by_many_names_is_one_book(tmp_path, monkeypatch):
    """Symlinks, hard links, relative names and two objects never make two books of one file."""
    (tmp_path / "deep").mkdir()
    real = tmp_path / "deep" / "book"
    first = Ledger(real)
    first.open("flu", Terms(unit="user", total=1))
    (tmp_path / "link").symlink_to(real)
    os.link(real, tmp_path / "hard")
    monkeypatch.chdir(tmp_path / "deep")
    others = [Ledger(tmp_path / "link"), Ledger("book"), Ledger(real)]
    monkeypatch.chdir("/")
    for step, ledger in enumerate(others):
        ledger.charge("flu", charge(step, "1/4"))
    assert {ledger.left("flu") for ledger in (first, *others)} == {Fraction(1, 4)}
    with pytest.raises(LedgerError, match=r"hard\.head, which says how far"):
        Ledger(tmp_path / "hard").report()

    other = tmp_path / "elsewhere"
    Ledger(other).open("flu", Terms(unit="user", total=1))
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(other)
    with pytest.raises(LedgerError, match="was replaced or removed while in use"):
        others[0].left("flu")


def test_a_ledger_exchanged_under_its_user_is_refused(tmp_path):
    """Deleted, made again, moved over by another, or its head taken away while it is open."""
    path = tmp_path / "book"
    ledger = Ledger(path)
    ledger.open("flu", Terms(unit="user", total=1))
    ledger.charge("flu", charge(0))
    old = path.read_bytes(), _head(path).read_bytes()
    ledger.charge("flu", charge(1))
    newest = _head(path).read_bytes()
    _head(path).unlink()
    with pytest.raises(LedgerError, match="was removed while it was in use"):
        ledger.charge("flu", charge(2))
    _head(path).write_bytes(newest)
    assert ledger.peak("flu") == Fraction(3, 8)  # it was written down, if not drawn
    path.unlink()
    with pytest.raises(LedgerError, match="replaced or removed"):
        ledger.charge("flu", charge(3))
    path.write_bytes(old[0])
    with pytest.raises(LedgerError, match="replaced or removed"):
        ledger.charge("flu", charge(3))


FORKED = """
import os, sys
from fractions import Fraction
from dpstream.errors import LedgerError
from dpstream.privacy.ledger.charges import Terms
from dpstream.privacy.ledger.ledger import Ledger
ledger = Ledger(sys.argv[1] if len(sys.argv) > 1 else None)
ledger.open("flu", Terms(unit="user", total=1))
if os.fork() == 0:
    try:
        ledger.peak("flu")
    except LedgerError as refusal:
        os._exit(7 if "fork" in str(refusal) else 8)
    os._exit(0)
assert ledger.peak("flu") == 0
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.parametrize("kept", [True, False])
def test_a_forked_child_has_no_book_of_its_own(tmp_path, kept):
    """A copy of a book in a child would be a second budget, in a file or in memory."""
    arguments = [tmp_path / "book"] if kept else []

    assert run_python(FORKED, *arguments).returncode == 7


def test_a_closed_ledger_says_so(tmp_path):
    """Using it after close is an error of its own, not of the system."""
    ledger = Ledger(tmp_path / "book")
    ledger.close()
    with pytest.raises(LedgerError, match="was closed; open it again"):
        ledger.report()


def test_a_copied_ledger_takes_its_head_along(written, tmp_path):
    """A copy without the head is refused in words that name it; with it, it is whole."""
    path, ages = written
    assert spent(path, *ages[-1]) == Fraction(5, 8)
    shutil.copy(path, tmp_path / "copy")
    with pytest.raises(LedgerError, match=r"copy\.head.* takes both files along"):
        Ledger(tmp_path / "copy").report()
    shutil.copy(_head(path), tmp_path / "copy.head")
    copy = Ledger(tmp_path / "copy")
    with pytest.raises(BudgetExceeded):
        copy.charge("flu", charge(9, 1))
    copy.close()
