"""The queries of `bench queries`: listings of a paper, and what people ask of such logs.

Three are listings of Zhang et al., "Differentially Private Stream Processing at Scale", 2023:
clicks per URL and day, records per key of made-up data, and posts per forum. Their web log and
their forum are not public; an Apache log and a day of tweets stand in, under the same names. The
others join public tables, unite sources, compute keys and windows in the ways that SQL has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

Columns = dict[str, list[Any]]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A query, the table that it reads, and the file that the table is."""

    name: str
    table: str
    log: str
    sql: str
    more: tuple[str, ...] = ()
    """Other names of the same file, for a UNION ALL."""
    public: tuple[str, ...] = ()
    """The public tables of `TABLES` that it joins or takes its keys from."""
    registry: tuple[str, ...] = ()
    """Tables of units that it joins, which follow from the log's units."""
    spark: bool = True
    """Does it run on Spark? A time series is refused there."""


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
        spark=False,
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
        spark=False,
        sql=f"""{_CLAUSE} (epsilon = 1, privacy_unit = 'w_event', w = 24, mechanism = 'pacer',
            privacy_unit_column = client, {_WEB})
            window_start, COUNT(*) AS visitors
            FROM TUMBLE(visits, DESCRIPTOR(unix_ts), INTERVAL '1' HOUR)
            WHERE status = 200 GROUP BY window_start""",
    ),
)

_SHOP_FROM: Final = "TUMBLE(orders, DESCRIPTOR(minute), INTERVAL '7' DAY)"


def _asked(name: str, table: str, log: str, options: str, rest: str, **more: Any) -> Asked:
    """A query that is written after its clause."""
    epsilon = "epsilon = 6, delta = 1e-7"
    sql = f"{_CLAUSE} ({epsilon}, {options}) {rest}"
    return Asked(name=name, table=table, log=log, sql=sql, **more)


def _of_visits(name: str, rest: str, *, options: str = "", **more: Any) -> Asked:
    start = "privacy_unit_column = client, max_groups_contributed = 6"
    return _asked(name, "visits", "apache_weblog_2015", start + options, rest, **more)


def _of_tweets(name: str, rest: str, *, options: str = "", **more: Any) -> Asked:
    start = f"privacy_unit_column = user, max_groups_contributed = 4, {_TWEETS}, time_column = sec"
    return _asked(name, "tweets", "higgs_twitter_20120704", start + options, rest, **more)


def _of_orders(name: str, rest: str, *, options: str = "", **more: Any) -> Asked:
    start = "privacy_unit_column = customer, max_groups_contributed = 8"
    return _asked(name, "orders", "online_retail_2010_2011", start + options, rest, **more)


def _of_ratings(name: str, rest: str, *, options: str = "", **more: Any) -> Asked:
    start = "privacy_unit_column = user, max_groups_contributed = 5, max_rows_per_group = 4"
    return _asked(name, "ratings", "movielens_100k_2016", start + options, rest, **more)


