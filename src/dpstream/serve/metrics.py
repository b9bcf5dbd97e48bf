"""Numbers for the operator in Prometheus' text format, from `serve` and from `run --metrics`.

They are exact, and not private: whoever asks needs the operator's token.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from threading import Thread
from typing import Any

from dpstream.errors import DpstreamError, InvalidParameter
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.serve.access import Token, bound_socket, is_loopback
from dpstream.session import Runs
from dpstream.session.pipeline import Pipeline

COUNTS = ("read", "outside", "late", "other_keys", "rejected")
METRICS = {
    "up": "Does the pipeline run, or has it ended?",
    "start_time_seconds": "When this process began, in seconds since 1970.",
    "restarts_total": "Times it was restarted.",
    "sse_clients": "Who follows the events.",
    "newest_release": "The newest number.",
    "rows_read_total": "Rows read since this start.",
    "rows_outside_total": "Rows outside the public range since this start.",
    "rows_late_total": "Rows that came too late since this start.",
    "rows_other_keys_total": "Rows of keys that are not public since this start.",
    "rows_rejected_total": "Rows set aside as dead letters since this start.",
    "files_quarantined": "Files set aside because they cannot be read.",
    "triggers_total": "Triggers done.",
    "releases_total": "Releases published since this start.",
    "seconds_since_release": "Since the last release, or since this start.",
    "query_finished": "Has it published all it ever will?",
    "lag_seconds": "Behind its schedule.",
    "rows_waiting": "Rows that have come and that the query has not read.",
    "consumer_lag": "Messages that the source's server has and that were not read.",
    "release_delay_seconds": "From a trigger to its release, the last one.",
    "worst_release_delay_seconds": "From a trigger to its release, the worst since this start.",
    "query_starved": "Has it read nothing, while another query over its source has?",
    "query_failed": "Has it failed, while the others go on?",
    "budget": "What the book promises, in its measure.",
    "budget_spent": "What is spent of it.",
    "budget_left": "What is left of it.",
    "ledger_readable": "Can the ledger be read?",
    "memory_bytes": "Resident memory of a process.",
    "memory_limit_bytes": "What it may take: its control group's limit, or the machine's memory.",
    "disk_free_bytes": "Free where the state directory is.",
    "disk_size_bytes": "Size of the file system where the state directory is.",
    "state_bytes": "Files of the state directory.",
    "posted_accepted_total": "Rows taken in.",
    "posted_rejected_total": "Posted lines that are no rows.",
    "posted_requests_total": "Posts taken in.",
    "posted_bytes": "Kept for the run.",
}
"""Names without the prefix; totals only grow."""
_LOG = logging.getLogger("dpstream.serve")
CONTENT_TYPE = "text/plain; version=0.0.4"
_BEGAN = time.time()
_PATIENCE = 10  # seconds that a client has for its request
_CGROUPS = Path("/sys/fs/cgroup")
Sample = tuple[str, Mapping[str, str], float | None]
"""Name of a metric, labels and value."""


def report(runs: Runs) -> dict[str, Any]:
    """How far the queries are, and what became of their rows; not private."""
    starved = runs.warn_starved()
    queries = {}
    for name, run in [*runs.runs.items()]:
        queries[name] = {
            **run.operator_facts(),
            "triggers_done": run.steps_done,
            "triggers": run.query.schedule.steps,
            "next_trigger": run.next_trigger,
            "releases": run.operator.releases,
            "last_release": run.operator.last_release,
            "starved": name in starved,
        }
        problem = runs.failures.get(name)
        if problem is not None:
            queries[name]["failed"] = described(problem)
    return {"queries": queries}


def described(problem: Exception) -> dict[str, Any]:
    """An error as JSON has it."""
    return {"error": type(problem).__name__, "message": str(problem)}


def lag(told: Mapping[str, Any]) -> float | None:
    """Seconds since the next trigger was due; 0 if it is not due yet."""
    due = told["next_trigger"]
    return None if due is None else max(0.0, time.time() - due / 1e6)


def query_samples(queries: Mapping[str, Mapping[str, Any]], began: float) -> list[Sample]:
    """What `report` tells of each query; `began`: when its process did."""
    samples: list[Sample] = []
    gauges = ("rows_waiting", "release_delay_seconds", "worst_release_delay_seconds")
    for name, told in queries.items():
        done, last = told["triggers_done"], told.get("last_release")
        values = {f"rows_{count}_total": told[count] for count in COUNTS}
        values |= {"files_quarantined": told.get("quarantined", 0)}
        values |= {"triggers_total": done, "lag_seconds": lag(told)}
        values |= {"releases_total": told.get("releases", 0)}
        values |= {"seconds_since_release": max(0.0, time.time() - (last or began))}
        values |= {"query_finished": told["triggers"] is not None and done >= told["triggers"]}
        values |= {gauge: told.get(gauge) for gauge in gauges}
        values |= {f"query_{state}": bool(told.get(state)) for state in ("starved", "failed")}
        samples += [(metric, {"query": name}, value) for metric, value in values.items()]
        samples += [
            ("consumer_lag", {"query": name, "partition": partition}, count)
            for partition, count in told.get("consumer_lag", {}).items()
        ]
    return samples


def book_reports(pipeline: Pipeline) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Every ledger of a pipeline, and the books in it."""
    for path in dict.fromkeys(book.ledger for book in pipeline.books):
        if path.exists():
            with closing(Ledger(path)) as ledger:
                yield str(path), ledger.report()


