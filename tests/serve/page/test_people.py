"""How far users get, and when they come back: funnels and cohorts as pictures."""

import re

import pytest

from tests.serve.page.conftest import DESKTOP, PHONE, Site, published, until
from tests.serve.page.logs import write_users, write_wide
from tests.support.served import served

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]

STEPS = """() => [...document.querySelectorAll("#people-list .steps > li")].map((step) => [
  step.querySelector(".step-name").textContent,
  step.querySelector(".fill").getBoundingClientRect().width,
  step.querySelector(".step-share").textContent,
])"""


@pytest.fixture(scope="module")
def users(tmp_path_factory):
    path = published(tmp_path_factory.mktemp("users"), write_users)
    with served(path, "--no-run", kind=Site) as site:
        yield site


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    path = published(tmp_path_factory.mktemp("wide"), write_wide)
    with served(path, "--no-run", kind=Site) as site:
        yield site


def percent(part):
    return f"{100 * part:.{1 if part < 0.1 else 0}f}%"


def test_a_funnel_gets_narrower(visit, users):
    """Bars are the published counts, with the share of the step before and its interval."""
    page = visit(f"{users.url}#query=funnel")
    page.wait_for_selector("#people .steps li")
    rows = sorted(users.get("api/queries/funnel/latest")["rows"], key=lambda row: row["key"][0])
    drawn = page.evaluate(STEPS)

    assert [name for name, _, _ in drawn] == ["home", "news", "shop"]
    widest = drawn[0][1]
    for (_, width, said), row in zip(drawn, rows, strict=True):
        value = row["values"]["users"] / rows[0]["values"]["users"]
        assert width / widest == pytest.approx(value, abs=0.02)
        share = row["values"]["users_share"]
        if share is not None:
            ends = (row["low"]["users_share"], row["high"]["users_share"])
            assert said == f"{percent(share)} ({percent(ends[0])} to {percent(ends[1])})"
    assert drawn[0][2] == ""
    page.click("#older")
    until(page, "document.querySelector('#summary').textContent.includes('2 May')")


def test_a_funnel_of_each_value_has_its_own_bars(visit, users):
    """The largest first, under the name of the value."""
    page = visit(f"{users.url}#query=devices")
    page.wait_for_selector("#people .funnel h4")

    assert page.locator("#people .funnel h4").all_inner_texts() == ["phone", "desk"]
    assert len(page.evaluate(STEPS)) == 4


def test_cohorts_are_a_grid(visit, users):
    """A row for each window in which users began, put together from all releases."""
    page = visit(f"{users.url}#query=back")
    page.wait_for_selector("#people .cohorts")
    rows = page.eval_on_selector_all(
        "#people .cohorts tbody tr",
        "rows => rows.map(row => [...row.children].map(cell => cell.textContent.trim()))",
    )
    lines = users.get("api/queries/back/releases?limit=1000")["rows"]
    cells = {(row["window"] - row["key"][0], row["key"][0]): row for row in lines}

    assert [row[0] for row in rows] == [
        "29 May – 4 Jun 2024",
        "22 May – 28 May 2024",
        "15 May – 21 May 2024",
        "8 May – 14 May 2024",
        "1 May – 7 May 2024",
    ]
    for cohort, row in zip(range(4, -1, -1), rows, strict=True):
        for lag, text in enumerate(row[1:]):
            found = cells.get((cohort, lag))
            if found is None:
                assert text == ""
            elif lag:
                ends = [percent(found[end]["users_share"]) for end in ("low", "high")]
                share = percent(found["values"]["users_share"])
                assert text == f"{share}{ends[0]} to {ends[1]}"
            else:
                assert text.startswith(f"{found['values']['users']:,}")
    assert sum(text != "" for row in rows for text in row[1:]) == 5 + 4 + 3 + 2


@pytest.mark.parametrize("query", ["funnel", "devices", "back"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_axe_finds_nothing_in_pictures_of_users(visit, users, query, size):
    """Names, roles and contrast; nothing is wider than the screen."""
    from axe_playwright_python.sync_playwright import Axe

    page = visit(f"{users.url}#query={query}", viewport=size)
    page.wait_for_selector("#people-note:visible")
    found = Axe().run(page)

    assert found.violations_count == 0, found.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]


def test_only_so_many_funnels_are_drawn_and_the_others_are_named(visit, wide):
    """Six of eight countries; a reader is told which are left out, and where they are."""
    page = visit(f"{wide.url}#query=funnels")
    page.wait_for_selector("#people .funnel h4")
    drawn = page.locator("#people .funnel h4").all_inner_texts()
    countries = {row["key"][1] for row in wide.get("api/queries/funnels/latest")["rows"]}
    note = page.inner_text("#people-note")

    assert len(drawn) == 6
    assert len(countries) == 8
    left = countries - {*drawn}
    assert "Left out: " in note
    assert all(f"“{each}”" in note for each in left)
    assert not any(f"“{each}”" in note for each in drawn)


def test_a_large_grid_of_cohorts_says_what_it_leaves_out(visit, wide):
    """60 of 72 hours begin a row, 60 of 62 lags a column after the users."""
    page = visit(f"{wide.url}#query=hours")
    page.wait_for_selector("#people .cohorts")

    assert page.locator("#people .cohorts tbody tr").count() == 60
    assert page.locator("#people .cohorts thead th").count() == 62
    note = page.inner_text("#people-note")
    assert "Left out here: cohorts before the newest 60 and periods after the first 60" in note


def test_a_figure_with_an_interval_alone_shows_it(visit, wide):
    """A place has no margin: from where to where it is is said and drawn; of others both are."""
    page = visit(f"{wide.url}#query=figures&measure=place")
    page.wait_for_selector("#keys .row")
    rows = {row["key"][0]: row for row in wide.get("api/queries/figures/latest")["rows"]}
    shown = page.eval_on_selector_all(
        "#keys .row",
        """rows => rows.map(row => [Number(row.querySelector(".name").textContent),
            row.querySelector(".value small").textContent,
            row.querySelector(".bar").style.getPropertyValue("--low"),
            row.querySelector(".bar").style.getPropertyValue("--high")])""",
    )

    assert len(shown) == 3
    for key, text, low, high in shown:
        ends = [float(each) for each in text.strip("()").split(" to ")]
        true = (rows[key]["low"]["place"], rows[key]["high"]["place"])
        assert rows[key]["stddev"].get("place") is None
        assert ends == pytest.approx(true)
        assert (float(low.rstrip("%")) < float(high.rstrip("%"))) == (true[0] < true[1])
    page.click("#keys .row:first-child .name")
    page.wait_for_selector("#detail[open]")
    said = page.inner_text("#detail-body table")
    for name in ("users", "percent", "together", "place"):
        assert re.search(rf"{name}\s.* to [-\d.,]+", said, re.DOTALL), said
