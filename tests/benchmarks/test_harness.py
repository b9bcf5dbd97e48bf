"""What every bench gets from the harness: its JSON, judged targets, plot, table and page."""

import io
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

import benchmarks as bench
from benchmarks import harness
from dpstream.errors import InvalidInput, InvalidParameter


def stand_in(*, quick, progress):
    """A bench that measures nothing."""
    progress(0, 1, "nothing")
    return bench.Findings(
        rows=[
            {"what": "<b>ours</b>", "records_per_second": 3_000_000, "error": float("nan")},
            {"what": "[red]theirs", "records_per_second": 200_000, "error": 0.25},
        ],
        targets=[
            bench.target("records/s", 3e6, ">=", 2e6),
            bench.target("times theirs", 15.0, ">=", 1e9),
            bench.target("times absent", None, ">=", 20, reason="it is absent"),
        ],
        peers={"theirs": "1.2"},
        draw=lambda figure: figure.subplots().plot([1, 2], [3, 4]),
    )


@pytest.fixture
def registered(monkeypatch):
    """The stand-in under the name `nothing`."""
    monkeypatch.setitem(harness.BENCHES, "nothing", "measures nothing")
    module = SimpleNamespace(measure=stand_in)
    monkeypatch.setitem(sys.modules, "benchmarks.nothing", module)


def printed(result):
    console = Console(width=200, file=io.StringIO())
    console.print(bench.table(result))
    return console.file.getvalue()


