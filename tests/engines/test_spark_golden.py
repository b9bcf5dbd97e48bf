"""On Spark the same queries publish what the golden corpus has of the embedded engine."""

import pytest

from tests.golden.corpus import Golden
from tests.golden.queries import CASES
from tests.golden.test_queries import publish

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]
NAMES = ["once", "late rows", "per group, once", "distinct", "nothing given"]


@pytest.mark.parametrize("name", NAMES)
def test_query(session, name, tmp_path):
    """The same files, and the same charge; broken off in the middle too."""
    from dpstream.engines.spark import SparkEngine

    engine = SparkEngine(session, buckets=2, steps_at_once=8)
    whole, releases = publish(CASES[name], tmp_path / "whole", engine=engine)
    half = max(1, releases // 2)
    resumed, _ = publish(CASES[name], tmp_path / "resumed", leave_after=half, engine=engine)

    Golden().check(f"query/{name}", whole, resumed)
