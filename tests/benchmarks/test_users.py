"""The bench of questions about users finds what was published near what is true."""

import numpy as np

from benchmarks import users


def test_errors_are_those_that_are_said():
    """Of each question, by other code than what publishes; at six deviations of their mean."""
    found = users.measure(quick=True, progress=lambda *_: None)
    rows = {row["query"]: row for row in found.rows}

    assert set(rows) == set(users.QUERIES)
    for row in rows.values():
        runs = 2 * row["cells"]
        assert row["said"] > 1
        assert abs(row["error"] / row["said"] - 1) < 6 / np.sqrt(2 * runs)
        assert row["covered"] > 0.95 - 6 * np.sqrt(0.95 * 0.05 / runs)
    assert rows["retention"]["cells"] == sum(min(day, users.LAGS) + 1 for day in range(users.DAYS))


def test_orders_are_pages_by_how_often_an_item_is_ordered(tmp_path, monkeypatch):
    """Half of the rows are the most frequent items; later weeks, and a log that is away, are not
    there."""
    monkeypatch.setenv("DPSTREAM_DATA", str(tmp_path))
    assert users.orders() is None
    lines = [f"{n},{n % 3},{code},1" for n, code in enumerate("a" * 10 + "b" * 6 + "c" * 3 + "d")]
    late = [f"{users.DAYS * 1440},9,a,1"]
    header = "minute,customer,stock_code,quantity"
    path = tmp_path / "events_online_retail_2010_2011.csv"
    path.write_text("\n".join([header, *lines[::-1], *late]))
    found = users.orders()

    assert found["ts"].to_pylist() == [60 * n for n in range(20)]
    pages = found["page"].to_pylist()
    assert [pages.index(page) for page in users.PAGES[1:]] == [10, 16, 19]


def test_a_way_may_begin_again():
    """The last beginning counts, within the time that is left; a strict one is interrupted."""
    late = [0, users.WITHIN + 1, users.WITHIN + 2]
    assert users.reached(late, ["home", "home", "cart"], strict=False) == 2
    assert users.reached(late, ["home", "product", "cart"], strict=False) == 1
    assert users.reached([0, 1, 2], ["home", "product", "cart"], strict=False) == 2
    assert users.reached([0, 1, 2], ["home", "product", "cart"], strict=True) == 1
