"""Books of users on the command line: opened from a promise, shown with all they allow for."""

from fractions import Fraction

from dpstream.privacy.accounting.accountant import FloatError
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.query_spend import QuerySpend
from dpstream.privacy.state import MemoryWindowKeys

BOOK = ("ledger", "open", "--ledger", "book", "--dataset", "clicks", "--privacy-unit", "user")
COLUMNS = ("--privacy-unit-column", "user", "--time-column", "at")
PROMISE = (*BOOK, "--epsilon", "6", "--delta", "1e-9", "--privacy-unit-period", "1 day", *COLUMNS)


def test_a_promise_is_opened_charged_and_shown(run):
    """In epsilon first, then mu^2, tail and drift: what was spent of each."""
    assert "epsilon = 6, delta = 1e-09 for all rows with one 'user' and" in run(*PROMISE).out
    assert "epsilon: 0 of 6 spent, 6 left\n" in run("ledger", "book").out
    assert run(*PROMISE).code == 0
    ledger = Ledger("book")
    query = QuerySpend(
        run=bytes(16), query="urls", ledger=ledger, dataset="clicks", keys=MemoryWindowKeys()
    )
    error = FloatError(xi=Fraction(1, 1000), tau=Fraction(0))
    query.pay(mu_squared=Fraction(1, 4), delta_slack=Fraction(1, 10**10), error=error, digest="aa")
    ledger.close()
    shown = run("ledger", "show", "--ledger", "book").out
    (book,) = run("ledger", "show", "--ledger", "book", "--json").json

    for part in (
        "clicks: epsilon = 6, delta = 1e-09 for all rows",
        "epsilon: 2.97 of 6 spent, 5.03 left for further queries",
        "counted as mu_squared 0.25 of 0.912113, 1e-10 of 4.95e-10 of delta to find keys (tail)",
        "0.001 of 0.01 to round noise (drift)",
        "urls",
    ):
        assert part in shown
    assert book["tail"]["spent"] == book["spent_on"][0]["tail"] == "1/10000000000"
    assert (book["terms"]["period"], book["terms"]["epsilon"]) == ("1 day", "6")
    opened = run("ledger", "history", "--ledger", "book").out
    assert "opened: epsilon = 6, delta = " in opened
    assert "tail = 4.95e-10" in opened
    assert book["promise"].startswith("epsilon = 6, delta = ")
    assert book["epsilon"]["total"] == 6.0
    assert 0 < book["epsilon"]["spent"] < book["epsilon"]["total"]


def test_other_terms_are_refused(run):
    """Another delta, period or time zone for the same dataset; delta for single events."""
    run(*PROMISE)
    for other in (
        (*BOOK, "--epsilon", "6", "--delta", "1e-8", "--privacy-unit-period", "1 day", *COLUMNS),
        (*BOOK, "--epsilon", "6", "--delta", "1e-9", *COLUMNS[:2]),
        (*PROMISE, "--time-zone", "Europe/Zurich"),
    ):
        assert "promises mu_squared" in run(*other).err
    event = ("ledger", "open", "--ledger", "book", "--dataset", "flu", "--privacy-unit", "event")
    assert "--delta goes with" in run(*event, "--epsilon", "1", "--delta", "1e-9").err


def test_a_pipeline_file_stands_for_its_ledgers(run, folder):
    """Before the first run nothing was spent; afterwards its datasets are shown, and no others."""
    run("init")
    before = run("ledger", "pipeline.toml")
    assert before.code == 4
    assert "nothing was spent yet: there is no ledger at clicks.ledger, which pipeline.toml" in (
        before.err
    )
    other = (
        "--ledger",
        "clicks.ledger",
        "--dataset",
        "other",
        "--privacy-unit",
        "event",
        "--epsilon",
        "1",
    )
    run("ledger", "open", *other)
    assert run("run", "pipeline.toml", "--once").code == 0

    (book,) = run("ledger", "pipeline.toml", "--json").json
    assert book["dataset"] == "clicks"
    shown = run("ledger", "show", "pipeline.toml").out
    assert "clicks: epsilon = 4, delta = 1e-08 for all rows with one 'user' (forever)" in shown
    assert "epsilon: 2.13 of 4 spent, 3.27 left for further queries" in shown
    assert len(run("ledger", "clicks.ledger", "--json").json) == 2
    assert "other" not in run("ledger", "history", "pipeline.toml").out
    typo = run("ledger", "histroy")
    commands = "show, open, plan, grow, allow, void, history and repair"
    assert f"there is no ledger at histroy (the commands are {commands})" in typo.err
