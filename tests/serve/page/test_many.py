"""A thousand windows and ten thousand keys. DPSTREAM_MEASURE=1 prints how long answers take."""

import json
import os

import pytest

from tests.serve.page.conftest import Site, published, until
from tests.serve.page.logs import MANY_KEYS, MANY_WINDOWS, write_many
from tests.support.served import served

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]

# What the browser itself says of each click, key and drag: until the next picture was drawn, in
# milliseconds; and stretches in which it could not have answered.
WATCH = """() => {
  window.slow = {interactions: [], tasks: []};
  new PerformanceObserver((list) => list.getEntries().forEach((entry) => {
    if (entry.interactionId) window.slow.interactions.push([entry.name, entry.duration]);
  })).observe({type: "event", durationThreshold: 16, buffered: true});
  new PerformanceObserver((list) => list.getEntries().forEach((entry) =>
    window.slow.tasks.push(entry.duration))).observe({type: "longtask", buffered: true});
}"""


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    path = published(tmp_path_factory.mktemp("many"), write_many)
    with served(path, "--no-run", kind=Site) as site:
        yield site


def test_many_windows_and_keys(visit, many):
    """The page holds no more than can be seen of them, whatever is clicked."""
    page = visit(f"{many.url}#query=keys&window=all")
    until(page, f"document.querySelector('#range').textContent.includes('{MANY_KEYS:,}')")
    page.evaluate(WATCH)
    page.click("#next")
    until(page, "document.querySelector('#range').textContent.startsWith('21–40')")
    page.check("#keys .row:first-child .pick")
    until(page, "document.querySelectorAll('#legend .chip').length === 6")
    page.fill("#search", "/page/0999")
    until(page, "document.querySelectorAll('#keys .row').length === 10")
    page.check("#log")
    until(page, "location.hash.includes('scale=log')")
    page.uncheck("#log")

    page.goto(f"{many.url}#query=hours&window=all")
    until(page, "document.querySelector('#chart-title').textContent === 'visits over time'")
    until(page, "document.querySelector('#range').textContent.includes('of 12 keys')")
    for _ in range(3):
        page.click("#zoom-in")
    page.click("#pan-back")
    until(page, "location.hash.includes('zoom')")
    page.focus("#chart")
    for _ in range(20):
        page.keyboard.press("ArrowLeft")
    page.click("#zoom-off")
    page.select_option("#window", "newest")
    until(page, "!location.hash.includes('window')")
    page.click("#older")
    until(page, "location.hash.includes('window')")
    if os.environ.get("DPSTREAM_MEASURE") == "1":
        asked = """performance.getEntriesByType('resource')
          .filter(one => one.name.includes('/api/'))
          .map(one => [one.name.split('/').at(-1).split('?')[0], Math.round(one.duration)])"""
        print(json.dumps(page.evaluate("window.slow") | {"answers": page.evaluate(asked)}))

    assert page.locator("#window option").count() <= 103  # 100, all, the newest, older ones
    assert page.evaluate("document.querySelectorAll('*').length") < 1500
    assert page.locator("#keys .row").count() <= 20
    drawn = page.evaluate("performance.getEntriesByType('resource').map(one => one.name)")
    assert sum("/series" in one for one in drawn) >= 3
    (newest,) = many.get("api/queries/hours/windows?limit=1")["windows"]
    assert newest["window"] == MANY_WINDOWS - 1
