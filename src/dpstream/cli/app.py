"""The command tree."""

from __future__ import annotations

from typing import Annotated

import typer

import dpstream
from dpstream.cli import (
    audit,
    bench,
    bounds,
    compare,
    demo,
    explain,
    init,
    ledger,
    mechanisms,
    release,
    run,
    serve,
    sql,
)
from dpstream.cli.exits import epilog

app = typer.Typer(
    name="dpstream",
    help="Publish statistics from live streams under differential privacy.",
    epilog=epilog(),
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("init")(init.init)
app.command("run")(run.run)
app.command("serve")(serve.serve)
app.command("sql")(sql.sql)
app.command("explain")(explain.explain)
app.command("bounds")(bounds.bounds)
app.command("release")(release.release)
app.command("compare")(compare.compare)
app.command("mechanisms")(mechanisms.mechanisms)
app.add_typer(ledger.app, name="ledger")
app.command("demo")(demo.demo)
app.command("audit")(audit.audit)
app.command("bench")(bench.bench)


@app.callback()
def start(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Publish statistics from live streams under differential privacy."""
    if version:
        print(f"dpstream {dpstream.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
