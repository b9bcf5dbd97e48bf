"""SQL for real logs: three listings of a paper, and ten queries that people ask of such logs.

The listings are those of Zhang et al., "Differentially Private Stream Processing at Scale", 2023:
clicks per URL and day, records per key of made-up data, and posts per forum. Their web log and
their forum are not public; an Apache log and a day of tweets stand in, under the same names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A query, the table that it reads, and the file that the table is."""

    name: str
    table: str
    log: str
    sql: str


_WEB: Final = "start = '2025-05-17', end = '2025-05-21', time_unit = 's'"
_TWEETS: Final = (
    "start = '2012-07-04', end = '2012-07-05', time_unit = 's', time_origin = '2012-07-04'"
)
_SHOP: Final = (
    "start = '2010-12-01', end = '2011-06-29', time_unit = 'min', time_origin = '2010-12-01'"
)
_CLAUSE: Final = "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS"

LISTINGS: Final = (
    Asked(
        name="listing_1",
        table="web_logs",
        log="apache_weblog_2015",
        sql=f"""{_CLAUSE} (epsilon = 6, delta = 1e-9, privacy_unit_column = client,
            max_groups_contributed = 8)
            path AS URL, TO_DATE(TIMESTAMP_SECONDS(unix_ts)) AS date, COUNT(*) AS count
            FROM web_logs GROUP BY URL, TO_DATE(TIMESTAMP_SECONDS(unix_ts))""",
    ),
    Asked(
        name="listing_2",
        table="SyntheticDataset",
        log="synthetic",
        sql=f"""{_CLAUSE} (epsilon = 6, delta = 1e-9, privacy_unit_column = user,
            max_groups_contributed = 32, {_TWEETS}, time_column = sec)
            key, COUNT(*) FROM SyntheticDataset GROUP BY key EMIT EVERY INTERVAL '15' MINUTE""",
    ),
    Asked(
        name="listing_3",
        table="RedditData",
        log="higgs_twitter_20120704",
        sql=f"""{_CLAUSE} (epsilon = 6, delta = 1e-9, privacy_unit_column = user,
            max_groups_contributed = 17, {_TWEETS}, time_column = sec)
            target AS subreddit, COUNT(*) FROM RedditData GROUP BY subreddit
            EMIT EVERY INTERVAL '15' MINUTE""",
    ),
)

