"""The corpus as a fixture; with DPSTREAM_GOLDEN_WRITE=1 it is written instead of checked."""

import os

import pytest

from tests.golden import corpus


@pytest.fixture(scope="session")
def golden():
    """The corpus."""
    held = corpus.Golden(os.environ.get("DPSTREAM_GOLDEN_WRITE") == "1")
    yield held
    if held.made:
        print(f"\n{len(held.made)} cases written; CHANGELOG.md needs: - {corpus.write(held.made)}")


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Runs are left and taken up again, but the machine never loses its power."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
