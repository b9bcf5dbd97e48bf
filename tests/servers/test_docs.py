"""The page on connectors, with the servers that it speaks of."""

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

TEXT = (ROOT / "docs" / "connectors.md").read_text()


@pytest.fixture
def here(tmp_path, monkeypatch, kafka, postgres, nats, registry, objects):
    """The page, with the addresses of the running servers, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "nats.password").write_text(nats.password_file.read_text())
    objects.bucket("clicks")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = TEXT
    usual = {9092: kafka, 5432: postgres, 4222: nats, 8081: registry, 9000: objects}
    for port, server in usual.items():
        text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{server.port}")
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


def test_the_examples_give_what_they_show(here):
    """First what is Python, then every `$` line, one after the other."""
    runner = doctest.DocTestRunner(optionflags=LOOSE)
    found = runner.run(doctest.DocTestParser().get_doctest(here, {}, "connectors", None, 0))
    assert found.failed == 0
    assert found.attempted == TEXT.count(">>> ")
    checker = doctest.OutputChecker()
    for command, expected in sessions(here):
        output = "\n".join(line.rstrip() for line in execute(command).splitlines())
        shown = "\n".join(line.rstrip() for line in expected.splitlines())
        assert checker.check_output(shown, output, LOOSE), f"{command}\n{output}"


def test_the_pipeline_of_a_bucket(tmp_path, monkeypatch, objects):
    """As it stands on the page; run again it publishes nothing."""
    monkeypatch.chdir(tmp_path)
    block = next(text for text in re.findall(r"```toml\n(.*?)```", TEXT, re.S) if "s3://" in text)
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


def test_every_option_is_on_the_page():
    """Options of the connectors that the page speaks of."""
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
        assert re.search(rf"\b{option}(_file)?\b", TEXT), option


def test_the_page_names_no_machine():
    """It holds on any machine."""
    assert not re.search(r"https?://(?!127\.0\.0\.1|HOST)|/(home|tmp|w[o]rk|r[o]ot)/", TEXT)
