"""The other commands: ledger, mechanisms, bench, version, completion."""

import json
from importlib.metadata import entry_points, version

import pytest

import benchmarks
from dpstream.cli import bench_command as command
from dpstream.cli.app import COMMANDS, Commands
from dpstream.cli.mechanisms_command import about
from dpstream.mechanisms import REGISTRY

SAMPLE = ("--mechanism", "sample", "--window", "3", "--epsilon", "1")
BOOK = ("--ledger", "book", "--dataset", "clinics")
OPEN = ("ledger", "open", *BOOK, "--privacy-unit", "w_event", "--window", "3", "--epsilon", "1.5")


def test_version_and_help(run):
    """Without a command there is help; exit codes stand below it."""
    assert run("--version").out == f"dpstream {version('dpstream')}\n"
    assert "Exit codes: 0 ok" in run("--help").out
    assert run().code == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_of_a_command_what_it_says_itself(name):
    """The list is written apart from the commands, so that it needs none of them."""
    command = Commands().load(name)

    assert command.help.partition("\n")[0] == COMMANDS[name]


def test_the_console_entry_is_main():
    """What pip installs calls dpstream.cli:main."""
    (entry,) = entry_points(group="console_scripts", name="dpstream")

    assert entry.value == "dpstream.cli:main"


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_mechanism_describes_itself(name):
    """A registered mechanism needs no line here to be listed in full."""
    found = about(name)

    assert all(found[key] for key in ("summary", "guarantee", "unit", "delay", "paper"))
    assert any(p["name"] == "epsilon" for p in found["parameters"])


def test_mechanisms_are_listed_for_people_and_scripts(run):
    """Both forms name each of them."""
    names = [entry["name"] for entry in run("mechanisms", "--json").json]

    assert names == sorted(REGISTRY)
    assert all(f"\n{name}\n" in "\n" + run("mechanisms").out for name in names)
    assert [entry["name"] for entry in run("mechanisms", "pacer", "--json").json] == ["pacer"]
    assert "did you mean 'pacer'?" in run("mechanisms", "pacr").err


def test_the_ledger_tells_what_was_spent_on_what_and_when(run, visits):
    """Opened, charged, shown: as a table and as JSON."""
    assert "epsilon = 1.5" in run(*OPEN).out
    run("release", str(visits), *SAMPLE, *BOOK)

    (book,) = run("ledger", "show", "--ledger", "book", "--json").json
    shown = run("ledger", "--ledger", "book").out

    (line,) = book["spent_on"]
    assert (book["left"], line["query"], line["charges"], line["amount"]) == (
        "1/2",
        "sample",
        2,
        "2",
    )
    assert line["last_at"] >= line["first_at"] > "2000"
    assert "1 of 1.5 spent in the last 3 steps" in shown
    assert "█" * 16 + "░" * 8 in shown


def test_history_lists_every_entry(run, visits):
    """The book, the run and its charges, oldest first; one dataset can be picked."""
    run(*OPEN)
    run("release", str(visits), *SAMPLE, *BOOK)

    records = run("ledger", "history", "--ledger", "book", "--json").json
    assert [r.get("step") for r in records] == [None, None, 0, 3]
    assert "opened: epsilon = 1.5" in run("ledger", "history", "--ledger", "book").out
    assert run("ledger", "history", "--ledger", "book", "--dataset", "x", "--json").json == []


def test_options_may_stand_before_the_subcommand(run):
    """`dpstream ledger --ledger book --json history` is the same."""
    run(*OPEN)

    assert len(run("ledger", "--ledger", "book", "--json", "history").json) == 1


def test_opening_again_changes_nothing_and_other_terms_are_refused(run):
    """A book's promise does not move."""
    first, second = run(*OPEN, "--json"), run(*OPEN, "--json")
    other = run(*OPEN[:-1], "2")

    assert first.json == second.json
    assert (other.code, "promises epsilon = 1.5" in other.err) == (4, True)


@pytest.mark.parametrize("args", [("--ledger", "none"), ("show", "--ledger", "none")])
def test_looking_at_a_missing_ledger_makes_none(run, folder, args):
    """A typing error must not leave an empty book behind."""
    done = run("ledger", *args)

    assert (done.code, "there is no ledger at none" in done.err) == (4, True)
    assert not (folder / "none").exists()


def test_a_book_may_be_called_anything(run):
    """Brackets and colons are names, not markup."""
    args = ("ledger", "open", "--ledger", "book", "--privacy-unit", "event", "--epsilon", "1")
    run(*args, "--dataset", "[/red] :smile:")

    assert "[/red] :smile:: epsilon = 1" in run("ledger", "--ledger", "book").out
    assert run("ledger", "show", "--ledger", "book", "--dataset", "x").code == 4


@pytest.fixture
def benches(monkeypatch):
    """The real harness with a stand-in for the measurements."""
    calls = []

    def measure(name, *, quick, out, progress, more):
        assert not more
        calls.append((name, quick, str(out)))
        progress(1, 1, "done")
        found = [benchmarks.target("fast", 3.0, ">=", 2)]
        return {"bench": name, "rows": [{"case": "x", "rate": 1234.5}], "targets": found}

    monkeypatch.setattr(benchmarks, "BENCHES", {"noise": "samplers", "other": "more"})
    monkeypatch.setattr(benchmarks, "run", measure)
    return calls


def test_bench_runs_one_or_all(run, benches):
    """A name measures that one; none, or `all`, measures each."""
    assert run("bench", "noise", "--quick", "--out", "r", "--json").json["bench"] == "noise"
    assert benches == [("noise", True, "r")]

    found = run("bench", "--json").json["benches"]
    assert [each["bench"] for each in found] == ["noise", "other"]


def test_bench_prints_rows_and_targets(run, benches):
    """People see the table and whether the targets were reached."""
    out = run("bench", "noise").out

    assert "1,234" in out
    assert "reached" in out


def test_bench_report_names_its_page(run, folder):
    """Without results there is nothing to collect; with some there is one page."""
    assert run("bench", "report", "--out", ".").code == 2
    result = {"bench": "noise", "version": "0", "machine": {}, "quick": True, "peers": {},
              "rows": [], "targets": [], "notes": []}  # fmt: skip
    (folder / "noise.json").write_text(json.dumps(result))

    done = run("bench", "report", "--out", ".", "--json")

    assert (folder / done.json["report"]).read_text().startswith("<!doctype html>")


def test_bench_without_its_folder_says_what_to_do(run, monkeypatch, tmp_path):
    """A wheel is without the benchmarks: the sources have them."""
    monkeypatch.setattr(command, "__file__", str(tmp_path / "site" / "dpstream" / "cli" / "it.py"))

    done = run("bench", "noise")

    assert done.code == 5
    assert "make bench" in done.err
    assert command.complete_bench("n") == []


def test_an_unknown_bench_lists_the_known_ones(run, benches):
    """With what each of them measures."""
    done = run("bench", "none")

    assert (done.code, "noise: samplers" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("dpstream release x.csv --mechanism sam", "sample"),
        ("dpstream mech", "mechanisms"),
        ("dpstream ledger hi", "history"),
    ],
)
def test_the_shell_completes_commands_and_mechanisms(run, monkeypatch, words, expected):
    """As bash asks for it."""
    monkeypatch.setenv("_DPSTREAM_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))

    assert run().out.split() == [expected]
