"""Changes of a book on the command line: its budget, its analysts, what is given back, a plan."""

import re
import shlex

import pytest

from dpstream.privacy.state.run_directory import RunDirectory

PIPELINE = '''
[source]
path = "clicks.csv"
[budget]
dataset = "clicks"
epsilon = 2
delta = 1e-8
ledger = "book"
[state]
path = "{state}/"
[sink]
to = ["{state}-out/"]
[[query]]
name = "pages"
{analyst}
sql = """
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 1, delta = 1e-9, privacy_unit_column = user, max_groups_contributed = 1,
                public_groups = ['home'])
       page, COUNT(*) AS visitors FROM clicks GROUP BY page
"""
'''


@pytest.fixture
def write(folder):
    """Write the pipeline file; with another state directory it is another run."""
    (folder / "clicks.csv").write_text("user,page\n" + "".join(f"{n},home\n" for n in range(9)))

    def write(state="state", analyst="", **changes):
        text = PIPELINE.format(state=state, analyst=analyst)
        for old, new in changes.values():
            assert old in text
            text = text.replace(old, new)
        (folder / "pipeline.toml").write_text(text)

    write()
    return write


WINDOWS = (
    "FROM clicks GROUP BY page",
    "FROM TUMBLE(clicks, DESCRIPTOR(at), INTERVAL '1' DAY) GROUP BY page, window_start",
)
GROW = {"budget": ("epsilon = 2", "epsilon = 4")}


def test_a_file_with_another_budget_names_the_command_that_gives_it_to_the_book(run, write):
    """And that command works as it stands; the book that is opened is told, with its budget."""
    opened = run("run", "pipeline.toml")
    assert opened.code == 0
    assert "opened the book 'clicks' (in book) with epsilon = 2, delta = 1e-08 for" in opened.err
    write(**GROW)
    refused = run("run", "pipeline.toml")
    assert refused.code == 4
    assert "says epsilon = 4, delta = 1e-08; the book 'clicks' (in book) has epsilon = 2" in (
        refused.err
    )
    command = shlex.split(re.search(r"dpstream (ledger grow .*)", refused.err)[1])
    grown = run(*command[:-1], "agreed", "--who", "ana")
    assert "epsilon = 4, delta = 1e-08 for" in grown.out

    again = run("run", "pipeline.toml")
    assert (again.code, "opened the book" in again.err) == (0, False)
    assert "by ana: epsilon = 4, delta = 1e-08 from now on (agreed)" in run("ledger", "book").out
    assert "by ana: agreed" in run("ledger", "history", "book").out
    write(state="other")
    assert "--epsilon 2 --delta 1e-08" in run("run", "pipeline.toml").err
    less = run("ledger", "grow", "book", "--epsilon", "0.5", "--because", "less", "--json")
    assert (less.code, less.error["error"]) == (3, "BudgetExceeded")
    words = r"epsilon = 0\.[6-9]\d* \(mu_squared = \S+\) is spent .* is epsilon = 0\.5 \(mu_sq"
    assert re.search(words, less.error["message"]), less.error


def test_a_plan_spends_and_writes_nothing(run, write, folder):
    """What fits, how many more, until when, and what another epsilon would do."""
    before = sorted(folder.iterdir())
    plan = run("ledger", "plan", "pipeline.toml", "--further", "0.5", "--every", "1 month").out
    assert sorted(folder.iterdir()) == before
    for part in ("pages", "fits", "further queries of epsilon = 0.5 that fit:", "does not fit"):
        assert part in plan
    assert "pages at epsilon = 0.5: noise times 1.9" in plan
    run("ledger", "plan", "pipeline.toml", "--plot", "plan.svg")
    assert (folder / "plan.svg").read_text().startswith("<?xml")
    (book,) = run("ledger", "plan", "pipeline.toml", "--json").json["books"]
    (query,) = book["queries"]
    assert (query["state"], book["period"]) == ("fits", "forever")

    larger = ("ledger", "plan", "pipeline.toml", "--set", "pages=3", "--query", "pages")
    assert "the book runs out: now: pages would be refused" in run(*larger).out
    assert "has no query 'page'" in run(*larger[:-1], "page").err
    assert run("run", "pipeline.toml").code == 0
    (after,) = run("ledger", "plan", "pipeline.toml", "--json").json["books"]
    assert after["queries"][0]["state"] == "charged"
    assert (
        after["left"]
        == book["left"]
        == {
            "amount": run("ledger", "book", "--json").json[0]["left"],
            "epsilon": book["left"]["epsilon"],
        }
    )


def test_an_analysts_share_is_refused_before_a_row_is_read(run, write, folder):
    """The file or --who says who asks; the refusal says whose share is used up."""
    assert run("run", "pipeline.toml").code == 0
    allow = ("ledger", "allow", "book", "--because", "agreed", "--analyst")
    shown = run(*allow, "ana", "--share", "0.1", "--largest", "1").out
    assert re.search(r"ana +0.1 +epsilon = 1 +epsilon = 0 ", shown)
    write(state="two")
    assert "may be charged by 'ana', and nobody is said to ask" in run("run", "pipeline.toml").err
    write(state="two", analyst='analyst = "ana"')
    refused = run("run", "pipeline.toml")
    assert refused.code == 3
    assert "the share of 'ana', 0.1 of the book, is used up" in refused.err
    assert "nothing was read" in refused.err
    run(*allow, "ana", "--share", "0.5", "--largest", "1")
    assert run("run", "pipeline.toml").code == 0

    write(state="three", change=("(epsilon = 1,", "(epsilon = 1.2,"))
    assert "one query of 'ana' may cost epsilon = 1" in run(
        "run", "pipeline.toml", "--who", "ana"
    ).err  # fmt: skip
    (book,) = run("ledger", "book", "--json").json
    assert [line.get("analyst") for line in book["spent_on"]].count("ana") == 1


