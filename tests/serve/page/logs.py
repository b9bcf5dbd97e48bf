"""Made-up logs and pipelines for the page: a story to look at, keys that mean harm, a stream."""

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

PAGES = ("/home", "/news", "/sport", "/weather", "/search", "/video", "/shop", "/help", "/maps")
LATE_PAGE = "/eclipse"  # nobody reads it until the afternoon of the last day
_DAY = 86_400
_START = 1_714_521_600  # 1 May 2024

STORY = """
[source.clicks]
path = "clicks.parquet"
[source.visits]
path = "visits.parquet"
[budget.clicks]
epsilon = 4
delta = 1e-8
[source.stays]
path = "stays.parquet"
[budget.visits]
epsilon = 1
[budget.stays]
epsilon = 9
delta = 1e-8
[state]
path = "state/"
[[query]]
name = "pages"
sql = '''
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 2, delta = 1e-9, privacy_unit_column = user,
                privacy_unit_period = INTERVAL '1' DAY,
                max_groups_contributed = 4, time_unit = 's',
                start = TIMESTAMP '2024-05-01', end = TIMESTAMP '2024-05-04')
       page, window_start, COUNT(*) AS visitors,
       AVG(seconds, contribution_bounds_per_row => (0, 300)) AS seconds
FROM TUMBLE(clicks, DESCRIPTOR(at), INTERVAL '1' DAY)
GROUP BY page, window_start
EMIT EVERY INTERVAL '1' HOUR'''
[[query]]
name = "everybody"
sql = '''
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 1, delta = 1e-9, privacy_unit_column = user,
                privacy_unit_period = INTERVAL '1' DAY,
                max_groups_contributed = 1, time_unit = 's',
                start = TIMESTAMP '2024-05-01', end = TIMESTAMP '2024-05-04')
       window_start, COUNT(DISTINCT user) AS users
FROM TUMBLE(clicks, DESCRIPTOR(at), INTERVAL '1' DAY)
GROUP BY window_start
EMIT EVERY INTERVAL '3' HOUR'''
[[query]]
name = "stays"
sql = '''
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 8, delta = 1e-9, privacy_unit_column = user,
                privacy_unit_period = INTERVAL '1' DAY,
                max_groups_contributed = 2, time_unit = 's',
                public_groups = ('/home', '/news', '/video'),
                start = TIMESTAMP '2024-05-01', end = TIMESTAMP '2024-05-04')
       page, window_start, HISTOGRAM(seconds, [0, 30, 60, 120, 300]) AS stays,
       APPROX_QUANTILES(seconds, 4, contribution_bounds_per_row => (0, 300)) AS quarters
FROM TUMBLE(stays, DESCRIPTOR(at), INTERVAL '1' DAY)
GROUP BY page, window_start
EMIT EVERY INTERVAL '6' HOUR'''
[[query]]
name = "hourly"
title = "Visits by the hour"
description = "Three pages, at all hours."
sql = '''
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 1, privacy_unit = 'w_event', w = 24, privacy_unit_column = user,
                time_unit = 's', public_groups = ('/home', '/news', '/sport'),
                start = TIMESTAMP '2024-05-01', end = TIMESTAMP '2024-05-04')
       page, window_start, COUNT(*) AS visits
FROM TUMBLE(visits, DESCRIPTOR(at), INTERVAL '1' HOUR)
GROUP BY page, window_start'''
"""

LONGEST = "x" * 1_000_000
HOSTILE: tuple[str | None, ...] = (
    "<script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 2'>",
    '"><svg onload=window.pwned=3>',
    "{{7*7}}${7*7}",
    "\u202egnp.evil\u202c",
    "مرحبا بالعالم 123",
    "👩‍👩‍👧‍👦🏴‍☠️ family",
    "line\nbreak\tand \x07 bell",
    "javascript:window.pwned=4",
    "z̸̧̛͙̘a̵͉͇͗l̷̰̈́g̶̣͝ö̵̲",
    "",
    "   ",
    None,
    LONGEST,
)
MANY = 50_000

