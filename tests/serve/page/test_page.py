"""The page over three published days: chart, keys, windows, budget, what-if, explanation."""

import math
import re

import pytest

from dpstream.cli.print_releases import with_margin
from tests.serve.page.conftest import DESKTOP, PHONE, until
from tests.serve.page.logs import LATE_PAGE, PAGES

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]

PAINTED = """() => {
  const canvas = document.querySelector("#chart canvas");
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const colours = [...document.querySelectorAll("#legend .sample line")]
    .map((line) => getComputedStyle(line).stroke.match(/\\d+/g).map(Number));
  const found = colours.map(() => 0);
  for (let at = 0; at < pixels.length; at += 4) colours.forEach((colour, which) => {
    const near = colour.every((part, place) => Math.abs(pixels[at + place] - part) < 32);
    if (near && pixels[at + 3] > 200) found[which] += 1;
  });
  return found;
}"""
FIGURE = re.compile(r"^(-?[\d,.]+) ± ([\d,.]+)$")


def rows(page):
    """Name, value and margin of the keys that are listed."""
    return page.eval_on_selector_all(
        "#keys .row",
        "rows => rows.map(row => ['.name', '.value b', '.value small']"
        ".map(part => row.querySelector(part).textContent))",
    )


def names(page):
    return [name for name, *_ in rows(page)]


def chips(page):
    return page.locator("#legend .chip-name").all_inner_texts()


def test_the_chart_shows_the_largest_keys_with_margins(visit, story):
    """Each line is painted in its colour, and says its newest value and how far off it may be."""
    page = visit(story.url)
    largest = story.get("api/queries/pages/latest?limit=5")["rows"]

    assert chips(page) == [row["key"][0] for row in largest]
    assert min(page.evaluate(PAINTED)) > 100
    for text, row in zip(page.locator(".chip-value").all_inner_texts(), largest, strict=True):
        value, margin = FIGURE.match(text).groups()
        assert with_margin(row["values"]["visitors"], 2 * row["stddev"]["visitors"]) == text
        assert abs(float(value.replace(",", "")) - row["values"]["visitors"]) <= 0.5
        assert 0 <= float(margin) - 2 * row["stddev"]["visitors"] <= 1


def test_the_chart_marks_when_a_key_appeared(visit, story):
    """The page that nobody knew before the afternoon has a mark, and the keyboard finds it."""
    page = visit(story.url)
    (line,) = story.get(f'api/queries/pages/series?key=["{LATE_PAGE}"]')["series"]
    assert line["first_seen"] > 13
    assert page.locator("#appear-note").is_visible()

    page.focus("#chart")
    page.keyboard.press("Home")
    heard = []
    for _ in range(24):
        heard.append(page.inner_text("#readout"))
        page.keyboard.press("ArrowRight")
    (moment,) = [text for text in heard if f"appeared here: {LATE_PAGE}" in text]

    assert line["points"][0]["time"][11:16] in moment
    assert sum(f"{LATE_PAGE} not there yet" in text for text in heard) > 5


def test_keys_are_listed_with_error_bars_and_doubtful_orders(visit, story):
    """Values come as published; neighbours that noise may have swapped are joined."""
    page = visit(story.url)
    published = story.get("api/queries/pages/latest?limit=20")["rows"]

    assert names(page) == [row["key"][0] for row in published]
    joined = page.eval_on_selector_all(
        "#keys .row", "rows => rows.map(row => !row.querySelector('.tie').hidden)"
    )
    assert joined == [row["ordered"] is False for row in published]
    assert 0 < sum(joined) < len(joined) - 1
    assert f"joins {sum(joined)} of {len(joined) - 1}" in page.inner_text("#order-note")
    whiskers = page.eval_on_selector_all(
        "#keys .whisker", "all => all.map(one => one.getBoundingClientRect().width)"
    )
    assert min(whiskers) > 3


