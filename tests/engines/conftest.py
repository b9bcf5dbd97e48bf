"""Runs of this folder are killed, damaged and refused, but the machine never loses its power."""

import os

import pytest

from tests.conftest import KAFKA_JARS


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_the_disk():
    """A kill loses nothing that was written, synced or not; where syncs matter, files are torn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


@pytest.fixture(scope="session")
def session():
    """One Spark session for all tests of the component."""
    from dpstream.engines.spark import local_session

    settings = {
        "spark.jars": ",".join(map(str, sorted(KAFKA_JARS.glob("*.jar")))),
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
    }
    made = local_session("local[2]", **settings)
    made.sparkContext.setLogLevel("OFF")
    yield made
    made.stop()


@pytest.fixture(params=["embedded", pytest.param("spark", marks=pytest.mark.spark)])
def engine(request):
    """Each engine in turn, as `dps.run` takes it."""
    if request.param == "embedded":
        return None
    from dpstream.engines.spark import SparkEngine

    return SparkEngine(request.getfixturevalue("session"), buckets=2, steps_at_once=4)