REALISTIC: Final = (
    Asked(
        name="most_talked_about",
        table="tweets",
        log="higgs_twitter_20120704",
        sql=f"""{_CLAUSE} (epsilon = 4, delta = 1e-9, privacy_unit_column = user,
            max_groups_contributed = 4, {_TWEETS}, time_column = sec)
            target, COUNT(DISTINCT user) AS people FROM tweets WHERE target <> user
            GROUP BY target ORDER BY people DESC LIMIT 20 EMIT EVERY INTERVAL '1' HOUR""",
    ),
    Asked(
        name="kinds_so_far",
        table="tweets",
        log="higgs_twitter_20120704",
        sql=f"""{_CLAUSE} (epsilon = 2, delta = 1e-9, privacy_unit_column = user,
            max_groups_contributed = 12, public_groups = ('RT', 'MT', 'RE'), {_TWEETS})
            kind, window_end, COUNT(*) AS events
            FROM CUMULATE(tweets, DESCRIPTOR(sec), INTERVAL '6' HOUR, INTERVAL '1' DAY)
            GROUP BY kind, window_end""",
    ),
    Asked(
        name="people_per_quarter",
        table="tweets",
        log="higgs_twitter_20120704",
        sql=f"""{_CLAUSE} (epsilon = 1, privacy_unit = 'w_event', w = 8, mechanism = 'spas',
            privacy_unit_column = user, public_groups = ('RT', 'MT', 'RE'), {_TWEETS})
            kind, window_start, COUNT(*) AS people
            FROM TUMBLE(tweets, DESCRIPTOR(sec), INTERVAL '15' MINUTE)
            GROUP BY kind, window_start""",
    ),
    Asked(
        name="sold_per_week",
        table="orders",
        log="online_retail_2010_2011",
        sql=f"""{_CLAUSE} (epsilon = 6, delta = 1e-9, privacy_unit_column = customer,
            privacy_unit_period = INTERVAL '7' DAY, max_groups_contributed = 16, {_SHOP})
            stock_code, window_start, COUNT(*) AS customers,
            SUM(quantity, contribution_bounds_per_row => (-20, 20)) AS sold
            FROM TUMBLE(orders, DESCRIPTOR(minute), INTERVAL '7' DAY)
            GROUP BY stock_code, window_start HAVING sold > 0 ORDER BY sold DESC""",
    ),
    Asked(
        name="share_of_returns",
        table="orders",
        log="online_retail_2010_2011",
        sql=f"""{_CLAUSE} (epsilon = 1, delta = 1e-9, privacy_unit_column = customer,
            privacy_unit_period = INTERVAL '7' DAY, max_groups_contributed = 1,
            max_rows_per_group = 20, {_SHOP})
            window_start, 100 * COUNTIF(quantity < 0) / COUNT(*) AS percent, COUNT(*) AS lines
            FROM TUMBLE(orders, DESCRIPTOR(minute), INTERVAL '7' DAY) GROUP BY window_start""",
    ),
    Asked(
        name="hours_of_the_day",
        table="orders",
        log="online_retail_2010_2011",
        sql=f"""{_CLAUSE} (epsilon = 2, delta = 1e-9, privacy_unit_column = customer,
            max_groups_contributed = 4, {_SHOP}, time_column = minute)
            DIV(MOD(minute, 1440), 60) AS hour,
            CASE WHEN quantity >= 50 THEN 'bulk' ELSE 'retail' END AS kind,
            COUNT(*) AS customers, AVG(quantity, contribution_bounds_per_row => (0, 100)) AS items
            FROM orders WHERE quantity > 0 GROUP BY hour, kind ORDER BY hour""",
    ),
    Asked(
        name="ratings_by_genre",
        table="ratings",
        log="movielens_100k_2016",
        sql=f"""{_CLAUSE} (epsilon = 4, delta = 1e-7, privacy_unit_column = user,
            max_groups_contributed = 6, max_rows_per_group = 10, confidence = 0.95)
            main_genre, COUNT(*) AS ratings,
            AVG(rating, contribution_bounds_per_row => (0.5, 5)) AS mean,
            STDDEV(rating, contribution_bounds_per_row => (0.5, 5)) AS spread
            FROM ratings GROUP BY main_genre ORDER BY mean DESC""",
    ),
    Asked(
        name="raters_by_year",
        table="ratings",
        log="movielens_100k_2016",
        sql=f"""WITH dated AS (
                SELECT user, rating, EXTRACT(YEAR FROM TIMESTAMP_SECONDS(unix_ts)) AS year
                FROM ratings WHERE rating >= 4)
            {_CLAUSE} (epsilon = 4, delta = 1e-7, privacy_unit_column = user,
            max_groups_contributed = 3)
            year, COUNT(DISTINCT user) AS raters FROM dated GROUP BY year ORDER BY year""",
    ),
    Asked(
        name="sections_of_the_site",
        table="visits",
        log="apache_weblog_2015",
        sql=f"""WITH pages AS (
                SELECT client, unix_ts, LOWER(SPLIT(path, '/')[OFFSET(1)]) AS section FROM visits
                WHERE method = 'GET' AND status < 400 AND NOT ENDS_WITH(path, '.png'))
            {_CLAUSE} (epsilon = 6, delta = 1e-7, privacy_unit_column = client,
            privacy_unit_period = INTERVAL '1' DAY, max_groups_contributed = 8, {_WEB})
            section, window_start, window_end, COUNT(*) AS visitors
            FROM HOP(pages, DESCRIPTOR(unix_ts), INTERVAL '12' HOUR, INTERVAL '1' DAY)
            GROUP BY section, window_start""",
    ),
    Asked(
        name="visitors_per_hour",
        table="visits",
        log="apache_weblog_2015",
        sql=f"""{_CLAUSE} (epsilon = 1, privacy_unit = 'w_event', w = 24, mechanism = 'pacer',
            privacy_unit_column = client, {_WEB})
            window_start, COUNT(*) AS visitors
            FROM TUMBLE(visits, DESCRIPTOR(unix_ts), INTERVAL '1' HOUR)
            WHERE status = 200 GROUP BY window_start""",
    ),
)
