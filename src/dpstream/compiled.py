"""Numba's decorators, with machine code kept on disk by the content of what it was compiled from.

Numba's own cache belongs to one path, and does not see that a function of another file, which is
compiled into the caller, has changed. Here the name of a file of machine code is a digest of all
that went in: the function, the functions and constants it uses, wherever they are, and the
versions and the processor. So another installation or a new release compiles what has changed, and
nothing else.

Machine code is kept in NUMBA_CACHE_DIR, else in the user's cache folder, else beside the source.
Where none of them can be written (a read-only container, a service without a home) it is read from
those that can be read, what is not there is compiled at every start, and one warning says so.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle  # noqa: TID251  machine code as Numba serialises it, as trusted as the package
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

import llvmlite
import numba
import numpy as np
from llvmlite import binding
from numba.core import event, types
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.dispatcher import Dispatcher
from numba.core.extending import _Intrinsic
from numba.core.runtime.nrt import rtsys
from numba.core.serialize import dumps
from numba.np.ufunc.ufuncbuilder import UFuncDispatcher

F = TypeVar("F", bound=Callable[..., Any])

_SLOW_START = (
    "compiled code cannot be kept: neither the user's cache folder nor the installed package can "
    "be written, so every start compiles again; name a folder in NUMBA_CACHE_DIR"
)
COMPILING = "compiling; this is done once per installation and may take half a minute"
_KEPT = 32  # files of one function: for types, versions and processors
_DIGEST = 32  # bytes of SHA-256
_KNOWN = ("builtins", "math", "cmath", "operator", "numpy", "numba", "llvmlite")
"""Packages whose functions are known by their names: their versions are in every content."""
_PLAIN = (int, float, complex, str, bytes, type(None), type(Ellipsis))


class _Tell(event.Listener):
    """Says once per process that code is being compiled, in the log `dpstream.compiled`."""

    told = False

    def on_start(self, event: Any) -> None:
        """Machine code was not found on disk."""
        if not self.told:
            _Tell.told = True
            logging.getLogger("dpstream.compiled").info(COMPILING)

    def on_end(self, event: Any) -> None:
        """Nothing more to say."""


event.register("numba:compile", _Tell())  # type: ignore[no-untyped-call]


class _Unnamed(Exception):
    """A function uses what has no name that holds in another process."""


class _Content:
    """Writes down what one function is compiled from, function by function, each once."""

    def __init__(self, dispatcher: Any) -> None:
        self._places: dict[int, int] = {}
        self._waiting: list[FunctionType] = []
        self._parts = [np.__version__, numba.__version__, llvmlite.__version__, sys.version]
        self._parts.append(self._value(dispatcher))
        while self._waiting:
            self._parts.append(self._function(self._waiting.pop()))

    def digest(self) -> str:
        """All that was written down, as one number."""
        return hashlib.sha256("\n".join(self._parts).encode()).hexdigest()

    def _function(self, function: FunctionType) -> str:
        code, cells = function.__code__, function.__closure__ or ()
        names = dict.fromkeys(_names(code))
        used = {name: function.__globals__[name] for name in names if name in function.__globals__}
        used |= {
            f"{name} of the closure": cell.cell_contents
            for name, cell in zip(code.co_freevars, cells, strict=True)
        }
        given = [f"{name} = {self._value(value)}" for name, value in used.items()]
        return f"{self._code(code, function.__doc__)} {self._value(function.__defaults__)} {given}"

    def _code(self, code: CodeType, doc: str | None) -> str:
        values = code.co_consts
        if doc is not None and values[:1] == (doc,):
            values = (None, *values[1:])  # as without one
        shape = (code.co_argcount, code.co_kwonlyargcount, code.co_flags, code.co_varnames)
        body = (code.co_code.hex(), code.co_exceptiontable.hex(), code.co_names, code.co_freevars)
        return f"{shape} {body} {self._value(values)}"

    def _value(self, value: Any) -> str:
        if isinstance(value, (Dispatcher, UFuncDispatcher)):
            return f"{self._place(value.py_func)} {sorted(value.targetoptions.items())}"
        if isinstance(value, _Intrinsic):
            return self._place(value._defn)
        if isinstance(value, CodeType):
            return self._code(value, None)
        if isinstance(value, (tuple, frozenset)):
            each = [self._value(one) for one in value]
            kind = f"{type(value).__qualname__}{getattr(value, '_fields', '')}"
            return f"{kind} {each if isinstance(value, tuple) else sorted(each)}"
        if isinstance(value, np.ndarray):
            raw = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
            return f"array {value.dtype} {value.shape} {raw}"
        home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
        package = str(home).partition(".")[0]
        if isinstance(value, FunctionType) and package == __name__.partition(".")[0]:
            return self._place(value)
        if isinstance(value, (*_PLAIN, types.Type, np.generic, np.dtype)):
            return repr(value)
        if package not in _KNOWN or not hasattr(value, "__name__"):
            raise _Unnamed(f"{value!r}")
        return f"{home}.{getattr(value, '__qualname__', value.__name__)}"

    def _place(self, function: Any) -> str:
        """A function by its number, so that those that call each other come to an end."""
        if id(function) not in self._places:
            self._places[id(function)] = len(self._places)
            self._waiting.append(function)
        return f"function {self._places[id(function)]}"


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)


def content_of(dispatcher: Any) -> str | None:
    """A digest of all that a compiled function is made from; None if there is none that holds.

    Two functions with one content are the same machine code: where they are, what their lines are
    numbered and what their docstrings say is not in it, the constants that they use are.
    """
    try:
        return _Content(dispatcher).digest()
    except _Unnamed:
        return None


def _folders() -> Iterator[Path]:
    """Where machine code may be, the first choice first."""
    if named := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(named) / "dpstream"
    with suppress(RuntimeError):  # no home
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        if _is_ours(folder := Path(home) / "dpstream" / "compiled"):
            yield folder
    yield Path(__file__).parent / "__pycache__" / "compiled"


def _is_ours(folder: Path) -> bool:
    """Whether nobody else can put machine code there: not root, with the home of a user."""
    for each in (folder, *folder.parents):
        with suppress(OSError):
            found = each.stat()
            return found.st_uid == os.geteuid() and not found.st_mode & 0o022
    return False


class KeptCode(_Cache):
    """The machine code of one function: a file for each content, types and processor."""

    _warned = False

    def __init__(self, dispatcher: Any) -> None:
        self._dispatcher = dispatcher
        function = dispatcher.py_func
        name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"
        self._name = name.replace("<", "").replace(">", "")
        self._enabled = True

    @property
    def cache_path(self) -> str:
        """The folder of first choice."""
        return str(next(_folders()))

    def load_overload(self, sig: Any, target_context: Any) -> CompileResult | None:
        """The function for arguments of these types, if it was compiled before."""
        codegen = target_context.codegen()
        if not self._enabled or (name := self._file_name(sig, codegen)) is None:
            return None
        for folder in _folders():
            with suppress(OSError):
                packed = (folder / name).read_bytes()
                if hashlib.sha256(packed[_DIGEST:]).digest() == packed[:_DIGEST]:
                    return _linked(packed[_DIGEST:], target_context)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what has just been compiled."""
        library = data.library
        if not self._enabled or library.has_dynamic_globals or data.lifted:
            return
        if (name := self._file_name(sig, library.codegen)) is None:
            return
        named = [each.name for each in library._final_module.functions if each.is_declaration]
        needs = [each for each in named if not each.startswith("llvm.")]
        payload: bytes = dumps((needs, data._reduce()))  # type: ignore[no-untyped-call]
        written = any(self._write(folder, name, payload) for folder in _folders())
        if not written and not KeptCode._warned:
            KeptCode._warned = True
            warnings.warn(_SLOW_START, RuntimeWarning, stacklevel=2)

    def _write(self, folder: Path, name: str, payload: bytes) -> bool:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with NamedTemporaryFile(dir=folder, suffix=".tmp", delete=False) as file:
                file.write(hashlib.sha256(payload).digest() + payload)
            os.replace(file.name, folder / name)
        except OSError:
            return False
        self._remove_oldest(folder)
        return True

    def _remove_oldest(self, folder: Path) -> None:
        with suppress(OSError):
            files = folder.glob(f"{self._name}-*.code")
            for each in sorted(files, key=lambda file: file.stat().st_mtime)[:-_KEPT]:
                each.unlink()

    def _file_name(self, sig: Any, codegen: Any) -> str | None:
        """None if the content, or a type, has no name that holds in another process."""
        content = content_of(self._dispatcher)
        key = f"{codegen.magic_tuple()} {sig} {content}"
        if content is None or " at 0x" in key:
            return None
        return f"{self._name}-{hashlib.sha256(key.encode()).hexdigest()[:40]}.code"

    def enable(self) -> None:
        """Read and write files again."""
        self._enabled = True

    def disable(self) -> None:
        """Compile anew, and keep nothing."""
        self._enabled = False

    def flush(self) -> None:
        """Remove the files of this function, for `recompile`."""
        for folder in _folders():
            for each in folder.glob(f"{self._name}-*.code"):
                with suppress(OSError):
                    each.unlink()


