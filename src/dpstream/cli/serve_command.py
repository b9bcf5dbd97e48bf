"""`dpstream serve`: run a pipeline, and show what it publishes on a page and in a feed."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Annotated, Any

from typer import Argument, Option

from dpstream.cli.command_options import (
    Anyway,
    Asker,
    Collector,
    LogFormat,
    LogLevel,
    TakeOver,
    TokenFile,
)
from dpstream.cli.output import note, note_counts, use_log
from dpstream.connectors.storage import safe_name
from dpstream.errors import DpstreamError, InvalidParameter, MissingDependency
from dpstream.privacy.state.durable_files import make_directory
from dpstream.privacy.state.mirrors import mirror_of
from dpstream.serve.otel import VARIABLE, check_collector
from dpstream.session.change_plan import drop_unbegun
from dpstream.session.pipeline import load_pipeline
from dpstream.session.start_pipeline import (
    check_engine,
    keep_pipeline,
    load_current,
    with_engine,
    without_ended,
)

_Public = partial(Option, rich_help_panel="Public side")
_Operator = partial(Option, rich_help_panel="Operator side")


def serve(
    path: Annotated[Path, Argument(metavar="PIPELINE", help="A pipeline.toml file.")],
    host: Annotated[str, _Public(help="Where the public side listens.")] = "127.0.0.1",
    port: Annotated[int, _Public(min=0, max=65535, help="Its port; 0: any.")] = 8000,
    flight: Annotated[
        int | None,
        _Public(
            "--flight",
            min=0,
            max=65535,
            metavar="PORT",
            help="Give releases by Arrow Flight, too, at this port of the public side; 0: any.",
        ),
    ] = None,
    flight_token: Annotated[
        Path | None,
        _Public(
            "--flight-token-file",
            help="Whoever asks for flights needs the token in this file, which is made if it is "
            "not there; without it they are as open as the feed.",
        ),
    ] = None,
    operator_host: Annotated[str, _Operator(help="Where the operator side listens.")] = "127.0.0.1",
    operator_port: Annotated[int, _Operator(min=0, max=65535, help="Its port; 0: any.")] = 8001,
    token_file: TokenFile = None,
    analysts: Annotated[
        list[str] | None,
        _Operator(
            "--analyst",
            metavar="NAME",
            help="May ask for queries, within their share, with the token analysts/NAME.token in "
            "the state directory, which is made; may be repeated.",
        ),
    ] = None,
    tls_cert: Annotated[Path | None, Option(help="Certificate, for https on both sides.")] = None,
    tls_key: Annotated[Path | None, Option(help="Its key.")] = None,
    allow_plain_http: Annotated[
        bool, Option("--allow-plain-http", help="Listen where others can reach it without https.")
    ] = False,
    behind_proxy: Annotated[
        bool,
        Option(
            "--behind-proxy", help="Count requests by X-Forwarded-For, which a proxy here sets."
        ),
    ] = False,
    no_run: Annotated[
        bool, Option("--no-run", help="Show what was published, without running it.")
    ] = False,
    grid: Annotated[
        float, Option(min=0.05, max=3600, help="Releases appear on a grid of so many seconds.")
    ] = 1.0,
    rate: Annotated[float, _Public(min=1, help="Requests a second of one address.")] = 200.0,
    framed_by: Annotated[
        list[str] | None,
        _Public(
            metavar="ORIGIN",
            help="Pages of this origin, such as https://example.org, may show charts in a frame; "
            "may be repeated.",
        ),
    ] = None,
    clients: Annotated[int, _Public(min=1, help="The most that follow the events.")] = 1000,
    clients_per_address: Annotated[int, _Public(min=1, help="The same for one address.")] = 100,
    max_body: Annotated[int, _Operator(min=1, help="The most bytes in one post.")] = 16 << 20,
    max_decoded: Annotated[
        int, _Operator(min=1, help="The most bytes that one post takes when it is decoded.")
    ] = 128 << 20,
    engine: Annotated[
        str | None, Option("--engine", help="embedded or spark; default: the file's.")
    ] = None,
    who: Asker = "",
    take_over: TakeOver = False,
    otel: Collector = None,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
    anyway: Anyway = False,
    as_lines: Annotated[bool, Option("--json", help="Print the addresses as JSON.")] = False,
) -> None:
    """Run a pipeline and serve its releases: a page, a feed, and a side for the operator."""
    use_log(log_format, log_level)
    if (tls_cert is None) != (tls_key is None):
        raise InvalidParameter("--tls-cert and --tls-key go together; give both")
    if flight_token is not None and flight is None:
        raise InvalidParameter("--flight-token-file says who may ask at --flight PORT; give both")
    server = _needed()
    check_collector(otel, plain_http=allow_plain_http)
    if otel is not None:
        os.environ[VARIABLE] = otel  # for the run's process
    load = load_pipeline if no_run else load_current
    pipeline = with_engine(load(path), engine).asked_by(who)
    settings = server.Settings(
        host=host,
        port=port,
        operator_host=operator_host,
        operator_port=operator_port,
        flight_port=flight,
        flight_token=None if flight_token is None else server.read_token(flight_token),
        certificate=tls_cert,
        key=tls_key,
        plain_http=allow_plain_http,
        behind_proxy=behind_proxy,
        run=not no_run,
        anyway=anyway,
        take_over=take_over,
        who=who,
        grid=grid,
        rate=rate,
        framed_by=tuple(framed_by or ()),
        clients=clients,
        clients_per_address=clients_per_address,
        most_body=max_body,
        most_decoded=max_decoded,
    )
    settings.check()
    if (mirror := mirror_of(pipeline.state)) is not None:
        raise InvalidParameter(
            f"{path}: dpstream serve keeps what the page shows in the state directory, and "
            f"{mirror.place} is in a bucket; run it there with dpstream run and a sink, or name a "
            "directory in [state] and keep sources, sinks and ledger in the bucket"
        )
    for words in pipeline.remarks:
        note(words)
    if settings.run:
        check_engine(pipeline)
        server.check_pipes(pipeline)
    first = not no_run and not pipeline.secret.exists()
    make_directory(pipeline.state, mode=0o700)
    token = server.load_token(token_file or pipeline.state / "operator.token")

    def tell(public: str, operator: str, flights: str | None = None) -> None:
        if as_lines:
            about = {"public": public, "operator": operator, "token": token.source}
            print(json.dumps(about | ({"flight": flights} if flights else {})), flush=True)
            return
        print(f"page and feed: {public}/", flush=True)
        if flights:
            print(f"flights: {flights}", flush=True)
        note(f"operator: {operator}/health, with the token from {token.source}; Ctrl-C stops")
        if first:
            note(
                f"the secret is {pipeline.secret}; back it up: without it the pipeline cannot go on"
            )

    told = {"analysts": _tokens(server, analysts or [], pipeline.state), "say": note_counts}
    again, before = settings, None
    while again is not None:
        begun = Event()

        def began(*places: str, first: bool = before is None, begun: Event = begun) -> None:
            begun.set()
            if first:
                tell(*places)

        try:
            pipeline = with_engine(load(path), engine).asked_by(who)
            again = server.serve(pipeline, again, token, tell=began, **told)
        except (DpstreamError, OSError) as problem:
            if begun.is_set():
                raise
            if gone := [] if no_run else drop_unbegun(pipeline.state):
                words = f"{', '.join(gone)}, asked for by an analyst, cannot begin: {problem}"
                note(f"{words}; taken away again, and nothing was charged", level=logging.ERROR)
                continue
            if before is None:
                raise
            note(f"{path} is not taken up, and what ran goes on: {problem}", level=logging.ERROR)
            with TemporaryDirectory() as folder:
                kept = Path(folder) / "pipeline.json"
                keep_pipeline(before, kept)
                pipeline = without_ended(before)
                why = {"error": type(problem).__name__, "message": str(problem)}
                again = replace(again, kept=kept, not_reloaded=why)
                again = server.serve(pipeline, again, token, tell=began, **told)
        before = pipeline
        if again is not None:
            note(f"{path} is taken up anew")
    note("stopped" if no_run else "stopped; the same command again goes on from here")


def _tokens(server: Any, analysts: list[str], state: Path) -> dict[str, Any]:
    """The token of each analyst, made on first use."""
    folder, tokens = state / "analysts", {}
    for name in analysts:
        make_directory(folder, mode=0o700)
        tokens[name] = server.read_token(folder / f"{safe_name(name)}.token")
        note(f"the token of the analyst {name!r} is {tokens[name].source}")
    return tokens


def _needed() -> Any:
    """The server, which needs an extra."""
    for module in ("starlette", "uvicorn"):
        if find_spec(module) is None:
            raise MissingDependency(
                f"dpstream serve needs {module}, which is not installed; install it with: "
                "pip install 'dpstream[serve]'"
            )
    return import_module("dpstream.serve.server")
