"""The project's own tooling: packaging data, pinned versions, and tests that need components."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dpstream as dps
from dpstream.mechanisms import REGISTRY
from tests.support.processes import run_python

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONFTEST = Path(__file__).with_name("conftest.py").read_text()

# The copy under test finds no broker, and a NATS server that is always there.
STAND_INS = """
COMPONENTS["kafka"] = lambda: "no broker here"
COMPONENTS["nats"] = lambda: None
"""

THREE_TESTS = """
import pytest

@pytest.mark.kafka
def test_with_kafka(): pass

@pytest.mark.nats
def test_with_nats(): pass

def test_plain(): pass
"""


def pins(name: str) -> dict[str, str]:
    """Package -> version of a constraints file, names in their canonical spelling."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    pairs = [line.split("==") for line in lines if line]
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in pairs}


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A small project that uses this project's conftest."""
    monkeypatch.delenv("DPSTREAM_REQUIRE_ALL", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)  # for tests.support
    pytester.makeconftest(CONFTEST + STAND_INS)
    return pytester


def run(project: pytest.Pytester, *args: str) -> pytest.RunResult:
    """Run the small project's tests, in this process: another one would load everything anew."""
    return project.runpytest_inprocess("--strict-markers", "-p", "no:cacheprovider", *args)


def test_an_absent_component_is_skipped_and_listed(project):
    """Only the marked test is left out, and the summary says why."""
    project.makepyfile(THREE_TESTS)

    result = run(project)

    result.assert_outcomes(passed=2, skipped=1)
    result.stdout.fnmatch_lines(["*absent components*", "kafka: 1 test left out; no broker here"])
    assert result.outlines[-1] == "make everything sets up all components and runs every test"
    assert "everything: ##" in (ROOT / "Makefile").read_text()
    assert result.ret == 0


def test_an_absent_component_fails_when_all_are_required(project, monkeypatch):
    """A run that promises to be complete cannot be green without the component."""
    monkeypatch.setenv("DPSTREAM_REQUIRE_ALL", "1")
    project.makepyfile(THREE_TESTS)

    result = run(project)

    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(
        ["*allows no skip*no broker here*", "kafka: 1 test failed; no broker here"]
    )
    assert result.ret == 1


@pytest.mark.parametrize(
    "source",
    [
        "import pytest\n@pytest.mark.skip(reason='later')\ndef test_it(): pass",
        "import pytest\ndef test_it(): pytest.skip('later')",
        "import pytest\npytest.importorskip('no_such_package_at_all')\ndef test_it(): pass",
        "def f():\n    '''\n    >>> 1 / 0  # doctest: +SKIP\n    '''",
    ],
    ids=["marker", "call", "module", "doctest"],
)
def test_any_skip_fails_when_all_are_required(project, monkeypatch, source):
    """Whatever its form, a skip is green by default and red when everything is required."""
    project.makepyfile(source)
    assert run(project, "--doctest-modules").ret in (0, 5)

    monkeypatch.setenv("DPSTREAM_REQUIRE_ALL", "1")
    result = run(project, "--doctest-modules")

    assert result.ret in (1, 2)
    result.stdout.fnmatch_lines(["*DPSTREAM_REQUIRE_ALL=1 allows no skip*"])


def test_an_expected_failure_is_no_skip(project, monkeypatch):
    """A strict xfail states a behaviour; it leaves nothing out."""
    monkeypatch.setenv("DPSTREAM_REQUIRE_ALL", "1")
    project.makepyfile(
        "import pytest\n@pytest.mark.xfail(strict=True)\ndef test_it(): raise AssertionError"
    )

    result = run(project)

    result.assert_outcomes(xfailed=1)
    assert result.ret == 0


def test_no_component_summary_when_nothing_was_left_out(project):
    """A complete run says nothing of absent components."""
    project.makepyfile("def test_plain(): pass")

    result = run(project)
    result.stdout.no_fnmatch_line("*absent components*")
    result.stdout.no_fnmatch_line("*make everything*")


def test_hypothesis_runs_the_same_examples_every_time(project):
    """The derandomised profile is loaded wherever this conftest is."""
    project.makepyfile(
        """
        from hypothesis import settings

        def test_profile():
            chosen = settings.default
            assert (chosen.derandomize, chosen.deadline, chosen.database) == (True, None, None)
        """
    )

    run(project).assert_outcomes(passed=1)