WILD = """
[source.names]
path = "names.parquet"
[source.articles]
path = "articles.parquet"
[budget.names]
epsilon = 24
delta = 1e-4
[budget.articles]
epsilon = 15
delta = 1e-4
[state]
path = "state/"
[[query]]
name = "names"
sql = '''
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 20, delta = 1e-5, privacy_unit_column = user, max_groups_contributed = 1,
                max_key_bytes = 2000000, time_column = at, time_unit = 's',
                start = TIMESTAMP '2024-05-01', end = TIMESTAMP '2024-05-02')
       name, COUNT(*) AS people FROM names GROUP BY name
EMIT EVERY INTERVAL '12' HOUR'''
[[query]]
name = "articles"
sql = '''
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 12, delta = 1e-5, privacy_unit_column = user, max_groups_contributed = 1)
       article, COUNT(*) AS readers FROM articles GROUP BY article'''
"""

MANY_KEYS, MANY_WINDOWS = 10_000, 1_000

MANY_OF_BOTH = """
[source.reads]
path = "reads.parquet"
[source.visits]
path = "visits.parquet"
[budget.reads]
epsilon = 15
delta = 1e-4
[budget.visits]
epsilon = 15
delta = 1e-4
[state]
path = "state/"
[[query]]
name = "keys"
sql = '''
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 12, delta = 1e-5, privacy_unit_column = user, max_groups_contributed = 1,
                privacy_unit_period = INTERVAL '1' DAY, time_unit = 's',
                start = TIMESTAMP '2024-05-01', end = TIMESTAMP '2024-05-04')
       page, window_start, COUNT(*) AS readers
FROM TUMBLE(reads, DESCRIPTOR(at), INTERVAL '1' DAY) GROUP BY page, window_start'''
[[query]]
name = "hours"
sql = '''
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 12, delta = 1e-5, privacy_unit_column = user, max_groups_contributed = 1,
                privacy_unit_period = INTERVAL '1' HOUR, time_unit = 's',
                public_groups = ({pages}),
                start = TIMESTAMP '2024-05-01', end = TIMESTAMP '2024-06-11 16:00:00')
       page, window_start, COUNT(*) AS visits
FROM TUMBLE(visits, DESCRIPTOR(at), INTERVAL '1' HOUR) GROUP BY page, window_start'''
"""

USERS = """
[source.log]
path = "log.parquet"
[source.weeks]
path = "weeks.parquet"
[budget.log]
epsilon = 9
delta = 1e-8
[budget.weeks]
epsilon = 9
delta = 1e-8
[state]
path = "state/"
[[query]]
name = "funnel"
sql = '''
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 4, delta = 1e-9, privacy_unit_column = user,
                privacy_unit_period = INTERVAL '1' DAY, max_groups_contributed = 3, time_unit = 's',
                start = TIMESTAMP '2024-05-01', end = TIMESTAMP '2024-05-03')
       window_start, step, step_name, COUNT(*) AS users
FROM FUNNEL(TUMBLE(log, DESCRIPTOR(at), INTERVAL '1' DAY),
            steps => (page = '/home' AS home, page = '/news' AS news, page = '/shop' AS shop),
            within => INTERVAL '12' HOUR)
GROUP BY window_start, step, step_name
EMIT EVERY INTERVAL '12' HOUR'''
[[query]]
name = "devices"
sql = '''
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 4, delta = 1e-9, privacy_unit_column = user,
                privacy_unit_period = INTERVAL '1' DAY, max_groups_contributed = 4, time_unit = 's',
                start = TIMESTAMP '2024-05-01', end = TIMESTAMP '2024-05-03')
       window_start, step, device, COUNT(*) AS users
FROM FUNNEL(TUMBLE(log, DESCRIPTOR(at), INTERVAL '1' DAY),
            steps => (page = '/home' AS home, page = '/shop' AS shop), by => (device))
GROUP BY window_start, step, device'''
[[query]]
name = "back"
sql = '''
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 4, delta = 1e-9, privacy_unit_column = user, time_unit = 's',
                privacy_unit_period = 'forever',
                start = TIMESTAMP '2024-05-01', end = TIMESTAMP '2024-06-05')
       window_start, lag, COUNT(*) AS users
FROM RETENTION(weeks, DESCRIPTOR(at), first => event = 'signup', again => event = 'visit',
               period => INTERVAL '7' DAY, lags => 3)
GROUP BY window_start, lag'''
"""

