"""What a state directory refuses: other owners, copies, queries, secrets, books."""

import dataclasses
import os
import shutil
from contextlib import closing
from fractions import Fraction

import pytest

import dpstream as dps
from dpstream.connectors.memory import TableSource
from dpstream.errors import InvalidInput, LedgerError, SecretError, StateError
from dpstream.query.noise_plan import plan_query
from tests.support.fixed import SECRET
from tests.support.processes import run_in_fork
from tests.support.runs import break_off, charges, published, query, start, table, whole, write


@pytest.fixture
def place(tmp_path):
    """A run that was broken off."""
    write(tmp_path, table())
    break_off(tmp_path, 4)
    return tmp_path


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_one_directory_has_one_owner(tmp_path):
    """A second process is refused while the first runs, and disturbs nothing."""
    expected = whole(tmp_path / "whole")
    write(tmp_path / "run", table())
    running = iter(start(tmp_path / "run"))
    next(running)
    said = tmp_path / "said"

    def second():
        try:
            start(tmp_path / "run").finish()
        except StateError as refusal:
            said.write_text(str(refusal))

    assert run_in_fork(second) == 0
    assert "in use by another process" in said.read_text()
    list(running)
    assert published(tmp_path / "run") == expected


def test_two_first_starts_make_one_run(tmp_path):
    """Of two processes that begin together one is refused; there is one charge."""
    write(tmp_path, table())
    running = iter(start(tmp_path, fixed=False))
    next(running)
    with pytest.raises(StateError, match="in use"):
        next(iter(start(tmp_path, fixed=False)))
    list(running)

    assert charges(tmp_path / "state" / "ledger") == 1


def test_a_copy_is_refused(place):
    """Two copies would go on with the same noise over different data."""
    shutil.copytree(place / "state", place / "copy")
    before = published(place)
    with pytest.raises(StateError, match=r"copy|is not the one"):
        start(place, state=place / "copy").finish()

    assert published(place) == before


def test_of_two_copies_with_a_shared_book_one_goes_on(tmp_path):
    """The first that starts; its epoch in the ledger tells the other one that it is older."""
    expected = whole(tmp_path / "whole")
    write(tmp_path, table())
    book = {"ledger": tmp_path / "book"}
    break_off(tmp_path, 4, **book)
    shutil.copytree(tmp_path / "state", tmp_path / "copy")
    break_off(tmp_path, 2, state=tmp_path / "copy", **book)
    with pytest.raises(StateError, match="another copy of it has gone on since"):
        start(tmp_path, **book).finish()
    start(tmp_path, state=tmp_path / "copy", **book).finish()

    assert published(tmp_path) == expected


def test_a_copy_that_starts_stops_the_original(tmp_path):
    """A process that sees a newer epoch than its own draws nothing more."""
    write(tmp_path, table())
    book = {"ledger": tmp_path / "book"}
    running = iter(start(tmp_path, **book))
    next(running)
    shutil.copytree(tmp_path / "state", tmp_path / "copy")
    break_off(tmp_path, 2, state=tmp_path / "copy", sink=None, **book)
    with pytest.raises(StateError, match="was started again by another process"):
        list(running)

    start(tmp_path, state=tmp_path / "copy", **book).finish()
    assert published(tmp_path) == whole(tmp_path / "whole")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epsilon", 7),
        ("delta", 1e-6),
        ("allowed_lateness", "1 hour"),
        ("end", "1970-01-01T12:00"),
        ("max_groups_contributed", 4),
        ("max_rows_per_group", 1),
        ("privacy_unit_period", "8 hours"),
        ("min_change", 1.0),
        ("nonnegative", True),
        ("name", "visits"),
        ("aggregates", (dps.Count("clicks"),)),
        ("every", "30 minutes"),
    ],
)
def test_another_query_is_refused_by_name(place, field, value):
    """The error names what changed."""
    before = published(place)
    with pytest.raises(StateError, match=rf"another query: {field} was .* and is now"):
        start(place, query(**{field: value})).finish()

    assert published(place) == before


def test_another_dataset_is_refused(place):
    """The charge was made in a certain book."""
    with pytest.raises(StateError, match="dataset was 'stream' and is now 'other'"):
        start(place, dataset="other").finish()


def test_another_secret_is_refused(place):
    """It would mean other noise over data already published."""
    with pytest.raises(StateError, match="another secret"):
        start(place, secret=SECRET[::-1]).finish()
    with pytest.raises(SecretError, match="no secret"):
        start(place, secret=None).finish()


def test_a_lost_secret_is_not_replaced(tmp_path):
    """A new one beside an old directory would publish a second noisy copy."""
    write(tmp_path, table())
    break_off(tmp_path, 4, fixed=False)
    (tmp_path / "state.secret").unlink()
    with pytest.raises(SecretError, match="restore it from your backup"):
        start(tmp_path, fixed=False).finish()


