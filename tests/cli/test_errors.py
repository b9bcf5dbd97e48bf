"""Each thing that can go wrong gives one clear line and its exit code."""

import os
import subprocess
import sys

import pytest

from dpstream import errors
from dpstream.cli.output import CODES, UNREAD, code_of, epilog

UNIFORM = ("--mechanism", "uniform", "--window", "2", "--epsilon", "1")
NAIVE = ("--mechanism", "naive", "--epsilon", "1")

BAD_FILES = {
    "empty": ("", "is empty"),
    "only a header": ("a,b\n", "no rows"),
    "no header": ("1,2\n3,4\n", "line 1 must be a header"),
    "one name twice": ("a,a\n1,2\n", "line 1: column names"),
    "a short row": ("a,b\n1,2\n3\n", "line 3 has 1 cells"),
    "a long row": ("a,b\n1,2\n3,4,5\n", "line 3 has 3 cells"),
    "a blank row": ("a\n1\n\n2\n", "line 3 is empty"),
    "text": ("a,b\n1,2\n3,x\n", "line 3, column 'b' is 'x'"),
    "an empty cell": ("a,b\n1,2\n,4\n", "line 3, column 'a' is empty"),
    "NaN": ("a\n1\nnan\n", "line 3, column 'a' is 'nan'"),
    "a negative count": ("a\n1\n-2\n", "row 0 is line 2): a histogram needs whole counts"),
    "half a count": ("a\n1\n2.5\n", "not whole: 2.5"),
    "a gap in time": ("t,a\n2024-01-01,1\n2024-01-02,1\n2024-01-03,1\n2024-01-05,1\n", "row 3"),
    "disorder in time": ("t,a\n2024-01-02,1\n2024-01-01,1\n", "time must increase"),
    "a bad time": ("t,a\n2024-01-01,1\n2024-13-01,1\n", "line 3, column 't' is '2024-13-01'"),
    "only a time": ("t\n2024-01-01\n", "no column to publish"),
    "a reserved name": ("paid\n1\n", "its own column 'paid'"),
    "an open quote": ('a\n"1\n', "line 2"),
}  # fmt: skip

BAD_FLAGS = {
    "epsilon 0": (("--epsilon", "0", "--window", "2"), "epsilon must be greater than 0; got 0"),
    "epsilon -1": (("--epsilon", "-1", "--window", "2"), "epsilon must be greater than 0; got -1"),
    "epsilon nan": (("--epsilon", "nan", "--window", "2"), "epsilon must be a finite number"),
    "epsilon text": (("--epsilon", "much", "--window", "2"), "epsilon must be a finite number"),
    "window 0": (
        ("--epsilon", "1", "--window", "0"),
        "window must be a whole number of at least 1",
    ),
    "window 1.5": (("--epsilon", "1", "--window", "1.5"), "window must be a whole number"),
    "window missing": (("--epsilon", "1"), "uniform needs --window; the parameters of uniform are"),
    "unknown": (("--epsilon", "1", "--window", "2", "--lo", "0"), "uniform has no parameter 'lo'"),
    "twice": (("--epsilon", "1", "--set", "epsilon=2", "--window", "2"), "epsilon is given twice"),
    "no equals": (("--epsilon", "1", "--window", "2", "--set", "x"), "--set needs name=value"),
}


@pytest.mark.parametrize(("text", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_is_refused_with_its_line(run, folder, text, message):
    """Nothing is published, and no state, secret or ledger is made for it."""
    (folder / "x.csv").write_text(text)

    done = run("release", "x.csv", *UNIFORM, "--state", "state", "--ledger", "book")

    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert [path.name for path in folder.iterdir()] == ["x.csv"]


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS.values(), ids=BAD_FLAGS)
def test_a_bad_parameter_is_refused(run, visits, flags, message):
    """The message names the parameter and what was given."""
    done = run("release", str(visits), "--mechanism", "uniform", *flags)

    assert (done.code, done.out) == (2, "")
    assert message in done.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("release", "none.csv", *UNIFORM), "there is no file none.csv"),
        (("release", "x.txt", *UNIFORM), "must be a .csv or .parquet file"),
        (("release", "x.csv", "--mechanism", "none"), "there is no mechanism 'none'"),
        (("release", "x.csv", "--epsilon", "1"), "release needs --mechanism"),
        (("release", "x.csv", *UNIFORM, "--column", "c"), "no column 'c'; its columns are a, b"),
        (("release", "x.csv", *UNIFORM, "--time-column", "c"), "no column 'c'"),
        (
            ("release", "x.csv", *UNIFORM, "--out", "x.txt"),
            "must end in .csv or .parquet or .jsonl",
        ),
        (("release", "x.csv", *UNIFORM, "--out", "no/x.csv"), "there is no folder no"),
        (("release", "x.csv", *NAIVE, "--lo", "5", "--hi", "5"), "lo"),
        (("release", "bad.parquet", *UNIFORM), "cannot be read as Parquet"),
        (("ledger", "show"), "name the ledger: dpstream ledger FILE"),
        (("nonsense",), "No such command 'nonsense'"),
    ],
)
def test_bad_usage_leaves_with_2(run, folder, args, message):
    """Usage and input have one code."""
    (folder / "x.csv").write_text("a,b\n1,2\n")
    (folder / "bad.parquet").write_text("PAR1")

    done = run(*args)

    assert (done.code, done.out) == (2, "")
    assert message in done.err