@pytest.mark.usefixtures("registered")
def test_a_run_returns_and_writes_the_same_json(tmp_path):
    """Scripts rely on these keys, and on strict JSON: what is not a number is null."""
    result = bench.run("nothing", quick=True, out=tmp_path)

    written = json.loads((tmp_path / "nothing.json").read_text(), parse_constant=pytest.fail)
    assert written == result
    assert set(result) == {
        "bench", "version", "machine", "quick", "peers", "rows", "targets", "notes",
    }  # fmt: skip
    assert (result["bench"], result["quick"], result["peers"]) == (
        "nothing",
        True,
        {"theirs": "1.2"},
    )
    assert [row["error"] for row in result["rows"]] == [None, 0.25]
    assert (tmp_path / "nothing.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("registered")
def test_the_machine_is_described_without_host_or_path(tmp_path):
    """A result can be published as it is."""
    machine = bench.run("nothing", quick=True, out=tmp_path)["machine"]

    assert set(machine) == {"cores", "cpu", "memory_gb", "system", "python", "numpy", "numba"}
    assert machine["numpy"] == np.__version__
    assert str(tmp_path) not in (tmp_path / "nothing.json").read_text()


@pytest.mark.parametrize(
    ("value", "op", "bound", "reached"),
    [(2, ">=", 2, True), (2, ">=", 1e12, False), (3, "<=", 2, False), (2, "<=", 2, True),
     (0, "==", 0, True), (1, "==", 0, False), (float("nan"), ">=", 0, False),
     (float("nan"), "<=", 0, False), (float("inf"), ">=", 0, False),
     (np.float64(3), ">=", 2, True)],
)  # fmt: skip
def test_a_target_is_judged_by_what_was_measured(value, op, bound, reached):
    """An unreachable bound is missed, and so is any bound when no number came out."""
    assert bench.target("it", value, op, bound)["reached"] is reached


def test_a_target_without_a_value_must_say_why():
    """What was not measured never counts as reached."""
    judged = bench.target("it", None, ">=", 0, reason="no peer")

    assert (judged["reached"], judged["reason"]) == (None, "no peer")
    with pytest.raises(InvalidParameter, match="say why"):
        bench.target("it", None, ">=", 0)
    with pytest.raises(InvalidParameter, match="must be one of"):
        bench.target("it", 1, ">", 0)


def test_an_unknown_bench_is_refused_with_the_known_names(tmp_path):
    """A typing error costs no time."""
    with pytest.raises(InvalidParameter, match=r"must be one of noise.*got 'noize'"):
        bench.run("noize", quick=True, out=tmp_path)


@pytest.mark.usefixtures("registered")
def test_without_matplotlib_the_json_is_still_written(tmp_path, monkeypatch):
    """Hours of measuring are not lost for a plot; an old plot does not stay beside new figures."""
    (tmp_path / "nothing.png").write_bytes(b"an older plot")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    result = bench.run("nothing", quick=True, out=tmp_path)

    assert "matplotlib is not installed" in result["notes"][0]
    assert json.loads((tmp_path / "nothing.json").read_text()) == result
    assert not (tmp_path / "nothing.png").exists()


@pytest.mark.usefixtures("registered")
def test_the_table_shows_rows_verdicts_and_reasons(tmp_path):
    """Figures are readable, and text that looks like markup is shown as it is."""
    text = printed(bench.run("nothing", quick=True, out=tmp_path))

    for shown in ("3,000,000", "records/s", "[red]theirs", "not measured: it is absent"):
        assert shown in text
    assert text.count("missed") == 1


@pytest.mark.usefixtures("registered")
def test_the_report_is_one_file_that_asks_for_nothing(tmp_path):
    """Plots are inside, text is escaped, nothing is fetched."""
    bench.run("nothing", quick=True, out=tmp_path)
    (tmp_path / "other.json").write_text('{"not": "a result"}')

    page = bench.report(tmp_path).read_text()

    assert "data:image/png;base64,iVBOR" in page
    assert "&lt;b&gt;ours&lt;/b&gt;" in page
    assert "<b>ours" not in page
    assert 'class="missed"' in page
    assert 'class="not-measured"' in page
    for outside in ("http://", "https://", "<script", "<link", "url("):
        assert outside not in page


AUDITED = {
    "version": "1", "machine": {"cpu": "abacus"}, "quick": True, "seed": 0, "summary": {},
    "rows": [
        {"name": "ours", "control": False, "claimed": 1, "delta": 0, "lower_bound": 0.5,
         "rejected": False, "about": "<i>sound"},
        {"name": "bad", "control": True, "claimed": 1, "delta": 0, "lower_bound": 9,
         "rejected": True, "about": "broken"},
        {"name": "worse", "control": True, "claimed": 1, "delta": 0, "lower_bound": 0.1,
         "rejected": False, "about": "broken, and not caught"},
    ],
}  # fmt: skip


@pytest.mark.usefixtures("registered")
def test_the_report_begins_with_every_target_and_has_the_audit(tmp_path):
    """A control that is not caught is a missed target; what has no result is named."""
    bench.run("nothing", quick=True, out=tmp_path)
    (tmp_path / "audit.json").write_text(json.dumps(AUDITED))

    page, found = bench.report(tmp_path).read_text(), bench.collect(tmp_path).to_json()

    assert (found["reached"], found["missed"], found["not_measured"]) == (2, 2, 1)
    assert found["benches"] == ["nothing"]
    assert "noise" in found["absent"]
    assert "audit" not in found["absent"]
    first = page[: page.index('id="nothing"')]
    for text in (
        "2 reached, 2 missed, 1 not measured", "records/s", "controls missed, of 2", "abacus",
        np.__version__, "nothing (short run)", "Not in this folder: noise",
    ):  # fmt: skip
        assert text in first, text
    assert 'class="MISSED">MISSED' in page
    assert 'class="caught">caught' in page
    assert 'class="holds">holds' in page
    assert "<i>sound" not in page


def test_a_report_without_results_says_what_to_do(tmp_path):
    """An empty page would look like a result."""
    with pytest.raises(InvalidInput, match="dpstream bench NAME"):
        bench.report(tmp_path)


def test_a_damaged_result_is_named(tmp_path):
    """The file to measure again is in the message."""
    (tmp_path / "noise.json").write_text("{")

    with pytest.raises(InvalidInput, match=r"noise\.json is no JSON"):
        bench.report(tmp_path)
