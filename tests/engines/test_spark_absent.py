"""Without Spark or Java: everything else works, and whoever asks is told what to install."""

import sys
from dataclasses import replace

import pytest

from dpstream.cli import main
from dpstream.engines.spark import SparkEngine, local_session
from dpstream.engines.spark.spark_engine import require_java
from dpstream.engines.spark.tasks import Keys
from dpstream.errors import InvalidInput, InvalidParameter, MissingDependency, SecretError
from dpstream.privacy.query_spend import WindowKeyGrant
from dpstream.privacy.state import Secret
from dpstream.rows.row_batch import RowKeys
from dpstream.session.pipeline import load_pipeline
from dpstream.session.start_pipeline import check_engine, with_engine
from tests.support.processes import run_python


def test_nothing_imports_pyspark_unasked():
    """The package, its session and its command line work where there is none."""
    code = "import sys; sys.modules['pyspark'] = None\nimport dpstream.cli.app, dpstream.session\n"
    code += "import dpstream.engines.spark.driver, dpstream.engines.spark.tasks"
    done = run_python(code)
    assert done.returncode == 0, done.stderr


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


ROWS = RowKeys.of(Secret(bytes(range(32))), bytes(16))
LENT = WindowKeyGrant(run=bytes(16), query="q", step=0, keys={3: bytes(range(100, 132))})


def test_keys_do_not_print_themselves():
    assert "\\x" not in repr(ROWS)
    assert "keys" not in repr(LENT)


def test_neither_half_of_the_keys_says_anything():
    """One is random, the other is sealed by it; two that do not belong together are refused."""
    keys = Keys(rows=ROWS, lent=LENT)
    opener, sealed = keys.seal()
    other, _ = keys.seal()

    assert Keys.unseal(opener, sealed) == keys
    for secret in (ROWS.units, ROWS.groups, LENT.keys[3]):
        for form in (secret, secret.hex().encode()):
            assert form not in opener + sealed
    assert opener != other
    with pytest.raises(SecretError, match="do not belong together"):
        Keys.unseal(other, sealed)


def test_engines_of_a_pipeline(tmp_path, monkeypatch, capsys):
    """A name that is none is refused, in the file and on the command line."""
    monkeypatch.chdir(tmp_path)
    for words in (["init"], ["run", "pipeline.toml", "--engine", "flink"]):
        with pytest.raises(SystemExit):
            main(words)
    assert "--engine must be one of embedded, spark; got 'flink'" in capsys.readouterr().err
    on_spark = with_engine(load_pipeline("pipeline.toml"), "spark")
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(MissingDependency, match="needs PySpark"):  # before a server listens
        check_engine(on_spark)
    posted = replace(on_spark, engine={"name": "embedded"}, pushed={"clicks": None})
    with pytest.raises(InvalidParameter, match="are read by the embedded engine"):
        with_engine(posted, "spark")
    with (tmp_path / "pipeline.toml").open("a") as file:
        file.write('\n[engine]\nname = "flink"\n')
    with pytest.raises(InvalidInput, match="name must be one of embedded, spark; got 'flink'"):
        load_pipeline("pipeline.toml")
