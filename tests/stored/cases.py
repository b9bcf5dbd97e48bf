"""What a version leaves behind, and how a later one goes on with it.

Each case is begun in an empty folder, stopped in the middle, and kept as it lies there. Queries and
books are used through commands and pipeline files, as people use them.
"""

import io
import json
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import dpstream as dps
from dpstream.cli import main
from tests.golden.corpus import SECRET, lines, outcome, release_lines, rounded

CLICKS = """
[source]
path = "clicks.csv"
[budget]
dataset = "clicks"
epsilon = 20
delta = 1e-4
[state]
path = "state/"
[[query]]
name = "by_page"
sql = \"\"\"
SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 6, delta = 1e-6, privacy_unit_column = user,
       privacy_unit_period = INTERVAL '1' DAY, max_groups_contributed = 2, max_rows_per_group = 2,
       start = TIMESTAMP '2024-05-01', end = TIMESTAMP '2024-05-03')
       page, window_start, COUNT(*) AS n,
       SUM(seconds, contribution_bounds_per_row => (0, 60)) AS seconds
FROM TUMBLE(clicks, DESCRIPTOR(ts), INTERVAL '1' DAY) GROUP BY page, window_start
EMIT EVERY INTERVAL '3' HOUR\"\"\"
"""
SERIES = """
[source]
path = "clicks.csv"
[budget]
dataset = "clicks"
epsilon = 1
ledger = "book"
[state]
path = "state/"
[[query]]
name = "by_step"
sql = \"\"\"
SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 1, privacy_unit = 'w_event', w = 3,
       mechanism = 'budget_absorption', privacy_unit_column = user,
       public_groups = ('/0', '/1', '/2'), start = '2024-05-01', end = '2024-05-03')
       page, window_start, COUNT(*) AS n
FROM TUMBLE(clicks, DESCRIPTOR(ts), INTERVAL '4' HOUR) GROUP BY page, window_start\"\"\"
"""


def run(*words, code=0):
    """What a command prints; it must leave with `code`."""
    text, left = io.StringIO(), None
    try:
        with redirect_stdout(text):
            main([str(word) for word in words])
    except SystemExit as done:
        left = done.code
    assert left == code, words
    return text.getvalue()


def write_clicks():
    """Two days of clicks, by Knuth's generator."""
    number, rows = 1, []
    for _ in range(600):
        drawn = []
        for _ in range(6):
            number = (6364136223846793005 * number + 1442695040888963407) % 2**64
            drawn.append(number >> 33)
        day, second = divmod(drawn[0] % 172_800, 86_400)
        clock = f"{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}"
        user, page = min(drawn[1] % 90, drawn[2] % 90), min(drawn[3] % 5, drawn[4] % 5)
        rows.append(f"user {user},/{page},2024-05-0{1 + day}T{clock}Z,{drawn[5] % 80}\n")
    Path("clicks.csv").write_text("user,page,ts,seconds\n" + "".join(rows))


def write_visits(days):
    counts = [f"2024-03-{day:02d},{day * 7 % 23 + 5},{day * 11 % 17 + 20}\n" for day in days]
    with Path("visits.csv").open("a") as file:
        file.write("".join(["day,north,south\n"][: days[0] == 1] + counts))


def run_pipeline(*options):
    """Releases of a pipeline without a sink: one line of JSON each."""
    printed = run("run", "pipeline.toml", "--json", *options).splitlines()
    releases = [one for one in map(json.loads, printed) if "rows" in one]
    assert releases, "it came to its end before"
    return "".join(rounded(json.dumps(one, sort_keys=True)) + "\n" for one in releases)


def begin_group_by():
    """A final window, an open one, two generations of snapshots, logged steps."""
    write_clicks()
    Path("pipeline.toml").write_text(CLICKS)
    while not Path("state/by_page/windows/final").exists():
        run_pipeline("--once")


def go_on_group_by():
    return outcome(run_pipeline(), "state/ledger")


def begin_series():
    """A mechanism's state and rows of open windows; its book lies outside of the state."""
    write_clicks()
    Path("pipeline.toml").write_text(SERIES)
    for _ in range(2):
        run_pipeline("--once")


def go_on_series():
    return outcome(run_pipeline(), "book")


def publish_visits():
    series = ("--mechanism", "buc_order", "--epsilon", 1, "--delay", 4, "--lo", 0, "--hi", 50)
    return rounded(run("release", "visits.csv", *series, "--state", "state"))


def begin_release():
    """A file that grows; a delay holds some steps back."""
    write_visits(range(1, 11))
    assert publish_visits()


def go_on_release():
    write_visits(range(11, 21))
    return outcome(publish_visits(), "state/ledger")


def step_runner(stop):
    """Steps from the last snapshot on; a snapshot after the fifth step."""
    mechanism = dps.mechanisms.Spas(epsilon=1, window=4)
    releases = []
    with dps.Runner(mechanism, state="state", secret=SECRET, ledger="book") as runner:
        for step in range(runner.steps_done, stop):
            releases += runner.step(np.array([30 + 7 * step % 11, 12, step]))
            if step == 4:
                runner.save()
    return release_lines(releases)


def begin_runner():
    """A snapshot, and two steps after it that only the log and the ledger know."""
    assert step_runner(7)


def go_on_runner():
    return outcome(step_runner(16), "book")


def begin_book():
    """A book of windows with charges, and one of users; their runs are gone."""
    write_visits(range(1, 11))
    run("ledger", "open", "--ledger", "book", "--dataset", "visits",
        "--privacy-unit", "w_event", "--window", 4, "--epsilon", 1)  # fmt: skip
    run("ledger", "open", "--ledger", "book", "--dataset", "clicks",
        "--privacy-unit", "user", "--privacy-unit-column", "user", "--time-column", "ts",
        "--privacy-unit-period", "1 day", "--epsilon", 4, "--delta", "1e-6")  # fmt: skip
    charge_book(epsilon=0.5)


def charge_book(*, epsilon, code=0):
    run("release", "visits.csv", "--mechanism", "uniform", "--epsilon", epsilon, "--window", 4,
        "--ledger", "book", "--dataset", "visits", code=code)  # fmt: skip


def go_on_book():
    """What was spent is spent: more does not fit, the rest does."""
    charges = outcome("", "book").ledger
    charge_book(epsilon=0.6, code=3)
    charge_book(epsilon=0.5)
    book = dps.Ledger("book")
    try:
        spent = lines([one[name] for name in ("dataset", "spent", "left")] for one in book.report())
    finally:
        book.close()
    return type(outcome("", "book"))(releases="", ledger=charges, spent=spent)


@dataclass(frozen=True)
class Case:
    """How it is begun and gone on with; `book`: where its ledger is, if it is not in the state."""

    begin: Callable[[], None]
    go_on: Callable[[], object]
    state: str | None = "state"
    book: str | None = None


CASES = {
    "group_by": Case(begin_group_by, go_on_group_by),
    "series": Case(begin_series, go_on_series, book="book"),
    "release": Case(begin_release, go_on_release),
    "runner": Case(begin_runner, go_on_runner, book="book"),
    "book": Case(begin_book, go_on_book, state=None, book="book"),
}