JOINED: Final = (
    _of_visits(
        "answers_by_class",
        "class, COUNT(*) AS visitors FROM visits JOIN statuses USING (status) GROUP BY class",
        public=("statuses",),
    ),
    _of_visits(
        "answers_with_their_words",
        """COALESCE(words, 'unknown') AS words, COUNT(*) AS visitors FROM visits AS v
        LEFT JOIN statuses AS s ON v.status = s.status GROUP BY words""",
        public=("statuses",),
    ),
    _of_visits(
        "classes_at_times_of_day",
        """class, part, COUNT(*) AS visitors FROM visits JOIN statuses USING (status)
        JOIN hours ON DIV(MOD(visits.unix_ts, 86400), 3600) = hours.hour GROUP BY class, part""",
        public=("statuses", "hours"),
    ),
    _of_tweets(
        "kinds_by_name",
        """name, COUNT(*) AS events FROM tweets JOIN kinds USING (kind) GROUP BY name
        EMIT EVERY INTERVAL '2' HOUR""",
        options=", public_groups = (SELECT name FROM kinds)",
        public=("kinds",),
    ),
    _of_tweets(
        "parts_of_the_day",
        """part, COUNT(DISTINCT user) AS people FROM tweets
        JOIN hours ON DIV(sec, 3600) = hours.hour GROUP BY part EMIT EVERY INTERVAL '6' HOUR""",
        public=("hours",),
    ),
    _of_tweets(
        "kinds_and_what_belongs_to_them",
        """topic, COUNT(*) AS events FROM tweets JOIN topics USING (kind) GROUP BY topic
        EMIT EVERY INTERVAL '4' HOUR""",
        public=("topics",),
    ),
    _of_ratings(
        "families_of_genres",
        """family, COUNT(*) AS ratings, AVG(rating, contribution_bounds_per_row => (0.5, 5)) AS mean
        FROM ratings JOIN genres USING (main_genre) GROUP BY family ORDER BY mean DESC""",
        public=("genres",),
    ),
    _of_ratings(
        "genres_of_good_films",
        """main_genre, COUNT(*) AS raters FROM ratings
        JOIN (SELECT main_genre FROM genres WHERE family <> 'dark') AS g USING (main_genre)
        WHERE rating >= 4 GROUP BY main_genre""",
        options=", public_groups = TABLE genres",
        public=("genres",),
    ),
    _of_ratings(
        "ratings_by_plan",
        """plan, COUNT(*) AS ratings FROM ratings JOIN plans USING (user) GROUP BY plan""",
        registry=("plans",),
    ),
    _of_orders(
        "parts_of_the_shop_day",
        f"""part, window_start, COUNT(*) AS customers FROM {_SHOP_FROM}
        JOIN hours ON DIV(MOD(minute, 1440), 60) = hours.hour GROUP BY part, window_start""",
        options=f", privacy_unit_period = INTERVAL '7' DAY, {_SHOP}",
        public=("hours",),
    ),
)

UNITED: Final = (
    _of_visits(
        "two_logs_of_visits",
        """method, COUNT(*) AS visitors FROM
        (SELECT client, method FROM visits UNION ALL SELECT client, method FROM mirror)
        GROUP BY method""",
        more=("mirror",),
    ),
    _of_visits(
        "pages_and_errors",
        """what, COUNT(*) AS visitors FROM
        (SELECT client, 'page' AS what FROM visits WHERE status < 400
         UNION ALL SELECT client, 'error' AS what FROM mirror WHERE status >= 400)
        GROUP BY what""",
        options=", public_groups = ('page', 'error')",
        more=("mirror",),
    ),
    _of_tweets(
        "united_and_joined",
        """name, COUNT(*) AS events FROM
        (SELECT user, sec, kind FROM tweets WHERE kind = 'RT'
         UNION ALL SELECT user, sec, kind FROM others WHERE kind <> 'RT') AS both
        JOIN kinds USING (kind) GROUP BY name EMIT EVERY INTERVAL '6' HOUR""",
        more=("others",),
        public=("kinds",),
    ),
)

