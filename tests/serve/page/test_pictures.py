"""Pictures of the page. DPSTREAM_PICTURES=1 puts them into docs/images/, to be looked at."""

import os
import shutil
from pathlib import Path

import pytest

from tests.serve.page.conftest import PHONE, until
from tests.serve.page.logs import LATE_PAGE

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]

IMAGES = Path(__file__).resolve().parents[3] / "docs" / "images"
TALL = {"width": 1280, "height": 1330}
PICTURES = {
    "page-light.png": ("", {"viewport": TALL, "color_scheme": "light"}),
    "page-dark.png": (
        "#window=1&measure=seconds",
        {"viewport": {"width": 1280, "height": 840}, "color_scheme": "dark"},
    ),
    "page-phone.png": (
        "",
        {"viewport": PHONE | {"height": 1180}, "color_scheme": "light", "device_scale_factor": 1.5},
    ),
}


def test_pictures(visit, story, tmp_path):
    """Light, dark and on a phone, each with its chart and its keys."""
    for name, (view, options) in PICTURES.items():
        page = visit(story.url + view, **options)
        page.wait_for_selector("#whatif table")
        until(page, "document.querySelectorAll('#keys .row').length > 8")
        if options["color_scheme"] == "dark":
            page.hover("#legend .chip")
        page.screenshot(path=tmp_path / name, animations="disabled")
        assert (LATE_PAGE in page.inner_text("#keys")) == (not view)
        assert (tmp_path / name).stat().st_size > 40_000
    if os.environ.get("DPSTREAM_PICTURES") == "1":
        IMAGES.mkdir(exist_ok=True)
        for name in PICTURES:
            shutil.copyfile(tmp_path / name, IMAGES / name)
