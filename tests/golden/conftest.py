"""The corpus as a fixture; with DPSTREAM_GOLDEN_WRITE=1 it is written instead of checked."""

import os

import pytest

from tests.golden import corpus


class Golden:
    """Compares runs with the stored digests, or collects their digests to store them."""

    def __init__(self, writing):
        self.writing, self.stored, self.made = writing, corpus.stored(), {}

    def check(self, name, whole, resumed):
        """The run `whole` and the run `resumed` in the middle have the digests of the case."""
        parts = [
            one for one in ("releases", "spent") if getattr(whole, one) != getattr(resumed, one)
        ]
        why = f"its {' and '.join(parts)} differ from those of the whole run"
        assert not parts, self.told(name, ["resumed"], why)
        found = whole.digests()
        if self.writing:
            self.made[name] = found
            return
        known = self.stored.get(name, {})
        differs = [part for part in found if found[part] != known.get(part)]
        pairs = (
            f"{part} {str(known.get(part))[:12]} is now {found[part][:12]}" for part in differs
        )
        assert not differs, self.told(name, differs, "; ".join(pairs))

    def told(self, name, parts, why):
        """What differs, and what to do about it."""
        return (
            f"golden case {name!r} differs in: {', '.join(parts)} ({why}). If what is published "
            "was meant to change: make golden WRITE=1, and put the line that it prints, with the "
            "reason, into CHANGELOG.md"
        )


@pytest.fixture(scope="session")
def golden():
    """The corpus."""
    held = Golden(os.environ.get("DPSTREAM_GOLDEN_WRITE") == "1")
    yield held
    if held.made:
        print(f"\n{len(held.made)} cases written; CHANGELOG.md needs: - {corpus.write(held.made)}")


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Runs are left and taken up again, but the machine never loses its power."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
