"""A Spark cluster of this machine's own, a driver that takes jobs, and kills of both.

`local-cluster[N,1,1024]` is a master and N workers inside the driver's JVM, and N executors in JVMs
of their own, children of the driver's; each executor keeps Python workers below it. So everything
that belongs to a driver is found by descent from it, and nothing else on the machine is touched.

What a query publishes must not change by a byte when executors or drivers are killed. A kill comes
some releases after the last one, and then some time that is drawn anew, so that it falls anywhere
in a step: while rows are read, while noise is drawn, between the sink and the state.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.harness import child_environment
from benchmarks.recovery_case import difference
from dpstream.errors import StateError

MEMORY_MB: Final = 1024  # of each executor
_EXECUTOR: Final = b"CoarseGrainedExecutorBackend"
_PATIENCE: Final = 60.0  # seconds for processes to go
_LOGGING: Final = """rootLogger.level = {level}
rootLogger.appenderRef.stderr.ref = stderr
logger.driver.name = org.apache.spark.api.python.PythonGatewayServer
logger.driver.level = {level}
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{{HH:mm:ss}} %p %c{{1}}: %m%n%ex
"""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster of `executors`, one core each; logs and scratch files stay in `folder`."""

    folder: Path
    executors: int = 2
    speculate: bool = False
    """Start a second copy of a task that takes longer than the others."""
    log_level: str = "WARN"
    """Of the driver and of the executors."""
    hasty: bool = False
    """JVMs start sooner, and are slower afterwards: for runs that are killed, not for speed."""
    readable: bool = False
    """Scratch files are not compressed, so that they can be searched."""

    @property
    def events(self) -> Path:
        """Where the event log is written."""
        return self.folder / "events"

    @property
    def printed(self) -> Path:
        """Where the workers keep what executors print."""
        return self.folder / "home" / "work"

    def environment(self) -> dict[str, str]:
        """What a driver needs in its environment before its JVM starts.

        Workers inside a driver print below Spark's own home, so it gets a home of links.
        """
        import pyspark

        home = self.folder / "home"
        self.printed.mkdir(parents=True, exist_ok=True)
        for part in Path(pyspark.__file__).parent.iterdir():
            if part.name not in ("work", "conf") and not (home / part.name).is_symlink():
                (home / part.name).symlink_to(part)
        (home / "conf").mkdir(exist_ok=True)
        (home / "conf" / "log4j2.properties").write_text(_LOGGING.format(level=self.log_level))
        return {
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(self.folder / "local"),
            "PYSPARK_PYTHON": sys.executable,
        }

    def settings(self) -> dict[str, Any]:
        """The session's settings."""
        self.events.mkdir(parents=True, exist_ok=True)
        found: dict[str, Any] = {
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.memory": "2g",
            "spark.executor.memory": f"{MEMORY_MB}m",
            "spark.executor.cores": "1",
            "spark.sql.shuffle.partitions": str(self.executors),
            "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false",
            "spark.eventLog.rolling.enabled": "false",
            "spark.eventLog.dir": self.events.as_uri(),
            "spark.python.authenticate.socketTimeout": "300s",  # 15 s are short on a busy machine
            # Killed on purpose, more often than any cluster would stand for.
            "spark.task.maxFailures": "100",
            "spark.deploy.maxExecutorRetries": "-1",
            "spark.excludeOnFailure.enabled": "false",
        }
        if self.hasty:
            options = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
            found |= {f"spark.{who}.extraJavaOptions": options for who in ("driver", "executor")}
        if self.readable:
            kinds = ("shuffle", "shuffle.spill", "broadcast", "rdd", "checkpoint")
            found |= {f"spark.{kind}.compress": "false" for kind in kinds}
        if self.speculate:
            found |= {
                "spark.speculation": "true",
                "spark.speculation.multiplier": "1.01",
                "spark.speculation.quantile": "0.1",
                "spark.speculation.minTaskRuntime": "1ms",
                "spark.speculation.interval": "10ms",
            }
        return found

    def session(self) -> Any:
        """Start it, in this process."""
        from pyspark.sql import SparkSession  # the extra `spark`

        os.environ.update(self.environment())
        master = f"local-cluster[{self.executors},1,{MEMORY_MB}]"
        builder = SparkSession.builder.master(master).appName("dpstream bench")
        return builder.config(map=self.settings()).getOrCreate()