def book_samples(pipeline: Pipeline) -> list[Sample]:
    """Budget, spent and left of the pipeline's books; of a book by window, what is left now."""
    samples: list[Sample] = []
    wanted = {book.dataset for book in pipeline.books}
    try:
        for path, books in book_reports(pipeline):
            samples.append(("ledger_readable", {"ledger": path}, 1))
            for book in [book for book in books if book["dataset"] in wanted]:
                terms = book["terms"]
                about = {"dataset": book["dataset"], "measure": terms["measure"], "ledger": path}
                amounts = {"": terms["total"], "_spent": book["spent"], "_left": book["left"]}
                for what, amount in amounts.items():
                    samples.append((f"budget{what}", about, float(Fraction(amount))))
    except (DpstreamError, OSError):
        samples.append(("ledger_readable", {}, 0))
    return samples


def machine_samples(folder: Path, processes: Mapping[str, int | None]) -> list[Sample]:
    """Memory of processes by name, and the disk of a state directory."""
    samples: list[Sample] = [("start_time_seconds", {}, _BEGAN)]
    for name, pid in processes.items():
        with suppress(OSError):  # it has left, or this is no Linux
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            samples.append(("memory_bytes", {"process": name}, pages * os.sysconf("SC_PAGE_SIZE")))
    samples.append(("memory_limit_bytes", {}, memory_limit()))
    with suppress(OSError):
        disk = shutil.disk_usage(folder)
        samples += [("disk_free_bytes", {}, disk.free), ("disk_size_bytes", {}, disk.total)]
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # files come and go
                total += os.lstat(os.path.join(place, name)).st_size
    return [*samples, ("state_bytes", {}, total)]


def memory_limit() -> float | None:
    """The smallest limit of the process's control groups, or the machine's memory."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, ValueError):
        line = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].splitlines()[0]
        place = _CGROUPS / line.lstrip("/")
        while place.is_relative_to(_CGROUPS):
            with suppress(OSError, ValueError):  # "max": none
                limits.append(int((place / "memory.max").read_text()))
            place = place.parent
    return min(limits)


def exposition(samples: Iterable[Sample]) -> str:
    """Prometheus' text format, version 0.0.4; a sample without a value is left out.

    >>> print(exposition([("triggers_total", {"query": 'a"b'}, 5)]), end="")
    # HELP dpstream_triggers_total Triggers done.
    # TYPE dpstream_triggers_total counter
    dpstream_triggers_total{query="a\\"b"} 5
    """
    lines: list[str] = []
    known = sorted((sample for sample in samples if sample[2] is not None), key=itemgetter(0))
    for name, group in groupby(known, key=itemgetter(0)):
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP dpstream_{name} {METRICS[name]}", f"# TYPE dpstream_{name} {kind}"]
        for _, labels, value in group:
            inside = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
            lines.append(f"dpstream_{name}{f'{{{inside}}}' if inside else ''} {value:.17g}")
    return "\n".join([*lines, ""])


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def run_samples(pipeline: Pipeline, runs: Runs) -> list[Sample]:
    """All that `dpstream run` tells."""
    return [
        ("up", {}, 1),
        ("restarts_total", {}, 0),
        *query_samples(report(runs)["queries"], _BEGAN),
        *book_samples(pipeline),
        *machine_samples(pipeline.state, {"run": os.getpid()}),
    ]


def metrics_address(text: str) -> tuple[str, int]:
    """HOST and PORT of "PORT" or "HOST:PORT"; without a host it is this machine alone.

    >>> metrics_address("9464"), metrics_address("[::1]:0")
    (('127.0.0.1', 9464), ('::1', 0))
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise InvalidParameter(f"--metrics must be PORT or HOST:PORT; got {text!r}")
    return host.strip("[]") or "127.0.0.1", int(port)


@contextmanager
def serve_metrics(
    place: tuple[str, int], token: Token, collect: Callable[[], list[Sample]], *, plain_http: bool
) -> Iterator[str]:
    """Answer `/metrics` in a thread while this lasts; gives its address."""
    host, port = place
    if not plain_http and not is_loopback(host):
        raise InvalidParameter(
            f"--metrics would listen on {host}, where others can reach it, without encryption; "
            "keep it on 127.0.0.1 behind a proxy that encrypts, or say --allow-plain-http where "
            "the network is your own"
        )

    class Answer(BaseHTTPRequestHandler):
        timeout = _PATIENCE

        def do_GET(self) -> None:
            """The numbers, for who has the token."""
            status, body = 200, ""
            if not token.fits(self.headers.get("authorization")):
                status, body = 401, "the operator's token is needed\n"
            elif self.path != "/metrics":
                status, body = 404, "there is /metrics, and nothing else\n"
            else:
                try:
                    body = exposition(collect())
                except Exception as problem:
                    _LOG.error("metrics cannot be collected", exc_info=problem)
                    status = 500
            self.send_response_only(status)
            if status == 401:
                self.send_header("WWW-Authenticate", "Bearer")
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body.encode())))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            """Who asks is not logged."""

    bound = bound_socket(host, port, "--metrics")
    bound.listen(16)
    server = ThreadingHTTPServer(place, Answer, bind_and_activate=False)
    server.socket.close()
    server.socket = bound
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{bound.getsockname()[1]}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
