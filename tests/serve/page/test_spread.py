"""How the values of keys are spread: bins as bars, lists of quantiles as marks."""

import pytest

from tests.serve.page.conftest import DESKTOP, PHONE, until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]

BARS = """() => [...document.querySelectorAll("#spread-keys .panel")].map((panel) => [
  panel.querySelector(".key").textContent,
  [...panel.querySelectorAll(".bin .fill")].map((bar) => bar.getBoundingClientRect().height),
])"""
MARKS = """() => [...document.querySelectorAll("#spread-keys .spread-row")].map((row) => [
  row.querySelector(".key").textContent,
  [...row.querySelectorAll(".mark")].map((mark) => mark.getBoundingClientRect().x),
])"""


def lists(site, name):
    """What is published of each key, by its name."""
    rows = site.get("api/queries/stays/latest")["rows"]
    return {row["key"][0]: row["lists"][name] for row in rows}


def test_bins_are_bars_of_one_scale(visit, story):
    """Heights are the published numbers; edges, whiskers and a table stand beside them."""
    page = visit(f"{story.url}#query=stays")
    page.wait_for_selector("#spread .bin")
    published = lists(story, "stays")
    drawn = dict(page.evaluate(BARS))

    assert drawn.keys() == published.keys()
    largest = max(max(one["values"]) for one in published.values())
    tallest = max(map(max, drawn.values()))
    for key, heights in drawn.items():
        for height, value in zip(heights, published[key]["values"], strict=True):
            assert height / tallest == pytest.approx(max(value, 0) / largest, abs=0.02)
    edges = page.locator("#spread-keys .panel:first-child .edges span").all_inner_texts()
    assert edges == ["0", "30", "60", "120", "300"]
    whisker = page.locator("#spread .bin .whisker").first.bounding_box()
    assert whisker["height"] > 2
    assert page.is_hidden("#chart")
    assert page.is_visible("#window")

    page.click("text=The spread as a table")
    table = page.locator("#spread-table tbody tr").all_inner_texts()
    assert [line.split("\t")[0] for line in table] == [
        "0 to 30",
        "30 to 60",
        "60 to 120",
        "120 to 300",
    ]
    assert all(line.count("±") == len(published) for line in table)
    assert "± " in page.locator("#spread .bins").first.get_attribute("aria-label")


def test_quantiles_are_marks_on_one_line(visit, story):
    """In their order, to scale; the middle one has a course over time, and the keys its order."""
    page = visit(f"{story.url}#query=stays&measure=quarters")
    page.wait_for_selector("#spread .mark")
    published = lists(story, "quarters")
    drawn = dict(page.evaluate(MARKS))

    assert drawn.keys() == published.keys()
    for key, places in drawn.items():
        values = published[key]["values"]
        assert places == sorted(places)
        share = (places[1] - places[0]) / (places[-1] - places[0])
        assert share == pytest.approx((values[1] - values[0]) / (values[-1] - values[0]), abs=0.03)
    assert page.inner_text("#chart-title") == "quarters, median over time"
    assert page.is_visible("#chart canvas")
    medians = {key: one["values"][2] for key, one in published.items()}
    listed = page.locator("#keys .name").all_inner_texts()
    assert [medians[key] for key in listed] == sorted(medians.values(), reverse=True)

    page.locator("#keys .name").first.click()
    said = page.inner_text("#detail-body")
    for word in ("quarters, smallest", "quarters, 25% quantile", "quarters, largest", "120 to 300"):
        assert word in said
    page.click("#detail-close")
    page.select_option("#window", "all")
    until(page, "document.querySelector('#readout').textContent.includes('window: from')")


@pytest.mark.parametrize("measure", ["stays", "quarters"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_axe_finds_nothing_in_a_spread(visit, story, measure, size):
    """Names, roles and contrast; nothing is wider than the screen."""
    from axe_playwright_python.sync_playwright import Axe

    page = visit(f"{story.url}#query=stays&measure={measure}", viewport=size, color_scheme="dark")
    page.wait_for_selector("#spread-keys li")
    page.click("text=The spread as a table")
    found = Axe().run(page)

    assert found.violations_count == 0, found.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
