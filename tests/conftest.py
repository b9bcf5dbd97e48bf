"""Set-up shared by all tests: reproducible examples, and tests that need a real component.

A test marked with a component (such as `spark`) runs where that component is found. Elsewhere
it is skipped and the end of the run lists what was left out; with DPSTREAM_REQUIRE_ALL=1 any skip,
whatever its reason, is a failure.
"""

import gc
import importlib.util
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from tests.support.fixed import fixed_randomness
from tests.support.servers import KafkaServer, NatsServer, PostgresServer, RegistryServer

ROOT = Path(__file__).resolve().parent.parent
KAFKA_JARS = ROOT / ".cache" / "spark-kafka"
"""Spark's own connector to Kafka, for every session of the tests."""

os.environ.setdefault("NUMBA_CACHE_DIR", str(ROOT / ".cache" / "numba"))
os.environ.setdefault("MPLBACKEND", "agg")

gc.set_threshold(50_000)  # collecting the tests makes many objects, and no garbage

IN_MEMORY = Path("/dev/shm")
"""Where temporary folders of tests are, if there is room: a kill loses nothing there either, and
the thousands of fsyncs of the suite take no time."""
_ROOM = 4 << 30
if os.access(IN_MEMORY, os.W_OK) and shutil.disk_usage(IN_MEMORY).free > _ROOM:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))

settings.register_profile("ci", derandomize=True, deadline=None, database=None)
settings.load_profile("ci")
# Examples also draw constants from the source of whatever modules happen to be loaded, which
# differs between one file and the whole run, and between parallel workers: none are taken.
providers._get_local_constants = lambda: providers._local_constants

LONGEST = (
    "tests/golden/test_queries.py",
    "tests/laws/test_laws.py",
    "tests/sql_compiler/test_fuzz.py",
    "tests/cli/test_demo.py",
    "tests/serve/test_live.py",
    "tests/serve/test_reload.py",
    "tests/engines/test_recovery.py",
    "tests/cli/test_pipelines.py",
    "tests/engines/test_several_live.py",
    "tests/audit/test_mutation.py",
    "tests/audit/test_query_replay.py",
    "tests/cli/test_docs.py",
    "tests/engines/test_disk.py",
)
"""Files that take long come first, so that no worker is left alone with one of them at the end.

The first two meet all that is compiled, a half each; the others find it on the disk.
"""


def _module(name: str) -> str | None:
    return None if importlib.util.find_spec(name) else f"the Python package {name} is not installed"


def _program(*names: str) -> str | None:
    if any(shutil.which(name) for name in names):
        return None
    return f"no program {' or '.join(names)} on PATH"


def _servers() -> str | None:
    """The servers that streams live in, and the packages that speak to them."""
    for package in ("confluent_kafka", "nats", "psycopg", "deltalake", "fastavro", "jsonschema"):
        if reason := _module(package):
            return f"{reason}; install all of them with .ci/servers"
    kinds = (KafkaServer, NatsServer, PostgresServer, RegistryServer)
    return next((reason for kind in kinds if (reason := kind.absent())), None)


def _kafka_on_spark() -> str | None:
    """A broker, and Spark's own connector to it."""
    if reason := _module("confluent_kafka") or KafkaServer.absent():
        return reason
    there = list(KAFKA_JARS.glob("spark-sql-kafka-*.jar"))
    return None if there else "no connector to Kafka for Spark; run .ci/servers"


def _browser() -> str | None:
    """Chromium, what drives it, and what checks pages for those who cannot see them."""
    for reason in (
        _program("chromium", "chromium-browser", "google-chrome"),
        _module("playwright"),
        _module("axe_playwright_python"),
    ):
        if reason:
            return f"{reason}; install all of it with .ci/browser and make browser"
    return None


def _bench_peers() -> str | None:
    if not (ROOT / ".venv-bench" / ".stamp").exists():
        return "no .venv-bench; make it with `make bench-peers`"
    return None if shutil.which("java") else "no java, which the Spark baseline needs"


def _schemathesis() -> str | None:
    if not (ROOT / ".venv-serve" / ".stamp").exists():
        return "no .venv-serve; make it with `make serve-test`"
    return None


