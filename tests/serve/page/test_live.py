"""A stream that goes on: the page follows it in place, and outlives its server."""

import pytest

from tests.serve.page.conftest import until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]

REFUSED = ("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED", "ERR_CONNECTION_RESET", "ERR_EMPTY")
RELEASE = "Number(document.querySelector('#summary').textContent.match(/Release (\\d+)/)[1])"
PAINTED = "document.querySelector('#chart canvas').toDataURL()"


def later(page, release):
    until(page, f"before => {RELEASE} > before", arg=release)
    return page.evaluate(RELEASE)


def test_releases_arrive_in_place(visit, stream):
    """A new release changes numbers, not the page: no node is made anew, nothing moves."""
    page = visit(stream.site.url, viewport={"width": 900, "height": 500})
    first, last = page.evaluate(RELEASE), page.inner_text("#keys .row:last-child .name")
    before = page.inner_text("#keys .row:first-child .value b")
    page.evaluate("""() => {
      const made = document.querySelectorAll("#keys .row, #legend .chip, #chart canvas, .gauge");
      for (const node of made) node.seen = true;
      document.querySelector("#keys .row:last-child .name").focus({ preventScroll: true });
      window.scrollTo(0, 420);
      window.moves = [];
      addEventListener("scroll", () => window.moves.push(window.scrollY));
    }""")
    until(page, "window.scrollY === 420")
    painted = page.evaluate(PAINTED)
    stream.send(home=300)
    second = later(page, first)
    until(
        page,
        "before => document.querySelector('#keys .row .value b').textContent !== before",
        arg=before,
    )
    later(page, second)
    until(page, f"before => {PAINTED} !== before", painted)

    made = "#keys .row, #legend .chip, #chart canvas, .gauge"
    assert page.eval_on_selector_all(made, "all => all.every(one => one.seen)")
    assert page.evaluate("document.activeElement.textContent") == last
    assert page.evaluate("window.scrollY") == 420
    assert set(page.evaluate("window.moves")) <= {420}


def test_a_new_key_appears_with_a_mark(visit, stream):
    """Enough people behind a key that nobody knew: it joins the list and the chart."""
    page = visit(stream.site.url)
    later(page, page.evaluate(RELEASE))
    assert "/late" not in page.inner_text("#keys")
    stream.send(late=300)
    until(page, "document.querySelector('#keys').textContent.includes('/late')")
    until(page, "document.querySelector('#legend').textContent.includes('/late')")
    page.wait_for_selector("#appear-note:visible")

    (row,) = stream.site.get("api/queries/now/latest?q=late")["rows"]
    assert row["first_seen"] > 1


def test_the_page_outlives_the_server(visit, stream):
    """Killed and started again: the page says so, keeps what it has, and goes on by itself."""
    page = visit(stream.site.url, allowed=REFUSED)
    page.evaluate("window.same = true")
    before = later(page, page.evaluate(RELEASE))
    shown = page.inner_text("#keys .row:first-child .name")
    stream.site.kill()
    page.wait_for_selector("#status[data-state=lost]")
    assert page.inner_text("#status-text") == "Reconnecting…"
    assert page.inner_text("#keys .row:first-child .name") == shown

    stream.start()
    page.wait_for_selector("#status[data-state=live]", timeout=60_000)
    until(page, f"before => {RELEASE} > before + 1", arg=before, patience=60)
    assert page.evaluate("window.same")
