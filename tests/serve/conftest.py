import pytest
from starlette.testclient import TestClient

from dpstream.serve.event_stream import Hub
from dpstream.serve.public_facts import declared_books, describe_queries
from dpstream.serve.public_side import PublicSide
from dpstream.serve.release_store import ReleaseReader
from dpstream.serve.worker import store_folder
from tests.serve.pipelines import published, rows


def public_side(pipeline, **settings):
    """The public side of a pipeline, as it stands."""
    hub = Hub(ReleaseReader(store_folder(pipeline)), grid=0.05)
    queries = describe_queries(pipeline)
    return PublicSide(queries=queries, hub=hub, ledger=declared_books(pipeline), **settings)


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory):
    return published(tmp_path_factory.mktemp("served") / "p", rows())


@pytest.fixture(scope="session")
def public(pipeline):
    return public_side(pipeline, rate=1e6, burst=10**6)


@pytest.fixture(scope="session")
def feed(public):
    with TestClient(public.app(), raise_server_exceptions=False) as client:
        yield client
