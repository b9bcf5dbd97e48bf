"""The pages on connectors, with the servers that they speak of."""

import doctest
import io
import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import closing, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from dpstream.cli import main
from dpstream.privacy.ledger.ledger import Ledger
from tests.cli.test_docs import LOOSE, ROOT, sessions

pytestmark = pytest.mark.servers

INDEX = ROOT / "docs" / "connectors.md"
SYSTEMS = sorted((ROOT / "docs" / "connectors").glob("*.md"))
PAGES = {path.stem: path.read_text() for path in (INDEX, *SYSTEMS)}
ALL = "".join(PAGES.values())
USUAL = {
    9092: "kafka", 5432: "postgres", 4222: "nats", 8081: "registry", 9000: "objects",
    4318: "collector", 8181: "iceberg",
}  # fmt: skip


@pytest.fixture
def here(request, tmp_path, monkeypatch):
    """A page, with the addresses of the running servers, in a folder that has its pipelines."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = PAGES[request.param]
    for port, name in USUAL.items():
        if f"127.0.0.1:{port}" in text:
            server = request.getfixturevalue(name)
            text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{server.port}")
            if name == "nats":
                (tmp_path / "nats.password").write_text(server.password_file.read_text())
            if name == "objects":
                server.bucket("clicks")
    for name, content in re.findall(r"```toml\n# (\S+\.toml)\n(.*?)```", text, re.DOTALL):
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)  # servers are looked for where the tests are
    return text


def execute(command):
    """Output of a command; dpstream runs in here."""
    words = shlex.split(command)
    if words[0] != "dpstream":
        done = subprocess.run(
            ["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return done.stdout
    text = io.StringIO()
    with redirect_stdout(text), redirect_stderr(text), pytest.raises(SystemExit):
        main(words[1:])
    return text.getvalue()


@pytest.mark.parametrize("here", PAGES, indirect=True)
def test_the_examples_give_what_they_show(here):
    """First what is Python, then every `$` line, one after the other; each page has a pipeline."""
    runner = doctest.DocTestRunner(optionflags=LOOSE)
    found = runner.run(doctest.DocTestParser().get_doctest(here, {}, "page", None, 0))
    assert found.failed == 0
    assert found.attempted == here.count(">>> ")
    checker = doctest.OutputChecker()
    for command, expected in sessions(here):
        output = "\n".join(line.rstrip() for line in execute(command).splitlines())
        shown = "\n".join(line.rstrip() for line in expected.splitlines())
        assert checker.check_output(shown, output, LOOSE), f"{command}\n{output}"


def test_every_page_has_a_pipeline_that_runs():
    """And every page is in the list of all."""
    for page in SYSTEMS:
        runs = "\n$ dpstream run " in PAGES[page.stem] or page.stem == "object-stores"  # see below
        assert runs, page
        assert f"(connectors/{page.name})" in PAGES["connectors"], page


def test_the_pipeline_of_a_bucket(tmp_path, monkeypatch, objects):
    """As it stands on the page; run again it publishes nothing."""
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```toml\n(.*?)```", PAGES["object-stores"], re.DOTALL)
    folder = objects.bucket("pipeline")
    (tmp_path / "pipeline.toml").write_text(block.replace("s3://clicks/", "s3://pipeline/"))
    (folder / "logs").mkdir()
    rows = "".join(f"u{n},{'home' if n % 3 else 'news'}\n" for n in range(900))
    (folder / "logs" / "monday.csv").write_text("user,page\n" + rows)
    execute("dpstream run pipeline.toml")
    found = {path.name: path.read_bytes() for path in (folder / "by-page").iterdir()}
    again = execute("dpstream run pipeline.toml")

    (only,) = (path for name, path in found.items() if name.endswith(".jsonl"))
    assert sorted(json.loads(line)["page"] for line in only.splitlines()) == ["home", "news"]
    assert "everything was published before" in again
    assert {path.name: path.read_bytes() for path in (folder / "by-page").iterdir()} == found
    with closing(Ledger("s3://pipeline/states/by-page/ledger")) as ledger:
        assert len([record for record in ledger.history() if "amount" in record]) == 1


def test_every_option_is_on_a_page():
    """Options of the connectors that the pages speak of."""
    connectors, options = ROOT / "src" / "dpstream" / "connectors", set()
    systems = [
        path
        for name in ("kafka", "nats", "postgres", "delta", "iceberg", "objects")
        for path in (connectors / name).iterdir()
    ]
    for path in (*connectors.glob("*.py"), *systems):
        if path.suffix == ".py":
            taken = r'(?:options|self)\.(?:text|choice|number|secret)\(\s*"(\w+)"'
            options |= set(re.findall(taken, path.read_text()))
    assert options >= {"format", "start", "patience", "table", "index_topic", "subject", "password"}
    for option in options:
        assert re.search(rf"\b{option}(_file)?\b", ALL), option


def test_the_pages_name_no_machine():
    """They hold on any machine."""
    assert not re.search(r"https?://(?!127\.0\.0\.1|HOST)|/(home|tmp|w[o]rk|r[o]ot)/", ALL)
