"""What is kept of each unit's rows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """At most `rows` rows and `groups` groups of a unit, `rows_per_group` rows in each group."""

    rows: int
    groups: int
    rows_per_group: int
