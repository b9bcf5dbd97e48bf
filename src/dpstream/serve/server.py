"""Both sides on their sockets, for as long as the process lives."""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from dpstream.errors import InvalidParameter
from dpstream.optional import optional
from dpstream.privacy.state.durable_files import make_directory
from dpstream.serve.access import Token, bound_socket, check_binding, load_token, read_token
from dpstream.serve.alerts import Alerts
from dpstream.serve.connections import HEAD_SECONDS, Connections, LimitedConnection, throttled
from dpstream.serve.event_stream import Hub
from dpstream.serve.operator_side import MOST_DECODED, OperatorSide
from dpstream.serve.public_facts import declared_books, describe_ended, describe_queries
from dpstream.serve.public_side import PublicSide
from dpstream.serve.release_store import ReleaseReader, hold_folder, store_folder
from dpstream.serve.worker import Supervisor
from dpstream.session.pipeline import Pipeline

__all__ = ["Settings", "check_pipes", "load_token", "read_token", "serve"]
_LEAVING = 3  # seconds that open answers have when the server stops
_ORIGIN = re.compile(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a pipeline is served."""

    host: str = "127.0.0.1"
    port: int = 8000
    operator_host: str = "127.0.0.1"
    operator_port: int = 8001
    flight_port: int | None = None
    """Where releases can be had by Arrow Flight, beside the public side; None: nowhere."""
    flight_token: Token | None = None
    """Who asks there needs it; None: it is as open as the feed."""
    certificate: Path | None = None
    key: Path | None = None
    plain_http: bool = False
    behind_proxy: bool = False
    run: bool = True
    anyway: bool = False
    take_over: bool = False
    who: str = ""
    kept: Path | None = None
    """A pipeline that ran before, to go on with instead of what the file says now."""
    not_reloaded: dict[str, Any] | None = None
    """Why the file is not taken up then."""
    grid: float = 1.0
    rate: float = 200.0
    framed_by: tuple[str, ...] = ()
    """Origins of pages that may show this one in a frame."""
    clients: int = 1000
    clients_per_address: int = 100
    most_body: int = 16 << 20
    most_decoded: int = MOST_DECODED

    @property
    def connections(self) -> int:
        """The most that one side has open; those that follow the events are among them."""
        return self.clients + 200

    def check(self) -> None:
        """Refuse addresses that others can reach, unless they are encrypted or meant."""
        encrypted = self.certificate is not None
        hosts = {"the public side": self.host, "the operator side": self.operator_host}
        for what, host in hosts.items():
            check_binding(host, what, encrypted=encrypted, allowed=self.plain_http)
        for origin in self.framed_by:
            if not _ORIGIN.fullmatch(origin):
                raise InvalidParameter(
                    f"--framed-by must be the origin of a page, such as https://example.org or "
                    f"https://example.org:8443; got {origin!r}"
                )


def serve(
    pipeline: Pipeline,
    settings: Settings,
    token: Token,
    *,
    analysts: Mapping[str, Token] | None = None,
    tell: Callable[..., None],
    say: Callable[[str], None] = lambda words: None,
) -> Settings | None:
    """Serve until a signal comes; `tell` gets the addresses of both sides, and that of Flight.

    Returns settings to serve with again, at the same ports, if the file is to be taken up anew.
    `say` gets what the operator alone should know. `analysts`: whose tokens may ask for queries.
    """
    settings.check()
    with contextlib.ExitStack() as stack:
        if settings.run:
            check_pipes(pipeline)
            make_directory(pipeline.state, mode=0o700)
            stack.enter_context(hold_folder(pipeline.state))
        queries, ledger = describe_queries(pipeline), declared_books(pipeline)
        queries |= describe_ended(pipeline)
        for each in queries.values():
            _ = each.public  # worked out before the first request, and wrong ones refused
        reader = stack.enter_context(contextlib.closing(ReleaseReader(store_folder(pipeline))))
        hub = Hub(
            reader,
            grid=settings.grid,
            most_clients=settings.clients,
            most_per_address=settings.clients_per_address,
        )
        supervisor = Supervisor(
            path=pipeline.path,
            engine=pipeline.engine["name"],
            anyway=settings.anyway,
            take_over=settings.take_over,
            who=settings.who,
            kept=settings.kept,
            not_reloaded=settings.not_reloaded,
            say=say,
        )
        alerts = Alerts(
            alerts=pipeline.alerts if settings.run else (),
            queries=queries,
            hub=hub,
            folder=store_folder(pipeline),
        )
        public = PublicSide(
            queries=queries,
            hub=hub,
            ledger=ledger,
            rate=settings.rate,
            framed_by=settings.framed_by,
            refused=supervisor.refused,
        )
        operator = OperatorSide(
            pipeline=pipeline,
            token=token,
            analysts=analysts or {},
            supervisor=supervisor,
            hub=hub,
            alerts=alerts,
            most_body=settings.most_body,
            most_decoded=settings.most_decoded,
            takes_rows=settings.run,
        )
        places = {
            "--port": (settings.host, settings.port),
            "--operator-port": (settings.operator_host, settings.operator_port),
        }
        sockets = [
            stack.enter_context(bound_socket(*place, option)) for option, place in places.items()
        ]
        named = zip(("port", "operator_port"), sockets, strict=True)
        ports = {name: each.getsockname()[1] for name, each in named}
        scheme = "https" if settings.certificate is not None else "http"
        hosts = (settings.host, settings.operator_host)
        addresses = [
            _address(scheme, host, each) for host, each in zip(hosts, sockets, strict=True)
        ]
        flight: Callable[[], Any] | None = None
        if settings.flight_port is not None:
            side = optional("dpstream.serve.flight", extra="serve", who="--flight").FlightSide
            with bound_socket(settings.host, settings.flight_port, "--flight") as probe:
                place = settings.host, probe.getsockname()[1]
            flight = partial(
                side,
                place,
                queries=queries,
                reader=reader,
                token=settings.flight_token,
                certificate=settings.certificate,
                key=settings.key,
                rate=settings.rate,
            )
            addresses.append(side.address_of(place, encrypted=settings.certificate is not None))
            ports |= {"flight_port": place[1]}
        stack.enter_context(throttled("uvicorn.error", "dpstream.serve"))
        _allow_open_files(2 * settings.connections)
        apps = [public.app(), operator.app()]
        with asyncio.Runner(loop_factory=_Loop) as runner:
            begun = partial(tell, *addresses)
            runner.run(_serve(apps, flight, hub, alerts, settings, sockets, supervisor, begun))
        if not supervisor.to_reload.is_set():
            return None
        return replace(settings, **ports, take_over=False, kept=None, not_reloaded=None)


def check_pipes(pipeline: Pipeline) -> None:
    """Refuse standard input and output: the server itself talks to the run over them."""
    sources = [each for feed in pipeline.feeds.values() for each in (feed.source, feed.history)]
    for given, what in ((sources, "source"), (pipeline.sinks, "sink")):
        if "-" in given:
            raise InvalidParameter(
                f"{pipeline.path}: the {what} '-' cannot be served: the run's process has no "
                "terminal; name a file or a directory, or use dpstream run"
            )


async def _serve(
    apps: list[ASGIApp],
    flight: Callable[[], Any] | None,
    hub: Hub,
    alerts: Alerts,
    settings: Settings,
    sockets: list[socket.socket],
    supervisor: Supervisor,
    ready: Callable[[], None],
) -> None:
    """Listen once the pipeline has been let in; what is refused at its start is raised."""
    servers = [_Quiet(_config(app, settings)) for app in apps]

    def leave(for_good: bool) -> None:
        if for_good:
            supervisor.to_reload.clear()
            reloading.cancel()
        hub.shut()
        for each in servers:
            each.should_exit = True

    async with contextlib.AsyncExitStack() as stack:
        if settings.run:
            await stack.enter_async_context(supervisor.running())
        await stack.enter_async_context(alerts.running())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, leave, True)
        hangups: set[asyncio.Task[Any]] = set()  # a task that nobody holds may vanish
        loop.add_signal_handler(
            signal.SIGHUP, lambda: hangups.add(loop.create_task(supervisor.reload()))
        )
        reloading = loop.create_task(_leave_to_reload(supervisor, leave))
        for one in sockets:
            one.listen(1024)
        if flight is not None:
            await asyncio.to_thread(hub.reader.look)  # what is there is there from the start
            stack.push_async_callback(asyncio.to_thread, flight().leave)
        ready()
        await asyncio.gather(
            *(each.serve(sockets=[one]) for each, one in zip(servers, sockets, strict=True))
        )


async def _leave_to_reload(supervisor: Supervisor, leave: Callable[[bool], None]) -> None:
    await supervisor.to_reload.wait()
    leave(False)


class _Loop(asyncio.SelectorEventLoop):
    """A loop whose clients have little time to agree on a key, too."""

    async def create_server(self, *args: Any, **more: Any) -> Any:
        """As always."""
        if more.get("ssl") is not None:
            more["ssl_handshake_timeout"] = HEAD_SECONDS
        return await super().create_server(*args, **more)


def _allow_open_files(wanted: int) -> None:
    """Connections are files: this process may open as many as it may at all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _config(app: ASGIApp, settings: Settings) -> uvicorn.Config:
    most = settings.connections
    per_address = most if settings.behind_proxy else settings.clients_per_address + 100
    limits = Connections(most=most, per_address=per_address)
    return uvicorn.Config(
        app,
        http=partial(LimitedConnection, limits=limits),  # type: ignore[arg-type]
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,  # its warnings go where those of this process go
        log_level="warning",
        server_header=False,
        proxy_headers=settings.behind_proxy,
        timeout_graceful_shutdown=_LEAVING,
        ssl_certfile=settings.certificate,
        ssl_keyfile=settings.key,
    )


class _Quiet(uvicorn.Server):
    """A server that leaves signals to its caller, which runs two of them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing is captured."""
        yield


def _address(scheme: str, host: str, bound: socket.socket) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{bound.getsockname()[1]}"
