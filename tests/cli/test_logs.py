"""Log lines for the operator: what they have, and that no value of the data is in them."""

import json
import re

import pytest

from dpstream.cli import run_command
from dpstream.operator_log import in_our_words

PIPELINE = '''
[source]
path = "clicks.csv"
[budget]
dataset = "clicks"
epsilon = 8
delta = 1e-5
[state]
path = "state"
[sink]
to = ["out/"]
[[query]]
name = "pages"
sql = """
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 8, delta = 1e-6, privacy_unit_column = user, max_groups_contributed = 1,
                time_unit = 's', start = TIMESTAMP '1970-01-01',
                end = TIMESTAMP '1970-01-01 03:00:00')
       page, window_start, COUNT(*) AS n, SUM(seconds, contribution_bounds_per_row => (0, 60)) AS s
FROM TUMBLE(clicks, DESCRIPTOR(at), INTERVAL '3' HOUR)
GROUP BY page, window_start
EMIT EVERY INTERVAL '1' HOUR
"""
'''
ROWS = 1237
VALUES = ("unitvalue", "keyvalue", "timevalue", "numbervalue", "7.7531")


@pytest.fixture
def pipeline(folder):
    """Rows whose every value can be told from all else, some of which cannot be used."""
    rows = [f"unitvalue{n % 400},keyvalue,{n},7.7531" for n in range(ROWS - 3)]
    bad = ["unitvalue,keyvalue,timevalue,1", "unitvalue,keyvalue,5,numbervalue", ",keyvalue,5,1"]
    (folder / "clicks.csv").write_text("\n".join(["user,page,at,seconds", *rows, *bad, ""]))
    path = folder / "pipeline.toml"
    path.write_text(PIPELINE)
    return path


def test_a_run_logs_every_release_and_no_value(run, pipeline):
    """As JSON, with the query and the release; rows are counted at debug alone."""
    done = run("run", str(pipeline), "--log-format", "json", "--log-level", "debug")

    lines = [json.loads(line) for line in done.err.splitlines()]
    released = [line for line in lines if line["message"] == "released"]
    assert done.code == 0
    assert [(line["query"], line["release_index"]) for line in released] == [
        ("pages", 1), ("pages", 2), ("pages", 3)
    ]  # fmt: skip
    assert {line["level"] for line in released} == {"info"}
    assert done.out == ""  # what is told once is enough
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    assert [value for value in VALUES if value in done.err] == []
    counts = [line for line in lines if f"{ROWS:,}" in line["message"]]
    assert [line["level"] for line in counts] == ["debug"]


def test_a_log_at_info_has_no_count_of_rows(run, pipeline):
    """Not even of those that were set aside; text has a record a line."""
    done = run("run", str(pipeline), "--log-level", "info")

    assert done.code == 0
    assert f"{ROWS:,}" not in done.err
    assert "dead letters" not in done.err
    lines = done.err.splitlines()
    stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO|WARNING) dpstream\.\w+ "
    assert all(re.match(stamp, line) for line in lines)
    assert sum("released query=pages release_index=" in line for line in lines) == 3


def test_without_the_options_there_are_notes_for_people(run, pipeline):
    """As before, with the counts and without the releases, which standard output has."""
    done = run("run", str(pipeline))

    assert all(line.startswith("note: ") for line in done.err.splitlines())
    assert f"{ROWS:,} rows read" in done.err
    assert "released" not in done.err


def test_an_end_is_logged_too(run, pipeline, monkeypatch):
    """Ours with its words and exit code; one that nobody foresaw by kind and place alone."""
    monkeypatch.setenv("DPSTREAM_LOG_FORMAT", "json")

    missing = run("run", "nowhere.toml")
    assert missing.code == 2
    assert missing.error["level"] == "error"
    assert missing.error["exit_code"] == 2
    assert "nowhere.toml" in missing.error["message"]

    def fail(*_, **__):
        raise ValueError("unitvalue1 is no number")

    monkeypatch.setattr(run_command, "_publish", fail)
    unexpected = run("run", str(pipeline))
    assert unexpected.code == 1
    assert unexpected.error["level"] == "critical"
    assert unexpected.error["exception"][-1] == "ValueError"
    assert "unitvalue" not in unexpected.err


@pytest.mark.parametrize(("option", "value"), [("--log-format", "xml"), ("--log-level", "loud")])
def test_a_log_that_there_is_not_is_refused(run, pipeline, option, value):
    """Before anything is read."""
    done = run("run", str(pipeline), option, value)

    assert done.code == 2
    assert f"{option} must be one of" in done.err
    assert not (pipeline.parent / "state").exists()


def test_words_that_are_not_ours_are_left_out():
    """A library's error may quote a row; the system's names a file."""
    assert in_our_words(KeyError("unitvalue")) == "KeyError"
    assert in_our_words(OSError(28, "No space left on device", "out/x")) == (
        "OSError: No space left on device: out/x"
    )