COMPUTED: Final = (
    _of_visits(
        "every_status_and_method",
        "status, method, COUNT(*) AS visitors FROM visits GROUP BY status, method",
        options=", public_groups = PRODUCT((200, 304, 404), ('GET', 'POST'))",
    ),
    _of_visits(
        "folders_of_paths",
        """folder, COUNT(*) AS visitors FROM visits, UNNEST(SPLIT(path, '/')) AS folder
        WHERE folder <> '' GROUP BY folder""",
    ),
    _of_visits(
        "kinds_of_files",
        """REGEXP_EXTRACT(path, '[.]([a-z]+)$') AS ending, COUNT(*) AS visitors FROM visits
        WHERE REGEXP_LIKE(path, '[.][a-z]+$') GROUP BY ending""",
    ),
    _of_visits(
        "days_of_the_week",
        """FORMAT_TIMESTAMP('%A', TIMESTAMP_SECONDS(unix_ts)) AS day, COUNT(*) AS visitors
        FROM visits GROUP BY day""",
    ),
    _of_visits(
        "places_of_sections",
        """SPLIT(path, '/')[OFFSET(1)] AS section, COUNT(*) AS visitors,
        RANK() OVER (ORDER BY COUNT(*) DESC) AS place FROM visits GROUP BY section
        QUALIFY place <= 5 ORDER BY place""",
    ),
    _of_tweets(
        "hours_of_tweets",
        "DIV(sec, 3600) AS hour, COUNT(*) AS events FROM tweets GROUP BY hour",
        options=", public_groups = GENERATE_ARRAY(0, 23)",
    ),
    _of_tweets(
        "known_and_others",
        """IF(target < 100, 'known', 'other') AS whom, kind, COUNT(*) AS events FROM tweets
        GROUP BY ALL EMIT EVERY INTERVAL '3' HOUR""",
    ),
    Asked(
        name="sliding_hours",
        table="tweets",
        log="higgs_twitter_20120704",
        sql=f"""{_CLAUSE} (epsilon = 4, delta = 1e-9, privacy_unit_column = user,
            max_groups_contributed = 12, public_groups = ('RT', 'MT', 'RE'), {_TWEETS})
            kind, window_start, COUNT(*) AS events
            FROM HOP(tweets, DESCRIPTOR(sec), INTERVAL '3' HOUR, INTERVAL '6' HOUR)
            GROUP BY kind, window_start""",
    ),
    Asked(
        name="people_of_each_quarter",
        table="tweets",
        log="higgs_twitter_20120704",
        sql=f"""{_CLAUSE} (epsilon = 2, delta = 1e-9, privacy_unit_column = user,
            privacy_unit_period = INTERVAL '6' HOUR, max_groups_contributed = 2, {_TWEETS})
            kind, window_start, COUNT(DISTINCT user) AS people, COUNT(*) AS events
            FROM TUMBLE(tweets, DESCRIPTOR(sec), INTERVAL '6' HOUR) GROUP BY kind, window_start""",
    ),
    _of_orders(
        "sizes_of_orders",
        """WIDTH_BUCKET(quantity, 0, 100, 10) AS size, COUNT(*) AS customers FROM orders
        WHERE quantity > 0 GROUP BY size ORDER BY size""",
    ),
    _of_orders(
        "steps_of_sizes",
        """RANGE_BUCKET(quantity, [1, 5, 20, 100]) AS step, COUNT(*) AS customers,
        SUM(quantity, contribution_bounds_per_row => (0, 200)) AS items FROM orders
        GROUP BY step HAVING customers > 10""",
        options=", max_rows_per_group = 5",
    ),
    _of_orders(
        "first_signs_of_codes",
        """LEFT(UPPER(stock_code), 2) AS signs, COUNT(*) AS customers,
        STDDEV(quantity, contribution_bounds_per_row => (0, 50)) AS spread FROM orders
        WHERE quantity BETWEEN 1 AND 50 GROUP BY signs""",
    ),
    _of_ratings(
        "half_stars",
        """CAST(rating * 2 AS INT64) AS halves, COUNT(*) AS ratings FROM ratings
        GROUP BY halves ORDER BY halves""",
        options=", public_groups = GENERATE_ARRAY(1, 10)",
    ),
    _of_ratings(
        "likes_by_genre",
        """main_genre, COUNTIF(rating >= 4) AS likes, COUNT(*) AS ratings,
        100 * COUNTIF(rating >= 4) / COUNT(*) AS percent FROM ratings GROUP BY main_genre""",
    ),
)

ALL: Final = (*LISTINGS, *REALISTIC, *JOINED, *UNITED, *COMPUTED)
QUICK: Final = (*LISTINGS, JOINED[0])


def _statuses() -> Columns:
    known = {200: "OK", 206: "partial", 301: "moved", 304: "not modified", 403: "forbidden"}
    known |= {404: "not found", 416: "no such range", 500: "failed"}
    classes = {2: "good", 3: "elsewhere", 4: "wrong request", 5: "wrong here"}
    return {
        "status": list(known),
        "words": list(known.values()),
        "class": [classes[each // 100] for each in known],
    }


def _hours() -> Columns:
    parts = ("night", "morning", "afternoon", "evening")
    return {"hour": list(range(24)), "part": [parts[hour // 6] for hour in range(24)]}


TABLES: Final[dict[str, Columns]] = {
    "statuses": _statuses(),
    "hours": _hours(),
    "kinds": {"kind": ["RT", "MT", "RE"], "name": ["retweet", "mention", "reply"]},
    "topics": {
        "kind": ["RT", "RT", "MT", "RE", "RE"],
        "topic": ["copied", "spread", "named", "answered", "talk"],
    },
    "genres": {
        "main_genre": ["Drama", "Comedy", "Action", "Horror", "Thriller", "Crime", "Adventure"],
        "family": ["serious", "light", "loud", "dark", "dark", "dark", "loud"],
    },
    "plans": {"user": list(range(1, 20_000)), "plan": ["free", "paid", "free"] * 6_666 + ["free"]},
}
"""What is public of these logs; `plans` is a registry of their users, which is made up."""
