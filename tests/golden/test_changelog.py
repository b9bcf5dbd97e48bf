"""A change of the golden corpus is a change of what is published: CHANGELOG.md says why."""

import re

from tests.golden.corpus import CHANGELOG, short_digest
from tests.golden.mechanisms import CASES as MECHANISMS
from tests.golden.queries import CASES as QUERIES


def test_the_changelog_says_why_the_corpus_is_as_it_is():
    """A line "Golden corpus: <12 digits>: reason" names the corpus that is stored."""
    told = re.findall(r"^- Golden corpus: (\w{12}): \S.{9,}$", CHANGELOG.read_text("utf-8"), re.M)

    assert short_digest() in told, (
        "tests/golden/digests.json has changed; if what is published was meant to change, add to "
        f"CHANGELOG.md: - Golden corpus: {short_digest()}: <the reason, for users>"
    )


def test_the_corpus_has_the_cases_and_no_others(golden):
    """A case that is gone leaves no digest behind."""
    assert golden.stored.keys() == {
        *(f"mechanism/{name}" for name in MECHANISMS),
        *(f"query/{name}" for name in QUERIES),
        "rows/sent",
    }
