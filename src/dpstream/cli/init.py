"""`dpstream init`: an example pipeline that runs as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpstream.cli.init_live import FEED, PIPELINE
from dpstream.connectors.sinks.encode import csv
from dpstream.data.clicks import clicks
from dpstream.errors import InvalidParameter

_ROWS, _USERS = 20_000, 4_000

EXAMPLE = '''\
# A pipeline: one source, the book that pays, state, sinks, and queries over the source.
# Paths are relative to this file. Run it with: dpstream run pipeline.toml

[source]
path = "clicks.csv"         # a file, a glob such as "clicks/*.parquet", a directory, or a list
# live = true               # path is a directory that grows; rows are read by the clock
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
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write it.")] = Path(),
    live: Annotated[
        bool,
        typer.Option("--live", help="A live directory and a feed for it, for dpstream serve."),
    ] = False,
) -> None:
    """Write a commented pipeline.toml and made-up data for it: a file, or a live feed."""
    pipeline = folder / "pipeline.toml"
    if live:
        files = {pipeline: PIPELINE.encode(), folder / "feed.py": FEED.encode()}
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
