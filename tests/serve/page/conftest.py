"""The real command, the real browser: `dpstream serve` in a process of its own, and Chromium.

Every page that a test opens is watched: an error on the console, a dialog, or a request to another
host fails the test.
"""

import json
import os
import shutil
import time
from dataclasses import dataclass, field

import pytest

from dpstream.engines.query_run import EngineOptions
from dpstream.privacy.state import Secret
from dpstream.serve.worker import publish
from dpstream.session.pipeline import load_pipeline
from tests.serve.page import logs
from tests.support.fixed import RUN, SECRET
from tests.support.processes import until as asked_until
from tests.support.served import Served, served
from tests.support.servers import free_port

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}


class Site(Served):
    """A server with a page."""

    @property
    def url(self):
        return f"{self.public}/"

    def get(self, path):
        """What the feed answers."""
        status, body = self.ask(f"/{path}")
        assert status == 200, body
        return json.loads(body)


@dataclass(kw_only=True)
class Watch:
    """What must not happen on a page."""

    problems: list = field(default_factory=list)
    allowed: tuple = ()

    def over(self, page):
        page.on("console", lambda said: self._note(said.type, said.text))
        page.on("pageerror", lambda problem: self._note("error", str(problem)))
        page.on("dialog", lambda dialog: (self._note("error", dialog.message), dialog.dismiss()))
        page.on("request", lambda request: self._leaves(request.url))

    def _note(self, kind, text):
        allowed = (
            *self.allowed,
            "willReadFrequently",
        )  # the tests read the chart back, the page not
        if kind in ("error", "warning") and not any(each in text for each in allowed):
            self.problems.append(f"{kind}: {text}")

    def _leaves(self, url):
        if not url.startswith(("http://127.0.0.1:", "data:")):
            self.problems.append(f"a request to {url}")


def until(page, expression, arg=None, *, patience=30.0):
    """Wait for an expression to hold; Playwright's own way needs what the page's policy forbids."""
    deadline = time.monotonic() + patience
    wanted = f"(arg) => ({expression})(arg)" if "=>" in expression else f"() => ({expression})"
    while not page.evaluate(wanted, arg):
        if time.monotonic() > deadline:
            pytest.fail(f"after {patience} seconds it does not hold: {expression} for {arg!r}")
        time.sleep(0.03)


@pytest.fixture(scope="session")
def chromium():
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, BROWSERS)))
    alone = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has no sandbox for root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=alone)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium):
    """Open an address in a fresh profile and wait until the page is live."""
    watched = []

    def opened(url, *, allowed=(), **options):
        context = chromium.new_context(**({"viewport": DESKTOP} | options))
        context.set_default_timeout(30_000)
        page, watch = context.new_page(), Watch(allowed=allowed)
        watch.over(page)
        watched.append((context, watch))
        page.goto(url)
        page.wait_for_selector("#status[data-state=live]")
        return page

    yield opened
    for context, _ in watched:
        context.close()
    assert [problem for _, watch in watched for problem in watch.problems] == []


def published(folder, write):
    """A pipeline that has been run to its end, with the same noise every time."""
    path = write(folder)
    Secret.create(folder / "state.secret", value=SECRET)
    publish(load_pipeline(path), options=EngineOptions(run_id=RUN, threads=1, buckets=2))
    return path


@pytest.fixture(scope="session")
def story(tmp_path_factory):
    """Three days of a news site."""
    path = published(tmp_path_factory.mktemp("story"), logs.write_story)
    with served(path, "--no-run", kind=Site) as site:
        yield site


@pytest.fixture(scope="session")
def wild(tmp_path_factory):
    """Keys that mean harm, and 50,000 keys."""
    path = published(tmp_path_factory.mktemp("wild"), logs.write_wild)
    with served(path, "--no-run", kind=Site) as site:
        yield site


class Stream:
    """A pipeline that publishes every second; its server can be killed and started again."""

    def __init__(self, folder):
        self.folder, self._path, self._port = folder, logs.write_live(folder), free_port()
        Secret.create(folder / "state.secret", value=SECRET)
        self.site = None

    def start(self):
        self.site = Site(self._path, "--port", str(self._port))

    def send(self, **visitors):
        logs.send_live(self.folder, {f"/{page}": count for page, count in visitors.items()})


@pytest.fixture(scope="session")
def stream(tmp_path_factory):
    """A stream with two pages that everybody can see."""
    one = Stream(tmp_path_factory.mktemp("live"))
    one.start()
    try:
        asked_until(lambda: b"/news" in one.site.ask("/api/queries/now/latest")[1])
        yield one
    finally:
        one.site.close()
