import pytest
from starlette.testclient import TestClient

from tests.support.pipelines import public_side, published, rows


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