def test_a_run_that_was_charged_and_never_began_is_voided(run, write, monkeypatch):
    """Its state is refused from then on; the room is there for another."""

    def cut_off(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "record", cut_off)
        assert run("run", "pipeline.toml").code == 130
    (book,) = run("ledger", "book", "--json").json
    (line,) = book["spent_on"]
    assert book["spent"] != "0"
    void = ("ledger", "void", line["run"][:8], "book", "--because", "the wrong query")
    assert "is given back, and the run is ended for good" in run(*void).out
    assert run("ledger", "book", "--json").json[0]["spent"] == "0"
    late = run("run", "pipeline.toml")
    assert late.code == 4
    assert "ended for good" in late.err

    write(state="new")
    assert run("run", "pipeline.toml").code == 0
    (line,) = run("ledger", "book", "--json").json[0]["spent_on"]
    begun = run("ledger", "void", line["run"][:8], "--ledger", "book", "--because", "too late")
    assert begun.code == 4
    assert "cannot be taken back" in begun.err
    assert "names 0 runs" in run("ledger", "void", "zz", "book", "--because", "typo").err


DAILY = """max_groups_contributed = 1, privacy_unit_period = INTERVAL '1' DAY, time_column = at,
                time_unit = 's', start = TIMESTAMP '1970-01-01', end = TIMESTAMP '1970-01-31',"""


def test_a_run_whose_state_is_lost_is_ended_and_frees_what_it_has_not_begun(run, write, folder):
    """A run of days that nothing takes over from would keep its share of every day to come."""
    rows = "".join(f"{n},home,{day * 86_400 + n}\n" for day in (0, 1) for n in range(9))
    (folder / "clicks.csv").write_text("user,page,at\n" + rows)
    write(period=("max_groups_contributed = 1,", DAILY), where=WINDOWS)
    assert run("run", "pipeline.toml", "--once").code == 0
    (book,) = run("ledger", "book", "--json").json
    (line,) = book["spent_on"]
    ended = ("ledger", "end", line["run"][:8], "book", "--because", "its disk died", "--who", "ann")
    assert "is ended for good; what it has begun stays spent" in run(*ended).out
    (after,) = run("ledger", "book", "--json").json

    assert after["spent"] == book["spent"]
    year = [each["people"][-1]["mu_squared"] for each in (book, after)]
    assert year[1] <= year[0] / 10  # of 30 days at most three were begun
    again = run(*ended)
    assert (again.code, "ended for good before, by ann: its disk died" in again.err) == (4, True)
    assert "names 0 runs" in run("ledger", "end", "zz", "book", "--because", "typo").err
    late = run("run", "pipeline.toml")
    assert (late.code, "ended for good" in late.err) == (4, True)


def test_bounds_leave_the_budget_to_whoever_opens_the_book(run, write):
    """They open it, say so, and are counted in the budget of the pipeline that comes after."""
    asked = PIPELINE.partition('sql = """')[2].partition('"""')[0]
    bounds = ("bounds", asked, "--source", "clicks=clicks.csv", "--state", "looked")
    proposed = run(*bounds, "--epsilon", "0.1", "--ledger", "book", "--dataset", "clicks")
    assert "whoever opens it next sets its budget" in proposed.err
    assert run("run", "pipeline.toml").code == 0
    (book,) = run("ledger", "book", "--json").json
    assert book["promise"].startswith("epsilon = 2, delta = 1e-08")
    assert {line["query"].split()[0] for line in book["spent_on"]} == {"bounds", "pages"}


def test_a_book_must_be_named_if_there_are_several(run, write):
    """And a ledger must be there: nothing is made by a change."""
    grow = ("--epsilon", "4", "--because", "agreed")
    assert "there is no ledger at book" in run("ledger", "grow", "pipeline.toml", *grow).err
    for name in ("clicks", "other"):
        terms = ("--privacy-unit", "event", "--epsilon", "1")
        run("ledger", "open", "--ledger", "book", "--dataset", name, *terms)
    assert "which book is meant? name it: --dataset; book has clicks, other" in run(
        "ledger", "grow", "book", *grow
    ).err  # fmt: skip
    assert "the book 'other' has epsilon = 4" in run(
        "ledger", "grow", "book", *grow, "--dataset", "other"
    ).out  # fmt: skip


def test_a_series_is_asked_for_by_somebody_too(run, visits):
    """A share of a book of steps is of every window."""
    book = ("--ledger", "book", "--dataset", "flu")
    terms = ("--privacy-unit", "w_event", "--window", "2", "--epsilon", "2")
    run("ledger", "open", *book, *terms)
    run("ledger", "allow", "book", "--analyst", "ana", "--share", "0.5", "--because", "agreed")
    release = ("release", str(visits), "--mechanism", "sample", "--window", "2", *book)
    assert "'eve' is none of them" in run(*release, "--epsilon", "1", "--who", "eve").err
    assert run(*release, "--epsilon", "1", "--who", "ana").code == 0
    assert "the share of 'ana', 0.5 of the book" in run(
        *release, "--epsilon", "0.1", "--who", "ana"
    ).err  # fmt: skip


def test_a_plan_and_a_check_know_who_asks(run, write):
    """A book with shares refuses who is not named, and takes who is."""
    run("run", "pipeline.toml")
    run("ledger", "allow", "book", "--analyst", "ana", "--share", "0.9", "--because", "agreed")
    write(state="other")
    assert "nobody is said to ask" in run("check", "pipeline.toml").out
    write(state="other", analyst='analyst = "ana"')
    assert "it fits" in run("check", "pipeline.toml").out