def test_keys_are_searched_and_picked(visit, story):
    """A search narrows the list, a tick puts the key into the chart; a reload remembers both."""
    page = visit(story.url)
    page.fill("#search", "HELP")
    until(page, "document.querySelectorAll('#keys .row').length === 1")
    assert names(page) == ["/help"]
    assert len(chips(page)) == 5
    page.check("#keys .pick")
    until(page, "document.querySelectorAll('#legend .chip').length === 6")
    assert chips(page)[-1] == "/help"

    page.reload()
    page.wait_for_selector("#status[data-state=live]")
    assert page.input_value("#search") == "HELP"
    assert chips(page)[-1] == "/help"

    page.fill("#search", "nobody wrote this")
    page.wait_for_selector("#none:visible")
    assert names(page) == []
    page.fill("#search", "")
    until(page, "document.querySelectorAll('#keys .row').length > 5")
    page.click("#legend .chip:first-child .chip-out")
    until(page, "document.querySelectorAll('#legend .chip').length === 5")
    page.click("#follow")
    until(page, "location.hash.includes('keys') === false")
    until(page, "!document.querySelector('#legend').textContent.includes('/help')")


@pytest.mark.parametrize(("key", "day"), [(LATE_PAGE, "3 May 2024"), (PAGES[0], "1 May 2024")])
def test_the_details_say_when_a_key_was_first_found(visit, story, key, day):
    """In which window of all that are there."""
    page = visit(story.url)
    page.locator("#keys .name", has_text=key).first.click()
    until(page, "document.querySelector('#found').textContent !== ''")

    assert page.inner_text("#found") == f"First found in the window from {day}, 00:00 UTC."


def test_the_chart_takes_six_keys(visit, story):
    """A seventh pushes out the one that is there longest; colours are never shared."""
    page = visit(story.url)
    for place in range(5, 7):
        page.locator("#keys .pick").nth(place).check()
        until(
            page,
            "name => document.querySelector('#legend').textContent.includes(name)",
            arg=names(page)[place],
        )
    until(page, "document.querySelectorAll('#legend .chip').length === 6")
    colours = page.eval_on_selector_all("#legend .chip", "all => all.map(one => one.className)")

    assert chips(page) == names(page)[1:7]
    assert len(set(colours)) == 6


def test_a_key_that_is_pointed_at_stands_out(visit, story):
    """The other lines fade, and come back."""
    page = visit(story.url)
    before = page.evaluate(PAINTED)
    page.hover("#legend .chip:nth-child(2)")
    until(page, f"() => ({PAINTED})()[0] < {before[0] / 4}")
    assert page.evaluate(PAINTED)[1] >= before[1]
    page.hover("#title")
    until(page, f"() => ({PAINTED})()[0] === {before[0]}")


def test_windows_are_chosen(visit, story):
    """Older and newer days, one after the other, and all of them with a point each."""
    page = visit(story.url)
    assert LATE_PAGE in names(page)
    assert page.is_disabled("#newer")
    page.click("#older")
    until(page, "document.querySelector('#summary').textContent.includes('3 May')")
    until(page, "!document.querySelector('#keys').textContent.includes('/eclipse')")
    assert page.locator("#window option:checked").inner_text() == "2 May 2024"
    assert set(names(page)) == set(PAGES)

    page.select_option("#window", "all")
    until(page, "document.querySelector('#readout').textContent.includes('window: from 3 May')")
    page.click("#as-table summary")
    page.wait_for_selector("#chart-table tbody tr")
    dates = page.locator("#chart-table tbody th").all_inner_texts()
    assert [date.split(" 2024")[0] for date in dates] == ["3 May", "2 May", "1 May"]
    assert page.is_hidden("#open-note")


