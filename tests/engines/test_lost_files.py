"""Whatever a state directory has lost, it shows the same bytes again or says what is missing.

Every file and folder of it is removed, emptied, cut, put back from an older copy, or replaced by
another run's, before, between and after snapshots, with the ledger inside and outside. Then the run
is started over the same rows and over rows with one more user. A release that was shown must never
come again with other values: that is fresh noise for one charge, or one noise over two inputs.
"""

import pytest

from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.state import run_directory
from tests.support.long import PART, is_long
from tests.support.lost_files import Grouped, Series, Stepped, find_problems

CASES = [
    (kind, inside, stage)
    for kind in (Grouped, Series, Stepped)
    for inside in (True, False)
    for stage in ("before", "between", "after")
]
STARTS = {"before": (1, 1), "between": (2, 1), "after": (3, 3)}
"""Releases of a first start, whose state becomes the older copy, and of a second one."""


def problems(place, case):
    """What went wrong when things were lost from a run of this kind at this stage."""
    (kind, inside, stage), shift = case, CASES.index(case)
    book = place / "books" / "book"
    book.parent.mkdir(parents=True)
    found, replayed = find_problems(
        kind(),
        place,
        None if inside else book,
        STARTS[stage],
        lambda number, name: is_long() or (number + shift) % PART == 0,
    )
    assert replayed
    return found


@pytest.mark.filterwarnings("ignore::dpstream.engines.embedded.snapshots.DamagedSnapshot")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__}-{case[1]}-{case[2]}")
def test_what_is_lost_is_never_made_up(tmp_path, case):
    """Identical releases, or a refusal that says what to do."""
    assert problems(tmp_path, case) == []


@pytest.mark.parametrize("inside", [True, False])
def test_without_the_ledgers_witness_other_values_are_shown(tmp_path, monkeypatch, inside):
    """The control: what the law above would find in a directory that trusts itself."""
    monkeypatch.setenv("DPSTREAM_LONG", "1")
    monkeypatch.setattr(run_directory, "_compare", lambda found: None)
    monkeypatch.setattr(Ledger, "note_windows", lambda *_, **__: None)
    found = problems(tmp_path, (Grouped, inside, "before"))

    assert "windows removed, 0 user more: other values" in found
    assert [line for line in found if line.startswith("inputs.log cut") and "1 user more" in line]
