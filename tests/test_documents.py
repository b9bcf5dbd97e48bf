"""What the documents name exists: files, folders, modules, public names, layers, format numbers."""

import ast
import re
import sys
import threading
import tomllib
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

import dpstream as dps
from dpstream.privacy.sensitivity import histogram_change

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "dpstream"
ROOMS = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name[0] not in "_."}
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *PACKAGE.rglob("*.md")],
    key=lambda path: path.relative_to(ROOT).as_posix(),
)
PAGES.remove(ROOT / "CHANGELOG.md")  # it tells what was
ARCHITECTURE = ROOT / "docs" / "architecture.md"

CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(?:[\w.*<>-]+/)*[\w.*<>-]+\.py|(?:[\w.*<>-]+/)+[\w.*<>-]*")
DOTTED = re.compile(r"(?<![\w./-])(?:dpstream|dps)(?:\.[A-Za-z_]\w*)+")
THERE = ("tests", "docs", "src", "benchmarks", ".ci", "dpstream")
WRITTEN_BY_THE_READER = {"feed.py", "job.py", "dpstream.mechanisms.w_event.stride"}


def names_of(path):
    """Identifiers that a module defines, imports or assigns."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


@cache
def loggers():
    """Names of the package's loggers look like modules."""
    text = "".join(path.read_text("utf-8") for path in PACKAGE.rglob("*.py"))
    return set(re.findall(r'getLogger\("([\w.]+)"\)', text))


@cache
def exists(dotted):
    """Is `dpstream.a.b.name` a module, or a name in one? Nothing is imported for it."""
    _, *parts = dotted.split(".")
    place = PACKAGE
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if parts and (place / f"{parts[0]}.py").is_file():
        module = place / f"{parts.pop(0)}.py"
    else:
        module = place / "__init__.py"
    return not parts or (module.is_file() and parts[0] in names_of(module))


def is_there(path, folder):
    """Does a file or folder exist, seen from the root, the package or the page's folder?"""
    pattern = re.sub(r"<\w+>", "*", path.removeprefix("dpstream/")).rstrip("/") or "*"
    if "/" not in path:
        pattern, tops = f"**/{path}", (PACKAGE, ROOT / "tests", ROOT / "benchmarks")
    else:
        tops = (ROOT, PACKAGE, folder)
    return any(True for top in tops for _ in top.glob(pattern))


def missing(text, folder=ROOT):
    """What a page in `folder` names and what is not there."""
    codes = [code for code in CODE.findall(text) if code not in WRITTEN_BY_THE_READER]
    for code in codes:
        if FILE.fullmatch(code) and (
            code.endswith(".py") or code.split("/")[0] in (*THERE, *ROOMS)
        ):
            if not is_there(code, folder):
                yield code
        elif re.fullmatch(rf"(?:{'|'.join(ROOMS)})(?:\.[a-z_]\w*)+", code) and not exists(
            f"dpstream.{code}"
        ):
            yield code
    for dotted in DOTTED.findall(text):
        whole = re.sub(r"^dps\.", "dpstream.", dotted)
        if whole not in WRITTEN_BY_THE_READER | loggers() and not exists(whole):
            yield dotted


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_page_names_exists(page):
    """A file that was moved, or a module that was merged, leaves its name in no page."""
    assert sorted(set(missing(page.read_text("utf-8"), page.parent))) == []


def test_what_does_not_exist_is_found():
    """The test above can fail, for each kind of name."""
    text = (
        "`stages/flow.py` `privacy/noises/` `tests/no/test_it.py` `nowhere.py` `privacy.spending` "
        "`group_by/flow.py` dpstream.group_by.flow.Flow dps.Queery dpstream.stages.query dps.run"
    )

    assert list(missing(text)) == [
        "stages/flow.py", "privacy/noises/", "tests/no/test_it.py", "nowhere.py",
        "privacy.spending", "dps.Queery", "dpstream.stages.query",
    ]  # fmt: skip


IDENTIFIER = re.compile(r"_?[a-z]+(?:_[a-z]{3,})+|(?:[A-Z][a-z]+){2,}")


