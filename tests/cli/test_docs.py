"""What the documents show is what happens."""

import doctest
import io
import re
import shlex
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import typer.main

from dpstream.cli import main
from dpstream.cli.app import app
from dpstream.cli.exits import CODES

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "docs/getting-started.md",
    "docs/cli.md",
    "docs/w-event.md",
    "docs/delayed.md",
    "docs/counters.md",
    "docs/dpi.md",
    "docs/group-by.md",
    "docs/audit.md",
    "docs/pipelines.md",
    "docs/serve.md",
    "docs/sql.md",
)
LOOSE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def sessions(text):
    """(command, expected output) of every console block, in order."""
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, expected = part.partition("\n")
            yield command, expected


def commands(group, path="dpstream"):
    """Every command of the tree with its full name."""
    for name, command in group.commands.items():
        yield f"{path} {name}", command
        if hasattr(command, "commands"):
            yield from commands(command, f"{path} {name}")


ALL_COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("page", PAGES)
def test_python_examples_give_what_they_show(page):
    """Every `>>>` of the page, run in an empty folder."""
    text = (ROOT / page).read_text()
    failed, tried = doctest.testfile(str(ROOT / page), module_relative=False, optionflags=LOOSE)

    assert failed == 0
    assert tried == text.count(">>> ")


def execute(command, code):
    """Output and exit code, after a command that left with `code`; dpstream runs in here."""
    words = shlex.split(command)
    if words[0] == "dpstream" and not re.search(r"[|<>;&$]", command):
        text = io.StringIO()
        with redirect_stdout(text), redirect_stderr(text), pytest.raises(SystemExit) as left:
            main(words[1:])
        return text.getvalue(), left.value.code
    done = subprocess.run(
        ["bash", "-c", f"(exit {code}); {command}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.stdout, done.returncode


@pytest.mark.parametrize("page", PAGES)
def test_console_examples_give_what_they_show(page):
    """Every `$` line of the page, one after the other; `...` stands for what differs each time."""
    checker, code = doctest.OutputChecker(), 0
    for command, expected in sessions((ROOT / page).read_text()):
        output, code = execute(command, code)
        assert checker.check_output(expected, output, LOOSE), f"{command}\n{output}"


def test_the_console_checker_sees_a_difference():
    """An ellipsis matches anything, but what is written must be there."""
    assert [*sessions("```console\n$ a\nx\ny\n$ b\n```\n")] == [("a", "x\ny\n"), ("b", "")]
    assert not doctest.OutputChecker().check_output("x ... y\n", "x 1 z\n", LOOSE)


@pytest.mark.parametrize("name", ALL_COMMANDS)
def test_every_command_and_option_is_documented(name):
    """A new command or option needs its line in docs/cli.md."""
    text = (ROOT / "docs" / "cli.md").read_text()
    headings = re.findall(r"^#+ `(.*)`$", text, re.MULTILINE)

    assert name in headings
    options = {option for p in ALL_COMMANDS[name].params for option in p.opts if option[:2] == "--"}
    missing = {o for o in options - {"--help"} if not re.search(rf"{o}(?![\w-])", text)}
    assert not missing


def test_exit_codes_are_documented():
    """The table in docs/cli.md is the one in the code."""
    text = (ROOT / "docs" / "cli.md").read_text()

    for code, meaning in CODES.items():
        assert f"| {code} | {meaning} |" in text


def test_the_pages_name_no_machine_and_no_registry():
    """The documents hold on any machine."""
    for page in PAGES:
        assert not re.search(r"https?://|/(home|tmp|w[o]rk|r[o]ot)/", (ROOT / page).read_text())
