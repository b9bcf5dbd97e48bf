"""Processes that tests start beside their own: forks, new interpreters, and waiting for them."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

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