def test_a_window_that_goes_on_stands_apart(visit, story):
    """It is marked, and no line leads down to it."""
    page = visit(story.url)
    told = story.get("api/queries/pages/series?window=all&id=" + first_id(story))
    for line in told["series"]:
        line["points"][-1] |= {"final": False, "values": {"visitors": 1, "seconds": 1}}
    page.route("**/series*", lambda route: route.fulfill(json=told))
    page.select_option("#window", "all")
    page.wait_for_selector("#open-note:visible")

    assert page.locator(".chip-value").first.inner_text().endswith("so far")
    # of a line from the second day down to 1 nothing is there: the picture's last third stays empty
    empty = page.evaluate(
        """() => {
          const canvas = document.querySelector("#chart canvas");
          const [x, y] = [canvas.width * 0.76, canvas.height * 0.2];
          const [width, height] = [canvas.width * 0.12, canvas.height * 0.6];
          const pixels = canvas.getContext("2d").getImageData(x, y, width, height).data;
          const line = document.querySelector("#legend .sample line");
          const colour = getComputedStyle(line).stroke.match(/\\d+/g).map(Number);
          for (let at = 0; at < pixels.length; at += 4)
            if (colour.every((part, place) => Math.abs(pixels[at + place] - part) < 32)
                && pixels[at + 3] > 200) return false;
          return true;
        }"""
    )
    assert empty


def first_id(site):
    """The key that is charted first."""
    return site.get("api/queries/pages/latest?limit=1")["rows"][0]["id"]


