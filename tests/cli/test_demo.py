"""The guided tour: a real process, really killed."""

import sys
import time
from contextlib import nullcontext

import pytest
from rich.console import Console

from dpstream.cli import demo_command
from dpstream.cli.demo_command import QUICK, Engine, play, write_pipeline
from tests.support.long import is_long
from tests.support.processes import until

pytestmark = pytest.mark.timeout(300)  # 15 s on an idle machine


@pytest.fixture(scope="module", params=[False, True] if is_long() else [False])
def played(request, tmp_path_factory):
    """One quick tour, in the long form another one with a page, and the lines told of it."""
    lines, opened, folder = [], [], tmp_path_factory.mktemp("tour")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_command.webbrowser, "open", opened.append)
        live = play(QUICK, folder, lambda line, **_: lines.append(line), serve=request.param)
    assert len(opened) == request.param
    return live, lines, folder


@pytest.fixture
def told(played, monkeypatch):
    """The command tells of that tour, line by line, without another one."""
    live, lines, folder = played

    def replay(tour, place, tell, *_):
        return [*map(tell, lines), live][-1]

    monkeypatch.setattr(demo_command, "TemporaryDirectory", lambda **_: nullcontext(folder))
    monkeypatch.setattr(demo_command, "play", replay)


def test_the_engine_is_killed_and_publishes_the_same_bytes(played):
    """It dies by signal 9, and computes everything since its last snapshot once more."""
    live, lines, _ = played

    assert live["exit_code"] == -9
    assert live["identical"]
    assert live["repeated"] == list(range(1, live["killed_after"] + 1))
    assert live["killed_after"] >= QUICK.kill_after
    marks = ("the engine runs", "kill -9", "the same command again", "the last release is out")
    assert [mark for line in lines for mark in marks if line.startswith(mark)] == [*marks]
    numbers = [int(line.split()[1]) for line in lines if line.startswith("release ")]
    assert numbers == sorted(set(numbers))


def test_what_is_published_is_near_the_truth(played):
    """Ten standard deviations, and what the bounds and the last moment leave out."""
    live, _, _ = played

    assert live["last_release"]
    for row in live["last_release"]:
        truth = live["truth"][row["page"]]
        assert abs(row["visitors"] - truth) < 10 * row["visitors_stddev"] + 0.3 * truth, row


def test_scripts_read_the_figures(run, told):
    """Charged once for both starts; uniform noise near sqrt(2) * 12; sample pays once a year."""
    found = run("demo", "--quick", "--json").json
    uniform, sample = found["releases"]

    charged = [line["charges"] for book in found["live_ledger"] for line in book["spent_on"]]

    assert charged == [1]
    assert found["live"]["identical"] is True
    assert uniform["noise_stddev"] == pytest.approx(2**0.5 * 12, rel=0.01)
    assert 0.5 < uniform["mean_absolute_error"] / 12 < 1.5
    assert (uniform["paid_steps"], sample["paid_steps"]) == (622, 52)
    assert found["ledger"][0]["left"] == "0"
    assert "only 0 of 2 is left" in found["refused"]


def test_people_are_told_everything_in_a_pipe(run, told):
    """Every part is there, the truth marked as such, and no line goes on for ever."""
    out = run("demo", "--quick").out

    for part in ("kill -9 ", "the same command again", "the same bytes", "truth (demo only)",
                 "uniform:", "sample:", "█", "one thousand", "dpstream serve pipeline.toml",
                 "mean absolute error", "2 of 2 spent", "is refused", "Next:"):  # fmt: skip
        assert part in out, part
    assert max(map(len, out.splitlines())) < 250


def test_a_difference_is_an_error(run, told, monkeypatch):
    """A tour that finds other bytes says so and fails."""
    replay = demo_command.play
    monkeypatch.setattr(
        demo_command, "play", lambda *a, **k: replay(*a, **k) | {"identical": False}
    )

    done = run("demo", "--quick")

    assert (done.code, "DIFFER" in done.out, "please report" in done.err) == (1, True, True)


def test_a_server_starts_its_worker_again_by_itself(tmp_path, monkeypatch):
    """The process that is killed is the worker; the page stays where it was opened."""
    opened = []
    monkeypatch.setattr(demo_command.webbrowser, "open", opened.append)
    write_pipeline(tmp_path, time.time())
    engine = Engine(tmp_path, serve=True)
    try:
        engine.open()
        first, server = engine.pid, engine.process.pid
        engine.kill(first)
        engine.start()
        second = until(lambda: engine.pid not in (first, server) and engine.pid)
    finally:
        engine.process.terminate()
        engine.process.wait()

    assert first != server
    assert second
    assert [address.startswith("http://127.0.0.1:") for address in opened] == [True]


def test_a_page_without_its_extra_says_what_to_install(run, monkeypatch):
    """Before anything is started."""
    monkeypatch.setitem(sys.modules, "uvicorn", None)

    done = run("demo", "--serve")

    assert (done.code, "dpstream[serve]" in done.err, done.out) == (5, True, "")


def test_a_hidden_page_has_its_truth_alone():
    """A page that is shown has a figure and a bar beside its truth."""
    row = {"page": "home", "visitors": 50.0, "visitors_stddev": 4.0}
    console = Console(width=100, color_system=None)
    with console.capture() as shown:
        console.print(demo_command._pages([row], {"home": 51, "help": 3}))

    lines = shown.get().splitlines()
    assert "truth (demo only)" in lines[0]
    assert any("home" in line and "50 ± 8" in line and "█" in line for line in lines)
    assert any(line.split() == ["help", "hidden:", "too", "few", "users", "3"] for line in lines)
