"""Processes that tests start beside their own: forks, new interpreters, and waiting for them."""

import gc
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dpstream.cli import main
from dpstream.connectors.files import source, trial


def start_fork(work: Callable[[], object], *, trials: bool = False) -> int:
    """Do the work in a fork, which ends with 0, or with 1 after an exception; its number.

    It reads Parquet files through by itself before it uses them. With `trials` it starts a child
    for that, as every process does, which takes longer than most runs of the tests.
    """
    pid = os.fork()
    if not pid:
        status = 1
        gc.disable()  # its life is short, and a collection would copy every page of the parent
        try:
            if not trials:
                source.start_trials = lambda: None
                source.try_parquet = trial.read_through
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def exit_status(pid: int) -> int:
    """Wait for a fork; how it ended: its status, or -signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_in_fork(work: Callable[[], object]) -> int:
    """Do the work in a process of its own, without the seconds that an interpreter takes."""
    return exit_status(start_fork(work))


class Command(subprocess.Popen):
    """`dpstream` in a fork, which has imported already what a new interpreter takes seconds for.

    To those who start it, it is a process like any other: it has pipes, a folder and an environment
    of its own, and none of the files, handlers and filters of the tests.
    """

    def __init__(self, *words: object, **options: Any) -> None:
        super().__init__([*map(str, words)], **options)

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any,
                       pass_fds: Any, cwd: Any, env: Any, startupinfo: Any, creationflags: Any,
                       shell: Any, *pipes: Any) -> None:  # fmt: skip
        reads, _, _, writes, _, errors = pipes[:6]  # both ends of each pipe; these are the child's
        self.pid = start_fork(lambda: _become(args, (reads, writes, errors), preexec_fn, cwd, env))
        self._child_created = True
        self._close_pipe_fds(*pipes[:6])


def _become(
    words: list[str],
    files: Sequence[int],
    prepare: Callable[[], object] | None,
    folder: os.PathLike[str] | None,
    environment: Mapping[str, str] | None,
) -> None:
    """Leave the tests behind and run the command to its end, which is that of the process."""
    for number, file in enumerate(files):
        if file >= 0:
            os.dup2(file, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")
    for each in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.getLogger().handlers.clear()
    warnings.resetwarnings()
    if prepare:
        prepare()
    if folder:
        os.chdir(folder)
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    status = 1
    try:
        main(words)
    except SystemExit as left:
        status = int(left.code or 0)
    except BaseException:
        traceback.print_exc()
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    os._exit(status)


def run_in_new_process(work: Callable[..., object], *arguments: object) -> int:
    """The same in a new interpreter, for clients whose threads do not survive a fork."""
    process = multiprocessing.get_context("spawn").Process(target=work, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode is not None, "it has not ended within a minute"
    return process.exitcode


def run_python(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script in a new interpreter, to its end."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def kill_this_process(*_: object, **__: object) -> None:
    """Die as by kill -9, in place of any function."""
    os.kill(os.getpid(), signal.SIGKILL)


def until(condition: Callable[[], Any], *, seconds: float = 90, every: float = 0.05) -> Any:
    """Ask until the answer is true, first often, then less, at last `every` so many seconds."""
    end, pause = time.monotonic() + seconds, 0.001
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {seconds} seconds"
        time.sleep(pause)
        pause = min(1.5 * pause, every)
    return found
