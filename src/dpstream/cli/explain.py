"""`dpstream explain`: what a query will do and cost, before it reads anything."""

from __future__ import annotations

from dpstream.cli.output import print_json
from dpstream.cli.statements import AsJson, Settings, Text, compiled_from
from dpstream.sql.explain import explain as explained


def explain(text: Text, settings: Settings = None, as_json: AsJson = False) -> None:
    """Explain a query: plan, sensitivity, noise, keys, budget, memory, what it leaves open."""
    found = explained(compiled_from(text, None, settings or []).query)
    if as_json:
        print_json(found.to_json())
    else:
        print(found.text())
