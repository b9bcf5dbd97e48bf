"""What `dpstream init --live` writes: a pipeline over a directory that grows, and who feeds it."""

from __future__ import annotations

PIPELINE = '''\
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
