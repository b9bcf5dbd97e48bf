"""Metrics and spans for an OpenTelemetry collector, by OTLP over HTTP: for the operator alone.

The metrics are those of `/metrics`, by the same names. A collector that is away never holds a run
up: what it does not take is dropped, and the SDK's own log says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

from dpstream.errors import InvalidParameter
from dpstream.optional import optional
from dpstream.serve.access import is_loopback
from dpstream.serve.metrics import METRICS, Sample
from dpstream.telemetry import exported

VARIABLE = "DPSTREAM_OTEL"
"""Of the environment; the process that runs a pipeline for the server gets it, too."""
_PATIENCE = 3  # seconds that the collector has for one answer
_EVERY_MS = 10_000
_SAME = 1.0  # seconds for which the metrics of one export are collected once


def check_collector(url: str | None, *, plain_http: bool) -> None:
    """Refuse an address that is none, and one where exact numbers would go out unencrypted."""
    if url is None:
        return
    try:
        place = urlsplit(url)
        host = "" if place.path.strip("/") or place.port == 0 else place.hostname or ""
    except ValueError:  # a wrong port, or half an address in brackets
        place, host = urlsplit(""), ""
    if not host or place.scheme not in ("http", "https"):
        raise InvalidParameter(
            f"--otel must be the address of a collector for OTLP over HTTP, as in "
            f"http://127.0.0.1:4318; got {url!r}"
        )
    if place.scheme == "http" and not plain_http and not is_loopback(host):
        raise InvalidParameter(
            f"--otel would send exact numbers to {host} without encryption; use https, a "
            "collector on this machine, or say --allow-plain-http where the network is your own"
        )
    optional("opentelemetry.sdk", extra="otel", who="--otel")
    optional("opentelemetry.exporter.otlp.proto.http", extra="otel", who="--otel")


@contextmanager
def export(url: str | None, collect: Callable[[], list[Sample]], *, name: str) -> Iterator[None]:
    """Send metrics and spans of a run while this lasts, and what is left at its end."""
    if url is None:
        yield
        return
    otlp = "opentelemetry.exporter.otlp.proto.http"
    spans = optional(f"{otlp}.trace_exporter", extra="otel").OTLPSpanExporter
    metrics = optional(f"{otlp}.metric_exporter", extra="otel").OTLPMetricExporter
    trace, measure = (
        optional(f"opentelemetry.sdk.{part}", extra="otel") for part in ("trace", "metrics")
    )
    batches = optional("opentelemetry.sdk.trace.export", extra="otel").BatchSpanProcessor
    readers = optional("opentelemetry.sdk.metrics.export", extra="otel")
    resource = optional("opentelemetry.sdk.resources", extra="otel").Resource.create(
        {
            "service.name": "dpstream",
            "service.version": version("dpstream"),
            "service.instance.id": name,
        }
    )
    base = url.rstrip("/")
    tracing = trace.TracerProvider(resource=resource, shutdown_on_exit=False)
    tracing.add_span_processor(batches(spans(endpoint=f"{base}/v1/traces", timeout=_PATIENCE)))
    reader = readers.PeriodicExportingMetricReader(
        metrics(endpoint=f"{base}/v1/metrics", timeout=_PATIENCE),
        export_interval_millis=_EVERY_MS,
        export_timeout_millis=_PATIENCE * 1000,
    )
    measuring = measure.MeterProvider([reader], resource, shutdown_on_exit=False)
    _observe(measuring.get_meter("dpstream"), collect)
    try:
        with exported(partial(_start, tracing.get_tracer("dpstream"))):
            yield
    finally:
        tracing.shutdown()
        measuring.shutdown(timeout_millis=_PATIENCE * 1000)


@contextmanager
def _start(tracer: Any, name: str, facts: dict[str, str | int]) -> Iterator[None]:
    """A span; of an error its kind alone, for its words may quote a row."""
    about = {f"dpstream.{key}": value for key, value in facts.items()}
    with tracer.start_as_current_span(
        name, attributes=about, record_exception=False, set_status_on_exception=False
    ) as one:
        try:
            yield
        except BaseException as problem:
            status = optional("opentelemetry.trace", extra="otel")
            one.set_attribute("error.type", type(problem).__name__)
            one.set_status(status.Status(status.StatusCode.ERROR))
            raise


def _observe(meter: Any, collect: Callable[[], list[Sample]]) -> None:
    """An instrument for each metric; all of one export are collected together."""
    observation = optional("opentelemetry.metrics", extra="otel").Observation
    known: list[Sample] = []
    until = 0.0

    def observe(name: str, _: Any) -> Sequence[Any]:
        nonlocal known, until
        if time.monotonic() >= until:
            known, until = collect(), time.monotonic() + _SAME
        return [
            observation(float(value), dict(labels))
            for metric, labels, value in known
            if metric == name and value is not None
        ]

    for name, about in METRICS.items():
        total = name.endswith("_total")
        make = meter.create_observable_counter if total else meter.create_observable_gauge
        make(f"dpstream_{name}", [partial(observe, name)], description=about)
