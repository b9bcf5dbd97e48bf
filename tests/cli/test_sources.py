"""`dpstream sources` says what there is and what to install."""

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

from dpstream.connectors.registry import SINKS, SOURCES


def test_everything_is_listed(run):
    """Each kind with an example, and the extra of what is not there."""
    done = run("sources")

    assert done.code == 0
    for known in (SOURCES, SINKS):
        for name, one in known.items():
            assert name in done.out
            assert one.example in done.out
            if not one.installed:
                assert f"pip install 'dpstream[{one.extra}]'" in done.out


def test_nothing_is_lost_on_a_narrow_screen(run, monkeypatch):
    """Nothing installed, 40 columns: every example and every command is there in one piece."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("dpstream.connectors.registry.find_spec", lambda name: None)
    done = run("sources")

    assert done.code == 0
    for known in (SOURCES, SINKS):
        for one in known.values():
            assert one.example in done.out
            assert one.about in done.out
            assert "exactly once" in one.promise
            assert one.promise in done.out
            assert one.extra is None or f"pip install 'dpstream[{one.extra}]'" in done.out


def test_scripts_read_what_is_installed(run, monkeypatch):
    """Packages that are blocked count as absent."""
    names = {one.package for one in (*SOURCES.values(), *SINKS.values())} - {None}
    monkeypatch.setattr(
        "dpstream.connectors.registry.find_spec",
        lambda name: None if name in names else find_spec(name),
    )
    found = run("sources", "--json").json

    assert {row["name"] for row in found["sources"]} >= {"files", "-", "kafka", "nats", "postgres"}
    assert {row["name"] for row in found["sinks"]} >= {"sqlite", "delta", "nats", "postgres"}
    for row in (*found["sources"], *found["sinks"]):
        assert row["installed"] == (row["package"] not in names)
        assert row["extra"] or row["installed"]


def test_every_extra_that_is_named_exists():
    """What the list tells to install can be installed."""
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    named = {one.extra for known in (SOURCES, SINKS) for one in known.values()}

    assert named - {None} <= set(extras)
    assert named - {None} <= set(re.findall(r"\w+", extras["connectors"][0]))