def descendants(pid: int) -> list[int]:
    """Every process below this one, children before grandchildren."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _parent(int(entry.name))) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found, ahead = [], [pid]
    while ahead:
        ahead = [child for one in ahead for child in sorted(children.get(one, []))]
        found += ahead
    return found


def executors(driver: int) -> list[int]:
    """The JVMs of a driver's executors."""
    return [pid for pid in descendants(driver) if _EXECUTOR in _command(pid)]


def peak_mb(driver: int) -> dict[str, float]:
    """The largest peaks of memory so far: an executor's JVM, a Python worker, the driver's JVM."""
    jvms, workers = executors(driver), set[int]()
    for jvm in jvms:
        workers.update(descendants(jvm))
    rest = [pid for pid in descendants(driver) if pid not in workers and pid not in jvms]
    parts = {"executor_mb": jvms, "worker_mb": workers, "driver_jvm_mb": rest}
    return {name: max(map(_peak, pids), default=0.0) for name, pids in parts.items()}


def cpu_seconds(driver: int) -> dict[int, float]:
    """Processor time of a driver, and of everything below it, so far, by process."""
    found = {}
    for pid in [driver, *descendants(driver)]:
        fields = _stat(pid)
        if fields:
            found[pid] = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return found


def kill(*pids: int) -> None:
    """SIGKILL; who has gone already is no error."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def gone(*pids: int, seconds: float = _PATIENCE) -> bool:
    """Wait until none of them runs any more; False if some still do."""
    end = time.monotonic() + seconds
    while any(_runs(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _stat(pid: int) -> list[str]:
    """What the system says of a process, from its state on; nothing if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # a name may hold blanks and brackets


def _parent(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def _peak(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024 if "VmHWM:" in status else 0.0


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _runs(pid: int) -> bool:
    """A zombie has ended; it waits for its parent only."""
    return _stat(pid)[:1] not in ([], ["Z"])


_ANSWER_PATIENCE: Final = 600.0  # seconds for one answer


class Driver:
    """A running driver; `log` is the file that its standard error goes to."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self.log = process, log
        self._known: set[int] = set()

    @property
    def pid(self) -> int:
        """Its process number."""
        return self._process.pid

    def begin(self, **job: Any) -> None:
        """Ask for a job; `answer` waits for its end."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")

    def answer(self, seconds: float = _ANSWER_PATIENCE) -> dict[str, Any]:
        """The next answer; a driver that has ended, or a job that failed, is an error."""
        if not self.waits(seconds):
            raise StateError(f"the Spark driver gave no answer in {seconds:.0f} s{self._last()}")
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise StateError(f"the Spark driver ended{self._last()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise StateError(f"a job failed on Spark: {answer['error']}")
        return answer

    def waits(self, seconds: float) -> bool:
        """Is there an answer, or the end, within this time?"""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], seconds)[0])

    def ask(self, **job: Any) -> dict[str, Any]:
        """A job and its answer, with the processor time that it took on all processes."""
        before = cpu_seconds(self.pid)
        self.begin(**job)
        answer = self.answer()
        after = cpu_seconds(self.pid)
        # Spark ends Python workers that were idle for a minute: what is gone has used nothing.
        used = sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())
        return answer | {"cpu_seconds": used}

    def executors(self) -> list[int]:
        """The process numbers of its executors."""
        return executors(self._process.pid)

    def kill_executor(self, number: int) -> bool:
        """Kill one of those that run now; False if there is none."""
        running = self.executors()
        if running:
            kill(running[number % len(running)])
        return bool(running)

    def kill(self) -> None:
        """Kill the driver and its JVM. Executors are left to find out by themselves."""
        below = descendants(self._process.pid)
        left = set(executors(self._process.pid))
        for pid in list(left):
            left.update(descendants(pid))
        self._known.update(left)
        kill(self._process.pid, *(pid for pid in below if pid not in left))
        self._process.wait()

    def close(self) -> None:
        """End the driver, and whatever it has left running."""
        self._known.update(descendants(self._process.pid))
        try:
            self._process.communicate(timeout=20)
        except (subprocess.TimeoutExpired, ValueError, BrokenPipeError):
            self.kill()
        if not gone(*self._known, seconds=10):
            kill(*self._known)
            gone(*self._known)

    def _last(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return "; ".join([": " + line for line in lines[-1:]])


@contextmanager
def started(cluster: Cluster) -> Iterator[Driver]:
    """Start a driver on a cluster of its own; at the end nothing of it runs any more."""
    cluster.folder.mkdir(parents=True, exist_ok=True)
    log = cluster.folder / f"driver-{time.time_ns()}.log"
    with log.open("wb") as complaints:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.spark_driver"],
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            bufsize=0,
        )
        driver = Driver(process, log)
        try:
            driver.begin(**asdict(cluster) | {"folder": str(cluster.folder)})
            yield driver
        finally:
            driver.close()


