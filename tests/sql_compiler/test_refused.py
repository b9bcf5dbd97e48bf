"""What would break the promise, or is not understood, is refused where it stands."""

import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import dpstream as dps
from dpstream.errors import InvalidParameter
from dpstream.sql_compiler import compile_sql
from dpstream.sql_compiler.compile_sql import RULES

FIXTURES = Path(__file__).parent / "fixtures"
PRIVATE = (
    "WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 1, delta = 1e-9, privacy_unit_column = user_id, "
    "max_groups_contributed = 4)"
)


def cases(name):
    """(query, {fact: value}) of each query in a fixture."""
    text = (FIXTURES / name).read_text()
    for block in re.split(r"\n\s*\n", text):
        lines = [line for line in block.splitlines() if line.strip()]
        query = "\n".join(line for line in lines if not line.startswith("--"))
        facts = dict(re.findall(r"^-- (\w+): (.*)$", block, re.MULTILINE))
        if query:
            yield query.rstrip(";").replace("@private", PRIVATE), facts


REFUSED = list(cases("refused.sql"))


def under_carets(message):
    """The text that is underlined, line after line."""
    lines, found = message.splitlines(), []
    for above, below in pairwise(lines):
        if re.fullmatch(r" +\^+", below):
            found.append(above[below.index("^") : len(below)])
    return "\n".join(found)


@pytest.mark.parametrize(("query", "facts"), REFUSED, ids=lambda item: str(item)[:60])
def test_refused(query, facts):
    """With the reason, the place and a fix."""
    with pytest.raises(InvalidParameter) as refused:
        compile_sql(query)

    message = str(refused.value)
    assert facts["because"] in message
    assert "\nfix: " in message
    if "at" in facts:
        assert under_carets(message) == facts["at"]


def test_carets_stand_under_their_line():
    """A span over lines is underlined on each; tabs do not move it."""
    with pytest.raises(InvalidParameter) as refused:
        compile_sql(
            f"SELECT {PRIVATE}\n\tpage,\n"
            "\tSUM(seconds,\n\t    quantum => 1) AS s FROM t GROUP BY page"
        )

    assert str(refused.value).splitlines()[1:5] == [
        "  line 3:  SUM(seconds,",
        "           ^^^^^^^^^^^^",
        "  line 4:      quantum => 1) AS s FROM t GROUP BY page",
        "               ^^^^^^^^^^^^^",
    ]


CHECKS = [rule for rule in RULES if rule.__name__.startswith(("require_", "refuse_", "choose_"))]


@pytest.mark.parametrize("rule", CHECKS, ids=lambda rule: rule.__name__)
def test_every_check_is_needed(rule, monkeypatch):
    """Without it some query of the fixture would pass, or be refused for another reason."""
    others = tuple(each for each in RULES if each is not rule)
    monkeypatch.setattr(sys.modules[compile_sql.__module__], "RULES", others)

    def missed(query, facts):
        try:
            compile_sql(query)
        except Exception as error:
            return facts["because"] not in str(error)
        return True

    assert any(missed(query, facts) for query, facts in REFUSED)


def test_there_are_many():
    """The list of refusals is long enough to be worth reading."""
    assert len(REFUSED) >= 60


def test_rows_given_instead_of_a_name_are_refused():
    """As a table of tables, the way other libraries take them."""
    with pytest.raises(InvalidParameter, match="rows are given to"):
        dps.sql("SELECT 1", {"log": [1, 2]})
