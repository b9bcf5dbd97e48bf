import pytest
from starlette.testclient import TestClient

from dpstream.serve.declared import declared_books
from dpstream.serve.described import describe
from dpstream.serve.hub import Hub
from dpstream.serve.public import Public
from dpstream.serve.store.reader import ReleaseReader
from dpstream.serve.worker import store_folder
from tests.serve.pipelines import published, rows


def public_side(pipeline, **settings):
    """The public side of a pipeline, as it stands."""
    hub = Hub(ReleaseReader(store_folder(pipeline)), grid=0.05)
    queries = describe(pipeline)
    return Public(queries=queries, hub=hub, ledger=declared_books(pipeline), **settings)


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
