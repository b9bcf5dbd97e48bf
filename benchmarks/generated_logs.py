"""Two generated logs with the shapes of real ones, the same rows from the same seed.

`web_sessions`: 60,000 sessions of 1 to 267 page views, 2.5 in the mean, over 500 pages, as of a
small web shop (the BMS WebView logs). `customer_orders`: 23,600 customers with 69,700 orders in 78
weeks, a third of them in the first 12 weeks, when every customer comes first; amounts are
log-normal around 35, with a tail to 1,300 (as the CDNOW customers). `forum_posts`: 1,400,000 users
with 3,800,000 posts in 29,651 forums, fitted to what Zhang et al., "Differentially Private Stream
Processing at Scale", 2023, print of Reddit in their Table 2.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

from dpstream.records import Integers, Reals

SESSIONS: Final = 60_000
PAGES: Final = 500
CUSTOMERS: Final = 23_600
WEEKS: Final = 78
_MOST_VIEWS = 267
_LOG_VIEWS = -0.05  # rounded up they are 2.5 in the mean
_MORE_ORDERS = 46_100  # beyond the first one of each customer
_FIRST_WEEKS = 12
_WEEK: Final = 7 * 86_400
POSTERS: Final = 1_400_000
FORUMS: Final = 29_651
_POSTS_LAW: Final = (0.5, 2.5103)  # 2.71 posts a user in the mean, 17% of them beyond the 17th
_FORUMS_LAW: Final = (1.8444, 1.2353)  # of all but the largest forum
_LARGEST: Final = 0.158  # of all posts
_DAY: Final = 86_400


def web_sessions(*, sessions: int = SESSIONS, seed: int = 25) -> pa.Table:
    """Page views: `session`, `page`."""
    rng = np.random.default_rng(seed)
    views = np.ceil(rng.lognormal(_LOG_VIEWS, 1.2, sessions)).astype(np.int64)
    views = np.minimum(views, _MOST_VIEWS)
    views[0] = _MOST_VIEWS
    popular = 1 / np.arange(5, PAGES + 5) ** 0.8
    pages = rng.choice(PAGES, int(views.sum()), p=popular / popular.sum())
    return pa.table({"session": np.repeat(np.arange(sessions), views), "page": pages})


def customer_orders(*, customers: int = CUSTOMERS, seed: int = 25) -> pa.Table:
    """Orders: `customer`, `ts` (seconds since 1997-01-01), `amount`."""
    rng = np.random.default_rng(seed)
    liking = rng.gamma(0.35, size=customers)  # most never come again, a few again and again
    more = round(_MORE_ORDERS * customers / CUSTOMERS)
    again = rng.choice(customers, more, p=liking / liking.sum())
    first = rng.integers(0, _FIRST_WEEKS * _WEEK, customers)
    later = rng.integers(_FIRST_WEEKS * _WEEK, WEEKS * _WEEK, more)
    who: Integers = np.concatenate([np.arange(customers), again])
    times = np.concatenate([first, later])
    amounts = np.round(np.clip(rng.lognormal(np.log(35) - 0.45, 0.95, len(who)), 1, 1300), 2)
    order = np.argsort(times, kind="stable")
    return pa.table({"customer": who[order], "ts": times[order], "amount": amounts[order]})


def forum_posts(*, users: int = POSTERS, seed: int = 25) -> pa.Table:
    """Posts: `user`, `target` (the forum), `sec` of a day, in order.

    Numbers of posts and forums follow Zipf-Mandelbrot laws (the largest forum apart), each post
    chooses by itself. The laws are fitted to the errors that Table 2 prints for DP-SQLP with
    C = 17: what the bound cuts off the largest forum (102,250), off the others (a l_2 of 76,500
    beside it), and what is left of l_1 (989,249) for forums beyond the 1,473 that were found.

    >>> posts = forum_posts(users=20_000)
    >>> 2.4 < len(posts) / 20_000 < 3.0, posts.column_names
    (True, ['user', 'target', 'sec'])
    """
    rng = np.random.default_rng(seed)
    most = np.arange(1, 5_001)
    counts = rng.choice(most, users, p=_zipf_mandelbrot(most, *_POSTS_LAW))
    who = np.repeat(np.arange(users, dtype=np.int32), counts)
    others = np.arange(1, FORUMS)
    where = rng.choice(others, len(who), p=_zipf_mandelbrot(others, *_FORUMS_LAW)).astype(np.int32)
    where[rng.random(len(who)) < _LARGEST] = 0
    when = np.sort(rng.integers(0, _DAY, len(who), dtype=np.int32))
    order = rng.permutation(len(who))
    return pa.table({"user": who[order], "target": where[order], "sec": when})


def _zipf_mandelbrot(size: Integers, q: float, s: float) -> Reals:
    weights = (size + q) ** -s
    probabilities: Reals = weights / weights.sum()
    return probabilities
