"""A book in memory that a kept run is charged to: it moves to a file, and stays one book."""

from dataclasses import replace

import pytest

import dpstream as dps
from dpstream.errors import BudgetExceeded, LedgerError, StateError
from dpstream.query.noise_plan import plan_query
from tests.engines.test_series import log, text
from tests.support.runs import SHORT, table

SERIES = dps.sql(text(mechanism="uniform"))
OPENED = {"users": plan_query(SHORT).terms(), "series": SERIES.starting(0).terms()}

_more = {name: 4 * getattr(OPENED["users"], name) for name in ("total", "delta_slack")}
ROOMY = replace(OPENED["users"], rounding_slack=4 * OPENED["users"].rounding_slack, **_more)


def opened(kind):
    """A book in memory with room for one query of its kind."""
    book = dps.Ledger()
    book.open("stream", OPENED[kind])
    return book


def start(kind, place, book, engine=None):
    query, rows = (SHORT, table()) if kind == "users" else (SERIES, log())
    return dps.run(query, source=rows, ledger=book, state=place, engine=engine)


@pytest.mark.parametrize("kind", ["users", "series"])
def test_a_second_run_meets_the_first_ones_charges(tmp_path, kind):
    """Two state directories, one book: the second run is refused, and so is one without any."""
    book = opened(kind)
    start(kind, tmp_path / "one", book).finish()

    assert book.path == tmp_path / "one" / "ledger"
    assert book.left("stream") == 0
    for place in (tmp_path / "two", None):
        with pytest.raises(BudgetExceeded):
            start(kind, place, book).finish()


def test_it_is_so_on_every_engine(tmp_path, engine):
    """The engines keep one kind of state directory, and one book."""
    book = opened("users")
    start("users", tmp_path / "one", book, engine).finish()

    assert book.left("stream") == 0
    with pytest.raises(BudgetExceeded):
        start("users", tmp_path / "two", book, engine).finish()


def test_a_run_takes_over_on_every_engine(tmp_path, engine):
    """From a run that was broken off in its first period; the second one is drawn once."""
    book = opened("users")
    lost = start("users", tmp_path / "one", book, engine)
    whole = {table["window_start"][0].as_py() for table in lost if len(table)}
    (told,) = book.report()
    assert (told["spent_on"][0]["periods"], told["spent_on"][0]["begun"]) == ([0, 1], 1)
    assert len(whole) == 2

    book = opened("users")
    lost = start("users", tmp_path / "two", book, engine)
    lost.open()
    spend = lost._charge()
    spend.begin(0)
    spend.grant_keys([0])
    lost.close()
    rows = {"source": table(), "ledger": book, "engine": engine, "take_over": True}
    taken = dps.run(SHORT, state=tmp_path / "three", **rows)
    windows = {release["window_start"][0].as_py() for release in taken if len(release)}
    (told,) = book.report()

    assert windows == whole - {min(whole)}
    assert sorted(line["periods"] for line in told["spent_on"]) == [[0, 0], [1, 1]]
    with pytest.raises(StateError, match="ended for good"):
        list(start("users", tmp_path / "two", book, engine))


@pytest.mark.parametrize("kind", ["users", "series"])
@pytest.mark.parametrize("named", ["new", "opened", "path", "none"])
def test_a_restart_finds_its_book(tmp_path, kind, named):
    """A new Ledger() goes on in the file that the state is charged to, and nothing is charged."""
    run = start(kind, tmp_path / "one", opened(kind))
    first = [next(iter(run)) for _ in range(2)]
    run.close()
    path = tmp_path / "one" / "ledger"
    book = {"new": dps.Ledger(), "opened": opened(kind), "path": path, "none": None}[named]
    again = start(kind, tmp_path / "one", book)
    tables = list(again)
    spent = dps.Ledger(path).report()[0]

    assert [table for table in tables if table.equals(first[-1])]
    assert spent["runs"] == 1
    if isinstance(book, dps.Ledger):
        assert book.path == path


@pytest.mark.parametrize("kind", ["users", "series"])
def test_two_charged_books_are_not_one(tmp_path, kind):
    """A book with charges of its own is refused by a state that is charged to another."""
    start(kind, tmp_path / "one", opened(kind)).finish()
    other = opened(kind)
    start(kind, None, other).finish()
    with pytest.raises(LedgerError, match="two cannot become one"):
        start(kind, tmp_path / "one", other).finish()


@pytest.mark.parametrize("kind", ["users", "series"])
def test_a_state_whose_book_is_gone_is_refused(tmp_path, kind):
    """It lay in the directory of another run, which was thrown away."""
    book = dps.Ledger()
    terms = OPENED[kind]
    slacks = {name: getattr(terms, name) * 9 for name in ("delta_slack", "rounding_slack")}
    book.open("stream", replace(terms, total=9, **slacks))
    for name in ("one", "two"):
        start(kind, tmp_path / name, book).finish()
    for file in ("ledger", "ledger.head"):
        (tmp_path / "one" / file).unlink()
    with pytest.raises(StateError, match=r"one/ledger is missing, and its run may be charged"):
        start(kind, tmp_path / "two", dps.Ledger()).finish()


def test_queries_that_run_together_move_their_book_to_their_directory(tmp_path):
    """`run_all` keeps a book in memory where it keeps its own, also after a restart."""
    both = [dps.sql(text(mechanism="uniform", epsilon=0.5), name=name) for name in "ab"]
    for _ in range(2):
        book = opened("series")
        dps.run_all(both, source=log(), ledger=book, state=tmp_path / "s").finish()
        assert book.path == tmp_path / "s" / "ledger"
        assert book.report()[0]["runs"] == 2
    assert book.left("stream") == 0


def test_a_refused_first_run_leaves_the_book_where_it_is(tmp_path):
    """What was charged before is not taken back with the state directory of a refused run."""
    book = opened("users")
    start("users", None, book).finish()
    with pytest.raises(BudgetExceeded):
        start("users", tmp_path / "one", book).finish()
    with pytest.raises(BudgetExceeded):
        start("users", tmp_path / "one", book).finish()

    assert book.left("stream") == 0


def test_a_take_over_ends_runs_of_the_same_analyst_alone(tmp_path):
    """Two teams may have queries of one name."""
    book = dps.Ledger()
    book.open("stream", ROOMY)
    for who in ("ann", "bob"):
        book.allow("stream", who, because="a test", who="root")
        first = dps.run(SHORT, source=table(), ledger=book, state=tmp_path / who, analyst=who)
        next(iter(first))
        first.close()
    rows = {"source": table(), "ledger": book, "take_over": True, "analyst": "bob"}
    dps.run(SHORT, state=tmp_path / "new", **rows).finish()
    (told,) = book.report()
    ended = {book.known(line["run"]).analyst for line in told["spent_on"] if line["ended"]}

    assert ended == {"bob"}


def test_a_state_that_was_begun_otherwise_takes_nothing_over(tmp_path):
    """It has noted where it begins: that is said, and nothing is charged a second time."""
    book = dps.Ledger()
    book.open("stream", ROOMY)
    start("users", tmp_path / "one", book).finish()
    begun = start("users", tmp_path / "two", book)
    begun.open()
    begun.close()
    rows = {"source": table(), "ledger": book, "take_over": True}
    with pytest.raises(StateError, match="begun without a take-over"):
        dps.run(SHORT, state=tmp_path / "two", **rows)
