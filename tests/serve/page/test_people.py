"""How far users get, and when they come back: funnels and cohorts as pictures."""

import pytest

from tests.serve.page.conftest import DESKTOP, PHONE, Site, published, until
from tests.serve.page.logs import write_users
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
