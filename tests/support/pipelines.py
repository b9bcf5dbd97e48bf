"""Small pipelines with fixed noise, and both sides of their server without its processes."""

from pathlib import Path

import numpy as np

from dpstream.engines.query_run import EngineOptions
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.state import Secret
from dpstream.serve.access import Token
from dpstream.serve.event_stream import Hub
from dpstream.serve.operator_side import OperatorSide
from dpstream.serve.public_facts import declared_books, describe_queries
from dpstream.serve.public_side import PublicSide
from dpstream.serve.release_store import ReleaseReader, store_folder
from dpstream.serve.worker import Supervisor, publish
from dpstream.session.pipeline import load_pipeline
from tests.support.fixed import RUN, SECRET
from tests.support.kill_and_replay import KindOfRun

OPTIONS = EngineOptions(run_id=RUN, threads=1, buckets=2)
PAGES = ("home", "news", "<script>alert(1)</script>", "\u202eright to left", "long " + "x" * 900)

PIPELINE = '''
[source.clicks]
path = "clicks.csv"
[source.visits]
path = "visits.csv"

[budget.clicks]
epsilon = 9
delta = 1e-5
[budget.visits]
epsilon = 3

[sink]
to = ["out/"]

[state]
path = "state/"

[[query]]
name = "pages"
sql = """
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 3, delta = 1e-6, privacy_unit_column = user, max_groups_contributed = 4,
                confidence = 0.9, time_unit = 's', allowed_lateness = INTERVAL '1' HOUR,
                start = TIMESTAMP '1970-01-01', end = TIMESTAMP '1970-01-01 06:00:00')
       page, window_start, COUNT(*) AS clicks,
       SUM(seconds, contribution_bounds_per_row => (0, 60)) AS seconds
FROM TUMBLE(clicks, DESCRIPTOR(at), INTERVAL '3' HOUR)
GROUP BY page, window_start
EMIT EVERY INTERVAL '1' HOUR
"""

[[query]]
name = "changed"
sql = """
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 3, delta = 1e-6, privacy_unit_column = user, max_groups_contributed = 4,
                min_change = 60, time_column = at, time_unit = 's',
                start = TIMESTAMP '1970-01-01', end = TIMESTAMP '1970-01-01 06:00:00')
       page, COUNT(*) AS clicks
FROM clicks GROUP BY page
EMIT EVERY INTERVAL '1' HOUR
"""

[[query]]
name = "all"
sql = """
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 2, delta = 1e-6, privacy_unit_column = user, time_column = at,
                time_unit = 's', start = TIMESTAMP '1970-01-01 01:00:00',
                end = TIMESTAMP '1970-01-01 06:00:00')
       COUNT(DISTINCT user) AS users
FROM clicks
EMIT EVERY INTERVAL '2' HOUR
"""

[[query]]
name = "steps"
sql = """
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 1, privacy_unit = 'w_event', w = 3, mechanism = 'uniform',
                privacy_unit_column = user, public_groups = ('home', 'news'), time_unit = 's',
                start = TIMESTAMP '1970-01-01', end = TIMESTAMP '1970-01-01 06:00:00')
       page, window_start, COUNT(*) AS users
FROM TUMBLE(visits, DESCRIPTOR(at), INTERVAL '1' HOUR)
GROUP BY page, window_start
"""
'''


def rows(users=1500, seed=3):
    """Lines of CSV: user, page, at, seconds; pages come one after the other."""
    rng = np.random.default_rng(seed)
    lines = []
    for user in range(users):
        for number, page in enumerate(PAGES):
            at = rng.integers(number * 3600 // 2, 6 * 3600)
            lines.append(f'u{user},"{page}",{at},{rng.integers(0, 60)}')
    return lines


def write(folder: Path, lines, text=PIPELINE) -> Path:
    """The pipeline's files; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("clicks.csv", "visits.csv"):
        (folder / name).write_text("\n".join(["user,page,at,seconds", *lines, ""]))
    path = folder / "pipeline.toml"
    path.write_text(text)
    if not (folder / "state.secret").exists():
        Secret.create(folder / "state.secret", value=SECRET)
    return path


def published(folder: Path, lines, text=PIPELINE):
    """A pipeline whose queries have been run to their ends."""
    pipeline = load_pipeline(write(folder, lines, text))
    publish(pipeline, options=OPTIONS)
    return pipeline


def public_side(pipeline, **settings):
    """The public side of a pipeline, as it stands."""
    hub = Hub(ReleaseReader(store_folder(pipeline)), grid=0.05)
    queries = describe_queries(pipeline)
    return PublicSide(queries=queries, hub=hub, ledger=declared_books(pipeline), **settings)


TOKEN = "a token for tests alone"
HEADERS = {"authorization": f"Bearer {TOKEN}"}

PUSHED = '''
[source]
path = "http:"
[budget]
dataset = "clicks"
epsilon = 4
delta = 1e-6
[state]
path = "state/"
[[query]]
name = "pages"
sql = """
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 4, delta = 1e-7, privacy_unit_column = user, max_groups_contributed = 2,
                max_rows_per_group = 1,
                privacy_unit_period = INTERVAL '1' DAY, time_unit = 's',
                allowed_lateness = INTERVAL '3' MINUTE)
       page, window_start, COUNT(*) AS clicks
FROM TUMBLE(clicks, DESCRIPTOR(at), INTERVAL '1' MINUTE)
GROUP BY page, window_start
EMIT EVERY INTERVAL '1' SECOND
"""
'''


def operator_side(pipeline, **settings):
    hub = Hub(ReleaseReader(store_folder(pipeline)), grid=0.05)
    supervisor = Supervisor(path=pipeline.path)
    token = Token(TOKEN, source="a test")
    return OperatorSide(pipeline=pipeline, token=token, supervisor=supervisor, hub=hub, **settings)


def served_files():
    """Runs of a whole pipeline over files, as the server's process does them.

    What is published: the files of the sink, and the store's releases with their numbers.
    """

    def read(place):
        reader = ReleaseReader(store_folder(load_pipeline(place / "pipeline.toml")))
        reader.look()
        stored = {release.id: release for release in reader.after(0, 1000)}
        reader.close()
        return stored | {path.name: path.read_bytes() for path in (place / "out").iterdir()}

    def start(place):
        publish(load_pipeline(place / "pipeline.toml"), options=OPTIONS)
        return ()

    return KindOfRun(
        prepare=lambda place: write(place, rows(users=300)),
        start=start,
        published=read,
        charges=lambda place: [
            book["spent_on"] for book in Ledger(place / "state" / "ledger").report()
        ],
    )
