"""The page's files: complete, from here alone, and nothing in them that turns text into markup."""

import re
from pathlib import Path

import pytest

import dpstream.serve

ASSETS = Path(dpstream.serve.__file__).parent / "assets"
OURS = sorted(path for path in ASSETS.rglob("*") if path.is_file() and "vendor" not in path.parts)
UPLOT = ASSETS / "vendor" / "uplot"


def test_the_library_is_the_one_that_is_named():
    """Version and license stand beside the file."""
    told = re.search(r"# uPlot ([\d.]+)", (UPLOT / "README.md").read_text()).group(1)

    assert f"v{told}" in (UPLOT / "uPlot.esm.js").read_text()[:300]
    assert "MIT License" in (UPLOT / "LICENSE").read_text()


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_nothing_comes_from_elsewhere(path):
    """No address but names of namespaces; every file that is named is there."""
    text = path.read_text()
    assert set(re.findall(r"https?://[^\s\"')]+", text)) <= {"http://www.w3.org/2000/svg"}
    for name in re.findall(r'(?:src|href)="(assets/[^"]+)"', text):
        assert (ASSETS.parent / name).is_file()
    for name in re.findall(r'from "(\.[^"]+)"', text):
        assert (path.parent / name).is_file()


@pytest.mark.parametrize("path", [*OURS, UPLOT / "uPlot.esm.js"], ids=lambda path: path.name)
def test_no_text_becomes_markup(path):
    """Nothing that parses text as markup or code; nothing inline, which the policy forbids."""
    text = path.read_text()
    for banned in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
    ):
        assert banned not in text
    assert not re.search(r"<[^>]+\s(style|on[a-z]+)=", text) or path.suffix != ".html"


def test_files_are_short_stories():
    """A screen or a few each, but for what came with a package."""
    assert {path.name for path in OURS if len(path.read_text().splitlines()) > 290} == set()
