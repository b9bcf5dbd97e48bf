"""A real server, asked everything that its OpenAPI documents allow, and much that they don't."""

import os
import subprocess

import pytest

from tests.conftest import ROOT
from tests.support.pipelines import PUSHED, published, rows, write
from tests.support.served import served

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,"
CHECKS += "response_schema_conformance,unsupported_method,ignored_auth"


HOOKS = """
import json
import schemathesis

@schemathesis.serializer(
    "application/jsonl", "application/sql", "application/vnd.apache.arrow.stream"
)
def as_it_is(context, value):
    text = value if isinstance(value, str | bytes) else json.dumps(value)
    return text.encode("utf-8", "replace") if isinstance(text, str) else text
"""


def ask(folder, address, *more):
    """Run schemathesis against a side; its report."""
    (folder / "feed_bodies.py").write_text(HOOKS)
    environment = os.environ | {"PYTHONPATH": str(folder), "SCHEMATHESIS_HOOKS": "feed_bodies"}
    command = [ROOT / ".venv-serve/bin/schemathesis", "run", f"{address}/openapi.json", *more]
    command += ["--checks", CHECKS, "--seed", "1", "--max-examples", "15", "--no-color"]
    command += ["--wait-for-schema", "60", "--phases", "coverage,fuzzing"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)


@pytest.mark.serve
def test_no_request_to_the_public_side_fails(tmp_path):
    """Events do not end; they are followed in other tests."""
    pipeline = published(tmp_path / "p", rows(users=600))
    with served(pipeline.path, "--no-run", "--rate", "100000") as server:
        done = ask(tmp_path, server.public, "--exclude-path", "/api/events")

    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout


@pytest.mark.serve
def test_no_request_to_the_operator_side_fails(tmp_path):
    """With the token; without it every route refuses. A reload begins anew: `test_reload`."""
    path = write(tmp_path / "p", [], PUSHED)
    with served(path, "--no-run") as server:
        header = "Authorization: Bearer a token for tests alone"
        done = ask(tmp_path, server.operator, "--header", header, "--exclude-path", "/reload")

    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