WIDE = """
[source.log]
path = "log.parquet"
[budget.log]
epsilon = 40
delta = 1e-2
[state]
path = "state/"
[[query]]
name = "figures"
sql = '''
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 1, delta = 1e-9, privacy_unit_column = user, confidence = 0.95,
                max_groups_contributed = 1, public_groups = (0, 1, 2), max_rows_per_group = 1)
       device, COUNT(*) AS users, 100 * COUNTIF(x > 5) / COUNT(*) AS percent,
       CORR(y, x, contribution_bounds_per_row => ((0, 20), (0, 10))) AS together,
       RANK() OVER (ORDER BY users DESC) AS place
FROM log GROUP BY device'''
[[query]]
name = "funnels"
sql = '''
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 9, delta = 1e-9, privacy_unit_column = user,
                privacy_unit_period = 'forever', max_groups_contributed = 2, time_unit = 's',
                start = TIMESTAMP '2024-05-01', end = TIMESTAMP '2024-05-04')
       window_start, step, country, COUNT(*) AS users
FROM FUNNEL(TUMBLE(log, DESCRIPTOR(at), INTERVAL '3' DAY),
            steps => (x >= 0 AS came, x > 2 AS stayed), by => (country))
GROUP BY window_start, step, country'''
[[query]]
name = "hours"
sql = '''
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 9, delta = 1e-9, privacy_unit_column = user, time_unit = 's',
                privacy_unit_period = 'forever',
                start = TIMESTAMP '2024-05-01', end = TIMESTAMP '2024-05-04')
       window_start, lag, COUNT(*) AS users
FROM RETENTION(log, DESCRIPTOR(at), first => TRUE, again => TRUE,
               period => INTERVAL '1' HOUR, lags => 62)
GROUP BY window_start, lag'''
"""

LIVE = """
[source]
path = "live/"
live = true
[budget]
dataset = "clicks"
epsilon = 24
delta = 1e-5
[state]
path = "state/"
[[query]]
name = "now"
sql = '''
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 20, delta = 1e-6, privacy_unit_column = user, max_groups_contributed = 1,
                time_column = at, time_unit = 's',
                start = TIMESTAMP '{start}', end = TIMESTAMP '{end}')
       page, COUNT(*) AS visitors
FROM clicks GROUP BY page
EMIT EVERY INTERVAL '1' SECOND'''
"""


def write_story(folder: Path) -> Path:
    """Three days of a news site; a page that nobody knew is read by many on the last afternoon."""
    rng = np.random.default_rng(14)
    users, pages, times = [], [], []
    appeal = np.array([30, 19, 13, 12.6, 9.6, 6, 5.8, 4.4, 3.6])
    for day in range(3):
        count = 3_800 + 500 * day
        hour = np.clip(rng.normal(13.5, 4.6, count), 0, 23.99)
        page = rng.choice(len(PAGES), count, p=appeal / appeal.sum()).astype(object)
        page = np.array(PAGES, object)[page.astype(int)]
        if day == 2:
            page[(hour > 13.4) & (rng.random(count) < 0.34)] = LATE_PAGE
        users.append(rng.integers(0, 3_000, count))
        pages.append(page)
        times.append(_START + day * _DAY + (hour * 3600).astype(int))
    user, page, at = (np.concatenate(each) for each in (users, pages, times))
    seconds = np.clip(rng.gamma(2.2, 38, len(user)) + 20 * (page == "/video"), 0, 300)
    order = np.argsort(at, kind="stable")
    table = {"user": user, "page": page, "at": at, "seconds": seconds}
    for name in (
        "clicks.parquet",
        "visits.parquet",
        "stays.parquet",
    ):  # two books may not read one file
        _write(folder / name, {column: list(each[order]) for column, each in table.items()})
    return _pipeline(folder, STORY)


def write_wild(folder: Path) -> Path:
    """Keys that mean harm, and very many keys."""
    names = [name for place, name in enumerate(HOSTILE) for _ in range(60 + 20 * place)]
    times = [_START + 50 * number % _DAY for number in range(len(names))]
    rows: dict[str, list[object]] = {"user": [*range(len(names))], "name": [*names], "at": [*times]}
    _write(folder / "names.parquet", rows)
    articles = [f"/article/{number:05}" for number in range(MANY) for _ in range(8)]
    rows = {"user": [*range(len(articles))], "article": [*articles]}
    _write(folder / "articles.parquet", rows)
    return _pipeline(folder, WILD)


