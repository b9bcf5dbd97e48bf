"""What the documents show is what happens."""

import doctest
import importlib.util
import io
import re
import shlex
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import typer.main

import dpstream as dps
from dpstream.cli import main
from dpstream.cli.app import app
from dpstream.cli.output import CODES
from dpstream.mechanisms import REGISTRY

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "docs/getting-started.md",
    "docs/cheatsheet.md",
    "docs/cli.md",
    "docs/w-event.md",
    "docs/delayed.md",
    "docs/counters.md",
    "docs/dpi.md",
    "docs/group-by.md",
    "docs/audit.md",
    "docs/pipelines.md",
    "docs/operations.md",
    "docs/serve.md",
    "docs/sql.md",
    "docs/tutorial.md",
    "docs/concepts.md",
    "docs/papers.md",
    "docs/faq.md",
    "docs/howto/bounds.md",
    "docs/howto/window.md",
    "docs/howto/error-bars.md",
    "docs/howto/budget.md",
    "docs/howto/audit.md",
    "docs/howto/product-metrics.md",
    "docs/howto/mechanism.md",
    "docs/howto/aggregate.md",
    "docs/howto/connector.md",
)
LOOSE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def sessions(text):
    """(command, expected output) of every console block, in order; `> ` goes on with a command."""
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            lines = part.splitlines(keepends=True)
            more = next((n for n, line in enumerate(lines[1:], 1) if line[:2] != "> "), len(lines))
            command = "".join([lines[0], *(line[2:] for line in lines[1:more])])
            yield command.removesuffix("\n"), "".join(lines[more:])


def reference():
    """The module that makes the reference pages, as mkdocs loads it."""
    path = ROOT / "docs" / "reference_hook.py"
    spec = importlib.util.spec_from_file_location("reference_hook", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ALL_COMMANDS = dict(reference().walk(typer.main.get_command(app)))


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
    bare = re.sub(r"'[^']*'|\"[^\"$`]*\"", "", command)  # what the shell would look at
    if words[0] == "dpstream" and not re.search(r"[|<>;&$]", bare):
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
    assert [*sessions("```console\n$ a 'b\n> c'\nx\n```\n")] == [("a 'b\nc'", "x\n")]
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


def test_the_reference_has_every_public_name_mechanism_command_and_option():
    """It is made from them, so what is missing was left out by mistake."""
    pages = reference().pages()

    for name in set(dps.__all__) - {"__version__", "errors", "ext", "mechanisms"}:
        assert f"## `dps.{name}`" in pages["reference/python.md"], name
    for name in REGISTRY:
        assert f"## `{name}`" in pages["reference/mechanisms.md"], name
    for name, command in ALL_COMMANDS.items():
        part = pages["reference/commands.md"].partition(f"## `{name}`\n")[2].partition("\n## ")[0]
        for parameter in command.params:
            assert parameter.name == "help" or f"`{parameter.opts[0]}" in part or "| `" in part
    assert " object at 0x" not in "".join(pages.values())


FIGURE = re.compile(r"(?<![\w.,^])(?:\d{1,3}(?:,\d{3})+|\d+\.\d+|\d+%)(?!\d)")


def quoted(text, *, column=None):
    """Figures of a page: those in a column of its tables, or of paragraphs that cite the bench."""
    if column is not None:
        rows = [line.split("|") for line in text.splitlines() if line.count("|") > column]
        return [figure for cells in rows for figure in FIGURE.findall(cells[column])]
    parts = [part for part in text.split("\n\n") if "(benchmarks.md" in part]
    return [figure for part in parts for figure in FIGURE.findall(part)]


def missing(figures, text):
    return [f for f in figures if not re.search(rf"(?<![\d.,]){re.escape(f)}(?!\d)", text)]


def test_figures_that_are_quoted_are_those_of_the_bench():
    """They are copied by hand, and the bench is run again now and then."""
    docs = ROOT / "docs"
    measured = (docs / "benchmarks.md").read_text()
    of_papers = quoted((docs / "papers.md").read_text(), column=4)
    of_questions = quoted((docs / "faq.md").read_text())

    assert len(of_papers) > 20
    assert of_questions
    assert missing([*of_papers, *of_questions], measured) == []
    assert missing(["29,362", "0.8", "3.8%"], "29,393 keys, 0.81, 13.8%") == [
        "29,362",
        "0.8",
        "3.8%",
    ]


def test_every_page_is_in_the_navigation():
    """A page that nobody can reach is no page."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2]
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}

    listed = set(re.findall(r": (\S+\.md)$", nav, re.MULTILINE))
    decisions = {page for page in pages if page.startswith("decisions/0")}
    assert listed - set(reference().pages()) == pages - decisions


def test_exit_codes_are_documented():
    """The table in docs/cli.md is the one in the code."""
    text = (ROOT / "docs" / "cli.md").read_text()

    for code, meaning in CODES.items():
        assert f"| {code} | {meaning} |" in text


def test_the_pages_name_no_machine_and_no_registry():
    """The documents hold on any machine."""
    for page in PAGES:
        assert not re.search(r"https?://|/(home|tmp|w[o]rk|r[o]ot)/", (ROOT / page).read_text())


def test_the_cheat_sheet_has_a_query_that_runs(tmp_path, capsys):
    """Over files, by the commands that stand there; its warning is none."""
    text = (ROOT / "docs" / "cheatsheet.md").read_text()
    (sql,) = re.findall(r"```sql\n(.*?)```", text, re.DOTALL)
    (tmp_path / "query.sql").write_text(sql)
    lines = [f"u{n},/home,{n % 300},2026-03-02 10:00:00" for n in range(900)]
    (tmp_path / "clicks.csv").write_text("\n".join(["user,page,seconds,at", *lines, ""]))
    asked = re.findall(r"`dpstream ((?:check|explain|bounds|sql) [^`]*query\.sql[^`]*)`", text)
    assert [words.split()[0] for words in asked] == ["check", "explain", "bounds", "sql"]
    for words in asked:
        here = words.replace("clicks.csv", f"{tmp_path}/clicks.csv")
        here = here.replace("query.sql", f"{tmp_path}/query.sql")
        here = here.replace("--state state", f"--state {tmp_path}/state")
        with pytest.raises(SystemExit) as left:
            main(here.split())
        assert left.value.code in (0, None), capsys.readouterr().err
    assert "/home" in capsys.readouterr().out
