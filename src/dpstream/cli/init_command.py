"""`dpstream init`: an example pipeline that runs as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from dpstream.connectors.encode import csv
from dpstream.data.clicks import clicks
from dpstream.errors import InvalidParameter

LIVE_EXAMPLE = '''\
# A live pipeline: files are moved into incoming/ while it runs, and rows count by the clock.
# In one terminal: python feed.py      (made-up clicks; your own program takes its place)
# In another:      dpstream serve pipeline.toml     then open the address that it prints
# `dpstream run pipeline.toml` prints the releases instead; either goes on where it was stopped.

[source]
path = "incoming/"          # write a file as incoming/.NAME.csv, rename it when it is complete
live = true

[budget]                    # what all queries together may reveal of one user's day
dataset = "clicks"
epsilon = 2
delta = 1e-8
ledger = "clicks.ledger"    # never delete it: it is the memory of what was spent

[state]                     # what lets it go on after a stop, a crash or a kill
path = "state/"
secret = "state.secret"     # made on first use; back it up, apart from the state, and show nobody

# [sink]                    # the page keeps its releases in state/; a sink has them for others
# to = "out/"               # one file per release; also "out.sqlite", "out.duckdb", "csv:out/"

# Visitors per page, anew in every ten minutes, published every five seconds. A page appears once
# enough users are behind it: `dpstream explain pipeline.toml` says how many, and how noisy it is.
[[query]]
name = "pages"
sql = """
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 2, delta = 1e-9, privacy_unit_column = user,
                privacy_unit_period = INTERVAL '1' DAY,  -- promise and bounds begin anew each day
                max_groups_contributed = 4,      -- in a day a user counts for 4 pages and windows,
                max_rows_per_group = 1,          -- each once; 3 would count up to 3 clicks
                time_unit = 's')
       page, window_start, COUNT(*) AS visitors
FROM TUMBLE(clicks, DESCRIPTOR(at), INTERVAL '10' MINUTE)
GROUP BY page, window_start
EMIT EVERY INTERVAL '5' SECOND
"""
'''

# A program of the user's: its chance makes up clicks. It is text here, and no noise comes from it.
FEED = '''\
"""Made-up clicks, a file a second, until it is stopped; `python feed.py 3` ends after 3 files."""

import itertools
import os
import random
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent / "incoming"
PAGES = ["home", "news", "sport", "weather", "shop", "jobs", "travel", "help"]
LIKELY = [0.6**place for place in range(len(PAGES))]

most = int(sys.argv[1]) if len(sys.argv) > 1 else None
print("writing clicks to", FOLDER, "(ctrl-C stops)", flush=True)
for number in itertools.count():
    if number == most:
        break
    now = time.time()
    lines = ["user,page,at"]
    for _ in range(200 if number else 3000):  # many at first: there is something to see at once
        user, page = random.randrange(1_000_000), random.choices(PAGES, LIKELY)[0]
        lines.append(f"user-{user:06d},{page},{int(now)}")
    name = f"{int(now * 1000)}.csv"
    hidden = FOLDER / f".{name}"  # not seen before it is complete
    hidden.write_text("\\n".join(lines) + "\\n")
    os.rename(hidden, FOLDER / name)
    time.sleep(1)
'''


_ROWS, _USERS = 20_000, 4_000

EXAMPLE = '''\
# A pipeline: one source, the book that pays, state, sinks, and queries over the source.
# Paths are relative to this file. Run it with: dpstream run pipeline.toml

[source]
path = "clicks.csv"         # a file, a glob such as "clicks/*.parquet", a directory, or a list
# live = true               # path is a directory that grows; rows are read by the clock
# on_done = "move"          # with live: files that are done go to done/; or "delete"
# history = "old/*.parquet" # with live: rows that came before, read by event time first
# Several sources are tables [source.clicks], [source.orders]; each query's FROM names its own.

[budget]                    # what all queries together may reveal of one user, ever
dataset = "clicks"          # one book per dataset: whatever reads these rows must share it
epsilon = 4
delta = 1e-8
ledger = "clicks.ledger"    # never delete it: it is the memory of what was spent

[state]                     # what lets a run go on after a stop, a crash or a kill
path = "state/"
secret = "state.secret"     # made on first use; back it up, apart from the state, and show nobody

[sink]                      # leave this table out to print the releases instead
to = ["out/", "out.sqlite"] # also "csv:out/", "jsonl:out/", "out.duckdb", "-"

# Visitors and mean time per page, every hour. Which pages exist is private: a page appears once
# enough users are behind it: `dpstream explain pipeline.toml` says how many, and how noisy it is.
[[query]]
name = "pages"
sql = """
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 2, delta = 1e-9, privacy_unit_column = user,
                max_groups_contributed = 4,      -- a user counts for at most 4 pages,
                max_rows_per_group = 1,          -- and once for each; 3 would count up to 3 clicks
                time_column = at, time_unit = 's',
                start = TIMESTAMP '2024-05-01', end = TIMESTAMP '2024-05-02')
       page, COUNT(*) AS visitors, AVG(seconds, contribution_bounds_per_row => (0, 300)) AS seconds
FROM clicks
GROUP BY page
ORDER BY visitors DESC
EMIT EVERY INTERVAL '1' HOUR
"""

# All users, four times a day.
[[query]]
name = "users"
sql = """
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 1, delta = 1e-9, privacy_unit_column = user,
                time_column = at, time_unit = 's',
                start = TIMESTAMP '2024-05-01', end = TIMESTAMP '2024-05-02')
       COUNT(DISTINCT user) AS users
FROM clicks
EMIT EVERY INTERVAL '6' HOUR
"""
'''


def init(
    folder: Annotated[Path, Argument(metavar="DIR", help="Where to write it.")] = Path(),
    live: Annotated[
        bool, Option("--live", help="A live directory and a feed for it, for dpstream serve.")
    ] = False,
) -> None:
    """Write a commented pipeline.toml and made-up data for it: a file, or a live feed."""
    pipeline = folder / "pipeline.toml"
    if live:
        files = {pipeline: LIVE_EXAMPLE.encode(), folder / "feed.py": FEED.encode()}
        then = f"start `python {folder / 'feed.py'}`, and beside it: dpstream serve {pipeline}"
    else:
        files = {pipeline: EXAMPLE.encode(), folder / "clicks.csv": csv(clicks(_ROWS, _USERS))}
        then = f"run it with: dpstream run {pipeline}"
    for path in files:
        if path.exists():
            raise InvalidParameter(
                f"{path} is there already, and is not overwritten; name another directory"
            )
    folder.mkdir(parents=True, exist_ok=True)
    if live:
        (folder / "incoming").mkdir(exist_ok=True)
    for path, content in files.items():
        with path.open("xb") as file:
            file.write(content)
    print(f"wrote {' and '.join(map(str, files))}; {then}")