EXECUTOR, DRIVER, ALL = "an executor", "the driver", "all executors"
_STEP: Final = 2.0  # seconds after a release within which a kill falls
_KILL_PATIENCE: Final = 300.0


@dataclass(frozen=True, kw_only=True)
class Kill:
    """Kill `what` once `releases` more are out, and `seconds` have passed."""

    what: str
    releases: int
    seconds: float


@dataclass(kw_only=True)
class Disturbed:
    """One run, killed and started again until it ended."""

    kills: list[str] = field(default_factory=list)
    starts: int = 0
    seconds: float = 0.0
    waits: list[tuple[str, float]] = field(default_factory=list)
    """What was killed, and the seconds from there to the next new release."""
    difference: str = ""
    """How its releases differ from those of an undisturbed run; empty: not at all."""


def drawn(whats: Sequence[str], releases: int, rng: np.random.Generator) -> list[Kill]:
    """Kills of these kinds, spread over about so many releases."""
    most = max(2, releases // (len(whats) + 1))
    return [
        Kill(
            what=what,
            releases=int(rng.integers(0, most)),
            seconds=float(rng.uniform(0, _STEP)),
        )
        for what in whats
    ]


def disturbed(
    cluster: Cluster,
    folder: Path,
    job: dict[str, Any],
    kills: Sequence[Kill],
    *,
    after_kill: Callable[[], None] = lambda: None,
) -> Disturbed:
    """Run a job that publishes into `folder / "out"`, killing as planned, until it has ended.

    `after_kill` is called while the driver is dead.
    """
    found, ahead, began = Disturbed(), list(kills), time.monotonic()
    done = False
    while not done:
        part = replace(cluster, folder=cluster.folder / f"start-{found.starts}")
        found.starts += 1
        with started(part) as driver:
            driver.answer()
            driver.begin(**job, folder=str(folder))
            done = _killed(driver, folder, ahead, found)
            if done:
                driver.answer()
            else:
                after_kill()
    found.seconds = time.monotonic() - began
    return found


def _killed(driver: Driver, folder: Path, ahead: list[Kill], found: Disturbed) -> bool:
    """Kill until the driver is killed (False), or the job has ended (True)."""
    while ahead:
        kill, before = ahead[0], out(folder)
        if _until(driver, lambda: out(folder) >= before + kill.releases):  # noqa: B023
            return True
        if driver.waits(kill.seconds):
            return True
        ahead.pop(0)
        found.kills.append(kill.what)
        at, size = time.monotonic(), out(folder)
        if kill.what == DRIVER:
            driver.kill()
            return False
        for _ in range(len(driver.executors()) if kill.what == ALL else 1):
            driver.kill_executor(len(found.kills))
        if _until(driver, lambda: out(folder) > size):  # noqa: B023
            return True
        found.waits.append((kill.what, time.monotonic() - at))
    return driver.waits(_KILL_PATIENCE)


def _until(driver: Driver, reached: Callable[[], bool]) -> bool:
    """Wait until it is so; True if the driver has answered, or ended, before."""
    end = time.monotonic() + _KILL_PATIENCE
    while not reached():
        if driver.waits(0.02):
            return True
        if time.monotonic() > end:
            return True  # asking it for its answer says what is wrong
    return False


def out(folder: Path) -> int:
    """How many releases the sink has."""
    place = folder / "out"
    return sum(1 for _ in place.glob("*.parquet")) if place.is_dir() else 0


def compared(found: Disturbed, folder: Path, expected: dict[str, str]) -> Disturbed:
    """Look for releases that are missing, too many, or other bytes; then remove what it wrote."""
    found.difference = difference(folder, expected, same_keys=True)
    if not found.difference:
        shutil.rmtree(folder)
    return found
