"""The guided tour: a real process, really killed."""

import sys
from contextlib import nullcontext

import pytest
from rich.console import Console

from dpstream.cli import demo_command
from dpstream.cli.demo_command import QUICK, Scene, play

pytestmark = pytest.mark.timeout(300)  # 15 s on an idle machine

SCENE = Scene(
    triggers=9,
    state="killed",
    index=4,
    pid=77,
    clicks=1234,
    rows=[{"page": "home", "visitors": 50.0, "visitors_stddev": 4.0}],
    truth={"home": 51, "help": 3},
)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """One quick tour, and the scenes that were shown."""
    scenes, folder = [], tmp_path_factory.mktemp("tour")
    return play(QUICK, folder, scenes.append), scenes, folder


@pytest.fixture
def told(played, monkeypatch):
    """The command tells of that tour, scene by scene, without another one."""
    live, scenes, folder = played

    def replay(tour, place, show, **_):
        return [*map(show, scenes), live][-1]

    monkeypatch.setattr(demo_command, "TemporaryDirectory", lambda **_: nullcontext(folder))
    monkeypatch.setattr(demo_command, "play", replay)


def test_the_engine_is_killed_and_publishes_the_same_bytes(played):
    """It dies by signal 9, and computes everything since its last snapshot once more."""
    live, scenes, _ = played

    assert live["exit_code"] == -9
    assert live["identical"]
    assert live["repeated"] == list(range(1, live["killed_after"] + 1))
    assert live["killed_after"] >= QUICK.kill_after
    assert [*dict.fromkeys(scene.state for scene in scenes)] == [
        "running", "killed", "running again", "over",
    ]  # fmt: skip
    assert len({scene.pid for scene in scenes if scene.pid}) == 2


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


def test_a_served_tour_kills_the_worker_and_goes_on(tmp_path, monkeypatch):
    """The server starts the worker again by itself; the bytes are the same."""
    opened = []
    monkeypatch.setattr(demo_command.webbrowser, "open", opened.append)

    live = play(QUICK, tmp_path, lambda scene: None, serve=True)

    assert [address.startswith("http://127.0.0.1:") for address in opened] == [True]
    assert live["identical"]
    assert live["repeated"] == list(range(1, live["killed_after"] + 1))


def test_a_page_without_its_extra_says_what_to_install(run, monkeypatch):
    """Before anything is started."""
    monkeypatch.setitem(sys.modules, "uvicorn", None)

    done = run("demo", "--serve")

    assert (done.code, "dpstream[serve]" in done.err, done.out) == (5, True, "")


def test_a_terminal_sees_bars_hidden_pages_and_the_kill():
    """A hidden page has no figure beside its truth, and the truth is marked."""
    console = Console(width=100, force_terminal=True, color_system=None, record=True)
    with console.capture() as shown:
        console.print(demo_command.picture(SCENE))

    lines = shown.get().splitlines()
    assert "release 4 of 9" in lines[0]
    assert "kill -9 77" in lines[0]
    assert any("home" in line and "50" in line and "± 8" in line and "█" in line for line in lines)
    assert any(line.split() == ["help", "hidden:", "too", "few", "users", "3"] for line in lines)
    assert any("truth (demo only)" in line for line in lines)