def test_components_run_where_their_tests_are():
    """`.ci/run` loads only what it names there; a marked test elsewhere would never run."""
    listed = re.findall(r'^  "(\w+) \d+ \d+ (\S+) ', (ROOT / ".ci" / "run").read_text(), re.M)
    assert len(listed) > 6
    for marker, folders in listed:
        places = [ROOT / folder for folder in folders.split(",")]
        for path in [*ROOT.glob("src/**/*.py"), *ROOT.glob("tests/**/*.py")]:
            if re.search(rf"mark\.{marker}\b", path.read_text()):
                assert any(path.is_relative_to(place) for place in places), f"{marker}: {path}"


@pytest.mark.timeout(600)  # a minute without mypy's cache
def test_every_public_name_has_a_type(tmp_path):
    """Editors complete `dps.mechanisms.Spas`, and a name that is not there is reported."""
    names = [name for name in dps.__all__ if name != "__version__"]
    names += [f"mechanisms.{path.partition(':')[2]}" for path in REGISTRY.values()]
    script = tmp_path / "names.py"
    script.write_text(
        "import dpstream as dps\n"
        + "".join(f"reveal_type(dps.{name})\n" for name in names)
        + "dps.mechanisms.Spaas\ndps.realese\n"
    )

    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", script],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip

    revealed = re.findall(r'Revealed type is "(.+)"', done.stdout)
    assert len(revealed) == len(names), done.stdout
    assert [name for name, kind in zip(names, revealed, strict=True) if kind == "Any"] == []
    assert re.findall(r'Module has no attribute "(\w+)"', done.stdout) == ["Spaas", "realese"]


def test_every_extra_of_the_design_exists():
    """People install what they need by these names."""
    assert set(PROJECT["optional-dependencies"]) == {
        "frames", "spark", "serve", "otel", "plot", "duckdb", "kafka", "nats", "postgres", "delta",
        "registry", "iceberg", "objects", "connectors", "browser", "docs", "dev",
    }  # fmt: skip


def test_the_core_stays_small():
    """No JVM, no web server, no data frames in the core install."""
    core = {re.match(r"[\w-]+", entry).group() for entry in PROJECT["dependencies"]}

    assert core == {
        "numpy", "scipy", "numba", "pyarrow", "sqlglot", "cryptography",
        "typer", "rich", "xxhash",
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", ["constraints.txt", "constraints-bench.txt", "constraints-serve.txt"]
)
def test_constraints_hold_nothing_but_exact_versions(name):
    """A host, a path or a local file would tie the set-up to one machine."""
    lines = (ROOT / name).read_text().splitlines()

    for line in lines:
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!_]+", line), (
            line
        )
        assert not re.search(r"://|@ file|(^|\s)/\w", line), line


def test_every_requirement_of_core_and_dev_is_pinned():
    """A fresh clone gets the versions that were tested."""
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["frames"], *extras["plot"], *extras["docs"]]
    wanted += [entry for name in ("nats", "postgres", "delta") for entry in extras[name]]
    wanted += extras["serve"]
    wanted += [entry for entry in extras["dev"] if not entry.startswith("dpstream")]
    names = {re.match(r"[\w-]+", entry).group() for entry in wanted}

    assert names <= set(pins("constraints.txt"))


TARGETS = [
    "demo", "test", "everything", "golden", "stored", "long", "lint", "bench", "docs", "clean",
    "help", "servers",
]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_make_help_explains_each_target(target):
    """Each target says in one line what it does."""
    text = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)

    assert re.search(rf"^make {target} +\S.*$", text.stdout, re.MULTILINE)


def test_the_core_imports_without_any_extra():
    """What the extras install is blocked; the package and its command line must not miss it."""
    blocked = ["pandas", "polars", "matplotlib", "pyspark", "starlette", "uvicorn",
               "confluent_kafka", "nats", "psycopg", "deltalake", "duckdb", "pytest",
               "hypothesis"]  # fmt: skip
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked}))\nimport dpstream, dpstream.cli"
    )

    done = run_python(code)

    assert done.returncode == 0, done.stderr


@pytest.mark.bench
def test_the_peers_are_the_pinned_ones():
    """Beside a newer polars pip installs opendp 0.9 without a word."""
    code = "import opendp.prelude, importlib.metadata as m; print(m.version('opendp'))"

    done = subprocess.run(
        [ROOT / ".venv-bench" / "bin" / "python", "-c", code], capture_output=True, text=True
    )

    assert done.stdout.strip() == pins("constraints-bench.txt")["opendp"] == "0.16.0", done.stderr
