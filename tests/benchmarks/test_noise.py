"""The bench of the samplers: what it reports, judges, and asks of the peers; no speed."""

import math

import numpy as np
import pytest

import benchmarks as bench
from benchmarks import noise, peers


@pytest.fixture
def one_scale(monkeypatch):
    """The shortest run there is."""
    monkeypatch.setattr(noise, "SCALES", (10,))
    monkeypatch.setattr(noise, "JUDGED", (10,))


@pytest.fixture
def no_peers(monkeypatch, tmp_path):
    """An interpreter that is not there."""
    monkeypatch.setenv("DPSTREAM_BENCH_PYTHON", str(tmp_path / "no-such-python"))


def judged(result, part):
    return [one for one in result["targets"] if part in one["name"]]


@pytest.mark.usefixtures("one_scale", "no_peers")
def test_absent_peers_leave_targets_open(tmp_path):
    """Our own speed is judged; a ratio with nobody is neither reached nor missed, and says why."""
    steps = []

    result = bench.run(
        "noise", quick=True, out=tmp_path, progress=lambda *step: steps.append(step[:2])
    )

    ratios = judged(result, "times opendp")
    assert [one["reached"] for one in ratios] == [None, None]
    assert all("DPSTREAM_BENCH_PYTHON must name" in one["reason"] for one in ratios)
    assert all(one["value"] > 0 for one in judged(result, "samples/s"))
    absent = [row for row in result["rows"] if row["library"] in ("opendp", "diffprivlib")]
    assert len(absent) == 4
    assert all(row["samples_per_second"] is None and row["note"] for row in absent)
    assert result["peers"] == {}
    assert str(tmp_path) not in (tmp_path / "noise.json").read_text()
    assert steps == [(0, 2), (1, 2), (2, 2)]


@pytest.mark.usefixtures("one_scale", "no_peers")
def test_a_sampler_of_the_wrong_scale_misses_the_spread(monkeypatch):
    """A fast sampler of the wrong law does not pass: 2% off is seen in a short run."""
    right = noise.discrete_gaussian
    monkeypatch.setattr(
        noise, "discrete_gaussian", lambda draws, variance: right(draws, variance * 104 / 100)
    )

    found = noise.measure(quick=True, progress=lambda *_: None)

    assert found.targets[-1]["reached"] is False


@pytest.mark.usefixtures("one_scale", "no_peers")
def test_an_unreachable_speed_is_missed(monkeypatch):
    """The control of the targets: they can fail."""
    monkeypatch.setattr(noise, "PER_SECOND", 10**15)

    found = noise.measure(quick=True, progress=lambda *_: None)

    speeds = [one["reached"] for one in found.targets if "samples/s" in one["name"]]
    assert speeds == [False, False]


@pytest.mark.parametrize("scale", [1, 10, 100])
def test_the_exact_spread_is_that_of_the_law(scale):
    """The closed forms against the sums over the integers."""
    x = np.arange(-60 * scale, 60 * scale + 1)
    laws = {
        "discrete_laplace": np.exp(-abs(x) / scale),
        "discrete_gaussian": np.exp(-((x / scale) ** 2) / 2),
    }

    for law, weight in laws.items():
        exact = math.sqrt((weight * x**2.0).sum() / weight.sum())
        assert noise.exact_std(law, scale) == pytest.approx(exact, rel=1e-6)


@pytest.mark.usefixtures("no_peers")
def test_absent_peers_are_a_value():
    """A bench goes on without them and can say why."""
    with peers.started("noise_samplers") as asked:
        assert asked.versions == {}
        with pytest.raises(peers.PeerError, match="must name a Python interpreter"):
            asked.ask(library="opendp")


def test_peers_that_do_not_start_are_absent(monkeypatch, tmp_path):
    """A broken environment is told apart from a missing one, by its last words."""
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no module named opendp' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("DPSTREAM_BENCH_PYTHON", str(broken))

    with peers.started("noise_samplers") as asked:
        assert "ended as it started; no module named opendp" in asked.reason


@pytest.mark.bench
def test_the_peers_answer_in_turns():
    """Versions are known, a wrong question is answered with an error, the next one is served."""
    with peers.started("noise_samplers") as asked:
        assert asked.versions["opendp"] == "0.16.0"
        with pytest.raises(peers.PeerError, match="KeyError"):
            asked.ask(library="none", law="discrete_laplace", scale=10, size=5)
        answer = asked.ask(library="diffprivlib", law="discrete_laplace", scale=10, size=5)

    assert len(answer["seconds"]) == 1


@pytest.mark.bench
@pytest.mark.parametrize("law", noise.LAWS)
def test_opendp_samples_the_discrete_law(law):
    """At scale 1 rounded floats would show: they spread at least 4% wider, nine times the error."""
    with peers.started("noise_samplers") as asked:
        answer = asked.ask(library="opendp", law=law, scale=1, size=100_000)

    std = math.sqrt(answer["squares"] / 100_000)
    assert answer["whole"]
    assert abs(std - noise.exact_std(law, 1)) < abs(std - std_of_rounded(law))


def std_of_rounded(law):
    """The spread of the continuous law at scale 1, rounded to integers."""
    x = np.arange(1, 60)
    if law == "discrete_laplace":
        tail = np.exp(-(x - 0.5))
    else:
        tail = np.array([math.erfc((k - 0.5) / math.sqrt(2)) for k in x])
    return math.sqrt(((2 * x - 1) * tail).sum())


@pytest.mark.bench
@pytest.mark.usefixtures("one_scale")
def test_ratios_are_judged_when_peers_are_there(tmp_path):
    """With the peers present no target stays open."""
    result = bench.run("noise", quick=True, out=tmp_path)

    assert None not in [one["reached"] for one in result["targets"]]
    assert result["peers"]["opendp"] == "0.16.0"
    assert not result["notes"]
