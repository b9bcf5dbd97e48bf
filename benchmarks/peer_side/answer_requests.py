"""Answer requests, one JSON line each, with the functions of the script named on the command line.

The script defines `PACKAGES` (whose versions are told) and `answer(request) -> dict`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import runpy
import sys
from typing import Any


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Package -> version, for those that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main(script: str) -> None:
    """Read requests until the pipe closes."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not mix with the answers
    names = runpy.run_path(script)
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        try:
            if request.get("versions"):
                reply: dict[str, Any] = {"versions": versions(names["PACKAGES"])}
            else:
                reply = names["answer"](request)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
