"""The files of deploy/, as far as they can be checked without a container, a cluster or systemd."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from dpstream.explanation import explain
from dpstream.serve.metrics import METRICS, exposition
from dpstream.session.pipeline import load_pipeline

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"
PROMTOOL = ROOT / ".cache" / "deploy" / "bin" / "promtool"
UNIT = DEPLOY / "systemd" / "dpstream@.service"


def done(*command, cwd=DEPLOY, code=0):
    """Run a program to its end; what it wrote."""
    finished = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True)
    assert finished.returncode == code, finished.stdout + finished.stderr
    return finished


def rules():
    """Every alert."""
    groups = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.mark.deploy
def test_promtool_accepts_the_rules_and_the_configuration(tmp_path):
    """And its tests of them pass: all alerts fire when they should, none when all is well."""
    shutil.copytree(DEPLOY / "prometheus", tmp_path / "p")
    (tmp_path / "p" / "operator.token").write_text("x")

    done(PROMTOOL, "check", "rules", "alerts.yml", cwd=tmp_path / "p")
    done(PROMTOOL, "check", "config", "prometheus.yml", cwd=tmp_path / "p")
    done(PROMTOOL, "test", "rules", "alerts_test.yml", cwd=tmp_path / "p")


@pytest.mark.deploy
def test_promtool_notices_an_alert_that_does_not_fire(tmp_path):
    """The test above can fail."""
    shutil.copytree(DEPLOY / "prometheus", tmp_path / "p")
    path = tmp_path / "p" / "alerts.yml"
    text = path.read_text()
    path.write_text(text.replace("dpstream_query_failed == 1", "dpstream_query_failed > 1"))

    done(PROMTOOL, "test", "rules", "alerts_test.yml", cwd=tmp_path / "p", code=1)


@pytest.mark.deploy
def test_promtool_accepts_what_is_exposed():
    """Names, types and help of every metric, as the server writes them."""
    samples = [(name, {"query": 'a"\\\n'}, 1.5) for name in METRICS]
    finished = subprocess.run(
        [PROMTOOL, "check", "metrics"], input=exposition(samples), capture_output=True, text=True
    )

    assert finished.returncode in (0, 3), finished.stderr  # 3: opinions about names
    assert "error" not in finished.stderr.lower()


def test_alerts_ask_for_metrics_that_there_are():
    """A metric that was renamed would make an alert that never fires."""
    asked = {name for rule in rules() for name in re.findall(r"dpstream_(\w+)", rule["expr"])}

    assert asked <= set(METRICS)
    assert len(asked) > 12


def test_every_alert_is_explained():
    """The page about monitoring has a line for each, and no other."""
    page = (ROOT / "docs" / "monitoring.md").read_text()

    named = re.findall(r"^\| `(Dpstream\w+)` \|", page, re.MULTILINE)
    assert named == [rule["alert"] for rule in rules()]


def test_every_metric_is_explained():
    """By its name."""
    page = (ROOT / "docs" / "monitoring.md").read_text()

    assert [name for name in METRICS if f"`dpstream_{name}`" not in page] == []


@pytest.fixture
def systemd_root(tmp_path):
    """A root with systemd's own units, ours, and programs to start."""
    shutil.copytree("/usr/lib/systemd/system", tmp_path / "usr/lib/systemd/system", symlinks=True)
    (tmp_path / "lib").symlink_to("usr/lib")
    for folder in ("etc/systemd/system", "opt/dpstream/bin", "bin", "var/lib"):
        (tmp_path / folder).mkdir(parents=True)
    for program in (tmp_path / "opt/dpstream/bin/dpstream", tmp_path / "bin/sh"):
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    shutil.copy(UNIT, tmp_path / "etc/systemd/system")
    return tmp_path


@pytest.mark.deploy
def test_systemd_takes_the_unit_without_a_word(systemd_root):
    """And finds it well protected: 1.4, where 0 is safest and 10 is none."""
    check = ("systemd-analyze", f"--root={systemd_root}", "--no-pager")
    name = "dpstream@clicks.service"

    said = done(*check, "--man=no", "--recursive-errors=no", "verify", name)
    assert said.stderr == said.stdout == ""
    done(*check, "security", "--offline=yes", "--threshold=15", name)
    done(*check, "security", "--offline=yes", "--threshold=10", name, code=1)


@pytest.mark.deploy
def test_systemd_notices_a_wrong_unit(systemd_root):
    """The test above can fail."""
    path = systemd_root / "etc/systemd/system" / UNIT.name
    path.write_text(path.read_text().replace("ProtectSystem=", "ProtectSytem="))

    check = ("systemd-analyze", f"--root={systemd_root}", "--man=no", "--recursive-errors=no")
    said = done(*check, "verify", "dpstream@clicks.service", code=1)
    assert "Unknown key 'ProtectSytem'" in said.stderr


def test_the_unit_starts_again_only_what_another_start_may_mend():
    """Exit codes of the command line that need a hand are left alone."""
    [codes] = re.findall(r"^RestartPreventExitStatus=(.*)$", UNIT.read_text(), re.MULTILINE)

    assert codes.split() == ["2", "3", "4", "5"]


def test_the_composed_pipeline_can_be_planned():
    """Its queries compile, and fit into its book."""
    pipeline = load_pipeline(DEPLOY / "compose" / "pipeline.toml")

    [book] = pipeline.books
    assert [query.name for query in book.queries] == ["pages"]
    assert sum(query.epsilon for query in book.queries) <= book.terms().epsilon
    assert "visitors" in explain(book.queries[0]).text()


def test_the_composed_services_are_closed():
    """dpstream has no rights; no port is open to others, and the operator's to nobody outside."""
    content = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
    services = content["services"]
    ours = services["dpstream"]

    assert set(services) == {"dpstream", "kafka", "postgres", "prometheus"}
    assert ours["read_only"] is True
    assert ours["cap_drop"] == ["ALL"]
    assert ours["security_opt"] == ["no-new-privileges:true"]
    ports = [port for one in services.values() for port in one.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert not any(port.endswith(":8001") for port in ports)
    mounts = [mount for one in services.values() for mount in one.get("volumes", [])]
    files = [mount.split(":")[0] for mount in mounts if mount.startswith(".")]
    assert [name for name in files if not (DEPLOY / "compose" / name).exists()] == []
    assert all(mount.endswith(":ro") for mount in mounts if mount.startswith("."))


def test_the_versions_of_the_chart_are_ours():
    """A chart of another version would start another image."""
    chart = yaml.safe_load((DEPLOY / "helm" / "dpstream" / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

    assert chart["version"] == chart["appVersion"] == version
