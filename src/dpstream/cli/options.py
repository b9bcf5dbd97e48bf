"""Options that several commands share: who pays, and with which secret."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

BUDGET = "Budget and repetition"

SecretFile = Annotated[
    Path | None,
    typer.Option(
        envvar="DPSTREAM_SECRET_FILE",
        help="Secret file, created on first use.",
        rich_help_panel=BUDGET,
    ),
]
SharedLedger = Annotated[
    Path | None,
    typer.Option(
        envvar="DPSTREAM_LEDGER", help="Ledger file that others share.", rich_help_panel=BUDGET
    ),
]
Payer = Annotated[str, typer.Option(help="Whose book in the ledger pays.", rich_help_panel=BUDGET)]