def _linked(payload: bytes, target_context: Any) -> CompileResult:
    """Machine code as a function; what only compiling needs is not imported for it."""
    needs, parts = pickle.loads(payload)
    rtsys.initialize(target_context)
    if not all(map(binding.address_of_symbol, needs)):
        target_context.refresh()
    result: CompileResult = CompileResult._rebuild(target_context, *parts)  # type: ignore[no-untyped-call]
    return result


class _KeptUfunc(KeptCode):
    """The same for a function of elements; the loop around it is compiled at every start."""

    def load_overload(self, sig: Any, target_context: Any) -> CompileResult | None:
        """The function, and all that its loop is compiled with."""
        target_context.refresh()
        return super().load_overload(sig, target_context)


def njit(**options: Any) -> Any:
    """`numba.njit` with these options, and with `KeptCode` if they ask for a cache."""
    cached = options.pop("cache", False)

    def decorate(function: Any) -> Any:
        dispatcher: Any = numba.njit(**options)(function)
        if cached:
            dispatcher._cache = KeptCode(dispatcher)
        return dispatcher

    return decorate


def vectorize(**options: Any) -> Any:
    """`numba.vectorize`, the same way."""
    cached = options.pop("cache", False)

    def decorate(function: Any) -> Any:
        made: Any = numba.vectorize(**options)(function)  # type: ignore[no-untyped-call]
        if cached:
            made._dispatcher.cache = _KeptUfunc(made._dispatcher)
        return made

    return decorate


def compiled(function: F) -> F:
    """Compile without the GIL and keep the machine code on disk."""
    made: F = njit(nogil=True, cache=True)(function)
    return made
