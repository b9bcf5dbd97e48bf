"""Keys come from the data: they are shown, they do nothing, and 50,000 of them are no burden."""

import pytest

from tests.serve.page.conftest import until
from tests.serve.page.logs import HOSTILE, LONGEST, MANY

COUNT_ELEMENTS = """() => {
    window.made = 0;
    const count = (node) => 1 + (node.querySelectorAll?.("*").length ?? 0);
    const add = (changes) => {
        for (const change of changes)
            for (const node of change.addedNodes) window.made += count(node);
    };
    new MutationObserver(add).observe(document.body, {childList: true, subtree: true});
}"""
"""What the page puts into itself from now on."""

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]


def test_hostile_keys_are_text(visit, wild):
    """No markup comes to life, no text turns the page around, nothing fills the screen."""
    page = visit(f"{wild.url}#query=names")
    until(
        page,
        "wanted => document.querySelectorAll('#keys .row').length === wanted",
        arg=len(HOSTILE),
    )
    shown = page.locator("#keys .name").all_inner_texts()

    assert page.evaluate("window.pwned") is None
    assert (
        page.locator("#keys script, #keys img, #keys svg, #legend img, body > script").count() == 0
    )
    for text in ("<script>window.pwned = 1</script>", "{{7*7}}${7*7}", "no value", "empty text"):
        assert text in shown
    assert "⟨202E⟩gnp.evil⟨202C⟩" in shown
    assert "line⏎break⇥and ⟨0007⟩ bell" in shown
    assert "3 × blank" in shown
    assert max(map(len, shown)) <= 65
    starts, values = (
        page.eval_on_selector_all(
            f"#keys {part}", "all => [...new Set(all.map(one => one.getBoundingClientRect().left))]"
        )
        for part in (".name", ".value")
    )
    assert (len(starts), len(values)) == (1, 1)
    heights = page.eval_on_selector_all("#keys .row", "all => all.map(one => one.offsetHeight)")
    assert max(heights) <= min(heights) + 6
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_a_long_key_is_fetched_on_demand(visit, wild):
    """A megabyte is not in the page until somebody opens it."""
    page = visit(f"{wild.url}#query=names")
    page.wait_for_selector("#keys .row")
    assert len(page.content()) < 100_000
    page.locator("#keys .name", has_text="xxxx").click()
    until(page, "document.querySelector('#detail').textContent.includes('1,000,000')")
    text = page.locator("#detail pre").text_content()

    assert text == LONGEST[: len(text)]
    assert len(text) == 100_000
    page.click("#detail-close")
    page.check(f"#keys .row:has-text('{'x' * 20}') .pick")
    until(page, "!!document.querySelector('#detail:not([open])')")


def test_every_hostile_key_can_be_charted(visit, wild):
    """Each one goes into the chart by its id, and out again."""
    page = visit(f"{wild.url}#query=names")
    page.wait_for_selector("#keys .row")
    for place in range(len(HOSTILE)):
        pick = page.locator("#keys .pick").nth(place)
        if not pick.is_checked():
            pick.check()
            until(page, "document.querySelectorAll('#legend .chip').length >= 5")
    until(page, "document.querySelectorAll('#legend .chip').length === 6")

    assert page.evaluate("window.pwned") is None
    assert max(map(len, page.locator("#legend .chip-name").all_inner_texts())) <= 40


def test_fifty_thousand_keys_are_quick(visit, wild):
    """Searching and paging touch the elements of a few pages, and the page holds one of them."""
    page = visit(f"{wild.url}#query=articles")
    until(page, f"document.querySelector('#range').textContent.includes('{MANY:,}')")
    assert page.locator("#keys .row").count() == 20

    page.evaluate(COUNT_ELEMENTS)
    page.fill("#search", "/49731")
    until(page, "document.querySelectorAll('#keys .row').length === 1")
    assert page.inner_text("#keys .name") == "/article/49731"
    assert f"1–1 of 1 key found among {MANY:,}" in page.inner_text("#range")

    assert page.is_hidden("#chart-card")  # published once: there is no course to draw
    page.fill("#search", "")
    until(page, "document.querySelectorAll('#keys .row').length === 20")
    page.click("#next")
    until(page, "document.querySelector('#range').textContent.startsWith('21–40')")
    assert 60 < page.evaluate("window.made") < 6_000

    page.goto(f"{wild.url}#query=articles&from={MANY - 20}")
    until(page, f"document.querySelector('#range').textContent.includes('–{MANY:,} of')")
    assert page.is_disabled("#next")
