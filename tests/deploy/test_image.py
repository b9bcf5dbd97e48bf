"""The image, built from a Debian root without pulling, and run read-only without rights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
IMAGE = "localhost/dpstream:test"
VOLUME = "dpstream-test"
# What a service has: nothing but its volume.
CLOSED = (
    "--rm", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL",
    "--security-opt", "no-new-privileges", "--network", "none",
    "--ulimit", "nofile=1024:2048", "--ulimit", "nproc=512:512",
)  # fmt: skip

pytestmark = [pytest.mark.deploy_all, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def podman():
    """`podman("run", ...)` in a closed container, with a volume of its own; what it wrote."""
    build = [ROOT / "deploy" / "container" / "build", "--root", IMAGE]
    isolated = os.environ | {"PYTHON": sys.executable, "BUILDAH_ISOLATION": "chroot"}
    subprocess.run(build, check=True, env=isolated)

    def run(*args, volume=VOLUME, entrypoint="dpstream"):
        mount = ("-v", f"{volume}:/var/lib/dpstream:U", "--entrypoint", entrypoint)
        command = ["podman", "--runtime", "runc", "run", *CLOSED, *mount, IMAGE, *args]
        return subprocess.run(command, capture_output=True, text=True)

    yield run
    subprocess.run(["podman", "volume", "rm", "--force", VOLUME], capture_output=True)
    subprocess.run(["podman", "rmi", "--force", IMAGE], capture_output=True)


def test_a_pipeline_runs_in_a_closed_container(podman):
    """Releases and state are in the volume; run again it publishes nothing twice."""
    assert podman("init", "/var/lib/dpstream").returncode == 0
    first = podman("run", "/var/lib/dpstream/pipeline.toml", "--json")
    assert first.returncode == 0, first.stderr
    lines = [json.loads(line) for line in first.stdout.splitlines()]
    assert lines[-1]["finished"] is True
    assert len(lines) == 24 + 4 + 1
    logged = [json.loads(line) for line in first.stderr.splitlines()]
    assert sum(line["message"] == "released" for line in logged) == 28

    again = podman("run", "/var/lib/dpstream/pipeline.toml", "--json")
    assert len(again.stdout.splitlines()) == 1
    assert json.loads(again.stdout)["new_charges"] == 0


def test_the_container_has_no_rights(podman):
    """No capability, no way to more, no root, and a root file system that cannot be written."""
    told = podman("-c", "id -u; grep -E 'CapEff|CapBnd|NoNewPrivs' /proc/self/status; touch /x",
                  entrypoint="/bin/sh")  # fmt: skip

    assert told.stdout.split() == [
        "10001", "CapEff:", "0" * 16, "CapBnd:", "0" * 16,
        "NoNewPrivs:", "1",
    ]  # fmt: skip
    assert "Read-only file system" in told.stderr
