"""Who uses a keyboard, a screen reader or other colours is served as well."""

import itertools

import pytest

from tests.serve.page.conftest import DESKTOP, PHONE

pytestmark = pytest.mark.browser


@pytest.mark.parametrize(
    ("scheme", "size"), [("light", DESKTOP), ("dark", PHONE)], ids=["light", "dark-phone"]
)
@pytest.mark.parametrize("query", ["pages", "everybody"])
def test_axe_finds_nothing(visit, story, scheme, size, query):
    """Names, roles, contrast and order, by the rules of WCAG 2.1 AA and good practice."""
    from axe_playwright_python.sync_playwright import Axe

    page = visit(f"{story.url}#query={query}", color_scheme=scheme, viewport=size)
    page.wait_for_selector("#whatif table")
    page.click("text=The chart as a table")
    found = Axe().run(page)

    assert found.violations_count == 0, found.generate_report()


def test_the_keyboard_reaches_everything_in_order(visit, story):
    """The first stop skips to the numbers; each stop can be seen, and none is a trap."""
    page = visit(story.url)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.locator(".skip").bounding_box()["y"] >= 0
    stops = []
    for _ in range(70):
        page.keyboard.press("Tab")
        stops.append(
            page.evaluate(
                "() => { const one = document.activeElement, seen = getComputedStyle(one);"
                " const beside = one.nextElementSibling ? getComputedStyle(one.nextElementSibling).outlineStyle : '';"
                " return [one.id || one.className || one.tagName, seen.outlineStyle !== 'none' || beside === 'solid'] }"
            )
        )
    reached = {name for name, _ in stops}

    for name in ("query", "window", "chart", "search", "pick", "name", "epsilon", "csv"):
        assert name in reached
    assert [name for name, seen in stops if not seen and name != "BODY"] == []

    page.focus(".skip")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


def test_a_key_is_opened_and_closed_by_keyboard(visit, story):
    """The dialog takes the focus, Escape gives it back."""
    page = visit(story.url)
    page.focus("#keys .row:first-child .name")
    page.keyboard.press("Enter")
    assert page.locator("#detail").is_visible()
    assert "visitors" in page.inner_text("#detail")
    page.keyboard.press("Escape")
    assert page.locator("#detail").is_hidden()
    assert page.evaluate("document.activeElement.className") == "name"


def luminance(colour):
    parts = [part / 255 for part in colour]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


# What people without one kind of cones see: matrices on linear RGB (Machado, Oliveira, Fernandes,
# "A Physiologically-based Model for Simulation of Color Vision Deficiency", 2009).
BLINDNESS = {
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lines_can_be_told_apart_without_colour_vision(visit, story, scheme):
    """Each line stands out from the ground; two that look alike to somebody have other patterns."""
    page = visit(story.url, color_scheme=scheme)
    colours = page.evaluate(
        "() => [1, 2, 3, 4, 5, 6].map((slot) => { const one = document.createElement('i');"
        " one.style.color = `var(--s${slot})`; document.body.append(one);"
        " return getComputedStyle(one).color.match(/\\d+/g).map(Number) })"
    )
    ground = page.evaluate(
        "getComputedStyle(document.querySelector('.card')).backgroundColor.match(/\\d+/g).map(Number)"
    )
    for colour in colours:
        light, dark = sorted((luminance(colour), luminance(ground)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3
    dashes = page.evaluate(
        "async () => (await import('/assets/js/slots.js')).DASHES.map((dash) => dash.join(' '))"
    )
    assert len(set(dashes)) == 6
    for matrix in BLINDNESS.values():
        seen = [[sum(a * b for a, b in zip(row, colour, strict=True)) for row in matrix] for colour in colours]
        for one, other in itertools.combinations(seen, 2):
            assert sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5 > 20
