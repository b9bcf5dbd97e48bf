"""The real command, the real browser: `dpstream serve` in a process of its own, and Chromium.

Every page that a test opens is watched: an error on the console, a dialog, or a request to another
host fails the test.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.serve.page import logs

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
PATIENCE = 60.0  # seconds for a server to publish what it can


@dataclass(kw_only=True)
class Served:
    """A `dpstream serve` that can be killed and started again at the same address."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        command = [sys.executable, "-c", "from dpstream.cli import main; main()", "serve"]
        options = ["pipeline.toml", "--port", str(self.port), "--operator-port", "0"]
        with (self.folder / "serve.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *options], cwd=self.folder, stdout=log, stderr=log
            )

    def get(self, path: str) -> Any:
        """An answer of the feed, or None while there is none."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return json.load(answer)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return None

    def wait(self, path: str, wanted: Callable[[Any], bool]) -> Any:
        """Ask until the answer is as wanted."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            assert self.process is not None
            if self.process.poll() is not None:
                pytest.fail(f"dpstream serve left: {(self.folder / 'serve.log').read_text()}")
            found = self.get(path)
            if found is not None and wanted(found):
                return found
            time.sleep(0.1)
        pytest.fail(f"{path} was not as wanted; {(self.folder / 'serve.log').read_text()}")

    def kill(self) -> None:
        """End it as a power cut would."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(kw_only=True)
class Watch:
    """What must not happen on a page."""

    problems: list[str] = field(default_factory=list)
    allowed: tuple[str, ...] = ()

    def over(self, page: Any) -> None:
        page.on("console", lambda said: self._note(said.type, said.text))
        page.on("pageerror", lambda problem: self._note("error", str(problem)))
        page.on("dialog", lambda dialog: (self._note("error", dialog.message), dialog.dismiss()))
        page.on("request", lambda request: self._leaves(request.url))

    def _note(self, kind: str, text: str) -> None:
        allowed = (
            *self.allowed,
            "willReadFrequently",
        )  # the tests read the chart back, the page not
        if kind in ("error", "warning") and not any(each in text for each in allowed):
            self.problems.append(f"{kind}: {text}")

    def _leaves(self, url: str) -> None:
        if not url.startswith(("http://127.0.0.1:", "data:")):
            self.problems.append(f"a request to {url}")


def until(page: Any, expression: str, arg: Any = None, *, patience: float = 20.0) -> None:
    """Wait for an expression to hold. (Playwright's own way needs what the page's policy forbids.)"""
    deadline = time.monotonic() + patience
    wanted = f"(arg) => ({expression})(arg)" if "=>" in expression else f"() => ({expression})"
    while not page.evaluate(wanted, arg):
        if time.monotonic() > deadline:
            pytest.fail(f"after {patience} seconds it does not hold: {expression} for {arg!r}")
        time.sleep(0.03)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, BROWSERS)))
    alone = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has no sandbox for root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=alone)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Open an address in a fresh profile and wait until the page is live."""
    watched = []

    def opened(url: str, *, allowed: tuple[str, ...] = (), **options: Any) -> Any:
        context = chromium.new_context(**({"viewport": DESKTOP} | options))
        context.set_default_timeout(15_000)
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


def _served(folder: Path, write: Callable[[Path], Path]) -> Iterator[Served]:
    write(folder)
    server = Served(folder=folder, port=free_port())
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Three days of a news site, all of it published."""
    for server in _served(tmp_path_factory.mktemp("story"), logs.write_story):
        server.wait("api/queries/pages/windows", lambda found: _last(found, 2, 24))
        server.wait("api/queries/everybody/windows", lambda found: _last(found, 2, 8))
        yield server


@pytest.fixture(scope="session")
def wild(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Keys that mean harm, and 50,000 keys."""
    for server in _served(tmp_path_factory.mktemp("wild"), logs.write_wild):
        server.wait("api/queries/names/latest", lambda found: found["total"] == len(logs.HOSTILE))
        server.wait("api/queries/articles/latest", lambda found: found["total"] == logs.MANY)
        yield server


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A stream that is published every second."""
    for server in _served(tmp_path_factory.mktemp("live"), logs.write_live):
        server.wait("api/queries/now/latest", lambda found: found["total"] >= 2)
        yield server


def _last(found: Any, window: int, release: int) -> bool:
    newest = found["windows"][:1]
    return bool(newest) and (newest[0]["window"], newest[0]["last_release_index"]) == (
        window,
        release,
    )
