"""Books of users on the command line: opened from a promise, shown with all they allow for."""

from fractions import Fraction

import pytest

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
    query.pay(amount=Fraction(1, 4), delta_slack=Fraction(1, 10**10), error=error, digest="aa")
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
    commands = "show, open, plan, grow, allow, end, void, move, history and repair"
    assert f"there is no ledger at histroy (the commands are {commands})" in typo.err


DAILY = """
    SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (
        privacy_unit_column = user, privacy_unit_period = INTERVAL '1' DAY, epsilon = 5.5,
        delta = 1e-9, max_groups_contributed = 1, public_groups = ['a', 'b'],
        start = TIMESTAMP '{}', end = TIMESTAMP '{}') page, COUNT(*) AS n
    FROM TUMBLE(clicks, at, INTERVAL '1' DAY) GROUP BY page, window_start, window_end
"""


def daily(run, state, start, end, *more):
    """A daily query over a week of rows, charged to the book of a promise of 6."""
    text = DAILY.format(start, end)
    ledger = ("--ledger", "book", "--dataset", "clicks", "--name", "daily")
    return run("sql", text, "--source", "clicks=clicks.csv", "--state", state, *ledger, *more)


def test_a_lost_state_goes_on_with_the_next_day_at_no_cost(run, folder):
    """It is refused at first, with the way out; then the old run is ended, also if its state turns
    up, and the operator is told what was dropped and what a person has lost."""
    lines = [f"u{n},{'ab'[n % 2]},2024-05-{1 + n % 7:02d}T10:00\n" for n in range(70)]
    (folder / "clicks.csv").write_text("user,page,at\n" + "".join(lines))
    run(*PROMISE)
    assert daily(run, "one", "2024-05-01", "2024-05-04").code == 0
    (folder / "one").rename(folder / "lost")
    refused = daily(run, "two", "2024-05-02", "2024-05-08")
    assert refused.code != 0
    assert "--take-over" in refused.err
    assert "from 2024-05-04T00:00:00+00:00 on there is room for it" in refused.err
    assert not (folder / "two").exists()

    (folder / "out").mkdir()
    (folder / "out" / ".daily.run").write_text("of the other run")
    full = daily(run, "two", "2024-05-02", "2024-05-08", "--take-over", "--sink", "out/")
    assert "holds releases of 'daily' from another run; use another sink" in full.err
    assert "or move daily-w*.parquet and .daily.run away, and start again" in full.err
    assert "put a backup of it back (dpstream state restore)" in full.err
    assert not (folder / "two").exists()
    (folder / "out" / ".daily.run").rename(folder / "away")
    taken = daily(run, "two", "2024-05-02", "2024-05-08", "--take-over", "--sink", "out/")
    assert taken.code == 0, taken.err
    assert "takes over" not in daily(run, "two", "2024-05-02", "2024-05-08", "--take-over").err
    assert "it begins with the window of 2024-05-04T00:00:00+00:00" in taken.err
    assert "30 outside the range" in taken.err
    assert "5.5" in taken.err
    (folder / "lost").rename(folder / "one")
    assert "ended for good by" in daily(run, "one", "2024-05-01", "2024-05-04").err

    shown = run("ledger", "book").out
    assert "6 left in periods that have not begun" in shown
    assert "any one user, by the noise alone: at most epsilon = " in shown
    assert "within 7 days" in shown
    (book,) = run("ledger", "show", "book", "--json").json
    old, new = sorted(book["spent_on"], key=lambda line: line["periods"])
    assert (old["periods"], old["ended"]) == ([19844, 19846], True)
    assert (new["periods"], new["ended"]) == ([19847, 19850], False)
    told = run("ledger", "history", "book").out
    assert "was ended for good by" in told
    assert "draws for units up to the period of 2024-05-03T00:00:00+00:00 (3 entries" in told
    assert "ended for good" in shown
    assert "takes over" in shown


def test_a_pipeline_says_which_period_its_book_protects(run, folder):
    """Queries of several periods need it; without it the way out is named."""
    (folder / "clicks.csv").write_text("user,page,at\nu1,a,2024-05-01T10:00\n")
    text = DAILY.format("2024-05-01", "2024-05-04").replace("epsilon = 5.5", "epsilon = 1")
    weekly = text.replace("'1' DAY, epsilon", "'7' DAY, epsilon")
    budget = '[budget]\ndataset = "clicks"\nepsilon = 6\ndelta = 1e-9\n'
    rest = '[source]\npath = "clicks.csv"\n[state]\npath = "state"\n'
    for name, query in (("daily", text), ("weekly", weekly)):
        rest += f'[[query]]\nname = "{name}"\nsql = """{query}"""\n'
    (folder / "p.toml").write_text(budget + rest)
    assert "privacy_unit_period = '1 day'" in run("run", "p.toml").err
    (folder / "p.toml").write_text(budget + 'privacy_unit_period = "1 day"\n' + rest)
    done = run("run", "p.toml")
    assert done.code == 0, done.err
    (book,) = run("ledger", "show", "state/ledger", "--json").json
    daily, weekly = sorted(book["spent_on"], key=lambda line: line["query"])
    weeks, days = (float(Fraction(line["amount"])) for line in (weekly, daily))
    assert weeks == pytest.approx(2 * days, rel=1e-6)  # but for what floats take of each
    (folder / "p.toml").write_text(budget + 'privacy_unit_period = "36 hours"\n' + rest)
    assert "one is not made of whole ones of the other" in run("run", "p.toml").err