@cache
def words():
    """Every word of the code and its tests."""
    files = [path for top in (PACKAGE, ROOT / "tests") for path in top.rglob("*.py")]
    return set(re.findall(r"\w+", "".join(path.read_text("utf-8") for path in files)))


@pytest.mark.parametrize(
    "page", [one for one in PAGES if "soundness" in one.as_posix()], ids=lambda path: path.stem
)
def test_what_a_proof_names_is_in_the_code(page):
    """Functions, classes and parameters: a proof is about code that can be found."""
    codes = CODE.findall(page.read_text("utf-8"))

    names = {name for name in codes if IDENTIFIER.fullmatch(name)}
    assert sorted(names - words()) == []


def part(heading):
    """The text of a section of the architecture page."""
    text = ARCHITECTURE.read_text("utf-8")
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def test_the_layers_are_those_of_the_contract():
    """One drawing for people, one list for import-linter: the same, from the top down."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [layers] = [one["layers"] for one in contracts["contracts"] if one["id"] == "layers"]
    rows = re.findall(r"^\| (`.+?`) \|", part("Layers"), re.MULTILINE)

    assert [re.findall(r"`(\w+)`", row) for row in rows] == [
        re.findall(r"\w+", layer) for layer in layers
    ]


def test_every_room_is_drawn():
    """The tree of the page has each folder of the package, and no other."""
    drawn = set(re.findall(r"^(\w+)/ ", part("Rooms"), re.MULTILINE))

    assert drawn == ROOMS - {"__pycache__"}


def test_the_numbers_of_formats_are_those_of_the_code():
    """A row names a file of the package and the text in it that holds the number."""
    rows = [line.split("|") for line in part("Formats").splitlines() if line.startswith("| `")]
    places = [CODE.findall(row[2]) for row in rows]

    assert len(rows) > 9
    for path, text in (place for place in places if len(place) == 2):
        assert text in (PACKAGE / path).read_text("utf-8"), path


CLICKS = "user,page,at\n" + "".join(f"u{n % 50},/{n % 3},{60 * n}\n" for n in range(400))
QUERY = """
SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 6, delta = 1e-6, privacy_unit_column = user,
       privacy_unit_period = INTERVAL '1' DAY, max_groups_contributed = 3, time_unit = 's',
       start = TIMESTAMP '1970-01-01', end = TIMESTAMP '1970-01-02')
       page, window_start, COUNT(*) AS n
FROM TUMBLE(clicks, DESCRIPTOR(at), INTERVAL '1' DAY) GROUP BY page, window_start
EMIT EVERY INTERVAL '3' HOUR"""


@contextmanager
def walked():
    """The files of the package whose functions are called meanwhile, in all threads."""
    files = set()
    root = f"{PACKAGE}/"

    def note(frame, event, _):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(root):
            files.add(name.removeprefix(root))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def drawn_way(heading):
    """The files of a way, in its order."""
    return re.findall(r"^\| \d+ \| `(.+?)`", part(heading), re.MULTILINE)


def start(place):
    """A run over a CSV file in a folder of its own."""
    place.mkdir()
    (place / "clicks.csv").write_text(CLICKS)
    return dps.run(
        dps.sql(QUERY),
        source=str(place / "clicks.csv"),
        sink=str(place / "out"),
        state=place / "state",
        ledger=place / "book",
    )


@pytest.mark.timeout(600)  # more than a minute where nothing is compiled yet
def test_a_row_goes_the_way_that_is_drawn(tmp_path):
    """Every file of the table is passed between a CSV file and a file of releases."""
    start(tmp_path / "compile").finish()
    run = start(tmp_path / "walk")
    with walked() as files:
        releases = len(list(run))

    way = drawn_way("The way of a row")
    assert releases == 8
    assert len(way) > 12
    assert [file for file in way if file not in files] == []


def test_a_step_goes_the_way_that_is_drawn():
    """Every file of the table is passed in a step that publishes."""
    histogram_change.cache_clear()  # a step of another test has walked there
    runner = dps.Runner(dps.mechanisms.BudgetDistribution(epsilon=1, window=3), secret=bytes(32))
    with walked() as files:
        [release] = runner.step([500, 20])

    way = drawn_way("The way of a step")
    assert release.paid
    assert len(way) > 7
    assert [file for file in way if file not in files] == []
