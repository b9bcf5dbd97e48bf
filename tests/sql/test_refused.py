"""What would break the promise, or is not understood, is refused where it stands."""

import re
from pathlib import Path

import pytest

from dpstream.errors import InvalidParameter
from dpstream.sql import compile_sql
from dpstream.sql.plan import RULES

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
    for above, below in zip(lines, lines[1:], strict=False):
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
            f"SELECT {PRIVATE}\n\tpage,\n\tSUM(seconds,\n\t    quantum => 1) AS s FROM log GROUP BY page"
        )

    assert str(refused.value).splitlines()[1:5] == [
        "  line 3:  SUM(seconds,",
        "           ^^^^^^^^^^^^",
        "  line 4:      quantum => 1) AS s FROM log GROUP BY page",
        "               ^^^^^^^^^^^^^",
    ]


def test_every_rule_can_be_broken_alone():
    """Each rule is a function with one line about it; no two have one name."""
    assert len({rule.__name__ for rule in RULES}) == len(RULES)
    assert all(rule.__doc__ for rule in RULES)


def test_there_are_many():
    """The list of refusals is long enough to be worth reading."""
    assert len(REFUSED) >= 60