def _package_index() -> str | None:
    """Whether pip can look up a package, with whatever settings it has here."""
    look = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps",
            "--ignore-installed", "hatchling"]  # fmt: skip
    done = subprocess.run(look, capture_output=True, timeout=60)
    return "pip reaches no package index" if done.returncode else None


def _deploy() -> str | None:
    """What checks the files of deploy/ without building anything."""
    if not (ROOT / ".cache" / "deploy" / "bin" / "promtool").exists():
        return "no promtool; fetch it with .ci/deploy"
    return _program("systemd-analyze")


def _deploy_all() -> str | None:
    """What builds and runs the image, and renders and validates the chart."""
    tools = ROOT / ".cache" / "deploy"
    if not ((tools / "bin" / "helm").exists() and (tools / "venv").exists()):
        return "no helm or kubernetes-validate; fetch them with .ci/deploy --all"
    needed = ("mmdebstrap", "buildah", "podman", "runc")
    return next((reason for name in needed if (reason := _program(name))), None)


# Marker -> probe; a probe returns None when the component is there, otherwise why it is not.
COMPONENTS: dict[str, Callable[[], str | None]] = {
    "spark": lambda: _module("pyspark") or _program("java"),
    "servers": _servers,
    "kafka_on_spark": _kafka_on_spark,  # beside `spark`, whose component runs these tests
    "browser": _browser,
    "bench": _bench_peers,
    "serve": _schemathesis,
    "deploy": _deploy,
    "deploy_all": _deploy_all,  # collected by `make deploy-long` alone
    "audit": lambda: None,  # needs nothing but time
    "package": lambda: _module("hatchling") or _package_index(),
}


class ComponentGate:
    """Skip tests whose component is absent, or fail them when everything is required.

    Registered as a plugin of its own, so that it also sees the doctests outside this folder.
    """

    def __init__(self) -> None:
        self.require_all = os.environ.get("DPSTREAM_REQUIRE_ALL") == "1"
        self.left_out: Counter[str] = Counter()
        self.reasons: dict[str, str | None] = {}

    def absence(self, component: str) -> str | None:
        """Why the component is absent, or None; each is probed once, and only when a test asks."""
        if component not in self.reasons:
            self.reasons[component] = COMPONENTS[component]()
        return self.reasons[component]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        for component in COMPONENTS:
            if item.get_closest_marker(component) and (reason := self.absence(component)):
                item.user_properties.append(("absent", (component, reason)))
                pytest.skip(f"{component} is absent: {reason}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.skipped and not hasattr(report, "wasxfail"):
            self.fail_if_all_required(report)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        if report.skipped:
            self.fail_if_all_required(report)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count what was left out, also by other workers."""
        for name, value in report.user_properties if report.when == "setup" else ():
            if name == "absent":
                component, reason = value
                self.left_out[component] += 1
                self.reasons[component] = reason

    def fail_if_all_required(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if self.require_all:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            report.outcome = "failed"
            report.longrepr = f"DPSTREAM_REQUIRE_ALL=1 allows no skip, but got: {reason}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.left_out:
            terminalreporter.section("absent components")
        for component, tests in sorted(self.left_out.items()):
            verb = "failed" if self.require_all else "left out"
            noun = "test" if tests == 1 else "tests"
            terminalreporter.line(f"{component}: {tests} {noun} {verb}; {self.reasons[component]}")

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """The very last line; workers have no terminal."""
        terminal = config.pluginmanager.get_plugin("terminalreporter")
        if self.left_out and terminal is not None:
            terminal.line("make everything sets up all components and runs every test")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Longest files first; those that wait between those that compute."""
    rank = {ROOT / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))
    for item in items:  # a job takes long where other components use the machine
        if item.get_closest_marker("spark") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(300))


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: the garbage collector need not look at them again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Libraries that count what they leak at the exit find nothing."""
    gc.unfreeze()


def pytest_configure(config: pytest.Config) -> None:
    """Register the component markers and the gate."""
    for component in COMPONENTS:
        config.addinivalue_line("markers", f"{component}: needs the real component `{component}`")
    config.pluginmanager.register(ComponentGate(), "component-gate")
    config.pluginmanager.register(fixed_randomness(), "fixed-randomness")
