"""A release of the package that changes no compiled function compiles none."""

import pytest

from benchmarks import startup


@pytest.mark.bench
@pytest.mark.timeout(300)  # 10 s on an idle machine
def test_an_upgrade_finds_the_machine_code_of_before():
    """The package at another path, with other line numbers."""
    found = startup.measure(quick=True, progress=lambda *_: None)
    rows = {row["start"]: row for row in found.rows}

    assert rows["first release, cold"]["compiled"] > 10
    assert rows["first release, warm"]["compiled"] == 0
    assert rows["first release, upgraded"]["compiled"] == 0
    assert "numba" in {row.get("package") for row in found.rows}
