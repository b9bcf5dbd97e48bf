"""The notebooks in examples/ run from the first cell to the last, and show what they promise."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
SHOWS = {
    "analyst": ("text/html", "image/png", "was at its end", "(0, True)"),
    "data_engineer": ("nothing was charged", "customers_stddev", "spent"),
    "data_protection_officer": ("text/html", "is left; lower", "the state directory"),
    "researcher": ("text/html", "image/png", "steps paid", "only 0 of 2 is left"),
}
"""Words and kinds of output that must be there."""


def test_each_kind_of_user_has_a_notebook():
    """Those that the test below knows."""
    assert [path.stem for path in NOTEBOOKS] == sorted(SHOWS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    """In an empty folder, by a kernel of its own."""
    import nbformat
    from nbclient import NotebookClient

    beside = Path(sys.executable).parent  # cells call the command, as an environment has it
    monkeypatch.setenv("PATH", f"{beside}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("MPLBACKEND", raising=False)  # as where people open it
    notebook = nbformat.read(path, as_version=4)
    stored = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in stored)
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    shown = json.dumps([cell.get("outputs", []) for cell in notebook.cells], ensure_ascii=False)

    assert [words for words in SHOWS[path.stem] if words not in shown] == []
    failed = re.findall(r"Traceback|error: |Usage:", shown)
    assert failed == []
