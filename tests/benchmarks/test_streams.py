"""The streams: documented shapes, the same every time, and honest about what is absent."""

import numpy as np
import pytest

from benchmarks import streams
from dpstream.errors import InvalidInput


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A data folder with one small file of each kind."""
    monkeypatch.setenv(streams.VARIABLE, str(tmp_path))
    (tmp_path / "unemployment_lnu03000018.csv").write_text(
        "date,level_thousands\n1972-01-01,7\n1972-02-01,9\n"
    )
    (tmp_path / "tdrive_64.csv").write_text("c00,c01\n1,2\n3,4\n5,6\n")
    return tmp_path


def by_name(found):
    return {one.name: one for one in found}


def test_the_synthetic_streams_have_their_documented_shapes():
    """10,000 steps, 1, 1 and 10 bins; the second half of 2 and 3 is normal with variance 10."""
    one, two, three = (make(streams.SYNTHETIC_STEPS) for make in streams.SYNTHETIC.values())

    assert (one.shape, two.shape, three.shape) == ((10_000, 1), (10_000, 1), (10_000, 10))
    assert (one.min(), one.max()) == (0, 200)
    for block, top in ((two, 1_000), (three, 10_000)):
        early, late = block[:5_000], block[5_000:]
        assert (early.min() < 0.01 * top, early.max() <= top) == (True, True)
        assert early.mean() == pytest.approx(top / 2, rel=0.03)
        assert late.mean() == pytest.approx(top, abs=0.3)
        assert late.var() == pytest.approx(10, rel=0.1)


def test_streams_are_the_same_every_time():
    """Figures can be repeated."""
    for make in streams.SYNTHETIC.values():
        assert np.array_equal(make(100), make(100))
    road = {"bins": 5, "level": 50, "swing": 0.5, "steps": 20}
    assert np.array_equal(streams.rome(**road), streams.rome(**road))


def test_roads_swing_daily_around_their_level():
    """The maximum of a day is (1 + swing) times its level, the minimum (1 - swing) times."""
    roads = streams.rome(bins=400, level=1_000, swing=0.9).mean(axis=1)
    days = roads[: 10 * streams.STEPS_PER_DAY].reshape(10, -1).mean(axis=0)

    assert len(roads) == streams.ROME[0]
    assert days.max() / days.mean() == pytest.approx(1.86, abs=0.05)
    assert days.min() / days.mean() == pytest.approx(0.14, abs=0.05)


def test_without_a_folder_only_the_bundled_and_the_generated_are_there(monkeypatch):
    """Nothing is made up for the others; they say why they are absent."""
    monkeypatch.delenv(streams.VARIABLE, raising=False)

    found = by_name(streams.streams(steps=50))

    assert len(found) == 9
    assert [name for name, one in found.items() if one.block is not None] == [
        "unemployment", "synthetic 1", "synthetic 2", "synthetic 3",
    ]  # fmt: skip
    assert found["unemployment"].source == "bundled"
    assert found["unemployment"].block.shape == (50, 1)
    assert found["t-drive"].absence == "DPSTREAM_DATA is not set"


def test_the_bundled_series_has_its_622_months(monkeypatch):
    """In full, the first month first."""
    monkeypatch.delenv(streams.VARIABLE, raising=False)

    block = by_name(streams.streams())["unemployment"].block

    assert (block.shape, block.max()) == ((622, 1), 612)


@pytest.mark.usefixtures("folder")
def test_a_folder_is_read_by_column():
    """A named column, or all of them; a file that is not there is named."""
    found = by_name(streams.streams(steps=2))

    assert found["unemployment"].block.tolist() == [[7], [9]]
    assert found["unemployment"].source == "DPSTREAM_DATA"
    assert found["t-drive"].block.tolist() == [[1, 2], [3, 4]]
    assert "has no state_flu_55.csv" in found["state flu"].absence


@pytest.mark.parametrize(
    ("text", "problem"),
    [("date,other\n1972-01-01,7\n", "must have a column 'level_thousands'"),
     ("date,level_thousands\n1972-01-01,7.5\n", "whole counts"),
     ("date,level_thousands\n1972-01-01,-1\n", "whole counts")],
)  # fmt: skip
def test_a_wrong_file_is_refused(folder, text, problem):
    """Another file of that name would give other figures under the same heading."""
    (folder / "unemployment_lnu03000018.csv").write_text(text)

    with pytest.raises(InvalidInput, match=problem):
        streams.streams()
