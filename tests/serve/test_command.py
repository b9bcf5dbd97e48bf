"""`dpstream serve` refuses what is unsafe or missing before it listens."""

import json
import sys

import pytest

from dpstream.cli import main
from dpstream.serve.release_store import hold_folder
from tests.support.pipelines import PUSHED, write


def left(capsys, *args, command="serve"):
    """Exit code, and the last line of standard error as JSON."""
    with pytest.raises(SystemExit) as gone:
        main([command, *map(str, args), "--json"])
    said = capsys.readouterr()
    assert said.out == ""
    return gone.value.code, json.loads(said.err.splitlines()[-1])


def test_a_missing_extra_is_named(tmp_path, capsys, monkeypatch):
    """With the command that installs it."""
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, error = left(capsys, write(tmp_path, []))

    assert (code, error["error"]) == (5, "MissingDependency")
    assert "pip install 'dpstream[serve]'" in error["message"]


@pytest.mark.parametrize("side", ["--host", "--operator-host"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_others_can_reach_is_refused(tmp_path, capsys, side, host):
    """Of either side; nothing was made or bound."""
    code, error = left(capsys, write(tmp_path, []), side, host)

    assert code == 2
    assert host in error["message"]
    assert "--tls-cert" in error["message"]
    assert not (tmp_path / "state").exists()


def test_half_a_certificate_is_refused(tmp_path, capsys):
    """A server without https must not come of it."""
    code, error = left(capsys, write(tmp_path, []), "--tls-cert", "x.pem")

    assert (code, error["message"]) == (2, "--tls-cert and --tls-key go together; give both")


def test_a_name_that_is_no_part_of_an_address_is_refused(tmp_path, capsys):
    """Its routes could not be reached."""
    path = write(tmp_path, [])
    path.write_text(path.read_text().replace('name = "pages"', 'name = "a/b"'))
    code, error = left(capsys, path, "--port", 0, "--operator-port", 0)

    assert code == 2
    assert "'a/b'" in error["message"]


@pytest.mark.parametrize(
    ("what", "here", "then"), [("sink", '"out/"', '"-"'), ("source", '"clicks.csv"', '"-"')]
)
def test_standard_input_and_output_are_refused(tmp_path, capsys, what, here, then):
    """The server itself talks to the run over them."""
    path = write(tmp_path, [])
    path.write_text(path.read_text().replace(here, then))
    code, error = left(capsys, path)

    assert code == 2
    assert f"the {what} '-' cannot be served" in error["message"]
    assert not (tmp_path / "state").exists()


def test_a_second_server_is_refused(tmp_path, capsys):
    """Before it touches anything of the first."""
    path = write(tmp_path, [])
    (tmp_path / "state").mkdir()
    with hold_folder(tmp_path / "state"):
        _, error = left(capsys, path, "--port", 0, "--operator-port", 0)

    assert error["error"] == "StateError"
    assert "served by another process already" in error["message"]
    assert not (tmp_path / "state" / "served").exists()


def replace_in(path, old, new):
    path.write_text(path.read_text().replace(old, new))


def begin(path):
    """Let the run publish its first release."""
    with pytest.raises(SystemExit) as gone:
        main(["run", str(path), "--once"])
    assert gone.value.code == 0


def changed(folder, path):
    """A query that was run, and then is another."""
    begin(path)
    replace_in(path, "max_groups_contributed = 2", "max_groups_contributed = 3")


def damaged(folder, path):
    """A state that has lost a file."""
    begin(path)
    (folder / "state" / "pages" / "inputs.log").write_text("")


BROKEN = {
    "book": lambda folder, path: replace_in(path, "epsilon = 4\nd", "epsilon = 1\nd"),
    "query": changed,
    "state": damaged,
    "source": lambda folder, path: (folder / "clicks.csv").unlink(),
    "column": lambda folder, path: (folder / "clicks.csv").write_text("who,page,at\nu,home,1\n"),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", BROKEN)
def test_what_run_refuses_is_refused_before_it_listens(tmp_path, capsys, what):
    """In the same words, with the same code, and without a charge."""
    public_range = "start = TIMESTAMP '1970-01-01', end = TIMESTAMP '1970-01-01 00:04:00'"
    text = PUSHED.replace('"http:"', '"clicks.csv"')
    text = text.replace("time_unit = 's'", f"time_unit = 's', {public_range}")
    path = write(tmp_path, [f"u{n},home,{n % 240},1" for n in range(100)], text)
    BROKEN[what](tmp_path, path)
    capsys.readouterr()
    ran = left(capsys, path, command="run")
    served = left(capsys, path, "--port", 0, "--operator-port", 0)

    assert ran[0] not in (0, 1)
    assert served == ran
