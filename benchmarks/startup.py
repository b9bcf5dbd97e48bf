"""How long a start takes: the version, an import, a first release with and without machine code.

Every start is a process of its own, with a folder of its own for Python's and Numba's compiled
code. *Upgraded* is the package at another path, every line of it further down: what a new release
or another environment finds of the machine code that an earlier one has left.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import dpstream
from benchmarks.harness import Findings, Progress, Row, target

_VERSION: Final = ("-m", "dpstream", "--version")
_IMPORT: Final = ("-c", "import dpstream")
_QUERY: Final = (
    "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 1, delta = 1e-9, privacy_unit_column = "
    "user, max_groups_contributed = 1) page, COUNT(*) AS visitors FROM clicks GROUP BY page"
)
_SLOW_IMPORT: Final = 0.02  # seconds
_LINE: Final = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)")
_VERSION_BOUND, _RELEASE_BOUND = 0.15, 1.5


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the package is, and where compiled code is kept."""

    folder: Path
    package: Path

    def run(self, arguments: Sequence[str]) -> tuple[float, float, str]:
        """Processor and clock seconds of one process, and what it said on standard error."""
        state = self.folder / "runs"
        shutil.rmtree(state, ignore_errors=True)
        state.mkdir()
        settings = os.environ | {
            "PYTHONPATH": str(self.package),
            "PYTHONPYCACHEPREFIX": str(self.folder / "python"),
            "NUMBA_CACHE_DIR": str(self.folder / "numba"),
            "XDG_CACHE_HOME": str(self.folder / "home"),  # which is read, too
        }
        settings.pop("PYTHONDONTWRITEBYTECODE", None)
        began = time.monotonic()
        with (self.folder / "said").open("w+") as said:
            child = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=state,
                env=settings,
                stdout=subprocess.DEVNULL,
                stderr=said,
            )
            _, status, used = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            said.seek(0)
            text = said.read()
        if child.returncode:
            raise RuntimeError(f"{' '.join(arguments)} ended with {child.returncode}: {text}")
        return used.ru_utime + used.ru_stime, time.monotonic() - began, text

    def compiled(self) -> set[str]:
        """The files of machine code."""
        return {each.name for each in (self.folder / "numba").rglob("*.code")}

    def row(self, name: str, arguments: Sequence[str], rounds: int) -> Row:
        """The shortest of `rounds` starts, and how many functions were compiled."""
        before = self.compiled()
        runs = [self.run(arguments)[:2] for _ in range(rounds)]
        return {
            "start": name,
            "cpu_seconds": min(cpu for cpu, _ in runs),
            "seconds": min(clock for _, clock in runs),
            "compiled": len(self.compiled() - before),
        }


def upgraded(place: Place) -> Place:
    """The package at another path, all lines further down; what was compiled before is there."""
    copy = place.folder / "upgraded"
    shutil.copytree(place.package / "dpstream", copy / "dpstream")
    for path in (copy / "dpstream").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        path.write_text("# A line more.\n" + text, encoding="utf-8")
    return Place(folder=place.folder, package=copy)


def slow_imports(said: str) -> list[Row]:
    """Packages whose own modules take longer than 20 ms to import, the slowest first.

    >>> slow_imports("import time:  900 |  30000 | re\\nimport time: 30000 |  30000 |   numpy.fft")
    [{'start': 'import', 'package': 'numpy', 'import_seconds': 0.03}]
    """
    took: Counter[str] = Counter()
    for own, name in _LINE.findall(said):
        took[name.partition(".")[0]] += int(own)
    return [
        {"start": "import", "package": name, "import_seconds": own / 1e6}
        for name, own in took.most_common()
        if own > _SLOW_IMPORT * 1e6
    ]


def measure(*, quick: bool, progress: Progress) -> Findings:
    """Starts without data, a first release cold, warm and upgraded; slow imports."""
    rounds = 2 if quick else 7
    with TemporaryDirectory() as name:
        folder = Path(name)
        place = Place(folder=folder, package=Path(dpstream.__file__).parents[1])
        (folder / "clicks.csv").write_text(
            "user,page\n" + "".join(f"u{n % 500},p{n % 5}\n" for n in range(2_000))
        )
        release = ["-m", "dpstream", "sql", _QUERY]
        release += ["--source", f"clicks={folder / 'clicks.csv'}", "--state", "state"]
        place.run(_VERSION)  # Python's own compiled code
        rows = [place.row("--version", _VERSION, rounds), place.row("import", _IMPORT, rounds)]
        progress(1, 4, "a first release, nothing compiled")
        rows.append(place.row("first release, cold", release, 1))
        progress(2, 4, "a first release, warm")
        rows.append(warm := place.row("first release, warm", release, rounds))
        progress(3, 4, "a first release of a package at another path")
        other = upgraded(place)
        other.run(_IMPORT)
        rows.append(moved := other.row("first release, upgraded", release, 1))
        rows += slow_imports(place.run(["-X", "importtime", *release])[2])
    targets = [
        target("processor s of --version", rows[0]["cpu_seconds"], "<=", _VERSION_BOUND),
        target("processor s to a first release, warm", warm["cpu_seconds"], "<=", _RELEASE_BOUND),
        target("functions compiled again after an upgrade", moved["compiled"], "==", 0),
    ]
    there = find_spec("pandas") is not None
    notes = ["pyarrow imports pandas where it is installed, as here"] if there else []
    return Findings(rows=rows, targets=targets, notes=notes)
