"""A Spark cluster of this machine's own: its settings, its processes, and how to kill them.

`local-cluster[N,1,1024]` is a master and N workers inside the driver's JVM, and N executors in JVMs
of their own, children of the driver's; each executor keeps Python workers below it. So everything
that belongs to a driver is found by descent from it, and nothing else on the machine is touched.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

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
