"""Runs of this folder are killed, damaged and refused, but the machine never loses its power."""

import os

import pytest


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_the_disk():
    """A kill loses nothing that was written, synced or not; where syncs matter, files are torn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield
