"""Machine code is kept on disk by what it was compiled from, and functions work where it is not."""

from collections import namedtuple
from importlib import import_module
from pkgutil import walk_packages
from types import ModuleType

import numba
import pytest
from numba.core.dispatcher import Dispatcher

import dpstream
from dpstream import compiled as compiled_module
from dpstream.compiled import COMPILING, KeptCode, _Tell, compiled, content_of, njit


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder for machine code."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept" / "dpstream"


def made_from(text, **constants):
    """The functions of a module with this text, as if it had just been imported."""
    module = ModuleType("dpstream.made")
    vars(module).update(constants, compiled=compiled, njit=njit)
    exec(compile(text, "made.py", "exec"), vars(module))
    return module


INNER = """
@compiled
def inner(value):
    return value + STEP
"""
OUTER = """
@compiled
def outer(value):
    return inner(value) * 2
"""


def hits(function):
    """How often machine code was found on disk, and how often not."""
    return sum(function.stats.cache_hits.values()), sum(function.stats.cache_misses.values())


def test_a_function_that_is_made_again_is_not_compiled_again(folder):
    """A second start, another path, other lines and another docstring find the machine code."""
    first = made_from(INNER, STEP=1)
    moved = made_from("\n\n" + INNER.replace("(value):", '(value):\n    """Adds."""'), STEP=1)

    assert (first.inner(1), hits(first.inner)) == (2, (0, 1))
    assert (moved.inner(1), hits(moved.inner)) == (2, (1, 0))
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(
    ("changed", "constant", "result"),
    [(INNER, 5, 12), (INNER.replace("+", "-"), 1, 0)],
    ids=["a constant", "its text"],
)
def test_a_caller_is_compiled_again_when_what_it_calls_has_changed(
    folder, changed, constant, result
):
    """Numba's own cache looks at the caller's file alone, and would go on with the old code."""
    old = made_from(INNER, STEP=1)
    new = made_from(changed, STEP=constant)
    before = made_from(OUTER, inner=old.inner)
    after = made_from(OUTER, inner=new.inner)

    assert before.outer(1) == 4
    assert (after.outer(1), hits(after.outer)) == (result, (0, 1))


def test_other_options_are_other_machine_code():
    """Division by zero raises, or gives infinity."""
    functions = [
        made_from("@njit(error_model=MODEL)\ndef quotient(a, b):\n    return a / b", MODEL=model)
        for model in ("python", "numpy")
    ]

    assert len({content_of(each.quotient) for each in functions}) == 2


def test_functions_that_call_each_other_have_a_content():
    """The walk over what a function uses ends."""
    text = "@compiled\ndef even(n):\n    return n == 0 or odd(n - 1)\n"
    text += "@compiled\ndef odd(n):\n    return n != 0 and even(n - 1)\n"

    assert content_of(made_from(text).even) == content_of(made_from(text).even)
    assert content_of(made_from(text).even) != content_of(made_from(text).odd)


def test_what_uses_things_of_other_packages_is_not_kept():
    """Their names say nothing of what they do: a function, or an enumeration, may change."""
    elsewhere = ModuleType("elsewhere")
    text = "import enum\ndef step(value): return 1\nclass STEP(enum.IntEnum): A = 1"
    exec(compile(text, "elsewhere.py", "exec"), vars(elsewhere))
    of_function = made_from(INNER.replace("STEP", "STEP(value)"), STEP=elsewhere.step)
    of_class = made_from(INNER.replace("STEP", "STEP.A"), STEP=elsewhere.STEP)

    assert [content_of(each.inner) for each in (of_function, of_class)] == [None, None]


def test_names_in_a_tuple_are_part_of_the_content():
    """Two that differ in them alone are read at other places."""
    text = INNER.replace("STEP", "STEP.b")
    some = [namedtuple("Pair", names)(1, 2) for names in ("a b", "b a")]

    assert len({content_of(made_from(text, STEP=each).inner) for each in some}) == 2


def test_every_compiled_function_of_the_package_is_kept():
    """One that used something without a name would be compiled at every start."""
    found = {}
    for module in walk_packages(dpstream.__path__, "dpstream."):
        if "spark" not in module.name and not module.name.endswith("__main__"):
            for name, value in vars(import_module(module.name)).items():
                if isinstance(value, Dispatcher):
                    found[f"{module.name}.{name}"] = content_of(value)

    assert len(found) > 100
    assert [name for name, content in found.items() if content is None] == []


def test_damaged_machine_code_is_compiled_anew(folder):
    """A disk that was full, a file that was cut."""
    made_from(INNER, STEP=1).inner(1)
    [file] = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-1])

    again = made_from(INNER, STEP=1)
    assert (again.inner(1), hits(again.inner)) == (2, (0, 1))


def test_without_a_writable_folder_a_function_still_runs(tmp_path, monkeypatch):
    """A read-only container without a home is slow to start, and says so once."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(compiled_module, "_folders", lambda: iter([tmp_path / "file" / "kept"]))
    monkeypatch.setattr(KeptCode, "_warned", False)

    functions = [made_from(INNER, STEP=step).inner for step in range(2)]
    with pytest.warns(RuntimeWarning, match="NUMBA_CACHE_DIR") as told:
        results = [function(1) for function in functions]

    assert results == [1, 2]
    assert len(told) == 1


def test_what_a_folder_that_cannot_be_written_has_is_used(folder, tmp_path, monkeypatch):
    """An image that brought its machine code along."""
    made_from(INNER, STEP=1).inner(1)
    (tmp_path / "file").touch()
    folders = [tmp_path / "file" / "kept", folder]
    monkeypatch.setattr(compiled_module, "_folders", lambda: iter(folders))

    found = made_from(INNER, STEP=1)
    assert (found.inner(1), hits(found.inner)) == (2, (1, 0))


def test_a_folder_that_others_can_write_is_left_alone(tmp_path, monkeypatch):
    """Machine code is as trusted as the package."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tmp_path.chmod(0o755)
    ours = list(compiled_module._folders())
    tmp_path.chmod(0o777)

    assert tmp_path / "dpstream" / "compiled" in ours
    assert len(list(compiled_module._folders())) == len(ours) - 1


def test_old_machine_code_goes(folder, monkeypatch):
    """A folder does not grow with every release."""
    monkeypatch.setattr(compiled_module, "_KEPT", 2)
    for step in range(4):
        made_from(INNER, STEP=step).inner(1)

    assert len(list(folder.iterdir())) == 2


def test_who_listens_is_told_that_code_is_compiled(caplog, monkeypatch):
    """Once, and not when the machine code is on disk already."""
    monkeypatch.setattr(_Tell, "told", False)
    with caplog.at_level("INFO", logger="dpstream.compiled"):
        for step in range(2):
            numba.njit(made_from(INNER, STEP=step).inner.py_func)(21)

    assert [record.message for record in caplog.records] == [COMPILING]
