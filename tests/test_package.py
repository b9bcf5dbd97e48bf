"""The package as people install it: wheel and sdist, an empty environment, no extras."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import dpstream as dps
from dpstream import ext

ROOT = Path(__file__).resolve().parent.parent
SLOW = ("numba", "numpy", "scipy", "pyarrow", "sqlglot", "dp_accounting", "pandas", "polars")
HELP = "import dpstream.cli as c; c.main(['--help'])"

# What a start must not import, and that it imports without a word.
START = """
import contextlib, io, sys
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    {code}
print(*sorted(set(sys.modules) & set({names})))
"""

EVERY_MODULE = """
import importlib, pkgutil, dpstream
for found in pkgutil.walk_packages(dpstream.__path__, "dpstream."):
    if found.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(found.name)
    except ModuleNotFoundError as absent:  # a connector or engine may need its own extra
        optional = ("dpstream.connectors.", "dpstream.engines.spark", "dpstream.serve")
        assert found.name.startswith(optional), (found.name, absent.name)
"""

FIRST_USE = """
import dpstream as dps
log = {"user": [f"u{n % 400}" for n in range(1200)], "page": ["/a", "/b", "/c"] * 400}
import pyarrow as pa
query = dps.sql("SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 8, delta = 1e-6, "
                "privacy_unit_column = user, privacy_unit_period = 'forever', "
                "max_groups_contributed = 3, max_rows_per_group = 1) "
                "page, COUNT(*) AS n FROM log GROUP BY page")