def write_many(folder: Path) -> Path:
    """Ten thousand keys of eight people a day, and a thousand hours of twelve pages."""
    names = [f"/page/{number:05}" for number in range(MANY_KEYS)]
    pages = [name for _ in range(3) for name in names for _ in range(8)]
    times = [_START + day * _DAY for day in range(3) for _ in range(8 * MANY_KEYS)]
    users = [*range(8 * MANY_KEYS)] * 3
    _write(folder / "reads.parquet", {"user": [*users], "page": [*pages], "at": [*times]})
    few, hours = names[:12], range(MANY_WINDOWS)
    rows = [(one, few[one % 12], _START + 3600 * hour) for hour in hours for one in range(24)]
    columns = {name: [row[at] for row in rows] for at, name in enumerate(("user", "page", "at"))}
    _write(folder / "visits.parquet", columns)
    return _pipeline(folder, MANY_OF_BOTH.format(pages=", ".join(f"'{one}'" for one in few)))


def write_users(folder: Path) -> Path:
    """Two days of visits in steps, and five weeks of users who sign up and come back."""
    rng = np.random.default_rng(5)
    count = 9_000
    user = rng.integers(0, 1_500, count)
    page = np.array(["/home", "/news", "/shop"], object)[rng.choice(3, count, p=[0.5, 0.3, 0.2])]
    device = np.array(["phone", "desk"], object)[(user % 3 == 0).astype(int)]
    at = _START + np.sort(rng.integers(0, 2 * _DAY, count))
    columns = {"user": user, "page": page, "device": device, "at": at}
    _write(folder / "log.parquet", {name: list(each) for name, each in columns.items()})
    count = 30_000
    event = np.array(["signup", "visit", "visit"], object)[rng.integers(0, 3, count)]
    at = _START + np.sort(rng.integers(0, 35 * _DAY, count))
    columns = {"user": rng.integers(0, 3_000, count), "event": event, "at": at}
    _write(folder / "weeks.parquet", {name: list(each) for name, each in columns.items()})
    return _pipeline(folder, USERS)


def write_wide(folder: Path) -> Path:
    """Three days of 9,000 users in eight countries, whose y goes with their x."""
    rng = np.random.default_rng(6)
    count = 27_000
    user = rng.integers(0, 9_000, count)
    x = rng.integers(0, 11, count)
    columns = {
        "user": user,
        "device": user % 3,
        "country": np.array(["de", "fr", "it", "es", "pl", "at", "ch", "pt"], object)[user % 8],
        "x": x,
        "y": x + rng.integers(0, 10, count),
        "at": _START + np.sort(rng.integers(0, 3 * _DAY, count)),
    }
    _write(folder / "log.parquet", {name: list(each) for name, each in columns.items()})
    return _pipeline(folder, WIDE)


def write_live(folder: Path) -> Path:
    """A window that has just begun, and is published every second."""
    (folder / "live").mkdir()
    send_live(folder, {"/home": 400, "/news": 250})
    start = datetime.now(UTC).replace(microsecond=0) - timedelta(seconds=5)
    times = {"start": start, "end": start + timedelta(minutes=20)}
    named = {name: f"{at:%Y-%m-%d %H:%M:%S}" for name, at in times.items()}
    return _pipeline(folder, LIVE.format(**named))


_sent = iter(range(1_000_000))


def send_live(folder: Path, visitors: dict[str, int]) -> None:
    """Move a file with new users of these pages into the live directory."""
    number, now = next(_sent), int(time.time())
    users = [f"u{number}-{page}-{one}" for page, count in visitors.items() for one in range(count)]
    pages = [page for page, count in visitors.items() for _ in range(count)]
    beside = folder / f"part-{number}.parquet"
    _write(beside, {"user": users, "page": pages, "at": [now] * len(users)})
    beside.rename(folder / "live" / beside.name)


def _write(path: Path, columns: dict[str, list[object]]) -> None:
    pq.write_table(pa.table(columns), path)


def _pipeline(folder: Path, text: str) -> Path:
    path = folder / "pipeline.toml"
    path.write_text(text)
    return path