def test_a_part_of_the_time_is_looked_at(visit, story):
    """By buttons, by keys, by dragging; the address has it, and all of it comes back."""
    page = visit(story.url)
    assert page.is_hidden("#zoom-off")
    page.click("#zoom-in")
    until(page, "/zoom=\\d+-\\d+/.test(location.hash)")
    zoomed = page.evaluate("location.hash")
    page.click("#pan-on")
    until(page, "before => location.hash !== before", zoomed)
    page.click("#pan-back")
    until(page, "before => location.hash === before", zoomed)
    page.reload()
    page.wait_for_selector("#zoom-off:visible")
    assert page.evaluate("location.hash") == zoomed
    page.click("#zoom-off")
    until(page, "!location.hash.includes('zoom')")

    box = page.locator("#chart canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 60, steps=4)
    page.mouse.up()
    until(page, "location.hash.includes('zoom')")
    page.click("#older")
    until(page, "!location.hash.includes('zoom')")


def test_a_log_scale_keeps_the_lines(visit, story):
    """It is in the address; the lines are there in both."""
    page = visit(story.url)
    page.check("#log")
    until(page, "location.hash.includes('scale=log')")
    until(page, f"() => Math.min(...({PAINTED})()) > 100")
    page.uncheck("#log")
    until(page, "!location.hash.includes('scale')")
    assert min(page.evaluate(PAINTED)) > 100


def test_the_change_since_the_window_before_has_its_margin(visit, story):
    """Of the same release of the day before; both noises are in it."""
    page = visit(story.url)
    page.check("#against")
    page.wait_for_selector("#against-note:visible")
    id_ = first_id(story)
    points = [
        story.get(f"api/queries/pages/series?window={window}&id={id_}")["series"][0]["points"][-1]
        for window in (2, 1)
    ]
    values, spreads = ([p[kind]["visitors"] for p in points] for kind in ("values", "stddev"))
    change = with_margin(values[0] - values[1], 2 * math.hypot(*spreads))

    assert f"({change})" in page.locator(".chip-value").first.inner_text().replace("(+", "(")
    page.select_option("#window", "all")
    page.wait_for_selector("#against-label", state="hidden")


def test_a_reader_is_told_when_a_key_is_large_for_certain(visit, story):
    """Once; a number within its margin is not certain. It is kept in the browser alone."""
    page = visit(story.url)
    row = story.get("api/queries/pages/latest?limit=1")["rows"][0]
    value, stddev = row["values"]["visitors"], row["stddev"]["visitors"]
    page.locator("#keys .name").first.click()
    for level in (value - stddev, value - 3 * stddev):
        page.fill(".watch input", str(round(level, 3)))
        page.click(".watch button[type=submit]")
    page.wait_for_selector(".watches li:nth-child(2)")
    page.click("#detail-close")
    page.wait_for_selector("#told:visible")
    assert f"above {round(value - 3 * stddev, 3):g}"[:9] in page.inner_text("#told-text")
    page.click("#told-close")
    page.reload()
    page.wait_for_selector("#status[data-state=live]")
    assert page.is_hidden("#told")
    page.locator("#keys .name").first.click()
    for _ in range(2):
        page.locator(".watches button").first.click()
    assert page.locator(".watches li").count() == 0


def test_a_chart_stands_alone_in_a_frame(visit, story):
    """With its numbers and marks; everything around it is left out."""
    page = visit(f"{story.url}#query=pages&embed=")
    page.wait_for_selector("#legend .chip")

    for hidden in ("#queries", "#keys-card", "#explain-card", ".side", "footer"):
        assert page.is_hidden(hidden)
    assert min(page.evaluate(PAINTED)) > 100


def test_a_query_has_a_title_and_a_description(visit, story):
    """Where the pipeline file says them; the name stays in addresses."""
    page = visit(story.url)
    page.click("text=Visits by the hour")
    until(page, "document.querySelector('#title').textContent === 'Visits by the hour'")

    assert page.inner_text("#description") == "Three pages, at all hours."
    assert "query=hourly" in page.url


def test_another_number_and_another_query_are_chosen(visit, story):
    """The chart and the order follow; without keys the numbers stand alone."""
    page = visit(story.url)
    page.check("#measures input[value=seconds]")
    until(page, "document.querySelector('#keys-title').textContent.includes('seconds')")
    known = {row["key"][0]: row["values"] for row in story.get("api/queries/pages/latest")["rows"]}
    values = [known[key]["seconds"] for key, _, _ in rows(page)]
    assert values == sorted(values, reverse=True)
    assert max(float(value.replace(",", "")) for _, value, _ in rows(page)) < 300

    page.click("text=everybody")
    page.wait_for_selector("#numbers-card:visible")
    (row,) = story.get("api/queries/everybody/latest")["rows"]
    shown = f"{page.inner_text('#numbers b')} {page.inner_text('#numbers span')}"
    assert shown == with_margin(row["values"]["users"], 2 * row["stddev"]["users"])
    assert page.is_hidden("#keys-card")


def test_the_budget_says_what_was_spent_on_what(visit, story):
    """The gauge and its table are the ledger's amounts."""
    page = visit(story.url)
    (book,) = [one for one in story.get("api/ledger")["datasets"] if one["dataset"] == "clicks"]
    gauge = page.locator("#budget > .book [role=meter]")
    spent = 100 * book["spent"] / book["total"]

    assert abs(float(gauge.get_attribute("aria-valuenow")) - spent) < 0.06
    parts = page.eval_on_selector_all(
        "#budget > .book .part", "all => all.map(one => one.getBoundingClientRect().width)"
    )
    assert abs(sum(parts) / gauge.bounding_box()["width"] * 100 - spent) < 1.5
    table = page.inner_text("#budget > .book .spent")
    for word in ("pages", "everybody", "sum of seconds", "ε = 2", "ε = 1"):
        assert word in table
    assert "ε = 4, δ = 10⁻⁸" in page.inner_text("#budget")


def test_what_another_epsilon_would_do(visit, story):
    """The slider asks the feed; what comes back is shown beside what runs now."""
    page = visit(story.url)
    page.wait_for_selector("#whatif table")
    page.locator("#epsilon").focus()
    page.keyboard.press("End")
    until(page, "document.querySelector('#whatif').textContent.includes('narrower')")
    told = story.get("api/what-if?query=pages&epsilon=20")

    assert page.inner_text("#whatif output") == "20"
    _, _, expected = with_margin(0, 2 * told["then"]["columns"][0]["most"]).partition("± ")
    assert f"± {expected}" in page.inner_text("#whatif tbody tr:first-child")
    assert str(told["then"]["keys"]["last_threshold"]) in page.inner_text("#whatif .then p")
    page.fill("#w-max_groups_contributed", "9")
    until(
        page,
        "before => !document.querySelector('#whatif').textContent.includes(before)",
        f"± {expected}",
    )
    page.fill("#w-max_groups_contributed", "0")
    assert not page.evaluate("document.querySelector('#w-max_groups_contributed').validity.valid")


def test_what_cannot_be_is_said_in_words(visit, story):
    """A budget that no noise can be computed for: the form stays, and says so."""
    page = visit(story.url, allowed=("422",))
    page.wait_for_selector("#whatif table")
    page.locator("#epsilon").focus()
    page.keyboard.press("End")
    page.fill("#w-max_groups_contributed", "90000")
    page.wait_for_selector("#whatif .refused")
    page.click("text=Back to what is running")
    page.wait_for_selector("#whatif table")


def test_the_explanation_is_in_plain_words(visit, story):
    """What is protected, how large the noise is, when keys appear; all from the query's plan."""
    page = visit(story.url)
    text = page.inner_text("#explain")
    told = story.get("api/queries/pages")["explain"]

    assert told["unit"] in text
    for number in (told["keys"]["last_threshold"], "19 times out of 20", "ε = 2, δ = 10⁻⁹"):
        assert str(number) in text
    page.click("text=The query in SQL")
    assert "SELECT WITH DIFFERENTIAL_PRIVACY" in page.inner_text("#explain pre")


def test_the_legend_says_what_a_band_covers(visit, story):
    """Of the rows that are counted, and beside it how many are not: as the newest release says."""
    page = visit(story.url)
    share = story.get("api/queries/pages/latest")["kept_share"]
    note = page.inner_text(".key-note")

    assert (
        "of the rows that are counted, the exact number is in the band 19 times out of 20" in note
    )
    told = re.search(r"about (< )?([\d.]+)% of the rows are not counted", note)
    if share is None:
        assert "too few rows to say how many are not counted" in note
    else:
        assert float(told[2]) == pytest.approx(max(100 * (1 - share), 0.1), abs=0.6)
    assert "for all keys together" in page.inner_text("#explain")


def test_light_and_dark(visit, story):
    """The system's choice holds until the switch says otherwise, and the switch is remembered."""
    ground = "getComputedStyle(document.body).backgroundColor"
    page = visit(story.url, color_scheme="dark")
    dark, line = page.evaluate(ground), page.evaluate(PAINTED)[0]
    assert line > 100
    page.check("#theme input[value=light]")
    light = page.evaluate(ground)
    assert dark != light
    until(page, f"() => ({PAINTED})()[0] > 100")
    page.reload()
    page.wait_for_selector("#status[data-state=live]")
    assert page.evaluate(ground) == light
    page.check("#theme input[value=auto]")
    assert page.evaluate(ground) == dark


def test_downloads_are_of_the_window_that_is_shown(visit, story):
    """The links are real files."""
    page = visit(story.url)
    with page.expect_download() as begun:
        page.click("#csv")
    head = begun.value.path().read_text().splitlines()

    assert "page" in head[0]
    assert any(LATE_PAGE in line for line in head[1:])


@pytest.mark.parametrize("size", [DESKTOP, PHONE, {"width": 320, "height": 640}], ids=str)
def test_nothing_is_wider_than_the_screen(visit, story, size):
    """Also on a phone, one scrolls down only."""
    page = visit(story.url, viewport=size)
    page.wait_for_selector("#whatif table")

    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]


def test_a_query_that_its_book_refused_is_shown_as_that(visit, story):
    """Not as one that is live, whether it has releases or not."""
    page = visit(story.url, allowed=("404",))  # of a query that has published nothing
    refused = story.get("api/queries")
    for query in refused["queries"]:
        query |= {"finished": False, "refused": True}
    page.route("**/api/queries", lambda route: route.fulfill(json=refused))
    page.reload()
    until(page, "document.querySelector('#status').innerText.includes('budget is used up')")
    assert "No more will come: the privacy budget" in page.inner_text("#summary")
    nothing = {"status": 404, "json": {"error": "nothing was published yet"}}
    page.route("**/latest*", lambda route: route.fulfill(**nothing))
    page.reload()
    until(page, "document.querySelector('#summary').innerText.includes('nothing will be')")
