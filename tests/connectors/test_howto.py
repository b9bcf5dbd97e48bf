"""The connector that the how-to builds passes the suites that it shows."""

from doctest import DocTestParser
from pathlib import Path

HOWTO = Path(__file__).parents[2] / "docs/howto/connector.md"


def shown():
    """What the how-to imports and defines; its other examples run as documentation."""
    found = {"__name__": __name__}
    for example in DocTestParser().get_examples(HOWTO.read_text()):
        if example.source.startswith(("import ", "from ", "class ")):
            exec(example.source, found)
    return found


TestSqliteRows, TestJsonFiles = (shown()[name] for name in ("TestSqliteRows", "TestJsonFiles"))
