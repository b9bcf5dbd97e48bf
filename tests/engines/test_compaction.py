"""Live runs whose log and ledger are compacted all the time publish what they publish otherwise."""

from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

import dpstream as dps
from benchmarks.recovery_case import CheckingSink
from dpstream.errors import NoiseReuse, StateError
from dpstream.privacy.ledger import ledger as ledgers
from dpstream.privacy.state import InputLog, journal
from tests.support.fixed import RUN, SECRET
from tests.support.kill_and_replay import AfterReleases, KindOfRun, kill_everywhere
from tests.support.live_runs import QUERY, kept_clock, last_releases, live, settled, start_live
from tests.support.runs import charges, options, published

SERIES = dps.compile_sql(
    """SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 2, privacy_unit = 'w_event',
    w = 3, mechanism = 'budget_distribution', privacy_unit_column = user, time_unit = 'us',
    public_groups = ('/1', '/2'), start = '1970-01-01', end = '1970-01-01 06:00') window_start,
    page, COUNT(*) AS n FROM TUMBLE(clicks, DESCRIPTOR(at), INTERVAL '30' MINUTE)
    GROUP BY window_start, page"""
)
