"""States and ledgers of released versions are taken up, and go on to the stored digests.

`write.py` writes those of this version, while it is not released.
"""

import json
import shutil
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from dpstream.errors import StateError
from dpstream.privacy.ledger import ledger as ledgers
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.state import journal
from tests.stored.cases import CASES, run

HERE = Path(__file__).resolve().parent
VERSIONS = sorted(path.parent.name for path in HERE.glob("*/digests.json"))


def digests(version):
    """Case -> what it must come to."""
    return json.loads((HERE / version / "digests.json").read_text("ascii"))


@pytest.fixture(autouse=True)
def _no_defaults(monkeypatch):
    for name in ("DPSTREAM_LEDGER", "DPSTREAM_SECRET_FILE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


def take(version, name, place):
    """A copy of what is stored, with the modes that version control does not keep."""
    shutil.copytree(HERE / version / name, place)
    for path in place.glob("*.secret"):
        path.chmod(0o600)


def adopt(case):
    """Nobody else has this copy: its files are new ones, so somebody must vouch for it."""
    ledger = ("--ledger", case.book) if case.book else ()
    word = ("--because", "stored with the tests", "--only-copy", "--nothing-since", "--who", "test")
    run("state", "adopt", case.state, *word, *ledger)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CASES)
def test_a_later_version_goes_on(version, name, tmp_path, monkeypatch):
    """The same releases and charges as the version that wrote it would have come to."""
    known = digests(version)
    if name not in known:
        assert version < max(VERSIONS), f"{name} is not stored: make stored"
        return
    case = CASES[name]
    take(version, name, tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    if case.state is not None:
        adopt(case)

    assert case.go_on().digests() == known[name]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CASES)
def test_a_stored_ledger_may_be_compacted(version, name, tmp_path, monkeypatch):
    """What is stored goes on as before; `state adopt` knows the file by what it has replaced."""
    case = CASES[name]
    take(version, name, tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    if case.state is not None:
        adopt(case)
    monkeypatch.setattr(journal, "LARGE", 0)
    monkeypatch.setattr(ledgers, "_WORTHWHILE", 1)
    monkeypatch.setattr(ledgers, "_VERBATIM", timedelta(0))
    (path,) = [path for path in Path().rglob("*") if path.name in ("ledger", "book")]
    with closing(Ledger(path)) as ledger:
        ledger.compact()
    assert b'"format":2' in path.read_bytes().splitlines()[0]
    published, known = case.go_on().digests(), digests(version)[name]

    assert published | {"ledger": ""} == known | {"ledger": ""}  # it has fewer entries


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_stored_is_not_taken_for_the_original(version, tmp_path, monkeypatch):
    """Without an adoption a copy of a state and its ledger is refused."""
    take(version, "runner", tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")

    with pytest.raises(StateError, match="dpstream state adopt"):
        CASES["runner"].go_on()


def test_there_is_a_stored_version():
    """0.2 is the first that every later one must take up."""
    assert "0.2" in VERSIONS
