"""The chart, linted, rendered and validated offline."""

import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
CHART = ROOT / "deploy" / "helm" / "dpstream"
TOOLS = ROOT / ".cache" / "deploy"
KUBERNETES = "1.33"
PIPELINE = f"pipeline={ROOT / 'deploy' / 'compose' / 'pipeline.toml'}"
LEAST = {"operatorToken": {"existingSecret": "token"}}
EVERYTHING = LEAST | {
    "ingress": {"enabled": True, "host": "stats.example.org", "tlsSecret": "tls", "className": "x"},
    "prometheus": {"serviceMonitor": True, "rules": True},
    "persistence": {"storageClass": "fast", "keep": False},
    "environmentFrom": [{"secretRef": {"name": "servers"}}],
}

pytestmark = pytest.mark.deploy_all


def helm(tmp_path, *command, values=None, code=0):
    """What helm wrote to standard output."""
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(values or {}))
    home = {f"HELM_{name}_HOME": str(tmp_path / name) for name in ("CACHE", "CONFIG", "DATA")}
    finished = subprocess.run(
        [TOOLS / "bin" / "helm", *command, "--kube-version", KUBERNETES, "-f", path],
        env={"PATH": "/usr/bin:/bin", **home},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == code, finished.stdout + finished.stderr
    return finished.stdout + (finished.stderr if code else "")


@pytest.mark.parametrize("values", [LEAST, EVERYTHING], ids=["least", "everything"])
def test_the_chart_is_linted_rendered_and_validated(tmp_path, values):
    """Against the schemas of a Kubernetes, strictly; objects of others' definitions are named."""
    helm(tmp_path, "lint", "--strict", CHART, "--set-file", PIPELINE, values=values)
    text = helm(tmp_path, "template", "demo", CHART, "--set-file", PIPELINE, values=values)
    (tmp_path / "all.yaml").write_text(text)

    check = [TOOLS / "venv" / "bin" / "kubernetes-validate", "--strict", "-k", KUBERNETES]
    finished = subprocess.run([*check, tmp_path / "all.yaml"], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    objects = {one["kind"]: one for one in yaml.safe_load_all(text) if one}
    unknown = (finished.stdout + finished.stderr).count("Couldn't find schema")
    assert unknown == len({"ServiceMonitor", "PrometheusRule"} & set(objects))

    pod = objects["StatefulSet"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert objects["StatefulSet"]["spec"]["replicas"] == 1
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    if values is EVERYTHING:
        rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())
        assert objects["PrometheusRule"]["spec"] == rules


def test_a_broken_chart_is_noticed(tmp_path):
    """The test above can fail: a field that there is not."""
    text = helm(tmp_path, "template", "demo", CHART, "--set-file", PIPELINE, values=LEAST)
    (tmp_path / "all.yaml").write_text(text.replace("serviceName:", "serviceNam:"))

    check = [TOOLS / "venv" / "bin" / "kubernetes-validate", "--strict", "-k", KUBERNETES]
    assert subprocess.run([*check, tmp_path / "all.yaml"], capture_output=True).returncode != 0


def test_what_is_missing_is_said(tmp_path):
    """A pipeline, and a token."""
    assert "pipeline must be" in helm(tmp_path, "template", "demo", CHART, values=LEAST, code=1)
    assert "existingSecret must name" in helm(
        tmp_path, "template", "demo", CHART, "--set-file", PIPELINE, code=1
    )
