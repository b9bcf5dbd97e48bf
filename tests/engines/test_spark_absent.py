"""Without Spark or Java: everything else works, and whoever asks is told what to install."""

import subprocess
import sys

import pytest

from dpstream.engines.spark import SparkEngine, local_session
from dpstream.engines.spark.engine import require_java
from dpstream.errors import MissingDependency
from dpstream.privacy.query_spend import LentKeys
from dpstream.privacy.state import Secret
from dpstream.stages.rows import RowKeys


def test_nothing_imports_pyspark_unasked():
    """The package, its session and its command line work where there is none."""
    code = "import sys; sys.modules['pyspark'] = None\nimport dpstream.cli.app, dpstream.session\n"
    code += "import dpstream.engines.spark.run, dpstream.engines.spark.tasks"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_pyspark(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(MissingDependency, match=r"pip install 'dpstream\[spark\]'"):
        SparkEngine(None)
    with pytest.raises(MissingDependency, match="needs PySpark"):
        local_session()


@pytest.mark.parametrize("home", [None, "/nowhere"])
def test_without_java(monkeypatch, home):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    if home is not None:
        monkeypatch.setenv("JAVA_HOME", home)
    with pytest.raises(MissingDependency, match="Spark needs Java 17 or 21, and there is no java"):
        require_java()


def test_keys_do_not_print_themselves():
    rows = RowKeys.of(Secret(bytes(range(32))), bytes(16))
    lent = LentKeys(run=bytes(16), query="q", step=0, keys={3: bytes(range(32))})

    assert "\\x" not in repr(rows)
    assert "keys" not in repr(lent)
