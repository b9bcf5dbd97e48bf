"""Everything that leaves a run, searched for raw values that were planted in its input.

`docs/threat-model.md` lists what leaves the process. What it calls public or paid must hold nothing
of one unit; what it calls operator-only may, and must be readable by its owner alone.
"""

import io
import json
import logging
import re
import sqlite3
import stat
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest

import dpstream as dps
from dpstream.cli import main

ROOT = Path(__file__).resolve().parents[2]
UNIT, KEY, VALUE = "zebra-unit-8841", "okapi-page-5527", "739182645"
BAD = "quagga-text-3306"  # where a number should be
PLANTED = (UNIT, KEY, VALUE, BAD)

PIPELINE = """
[source]
path = "raw/clicks.csv"
[budget]
dataset = "clicks"
ledger = "clicks.ledger"
epsilon = 8
delta = 1e-3
[state]
path = "state/"
[sink]
to = ["out/", "out.sqlite"]
[[query]]
name = "pages"
sql = '''SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 4, delta = 1e-4,
    privacy_unit_column = user, max_groups_contributed = 2, time_column = at, time_unit = 's',
    start = '2024-05-01', end = '2024-05-02')
    page, COUNT(*) AS visits, SUM(seconds, contribution_bounds_per_row => (0, 600)) AS seconds
    FROM clicks GROUP BY page EMIT EVERY INTERVAL '6' HOUR'''
"""


def clicks(folder, planted):
    """Many visitors of one page, and one unit that is alone with its page, its value, its row."""
    rng, start = np.random.default_rng(0), 1714521600
    rows = [f"u{n},home,{start + int(rng.integers(86400))},{n % 60}" for n in range(900)]
    if planted:
        rows[451:451] = [
            f"{UNIT},{KEY},{start + 3000},{VALUE}",
            f"{UNIT},{KEY},{start + 30000},{BAD}",
            f"{UNIT},home,{BAD},12",
        ]
    (folder / "raw").mkdir(parents=True)
    (folder / "raw" / "clicks.csv").write_text("user,page,at,seconds\n" + "\n".join(rows) + "\n")
    (folder / "pipeline.toml").write_text(PIPELINE)