def test_another_ledger_is_refused(place):
    """A run goes on with the book it is charged to."""
    dps.Ledger(place / "another").close()
    with pytest.raises(StateError, match=r"is not the file that .* is charged to"):
        start(place, ledger=place / "another").finish()


def test_a_ledger_rolled_back_is_refused(tmp_path):
    """The log knows where the ledger ended."""
    book = tmp_path / "book"
    write(tmp_path, table())
    break_off(tmp_path, 4, ledger=book)
    whole = book.read_bytes()
    os.truncate(book, whole.rindex(b"\n", 0, whole.index(b'"amount"')) + 1)  # the same file
    with pytest.raises(LedgerError, match="shorter than it was"):
        start(tmp_path, ledger=book).finish()
    accepted = dps.Ledger(book)
    accepted.repair(because="the charge is lost")
    accepted.close()
    with pytest.raises(StateError, match="lacks charges that"):
        start(tmp_path, ledger=book).finish()


def test_a_ledger_that_was_passed_in_stays_open(tmp_path):
    """It is the caller's; a second query goes on with it."""
    terms = plan_query(query()).terms()
    book = dps.Ledger(tmp_path / "book")
    book.open("stream", larger(terms))
    write(tmp_path, table())
    start(tmp_path, ledger=book).finish()
    start(
        tmp_path,
        query(name="again"),
        ledger=book,
        fixed=False,
        state=tmp_path / "two",
    ).finish()

    assert charges(tmp_path / "book") == 2


def larger(terms):
    """Room for two such queries."""
    return dataclasses.replace(
        terms,
        total=2 * terms.total,
        delta_slack=2 * terms.delta_slack,
        rounding_slack=2 * terms.rounding_slack,
    )


def test_a_book_without_room_leaves_nothing(tmp_path):
    """BudgetExceeded leaves no litter; with a larger book the second attempt works."""
    write(tmp_path, table())
    start(tmp_path, fixed=False, ledger=tmp_path / "book", sink=None).finish()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "precious.txt").write_text("mine")
    (tmp_path / "out").mkdir()
    before = files(tmp_path)
    small = {"fixed": False, "ledger": tmp_path / "book"}
    for state in ("two", "work"):
        with pytest.raises(dps.BudgetExceeded):
            start(tmp_path, **small, state=tmp_path / state).finish()
        assert files(tmp_path) == before

    dps.Ledger(tmp_path / "larger").open("stream", larger(plan_query(query()).terms()))
    large = {"fixed": False, "ledger": tmp_path / "larger"}
    start(tmp_path, **large, state=tmp_path / "two").finish()
    assert published(tmp_path)


def test_a_refusal_leaves_a_book_that_others_may_have_charged(tmp_path):
    """Between making it and the refusal others may have used it: it is never removed."""
    write(tmp_path, table())

    class Charging(TableSource):
        def read(self, *where, **how):
            if not (tmp_path / "state" / "run.dps").exists():  # a look at the first rows
                return super().read(*where, **how)
            with closing(dps.Ledger(tmp_path / "state" / "ledger")) as book:
                book.open("other", plan_query(query()).terms())
            raise InvalidInput("a column has gone")

    with pytest.raises(InvalidInput, match="a column has gone"):
        dps.run(query(), source=Charging(table()), state=tmp_path / "state", secret=SECRET).finish()
    with closing(dps.Ledger(tmp_path / "state" / "ledger")) as book:
        assert "other" in [each["dataset"] for each in book.report()]


def test_a_refusal_frees_the_directory(tmp_path):
    """A killed start, then no room in the book, then a book with room: nothing stays locked."""
    write(tmp_path, table())
    book = dps.Ledger(tmp_path / "book")
    terms = plan_query(query()).terms()
    book.open("stream", dataclasses.replace(terms, total=Fraction(1, 10**9)))
    kept = []
    for _ in range(2):
        with pytest.raises(dps.BudgetExceeded) as refusal:
            start(tmp_path, ledger=tmp_path / "book").finish()
        kept.append(refusal)  # a traceback that somebody keeps must not keep the lock
    start(tmp_path).finish()

    assert published(tmp_path)


def test_a_source_that_fails_is_not_a_state_that_cannot_be_written(tmp_path):
    """What its own file system says reaches the operator."""

    class Unmounted(TableSource):
        asked = 0

        def partitions(self):
            self.asked += 1
            if self.asked > 1:  # gone since the run was made
                raise FileNotFoundError("/mnt/clicks is gone")
            return super().partitions()

    with pytest.raises(FileNotFoundError, match="/mnt/clicks is gone"):
        dps.run(
            query(), source=Unmounted(table()), state=tmp_path / "state", secret=SECRET
        ).finish()
