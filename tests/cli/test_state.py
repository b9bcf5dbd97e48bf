"""State directories that were moved: refused until somebody vouches that there is no other."""

import shutil

import pytest

CLICKS = "user,page,at\n" + "".join(f"u{n},/{n % 2},{n % 7200}\n" for n in range(400))
PIPELINE = """
[source]
path = "clicks.csv"
[budget]
dataset = "clicks"
epsilon = 3
delta = 1e-5
[state]
path = "state/"
[sink]
to = "csv:out/"
"""
QUERY = '''
[[query]]
name = "{name}"
sql = """SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 1, delta = 1e-6, privacy_unit_column = user,
  max_groups_contributed = 1, max_rows_per_group = 1, time_column = at, time_unit = 's',
  start = TIMESTAMP '1970-01-01', end = TIMESTAMP '1970-01-01 02:00:00')
  page, COUNT(*) AS n FROM clicks GROUP BY page EMIT EVERY INTERVAL '1' HOUR"""
'''  # noqa: E501


@pytest.fixture
def moved(folder, run):
    """A pipeline of two queries whose state was copied elsewhere after a first trigger."""
    (folder / "clicks.csv").write_text(CLICKS)
    queries = QUERY.format(name="first") + QUERY.format(name="second")
    (folder / "pipeline.toml").write_text(PIPELINE + queries)
    assert run("run", "pipeline.toml", "--once").code == 0
    shutil.copytree(folder / "state", folder / "elsewhere")
    shutil.rmtree(folder / "state")
    (folder / "elsewhere").rename(folder / "state")
    return folder / "state"


def test_a_moved_state_is_refused_until_it_is_adopted(run, moved):
    """The refusal names the command; with a reason and the word, the run goes on."""
    refused = run("run", "pipeline.toml")
    assert refused.code == 4
    assert "dpstream state adopt" in refused.err
    unsaid = run("state", "adopt", "state", "--because", "new disk")
    assert unsaid.code == 2
    assert "--only-copy" in unsaid.err
    older = run("state", "adopt", "state", "--because", "new disk", "--only-copy")
    assert older.code == 2
    assert "--nothing-since" in older.err
    word = ("--only-copy", "--nothing-since")
    empty = run("state", "adopt", "state", "--because", " ", *word)
    assert empty.code == 2
    typo = run("state", "adopt", "state", "--because", "x", *word, "--ledger", "state/legder")
    assert "there is no ledger" in typo.err
    done = run("state", "adopt", "state", "--because", "new disk", *word, "--json", "--who", "ann")
    assert [one["directory"] for one in done.json["adopted"]] == ["state/first", "state/second"]
    assert run("run", "pipeline.toml").code == 0

    said = run("ledger", "history", "--ledger", "state/ledger").out
    assert said.count("was adopted by ann: new disk") == 2


def test_what_was_lost_on_the_way_is_not_adopted(run, moved):
    """An adoption vouches for the place, not for what is in it."""
    (moved / "first" / "inputs.log").unlink()
    done = run("state", "adopt", "state", "--because", "new disk", "--only-copy", "--nothing-since")

    assert done.code == 4
    assert "inputs.log is missing" in done.err


def test_nothing_to_adopt_is_said(run, folder):
    """A folder without a run, and a run without a ledger."""
    done = run("state", "adopt", ".", "--because", "x", "--only-copy", "--nothing-since")

    assert done.code == 4
    assert "holds no run" in done.err