def executed(folder, monkeypatch, *words):
    """Stdout, stderr, log records and warnings of one command."""
    monkeypatch.chdir(folder)
    for name in ("DPSTREAM_LEDGER", "DPSTREAM_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    out, err, logged = io.StringIO(), io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(logged)
    logging.getLogger().addHandler(handler)
    monkeypatch.setattr(logging.getLogger(), "level", logging.DEBUG)
    with warnings.catch_warnings(record=True) as warned, redirect_stdout(out):
        warnings.simplefilter("always")
        with redirect_stderr(err), pytest.raises(SystemExit) as left:
            main([*words])
    logging.getLogger().removeHandler(handler)
    assert left.value.code == 0, err.getvalue()
    return {
        "stdout": out.getvalue(),
        "stderr": err.getvalue(),
        "logs": logged.getvalue(),
        "warnings": " ".join(str(one.message) for one in warned),
    }


def spellings(text):
    """A value as bytes: plain, hex, and as the numbers that a file might hold."""
    found = [text.encode(), text.encode().hex().encode(), text.encode("utf-16-le")]
    if text.isdigit():
        number = int(text)
        found += [number.to_bytes(size, order) for size in (4, 8) for order in ("little", "big")]
        found += [np.float64(number).tobytes()]
    return found


def files(folder, *parts):
    """Every file below these parts: name and content, tables also as text."""
    for part in parts:
        top = folder / part
        assert top.exists(), f"the run has made no {part}"
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if not path.is_file():
                continue
            yield str(path.relative_to(folder)), path.read_bytes()
            if path.suffix == ".parquet":
                import pyarrow.parquet as pq

                yield f"{path.name} as rows", str(pq.read_table(path).to_pylist()).encode()


def leaks(named):
    """(where, what) of every planted value."""
    return [
        (where, value)
        for where, content in named
        for value in PLANTED
        for spelling in spellings(value)
        if spelling in where.encode() or spelling in content
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same pipeline with and without the planted unit."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for planted in (True, False):
            folder = tmp_path_factory.mktemp("planted" if planted else "plain")
            clicks(folder, planted)
            found[planted] = folder, executed(folder, patch, "run", "pipeline.toml", "--json")
    return found


OPERATOR = ("state", "state.secret", "clicks.ledger")


def test_nothing_planted_is_published(runs):
    """Sinks, standard output, logs and warnings hold no trace of the unit."""
    folder, streams = runs[True]
    public = [(name, text.encode()) for name, text in streams.items() if name != "stderr"]
    public += [*files(folder, "out", "out.sqlite")]
    with sqlite3.connect(folder / "out.sqlite") as database:
        public.append(("out.sqlite as text", "\n".join(database.iterdump()).encode()))

    assert any("out/" in where for where, _ in public)
    assert leaks(public) == []


def test_standard_error_names_no_value(runs):
    """The operator's summary has counts, marked as not private, and no values."""
    _, streams = runs[True]

    assert leaks([("stderr", streams["stderr"].encode())]) == []


def test_the_search_can_find(runs):
    """Control: the same search finds the values where they may be, in the operator's files."""
    folder, _ = runs[True]
    where = {place for place, _ in leaks(files(folder, "raw", "state"))}

    assert "raw/clicks.csv" in where
    assert any("dead" in place for place in where)


def test_names_and_numbers_of_files_do_not_depend_on_the_unit(runs):
    """Which tables there are, and what they are called, follows from the schedule."""
    names = []
    for folder, _ in runs.values():
        made = sorted(str(p.relative_to(folder)) for p in (folder / "out").rglob("*"))
        names.append([re.sub(r"[0-9a-f]{8,}", "run", name) for name in made])

    assert names[0] == names[1]
    assert len(names[0]) >= 4


def test_release_times_are_the_schedule(runs):
    """No wall clock: both runs say the same of when each release was due."""
    times = []
    for folder, streams in runs.values():
        lines = [json.loads(line) for line in streams["stdout"].splitlines()]
        times.append([line["trigger_time"] for line in lines if "trigger_time" in line])
        with sqlite3.connect(folder / "out.sqlite") as database:
            rows = database.execute("SELECT DISTINCT trigger_time FROM pages").fetchall()
        assert len(rows) == 4

    assert times[0] == times[1]
    assert len(times[0]) == 4


def test_the_operators_files_are_the_operators_alone(runs):
    """State, dead letters, secret and ledger are readable by their owner only."""
    folder, _ = runs[True]
    found = [folder / name for name in OPERATOR]
    found += [path for path in (folder / "state").rglob("*") if path.is_file()]
    for path in found:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode & 0o077 == 0, f"{path.relative_to(folder)} has mode {mode:o}"


def test_the_ledger_holds_no_values(runs):
    """Charges and keyed digests: nothing planted, though only the operator reads it."""
    folder, _ = runs[True]

    assert leaks(files(folder, "clicks.ledger")) == []


def test_a_series_leaves_nothing_but_noisy_values(tmp_path):
    """A release of raw counts, its state and its ledger: the counts are in the state alone."""
    data = np.array([[int(VALUE)], [3], [4], [5]])
    series = dps.release(
        dps.mechanisms.Sample(epsilon=1e-6, window=2),
        data,
        state=tmp_path / "state",
        ledger=tmp_path / "ledger",
        secret=bytes(32),
    )
    written = [("values", str(series.values.tolist()).encode()), ("text", repr(series).encode())]

    assert leaks([*written, *files(tmp_path, "ledger")]) == []


def test_every_door_is_listed():
    """The threat model names each kind of output, with its status."""
    text = (ROOT / "docs" / "threat-model.md").read_text()
    table = text.split("## What leaves the process")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "---" not in line][1:]
    for door in (
        "file names",
        "standard output",
        "standard error",
        "log",
        "warnings",
        "error messages",
        "metrics",
        "number of rows",
        "trigger_time",
        "emission",
        "ledger",
        "state directory",
        "dead letters",
        "audit",
        "exit code",
    ):
        assert any(door in row.split("|")[1] for row in rows), door
    for row in rows:
        status = row.split("|")[2]
        assert re.search(r"\b(paid|public|operator-only|not private)\b", status), row