def test_overspending_leaves_with_3(run, visits):
    """The second release does not fit into the book."""
    run("release", str(visits), *UNIFORM, "--ledger", "book")
    done = run("release", str(visits), *UNIFORM, "--ledger", "book", "--json")

    assert (done.code, done.out) == (3, "")
    assert done.error["error"] == "BudgetExceeded"
    assert "only 0 of 1 is left" in done.error["message"]


def test_a_secret_that_others_may_read_leaves_with_4(run, visits, folder):
    """Mode 0644 is refused."""
    run("release", str(visits), *UNIFORM, "--secret", "key")
    (folder / "key").chmod(0o644)
    done = run("release", str(visits), *UNIFORM, "--secret", "key")

    assert done.code == 4
    assert "mode 0644" in done.err


@pytest.mark.parametrize("file", ["run.dps", "snapshot.dps"])
@pytest.mark.parametrize("content", [b"", b"something else\n"], ids=["truncated", "foreign"])
def test_a_damaged_state_leaves_with_4(run, visits, folder, file, content):
    """Truncated and foreign state files are told apart from good ones."""
    run("release", str(visits), *UNIFORM, "--state", "state")
    (folder / "state" / file).write_bytes(content)
    done = run("release", str(visits), *UNIFORM, "--state", "state", "--json")

    assert (done.code, done.error["error"], done.out) == (4, "StateError", "")


def test_a_state_of_other_parameters_leaves_with_4(run, visits):
    """A state directory serves one release."""
    run("release", str(visits), *UNIFORM, "--state", "state")
    done = run("release", str(visits), *UNIFORM[:-1], "2", "--state", "state")

    assert done.code == 4
    assert "use the same parameters" in done.err


def test_a_foreign_ledger_leaves_with_4(run, visits, folder):
    """A file that is no ledger is not overwritten."""
    (folder / "book").write_text("my notes\n")
    done = run("release", str(visits), *UNIFORM, "--ledger", "book")

    assert done.code == 4
    assert (folder / "book").read_text() == "my notes\n"


def test_a_missing_dependency_leaves_with_5_before_anything_is_spent(
    run, visits, folder, monkeypatch
):
    """The plot is asked for first, so that no budget is lost."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    done = run("release", str(visits), *UNIFORM, "--plot", "p.png", "--ledger", "book")

    assert done.code == 5
    assert "dpstream[plot]" in done.err
    assert not (folder / "book").exists()


def test_usage_errors_are_json_too(run):
    """A script reads one form of error."""
    assert run("release", "--json").error["exit_code"] == 2


def test_every_error_has_its_code():
    """No error of the tree is left to chance."""
    codes = {kind: code_of(kind("x")) for kind in errors.DpstreamError.__subclasses__()}

    assert set(codes.values()) == {2, 3, 4, 5, 6}
    assert all(str(code) in epilog() for code in CODES)


def test_the_real_process_leaves_with_the_code_and_no_traceback(visits):
    """The installed entry point, as a shell sees it."""
    command = [sys.executable, "-c", "from dpstream.cli import main; main()", "release", "no.csv"]
    done = subprocess.run([*command, *UNIFORM], capture_output=True, text=True)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: there is no file no.csv\n"


def test_a_closed_pipe_has_a_code_of_its_own(folder):
    """`dpstream ... | head` is nobody's bug: no traceback, and not the code of one."""
    (folder / "x.csv").write_text("a\n" + "1\n" * 10_000)  # more than a pipe holds
    command = [sys.executable, "-m", "dpstream", "release", "x.csv", *NAIVE, "--lo", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen([*command, "--hi", "1"], **pipes, env=buffered) as child:
        child.stdout.readline()
        child.stdout.close()
        told = child.stderr.read()

    assert child.returncode == UNREAD
    assert "Traceback" not in told
    assert "BrokenPipe" not in told


def test_a_directory_is_no_ledger(run, folder):
    """The ledger inside it is named."""
    (folder / "state").mkdir()
    bare = run("ledger", "state")
    (folder / "state" / "ledger").write_text("")

    assert (bare.code, run("ledger", "state").code) == (4, 4)
    assert "state is a directory, not a ledger" in bare.err
    assert "did you mean state/ledger?" in run("ledger", "state").err


@pytest.mark.parametrize("command", ["sql", "run", "serve", "release", "mechanisms", "ledger"])
def test_help_shows_flags_without_a_value(run, command):
    """`--json`, not `--json <bool>`."""
    told = run(command, "--help").out

    assert "--json" in told
    assert "<bool>" not in told