[table] = dps.run(query, source=pa.table(log), ledger=dps.Ledger())
print(sorted(table["page"].to_pylist()))
"""


@pytest.mark.parametrize("code", ["import dpstream", HELP])
def test_a_start_imports_nothing_slow(code):
    """`import dpstream` and `dpstream --help` answer at once, and without a warning."""
    script = START.format(code=code, names=SLOW)

    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True)

    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, b"", b"")


def test_python_m_is_the_command():
    """`python -m dpstream` where scripts are not on PATH; the version is told without the rest."""
    command = [sys.executable, "-X", "importtime", "-m", "dpstream", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if "|" in line}

    assert done.stdout.startswith("dpstream ")
    assert "dpstream.cli" in loaded
    assert not loaded & {"typer", "rich", "numpy", "pyarrow", "numba", "dpstream.cli.app"}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with wheel and sdist, as `make package` leaves them."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    return folder


@pytest.mark.package
def test_the_wheel_has_the_package_and_nothing_else(built):
    """Every file of the package, the marker for type checkers, no tests, no caches."""
    [wheel] = built.glob("*.whl")
    source = ROOT / "src"
    files = {
        path for path in source.rglob("*") if path.is_file() and "__pycache__" not in str(path)
    }

    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}

    assert names == {str(path.relative_to(source)) for path in files}
    assert "dpstream/py.typed" in names


@pytest.mark.package
def test_the_sdist_has_what_a_build_and_the_tests_need(built):
    """The package builds from it, and its tests run."""
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    wanted = {"pyproject.toml", "README.md", "LICENSE", "Makefile", "constraints.txt", ".ci/run"}
    assert wanted <= names
    assert {"tests/conftest.py", "docs/index.md", "src/dpstream/py.typed"} <= names
    assert {"benchmarks/__init__.py", "tests/support/servers.py"} <= names


@pytest.mark.package
@pytest.mark.timeout(900)  # 40 s on an idle machine with a warm package cache
def test_an_empty_environment_gets_a_working_package(built, tmp_path):
    """The wheel and its declared dependencies alone: imports, command, a first query."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    settings = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    clean = settings | {"PATH": str(tmp_path / "venv" / "bin"), "NUMBA_CACHE_DIR": ""}
    [wheel] = built.glob("*.whl")
    pip = ["-m", "pip", "install", "--quiet", "--no-compile", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([python, *pip, str(wheel)], env=clean, check=True)

    def run(*args):
        return subprocess.run(
            args, cwd=tmp_path, env=clean, check=True, capture_output=True, text=True
        ).stdout

    run(python, "-W", "error", "-c", EVERY_MODULE)
    assert run("dpstream", "--version").startswith("dpstream ")
    assert run(python, "-W", "error", "-c", FIRST_USE) == "['/a', '/b', '/c']\n"
    (tmp_path / "n.csv").write_text("n\n3\n4\n")
    command = "dpstream release n.csv --mechanism uniform --window 2 --epsilon 1 --json"
    assert len(json.loads(run(*command.split()))["rows"]) == 2
    bench = subprocess.run(
        ["dpstream", "bench", "noise"], env=clean, capture_output=True, text=True
    )
    assert (bench.returncode, "make bench" in bench.stderr) == (5, True)


PUBLIC = {"dpstream", "dpstream.errors", "dpstream.ext", "dpstream.mechanisms"}
IMPORT = re.compile(r"\b(?:from (dpstream[\w.]*) import (\w+)|import (dpstream[\w.]*))")


def imports_of(text):
    """The modules of dpstream that a page imports; the command's own entry is `dpstream.cli`."""
    found = IMPORT.findall(text)
    return {one[0] or one[2] for one in found if one[:2] != ("dpstream.cli", "main")}


def test_docs_import_public_modules_alone():
    """What a reader copies from a page stays where it is."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    deeper = {
        str(page.relative_to(ROOT)): wrong
        for page in pages
        if (wrong := imports_of(page.read_text("utf-8")) - PUBLIC)
    }

    assert deeper == {}
    assert imports_of("from dpstream.records import Batch, Sink") == {"dpstream.records"}


def test_public_names_are_there():
    """Each is what its own module calls it, and the authors' facade has nothing of its own."""
    for name in set(dps.__all__) - {"__version__", "errors", "ext", "mechanisms"}:
        assert getattr(dps, name).__name__ == name
    imported = {
        name.name: name.asname  # "X as X" tells type checkers that X is for others, too
        for node in ast.parse(Path(ext.__file__).read_text("utf-8")).body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert {name for name in vars(ext) if not name.startswith("_")} == imported.keys()
    assert all(name == again for name, again in imported.items())


def test_a_function_is_not_hidden_by_a_module():
    """`dps.sql` is a function, whatever was imported before."""
    code = (
        "import dpstream.sql_compiler, dpstream.explanation, dpstream.bounds_proposal\n"
        "import dpstream.mechanisms.release, dpstream.session, types, dpstream as dps\n"
        "for name in ('sql', 'explain', 'bounds', 'release', 'run', 'run_all', 'promise'):\n"
        "    assert isinstance(getattr(dps, name), types.FunctionType), name"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_name_of_the_spark_engine_needs_no_spark():
    """It is asked for when an engine is made."""
    code = "import sys; sys.modules['pyspark'] = None\nimport dpstream; dpstream.SparkEngine"
    subprocess.run([sys.executable, "-c", code], check=True)


# Methods that engines, mechanisms, connectors and commands call, and people do not.
HOOKS = {
    *("clamped_at", "clamp_of", "with_bounds"),
    *("names_of_keys", "written", "facts", "fingerprint", "attach", "check", "together", "of"),
    *(
        "answer",
        "enclose",
        "ends",
        "high_all",
        "measures",
        "within",
        "columns",
        "slack",
        "walks",
        "by",
    ),
    *("groups_of_set", "interval_ends", "is_additive", "sets_of", "with_groups", "with_tables"),
    *("not_before", "starting", "terms", "joins", "from_json", "start", "source", "sink"),
    *("leave", "tables_at", "warn_starved"),
    *(
        "admit",
        "begin",
        "charge",
        "end",
        "first_room",
        "has",
        "head",
        "identity",
    ),
    *("interval_end", "known", "limit", "reach", "register", "rehearsal"),
    *("replaces", "steps_of", "void"),
    *(f"note_{what}" for what in ("adoption", "begun", "erasure", "finish", "restore", "windows")),
}


def test_every_public_name_has_an_example():
    """Functions, classes, mechanisms, and the methods that people call: in their own docstring, or
    in use in that of the class."""
    things = {name: getattr(dps, name) for name in dps.__all__}
    registered = {name: dps.mechanisms.find(name) for name in dps.mechanisms.REGISTRY}
    documented = {name: each for name, each in (things | registered).items() if callable(each)}
    assert len(documented) > 70
    without = [name for name, each in documented.items() if ">>>" not in (each.__doc__ or "")]
    for name, each in things.items():
        if not inspect.isclass(each):
            continue
        classes = (cls for cls in each.__mro__ if cls.__module__.startswith("dpstream"))
        ours = {key for cls in classes for key in vars(cls)}
        for key in ours - HOOKS:
            method = getattr(each, key, None)
            if key.startswith("_") or not inspect.isfunction(getattr(method, "__func__", method)):
                continue
            used = re.search(rf"(>>>|\.\.\.) [^\n]*\.{key}\(", each.__doc__ or "")
            if not used and ">>>" not in (method.__doc__ or ""):
                without.append(f"{name}.{key}")

    assert without == []
