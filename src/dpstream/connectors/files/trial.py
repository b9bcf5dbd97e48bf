"""Parquet files are tried in a process of their own before this one reads them.

Arrow believes much of what a Parquet file says of itself: a damaged one may end the process that
reads it, take memory for sizes that only its page headers state, or fail in its last row group,
when rows of the first are counted. So a child process (`try_parquet` starts it, and starts it anew
when a file has ended it) reads the wanted columns of the whole file first, with the same reader,
and with bounds on its memory and time. A file that it cannot read is an `UnusableFile`.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dpstream.connectors.files.parquet import ParquetFile
from dpstream.connectors.files.size_limits import LIMITS, SizeLimits
from dpstream.errors import InvalidInput, UnusableFile
from dpstream.records import Columns

_MEMORY = 8 << 30  # bytes that a file may take beside its own size, when it is read in slices
_SECONDS, _BYTES_PER_SECOND = 120, 1 << 20  # of processor time for a file
_lock = Lock()
_child: tuple[int, subprocess.Popen[bytes]] | None = None  # with the process that has started it


def try_parquet(path: Path, columns: Columns, limits: SizeLimits = LIMITS) -> None:
    """Raise UnusableFile if the columns cannot be read; without any, only the file's footer."""
    question = {
        "path": str(path),
        "folder": "" if path.is_absolute() else os.getcwd(),  # it may have changed
        "columns": None if columns is None else [*columns],
        "limits": asdict(limits),
        "memory": _MEMORY,
    }
    answer, status = _ask(question)
    if answer is None:
        answer, status = _ask(question)  # it may have been an earlier file, or a kill from outside
    if answer is None:
        cause = signal.Signals(-status).name if status < 0 else f"code {status}"
        raise UnusableFile(
            f"{path} cannot be read as Parquet: it ends the process that reads it ({cause}); write "
            "the file again"
        )
    if answer:
        raise (UnusableFile if answer["unusable"] else InvalidInput)(answer["reason"])


def start_trials() -> None:
    """Start the child, which takes a moment, before the first file is tried."""
    global _child
    if _child is not None and _child[0] != os.getpid():
        _child[1].returncode = 0  # this process was forked, and the child is another's
    elif _child is not None and _child[1].poll() is None:
        return
    command = [sys.executable or "python3", "-P", "-m", __spec__.name]
    places = os.pathsep.join(dict.fromkeys(place or os.getcwd() for place in sys.path))
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    environment = os.environ | {"PYTHONPATH": places}
    process = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=nowhere, env=environment, start_new_session=True
    )
    _child = (os.getpid(), process)


@atexit.register
def _end_trials() -> None:
    if _child is not None and _child[0] == os.getpid() and _child[1].poll() is None:
        _child[1].communicate()


def _ask(question: dict[str, Any]) -> tuple[dict[str, Any] | None, int]:
    """What the child answers; None and its exit status if it ends instead."""
    with _lock:
        start_trials()
        assert _child is not None
        process = _child[1]
        assert process.stdin is not None
        assert process.stdout is not None
        line = b""
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if line.endswith(b"\n"):
            answer: dict[str, Any] = json.loads(line)
            return answer, 0
        process.stdin.close()
        process.stdout.close()
        return None, process.wait()


def _serve() -> None:
    """The child's life: a question a line, an answer a line, until nobody asks any more."""
    import resource

    page = os.sysconf("SC_PAGE_SIZE")
    physical, own = os.sysconf("SC_PHYS_PAGES") * page, 0
    with suppress(OSError):  # only Linux tells what a process has, and counts it all
        own = int(Path("/proc/self/statm").read_text().split()[5]) * page
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    for line in sys.stdin.buffer:
        question = json.loads(line)
        path = Path(question["path"])
        answer: dict[str, Any] = {}
        try:
            if question["folder"]:
                os.chdir(question["folder"])
            size, used = path.stat().st_size, resource.getrusage(resource.RUSAGE_SELF)
            most = used.ru_utime + used.ru_stime + size / _BYTES_PER_SECOND
            _limit(resource.RLIMIT_CPU, int(most) + _SECONDS)
            _limit(resource.RLIMIT_DATA, own + min(size + question["memory"], physical))
            read_through(path, question["columns"], SizeLimits(**question["limits"]))
        except InvalidInput as problem:
            answer = {"unusable": isinstance(problem, UnusableFile), "reason": str(problem)}
        except Exception as problem:
            words = f"{type(problem).__name__}: {problem}".partition("\n")[0][:200]
            reason = f"{path} cannot be read as Parquet: {words}; write the file again"
            answer = {"unusable": True, "reason": reason}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _limit(what: int, most: int) -> None:
    import resource

    resource.setrlimit(what, (most, resource.getrlimit(what)[1]))


def read_through(path: Path, columns: Columns, limits: SizeLimits = LIMITS) -> None:
    """Read the columns of a whole file as a run does; its statistics must be true."""
    file = ParquetFile(path, name=str(path), limits=limits, threads=True)
    known = file.columns()
    ranges = {name: file.chunk_ranges(name) for name in columns or () if name in known}
    position, done = None, columns is not None and not columns
    number = 0
    while not done:
        batch = file.read(position, columns)
        for chunk in (chunk for column in batch.table.columns for chunk in column.chunks):
            _check_memory(chunk)
        for name, chunks in ranges.items():
            if chunks is not None and len(batch.table):
                _check_range(path, name, batch.table[name], chunks[number][1:])
        position, done, number = batch.position, batch.done, number + 1
    file.close()


def _check_memory(array: pa.Array) -> None:
    """Refuse what points outside of itself; a value that is no good is a matter of its row."""
    if pa.types.is_dictionary(array.type):
        pa.DictionaryArray.from_arrays(array.indices, array.dictionary)
        array = array.dictionary
    if pa.types.is_string(array.type):
        array = array.view(pa.binary())
    array.validate(full=pa.types.is_binary(array.type) or pa.types.is_nested(array.type))


def _check_range(path: Path, name: str, values: Any, edges: tuple[int, int]) -> None:
    instants = values.cast(pa.timestamp("us", tz=values.type.tz), safe=False).cast(pa.int64())
    found = pc.min_max(instants).as_py()
    if values.null_count or not edges[0] <= found["min"] <= found["max"] <= edges[1]:
        raise UnusableFile(
            f"{path} has values of {name!r} that its own statistics do not have; write the file "
            "again"
        )


if __name__ == "__main__":
    _serve()
