"""Run commands in this process and look at what came out."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dpstream.cli import main


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Stdout as one JSON document."""
        return json.loads(self.out)

    @property
    def error(self) -> dict[str, Any]:
        """The last line of stderr as JSON."""
        return json.loads(self.err.splitlines()[-1])


Run = Callable[..., Done]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory and no defaults from the environment."""
    monkeypatch.chdir(tmp_path)
    for name in ("DPSTREAM_LEDGER", "DPSTREAM_SECRET_FILE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("release", "x.csv", ...)` as the shell would."""

    def call(*args: str) -> Done:
        with pytest.raises(SystemExit) as left:
            main([*args])
        captured = capsys.readouterr()
        assert isinstance(left.value.code, int)
        return Done(left.value.code, captured.out, captured.err)

    return call


@pytest.fixture
def visits(folder: Path) -> Path:
    """Six days, two clinics."""
    path = folder / "visits.csv"
    counts = [(12, 30), (15, 28), (11, 35), (14, 31), (9, 29), (13, 33)]
    lines = [f"2024-03-{day:02d},{a},{b}\n" for day, (a, b) in enumerate(counts, start=1)]
    path.write_text("day,north,south\n" + "".join(lines))
    return path
