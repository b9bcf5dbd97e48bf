"""Who uses a keyboard, a screen reader or other colours is served as well."""

import itertools

import numpy as np
import pytest

from tests.serve.page.conftest import DESKTOP, PHONE

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]

# Where the focus is, and whether its outline is seen, there or (radio buttons) on the label's text.
STOP = """() => {
  const one = document.activeElement;
  const drawn = [one, one.nextElementSibling].filter(Boolean)
    .some((node) => getComputedStyle(node).outlineStyle !== "none");
  return [one.id || one.className || one.tagName, drawn];
}"""


@pytest.mark.parametrize(
    ("query", "scheme", "size"),
    [("pages", "light", DESKTOP), ("pages", "dark", PHONE), ("everybody", "dark", DESKTOP)],
    ids=["light", "dark-phone", "dark-without-keys"],
)
def test_axe_finds_nothing(visit, story, query, scheme, size):
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
        stops.append(page.evaluate(STOP))
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


# What people without one kind of cones see: matrices on linear RGB (Machado, Oliveira, Fernandes,
# "A Physiologically-based Model for Simulation of Color Vision Deficiency", 2009).
SEEN = {
    "all cones": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colours):
    parts = np.array(colours) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(light):
    """CIELAB of linear RGB: distances in it are about what people see."""
    x, y, z = np.cbrt(light @ TO_XYZ.T / TO_XYZ.sum(1)).T
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], 1)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lines_can_be_told_apart_without_colour_vision(visit, story, scheme):
    """Each stands out from the ground, differs from the others to everybody, and has a pattern."""
    page = visit(story.url, color_scheme=scheme)
    colours = linear(
        page.evaluate(
            "() => [1, 2, 3, 4, 5, 6].map((slot) => { const one = document.createElement('i');"
            " one.style.color = `var(--s${slot})`; document.body.append(one);"
            " return getComputedStyle(one).color.match(/\\d+/g).map(Number) })"
        )
    )
    ground = linear(
        page.evaluate(
            "getComputedStyle(document.querySelector('.card')).backgroundColor"
            ".match(/\\d+/g).map(Number)"
        )
    )
    bright, under = colours @ TO_XYZ[1], ground @ TO_XYZ[1]
    contrast = (np.maximum(bright, under) + 0.05) / (np.minimum(bright, under) + 0.05)
    dashes = page.evaluate(
        "async () => (await import('/assets/js/slots.js')).DASHES.map((dash) => dash.join(' '))"
    )

    assert contrast.min() >= 3
    assert len(set(dashes)) == 6
    for matrix in SEEN.values():
        seen = lab(np.clip(colours @ np.array(matrix).T, 0, 1))
        for one, other in itertools.combinations(seen, 2):
            assert np.linalg.norm(one - other) > 12  # 2.3 is just noticeable
